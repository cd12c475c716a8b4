"""The loop detector over payments, LLM calls and tools, after a restart and in two processes; and the latch that it leaves."""

import json
from decimal import Decimal

import httpx
import pytest

from tests.support import processes
from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required
from x402guard import (
    BudgetExhausted,
    ConfigError,
    Loop,
    LoopDetected,
    Policy,
    PolicyDenied,
    SessionTripped,
    SettlementUncertain,
    Velocity,
)
from x402guard.stores import open_store


def answer_of(_request):
    return httpx.Response(200, json=completion())


def pays(session):
    http = client(session, Shop())
    return lambda: http.get(URL)


def thinks(session):
    http = client(session, answer_of)
    return lambda: http.post(CHAT, json=ask())


def searches(session):
    return lambda: session.charge("serp", "$0.01", arguments={"q": "Roe"})


def holds(session):
    def use():
        with session.hold("serp", up_to="$0.05", arguments={"q": "Roe"}) as job:
            job.capture("$0.01")

    return use


def decorated(session):
    @session.tool(cost="$0.01")
    def serp(q):
        return q

    return lambda: serp("Roe")


STEPS = [pays, thinks, searches, holds, decorated]


def test_at_the_defaults_the_eleventh_is_refused_unsent_and_the_third_refusal_latches_the_run(ledger_url):
    shop, clock = Shop(), Clock()
    with make_guard(open_store(ledger_url, clock_ms=clock)) as guard:
        with guard.session("runaway", budget="$5.00") as session:
            http = client(session, shop)
            for _ in range(10):
                http.get(URL)
            for left in ("2 more refusals of it", "1 more refusal of it", "tripped until"):
                words = rf"GET courts.example/opinion/42 was called 10 times within 60 s.*{left}"
                with pytest.raises(LoopDetected, match=words):
                    http.get(URL)
                clock.tick(2)
            with pytest.raises(SessionTripped):
                http.get(f"{URL}/another")
        assert len(shop.payments) == 10
        report = session.report().to_dict()
    assert (report["state"], report["terminated_by"], report["spent"]) == ("tripped", "loop_detected", "0.10")
    assert [row["rule"] for row in report["refusals"]] == ["loop_detected", "session_tripped"]


def test_a_refused_call_passes_again_when_the_window_has_moved_on_and_other_calls_pass_meanwhile(ledger_url):
    clock, shop = Clock(), Shop()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store, policy=Policy(loop=Loop(calls=3), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            http = client(session, shop)
            for _ in range(4):
                for _ in range(3):
                    http.get(URL)
                for _ in range(2):
                    with pytest.raises(LoopDetected) as caught:
                        http.get(URL)
                    assert caught.value.retry_after == 60
                http.get(f"{URL}/{clock()}")  # what passes ends the row
                clock.tick(61)
            assert session.report().to_dict()["state"] == "open"
    store.close()


def test_calls_without_arguments_stop_at_a_number_of_their_own(ledger_url):
    with make_guard(ledger_url) as guard:
        with guard.session("s", budget="$5.00") as session:
            for n in range(50):
                session.charge("serp", "$0.01")
                session.charge("serp", f"$0.{n + 10}", arguments=None) if n < 3 else None
            with pytest.raises(LoopDetected, match=r"serp was called 50 times .* the same amount"):
                session.charge("serp", "$0.01")
            session.charge("serp", "$0.02")


def test_an_agent_that_repeats_itself_past_the_transport_is_stopped(ledger_url):
    """``wrap`` and ``record_usage``: the call is owed, so it is in the ledger, and the caller hears of the loop."""
    usage, said = {"input_tokens": 20, "output_tokens": 5}, [{"role": "user", "content": "the same"}]
    ways = {
        "record_usage": lambda session: session.record_usage("openai", "gpt-4o", usage, messages=said),
        "wrap": lambda session: session.wrap(completion(), messages=said),
        "record_usage, of unknown messages": lambda session: session.record_usage("openai", "gpt-4o", usage),
    }
    for name, way in ways.items():
        most = 50 if "unknown" in name else 10
        with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
            for _ in range(most):
                way(session)
            for _ in range(3):
                with pytest.raises(LoopDetected, match=f"gpt-4o was called {most} times") as caught:
                    way(session)
                assert caught.value.money_may_have_moved
            assert session.report().to_dict()["terminated_by"] == "loop_detected"
            assert session.report().to_dict()["llm"]["calls"] == most + 3, "what is owed is in the ledger"


def test_a_growing_history_is_a_loop_by_its_last_message_with_similar(ledger_url):
    usage, history = {"input_tokens": 20, "output_tokens": 5}, []
    with make_guard(ledger_url, policy=Policy(loop=Loop(similar=True), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            with pytest.raises(LoopDetected):
                for number in range(60):
                    history.append({"role": "tool", "content": f"result {number}: nothing was found"})
                    session.record_usage("openai", "gpt-4o", usage, messages=list(history))
            assert number == 10


@pytest.mark.parametrize("step", STEPS)
def test_each_kind_of_step_trips_and_then_nothing_of_any_kind_passes(ledger_url, step):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=5))) as guard:
        with guard.session("s", budget="$5.00") as session:
            again = step(session)
            for _ in range(5):
                again()
            spent = session.spent
            with pytest.raises(LoopDetected):
                again()
            for other in STEPS:
                with pytest.raises(SessionTripped):
                    other(session)()
        assert (session.spent, session.held) == (spent, Decimal(0))


