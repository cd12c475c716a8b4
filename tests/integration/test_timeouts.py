"""Time limits on the wire: whatever a server sends how slowly, a paid call ends when its time is over, and its books are right."""

import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.merchant import PAYEE, accept, make_guard, required
from tests.support.slow_server import (
    HEAD,
    LAG,
    SLOW_ANSWERS,
    WAYS,
    Trickler,
    fetch,
    once_paid,
    paid_head,
    settings_of,
    slow_terms,
)
from x402guard import Breaker, CallTimeout, CircuitOpen, GuardedTransport, Policy, Timeouts
from x402guard.flow import detached

SECOND = Policy(breaker=None, timeouts=Timeouts(payment_s=1))
IN_DOUBT = {"head", "silence"}  # nobody has said that the payment was taken; of the others there is a receipt
BOTH = WAYS[:2]
sync_and_async = pytest.mark.parametrize("way", BOTH, ids=str)


@pytest.fixture
def server():
    with Trickler() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """What a first call loads takes half a second, which is none of a server's."""
    with Trickler() as server, make_guard() as guard, guard.session("s", budget="$1") as session:
        for number, way in enumerate(WAYS):
            assert fetch(way, session, f"{server.url}/{number}").content == b"sold"
    with LAG:
        yield


def at_once(*lists):
    """Show something for each combination, each with a server of its own: all they do is wait, so five at a time do."""

    def run(show):
        def alone(case):
            with Trickler() as server:
                show(server, *case)

        with ThreadPoolExecutor(5) as threads:
            shown = {case: threads.submit(alone, case) for case in itertools.product(*lists)}
        for case, future in shown.items():
            if error := future.exception():
                error.add_note(f"this was {' '.join(map(str, case))}")
                raise error

    return run


def test_what_a_payment_bought_is_cut_when_its_time_is_over():
    @at_once(WAYS, SLOW_ANSWERS)
    def show(server, way, answer):
        server.answers["/slow"] = SLOW_ANSWERS[answer]
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            came = fetch(way, session, f"{server.url}/slow")
            assert isinstance(came.error, CallTimeout)
            assert came.took_s > 0.9
            assert came.awake_s < 1.6
            assert "1 s" in str(came.error)
            assert came.error.money_may_have_moved
            held = (Decimal(0), Decimal("0.01")) if answer in IN_DOUBT else (Decimal("0.01"), Decimal(0))
            assert (session.spent, session.held) == held
            assert len(server.nonces) == 1


def test_a_timed_out_payment_is_shown_again_and_never_signed_anew():
    @at_once(WAYS, ["silence"])
    def show(server, way, answer):
        server.answers["/slow"] = SLOW_ANSWERS[answer]
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            first = fetch(way, session, f"{server.url}/slow").error
            assert first.retry == "same_request"
            assert session.shell.store.hold(first.hold_id).amount == 10_000_000
            assert first.deadline > time.time()
            del server.answers["/slow"]
            again = fetch(way, session, f"{server.url}/slow")
            assert again.error is None
            assert again.content == b"sold"
            assert (session.spent, session.held) == (Decimal("0.01"), Decimal(0))
            assert again.response.extensions["x402guard"].represented
        assert len(server.nonces) == 2
        assert len(set(server.nonces)) == 1


def test_the_terms_of_a_402_have_to_come_in_time_too_and_then_nothing_was_paid():
    @at_once(WAYS)
    def show(server, way):
        server.answers["/slow"] = slow_terms
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            came = fetch(way, session, f"{server.url}/slow")
            assert isinstance(came.error, CallTimeout)
            assert came.took_s > 0.9
            assert came.awake_s < 1.6
            assert not came.error.money_may_have_moved
            assert (session.spent, session.held, server.nonces) == (Decimal(0), Decimal(0), [])


def test_what_nobody_paid_for_may_take_any_time():
    @at_once(WAYS)
    def show(server, way):
        server.answers["/plain"] = lambda line: (
            line.send(HEAD + b"content-length: 20\r\n\r\n"), line.trickle(b"x" * 20, 0.08)
        )[1]  # fmt: skip
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            came = fetch(way, session, f"{server.url}/plain")
        assert came.content == b"x" * 20
        assert came.took_s > 1.2


