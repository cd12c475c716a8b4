"""Tells whether who reads an answer has left its loop by choice, or because of an error."""

from __future__ import annotations

import sys
from inspect import CO_GENERATOR
from opcode import opname
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_WAITS: Final = frozenset({"YIELD_VALUE", "RESUME", "WITH_EXCEPT_START"})
_DROPS: Final = frozenset({"POP_TOP", "POP_ITER"})
_LEAVES: Final = "__exit__"  # of a ``with`` around the answer


def left_by_choice() -> bool:
    """Return whether the generators around an answer, which are being closed, were dropped by ``break`` or ``return``.

    They get a ``GeneratorExit`` in any case, and nothing else tells what their reader does: while an error goes up, the
    interpreter shows it to no code below. But it closes them inside the instruction that ends the loop. For ``break`` and
    ``return`` that is the one that drops the iterator, which raises nothing; for an error it is the one that failed.
    Whatever else it is, and in code that has no frames, this is False.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - frames have no other name
    is_closed = False
    while frame is not None:
        code = frame.f_code
        does = opname[code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
        if does in _WAITS or (not is_closed and code.co_flags & CO_GENERATOR):
            is_closed = True  # a generator that is being closed
        elif is_closed and code.co_name != _LEAVES:
            return does in _DROPS
        frame = frame.f_back
    return False
