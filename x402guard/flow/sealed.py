"""Values that must not be shown: signatures and payment headers."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_ITERABLE_COROUTINE
from types import FrameType, TracebackType
from typing import Any, Final, Generic, NoReturn, TypeVar

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


class forgetting:  # noqa: N801 - read as a word: ``with forgetting():``
    """Drop the frames of an error that is raised inside: see ``forget_frames``.

    Not a generator: ``contextlib`` would put the traceback back.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drop the frames of *error*."""
        if error is not None:
            forget_frames(error)


def forget_frames(error: BaseException) -> None:
    """Drop the frames in which *error* was raised, below the catching one: their local variables hold payments.

    Their places become a note of the error. Causes and contexts are included if they were raised below here: an error
    that the caller was handling belongs to the caller. Frames of coroutines and generators are dropped and not cleared:
    a client raises one error in all streams of a connection, so they may be those of other tasks, and up to Python 3.12
    clearing one ends its task. Never raises, whatever the class of an error does.
    """
    below: set[FrameType] = set()
    waiting: list[tuple[BaseException | None, bool]] = [(error, True)]
    seen: set[int] = set()
    notes: list[tuple[BaseException, str]] = []
    while waiting:
        part, ours = waiting.pop()
        if part is None or id(part) in seen:
            continue
        trace = part.__traceback__
        if trace is not None and (ours or trace.tb_frame in below):
            seen.add(id(part))
            below.update(frame for frame, _ in traceback.walk_tb(trace))
            notes.append((part, _cut(part, trace, keeps_first=part is error and _is_running(trace.tb_frame))))
        if id(part) in seen or (ours and trace is None):
            seen.add(id(part))
            waiting += [(part.__cause__, False), (part.__context__, False)]
            if isinstance(part, BaseExceptionGroup):
                waiting += [(inner, True) for inner in part.exceptions]
    for part, note in notes:
        with suppress(Exception):
            if note and note not in getattr(part, "__notes__", ()):
                part.add_note(note)


def _cut(part: BaseException, trace: TracebackType, *, keeps_first: bool) -> str:
    """Drop the frames of an error, or all but its first one. Return the last places as a note, "" for none."""
    found = list(traceback.walk_tb(trace))[1 if keeps_first else 0 :]
    places = [f"{frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}" for frame, line in found[-_MOST_PLACES:]]
    if not keeps_first:
        _TRACEBACK.__set__(part, None)  # a class of the caller's may refuse to be changed
    each: TracebackType | None = trace
    while each is not None:  # a log record may have kept an inner one
        each.tb_next, each = None, each.tb_next
    for frame, _ in found:
        if not frame.f_code.co_flags & _SUSPENDS:
            with suppress(RuntimeError):  # it is running
                frame.clear()
    return "\n  ".join(["raised below:", *places]) if places else ""


def _is_running(frame: FrameType) -> bool:
    """Return whether a frame is one of this thread's stack: the one that has caught the error, and none of another task."""
    above: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as inspect.currentframe does
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None


_MOST_PLACES: Final = 30
_SUSPENDS: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE
_TRACEBACK: Final[Any] = BaseException.__dict__["__traceback__"]