@pytest.mark.parametrize("step", STEPS)
def test_it_survives_a_restart(tmp_path, step):
    url, clock = f"sqlite:///{tmp_path / 'books.db'}", Clock()
    for calls in (3, 2):
        store = open_store(url, clock_ms=clock)
        with make_guard(store, policy=Policy(loop=Loop(latch_after=1, calls=5))) as guard:
            with guard.session("s", budget="$5.00", id="run-42") as session:
                again = step(session)
                for _ in range(calls):
                    again()
                if calls == 2:
                    with pytest.raises(LoopDetected):
                        again()
        store.close()
        clock.tick(5)


def test_a_clock_that_was_set_right_makes_no_loop_of_a_poll(ledger_url):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store) as guard, guard.session("s", budget="$5.00") as session:
        clock.tick(3_600)
        searches(session)()
        clock.tick(-3_600)  # every stamp of the ledger is the same until the clock has caught up
        for _ in range(12):
            clock.tick(240)
            searches(session)()
    store.close()


def test_children_and_scopes_share_the_counters_of_their_run(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=5))) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(5):
                with session.child(f"c{number}", budget="$0.50") as child:
                    searches(child)()
            with session.scope("$0.50"), pytest.raises(LoopDetected):
                searches(session)()
            with pytest.raises(SessionTripped):
                session.child("fresh", budget="$0.10").charge("other", "$0.01")


def test_another_session_goes_on(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=5))) as guard:
        runaway, honest = guard.session("runaway", budget="$5.00"), guard.session("honest", budget="$5.00")
        for _ in range(5):
            runaway.charge("serp", "$0.01", arguments={})
        with pytest.raises(LoopDetected):
            runaway.charge("serp", "$0.01", arguments={})
        honest.charge("serp", "$0.01", arguments={})


def test_a_step_that_did_not_fit_is_not_counted(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=2))) as guard:
        with guard.session("s", budget="$0.05") as session:
            for _ in range(5):
                with pytest.raises(BudgetExhausted):
                    session.charge("film", "$0.50", arguments={})
            session.charge("film", "$0.01", arguments={})


@pytest.mark.parametrize("answer", [httpx.Response(429), httpx.Response(503, json={"error": {"message": "busy"}})])
def test_calls_that_were_never_billed_do_not_count(ledger_url, answer):
    policy = Policy(loop=Loop(latch_after=1, calls=3), max_steps=3, velocity=Velocity(calls_per_day=3), breaker=None)
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(12):
            client(session, lambda _request: answer).post(CHAT, json=ask())
        for _ in range(12):
            with session.hold("serp", up_to="$0.01", arguments={"q": 1}) as job:
                job.void()
        for number in range(3):
            session.charge("serp", "$0.01", arguments={"n": number})
        with pytest.raises(PolicyDenied, match=r"policy.max_steps"):
            session.charge("serp", "$0.01", arguments={"n": 4})


def test_one_payment_in_doubt_is_one_failure_however_often_it_is_asked_again(ledger_url):
    shop = Shop(paid=httpx.ReadError("reset"))
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(9):
            with pytest.raises(SettlementUncertain):
                client(session, shop).get(URL)
        assert session.report().to_dict()["state"] == "open"


def test_what_was_delivered_without_a_receipt_is_no_failure(ledger_url):
    shop = Shop(paid=lambda _request, _shop: httpx.Response(200, json={"opinion": "…"}))
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(8):
            assert client(session, shop).get(f"{URL}/{number}").status_code == 200
        assert session.report().to_dict()["state"] == "open"


def test_reported_calls_count_for_what_comes_after_them(ledger_url):
    with make_guard(ledger_url, policy=Policy(max_steps=2)) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(2):
            session.record_usage("openai", "gpt-4o", {"input_tokens": 10})
        with pytest.raises(PolicyDenied, match=r"policy.max_steps"):
            session.charge("serp", "$0.01")
        session.record_usage("openai", "gpt-4o", {"input_tokens": 10})  # it is owed


