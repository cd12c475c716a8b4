"""Places and breakers through what clients do: redirects, auth, answers unread or dropped, cancelled tasks, Ctrl-C, broken streams."""

import asyncio
import gc
import os
import signal
import threading

import anyio
import httpx
import pytest

from tests.support.llm_provider import CHAT, Answer, Provider, ask, both_modes, chunk, metered, sse
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, offer_response, receipt, required
from x402guard import Breaker, Bulkhead, CircuitOpen, Policy
from x402guard.flow.detached import Aside, TooLate

ONE = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=1, per_tool=1, per_llm_host=1))
PAID = {"PAYMENT-RESPONSE": b64(receipt())}


@pytest.fixture
def session():
    with make_guard(policy=ONE) as guard, guard.session("s", budget="$1") as session:
        yield session
        gc.collect()
        session.shell.slots._collect()  # what the garbage collector has found
        assert (session.shell.slots._taken, session.shell.slots._lines) == ({}, {})


def lazily(status, headers, *pieces):
    """An answer that is not in memory."""

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            yield from pieces

        async def __aiter__(self):
            for piece in pieces:
                yield piece

    return httpx.Response(status, headers=headers, stream=Body())


def get(session, shop, *, url=URL, awaits=False, **options):
    if not awaits:
        with client(session, shop, **options) as http:
            return http.get(url)

    async def go():
        async with async_client(session, shop, **options) as http:
            return await http.get(url)

    return asyncio.run(asyncio.wait_for(go(), 10))


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("paid_first", [False, True])
def test_a_redirect_before_or_after_the_payment_takes_one_place_after_another(session, awaits, paid_first):
    away = {"location": f"{URL}/next"}

    def terms(request):
        if str(request.url) == URL and not paid_first:
            return lazily(302, away, b"this way")
        return lazily(402, {"PAYMENT-REQUIRED": b64(required())}, b"pay") if _is_first(request) else httpx.Response(200)

    def _is_first(request):
        return paid_first is (str(request.url) == URL)

    shop = Shop(terms=terms, paid=lambda request, _shop: lazily(302 if paid_first else 200, {**away, **PAID}, b"x"))
    answer = get(session, shop, awaits=awaits, follow_redirects=True)
    assert (answer.status_code, answer.url) == (200, httpx.URL(f"{URL}/next"))
    assert len(shop.payments) == 1


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("paid_first", [False, True])
def test_a_digest_login_before_or_after_the_payment_takes_one_place_after_another(session, awaits, paid_first):
    challenge = {"www-authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'}

    def terms(request):
        if paid_first is ("authorization" in request.headers):
            return lazily(200 if paid_first else 401, challenge, b"who are you?")
        return lazily(402, {"PAYMENT-REQUIRED": b64(required())}, b"pay")

    shop = Shop(
        terms=terms, paid=lambda request, _shop: lazily(401 if paid_first else 200, {**challenge, **PAID}, b"x")
    )
    answer = get(session, shop, awaits=awaits, auth=httpx.DigestAuth("me", "word"))
    assert (answer.status_code, len(shop.payments)) == (200, 1)


@pytest.mark.parametrize("how", ["close", "read", "drop", "break"])
def test_an_answer_leaves_its_place_however_it_is_left(session, how):
    shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a", b"b", b"c"))
    with client(session, shop) as http:
        for n in range(3):
            answer = http.send(http.build_request("GET", f"{URL}/{n}"), stream=True)
            if how == "drop":
                del answer
                gc.collect()
            elif how == "break":
                for _ in answer.iter_raw():
                    break
                answer.close()
            else:
                getattr(answer, how)()
    assert len(shop.payments) == 3


def test_a_second_call_waits_until_the_first_answer_was_read(session):
    shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a"))
    with client(session, shop) as http:
        first = http.send(http.build_request("GET", URL), stream=True)
        second = threading.Thread(target=http.get, args=(f"{URL}/2",), daemon=True)
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert (len(shop.payments), session.held) == (1, 0)  # with nothing held
        first.read()
        second.join(10)
        assert not second.is_alive()


def test_a_call_that_gets_no_place_in_time_is_refused_with_nothing_held(session, monkeypatch):
    monkeypatch.setattr("x402guard.flow.admission.LONGEST_WAIT_S", 0)
    shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a"))
    with client(session, shop) as http:
        first = http.send(http.build_request("GET", URL), stream=True)
        with pytest.raises(CircuitOpen, match=r"1 call of host courts\.example may be under way at once") as refused:
            http.get(f"{URL}/2")
        first.read()
    assert (refused.value.rule, refused.value.retry_after) == ("bulkhead", 1)
    assert (len(shop.payments), session.held) == (1, 0)


def test_a_model_that_asks_for_payment_leaves_its_place_to_that(session, monkeypatch):
    monkeypatch.setattr("x402guard.flow.admission.LONGEST_WAIT_S", 0)
    shop = Shop(lambda _request: lazily(402, {"PAYMENT-REQUIRED": b64(required(url=CHAT))}, b"{}"))
    with client(session, shop) as http:
        assert http.post(CHAT, json=ask()).status_code == 200
    assert len(shop.payments) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_that_is_cancelled_while_it_waits_holds_nothing(session, backend):
    shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a"))

    async def go():
        async with async_client(session, shop) as http:
            first = await http.send(http.build_request("GET", URL), stream=True)
            with anyio.move_on_after(0.2) as scope:
                await http.get(f"{URL}/2")
            assert scope.cancelled_caught
            await first.aread()
            assert (await http.get(f"{URL}/3")).status_code == 200

    anyio.run(go, backend=backend)
    assert (len(shop.payments), session.held) == (2, 0)


def interrupt_soon():
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_while_waiting_for_a_place_holds_nothing(session):
    shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a"))
    with client(session, shop) as http:
        first = http.send(http.build_request("GET", URL), stream=True)
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            http.get(f"{URL}/2")
        timer.join()
        first.read()
        http.get(f"{URL}/3")
    assert (len(shop.payments), session.held) == (2, 0)


def test_ctrl_c_in_a_tool_books_what_was_held_and_leaves_its_place(session):
    let_go = threading.Event()
    tool = session.tool(cost="$0.01", name="slow")(lambda: let_go.wait(20))
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        tool()
    timer.join()
    let_go.set()
    tool()
    assert (str(session.spent), session.held) == ("0.02", 0)


BROKEN = {
    "lost": "ReadError",
    "no connection": "ConnectError",
    "broken off": Answer.stream(*sse(chunk("a")), breaks="ReadError"),
    "5xx that says nothing": Answer.of("oops", status=502),
    "408": Answer.of({}, status=408),
}


@both_modes
@pytest.mark.parametrize("answer", BROKEN)
def test_a_model_that_does_not_answer_is_given_a_rest(way, answer):

    with metered(guard={"policy": Policy(breaker=Breaker(), loop=None)}) as session:
        provider = Provider(session, BROKEN[answer])
        for n in range(3):
            try:
                way.post(session, provider, ask(stream=True, seed=n))
            except way.library.TransportError:
                assert answer in ("lost", "no connection", "broken off")
        with pytest.raises(CircuitOpen):
            way.post(session, provider, ask(seed=9))
        assert len(provider.requests) == 3


def test_a_model_whose_answer_is_left_early_has_not_failed():

    with metered(guard={"policy": Policy(breaker=Breaker(failures=1), loop=None)}) as session:
        provider = Provider(session, Answer.stream(*sse(*map(chunk, "abcdef"))))
        for n in range(3):
            both_modes.args[1][0].post(session, provider, ask(stream=True, seed=n), take=1)
        assert len(provider.requests) == 3


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_what_comes_late_is_handed_over_once_to_be_put_away(ends):
    let_go, late = threading.Event(), []

    def call():
        let_go.wait(20)
        if ends == "badly":
            raise ValueError("too late")
        return "came"

    done = threading.Event()
    with pytest.raises(TooLate):
        Aside(call, lambda result: (late.append(result), done.set())).within(0.05)
    assert late == []
    let_go.set()
    assert done.wait(10)
    assert late == ["came" if ends == "well" else None]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_that_is_cancelled_leaves_a_call_behind(backend):
    let_go, done, late = threading.Event(), threading.Event(), []

    async def go():
        with anyio.move_on_after(0.1):
            await Aside(lambda: let_go.wait(20), lambda result: (late.append(result), done.set())).awaited_within(None)

    anyio.run(go, backend=backend)
    let_go.set()
    assert done.wait(10)
    assert late == [True]
    assert asyncio.run(Aside(lambda: 7).awaited_within(5)) == 7


def test_a_refused_offer_takes_no_place(session):
    session.charge("all of it", "$0.995")
    with pytest.raises(Exception, match="budget"):
        client(session, lambda request: offer_response(required())).get(URL)
    assert session.shell.slots._taken == {}
    assert CHAT.startswith("https://")
