"""A purchase whose payment the caller carries: each way to carry one, and a scene of two processes, a seller and a chain.

The guard sees no exchange. It knows what its caller says, and whether the task that was to say it still lives.
"""

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from functools import partial

import pytest
from a2a.types import Message, Part, SendMessageRequest, TaskState
from x402.schemas import PaymentRequired

from tests.support.buyers import task_event
from tests.support.callers import Loop, TaskCaller, ThreadCaller, WaitingClock
from tests.support.chain import MockChain
from tests.support.merchant import URL, b64, make_guard, receipt, recover_payment, required
from x402guard import ConfigError, GuardedA2AClient, GuardedSigner, Policy, X402GuardError
from x402guard.guard import owner as owner_module
from x402guard.guard.owner import Owner
from x402guard.kernel.rows import HoldState
from x402guard.ledger.findings import Settled, Unused
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S
from x402guard.stores import open_store

CENT = Decimal("0.01")
LIMIT = Decimal("0.03")
FLIGHT_S = DEFAULT_FLIGHT_S


class ByHand:
    """``session.pay``. ``pay`` returns a payment and its nonce; an awaited kind returns what is awaited."""

    has_names = can_pay_again = asks_where_it_reads = True
    is_awaited = can_redirect = False
    asks_again_s = 4
    """A thread may be one of a pool, and do another job: it waits until its payment is taken for lost."""

    def __init__(self, clock):
        self.clock = clock

    def pay(self, session, **more):
        return _read(session.pay(required(), place=URL, **more))

    def settle(self, payment, shown):
        return payment.settled(shown)

    def fail(self, payment):
        return payment.failed()


def _read(payment):
    return payment, recover_payment(payment.header[1])[1]


class ByHandInThread(ByHand):
    """``session.pay`` in a thread that ends before the payment is read."""

    asks_where_it_reads = (
        False  # the thread that asks again is not the one that has read: it cannot tell that the payment is lost
    )

    def pay(self, session, **more):
        with ThreadPoolExecutor(1) as thread:
            payment = thread.submit(partial(session.pay, required(), place=URL, **more)).result()
        return _read(payment)


class ByHandAwaited(ByHand):
    """``session.apay``."""

    is_awaited = True
    asks_again_s = 1

    async def pay(self, session, **more):
        return _read(await session.apay(required(), place=URL, **more))

    def settle(self, payment, shown):
        return payment.asettled(shown)

    def fail(self, payment):
        return payment.afailed()


class ByHandToThread(ByHandAwaited):
    """``session.pay`` in a thread of the loop; the task reads the payment."""

    asks_where_it_reads = False

    async def pay(self, session, **more):
        signed = Future()

        def sign():
            try:
                return session.pay(required(), place=URL, **more)
            finally:
                signed.set_result(None)

        try:
            payment = await asyncio.to_thread(sign)
        except asyncio.CancelledError:
            # The thread goes on, and the clock has to wait for it in place of the task.
            self.clock.begins()
            signed.add_done_callback(lambda _: self.clock.ends())
            raise
        return _read(payment)


class BySDK:
    """What a blocking transport of the official SDK does."""

    has_names = can_pay_again = is_awaited = False
    can_redirect = asks_where_it_reads = True
    asks_again_s = 1

    def __init__(self, clock):
        self.clock = clock

    def pay(self, session):
        sdk, offer = GuardedSigner(session).client_sync(), PaymentRequired.model_validate(required())
        sdk.handle_payment_required(offer, URL)
        return self.signed(sdk, sdk.create_payment_payload(offer))

    def signed(self, sdk, payload):
        message = payload.model_dump(mode="json", by_alias=True, exclude_none=True)
        return (sdk, payload), recover_payment(b64(message))[1]

    def settle(self, payment, shown, status=200, **headers):
        sdk, payload = payment
        if shown is not None:
            headers["payment-response"] = b64(shown)
        return sdk.process_payment_result(payload, lambda name: headers.get(name.lower()), status)

    def fail(self, payment):
        return self.settle(payment, None, 503)

    def redirect(self, payment, shown):
        return self.settle(payment, shown, 303, location="/elsewhere")


