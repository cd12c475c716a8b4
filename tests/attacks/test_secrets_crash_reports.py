"""Row 25: no crash report shows a key, a signature or a payment header, local variables of all frames included."""

import asyncio
import contextlib
import json
import pprint
import sys
import traceback

import anyio
import httpcore
import httpx
import pytest
import rich.console
import rich.traceback
from rich.pretty import pretty_repr

from tests.support.http_server import WIRES, HangUpError, serving
from tests.support.merchant import (
    KEY,
    URL,
    Shop,
    async_client,
    b64,
    make_guard,
    permit2,
    required,
    required_v1,
    upto,
)
from tests.support.payment_secrets import forms_of, found, payment_header
from tests.support.signers import SpySigner
from x402guard import (
    AsyncGuardedTransport,
    GuardedTransport,
    SettlementUncertain,
    X402GuardError,
)
from x402guard.flow.effects import Reply
from x402guard.flow.request import RequestFacts
from x402guard.flow.sealed import forget_frames, forgetting

OFFERS = {
    "exact": required(),
    "permit2": required(permit2()),
    "upto": required(upto()),
    "v1": required_v1(),
}


def crash_reports(error) -> str:
    """What the crash reporters there are would send of *error*, local variables of all frames and the whole chain."""
    told = list(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    shown = rich.traceback.Traceback.extract(
        type(error), error, error.__traceback__, show_locals=True, locals_max_length=None, locals_max_string=None
    )
    for frame in (frame for stack in shown.stacks for frame in stack.frames):
        told += [f"{name} = {node.render(max_width=100_000)}" for name, node in (frame.locals or {}).items()]
    waiting, seen = [error], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        waiting += [part.__cause__, part.__context__]
        told += [repr(part), repr(part.args), pprint.pformat(vars(part))]
        for frame, _ in traceback.walk_tb(part.__traceback__):
            told.append(pprint.pformat(frame.f_locals))
    return "\n".join(told)


def assert_shows_nothing(error, shop, *, payments=1):
    headers = {payment_header(request) for request in shop.seen} - {None}
    assert len(headers) == payments
    told = crash_reports(error)
    assert "exchange.py" in told
    assert "effect" in told, "our own frames are shown with their variables"
    for header in headers:
        assert not found(forms_of(header, b64(shop.terms)), told)
    assert not found([KEY[2:], str(int(KEY, 16))], told)


def failing(mode, session, shop, inner=None, error=X402GuardError):
    """The error that a paid request ends with."""
    try:
        if mode == "sync":
            inner = inner or httpx.MockTransport(shop)
            with httpx.Client(transport=GuardedTransport(session, inner)) as http:
                http.get(shop.url)
        else:

            async def go():
                used = inner or httpx.MockTransport(shop.answer)
                async with httpx.AsyncClient(transport=AsyncGuardedTransport(session, used)) as http:
                    await http.get(shop.url)

            anyio.run(go)
    except error as raised:
        return raised
    pytest.fail("nothing was raised")


class Telltale(Shop):
    """A shop whose frames hold the payment, and whose paid answer fails."""

    url = URL

    def __call__(self, request):
        header = payment_header(request)
        lines = dict(request.headers)
        if header is not None:
            self.seen.append(request)
            raise self.paid if isinstance(self.paid, BaseException) else self.paid(header, lines)
        return super().__call__(request)

    async def answer(self, request):
        headers = request.headers.raw
        return self(request) if headers else None


FAILURES = [
    *((name, httpx.ReadError) for name in OFFERS),
    *(("exact", kind) for kind in (OSError, RuntimeError, KeyboardInterrupt, SystemExit)),
]


@pytest.mark.parametrize(("offer", "failure"), FAILURES)
def test_a25_no_crash_report_of_a_failed_payment_shows_it(mode, guard, offer, failure):
    shop = Telltale(OFFERS[offer], failure("lost"))
    with guard.session("s", budget="$1.00") as session:
        error = failing(mode, session, shop, error=BaseException)
    assert_shows_nothing(error, shop)


def test_a25_no_crash_report_of_an_error_group_shows_it(mode, guard):
    def group(header, lines):
        errors = []
        for number in range(2):
            try:
                kept = header
                raise OSError(number)
            except OSError as error:
                errors.append(error)
        return ExceptionGroup("both", errors) if kept else None

    shop = Telltale(paid=group)
    with guard.session("s", budget="$1.00") as session:
        assert_shows_nothing(failing(mode, session, shop), shop)


def hang_up(request, shop):
    raise HangUpError


@pytest.mark.parametrize("wire", WIRES)
def test_a25_no_crash_report_of_a_lost_connection_shows_the_payment(mode, guard, wire):
    shop = Shop(paid=hang_up)
    two = wire == "HTTP/2"
    kind = httpx.HTTPTransport if mode == "sync" else httpx.AsyncHTTPTransport
    with guard.session("s", budget="$1.00") as session, serving(shop, wire) as base:
        shop.url = base
        error = failing(mode, session, shop, kind(http1=not two, http2=two))
    assert isinstance(error, SettlementUncertain)
    assert_shows_nothing(error, shop)


WRITTEN = []


def _break(buffer):
    if b"payment-signature" in buffer.lower():
        WRITTEN.append(buffer)
        raise httpcore.WriteTimeout("too slow")


class _Broken(httpcore.MockStream):
    """A connection that breaks while a payment is written to it."""

    def write(self, buffer, timeout=None):
        _break(buffer)


class _AsyncBroken(httpcore.AsyncMockStream):
    async def write(self, buffer, timeout=None):
        _break(buffer)


def test_a25_no_crash_report_of_a_payment_cut_off_while_written_shows_it(mode, guard, monkeypatch):
    """httpcore's frames hold the bytes that could not be written."""
    answer = b"HTTP/1.1 402 \r\nPAYMENT-REQUIRED: " + b64(required()).encode() + b"\r\nContent-Length: 0\r\n\r\n"
    monkeypatch.setattr("httpcore._backends.mock.MockStream", _Broken)
    monkeypatch.setattr("httpcore._backends.mock.AsyncMockStream", _AsyncBroken)
    if mode == "sync":
        inner = httpx.HTTPTransport()
        inner._pool = httpcore.ConnectionPool(network_backend=httpcore.MockBackend([answer]))
    else:
        inner = httpx.AsyncHTTPTransport()
        inner._pool = httpcore.AsyncConnectionPool(network_backend=httpcore.AsyncMockBackend([answer]))
    shop = Shop()
    shop.url = "http://127.0.0.1:1/"
    with guard.session("s", budget="$1.00") as session:
        error = failing(mode, session, shop, inner)
    lines = WRITTEN.pop().split(b"\r\n")[1:-2]
    shop.seen.append(httpx.Request("GET", shop.url, headers=[tuple(line.split(b": ", 1)) for line in lines]))
    assert "WriteTimeout" in repr(error.__cause__)
    assert_shows_nothing(error, shop)


@pytest.mark.parametrize("spoilt", [lambda s: s[:64] + b"\x63", lambda s: s + b"\0"], ids=["v", "length"])
def test_a25_no_crash_report_of_a_malformed_signature_shows_it(mode, spoilt):
    kept = []

    def after(signature):
        kept.append(spoilt(signature))
        return kept[-1]

    with make_guard(signer=SpySigner(after=after)) as guard, guard.session("s", budget="$1.00") as session:
        shop = Telltale()
        told = crash_reports(failing(mode, session, shop))
    raw, kept = kept[0], None
    assert "malformed" in told or "65 bytes" in told
    for form in (raw.hex()[:40], raw.hex()[64:104], repr(raw[:12])[2:-1], repr(raw[32:44])[2:-1]):
        assert form not in told


@pytest.mark.parametrize("where", ["encode_header", "payment_message"])
def test_a25_no_crash_report_of_an_envelope_that_fails_shows_the_signature(mode, guard, monkeypatch, where):
    made = []

    def broken(*given):
        made.append(json.dumps(given, default=str))
        raise MemoryError("no room")

    monkeypatch.setattr(sys.modules["x402guard.x402.schemes.envelope"], where, broken)
    with guard.session("s", budget="$1.00") as session:
        shop = Telltale()
        told = crash_reports(failing(mode, session, shop))
    text = made.pop()
    signature = text[text.index('"signature": "0x') + 16 :][:130]
    assert len(bytes.fromhex(signature)) == 65
    assert signature[:40] not in told
    assert repr(bytes.fromhex(signature)[:12])[2:-1] not in told


def test_a25_no_crash_report_of_a_cancelled_payment_shows_it(guard):
    shop, caught = Shop(), []

    async def hanging(request):
        lines = dict(request.headers)
        shop.seen.append(request)
        if payment_header(request):
            await asyncio.sleep(60 if lines else 0)
        return Shop()(request)

    async def main():
        async with async_client(session, hanging) as http:
            task = asyncio.ensure_future(http.get(URL))
            for _ in range(10_000):
                if any(map(payment_header, shop.seen)):
                    break
                await asyncio.sleep(0.001)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError as error:
                caught.append(error)

    with guard.session("s", budget="$1.00") as session:
        asyncio.run(main())
    assert_shows_nothing(caught[0], shop)


def test_a25_forgetting_leaves_the_callers_own_frames_and_generators_alone():
    @contextlib.contextmanager
    def careful():
        kept = "the caller's"
        try:
            yield
        except KeyError:
            try:
                yield kept  # suspended in its handler, with the error under way
            finally:
                ended.append(True)

    ended, theirs = [], KeyError("theirs")
    manager = careful()
    manager.__enter__()
    held = manager.gen.throw(theirs)
    try:
        try:
            raise theirs
        except KeyError:
            _fail_below_us()
    except ValueError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert [frame.f_code.co_name for frame in frames[1:]] == ["_fail_below_us"]
        assert error.__context__ is theirs
        assert manager.gen.gi_frame in [frame for frame, _ in traceback.walk_tb(theirs.__traceback__)]
        assert "_fail_below" in "".join(traceback.format_exception(error))
    assert held == "the caller's"
    assert ended == []
    assert list(manager.gen) == []


def test_a25_forgetting_ends_no_other_task_that_has_the_same_error():
    """A client raises one error in all streams of an HTTP/2 connection; up to Python 3.12 the other payments hung."""
    shared = ConnectionError("the connection is gone")

    async def stream(release):
        try:
            raise shared
        except ConnectionError:
            await release.wait()  # as a stream that ends in order
            return "ended"

    async def main():
        release = asyncio.Event()
        other = asyncio.create_task(stream(release))
        await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            with forgetting():
                raise shared
        release.set()
        return await asyncio.wait_for(other, 5)

    assert asyncio.run(main()) == "ended"


class Unchangeable(Exception):  # noqa: N818 - as a frozen dataclass is
    def __setattr__(self, name, value):
        raise TypeError("it is frozen")


class OddNotes(Exception):  # noqa: N818
    __notes__ = None


@pytest.mark.parametrize("kind", [Unchangeable, OddNotes])
@pytest.mark.parametrize("place", ["itself", "cause", "context"])
def test_a25_an_error_that_refuses_to_be_changed_loses_its_frames_and_stays_the_one_that_is_raised(kind, place):
    def deep():
        secret = "held below"
        raise kind(len(secret))

    def below():
        if place == "itself":
            deep()
        try:
            deep()
        except kind as error:
            if place == "cause":
                raise KeyError("outer") from error
            raise KeyError("outer")  # noqa: B904

    with pytest.raises(kind if place == "itself" else KeyError) as caught:
        with forgetting():
            below()
    inner = caught.value if place == "itself" else caught.value.__cause__ or caught.value.__context__
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(inner.__traceback__)]
    assert not {"deep", "below"} & {*names}


