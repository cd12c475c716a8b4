"""``x402guard approvals``: an agent's process waits, and a person answers it from another one."""

import json
import threading
import time
from decimal import Decimal

import pytest

from tests.support import processes
from tests.support.command_line import forked, typed
from tests.support.ledger import START_MS, Clock
from tests.support.merchant import make_guard
from x402guard.guard.approvers import QueueApprover, operating_user
from x402guard.ledger.questions import Question, approval_mark, put_question
from x402guard.ledger.view import Scope
from x402guard.policy import ApprovalRequest
from x402guard.stores import open_store

pytestmark = pytest.mark.xdist_group("cli")

AGENT = """
import json, sys
import httpx
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import PaymentRefused, Policy, Rule
url, what, people = sys.argv[1:]
policy = Policy(rules=[Rule(name="ask", action="ask", approvers=int(people))], breaker=None)
shop = Shop()
with make_guard(url, policy=policy, approver="queue") as guard, guard.session("s", budget="$1") as session:
    requests, ran = [], []
    wipe = session.tool(cost="$0.01", name="crm.wipe")(lambda disk, note="": ran.append(disk))
    def think():
        from tests.support.llm_provider import CHAT, ask, completion
        answer = lambda request: (requests.append(request), httpx.Response(200, json=completion()))[1]
        client(session, answer).post(CHAT, json=ask())
    uses = {
        "payment": lambda: client(session, shop).get(URL),
        "llm": think,
        "tool": lambda: wipe("sda", note=sys.stdin.readline().strip()),
    }
    said = "ran"
    try:
        uses[what]()
    except PaymentRefused as error:
        said = f"{error.rule}: {error}"
    made = len(shop.payments) + len(requests) + len(ran)
    print(json.dumps({"said": said, "made": made, "held": str(session.held), "spent": str(session.spent)}))
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'books.db'}"


@pytest.fixture
def approvals(tmp_path, url):
    def run(*arguments, way=typed):
        done = way("approvals", *arguments, "--ledger", url, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def agent(url):
    """Starts an agent that asks; it is killed at the end, where it still waits."""
    started = []

    def start(what="tool", people=1, note="to all"):
        with make_guard(url):
            pass
        process = processes.start(AGENT, url, what, people)
        started.append(process)
        process.stdin.write(f"{note}\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def waiting(url, number=1):
    """Return the questions that wait, once there are so many."""
    store = open_store(url)
    try:
        for _ in range(1_200):
            rows = {key: row for key, row in store.marks("approval", "").items() if not row["taken"]}
            if len(rows) == number:
                return rows
            time.sleep(0.05)
    finally:
        store.close()
    raise AssertionError("nobody asks")


def ended(process):
    return json.loads(process.communicate(timeout=60)[0])


@pytest.mark.parametrize("what", ["payment", "llm", "tool"])
def test_what_is_allowed_in_one_process_is_done_in_another(url, agent, approvals, what):
    process = agent(what)
    [key] = waiting(url)
    code, listed = approvals("list", "--json", way=forked)
    [row] = json.loads(listed)
    assert (code, row["id"], row["yes"]) == (0, f"{key[:16]}.1", "0 of 1")
    assert "rule 'ask'" in row["words"]
    code, said = approvals("allow", row["id"], way=forked)
    assert (code, said) == (0, f"allowed by {operating_user()}: {row['what']}\n")
    done = ended(process)
    assert (done["said"], done["made"], float(done["held"])) == ("ran", 1, 0)
    assert approvals("list") == (0, "no question waits for an answer\n")


@pytest.mark.parametrize("what", ["payment", "llm", "tool"])
def test_what_is_denied_is_not_done(url, agent, approvals, what):
    process = agent(what)
    [key] = waiting(url)
    assert approvals("deny", key, way=forked)[0] == 0
    done = ended(process)
    assert done["said"].startswith("approval: ")
    assert (done["made"], float(done["held"]), float(done["spent"])) == (0, 0, 0)


def test_two_people_have_to_answer_and_one_of_them_twice_is_one(url, agent, approvals):
    process = agent(people=2)
    [key] = waiting(url)
    for name in ("Ann", " ann"):
        assert approvals("allow", key[:8], "--as", name) == (
            0,
            f"allowed by {name.strip()}: crm.wipe; more approvers needed: 1\n",
        )
    assert json.loads(approvals("list", "--json")[1])[0]["yes"] == "1 of 2"
    assert approvals("allow", key, "--as", "Bob")[0] == 0
    assert ended(process)["said"] == "ran"


def test_the_environment_makes_nobody_of_anybody(url, agent, approvals, monkeypatch):
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv("LOGNAME", "ann")
    agent(people=2)
    [key] = waiting(url)
    assert f"allowed by {operating_user()}:" in approvals("allow", key)[1]
    monkeypatch.setenv("USER", "bob")
    assert "approvers needed: 1" in approvals("allow", key)[1]


def asked(url, **changes):
    """A question of an agent that is gone."""
    facts = {"id": "ab" * 32, "session": "s", "what": "crm.wipe", "words": "may I?", "approvers": 1, "timeout_s": 300}
    question = Question(**{**facts, **changes})
    store = open_store(url)
    store.transact(Scope(marks=(approval_mark(question.id),), durable=True), lambda view: put_question(view, question))
    store.close()
    return question.id


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("cd", "no question has the id"),
        ("", "no question has the id"),
        ("ab" * 33, "no question has the id"),
        ("%", "no question has the id"),
        ("a", "2 questions have the id"),
    ],
)
def test_an_id_that_names_no_one_question_is_a_mistake(url, approvals, question, says):
    asked(url)
    asked(url, id="ac" * 32)
    for verb in ("allow", "deny"):
        code, said = approvals(verb, question)
        assert code == 2
        assert says in said


def test_what_was_answered_or_ran_out_waits_no_more(url, approvals):
    key = asked(url)
    assert approvals("deny", key)[0] == 0
    assert approvals("allow", key)[0] == 2
    clock = Clock(START_MS - 10**9)
    store = open_store(url, clock_ms=clock)
    late = Question("cd" * 32, "s", "x", "w", 1, 300)
    store.transact(
        Scope(marks=(approval_mark(late.id),)), lambda view: view.put_mark(approval_mark(late.id), old_row(late))
    )
    store.close()
    assert approvals("allow", late.id)[0] == 2
    assert approvals("list", "--json") == (0, "[]\n")


def old_row(question):
    return {
        "session": "s",
        "what": "x",
        "words": question.words,
        "approvers": 1,
        "asked_ms": 1,
        "until_ms": 2,
        "said": {},
        "taken": False,
    }


@pytest.mark.parametrize("name", ["", "  "])
def test_nobody_is_not_somebody(url, approvals, name):
    code, said = approvals("allow", asked(url), "--as", name)
    assert code == 2
    assert "--as NAME" in said


@pytest.mark.parametrize(
    "words", ["may I [/] do it", "[bold]harmless[/bold]", "a [conceal]wipe all[/conceal]", "x [link=evil]y"]
)
def test_what_an_agent_says_is_shown_to_the_letter(url, approvals, words):
    asked(url, words=words)
    code, said = approvals("list")
    assert code == 0
    assert words in said


def test_what_an_agent_says_steers_no_terminal(url, approvals):
    asked(url, words="a\x1b[2Jb\nc\u202ed")
    for more in ((), ("--json",)):
        said = approvals("list", *more)[1]
        assert "\x1b" not in said
        assert "\u202e" not in said


def test_what_does_not_fit_into_a_question_is_said_to_be_missing(url):
    store = open_store(url)
    arguments = {"note": "x" * 5_000, "wipe": "everything"}
    request = ApprovalRequest("id", "s", "tool", "crm.wipe", Decimal(0), "", "", arguments, "ask", "why", 1, 1)
    asking = threading.Thread(target=lambda: QueueApprover(store, lambda _: time.sleep(0.01)).ask(request), daemon=True)
    asking.start()
    [row] = waiting(url).values()
    asking.join(20)
    store.close()
    assert "everything" in row["words"] or "…" in row["words"] or "more" in row["words"]


def test_a_ledger_that_is_not_there_is_not_made_by_looking(tmp_path, approvals):
    assert approvals("list")[0] == 2
    assert list(tmp_path.iterdir()) == []
