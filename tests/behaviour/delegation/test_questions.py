"""What an agent asks another one gets a reply, or the end of the one that was asked is ``not_verified``."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from tests.support.delegations import asked, lasting, world
from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner, SessionClosed, SessionTripped
from x402guard.guard import watchdog
from x402guard.ledger.inputs import MOST_INPUTS


def word(session):
    return session.report().to_dict()["terminated_by"]


def in_a_thread(function, *arguments):
    """Call a function in a thread that ends with the test."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return found


def first(look):
    """What a look at the ledger finds, as soon as it finds something."""
    pause = threading.Event()
    for _ in range(500):
        found = look()
        if found:
            return found
        pause.wait(0.02)
    raise AssertionError("nothing came")


def test_a_worker_asks_for_what_was_withheld(planner, workers):
    task = planner.delegate(asked(withheld=["customer"]))
    with workers.redeem(task.token) as worker:
        assert worker.task.request.withheld == ("customer",)
        reply = in_a_thread(worker.task.ask, {"need": "customer"})
        question = task.result()
        assert (question.status, question.output) == ("needs_clarification", {"need": "customer"})
        assert task.result() == question
        task.reply("Ada")
        assert reply.result(20) == "Ada"
        worker.task.answer("done", confidence=1)
    assert task.result().status == "completed"
    assert word(worker) == "completed"


def test_a_worker_that_ends_with_a_question_is_followed_by_one_that_gets_the_reply(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        worker.task.answer("which year?", status="needs_clarification")
    assert word(worker) == "not_verified"
    assert task.result().output == "which year?"
    task.reply(1912)
    with pytest.raises(TimeoutError):
        task.result(timeout_s=0)
    with workers.redeem(task.token) as worker:
        assert worker.task.ask("which year?", timeout_s=0) == 1912
        worker.task.answer("done", confidence=1)
    assert task.result().status == "completed"


def test_an_end_without_a_reply_is_not_verified(books, workers):
    with books.guard().session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked())
        with workers.redeem(task.token) as worker:
            worker.task.answer("which year?", status="needs_clarification")
        task.result()
        assert planner.finish("done") is False
    assert word(planner) == "not_verified"


@pytest.mark.parametrize("end", ["replied", "ignored"])
def test_peers_ask_each_other(books, planner, workers, end):
    one, other = planner.delegate(asked()), planner.delegate(asked(task_type="check"))
    with workers.redeem(one.token) as researcher:
        with workers.redeem(other.token) as checker:
            reply = in_a_thread(lambda: researcher.ask(checker.id, {"is": "it so?"}))
            [question] = first(checker.inputs)
            assert (question.sender, question.payload) == (researcher.id, {"is": "it so?"})
            if end == "replied":
                checker.reply(question, True)
                assert reply.result(20) is True
                assert checker.inputs() == []
                with pytest.raises(ConfigError, match=r"^input: .* waits for no reply"):
                    checker.reply(question, False)
            checker.task.answer("fine", confidence=1)
        if end == "ignored":
            with pytest.raises(SessionClosed, match="no reply can come"):
                reply.result(20)
        researcher.task.answer("done", confidence=1)
    assert word(checker) == ("completed" if end == "replied" else "not_verified")


