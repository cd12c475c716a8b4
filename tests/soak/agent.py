"""One agent, in a process that may be killed at any moment: it buys at random, asks again where an answer is lost, and goes on.

Even slots have threads and a blocking client, odd ones tasks of one event loop.
"""

import itertools
import logging
import multiprocessing
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import anyio
import httpx

from tests.soak.faults import FAULTS
from tests.soak.layout import LIFETIME_S, Lines, Plan, SharedClock
from tests.soak.seller import KINDS, MANNERS
from tests.support.naive_client import NaiveTransport
from x402guard import (
    AsyncGuardedTransport,
    Chain,
    Guard,
    GuardedTransport,
    LedgerUnavailable,
    LocalSigner,
    PaidNotDelivered,
    PaymentRefused,
    Policy,
    Session,
    SettlementUncertain,
    Timeouts,
    X402GuardError,
)
from x402guard.kernel.rows import Hold
from x402guard.ledger.store import LedgerStore
from x402guard.stores import open_store

BUYERS = 4
RETRIES = 3
RESUMED = 4
"""How many unfinished purchases a new start takes up again."""

POLICY = Policy(
    max_lifetime_s=LIFETIME_S, timeouts=Timeouts(payment_s=2),
    breaker=None, bulkhead=None, loop=None, spike=None, velocity=None,
)  # fmt: skip
"""Without what would stop a purchase before the books do: this is about the books."""

Opened = TypeVar("Opened")
Get = Callable[[str, bool], Awaitable[httpx.Response]]


class RecordingSigner:
    """A LocalSigner that writes down what it signed before anybody else can see it."""

    inline = True

    def __init__(self, key: str, lines: Lines) -> None:
        self._inner, self._lines = LocalSigner.from_key(key), lines

    @property
    def address(self):
        return self._inner.address

    def bind(self, lookup) -> None:
        self._inner.bind(lookup)

    def sign(self, hold: Hold) -> bytes:
        signature = self._inner.sign(hold)
        payment = hold.payment()
        self._lines.add(
            nonce=f"0x{payment.nonce:064x}",
            amount=payment.amount_atomic,
            until=payment.valid_until,
            method=payment.method,
        )
        return signature

    def sign_cancellation(self, hold: Hold) -> bytes:
        return self._inner.sign_cancellation(hold)


