"""The queue in the ledger: one answer for one call, in time, by people who are named; and nothing of it is kept."""

import threading
import time
from decimal import Decimal

import anyio
import pytest

from tests.support import processes
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import Approvals, ConfigError, PaymentRefused, Policy, Rule
from x402guard.guard.approvers import QueueApprover
from x402guard.ledger.questions import approval_mark, give_answer, question_id
from x402guard.ledger.view import Scope
from x402guard.stores import open_store


def asks(people=1, **more):
    return Policy(rules=[Rule(name="ask", action="ask", approvers=people)], breaker=None, approvals=Approvals(**more))


class Queue:
    """A guard that asks in its ledger, on a clock that can be turned, and a person who reads the ledger."""

    def __init__(self, url, **policy):
        self.clock = Clock()
        self.store = open_store(url, clock_ms=self.clock)
        self.guard = make_guard(self.store, policy=asks(**policy), approver="queue")

    def rows(self):
        return self.store.marks("approval", "")

    def waiting(self, number=1):
        for _ in range(2_000):
            rows = {key: row for key, row in self.rows().items() if not row["taken"]}
            if len(rows) >= number:
                return rows
            time.sleep(0.01)
        raise AssertionError("no question was asked")

    def answer(self, question, by, *, allow=True):
        scope = Scope(marks=(approval_mark(question),), durable=True)
        shown = question_id(question, self.rows()[question])
        return self.store.transact(scope, lambda view: give_answer(view, question, by, allow=allow, shown=shown))


@pytest.fixture
def queue(ledger_url):
    opened = []

    def make(**policy):
        opened.append(Queue(ledger_url, **policy))
        return opened[-1]

    yield make
    for made in opened:
        made.guard.close()
        made.store.close()


