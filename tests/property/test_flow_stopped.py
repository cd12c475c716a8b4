"""Stop a flow after any effect, restart, reconcile: never does the ledger count less than what can still be spent.

The world here is a seller who takes whatever it ever saw, at the worst moment, and a chain that tells the truth.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.ledger import Clock
from tests.support.merchant import KEY, NETWORK, accept, b64, permit2, receipt, required, unb64, upto
from x402guard import Guard, LocalSigner, Policy, X402GuardError
from x402guard.flow.drivers import run
from x402guard.flow.effects import (
    AskChain,
    Checkpoint,
    Compute,
    Interrupted,
    PeekBody,
    Reply,
    Send,
    SendFailed,
    Sign,
    Transact,
)
from x402guard.flow.ports import AccountFunds, HoldStatus
from x402guard.flow.request import RequestFacts
from x402guard.flow.sealed import Sealed
from x402guard.kernel.rows import HoldState
from x402guard.ledger.findings import Settled, Unused, Used
from x402guard.stores import open_store
from x402guard.x402.flow import paid_request
from x402guard.x402.settlement import sweep

OFFERS = {"eip3009": accept(100_000), "permit2": permit2(100_000), "upto": upto(100_000)}
URL = "https://courts.example/x"


class Seller:
    """Keeps every cheque it sees, and settles those it is told to, in full or in part."""

    networks = frozenset({NETWORK})

    def __init__(self, clock, offer):
        self.clock, self.offer = clock, offer
        self.cheques, self.settled, self.settled_ms = {}, {}, {}
        self.finality_ms = 0

    def answer(self, headers, mood):
        payment = dict(headers).get("PAYMENT-SIGNATURE")
        if payment is None:
            return Reply(402, (("PAYMENT-REQUIRED", b64(required(self.offer))),))
        message = unb64(payment.reveal())["payload"]
        body = message.get("authorization") or message["permit2Authorization"]
        nonce = int(str(body["nonce"]), 0)
        until = int(body.get("validBefore") or body["deadline"])
        self.cheques[nonce] = (100_000, until, "authorization" in message)
        if mood == "settles":
            self.settle(nonce, 100_000 if self.offer["scheme"] == "exact" else 12_345)
            paid = self.settled[nonce]
            claimed = {"amount": str(paid)} if self.offer["scheme"] == "upto" else {}
            return Reply(200, (("PAYMENT-RESPONSE", b64(receipt(transaction=f"0x{nonce:064x}", **claimed))),))
        if mood == "lies":
            claimed = {"amount": "1"} if self.offer["scheme"] == "upto" else {}
            return Reply(200, (("PAYMENT-RESPONSE", b64(receipt(transaction="0x" + "99" * 32, **claimed))),))
        if mood == "takes and dies":
            self.settle(nonce, 100_000)
        if mood in ("dies", "takes and dies"):
            raise SendFailed(ConnectionResetError("gone"), before_connection=False)
        return Reply(500, ())

    def can_settle(self, nonce):
        _, until, is_3009 = self.cheques[nonce]
        now = self.clock() // 1000
        return now < until if is_3009 else now <= until

    def settle(self, nonce, amount):
        if nonce not in self.settled and self.can_settle(nonce):
            self.settled[nonce], self.settled_ms[nonce] = amount, self.clock()

    def is_final(self, nonce):
        return self.clock() - self.settled_ms[nonce] >= self.finality_ms

    def reorganise(self):
        """Undo what is not final, and take all of it instead."""
        for nonce in self.settled:
            if not self.is_final(nonce) and self.can_settle(nonce):
                self.settled[nonce], self.settled_ms[nonce] = self.cheques[nonce][0], self.clock()

    def spendable(self):
        """What was taken for good, and what can still be taken: the most that the wallet may lose."""
        most = 0
        for nonce, (ceiling, _, _) in self.cheques.items():
            open_end = self.can_settle(nonce) and not (nonce in self.settled and self.is_final(nonce))
            most += ceiling if open_end else self.settled.get(nonce, 0)
        return most

    def read(self, hold):
        nonce = int(hold.id, 16)
        if nonce not in self.settled:
            return (
                Unused(self.clock() // 1000)
                if self.finality_ms == 0
                else Unused((self.clock() - self.finality_ms) // 1000)
            )
        claimed = hold.claim.transaction if hold.claim else ""
        if claimed == f"0x{nonce:064x}":
            return Settled(self.settled[nonce], claimed, 0, final=self.is_final(nonce))
        return Used(final=self.is_final(nonce))

    def funds(self, network, token, owner):
        return None

    def close(self):
        pass


def drive(flow, guard, seller, stop_after, mood):
    """Run a flow by hand, and drop it dead after so many effects: no cleanup, as a kill -9 would."""
    answer, failure, done = None, None, 0
    while True:
        try:
            effect = flow.send(answer) if failure is None else flow.throw(failure)
        except StopIteration:
            return True
        except (X402GuardError, SendFailed, Interrupted):
            return True
        answer, failure = None, None
        try:
            match effect:
                case Send(headers):
                    answer = seller.answer(headers, mood)
                case PeekBody() | Checkpoint() | AskChain(AccountFunds()):
                    answer = None
                case Transact(scope, change):
                    answer = guard.shell.store.transact(scope, change)
                case Compute(job, _):
                    answer = job(guard.shell.store.now_ms())
                case Sign(hold, _):
                    answer = Sealed(guard.shell.signer.sign(hold))
                case AskChain(HoldStatus(hold)):
                    answer = seller.read(hold)
        except (X402GuardError, SendFailed) as error:
            failure = error
        done += 1
        if done == stop_after:
            return False


def facts(entropy, number):
    return RequestFacts(
        "GET", f"{URL}/{number}", "https://courts.example:443", "courts.example", True, False, "00" * 32, entropy
    )


MOODS = ["settles", "lies", "dies", "takes and dies", "refuses"]


@settings(max_examples=examples(300), deadline=None)
@given(
    offer=st.sampled_from(sorted(OFFERS)),
    runs=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(MOODS), st.integers(0, 1), st.sampled_from([0, 0, 31, 400])),
        min_size=1,
        max_size=6,
    ),
    chain=st.booleans(),
    late=st.sets(st.integers(0, 5)),
    reorgs=st.sets(st.integers(0, 5)),
    finality_s=st.sampled_from([0, 0, 20, 90]),
)
def test_counted_is_never_less_than_spendable(offer, runs, chain, late, reorgs, finality_s):
    clock = Clock()
    store = open_store("memory://", clock_ms=clock)
    seller = Seller(clock, OFFERS[offer])
    seller.finality_ms = finality_s * 1000
    guard = Guard(
        signer=LocalSigner.from_key(KEY),
        ledger=store,
        policy=Policy(),
        chains=seller if chain else None,
        budget="$0.25",
    )
    session = guard.session("s", budget="$0.25")
    terms = session.context

    def check(where):
        counted = (session.spent + session.held) * 1_000_000
        assert counted >= seller.spendable(), where
        assert counted <= 250_000, where

    for index, (stop_after, mood, number, wait_s) in enumerate(runs):
        entropy = bytes([index + 1]) * 32
        flow = paid_request(facts(entropy, number), terms)
        drive(flow, guard, seller, stop_after, mood)
        check(f"run {index} stopped after {stop_after}")
        clock.tick(wait_s)
        check("time went by")
        if index in late:
            for nonce in list(seller.cheques):
                seller.settle(nonce, 100_000)
            check("settled late")
        if index in reorgs:
            seller.reorganise()
            check("reorganised")
        run(sweep(terms), guard.shell)
        check("reconciled")
    if chain:
        clock.tick(400)
        for _ in range(4):
            run(sweep(terms), guard.shell)
            clock.tick(100)
        live = [hold for hold in store.outstanding() if hold.state is HoldState.HELD]
        assert live == []
        # An upto whose transaction nobody named is counted at its maximum; a lie is believed until the chain is asked.
        if offer != "upto" and "lies" not in {mood for _, mood, _, _ in runs}:
            assert session.spent * 1_000_000 == sum(seller.settled.values())


def test_a_flow_that_is_closed_yields_nothing():
    clock = Clock()
    guard = Guard(signer=LocalSigner.from_key(KEY), ledger=open_store("memory://", clock_ms=clock))
    session = guard.session("s", budget="$1")
    flow = paid_request(facts(b"\1" * 32, 1), session.context)
    next(flow)
    flow.close()  # a generator that yields while being closed raises RuntimeError here
