"""Values that must not be shown: signatures and payment headers on their way out."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, NoReturn, TypeVar

V = TypeVar("V")


class Sealed(Generic[V]):
    """A value that a crash report, a debugger's list of variables or a log shows as ``Sealed(…)``, and nothing else.

    No subclass of ``str``: what shortens long text for display would cut a plain piece out of it. It is neither pickled nor
    copied. ``reveal`` gives it back, to be used in place and never bound to a variable.
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
    """Forget the local variables of whatever fails inside: see ``forget_locals``."""
    try:
        yield
    except BaseException as error:
        forget_locals(error)
        raise


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of the frames in which *error* was raised, from where it is caught downwards.

    The traceback keeps its files and lines. Causes and contexts are followed as far as they were raised below here: an error
    that the caller was handling meanwhile is the caller's, and a generator of the caller's may be waiting in it.
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