def charging(session, ends, **arguments):
    def use():
        try:
            session.charge("serp", "$0.01", arguments=arguments or {"secret": "hunter2"})
            ends.append("paid")
        except PaymentRefused as error:
            ends.append(str(error))

    thread = threading.Thread(target=session.bind(use), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("allow", [True, False])
def test_a_question_waits_in_the_ledger_with_nothing_held_until_it_is_answered(queue, allow):
    books, ends = queue(), []
    with books.guard.session("s", budget="$1") as session:
        thread = charging(session, ends)
        [(key, row)] = books.waiting().items()
        assert session.held == 0
        assert "hunter2" in row["words"]
        books.answer(key, "Ann", allow=allow)
        thread.join(20)
        assert (ends == ["paid"]) is allow
        assert session.spent == (Decimal("0.01") if allow else 0)
        [event] = [event for event in session.report().to_dict()["events"] if event["event"] == "approval"]
        assert (event["allowed"], event["by"]) == (allow, ["ann"])
    assert "hunter2" not in str(books.rows())


def test_one_person_who_answers_twice_counts_once(queue):
    books, ends = queue(people=2), []
    with books.guard.session("s", budget="$1") as session:
        thread = charging(session, ends)
        [key] = books.waiting()
        for name in ("Ann", "ann", " ANN "):
            assert len(books.answer(key, name)["said"]) == 1
        thread.join(0.3)
        assert ends == []
        books.answer(key, "Bob")
        thread.join(20)
        assert ends == ["paid"]


def test_after_one_yes_a_no_is_a_no(queue):
    books, ends = queue(people=2), []
    with books.guard.session("s", budget="$1") as session:
        thread = charging(session, ends)
        [key] = books.waiting()
        books.answer(key, "Ann")
        books.answer(key, "Bob", allow=False)
        thread.join(20)
        assert "denied" in ends[0]
        assert session.spent == 0


def test_silence_on_the_ledgers_clock_is_a_no_and_what_was_asked_is_gone(queue):
    books, ends = queue(timeout_s=300), []
    with books.guard.session("s", budget="$1") as session:
        thread = charging(session, ends)
        [key] = books.waiting()
        books.clock.tick(299)
        thread.join(0.3)
        assert ends == []
        books.clock.tick(1)
        thread.join(20)
        assert "in time" in ends[0]
        with pytest.raises(ConfigError, match="already closed"):
            books.answer(key, "Ann")
    assert "hunter2" not in str(books.rows())


def test_what_was_asked_is_gone_when_time_has_passed_while_the_clock_stood(queue):
    books, ends = queue(timeout_s=1), []
    with books.guard.session("s", budget="$1") as session:
        charging(session, ends).join(20)
        assert "in time" in ends[0]
        for _ in range(100):
            if "hunter2" not in str(books.rows()):
                break
            time.sleep(0.01)
    assert "hunter2" not in str(books.rows())
    with pytest.raises(ConfigError, match="already closed"):
        books.answer(next(iter(books.rows())), "Ann")


def test_one_yes_lets_one_of_two_like_calls_pass(queue):
    books, ends = queue(), []
    with books.guard.session("s", budget="$1") as session:
        threads = [charging(session, ends) for _ in range(2)]
        [key] = books.waiting()
        time.sleep(0.3)  # both wait
        books.answer(key, "Ann")
        for thread in threads:
            thread.join(20)
        assert ends.count("paid") == 1
        assert session.spent == Decimal("0.01")


def test_a_yes_is_used_up(queue):
    books, ends = queue(), []
    with books.guard.session("s", budget="$1") as session:
        for number in (1, 2):
            thread = charging(session, ends)
            [key] = books.waiting()
            thread.join(0.3)
            assert len(ends) == number - 1
            books.answer(key, "Ann")
            thread.join(20)
        assert ends == ["paid", "paid"]


def test_an_answer_to_one_question_is_none_to_another(queue):
    books, ends = queue(), []
    with books.guard.session("s", budget="$1") as session:
        one = charging(session, ends, n=1)
        [key] = books.waiting()
        two = charging(session, ends, n=2)
        [other] = set(books.waiting(2)) - {key}
        books.answer(other, "Ann", allow=False)
        two.join(20)
        assert "denied" in ends[0]
        books.answer(key, "Ann")
        one.join(20)
        assert ends[1] == "paid"


def test_an_approval_is_asked_again_after_a_restart_and_keeps_who_has_said_yes(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    killed = processes.start(WAITS, url)
    books = Queue(url, people=2)
    books.clock.now_ms = int(time.time() * 1000)
    try:
        [key] = books.waiting()
        books.answer(key, "Ann")
        killed.kill()
        killed.communicate()
        ends = []
        with books.guard.session("s", budget="$1", id="run") as session:
            thread = charging(session, ends)
            thread.join(0.3)
            assert (ends, list(books.waiting())) == ([], [key])
            books.answer(key, "Bob")
            thread.join(20)
            assert ends == ["paid"]
            assert session.spent == Decimal("0.01")
    finally:
        killed.kill()
        killed.stdout.close()
        books.guard.close()
        books.store.close()


WAITS = """
import sys
from tests.support.merchant import make_guard
from x402guard import Policy, Rule
policy = Policy(rules=[Rule(name="ask", action="ask", approvers=2)], breaker=None)
with make_guard(sys.argv[1], policy=policy, approver="queue") as guard:
    with guard.session("s", budget="$1", id="run") as session:
        session.charge("serp", "$0.01", arguments={"secret": "hunter2"})
"""


def test_a_call_that_was_cancelled_takes_no_answer_from_the_next(tmp_path):
    """The thread that asked for it is left behind, and polls more often than the one that is waited for."""
    store, polled, own = open_store(f"sqlite:///{tmp_path / 'books.db'}"), [], threading.local()

    def pause(_seconds):
        if not hasattr(own, "number"):  # a thread's id is given to another one once it has ended
            polled.append(own)
            own.number = len(polled)
        time.sleep(0.005 if own.number == 1 else 0.3)

    async def use(session):
        async with session.hold("serp", up_to="$0.01", arguments={"q": 1}) as job:
            job.capture("$0.01")

    async def asked(number):
        for _ in range(1_000):
            if len(polled) >= number:
                return
            await anyio.sleep(0.01)

    async def go():
        async with make_guard(store, policy=asks(), approver=QueueApprover(store, pause)) as guard:
            async with guard.session("s", budget="$1") as session:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(use, session)
                    await asked(1)
                    tasks.cancel_scope.cancel()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(use, session)
                    await asked(2)
                    [key] = store.marks("approval", "")
                    scope = Scope(marks=(approval_mark(key),), durable=True)
                    shown = question_id(key, store.marks("approval", "")[key])
                    store.transact(scope, lambda view: give_answer(view, key, "Ann", allow=True, shown=shown))
                assert session.spent == Decimal("0.01")

    anyio.run(go)
    store.close()
