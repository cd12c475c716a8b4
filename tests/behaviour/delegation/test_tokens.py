"""A token opens one session of one ledger, for one worker at a time, until it is old, revoked or used up."""

import base64
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from tests.support.delegations import NOW_S, SOON, asked, world
from x402guard import ConfigError, Owner, SessionClosed, SessionTripped
from x402guard.guard import guard as guards
from x402guard.ledger.delegations import MOST_KEYS


def refused(guard, token, why):
    before = guard.shell.store.nodes()
    with pytest.raises(ConfigError, match=f"^token: {why}") as error:
        guard.redeem(token)
    assert len(str(token)) < 20 or str(token) not in str(error.value)
    assert guard.shell.store.nodes() == before


def test_it_opens_the_session_once_at_a_time(books, planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        assert worker.id == task.session_id
        assert worker.task.request == task.request
        refused(books.guard(), task.token, ".* works on its task")
        worker.task.answer("done", confidence=1)
    refused(workers, task.token, "its task .* is answered already")
    task.result()
    refused(workers, task.token, "its task .* is taken already")


def test_of_many_that_redeem_at_once_one_works(books, planner):
    task, guards = planner.delegate(asked()), [books.guard() for _ in range(8)]
    gate = threading.Barrier(len(guards))

    def redeem(guard):
        gate.wait(20)
        try:
            return guard, guard.redeem(task.token)
        except ConfigError as error:
            return guard, str(error)

    with ThreadPoolExecutor(len(guards)) as pool:
        done = list(pool.map(redeem, guards))
    [(winner, session)] = [(guard, each) for guard, each in done if not isinstance(each, str)]
    losers = [each for _, each in done if isinstance(each, str)]
    assert all(each.startswith(f"token: {winner.instance} works on its task") for each in losers)
    [row] = books.store.marks("delegation", "").values()
    assert row["worker"] == winner.instance
    with session as worker:
        worker.task.answer("done", confidence=1)
    assert task.result().status == "completed"


def test_after_a_crash_another_worker_goes_on(books, planner):
    task = planner.delegate(asked())
    first = books.guard()
    dead = first.redeem(task.token)
    dead.bind(dead.charge)("a", "$0.30")
    first.close()  # its instance has ended, and its session was never closed
    with books.guard().redeem(task.token) as worker:
        assert str(worker.spent) == "0.30"
        worker.task.answer("done", confidence=1)
    assert task.result().cost == worker.spent


def test_an_old_one_is_refused(books, planner, workers):
    task = planner.delegate(asked())
    books.forward(SOON - NOW_S)
    refused(workers, task.token, "it ended 0 s ago")
    assert task.result(timeout_s=0).error.startswith("session 'research' had until")


@pytest.mark.parametrize("by", ["planner", "owner"])
def test_a_revoked_one_is_refused_and_stops_its_worker(tmp_path, by):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with world(url) as books, books.guard().session("planner", budget="$1.00") as planner:
        unread, working = planner.delegate(asked()), planner.delegate(asked())
        workers = books.guard()
        worker = workers.redeem(working.token)
        charge = worker.bind(worker.charge)
        for task in (unread, working):
            if by == "planner":
                task.revoke("not needed")
                task.revoke("again")
            else:
                with Owner(url, by="ada") as owner:
                    row = owner.revoke(task.request.request_id, "not needed")
                    assert (row.state, row.reason) == ("revoked", "not needed (by ada)")
        refused(workers, unread.token, "it is revoked: not needed")
        with pytest.raises(SessionTripped, match="revoked"):
            charge("a", "$0.01")
        with pytest.raises(ConfigError, match="revoked already"):
            worker.task.answer("done", confidence=1)
        worker.close()
        result = working.result()
        assert (result.status, result.responder_id) == ("failed", "x402guard")
        assert result.error.startswith("it was revoked: not needed")
        planner.charge("a", "$0.01")


@pytest.mark.parametrize("reason", ["G\udcfcnther: stop", "a\nb\x1b[31m", "stop \0 now"])
@pytest.mark.parametrize("by", ["planner", "owner"])
def test_it_is_revoked_whatever_the_reason_says(tmp_path, by, reason):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with world(url) as books, books.guard().session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked())
        if by == "planner":
            task.revoke(reason)
        else:
            with Owner(url) as owner:
                owner.revoke(task.request.request_id, reason)
        refused(books.guard(), task.token, "it is revoked: ")


def test_a_reset_gives_a_revoked_worker_nothing_back(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with world(url) as books, books.guard().session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked())
        with books.guard().redeem(task.token) as worker, Owner(url) as owner:
            owner.revoke(task.session_id)
            owner.reset(task.session_id)
            with pytest.raises(SessionClosed, match="the end of its task"):
                worker.charge("a", "$0.01")
            assert owner.revoke(task.session_id).state == "revoked"


