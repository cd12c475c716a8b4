"""An agent that repeats a search with a growing history, past every way to spend: it stops, and its owner hears of it."""

import httpx
import pytest

from tests.behaviour.budgets.test_webhook import Receiver, webhooked
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.llm_replies import used
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Loop, LoopDetected, Policy, SessionTripped
from x402guard.policy import loops

MOST = 200
USAGE = {"input_tokens": 20, "output_tokens": 5}


def thinks(session, history):
    """One LLM call over the transport: no two are the same, because the history grows."""
    http = client(session, lambda _request: httpx.Response(200, json=completion(used(20, 5))))
    http.post(CHAT, json=ask(messages=history))


def pays(session, history):
    thinks(session, history)
    client(session, Shop()).get(f"{URL}?q=Roe")


def charges(session, history):
    thinks(session, history)
    session.charge("search", "$0.001", arguments={"q": "Roe"})


def charges_without_arguments(session, history):
    thinks(session, history)
    session.charge("search", "$0.001")


def uses(session, history):
    thinks(session, history)
    session.tool(cost="$0.001", name="search")(lambda q: f"nothing for {q}")("Roe")


def wraps(session, history):
    session.wrap(completion(used(20, 5)), messages=history[-1:])


def wraps_without_messages(session, _history):
    session.wrap(completion(used(20, 5)))


def wraps_the_whole_history(session, history):
    session.wrap(completion(used(20, 5)), messages=list(history))


def records(session, history):
    session.record_usage("openai", "gpt-4o", USAGE, messages=history[-1:])


def records_without_messages(session, _history):
    session.record_usage("openai", "gpt-4o", USAGE)


def holds(session, _history):
    with session.hold("search", up_to="$0.001") as job:
        job.capture("$0.001")


WAYS = {  # how it repeats itself, the policy, and how often it may
    "transport": (pays, {}, 10),
    "charge": (charges, {}, 10),
    "charge without arguments": (
        charges_without_arguments,
        {},
        25,
    ),  # the model is asked the same, and nothing new is done
    "hold without arguments": (holds, {}, 50),
    "tool": (uses, {}, 10),
    "wrap": (wraps, {}, 10),
    "wrap without messages": (wraps_without_messages, {}, 50),
    "wrap of the whole history": (wraps_the_whole_history, {"loop": Loop(similar=True)}, 10),
    "record_usage": (records, {}, 10),
    "record_usage without messages": (records_without_messages, {}, 50),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_runaway_stops_names_its_reason_and_the_notice_arrives(way, tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "_AT_ONCE_MS", 0)  # its calls take no time here
    act, policy, most = WAYS[way]
    refusals, passed, history = [], 0, [{"role": "user", "content": "Was Roe followed?"}]
    with Receiver() as receiver:
        more = {"policy": Policy(breaker=None, velocity=None, **policy)}
        with webhooked(receiver, f"sqlite:///{tmp_path / 'spend.db'}", **more) as guard:
            session = guard.session("runaway", budget="$5.00")
            for number in range(MOST):
                history.append(
                    {"role": "tool", "content": "nothing was found" if len(policy) == 0 else f"{number}: nothing"}
                )
                try:
                    act(session, history)
                    passed += 1
                except LoopDetected as refused:
                    refusals.append(str(refused))
                except SessionTripped:
                    break
        bodies = receiver.bodies
        report = session.report().to_dict()
    assert (passed, len(refusals)) == (most, 3)
    said = f"called {most} times{', identically, and nothing new' if most == 25 else ' within 60 s'}"
    assert all(said in words for words in refusals)
    assert (report["state"], report["terminated_by"]) == ("tripped", "loop_detected")
    assert said in report["why"]
    [tripped] = [body for body in bodies if body["kind"] == "tripped"]
    assert (tripped["severity"], tripped["rule"], tripped["session"]) == ("critical", "loop_detected", session.id)


@pytest.mark.parametrize("messages", [[{1: 2, "a": 3}], [{b"x": 1}]])
def test_messages_that_are_no_json_leave_no_owed_call_out_of_the_ledger(messages):
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        session.record_usage("openai", "gpt-4o", USAGE, messages=messages)
        circular = []
        circular.append(circular)
        session.wrap(completion(used(20, 5)), messages=circular)
        assert session.report().to_dict()["llm"]["calls"] == 2
