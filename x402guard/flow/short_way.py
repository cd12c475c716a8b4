"""Decides an ordinary step the short way, and any other one the general way. Tests play both, and compare all that they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from x402guard.ledger.view import Change, LedgerView
from x402guard.policy.step_guard import Unusual

R = TypeVar("R")


def decide(view: LedgerView, short: Callable[[LedgerView], R | Unusual], general: Change[R]) -> R:
    """Return what *short* decides on a view, or what *general* does where the step is ``Unusual``: nothing is written then."""
    found = short(view)
    return general(view) if isinstance(found, Unusual) else found