def test_one_that_a_worker_has_named_after_its_own_is_not_in_the_way(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with world(url) as books, books.guard().session("planner", budget="$1.00") as planner:
        task = planner.delegate(asked(request_id="r1"))
        with books.guard().redeem(task.token) as worker:
            for name in ("r1", worker.id):
                worker.delegate(asked(request_id=name, budget="$0.01"))
            with Owner(url) as owner:
                assert owner.revoke("r1").session == task.session_id
            with pytest.raises(SessionTripped):
                worker.charge("a", "$0.01")
        others = [planner.delegate(asked(budget="$0.01")) for _ in range(2)]
        with Owner(url) as owner:
            with pytest.raises(
                ConfigError,
                match=r"^delegation: 2 delegations have the id 't_'; name it by its session",
            ):
                owner.revoke("t_")
            assert owner.revoke(others[0].session_id).request_id == others[0].request.request_id
            for wrong in (None, 7, "\ud800", ""):
                with pytest.raises(ConfigError, match=r"^delegation: no delegation has the id"):
                    owner.revoke(wrong)


def test_a_guard_in_shadow_mode_works_on_no_task(books, planner):
    task = planner.delegate(asked(allowed_tools=["search"]))
    with pytest.raises(ConfigError, match=r"^mode: a guard in shadow mode"):
        books.guard(mode="shadow").redeem(task.token)
    books.guard().redeem(task.token).close()


def test_a_redemption_that_is_cancelled_does_not_use_the_task_up(books, planner, workers, monkeypatch):
    task, plain = planner.delegate(asked()), guards.redeemed

    def slow(basis, token):
        session = plain(basis, token)
        time.sleep(0.3)
        return session

    monkeypatch.setattr(guards, "redeemed", slow)

    async def main():
        with anyio.move_on_after(0.1) as scope:
            async with workers.aredeem(task.token):
                raise AssertionError("it was cancelled")
        assert scope.cancelled_caught

    anyio.run(main)
    monkeypatch.undo()
    with workers.redeem(task.token) as worker:
        worker.task.answer("done", confidence=1)
    assert task.result().status == "completed"


def test_a_worker_that_trips_itself_stops_itself_alone(planner, workers):
    task, other = planner.delegate(asked()), planner.delegate(asked())
    with workers.redeem(task.token) as worker, worker.child("inner", budget="$0.01") as inner:
        inner.trip("enough")
        with pytest.raises(SessionTripped):
            inner.charge("a", "$0.01")
    with workers.redeem(other.token) as sibling:
        sibling.charge("a", "$0.01")
        sibling.task.answer("done", confidence=1)
    planner.charge("a", "$0.01")


def test_a_token_that_was_handed_over_stays_good_however_often_it_is_asked_for(planner, workers):
    task = planner.delegate(asked(request_id="r1"))
    later = [planner.delegated("r1").token for _ in range(MOST_KEYS + 5)]
    assert (later.count(""), len(set(later))) == (6, MOST_KEYS)
    with workers.redeem(task.token) as worker:
        worker.task.answer("done", confidence=1)


def test_what_is_answered_cannot_be_revoked(planner, workers):
    task = planner.delegate(asked())
    with workers.redeem(task.token) as worker:
        worker.task.answer("done", confidence=1)
    with pytest.raises(ConfigError, match=r"^delegation: .* is answered already"):
        task.revoke()


def test_one_of_another_ledger_is_refused(books, planner, workers):
    with world("memory://") as others:
        with others.guard().session("planner", budget="$1.00", id="plan") as other:
            foreign = other.delegate(asked(request_id="r1"))
            refused(workers, foreign.token, "it is for another ledger")
        planner.delegate(asked(request_id="r1"))
        refused(workers, foreign.token, "it is for another ledger")


def changed(token, **fields):
    """Return a token with other facts, and the signature that it had."""
    prefix, body, signature = token.split(".")
    facts = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    text = base64.urlsafe_b64encode(json.dumps({**facts, **fields}, separators=(",", ":")).encode()).decode()
    return f"{prefix}.{text.rstrip('=')}.{signature}"


def test_a_changed_one_is_refused(books, planner, workers):
    one, other = planner.delegate(asked()), planner.delegate(asked(budget="$0.90"))
    assert changed(one.token) == one.token
    refused(workers, changed(one.token, until=SOON + 10), "this ledger has not issued it")
    refused(workers, changed(one.token, session=other.session_id), "this ledger has not issued it")
    refused(workers, changed(one.token, session="plan"), "this ledger has not issued it")
    refused(workers, changed(one.token, until="soon"), "it is damaged")
    refused(workers, changed(one.token, more=1), "it is damaged")
    refused(workers, one.token[:-10], "this ledger has not issued it|it is damaged")
    refused(workers, one.token.rpartition(".")[0], "this ledger has not issued it|it is damaged")


@pytest.mark.parametrize(
    "text", ["", "x", None, 7, b"x402g1.", "x402g1.", "x402g1.e30.e30", "x402g1.é.é", "x402g1." + "a" * 3000]
)
def test_what_is_no_token_is_refused(workers, text):
    refused(workers, text, "it is (no token|damaged)")


def test_the_ledger_keeps_no_token_and_no_private_key(books, planner):
    task = planner.delegate(asked())
    rows = json.dumps(dict(books.store.marks("delegation", "")))
    assert task.token.rpartition(".")[2] not in rows
    assert task.token not in repr(task) + str(vars(task.request)) + rows


def test_the_session_around_it_has_to_be_open(books, workers):
    with books.guard().session("planner", budget="$1.00") as planner:
        tripped = planner.delegate(asked())
    with pytest.raises(SessionClosed):
        workers.redeem(tripped.token)