def test_a_402_has_to_come_in_time_whatever_its_type_says_for_it_may_have_terms():
    @at_once(WAYS)
    def show(server, way):
        server.answers["/plain"] = lambda line: (
            line.send(b"HTTP/1.1 402 No\r\ncontent-type: text/html\r\ncontent-length: 20\r\n\r\n"), line.trickle(b"x" * 20, 0.08)
        )[1]  # fmt: skip
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            came = fetch(way, session, f"{server.url}/plain")
            assert isinstance(came.error, CallTimeout)
            assert not came.error.money_may_have_moved


def test_a_client_that_was_cut_pays_on_over_the_same_pool():
    @at_once(WAYS)
    def show(server, way):
        server.answers |= {f"/{name}": answer for name, answer in SLOW_ANSWERS.items()}

        def paths():
            return [f"{server.url}/body", f"{server.url}/head", f"{server.url}/fine", f"{server.url}/other"]

        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            if way.mode == "sync":
                with way.library.Client(**settings_of(way, session)) as http:
                    came = [fetch(way, session, url, http=http) for url in paths()]
            else:
                came = anyio.run(_one_after_another, way, settings_of(way, session), paths(), backend=way.mode)
            assert [type(each.error) if way.mode == "sync" else type(each) for each in came[:2]] == [CallTimeout] * 2
            assert [each.content for each in came[2:]] == [b"sold"] * 2
            assert (session.spent, session.held) == (Decimal("0.03"), Decimal("0.01"))


async def _one_after_another(way, settings, urls):
    came = []
    async with way.library.AsyncClient(**settings) as http:
        for url in urls:
            try:
                came.append(await http.get(url))
            except CallTimeout as error:
                came.append(error)
    return came


@pytest.mark.long
def test_at_the_defaults_an_answer_has_to_begin_in_the_offers_time_and_then_a_byte_a_second_comes_whole():
    def timed(way):
        with (
            Trickler(required(accept(maxTimeoutSeconds=11))) as server,
            make_guard(policy=Policy(breaker=None)) as guard,
            guard.session("s", budget="$1") as session,
        ):
            server.answers["/slow"] = once_paid(lambda line: line.trickle(paid_head() + b"x" * 40, 1))
            server.answers["/stream"] = once_paid(a_byte_a_second)
            with way.library.Client(transport=way.transport(session), trust_env=False) as http:  # 5 s of httpx's own
                whole = http.get(f"{server.url}/stream").content
                return fetch(way, session, f"{server.url}/slow", http=http), session.held, whole

    def a_byte_a_second(line):
        line.send(paid_head(b"content-length: 18\r\n\r\n"))
        line.trickle(b"x" * 18, 1)

    async def used():
        with make_guard(policy=Policy(breaker=None)) as guard, guard.session("s", budget="$1") as session:
            tool = session.tool(cost="$0.01", name="slow")(lambda: anyio.sleep(20))
            with pytest.raises(TypeError, match="async def"):
                tool()

            @session.tool(cost="$0.01")
            async def slow():
                await anyio.sleep(20)

            begun = time.monotonic()
            with pytest.raises(CallTimeout, match="'slow' did not end within 10 s"):
                await slow()
            return time.monotonic() - begun

    with ThreadPoolExecutor(2) as threads:
        tool = threads.submit(anyio.run, used)
        came, held, whole = timed(WAYS[0])
        assert whole == b"x" * 18
        assert isinstance(came.error, CallTimeout)
        assert "the answer did not begin within 11 s (the offer's maxTimeoutSeconds)" in str(came.error)
        assert came.took_s > 10.5
        assert came.awake_s < 11.5
        assert held == Decimal("0.01")
        assert 9.5 < tool.result() < 10.5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_answer_that_takes_up_to_119_seconds_is_bought_once_and_handed_over():
    """With the five seconds that httpx waits by default, and the guard's defaults."""

    def bought(wait_s):
        def late(line):
            line.server.done.wait(wait_s)
            line.send(paid_head(b"content-length: 4\r\n\r\nsold"))

        with (
            Trickler(required(accept(maxTimeoutSeconds=wait_s + 1))) as server,
            make_guard() as guard,
            guard.session("s", budget="$1") as session,
            httpx.Client(transport=GuardedTransport(session), trust_env=False) as http,
        ):
            server.answers["/slow"] = once_paid(late)
            content = http.get(f"{server.url}/slow").content
            return content, len(server.nonces), session.spent

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(bought, (12, 60, 119))) == [(b"sold", 1, Decimal("0.01"))] * 3


