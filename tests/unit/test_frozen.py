"""``frozen.replace`` does what ``dataclasses.replace`` does, for every frozen row of the library."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from tests.support.ledger import a_hold
from x402guard.frozen import replace, values_of
from x402guard.ledger.model import Claim
from x402guard.ledger.transitions import Note
from x402guard.policy.steps import Step


@dataclass(frozen=True)
class Checked:
    one: int
    two: str = "b"
    made: str = field(init=False, default="made")

    def __post_init__(self):
        if self.one < 0:
            raise ValueError("one")
        object.__setattr__(self, "made", f"{self.one}{self.two}")


@pytest.mark.parametrize("changes", [{}, {"one": 2}, {"two": "c"}, {"one": 3, "two": "d"}])
def test_it_is_the_copy_that_dataclasses_makes(changes):
    row = Checked(1)
    assert replace(row, **changes) == dataclasses.replace(row, **changes)
    assert replace(row, **changes).made == dataclasses.replace(row, **changes).made


def test_a_row_with_slots_is_copied_too():
    hold = a_hold("h1", "$0.10")
    assert replace(hold, checked_ms=7) == dataclasses.replace(hold, checked_ms=7)
    step = Step(hold.kind, "serp", "k", "s/c")
    assert replace(step, node_id="t").run_id == "t"


def test_checks_run_again_and_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="one"):
        replace(Checked(1), one=-1)
    for wrong in ({"three": 3}, {"made": "x"}):
        with pytest.raises(TypeError):
            replace(Checked(1), **wrong)


def test_the_values_of_a_row_are_those_of_asdict():
    note = Note(claim=Claim(5, "0x1"), doubt="why")
    assert values_of(note) == dataclasses.asdict(note)
    assert values_of(Checked(1)) == dataclasses.asdict(Checked(1))