class BySDKAwaited(BySDK):
    """What an awaited transport of the official SDK does."""

    is_awaited = True

    async def pay(self, session):
        sdk, offer = GuardedSigner(session).client(), PaymentRequired.model_validate(required())
        await sdk.handle_payment_required(offer, URL)
        return self.signed(sdk, await sdk.create_payment_payload(offer))


class OverA2A:
    """A guarded client of A2A: the payment is the stream of its agent's events."""

    has_names = can_pay_again = asks_where_it_reads = is_awaited = True
    asks_again_s = 1
    can_redirect = False

    def __init__(self, clock):
        self.clock = clock

    async def pay(self, session, **more):
        agent = Agent(self.clock)
        request = SendMessageRequest(message=Message(message_id="m", parts=[Part(text="paint")]))
        events = GuardedA2AClient(agent, session, agent="painter").send_message(request, **more)
        await anext(events)
        return (agent, events), agent.nonce

    async def settle(self, payment, shown, state=TaskState.TASK_STATE_COMPLETED):
        agent, events = payment
        agent.end = state, {} if shown is None else {"x402.payment.receipts": [shown]}
        async for _ in events:
            pass

    def fail(self, payment):
        return self.settle(payment, None, TaskState.TASK_STATE_FAILED)

    def read_on(self, payment):
        return anext(payment[1])


class Agent:
    """An agent that takes a payment, says that it works, and ends once its *end* is set."""

    def __init__(self, clock):
        self.clock, self.nonce, self.end = clock, None, None

    async def send_message(self, request):
        metadata = request.message.metadata
        if not metadata:
            asks = {"x402.payment.status": "payment-required", "x402.payment.required": required()}
            yield task_event(TaskState.TASK_STATE_INPUT_REQUIRED, asks)
            return
        self.nonce = int(metadata["x402.payment.payload"]["payload"]["authorization"]["nonce"], 16)
        yield task_event(TaskState.TASK_STATE_WORKING, {})
        if self.end is None:
            await self.clock.asleep(100_000)
        yield task_event(*self.end)


KINDS = (ByHand, ByHandInThread, ByHandAwaited, ByHandToThread, BySDK, BySDKAwaited, OverA2A)


class Ask:
    """One request for what is sold, and what has become of it."""

    def __init__(self, caller, guard, began_ms, *, pays_again, may_wait):
        self.caller, self.guard, self.began_ms = caller, guard, began_ms
        self.pays_again, self.may_wait = pays_again, may_wait
        self.payment = self.nonce = self.error = self.ended_ms = self.done = None

    @property
    def waited_s(self):
        return (self.ended_ms - self.began_ms) / 1000

    @property
    def told(self):
        if self.ended_ms is None:
            return "cancelled" if self.done.done() else "waits"
        return None if self.error is None else getattr(self.error, "rule", None) or type(self.error).__name__


