"""A change set is data: a second process that is given bytes says what this one says."""

import subprocess
import sys

import pytest

import x402guard.kernel.ledger as kernel_ledger
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Submission
from x402guard.kernel.commit import check
from x402guard.testing.simulator.case import Case
from x402guard.testing.simulator.simulate import play

SECOND_PROCESS = """
import sys
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Submission
from x402guard.kernel.commit import check

loaded = [name for name in ("httpx", "pydantic", "sqlite3", "anyio", "x402guard.ledger.view") if name in sys.modules]
said = []
for line in sys.stdin.buffer:
    sent = Submission.from_bytes(line)
    try:
        check(sent.opened, sent.before, sent.change_set, sent.now)
    except IllegalTransition as error:
        said.append(error.rule)
    else:
        said.append("")
print(len(said), sorted(set(said)))
"""


@pytest.fixture
def sent(monkeypatch):
    """Every submission of a run, as it was sent and as bytes."""
    kept = []

    def noted(*given):
        submission = Submission(*given)
        kept.append((submission, submission.to_bytes()))
        check(*given)

    monkeypatch.setattr(kernel_ledger, "check", noted)
    return kept


@pytest.mark.parametrize("store", ["memory", "fleet"])
def test_every_change_set_of_a_run_goes_through_bytes_and_a_second_process(sent, store):
    assert play(Case(7, 300, store=store)).violations == []
    assert len(sent) > 200
    for submission, raw in sent:
        back = Submission.from_bytes(raw)
        assert (back.opened, back.change_set, back.now) == (submission.opened, submission.change_set, submission.now)
        assert back.before.nodes == submission.before.nodes
        assert back.before.holds == submission.before.holds
    lines = b"\n".join(raw for _, raw in sent)
    told = subprocess.run([sys.executable, "-c", SECOND_PROCESS], input=lines, capture_output=True, check=True)
    assert told.stdout.decode().strip() == f"{len(sent)} ['']"


def test_a_second_process_refuses_what_this_one_refuses(sent):
    play(Case(7, 100))
    submission = next(each for each, _ in sent if each.change_set.entries)
    wrong = Submission.from_bytes(submission.to_bytes().replace(b'"captured":0', b'"captured":1'))
    with pytest.raises(IllegalTransition, match="books"):
        check(wrong.opened, wrong.before, wrong.change_set, wrong.now)
