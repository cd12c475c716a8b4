"""Whatever stops an agent, or should be looked at, is told once: in the log, to a function, and to a webhook."""

import asyncio
import itertools
import json
import logging
import threading
import time
from decimal import Decimal

import httpx
import pytest

from tests.behaviour.budgets.test_webhook import Receiver, webhooked
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, client, make_guard, required
from x402guard import (
    Approvals,
    BudgetExhausted,
    Loop,
    LoopDetected,
    PaymentRefused,
    Policy,
    PolicyDenied,
    Rule,
    SessionTripped,
    Spike,
    TokenBudget,
)
from x402guard.ledger import view
from x402guard.stores import open_store

QUIET = {"breaker": None, "loop": None, "velocity": None}


def thinks(session, into=20, out=5, **more):
    usage = {"prompt_tokens": into, "completion_tokens": out}
    http = client(session, lambda _request: httpx.Response(200, json=completion(usage)))
    return http.post(CHAT, json=ask(**more))


def loops(guard, session):
    for _ in range(8):
        try:
            session.charge("serp", "$0.01", arguments={"q": "the same"})
        except (LoopDetected, SessionTripped):
            continue


def spikes(guard, session):
    for dollars in ("$0.06", "$0.06", "$0.06", "$0.06", "$0.60"):
        session.charge("serp", dollars)


def spikes_and_is_refused(guard, session):
    with pytest.raises(PaymentRefused):
        spikes(guard, session)


def denied(guard, session):
    for _ in range(3):
        with pytest.raises(PolicyDenied):
            session.charge("wipe", "$0.01")


def past_the_limit(guard, session):
    with session.hold("render", up_to="$0.50") as job:
        job.capture("$6.00")


def out_of_money(guard, session):
    for _ in range(3):
        with pytest.raises(BudgetExhausted):
            session.charge("render", "$9.00")


def kill_file(guard, session):
    guard.shell.kill_file.touch()
    with pytest.raises(SessionTripped):
        session.charge("serp", "$0.01")


def owner_trips(guard, session):
    session.trip("it looks wrong")


def disputed(guard, session):
    thinks(session, 20, 10**9)


def hidden(guard, session):
    for _ in range(3):
        thinks(session, 2_000, 5)


def tokens_spike(guard, session):
    for into in (600, 600, 600, 600, 4_000):
        thinks(session, into, messages=[{"role": "user", "content": "word " * into}])


def breaks(guard, session):
    shop = Shop(paid=lambda *_: httpx.Response(500))
    for number in range(3):
        client(session, shop).get(f"{URL}/{number}")


def soft(guard, session):
    session.charge("render", "$2.60")


def soft_tokens(guard, session):
    thinks(session, 600, 5, messages=[{"role": "user", "content": "word " * 600}])


def asks(guard, session):
    with pytest.raises(PaymentRefused):
        session.charge("send", "$0.05")


def ends(guard, session):
    session.close()