class Agent:
    """One start of the agent in a slot; `start` counts them."""

    def __init__(self, plan: Plan, slot: int, start: int) -> None:
        self.plan, self.slot, self.start = plan, slot, start
        self.chance = random.Random(f"{plan.seed}/{slot}/{start}")
        self.told = Lines(plan.path("told.jsonl"))
        self.todo = Lines(plan.path(f"todo-{slot}.jsonl"))
        self.store = store_of(plan)
        if plan.fault:
            FAULTS[plan.fault](self.store)
        self.guard = while_away(lambda: guard_of(plan, self.store))
        self.numbers = itertools.count()
        self.parent = multiprocessing.parent_process()
        lines = self.todo.fresh()
        ended = {line["place"] for line in lines if line["over"]}
        self.unfinished = [line for line in lines if not line["over"] and line["place"] not in ended][-RESUMED:]

    # ---- budgets ----

    def session(self, session_id: str) -> Session:
        """Open a session, or resume it; its id says which budget pays for it, and how much it may spend."""
        budget = f"${random.Random(session_id).choice((3, 8, 20, 60)) / 100:.2f}"
        if session_id.startswith("shared"):
            return self.guard.session("shared", id=session_id, budget=budget)
        return self.guard.budget(f"team-{self.slot % 2}").session("own", id=session_id, budget=budget)

    def current(self) -> Session:
        """One of the sessions of the time being: of its own, common to all slots, or a part of its own one."""
        name = self.chance.choice(("own", "own", "shared", "child"))
        if name == "shared":
            return self.session(f"shared-{self.start // 6}")
        own = self.session(f"own-{self.slot}-{self.start // 3}")
        return own if name == "own" else own.child("step", budget=f"${self.chance.choice((1, 4, 30)) / 100:.2f}")

    # ---- buying ----

    async def buys_on(self, client_of: Callable[[ExitStack, Session], Get], resumed: list[dict]) -> None:
        """Take up what an earlier start has left, then buy until the power goes."""
        for line in resumed:
            self.told.add(said="taken up by the next start")
            with suppress(LedgerUnavailable), ExitStack() as opened:
                await self.buy(client_of(opened, self.session(line["session"])), line["place"])
        while self.parent is None or self.parent.is_alive():
            with self.unavailable(), ExitStack() as opened:
                session = opened.enter_context(self.current())
                get = client_of(opened, session)
                for _ in range(self.chance.randint(1, 6)):
                    await self.begin(get, session)
                    await anyio.sleep(self.chance.uniform(0, 0.1))
                    if self.plan.fault == "aside" and self.chance.random() < 0.2:
                        self.pay_aside()

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        """A server that is started anew is away for a moment; a file never is."""
        try:
            yield
        except LedgerUnavailable as error:
            if self.plan.ledger.startswith("sqlite"):
                raise
            self.told.add(said=f"uncertain {error.code}")
            time.sleep(0.1)

    async def begin(self, get: Get, session: Session) -> None:
        manner = self.chance.choice((*["honest"] * 4, *MANNERS))
        price = self.chance.choice((150, 900, 2_500, 7_777, 20_000))
        name = f"{self.slot}-{self.start}-{next(self.numbers)}"
        kind = self.chance.choice((*KINDS, "upto"))
        *sellers, old_one = self.plan.sellers
        place = f"{old_one if kind == 'v1' else self.chance.choice(sellers)}/{manner}/{kind}/{price}/{name}"
        if "/" not in session.id:  # a part of a session ends with its start
            self.todo.add(place=place, session=session.id, over=False)
        await self.buy(get, place)

    async def buy(self, get: Get, place: str) -> None:
        """Ask, and ask again where nobody knows; what is still unknown then is for the next start."""
        for tried in range(RETRIES):
            pay_again = tried > 0 and self.chance.random() < 0.15
            if pay_again:
                self.told.add(again=place)
            try:
                answer = await get(place, pay_again)
                receipt = answer.extensions.get("x402guard")
                again = ", presented again" if receipt is not None and receipt.represented else ""
                said = f"status {answer.status_code}{again}"
            except PaymentRefused as refused:
                said = f"refused {refused.rule}"
            except PaidNotDelivered:
                said = "paid, not delivered"
            except X402GuardError as error:
                self.told.add(said=f"uncertain {error.code}")
                is_away = isinstance(error, LedgerUnavailable) or isinstance(error.__cause__, LedgerUnavailable)
                if is_away and not self.plan.ledger.startswith("sqlite"):  # the signer reads the ledger, too
                    await anyio.sleep(0.2)
                    continue
                if not (isinstance(error, SettlementUncertain) or error.money_may_have_moved):
                    raise
                await anyio.sleep(self.chance.uniform(0, 0.4))
                continue
            except httpx.TransportError as error:
                said = f"no answer {type(error).__name__}"
            self.told.add(said=said)
            self.todo.add(place=place, over=True)
            return

    def pay_aside(self) -> None:
        """What no guard can see: the same key in the hands of a client that has none."""
        with httpx.Client(transport=NaiveTransport(self.plan.key), trust_env=False) as http:
            http.get(f"{self.plan.sellers[0]}/honest/eip3009/900/{self.slot}-aside-{next(self.numbers)}")

    # ---- running ----

    def in_threads(self) -> None:
        """Buy in threads; each has a loop of its own, which the blocking client stands still."""

        def client_of(opened: ExitStack, session: Session) -> Get:
            http = opened.enter_context(httpx.Client(transport=GuardedTransport(session), timeout=6, trust_env=False))

            async def get(place: str, pay_again: bool) -> httpx.Response:
                return http.get(place, extensions={"pay_again": pay_again})

            return get

        threads = [
            threading.Thread(target=self.safely, args=(client_of, self.unfinished[number::BUYERS]))
            for number in range(BUYERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def in_tasks(self) -> None:
        """Buy in tasks of one event loop."""

        def client_of(opened: ExitStack, session: Session) -> Get:
            http = httpx.AsyncClient(transport=AsyncGuardedTransport(session), timeout=6, trust_env=False)

            async def get(place: str, pay_again: bool) -> httpx.Response:
                return await http.get(place, extensions={"pay_again": pay_again})

            return get

        async def everybody() -> None:
            async with anyio.create_task_group() as tasks:
                for number in range(BUYERS):
                    tasks.start_soon(self.buys_on, client_of, self.unfinished[number::BUYERS])

        self.reporting(anyio.run, everybody)

    def safely(self, client_of: Callable[[ExitStack, Session], Get], resumed: list[dict]) -> None:
        """One thread's buying."""
        self.reporting(anyio.run, self.buys_on, client_of, resumed)

    def reporting(self, run: Callable, *arguments: object) -> None:
        """An error that nobody expected ends the agent, and the soak has to know."""
        try:
            run(*arguments)
        except BaseException as error:
            self.told.add(broke=f"{self.slot}-{self.start}: {flat(error)}")
            raise


def flat(error: BaseException) -> str:
    """An error in words, with those of a group in it."""
    inner = getattr(error, "exceptions", ())
    return f"{type(error).__name__}: {error}" + "".join(f" [{flat(each)}]" for each in inner)


def while_away(open_it: Callable[[], Opened]) -> Opened:
    """Open something of the ledger, again while its server is away."""
    for _ in range(200):
        try:
            return open_it()
        except LedgerUnavailable:
            time.sleep(0.1)
    return open_it()


def store_of(plan: Plan) -> LedgerStore:
    """The run's ledger, dated by the clock that all share."""
    return while_away(lambda: open_store(plan.ledger, clock_ms=SharedClock(plan.path("clock"))))


def guard_of(plan: Plan, store) -> Guard:
    """A guard over the run's ledger, whose chain is what the front says."""
    logging.getLogger("x402guard").addHandler(logging.NullHandler())  # the soak counts what it tells, and prints sums
    signer = RecordingSigner(plan.key, Lines(plan.path("signed.jsonl")))
    chains = {plan.network: Chain(plan.front, timeout_s=1)}
    return Guard(signer=signer, ledger=store, chains=chains, policy=POLICY, flight_s=6)


def run_agent(plan: Plan, slot: int, start: int) -> None:
    """Be an agent, until killed."""
    agent = Agent(plan, slot, start)
    (agent.in_tasks if slot % 2 else agent.in_threads)()


def run_reconciler(plan: Plan, start: int) -> None:
    """Look at the chain for all of the ledger, over and over, until killed."""
    told, parent = Lines(plan.path("told.jsonl")), multiprocessing.parent_process()
    store = store_of(plan)
    guard, stop = while_away(lambda: guard_of(plan, store)), threading.Event()
    while parent is None or parent.is_alive():
        found = while_away(guard.reconcile)
        told.add(reconciled={"contradicted": found.contradicted, "unexplained": found.unexplained_total})
        stop.wait(0.3)


def run_closing(plan: Plan, looks: int = 20) -> None:
    """A last start, on a chain that answers: look until nothing is open."""
    told = Lines(plan.path("told.jsonl"))
    store = store_of(plan)
    with guard_of(plan, store) as guard:
        for _ in range(looks):
            began = time.monotonic()
            found = guard.reconcile()
            took = {"seconds": round(time.monotonic() - began, 1), "asked": found.asked, "open": found.still_open}
            told.add(looked={**took, "unreadable": list(found.unreadable.values())})
            if found.complete and not found.still_open and not found.unreadable:
                break
        told.add(closed=found.to_dict())
    store.close()