def test_a25_a_log_record_that_is_kept_from_below_shows_no_local_variables():
    kept = []

    def below():
        secret = "held below"
        try:
            raise ValueError(len(secret))
        except ValueError:
            kept.append(sys.exc_info())  # as a logger does
            raise

    with pytest.raises(ValueError), forgetting():
        below()
    [(_, _, trace)] = kept
    assert [frame.f_locals for frame, _ in traceback.walk_tb(trace)] == [{}]


def test_a25_an_error_of_another_task_keeps_not_even_its_first_frame():
    async def sends():
        secret = "held by the task"
        raise OSError(len(secret))

    async def main():
        [error] = await asyncio.gather(sends(), return_exceptions=True)
        forget_frames(error)
        return error

    error = asyncio.run(main())
    assert error.__traceback__ is None
    assert "sends" in error.__notes__[0]


def _fail_below_us():
    with forgetting():
        _fail_below()


def _fail_below():
    secret = "held below"
    raise ValueError(len(secret))


def test_a25_the_head_of_an_answer_shows_no_receipt():
    head = Reply(200, (("PAYMENT-RESPONSE", "eyJzdWNjZXNz"),))
    assert repr(head) == "Reply(status=200)" == pretty_repr(head)


def test_a25_the_facts_of_a_request_show_neither_query_nor_body():
    facts = RequestFacts(
        "POST", "https://a.example/x?token=hunter2", "https://a.example:443", "a.example", True, False, "",
        bytes(32), body=b"hunter2",
    )  # fmt: skip
    assert "hunter2" not in repr(facts) + pretty_repr(facts)