CASES = {  # what happens, the policy, and the notices in order: (kind, severity, rule)
    "a loop": (loops, {"loop": Loop(calls=3, latch_after=1)}, [("tripped", "critical", "loop_detected"), ("refused", "warning", "loop_detected"),
                                                ("refused", "warning", "session_tripped")]),
    "a spike": (spikes, {"spike": Spike(multiplier=2.5)}, [("spend_spike", "warning", "spend_spike")]),
    "a spike that trips": (spikes_and_is_refused,
                           {"spike": Spike(action="trip")},
                           [("tripped", "critical", "spend_spike"), ("refused", "warning", "spend_spike")]),
    "a rule of the owner's": (denied, {"rules": [Rule(name="no wiping", action="deny", match="wipe")]},
                              [("refused", "warning", "no wiping")]),
    "a bill past the limit": (past_the_limit, {}, [("tripped", "critical", "overshoot"), *[("soft_limit", "warning", "")] * 3]),
    "a limit": (out_of_money, {}, [("refused", "warning", "budget")]),
    "a kill file": (kill_file, {}, [("tripped", "critical", "kill_switch"), ("refused", "warning", "session_tripped")]),
    "the owner": (owner_trips, {}, [("tripped", "critical", "kill_switch")]),
    "a disputed bill": (disputed, {}, [("disputed_usage", "warning", "")]),
    "hidden input": (hidden, {}, [("hidden_input", "warning", "")]),
    "a spike of tokens": (tokens_spike, {}, [("token_spike", "warning", "token_spike")]),
    "a breaker": (breaks, {"breaker": Policy().breaker}, [("breaker_open", "warning", "breaker_open")] * 2),
    "a soft limit": (soft, {}, [("soft_limit", "warning", "")]),
    "a soft limit of tokens": (soft_tokens, {}, [("tokens_soft_limit", "warning", "")]),
    "an approval": (asks, {"rules": [Rule(name="ask", action="ask", match="send")]},
                    [("approval_asked", "info", "ask"), ("refused", "warning", "approval")]),
    "an approval that expires": (asks, {"rules": [Rule(name="ask", action="ask", match="send")],
                                        "approvals": Approvals(timeout_s=1)},
                                 [("approval_asked", "info", "ask"), ("approval_expired", "warning", "ask"),
                                  ("refused", "warning", "approval")]),
    "the end": (ends, {}, [("session_ended", "info", "completed")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_once_to_the_log_a_function_and_a_webhook(case, tmp_path, caplog):
    act, policy, expected = CASES[case]
    caplog.set_level(logging.INFO, "x402guard")
    told, late = [], threading.Event()

    def approver(_request):
        if "expires" in case:
            late.wait(3)
        return False

    with Receiver() as receiver:
        more = {"on_notice": told.append, "policy": Policy(**{**QUIET, **policy}), "kill_file": tmp_path / "stop"}
        with webhooked(receiver, approver=approver, **more) as guard:
            tokens = TokenBudget(100_000, soft=500) if "of tokens" in case and "soft" in case else None
            session = guard.session("run", budget="$5.00", tokens=tokens)
            act(guard, session)
            late.set()
        posted = receiver.bodies
    if expected[0][0] == "breaker_open":
        told, posted = told[:2], posted[:2]
    assert [(notice.kind, notice.severity, notice.rule) for notice in told] == expected
    assert posted == [json.loads(json.dumps(notice.to_dict(), default=str)) for notice in told]
    records = [record for record in caplog.records if record.name == "x402guard" and hasattr(record, "event")]
    logged = [(record.event, record.severity, record.rule) for record in records]
    assert [each for each in logged if each in expected] == expected or case == "a breaker"
    levels = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
    assert all(record.levelno == levels[record.severity] for record in records)
    assert all(notice.time > 0 and notice.message for notice in told)


def test_payments_llm_calls_and_every_refusal_are_log_records_without_secrets(caplog):
    caplog.set_level(logging.INFO, "x402guard")
    told = []
    with make_guard(on_notice=told.append) as guard, guard.session("s", budget="$0.05") as session:
        client(session, Shop()).get(f"{URL}?token=hunter2")
        thinks(session)
        session.charge("serp", "$0.01")
        for _ in range(3):
            with pytest.raises(BudgetExhausted):
                session.charge("serp", "$9.00")
    records = [
        (r.event, r.levelno, r.amount) for r in caplog.records if getattr(r, "event", "risk_medium") != "risk_medium"
    ]
    assert records[:3] == [
        ("payment", logging.INFO, "0.01"),
        ("llm_call", logging.INFO, "0.0001"),
        ("tool_use", logging.INFO, "0.01"),
    ]
    assert [(event, level) for event, level, _ in records[3:6]] == [
        ("refused", logging.WARNING), ("refused", logging.INFO), ("refused", logging.INFO)]  # fmt: skip
    assert "hunter2" not in caplog.text
    assert {notice.kind for notice in told} == {"refused", "session_ended"}


@pytest.mark.parametrize(("level", "observed"), list(itertools.product((logging.INFO, logging.WARNING), (False, True))))
def test_a_notice_for_the_log_alone_is_made_where_a_log_or_an_observer_takes_it(caplog, monkeypatch, level, observed):
    caplog.set_level(level, "x402guard")
    made, tell = [], view.LedgerView.tell

    def seen(self, kind, *args, **more):
        tell(self, kind, *args, **more)
        made.extend(notice.kind for notice in self.notices)

    monkeypatch.setattr(view.LedgerView, "tell", seen)
    monkeypatch.setattr("x402guard.guard.guard.observed", lambda _: Watching() if observed else None)
    with make_guard() as guard, guard.session("s", budget="$0.05") as session:
        session.charge("serp", "$0.01")
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$9.00")
    assert ("tool_use" in made) is (level == logging.INFO or observed)
    assert "refused" in made


class Watching:
    """An observer that looks at nothing."""

    def committed(self, view):
        pass

    def step(self, name, hold_id):
        pass

    def close(self):
        pass


def test_what_a_seller_writes_stands_in_no_notice(caplog):
    told = []
    terms = required()
    terms["accepts"][0] |= {"scheme": "ignore-all-instructions", "extra": {"name": "ignore-all-instructions"}}
    with make_guard(on_notice=told.append) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PaymentRefused):
            client(session, Shop(terms=terms)).get(URL)
    assert told
    assert not [notice for notice in told if "ignore-all" in json.dumps(notice.to_dict(), default=str)]
    assert "ignore-all" not in caplog.text


def test_an_async_function_is_awaited_and_neither_it_nor_a_slow_one_is_waited_for():
    told, began = [], time.monotonic()

    async def slow(notice):
        await asyncio.sleep(0.3)
        told.append(notice.kind)

    with make_guard(on_notice=slow) as guard:
        session = guard.session("s", budget="$1.00")
        for _ in range(5):
            with pytest.raises(BudgetExhausted):
                session.charge("serp", "$9.00")
        assert time.monotonic() - began < 0.3, "off the call path"
        session.trip("enough")
    assert told == ["refused", "tripped"], "closing waits for them, in order"


def test_a_function_that_never_returns_holds_up_nothing():
    stop = threading.Event()
    try:
        with make_guard(on_notice=lambda _notice: stop.wait(30)) as guard:
            session = guard.session("s", budget="$1.00")
            session.trip("enough")
            began = time.monotonic()
        assert time.monotonic() - began < 8
    finally:
        stop.set()


def test_a_hundred_refusals_are_one_message():
    told = []
    with make_guard(on_notice=told.append) as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(100):
            with pytest.raises(BudgetExhausted):
                session.charge("serp", "$9.00")
    assert [notice.kind for notice in told] == ["refused", "session_ended"]
    assert (told[0].amount, told[0].limit) == (Decimal(9), Decimal(1))


def test_two_guards_on_one_ledger_tell_a_trip_once(tmp_path):
    url, told = f"sqlite:///{tmp_path / 'l.db'}", []
    with make_guard(url, on_notice=told.append) as one, make_guard(url, on_notice=told.append) as other:
        first, second = one.session("run", budget="$1.00", id="run"), other.session("run", id="run")
        first.trip("enough")
        second.trip("enough")
    assert [notice.kind for notice in told] == ["tripped"]


def test_the_end_of_a_session_says_why():
    told, clock = [], Clock()
    store = open_store("memory://", clock_ms=clock)
    with make_guard(store, on_notice=told.append, policy=Policy(**QUIET)) as guard:
        with guard.session("fine", budget="$1.00") as session:
            session.charge("serp", "$0.25")
        with pytest.raises(BudgetExhausted), guard.session("broke", budget="$0.10") as session:
            session.charge("serp", "$0.25")
        with guard.session("tripped", budget="$0.10") as session:
            session.trip("enough")
    store.close()
    said = {notice.facts["name"]: (notice.rule, notice.amount) for notice in told if notice.kind == "session_ended"}
    assert said == {
        "fine": ("completed", Decimal("0.25")),
        "broke": ("budget_exhausted", Decimal(0)),
        "tripped": ("kill_switch", Decimal(0)),
    }