def test_unpaid_requests_do_not_count(ledger_url):
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, calls=2))) as guard:
        with guard.session("s", budget="$0.05") as session:
            http = client(session, lambda _request: httpx.Response(200))
            assert {http.get(URL).status_code for _ in range(20)} == {200}
            assert session.report().to_dict()["state"] == "open"


@pytest.mark.parametrize("failure", [httpx.Response(500), httpx.ReadError("reset"), httpx.Response(402, json={})])
def test_five_payments_in_a_row_without_what_was_paid_for_trip(ledger_url, failure):
    shop = Shop(paid=failure if isinstance(failure, Exception) else lambda _request, _shop: failure)
    with make_guard(ledger_url) as guard:
        with guard.session("s", budget="$5.00") as session:
            http = client(session, shop)
            for number in range(5):
                try:
                    http.get(f"{URL}/{number}")
                except Exception as error:
                    assert "does not fit" not in str(error)
            with pytest.raises(SessionTripped):
                http.get(f"{URL}/6")
        assert len(shop.nonces) == 5
        assert session.report().to_dict()["terminated_by"] == "loop_detected"


def test_a_settled_payment_whose_answer_trips_the_run_is_booked_all_the_same(ledger_url):
    failed = httpx.Response(500, headers={"PAYMENT-RESPONSE": b64(receipt())})
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, Shop(paid=lambda _request, _shop: failed))
        for number in range(5):
            http.get(f"{URL}/{number}")
        assert session.report().to_dict()["terminated_by"] == "loop_detected"
        assert (session.spent, session.held) == (Decimal("0.05"), 0)


def test_where_no_number_of_failures_is_set_none_trips(ledger_url):
    shop = Shop(paid=lambda _request, _shop: httpx.Response(500))
    with make_guard(ledger_url, policy=Policy(loop=Loop(latch_after=1, failures=0), breaker=None)) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(6):
                client(session, shop).get(f"{URL}/{number}")
            assert session.report().to_dict()["state"] == "open"
    assert len(shop.nonces) == 6


def test_steps_and_calls_have_a_maximum_by_rules_of_their_own(ledger_url):
    policy = Policy(max_steps=6, max_calls={"serp": 2, "GET courts.example/opinion/42": 1})
    with make_guard(ledger_url, policy=policy) as guard:
        with guard.session("s", budget="$5.00", id="run") as session:
            pays(session)()
            with pytest.raises(PolicyDenied, match=r"policy.max_calls") as refused:
                pays(session)()
            assert refused.value.rule == "max_calls"
        with guard.session("s", id="run") as session:
            for number in range(2):
                session.charge("serp", "$0.01", arguments={"n": number})
            with pytest.raises(PolicyDenied, match="calls of serp"):
                session.charge("serp", "$0.01")
            for _ in range(3):
                session.charge("other", "$0.01")
            with pytest.raises(PolicyDenied, match=r"policy.max_steps") as refused:
                session.charge("other", "$0.01")
            assert refused.value.rule == "max_steps"
            assert session.report().to_dict()["state"] == "open"


@pytest.mark.parametrize("pattern", ["GET courts.example/*", "* courts.example/opinion/*", "get COURTS.example/op*"])
def test_a_pattern_counts_all_that_it_matches(ledger_url, pattern):
    policy = Policy(max_calls={pattern: 2, "look_*": 1})
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$5.00", id="run") as session:
        shop = Shop()
        for number in range(2):
            client(session, shop).get(f"{URL}/{number}")
        with pytest.raises(PolicyDenied, match=r"policy.max_calls"):
            client(session, shop).get(f"{URL}/2")
        elsewhere = Shop(required(url="https://other.example/opinion/1"))
        assert client(session, elsewhere).get("https://other.example/opinion/1").status_code == 200
        session.charge("look_up", "$0.01")
        with pytest.raises(PolicyDenied, match="look_"):
            session.charge("look_around", "$0.01")
        session.charge("overlook", "$0.01")


SPENDER = """
import sys
from x402guard import Guard, LoopDetected, Loop, Policy, SessionTripped
made = 0
with Guard(ledger=sys.argv[1], policy=Policy(loop=Loop(latch_after=1, calls=10))) as guard, guard.session("s", id="run") as session:
    for _ in range(10):
        try:
            session.charge("serp", "$0.01", arguments={"q": 1})
            made += 1
        except (LoopDetected, SessionTripped):
            break
print(made)
"""


