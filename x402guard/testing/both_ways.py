"""Plays each ordinary step both ways, the short and the general one, and compares all that they write."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final, TypeVar

from x402guard.flow import short_way
from x402guard.ledger.view import Change, LedgerView
from x402guard.policy.step_guard import Unusual

R = TypeVar("R")

ORDINARY: Final = "ordinary"
"""The count of the steps that were taken the short way. The others are counted by the reason why not."""

ONE_WAY: Final = short_way.decide
"""What users have: the general way is not played where the short one was."""


class WaysDifferError(AssertionError):
    """The short way has decided or written something else than the general one."""


@contextmanager
def both_ways(counts: MutableMapping[str, int] | None = None) -> Iterator[MutableMapping[str, int]]:
    """Play both ways inside the block, in this process. Yields how often the short way was taken, and why it was not."""
    counted: MutableMapping[str, int] = Counter[str]() if counts is None else counts

    def decide(view: LedgerView, short: Callable[[LedgerView], R | Unusual], general: Change[R]) -> R:
        twin = _twin(view)
        found = short(twin)
        why = found.why if isinstance(found, Unusual) else ORDINARY
        counted[why] = counted.get(why, 0) + 1
        if isinstance(found, Unusual):
            _compare("a step that is left to the general way", _written(twin), _written(view))
            return general(view)
        try:
            result = general(view)
        except Exception as error:
            raise WaysDifferError(f"the short way returns {found!r}, and the general one raises {error!r}") from error
        _compare("a step", [repr(found), *_written(twin)], [repr(result), *_written(view)])
        return result

    before, short_way.decide = short_way.decide, decide
    try:
        yield counted
    finally:
        short_way.decide = before


def _twin(view: LedgerView) -> LedgerView:
    """Return a view with the same rows and changes, which changes by itself."""
    twin = copy.copy(view)
    for name, value in vars(view).items():
        if isinstance(value, dict | list | set):
            setattr(twin, name, copy.copy(value))
    own = vars(twin)
    twin.node, twin.hold, twin.mark = own["_nodes"].__getitem__, own["_holds"].get, own["_marks"].get
    return twin


def _written(view: LedgerView) -> list[str]:
    """Return all that a view has to write and to say, as texts: a row of another type is another row."""
    changes = view.change_set(durable=True)
    rows = [getattr(changes, name) for name in changes.__struct_fields__]
    return [repr(each) for each in (*rows, view.notices, view.excused, view.recheck, view.now_ms)]


def _compare(what: str, short: list[str], general: list[str]) -> None:
    for ours, theirs in zip(short, general, strict=True):
        if ours != theirs:
            raise WaysDifferError(f"{what} differs: the short way writes {ours}, and the general way writes {theirs}")
