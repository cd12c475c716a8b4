"""``x402guard watchdog`` against agents in processes of their own: stopped, silent, looping, and merely slow."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import processes
from tests.support.command_line import forked, typed
from tests.support.delegations import lasting
from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable, Owner
from x402guard.guard.watchdog import Watchdog
from x402guard.ledger.watch import BEAT

pytestmark = pytest.mark.xdist_group("watchdog")

AGENT = """
import sys, time
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Loop, PaymentRefused, Policy

url, way = sys.argv[1:]
with make_guard(url, policy=Policy(loop=Loop(states=100), breaker=None)) as guard:
    with guard.session("agent", budget="$1.00", id="run-1") as session:
        http = client(session, Shop())
        http.get(URL)
        if way == "loops":
            for _ in range(5):
                session.step(state={"plan": "ask again"})
        if way == "slow":
            hold = session.hold("render", up_to="$0.50")
            hold.__enter__()
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            http.get(URL + "/2")
            print("paid", flush=True)
        except PaymentRefused as refusal:
            print(refusal.rule, flush=True)
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


@pytest.fixture
def agents():
    running = []

    def start(url, way):
        agent = processes.start(AGENT, url, way)
        running.append(agent)
        assert agent.stdout.readline() == "ready\n"
        return agent

    yield start
    for agent in running:
        agent.send_signal(signal.SIGCONT)
        agent.communicate("\n")


def look(url, tmp_path, *arguments):
    done = forked("watchdog", "--once", "--json", *arguments, "--ledger", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def goes_on(agent):
    agent.stdin.write("\n")
    agent.stdin.flush()
    return agent.stdout.readline().strip()


def state_of(url):
    with Owner(url) as owner:
        row = owner.budget("run-1")
        return row.state, row.terminated_by


def test_a_stopped_agent_is_tripped_within_two_looks_and_cannot_sign_afterwards(url, tmp_path, agents):
    agent = agents(url, "works")
    agent.send_signal(signal.SIGSTOP)
    with processes.start("x402guard", "watchdog", "--every", "1s", "--ledger", url, module=True, cwd=tmp_path) as dog:
        told = dog.stdout.readline()
        assert re.fullmatch(rf"tripped session 'agent' \(run-1\): its process {agent.pid} is stopped\n", told)
        dog.send_signal(signal.SIGTERM)
        assert dog.wait() == 0
    agent.send_signal(signal.SIGCONT)
    assert goes_on(agent) == "session_tripped"
    assert state_of(url) == ("tripped", "watchdog")


def test_a_silent_agent_is_tripped_and_one_that_waits_for_a_slow_call_is_not(url, tmp_path, agents):
    agent = agents(url, "works")
    assert look(url, tmp_path) == []
    time.sleep(1.1)
    [told] = look(url, tmp_path, "--silence", "1s")
    assert told["session"] == "run-1"
    assert re.fullmatch(r"it is silent for \d+ s", told["reason"])
    assert look(url, tmp_path, "--silence", "1s") == []
    assert goes_on(agent) == "session_tripped"


def test_an_agent_with_a_call_under_way_goes_on(url, tmp_path, agents):
    agent = agents(url, "slow")
    time.sleep(1.1)
    assert look(url, tmp_path, "--silence", "1s") == []
    assert goes_on(agent) == "paid"


def test_an_agent_in_the_same_state_again_and_again_is_tripped(url, tmp_path, agents):
    agent = agents(url, "loops")
    assert look(url, tmp_path, "--states", "6") == []
    [told] = look(url, tmp_path)
    assert told["reason"] == "it has reported the same state 5 times"
    assert goes_on(agent) == "session_tripped"


def test_an_agent_past_its_time_is_tripped(url, tmp_path, agents):
    agent = agents(url, "slow")
    time.sleep(2.1)
    [told] = look(url, tmp_path, "--run", "1s")
    assert "it is open for" in told["reason"]
    assert goes_on(agent) == "session_tripped"


def test_an_agent_whose_process_was_killed_is_silent_and_not_stopped(url, tmp_path, agents):
    agent = agents(url, "works")
    agent.kill()
    agent.wait()
    assert look(url, tmp_path) == []
    time.sleep(1.1)
    assert [told["session"] for told in look(url, tmp_path, "--silence", "1s")] == ["run-1"]


def doctor(url, tmp_path):
    done = forked("doctor", "--json", "--ledger", url, cwd=tmp_path)
    return [row for row in json.loads(done.stdout) if row["check"] == "watchdog"]


def test_doctor_misses_a_watchdog_that_has_died_and_none_that_has_ended(url, tmp_path, agents):
    agents(url, "works")
    assert doctor(url, tmp_path) == []
    with processes.start("x402guard", "watchdog", "--every", "1s", "--ledger", url, module=True, cwd=tmp_path) as dog:
        # One that has just begun, or that waits for its turn beside other work, may look late.
        while (found := doctor(url, tmp_path)) == [] or found[0]["verdict"] != "ok":
            assert dog.poll() is None
        assert found == [{"check": "watchdog", "verdict": "ok", "detail": f"process {dog.pid} looks every 1 s"}]
        dog.send_signal(signal.SIGKILL)
        dog.wait()
        while (found := doctor(url, tmp_path))[0]["verdict"] == "ok":
            pass
        assert re.fullmatch(
            rf"process {dog.pid} has not looked for \d+ s; start it again: x402guard watchdog", found[0]["detail"]
        )
    look(url, tmp_path)
    assert doctor(url, tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--silence", "soon"), "--silence: 'soon' is not a time"),
        (("--run", "0s"), "--run: '0s' is not a time"),
        (("--states", "0"), "states: 0 is not a positive whole number"),
        (("--every", "2d"), "--every: '2d' is not a time"),
    ],
)
def test_mistakes_are_told_in_a_line(url, tmp_path, agents, arguments, says):
    agents(url, "works")
    done = forked("watchdog", "--once", *arguments, "--ledger", url, cwd=tmp_path)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_ledger_that_is_not_there_is_told(tmp_path):
    done = forked("watchdog", "--once", "--ledger", str(tmp_path / "no.db"), cwd=tmp_path)
    assert (done.returncode, "no ledger yet at" in done.stderr) == (2, True), done.stderr