def test_two_processes_share_one_detector(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$5.00", id="run") as session:
        spenders = [processes.start(SPENDER, url) for _ in range(2)]
        made = [int(spender.communicate(timeout=60)[0]) for spender in spenders]
        assert sum(made) == 10
        assert session.report().to_dict()["terminated_by"] == "loop_detected"


@pytest.fixture
def command(tmp_path):
    def run(*arguments):
        url = f"sqlite:///{tmp_path / 'books.db'}"
        done = typed(*arguments, "--ledger", url, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_owner_trips_resets_and_raises_and_the_journal_says_so(tmp_path, command):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard:
        with guard.session("s", budget="$0.10", id="run") as session:
            session.charge("serp", "$0.05")
            session.hold("render", up_to="$0.01").__enter__()
            code, said = command("trip", "run", "--reason", "it talks to strangers")
            assert (code, said.splitlines()[0]) == (0, "session run (s) is tripped")
            assert "$0.01 to render" in said
            with pytest.raises(SessionTripped):
                session.charge("serp", "$0.01")
            assert command("reset", "s") == (0, "session run (s) is open\n")
            session.charge("serp", "$0.01")
            assert command("budget", "set", "run", "$1.00") == (0, "session run (s): $0.10 → $1.00, $0.93 left, open\n")
            session.charge("film", "$0.90")
            events = [
                event for event in session.report().to_dict()["events"] if event["event"] in ("trip", "reset", "limit")
            ]
    assert [event["event"] for event in events] == ["trip", "reset", "limit"]
    assert (events[0]["word"], events[0]["reason"]) == ("kill_switch", "it talks to strangers")
    assert events[1]["by"] == events[2]["by"] != ""
    assert (events[2]["from"], events[2]["to"]) == ("0.10", "1.00")


def test_a_wallet_that_is_tripped_stops_every_session(tmp_path, command):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard:
        one, other = guard.session("a", budget="$1"), guard.session("b", budget="$1")
        assert command("trip", "wallet")[0] == 0
        for session in (one, other):
            with pytest.raises(SessionTripped, match="wallet"):
                session.charge("serp", "$0.01")
        assert command("reset", "wallet") == (0, "the wallet is open\n")
        one.charge("serp", "$0.01")


def test_what_stands_past_its_limit_is_raised_before_it_is_reset(tmp_path, command):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard:
        with guard.session("s", budget="$0.10", id="run") as session:
            with session.hold("render", up_to="$0.05") as job:
                job.capture("$0.30")
            code, said = command("reset", "run")
            assert code == 2
            assert "raise its limit first: x402guard budget set run 0.30" in said
            assert command("budget", "set", "run", "$0.40")[0] == 0
            assert command("reset", "run")[0] == 0
            session.charge("serp", "$0.10")


def test_a_child_that_is_named_as_the_run_keeps_no_run_from_being_stopped(tmp_path, command):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard:
        with guard.session("job", budget="$1", id="run-42") as session:
            for name in ("run-42", "job"):
                session.child(name, budget="$0.01")
            for called in ("run-42", "job"):
                assert command("trip", called)[1].startswith("session run-42 (job) is tripped")
                assert command("reset", called)[0] == 0
            assert guard.session("job", budget="$1").spent == 0  # what is read is written
            code, said = command("trip", "job")
            assert code == 2
            assert "'job' may mean 2 of them; name one: session 'job' by id=run-42; session 'job' by id=s_" in said
        with pytest.raises(ConfigError, match="name: 'wallet'"):
            guard.session("wallet", budget="$1")


def test_what_the_owner_raised_stays_raised_when_the_agent_opens_it_as_before(tmp_path, command):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard:
        guard.session("s", budget="$0.10", id="run").close()
        assert command("budget", "set", "run", "$1.00")[0] == 0
        with guard.session("s", budget="$0.10", id="run") as session:
            assert session.limit == Decimal("1.00")
        with guard.session("s", budget="$0.50", id="run") as session:  # lowered by the agent's own word
            assert session.limit == Decimal("0.50")
        with pytest.raises(ConfigError, match="never"):
            guard.session("s", budget="$2.00", id="run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("trip", "nobody"), "there is no session 'nobody'"),
        (("reset", "run"), "is open; only a tripped session can be reset"),
        (("budget", "set", "run", "lots"), "amount: 'lots' is not a dollar amount"),
        (("budget", "set", "nobody", "$1"), "there is no session 'nobody'"),
    ],
)
def test_an_owners_mistake_is_one_line(tmp_path, command, arguments, says):
    with make_guard(f"sqlite:///{tmp_path / 'books.db'}") as guard, guard.session("s", budget="$0.10", id="run"):
        code, said = command(*arguments)
    assert code == 2
    assert says in said


def test_an_agent_can_trip_and_ask_and_neither_loosens(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        assert (session.would_exceed("$1.00"), session.would_exceed("$1.01")) == (False, True)
        with session.child("c", budget="$0.10") as child:
            assert child.would_exceed("$0.11")
            child.trip("I repeat myself")
        with pytest.raises(SessionTripped, match="kill_switch"):
            session.charge("serp", "$0.01")
        assert not [name for name in dir(session) if name in ("reset", "set_limit", "raise_limit", "untrip")]
        assert json.loads(session.report().to_json())["terminated_by"] == "kill_switch"
