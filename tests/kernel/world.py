"""A budget of $0.055, a seller who takes a cent and loses his answer, and one faulty change in between."""

import itertools
from contextlib import suppress

import httpx

import x402guard.kernel.ledger as kernel_ledger
from tests.support.merchant import Shop, client, make_guard, open_terms, required, upto
from x402guard import Policy
from x402guard.errors import IllegalTransition, SignerError, X402GuardError
from x402guard.ledger.view import Scope

LIMIT_ATOMIC = 55_000
BUDGET = "$0.055"


class World:
    """One guard, one session, one seller; what the kernel refuses is noted with its rule."""

    def __init__(
        self, monkeypatch, url, *, day=False, session=BUDGET, wallet=BUDGET, terms=open_terms, signs=None, exposure=None
    ):
        self.rules, self.patch = [], monkeypatch
        self.may_sign = LIMIT_ATOMIC if signs is None else signs * 10_000
        check = kernel_ledger.check

        def noted(*given):
            try:
                check(*given)
            except IllegalTransition as error:
                self.rules.append(error.rule)
                raise

        monkeypatch.setattr(kernel_ledger, "check", noted)
        policy = Policy(
            breaker=None, loop=None, velocity=None, **({} if exposure is None else {"reorg_exposure": exposure})
        )
        self.guard = make_guard(
            url, unsafe_no_chain=True, policy=policy, **({} if wallet is None else {"budget": wallet})
        )
        self.day = self.guard.budget("customer", BUDGET, per="day") if day else None
        self.session = (self.day or self.guard).session("s", budget=session)
        self.shop = Shop(terms=terms, paid=httpx.ReadError("the answer is lost"))
        self.http = client(self.session, self.shop)
        self._numbers = itertools.count()

    @property
    def store(self):
        return self.guard.shell.store

    def buy(self, times=20, path=None):
        """Try to buy that often, each time something else but for a *path*."""
        for _ in range(times):
            try:
                self.http.get(f"https://shop.example/{path or next(self._numbers)}")
            except SignerError as error:
                self.rules.append(next((rule for rule in ("worth",) if f"rule '{rule}'" in str(error)), ""))
            except X402GuardError:
                continue

    def live(self):
        return list(self.store.outstanding())

    def change(self, change, hold, *, durable=True, marks=(), nodes=None, new=(), **scope):
        """Run a faulty change on a hold. The kernel may refuse it."""
        ids = (hold.node_id,) if nodes is None else nodes
        with suppress(X402GuardError):
            self.store.transact(
                Scope(nodes=ids, holds=(hold.id, *new), marks=marks, durable=durable, **scope),
                lambda view: change(view, view.known_hold(hold.id)),
            )

    def refused(self, call):
        """Make a call that the kernel may refuse."""
        with suppress(X402GuardError):
            call()

    def holds(self):
        """Every hold of the session's journal, as committed."""
        ids = dict.fromkeys(entry.hold_id for entry in self.store.entries(self.session.id) if entry.hold_id)
        return [self.store.hold(hold_id) for hold_id in ids]

    def close(self):
        self.guard.close()


def lost_upto(request):
    """The terms of an ``upto`` of a cent, by Permit2."""
    return required(upto(10_000), url=str(request.url))
