"""A change set is data: a second process that is given bytes says what this one says."""

import subprocess
import sys

import pytest
from msgspec.json import Decoder, encode

import x402guard.kernel.ledger as kernel_ledger
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Before, ChangeSet, Now, Opened
from x402guard.kernel.commit import check
from x402guard.testing.simulator.case import Case
from x402guard.testing.simulator.simulate import play

SECOND_PROCESS = """
import sys
from msgspec.json import Decoder
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Before, ChangeSet, Now, Opened
from x402guard.kernel.commit import check

read = Decoder(tuple[Opened, Before, ChangeSet, Now]).decode

loaded = [name for name in ("httpx", "pydantic", "sqlite3", "anyio", "x402guard.ledger.view") if name in sys.modules]
said = []
for line in sys.stdin.buffer:
    try:
        check(*read(line))
    except IllegalTransition as error:
        said.append(error.rule)
    else:
        said.append("")
print(len(said), sorted(set(said)))
"""


READ = Decoder(tuple[Opened, Before, ChangeSet, Now]).decode


@pytest.fixture
def sent(monkeypatch):
    """What the kernel is given in a run, as it was sent and as bytes."""
    kept = []

    def noted(*given):
        kept.append((given, encode(given)))
        check(*given)

    monkeypatch.setattr(kernel_ledger, "check", noted)
    return kept


@pytest.mark.parametrize("store", ["memory", "fleet"])
def test_every_change_set_of_a_run_goes_through_bytes_and_a_second_process(sent, store):
    assert play(Case(7, 300, store=store)).violations == []
    assert len(sent) > 200
    for (opened, before, change_set, now), raw in sent:
        back = READ(raw)
        assert (back[0], back[2], back[3]) == (opened, change_set, now)
        assert (back[1].nodes, back[1].holds) == (before.nodes, before.holds)
    lines = b"\n".join(raw for _, raw in sent)
    told = subprocess.run([sys.executable, "-c", SECOND_PROCESS], input=lines, capture_output=True, check=True)
    assert told.stdout.decode().strip() == f"{len(sent)} ['']"


def test_a_second_process_refuses_what_this_one_refuses(sent):
    play(Case(7, 100))
    given = next(given for given, _ in sent if given[2].entries)
    with pytest.raises(IllegalTransition, match="books"):
        check(*READ(encode(given).replace(b'"captured":0', b'"captured":1')))
