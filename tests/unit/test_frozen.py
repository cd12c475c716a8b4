"""``frozen.replace`` does what ``dataclasses.replace`` does, for every frozen row of the library."""

import dataclasses
from dataclasses import dataclass, field

import pytest
from msgspec import Struct

from tests.support import processes
from tests.support.ledger import a_hold
from x402guard.frozen import read_struct, replace
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


def test_a_row_of_the_ledger_is_copied_too_and_stays_as_it_is():
    hold = a_hold("h1", "$0.10")
    copy = replace(hold, checked_ms=7)
    assert (copy.checked_ms, hold.checked_ms) == (7, 0)
    assert replace(copy, checked_ms=0) == hold
    step = Step(hold.kind, "serp", "k", "s/c")
    assert replace(step, node_id="t").run_id == "t"


def test_checks_run_again_and_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="one"):
        replace(Checked(1), one=-1)
    for wrong in ({"three": 3}, {"made": "x"}):
        with pytest.raises(TypeError):
            replace(Checked(1), **wrong)
    with pytest.raises(TypeError):
        replace(a_hold("h1", "$0.10"), three=3)
    with pytest.raises(AttributeError):
        a_hold("h1", "$0.10").captured = 5


_FIRST_READ_BY_THREADS = """
import sys
import threading
from msgspec import Meta, Struct, defstruct
from typing import Annotated, Any
from x402guard.frozen import read_struct, readable

sys.setswitchinterval(1e-6)
fields = [(f"f{number}", Annotated[str, Meta(max_length=number + 1)]) for number in range(8)]
models = [readable(defstruct(f"M{number}", [*fields, ("more", dict[str, Any] | None, None)])) for number in range(100)]
row = {name: "" for name, _ in fields}
barrier = threading.Barrier(8)


def read():
    for model in models:
        barrier.wait(20)
        read_struct(row, model)


threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_read_a_struct_first_do_not_end_the_process():
    """msgspec describes a struct at its first use, and two threads that do so at once end the process (SIGSEGV)."""
    done = processes.run(_FIRST_READ_BY_THREADS)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_struct_that_is_not_described_at_its_import_is_not_read():
    class Late(Struct):
        a: int

    with pytest.raises(TypeError, match="Late is not decorated with @readable"):
        read_struct({"a": 1}, Late)
