"""An approver may be async, and sees what it is about: the query, the body, the sum so far, and what else waits."""

import threading
import time
from decimal import Decimal

import anyio
import pytest

from tests.support.llm_provider import CHAT, SYNC, Provider, ask, metered
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Answer, ApprovalDenied, Policy, Rule
from x402guard.guard.approvers import describe

ALWAYS = Policy(
    rules=[Rule(name="ask", action="ask", match="POST *"), Rule(name="tool", action="ask", match="send")], breaker=None
)


async def allows(_request):
    await anyio.sleep(0.01)
    return True


async def denies(_request):
    return Answer(allowed=False, by=("Ann",), reason="not today")


class Awaited:
    async def __call__(self, _request):
        return True


class AwaitedAsk:
    async def ask(self, _request):
        return Answer(allowed=True, by=("Ann",))


@pytest.mark.parametrize(
    "approver", [allows, Awaited(), AwaitedAsk(), [allows, AwaitedAsk()]], ids=["def", "object", "ask", "list"]
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_approver_may_be_async(approver, mode):
    with make_guard(policy=ALWAYS, approver=approver) as guard, guard.session("s", budget="$1.00") as session:
        if mode == "sync":
            session.charge("send", "$0.01")
        else:
            anyio.run(session.acharge, "send", "$0.01")
        assert session.spent == Decimal("0.01")


def test_an_async_no_is_a_no_with_its_reason():
    with make_guard(policy=ALWAYS, approver=denies) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ApprovalDenied, match="not today"):
            session.charge("send", "$0.01")


def test_a_payment_is_asked_about_with_its_query_body_and_the_sum_so_far():
    asked = []
    with make_guard(policy=ALWAYS, approver=lambda request: asked.append(request) or True) as guard:
        with guard.session("s", budget="$1.00") as session:
            session.charge("serp", "$0.07")
            body = "ORDER \x1b[2Jtwo " + "x" * 5_000
            client(session, Shop()).post(f"{URL}?to=Berlin&note=\u202eevil", content=body)
    [request] = asked
    assert (request.query.startswith("to=Berlin&note="), request.spent) == (True, Decimal("0.07"))
    assert request.body == body[:1_000] + "… (5,014 characters)".replace("5,014", f"{len(body):,}")
    words = describe(request)
    assert "to=Berlin" in words
    assert "ORDER" in words
    assert "$0.07 are spent so far" in words
    assert "\x1b" not in words
    assert "\u202e" not in words
    assert "x" * 1_001 not in words
    assert "ORDER" not in repr(request)


def test_an_llm_call_is_asked_about_with_its_body():
    asked = []
    with metered(guard={"policy": ALWAYS, "approver": lambda request: asked.append(request) or True}) as session:
        SYNC.post(session, Provider(session), ask(messages=[{"role": "user", "content": "wire it all"}]))
    assert (asked[0].what.startswith("POST api.openai.com"), "wire it all" in asked[0].body) == (True, True)
    assert CHAT.startswith("https://api.openai.com")


def test_what_else_waits_is_shown():
    asked, go, lock = [], threading.Event(), threading.Lock()

    def approver(request):
        with lock:
            asked.append(request)
        go.wait(10)
        return True

    with make_guard(policy=ALWAYS, approver=approver) as guard, guard.session("s", budget="$1.00") as session:
        threads = []
        for cents in (1, 2, 3):
            threads.append(threading.Thread(target=session.charge, args=("send", f"$0.0{cents}")))
            threads[-1].start()
            until = time.monotonic() + 10
            while len(asked) < cents and time.monotonic() < until:
                time.sleep(0.005)
        go.set()
        for thread in threads:
            thread.join(10)
        assert session.spent == Decimal("0.06")
    assert [request.waiting for request in asked] == [
        (), ("send for $0.01",), ("send for $0.01", "send for $0.02")]  # fmt: skip
    assert "Waiting too: send for $0.01; send for $0.02." in describe(asked[2])