def test_the_error_says_what_was_paid_to_whom_for_what_and_which_setting_cut_it():
    @at_once(BOTH, ["silence", "body"])
    def show(server, way, answer):
        server.answers["/slow"] = SLOW_ANSWERS[answer]
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            error = fetch(way, session, f"{server.url}/slow").error
            state = "was taken" if answer == "body" else "may still be taken"
            assert str(error) == (
                f"GET {server.url}: the answer did not end within 1 s (policy.timeouts.payment_s); $0.01 to {PAYEE} "
                f"on eip155:84532 {state} for it (hold {error.hold_id[:16]}…)"
            )
            assert (error.amount, error.payee, error.network) == (Decimal("0.01"), PAYEE, "eip155:84532")
            assert error.place == f"GET {server.url}/slow"


def test_it_works_with_every_other_limit_off():
    @at_once(BOTH)
    def show(server, way):
        server.answers["/slow"] = SLOW_ANSWERS["silence"]
        other = Timeouts(tool_s=None, llm_s=None, chunk_s=None, payment_s=1)
        with (
            make_guard(policy=Policy(breaker=None, timeouts=other)) as guard,
            guard.session("s", budget="$1") as session,
        ):
            came = fetch(way, session, f"{server.url}/slow")
            assert came.took_s > 0.9
            assert came.awake_s < 1.6


def test_without_the_limit_nothing_is_cut():
    @at_once(BOTH)
    def show(server, way):
        server.answers["/slow"] = once_paid(
            lambda line: line.trickle(paid_head(b"content-length: 4\r\n\r\nsold"), 0.005)
        )
        policy = Policy(breaker=None, timeouts=Timeouts(payment_s=None))
        with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
            assert fetch(way, session, f"{server.url}/slow").content == b"sold"


def busy():
    """How many threads run a call now; one whose call has ended waits a while for the next."""
    ours = [thread for thread in threading.enumerate() if thread.name == "x402guard-aside"]
    return len(ours) - len(detached._WORKERS._idle)


@sync_and_async
@pytest.mark.parametrize("answer", ["head", "chunk header"])
def test_nothing_is_left_once_the_server_has_let_go(server, way, answer):
    server.answers["/slow"] = SLOW_ANSWERS[answer]
    with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
        assert isinstance(fetch(way, session, f"{server.url}/slow").error, CallTimeout)
        server.let_go()
        ends_s = time.monotonic() + 5
        while (busy() or session.shell.slots._taken) and time.monotonic() < ends_s:
            gc.collect()
            time.sleep(0.01)
        assert busy() == 0
        assert session.shell.slots._taken == {}


def test_a_host_that_hangs_keeps_its_places_while_it_is_asked_and_no_longer():
    @at_once(BOTH)
    def show(server, way):
        """Of a blocking call: its thread is out at the host until that lets go. A task's connection is closed at once."""
        server.answers["/slow"] = SLOW_ANSWERS["silence"]
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            if way.mode != "sync":
                fetch(way, session, f"{server.url}/slow")
                assert session.shell.slots._taken == {}
                return
            with way.library.Client(**settings_of(way, session)) as http:
                fetch(way, session, f"{server.url}/slow", http=http)
                assert session.shell.slots._taken == {f"{session.id} host {server.host}": 1}
                server.let_go()
                ends_s = time.monotonic() + 5
                while session.shell.slots._taken and time.monotonic() < ends_s:
                    time.sleep(0.01)
                assert session.shell.slots._taken == {}