class Scene:
    """One purchase on a ledger of two processes, its seller and its chain. What is wrong is noted in *faults*."""

    def __init__(self, folder, kind, *, named):
        self.clock, self.named, self.left = WaitingClock(), named, ExitStack()
        self.kind, self.url = kind(self.clock), f"sqlite:///{folder / 'spend.db'}"
        self.more = {"purchase": "order 7"} if named else {}
        self.asks, self.callers, self.gone, self.lock = [], {}, [], threading.Lock()
        self.signed, self.taken, self.closed = set(), set(), set()
        self.faults, self.words = [], []
        patch = self.left.enter_context(pytest.MonkeyPatch.context())
        self.clock.replaces_sleep(patch)
        patch.setattr(owner_module, "open_store", lambda url, **more: open_store(url, clock_ms=self.clock, **more))
        self.loop = Loop() if kind.is_awaited else None
        if self.loop is not None:
            self.left.callback(self.loop.close)
        self.guards = [self.opened(), self.opened()]

    def close(self):
        self.clock.stop()
        self.left.close()

    def opened(self):
        store = open_store(self.url, clock_ms=self.clock)
        self.left.callback(store.close)
        guard = make_guard(store, policy=Policy(breaker=None, loop=None), chains=MockChain(self.finding))
        self.left.callback(guard.close)
        return guard, guard.session("s", budget=f"${LIMIT}", id="run"), store

    def finding(self, hold):
        nonce = hold.payment().nonce
        if nonce in self.taken:
            return Settled(hold.payment().amount_atomic, f"0x{nonce:064x}", 0, final=True)
        return Unused(self.clock() // 1000)

    def caller(self, name):
        """The caller of a name; one beside it while that one waits, and a new one after its end."""
        found = self.callers.get(name)
        if found is not None and self.waits(found):
            return self.caller(f"{name}, beside")
        if found is None or not found.lives:
            found = TaskCaller(self.clock, self.loop) if self.kind.is_awaited else ThreadCaller(self.clock)
            self.callers[name] = found
            self.left.callback(found.end)
        return found

    def waits(self, caller):
        return any(each.caller is caller and not each.done.done() for each in self.asks)

    @property
    def store(self):
        return self.guards[1][2]

    def hold(self, nonce):
        return self.store.hold(f"{nonce:064x}")

    def ask(self, name="caller", at=0, *, pays_again=False):
        """Let a caller ask in a process, until it has a payment, or an error, or waits."""
        guard, session, _ = self.guards[at]
        caller = self.caller(name)
        may_wait = self.is_under_way(caller, guard)
        asked = Ask(caller, guard, self.clock(), pays_again=pays_again, may_wait=may_wait)
        more = {**self.more, "pay_again": True} if pays_again else self.more

        def note(result, error):
            asked.error, asked.ended_ms = error, self.clock()
            if error is None:
                asked.payment, asked.nonce = result
                self.note_signed(asked)
            elif not isinstance(error, X402GuardError):
                self.faults.append(f"a request raises {error!r}")

        self.asks.append(asked)
        asked.done = caller.tell(partial(self.kind.pay, session, **more), note)
        self.clock.until_idle()
        return asked

    def is_under_way(self, caller, guard):
        """True if a payment is with another living caller, or was signed in a process that is not known to have ended."""
        own = caller if self.kind.asks_where_it_reads else None
        return any(
            (each.payment is not None and each.caller is not own and each.caller.lives)
            or not each.done.done()
            or (each.nonce is not None and each.guard is not guard and each.guard not in self.gone)
            for each in self.asks
        )

    def note_signed(self, asked):
        with self.lock:
            if asked.nonce in self.signed:
                return self.note_presented(asked)
            for nonce in self.signed:
                if asked.pays_again and self.hold(nonce).state is HoldState.CAPTURED:
                    self.closed.add(nonce)
                elif not asked.pays_again and self.is_open(nonce):
                    self.faults.append(f"a second one is signed while {nonce % 997} is open: {self.hold(nonce).state}")
            self.signed.add(asked.nonce)

    def note_presented(self, asked):
        """A payment is not presented again while another caller sends it, and may still get its answer."""
        before = [each for each in self.paid if each.nonce == asked.nonce and each is not asked][-1]
        is_own = before.caller is asked.caller and self.kind.asks_where_it_reads
        is_kept = before.payment is not None and before.caller.lives and before.guard not in self.gone
        if is_kept and not is_own and self.clock() - before.ended_ms <= FLIGHT_S * 1000:
            self.faults.append(f"{asked.nonce % 997} is presented again while it is under way")

    def is_open(self, nonce):
        hold = self.hold(nonce)
        is_unused = hold.state in (HoldState.EXPIRED, HoldState.VOIDED) and nonce not in self.taken
        is_free = hold.state is HoldState.CAPTURED and not hold.captured
        return not (nonce in self.closed or is_unused or is_free)

    def end_of(self, asked, how, *shown):
        """End a payment, where there is one: by its caller, or by another if that one has ended or waits."""
        if asked is None or asked.payment is None:
            return
        can_end = asked.caller.lives and not self.waits(asked.caller)
        caller = asked.caller if can_end else self.caller("who ends it")
        job, asked.payment = partial(getattr(self.kind, how), asked.payment, *shown), None

        def note(_, error):
            if isinstance(error, (X402GuardError, StopAsyncIteration, RuntimeError)):
                self.words.append(f"{how}: {type(error).__name__}: {error!s:.80}")
            elif error is not None:
                self.faults.append(f"{how}: {error!r}")

        done = caller.tell(job, note)
        del job
        self.clock.until_idle()
        if not done.done():
            self.faults.append(f"{how} hangs")

    @property
    def paid(self):
        return [each for each in self.asks if each.nonce is not None]

    @property
    def first(self):
        return self.asks[0] if self.asks[0].payment is not None else None

    @property
    def last(self):
        return next((each for each in reversed(self.paid) if each.payment is not None), None)

    def takes(self, nonce):
        """The seller takes a payment, if it still can."""
        if self.hold(nonce).deadline_unix >= self.clock() // 1000:
            self.taken.add(nonce)
        return nonce in self.taken

    def takes_all(self):
        for nonce in list(self.signed):
            self.takes(nonce)

    def answers(self, asked):
        """An answer comes with its receipt; from a seller that is too late to take the payment, a failure."""
        if asked is None:
            return
        if self.takes(asked.nonce):
            self.is_handed_over(asked)
            self.end_of(asked, "settle", receipt(transaction=f"0x{asked.nonce:064x}"))
        else:
            self.end_of(asked, "fail")

    def answers_without_receipt(self, asked):
        if asked is not None:
            self.is_handed_over(asked)
            self.end_of(asked, "settle", None)

    def redirects(self, asked):
        if asked is not None and self.takes(asked.nonce):
            self.is_handed_over(asked)
            self.end_of(asked, "redirect", receipt(transaction=f"0x{asked.nonce:064x}"))

    def is_handed_over(self, asked):
        """Close a purchase without a name: its last presentation is answered, in a process that has its ledger."""
        latest = [each for each in self.paid if each.nonce == asked.nonce][-1]
        if not self.named and latest is asked and asked.guard not in self.gone:
            self.closed.add(asked.nonce)

    def drops(self, asked):
        if asked is not None:
            asked.payment = None
            gc.collect()

    def ends_task(self):
        """The task of the first caller is cancelled; what it was to end is kept, as in an error."""
        caller, first = self.asks[0].caller, self.first
        if not self.kind.is_awaited and self.waits(caller):
            return  # a thread cannot be cancelled
        if isinstance(self.kind, OverA2A) and first is not None and caller.lives and not self.waits(caller):
            # Its task reads the stream when it is cancelled, and so ends the payment itself.
            caller.tell(partial(self.kind.read_on, first.payment), lambda *_: None)
            first.payment = None
            self.clock.until_idle()
        caller.end()
        self.clock.until_idle()

    def restarts(self):
        guard, session, store = self.guards[0]
        self.gone.append(guard)
        session.close()
        guard.close()
        store.close()
        self.guards[0] = self.opened()

    def crashes(self):
        """The first process asks no more, and another takes its place; the machine does not tell that it has ended.

        Its tasks ask no more, either: a task of the SDK ends its last exchange when it asks again, through any guard.
        """
        self.guards[0] = self.opened()
        self.callers.clear()

    def forgives(self, *, unsafe=False):
        with Owner(self.url) as owner:
            for nonce in list(self.signed):
                try:
                    owner.forgive(f"{nonce:064x}", unsafe_in_flight=unsafe)
                except ConfigError as error:
                    self.words.append(f"forgive: {error!s:.60}")
                else:
                    self.closed.add(nonce)

    @property
    def log(self):
        """What each request got, and after how many seconds; what callers and the owner were told."""
        asks = [
            (each.told or f"{each.nonce % 997}", each.ended_ms and round(each.waited_s, 1), each.may_wait)
            for each in self.asks
        ]
        return asks, self.words
