"""A task that has ended keeps its run out of no archive, however it has ended."""

import time

import pytest

from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard.delegation.messages import TaskRequest
from x402guard.stores import open_store
from x402guard.stores.archiving import archive

DAY_MS = 86_400_000


def revoked(task, _guard, _clock):
    task.revoke("not needed")


def given_up(task, _guard, clock):
    clock.tick(61)
    assert task.result(timeout_s=1).status == "failed"


def answered(task, guard, _clock):
    with guard.redeem(task.token) as session:
        session.task.answer("done", confidence=0.99)


WAYS = {"never redeemed": lambda *_: None, "revoked": revoked, "given up": given_up, "answered": answered}


@pytest.mark.parametrize("way", WAYS)
def test_the_run_of_an_ended_task_is_archived(tmp_path, way):
    url, clock = f"sqlite:///{tmp_path}/l.db", Clock(int(time.time() * 1000))
    with make_guard(open_store(url, clock_ms=clock), budget="$50") as guard:
        with guard.session("s", budget="$5", id="job") as session:
            session.charge("serp", "$0.10")
            asked = TaskRequest(task_type="x", payload={}, budget="$1", deadline=clock() // 1000 + 60)
            WAYS[way](session.delegate(asked), guard, clock)
    clock.tick(30)
    store = open_store(url, clock_ms=clock)
    early = archive(store, clock() - 29_000, tmp_path, gone=set()).sessions  # the task may be redeemed yet
    assert early == (0 if way == "never redeemed" else 2)
    clock.tick(400 * 86_400)
    assert early + archive(store, clock() - DAY_MS, tmp_path, gone=set()).sessions == 2
    store.close()
