"""Values that must not be shown: signatures and payment headers."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, NoReturn, TypeVar

V = TypeVar("V")


class Sealed(Generic[V]):
    """A value that crash reports, debuggers and logs show only as ``Sealed(…)``.

    It is not a ``str``: code that shortens long text for display would show a part of it. It cannot be pickled or
    copied. Use the result of ``reveal`` in place, and never bind it to a variable.
    """

    __slots__ = ("_value",)

    def __init__(self, value: V) -> None:
        self._value = value

    def reveal(self) -> V:
        """Return the value."""
        return self._value

    def __repr__(self) -> str:
        return "Sealed(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a sealed value is never pickled or copied")


@contextmanager
def forgetting() -> Iterator[None]:
    """Clear the local variables of an error that is raised inside: see ``forget_locals``."""
    try:
        yield
    except BaseException as error:
        forget_locals(error)
        raise


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of the frames in which *error* was raised, from the catching frame down.

    The traceback keeps its files and lines. Causes and contexts are included if they were raised below here: an error
    that the caller was handling belongs to the caller, and one of the caller's generators may be suspended in it.
    """
    below: set[FrameType] = set()
    waiting: list[tuple[BaseException | None, bool]] = [(error, True)]
    seen: set[int] = set()
    while waiting:
        part, ours = waiting.pop()
        if part is None or id(part) in seen:
            continue
        trace = part.__traceback__
        if trace is not None and (ours or trace.tb_frame in below):
            seen.add(id(part))
            below.update(frame for frame, _ in traceback.walk_tb(trace))
            traceback.clear_frames(trace)
        if id(part) in seen or (ours and trace is None):
            seen.add(id(part))
            waiting += [(part.__cause__, False), (part.__context__, False)]
            if isinstance(part, BaseExceptionGroup):
                waiting += [(inner, True) for inner in part.exceptions]