def test_the_error_of_a_cut_body_names_the_hold():
    @at_once(BOTH)
    def show(server, way):
        server.answers["/slow"] = SLOW_ANSWERS["body"]
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            error = fetch(way, session, f"{server.url}/slow").error
            assert [error.hold_id] == [
                event["hold_id"] for event in session.report().to_dict()["events"] if event["event"] == "authorize"
            ]


def test_where_one_failure_is_enough_one_late_answer_gives_the_host_a_rest():
    @at_once(BOTH, ["head", "body", "silence"])
    def show(server, way, answer):
        server.answers["/slow"] = SLOW_ANSWERS[answer]
        policy = Policy(breaker=Breaker(failures=1), timeouts=Timeouts(payment_s=1))
        with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
            assert isinstance(fetch(way, session, f"{server.url}/slow").error, CallTimeout)
            assert isinstance(fetch(way, session, f"{server.url}/fine").error, CircuitOpen)


def test_three_late_answers_give_the_host_a_rest():
    @at_once(BOTH, ["head", "body"])
    def show(server, way, answer):
        server.answers |= {f"/{n}": SLOW_ANSWERS[answer] for n in range(3)}
        policy = Policy(breaker=Breaker(), timeouts=Timeouts(payment_s=1))
        with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
            for n in range(3):
                assert isinstance(fetch(way, session, f"{server.url}/{n}").error, CallTimeout)
            came = fetch(way, session, f"{server.url}/fine")
            assert isinstance(came.error, CircuitOpen)
            assert 28 <= came.error.retry_after <= 30
            assert len(server.nonces) == 3


@sync_and_async
def test_three_answers_that_break_off_give_the_host_a_rest(server, way):
    server.answers |= {f"/{n}": once_paid(lambda line: (line.send(paid_head() + b"half"), False)[1]) for n in range(3)}
    with make_guard(policy=Policy(breaker=Breaker())) as guard, guard.session("s", budget="$1") as session:
        for n in range(3):
            with pytest.raises(httpx.RemoteProtocolError):
                fetch(way, session, f"{server.url}/{n}")
        assert isinstance(fetch(way, session, f"{server.url}/fine").error, CircuitOpen)


def test_a_shorter_limit_of_the_clients_own_cuts_nothing_that_is_paid():
    @at_once(BOTH)
    def show(server, way):
        def late(line):
            line.server.done.wait(1)
            line.send(paid_head(b"content-length: 4\r\n\r\nsold"))

        server.answers["/slow"] = once_paid(late)
        with make_guard() as guard, guard.session("s", budget="$1") as session:
            assert fetch(way, session, f"{server.url}/slow", timeout=0.5).content == b"sold"
            assert len(server.nonces) == 1


def test_an_unread_answer_past_its_time_leaves_its_place(server):
    """Its socket has been shut down: nothing of it is under way any more."""
    server.answers["/slow"] = SLOW_ANSWERS["body"]
    with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
        with httpx.Client(**settings_of(WAYS[0], session)) as http:
            kept = http.send(http.build_request("GET", f"{server.url}/slow"), stream=True)
            ends_s = time.monotonic() + 4
            while session.shell.slots._taken and time.monotonic() < ends_s:
                time.sleep(0.02)
            taken = dict(session.shell.slots._taken)
            kept.close()
    assert taken == {}


def test_a_body_within_its_time_is_never_cut_and_its_connection_is_used_again():
    @at_once(BOTH)
    def show(server, way):
        with make_guard(policy=SECOND) as guard, guard.session("s", budget="$1") as session:
            if way.mode == "sync":
                with httpx.Client(**settings_of(way, session)) as http:
                    assert http.get(f"{server.url}/a").content == b"sold"
                    time.sleep(1.3)  # past the time that the first one had
                    assert http.get(f"{server.url}/b").content == b"sold"
            else:
                anyio.run(_pausing, settings_of(way, session), server.url)
        assert len(set(server.nonces)) == 2


async def _pausing(settings, url):
    async with httpx.AsyncClient(**settings) as http:
        assert (await http.get(f"{url}/a")).content == b"sold"
        await anyio.sleep(1.3)
        assert (await http.get(f"{url}/b")).content == b"sold"