DEADLOCKED = """
import sys
from tests.support.merchant import make_guard
from x402guard import PaymentRefused

url, way = sys.argv[1:]
token, peer = sys.stdin.readline().split()
with make_guard(url) as guard, guard.redeem(token) as session:
    print("ready", flush=True)
    if way == "answers":
        sys.stdin.readline()
        [question] = session.inputs()
        session.reply(question, "yes")
    try:
        print(session.ask(peer, f"what do you say, {peer}?", timeout_s=100), flush=True)
    except PaymentRefused as refusal:
        print(refusal.rule, flush=True)
"""


@pytest.fixture
def pair(url):
    """A planner that waits for two workers, which are processes of their own."""
    running = []

    def start(*ways):
        tasks = []
        for name in ("older", "younger"):
            time.sleep(0.002)  # of two that begin in one millisecond, the ids say which is the younger one
            tasks.append(planner.delegate(lasting(task_type=name, budget="$0.10")))
        for way, task, peer in zip(ways, tasks, reversed(tasks), strict=True):
            worker = processes.start(DEADLOCKED, url, way)
            running.append(worker)
            worker.stdin.write(f"{task.token} {peer.session_id}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "ready\n"
        return tasks, running

    with make_guard(url) as guard, guard.session("planner", budget="$1.00", id="run-1") as planner:
        yield start
        for worker in running:
            worker.kill()
            worker.communicate()


def waits(url, count):
    """Wait until so many sessions wait for each other."""
    with Owner(url, read_only=True) as owner:
        while sum(len(row["calls"]) for row in owner._store.marks("wait", "").values()) != count:
            time.sleep(0.05)


def looks(url, count):
    """Wait until a watchdog has begun so many looks."""
    kind, key = BEAT
    seen = set()
    with Owner(url, read_only=True) as owner:
        while len(seen) < count:
            beats = owner._store.marks(kind, key)
            seen |= {row["at_ms"] for row in beats.values()}
            time.sleep(0.05)


def test_two_workers_that_ask_each_other_are_found_at_the_second_look(url, tmp_path, pair):
    tasks, workers = pair("asks", "asks")
    waits(url, 2)
    with processes.start("x402guard", "watchdog", "--every", "1s", "--ledger", url, module=True, cwd=tmp_path) as dog:
        told = dog.stdout.readline()
        ids = [task.session_id for task in tasks]
        assert told.startswith(f"tripped session 'younger' ({ids[1]}): a deadlock: ")
        for name, session_id in zip(("older", "younger"), ids, strict=True):
            assert f"'{name}' ({session_id}) waits for a reply of" in told
        dog.send_signal(signal.SIGHUP)  # its terminal was closed
        assert dog.wait() == 0
    assert workers[1].stdout.readline() == "session_tripped\n"
    assert workers[0].stdout.readline() == "session_closed\n"  # no reply can come any more
    assert [worker.wait() for worker in workers] == [0, 0]  # then their sessions have ended
    with Owner(url) as owner:
        assert [owner.budget(each).state for each in ids] == ["closed", "tripped"]
        assert owner.budget("run-1").state == "open"


def test_two_workers_of_which_one_answers_are_no_deadlock(url, tmp_path, pair):
    _, workers = pair("asks", "answers")
    waits(url, 1)
    dog = ("watchdog", "--every", "1s", "--json", "--ledger", url)
    with processes.start("x402guard", *dog, module=True, cwd=tmp_path) as watching:
        looks(url, 3)
        workers[1].stdin.write("\n")
        workers[1].stdin.flush()
        assert workers[0].stdout.readline() == "yes\n"
        watching.send_signal(signal.SIGTERM)
        assert watching.communicate()[0] == ""


def test_a_worker_that_is_silent_is_tripped_and_its_planner_goes_on(url, tmp_path, pair):
    tasks, _ = pair("answers", "answers")
    with ThreadPoolExecutor(2) as waiting:
        results = [waiting.submit(task.result) for task in tasks]
        waits(url, 2)
        time.sleep(1.1)
        told = look(url, tmp_path, "--silence", "1s")
        assert {each["session"] for each in told} == {task.session_id for task in tasks}
        for each in results:
            assert "is tripped (watchdog: it is silent for " in each.result(30).error
    assert state_of(url) == ("open", None)


@pytest.mark.parametrize("command", ["watchdog", "reconcile"])
@pytest.mark.parametrize("retry", ["later", "after_change"])
def test_what_runs_for_ever_says_why_it_waits_and_goes_on(url, tmp_path, agents, monkeypatch, command, retry):
    """Also where something has to change first: a server that is read-only while another one takes over comes back."""
    agents(url, "works")
    away = LedgerUnavailable("the disk is full")
    away.retry = retry
    answers = [away, away, KeyboardInterrupt()]

    def look(*_):
        raise answers.pop(0)

    monkeypatch.setattr(*{"watchdog": (Watchdog, "look"), "reconcile": (Owner, "reconcile")}[command], look)
    monkeypatch.setattr("time.sleep", lambda _: None)
    done = typed(command, "--every", "1s", "--ledger", url, cwd=tmp_path)
    assert (answers, done.stderr.count("the disk is full; the next")) == ([], 2), done