def test_a_question_stays_after_its_time(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        with pytest.raises(TimeoutError, match="no reply after 0 s"):
            worker.task.ask("which year?", timeout_s=0)
        with pytest.raises(ConfigError, match=r"^input: the last one .* has no reply yet"):
            worker.task.ask("which month?", timeout_s=0)
        task.reply(1912)
        assert worker.task.ask("which year?", timeout_s=0) == 1912
        with pytest.raises(TimeoutError):
            worker.task.ask("which year?", timeout_s=0)  # it has its reply: this is a new question


def test_a_trip_ends_the_wait(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        reply = in_a_thread(worker.task.ask, "which year?")
        first(planner.inputs)
        worker.trip("enough")
        with pytest.raises(SessionTripped):
            reply.result(20)


def test_waits_end_in_the_ledger(books, planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        with pytest.raises(TimeoutError):
            worker.task.ask("which year?", timeout_s=0)
        worker.task.answer("done", confidence=1)
    with pytest.raises(TimeoutError):
        planner.delegate(asked()).result(timeout_s=0)
    assert task.result()
    assert [row["calls"] for row in books.store.marks("wait", "").values() if row["calls"]] == []


@pytest.mark.parametrize("wrong", ["nowhere", "wallet", "", "other"], ids=repr)
def test_only_a_session_of_the_same_run_is_asked(books, planner, wrong):
    with books.guard().session("other", budget="$1.00", id="other"), pytest.raises(ConfigError, match=r"^session: "):
        planner.ask(wrong, "hello", timeout_s=0)


@pytest.mark.parametrize(
    "wrong", [object(), {1: 2}, float("nan"), "x" * 70_000, ("a",), "\ud800"], ids=lambda each: str(each)[:20]
)
def test_only_plain_json_is_asked_and_replied(books, planner, workers, wrong):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        with pytest.raises(ConfigError, match=r"^payload: "):
            worker.task.ask(wrong, timeout_s=0)
        with pytest.raises(ConfigError, match=r"^payload: "):
            task.reply(wrong)
        with pytest.raises(ConfigError, match=r"^output: "):
            worker.task.answer(wrong, confidence=1)
    assert books.store.marks("input", "") == {}


def test_a_crowd_of_questions_is_bounded(tmp_path):
    with world("memory://") as books, books.guard().session("planner", budget="$1.00") as planner:
        for number in range(MOST_INPUTS):
            child = planner.child(f"c{number}", budget="$0.01")
            with pytest.raises(TimeoutError):
                child.ask(planner.id, number, timeout_s=0)
        with pytest.raises(ConfigError, match=r"^input: 100 others"):
            planner.child("last", budget="$0.01").ask(planner.id, "x", timeout_s=0)
        assert len(planner.inputs()) == MOST_INPUTS


@pytest.mark.parametrize("library", ["asyncio", "trio"])
def test_all_of_it_awaited(books, library):
    async def work(workers, token, said):
        async with workers.aredeem(token) as worker:
            said.append(await worker.task.aask("which year?"))
            await worker.task.aanswer("done", confidence=1)

    async def main():
        workers, said = books.guard(), []
        async with books.guard().asession("planner", budget="$1.00") as planner:
            task = await planner.adelegate(asked())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, workers, task.token, said)
                assert (await task.aresult()).status == "needs_clarification"
                [question] = await planner.ainputs()
                await planner.areply(question, 1912)
                assert (await task.aresult()).status == "completed"
            other = await planner.adelegate(asked())
            with anyio.move_on_after(0.3):
                await other.aresult()
            await other.arevoke()
            assert (await other.aresult()).status == "failed"
        assert said == [1912]
        assert [row["calls"] for row in books.store.marks("wait", "").values() if row["calls"]] == []

    anyio.run(main, backend=library)


def test_a_task_that_is_over_asks_no_more(books, workers):
    for over in ("answered", "revoked"):
        with books.guard().session("planner", budget="$1.00") as planner:
            task = planner.delegate(asked())
            with workers.redeem(task.token) as worker:
                with pytest.raises(TimeoutError):
                    worker.task.ask("which year?", timeout_s=0)
                assert len(planner.inputs()) == 1
                if over == "revoked":
                    task.revoke()
                else:
                    worker.task.answer("found it", confidence=1)
            assert planner.inputs() == []
            assert planner.finish("done") is True
        assert word(planner) == "completed"


def test_a_question_is_compared_as_json(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        with pytest.raises(TimeoutError):
            worker.task.ask({"a": 1}, timeout_s=0)
        task.reply("one")
        with pytest.raises(TimeoutError):
            worker.task.ask({"a": True}, timeout_s=0)


def test_an_agent_that_has_ended_is_asked_nothing(books, planner):
    with planner.child("gone", budget="$0.01") as gone:
        pass
    with pytest.raises(SessionClosed, match="no reply can come"):
        planner.ask(gone.id, "?", timeout_s=0)
    assert books.store.marks("input", "") == {}


def test_a_reply_is_to_the_question_that_was_read(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        for question, answer in (("delete?", "no"), ("keep?", "yes")):
            with pytest.raises(TimeoutError):
                worker.task.ask(question, timeout_s=0)
            [read] = planner.inputs()
            if question == "delete?":
                first_read = read
            else:
                with pytest.raises(ConfigError, match=r"^input: "):
                    planner.reply(first_read, "no")
            planner.reply(read, answer)
            assert worker.task.ask(question, timeout_s=0) == answer
    assert "delete?" not in repr(first_read)


def test_a_wait_that_is_cancelled_at_any_moment_ends(books, planner):
    """``task.cancel()`` breaks the shield of a transaction that is being written."""

    async def main():
        task = planner.delegate(asked())
        for number in range(60):
            waiting = asyncio.create_task(task.aresult())
            await asyncio.sleep(number * 0.0003)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    asyncio.run(main())
    assert [row["calls"] for row in books.store.marks("wait", "").values()] in ([], [{}])


def test_waiting_on_the_thread_of_an_event_loop_is_refused(books, planner):
    task = planner.delegate(asked())

    async def main():
        with pytest.raises(
            ConfigError, match=r"^result: .* would block the event loop; write `await task.aresult\(\)`"
        ):
            task.result()
        with pytest.raises(TimeoutError):
            task.result(timeout_s=0)

    anyio.run(main)
    assert [row["calls"] for row in books.store.marks("wait", "").values()] == [{}]


@pytest.mark.parametrize("wrong", ["\ud800", ["a"], None, "a\nb"], ids=repr)
def test_who_is_asked_is_named_by_a_plain_id(planner, wrong):
    with pytest.raises(ConfigError, match=r"^session: "):
        planner.ask(wrong, "?", timeout_s=0)
    with pytest.raises(ConfigError, match=r"^to: str is no Input"):
        planner.reply("x", 1)
    with pytest.raises(ConfigError, match=r"^timeout_s: "):
        planner.ask(planner.id, "?", timeout_s=None)


@contextlib.contextmanager
def pair_in_a_file(folder):
    """Two children of one session, on a ledger that an owner can open."""
    url = f"sqlite:///{folder / 'spend.db'}"
    with make_guard(url) as guard, guard.session("planner", budget="$1.00") as planner:
        one, other = (planner.child(name, budget="$0.10") for name in ("one", "other"))
        yield url, guard, one, other


def test_agents_that_ask_each_other_again_and_again_are_found(tmp_path):
    with pair_in_a_file(tmp_path) as (url, _, one, other):

        def insist(asking, peer):
            for _ in range(200):
                with contextlib.suppress(TimeoutError):
                    return asking.ask(peer.id, "?", timeout_s=0.2)

        with ThreadPoolExecutor(2) as asking, Owner(url) as owner:
            insisting = [asking.submit(insist, one, other), asking.submit(insist, other, one)]
            dog = owner.watchdog()
            assert "a deadlock" in first(dog.look)[0][1]
            for each in insisting:
                with pytest.raises((SessionTripped, SessionClosed)):
                    each.result(20)
            dog.close()


def test_a_cycle_is_tripped_at_the_second_look_and_not_while_a_call_is_under_way(tmp_path):
    with pair_in_a_file(tmp_path) as (url, guard, one, other):
        with ThreadPoolExecutor(2) as asking, Owner(url) as owner:
            replies = [asking.submit(one.ask, other.id, "?"), asking.submit(other.ask, one.id, "?")]
            first(lambda: sum(len(row["calls"]) for row in guard.shell.store.marks("wait", "").values()) == 2)
            dog, later = owner.watchdog(), owner.watchdog()
            with other.scope("$0.05") as inside, other.bind(lambda: inside.hold("render", up_to="$0.01"))():
                assert [dog.look(), dog.look()] == [[], []]
            assert dog.look() == []
            [(tripped, reason)] = dog.look()
            nodes = {node.id: node for node in guard.shell.store.nodes()}
            assert tripped.id == max((one.id, other.id), key=lambda each: (nodes[each].created_ms, each))
            assert one.id in reason
            assert other.id in reason
            assert later.look() == []
            for each in replies:
                with pytest.raises((SessionTripped, SessionClosed)):
                    each.result(20)
            dog.close()
            later.close()


@contextlib.contextmanager
def around_a_planner(folder):
    """A planner that waits for a worker, which waits for a sibling, which waits for the planner; and a watchdog."""
    url = f"sqlite:///{folder / 'spend.db'}"
    with make_guard(url) as guard, guard.session("planner", budget="$1.00") as planner, ThreadPoolExecutor(2) as asking:
        tasks = []
        for name in ("worker", "sibling", "third"):
            time.sleep(0.002)  # of two that begin in one millisecond, the ids say which is the younger one
            tasks.append(planner.delegate(lasting(task_type=name, budget="$0.10")))
        worker, sibling, third = (guard.redeem(task.token) for task in tasks)
        replies = [asking.submit(worker.ask, sibling.id, "?"), asking.submit(sibling.ask, planner.id, "?")]
        first(lambda: sum(len(row["calls"]) for row in guard.shell.store.marks("wait", "").values()) == 2)
        with Owner(url) as owner:
            dog = owner.watchdog()
            yield planner, tasks[0], (worker, sibling, third), replies, dog
            dog.close()


def let_go(planner, sibling, replies):
    planner.reply(planner.inputs()[0], "yes")
    assert replies[1].result(20) == "yes"
    sibling.reply(first(sibling.inputs)[0], "no")
    assert replies[0].result(20) == "no"


def test_a_planner_that_looks_into_its_inputs_between_its_waits_is_no_deadlock(tmp_path):
    with around_a_planner(tmp_path) as (planner, task, (_, sibling, _), replies, dog), ThreadPoolExecutor(1) as waiting:
        for _ in range(4):
            assert first(planner.inputs)
            result = waiting.submit(task.result, timeout_s=0.6)
            first(lambda: len(planner.shell.store.marks("wait", f"{planner.id} {task.session_id}")) == 1)
            assert dog.look() == []
            with pytest.raises(TimeoutError):
                result.result(20)
        let_go(planner, sibling, replies)


@pytest.mark.parametrize("calls", [True, False])
def test_a_call_of_another_worker_hides_no_deadlock(tmp_path, calls):
    with around_a_planner(tmp_path) as (planner, task, (worker, sibling, third), replies, dog):
        with third if calls else contextlib.nullcontext(), ThreadPoolExecutor(1) as waiting:
            with third.hold("render", up_to="$0.01") if calls else contextlib.nullcontext():
                result = waiting.submit(task.result)
                first(lambda: len(planner.shell.store.marks("wait", f"{planner.id} {task.session_id}")) == 1)
                assert dog.look() == []
                [(tripped, reason)] = dog.look()
            assert tripped.id == sibling.id
            assert all(each.id in reason for each in (planner, worker, sibling))
            with pytest.raises(SessionTripped):
                replies[1].result(20)
            with pytest.raises(SessionClosed):
                replies[0].result(20)
            worker.close()
            assert result.result(20).status == "failed"


def test_a_reply_that_comes_before_the_trip_prevents_it(tmp_path, monkeypatch):
    with around_a_planner(tmp_path) as (planner, task, (_, sibling, _), replies, dog), ThreadPoolExecutor(1) as waiting:
        plain = watchdog.why_deadlocked

        def late(*arguments):
            if arguments and planner.inputs():
                planner.reply(planner.inputs()[0], "yes")
            return plain(*arguments)

        monkeypatch.setattr(watchdog, "why_deadlocked", late)
        result = waiting.submit(task.result, timeout_s=10)
        first(lambda: len(planner.shell.store.marks("wait", f"{planner.id} {task.session_id}")) == 1)
        assert [dog.look(), dog.look()] == [[], []]
        assert replies[1].result(20) == "yes"
        sibling.reply(first(sibling.inputs)[0], "no")
        assert replies[0].result(20) == "no"
        task.revoke()
        assert result.result(20).status == "failed"
