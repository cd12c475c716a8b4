"""The states of a hold and every step between them. A step that is not in ``STEPS`` cannot happen.

This file knows nothing of HTTP, of chains or of the caller, so it has no exceptions for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from x402guard.kernel.rows import HoldState

AUTHORIZE: Final = "authorize"
"""The name of the step that writes a new hold: – → HELD. It is the only one without an earlier state."""

FORGIVE: Final = "forgive"
"""The name of the step that closes a purchase whose answer was not handed over. It changes no state and no amount."""

_HELD, _CAPTURED, _VOIDED, _EXPIRED = HoldState.HELD, HoldState.CAPTURED, HoldState.VOIDED, HoldState.EXPIRED

STEPS: Final[Mapping[tuple[HoldState, str], HoldState]] = MappingProxyType(
    {
        (_HELD, "note"): _HELD,
        (_HELD, "capture"): _CAPTURED,
        (_HELD, "void"): _VOIDED,
        (_HELD, "expire"): _EXPIRED,
        (_HELD, "lapse"): _CAPTURED,
        (_CAPTURED, "correct"): _CAPTURED,
        (_CAPTURED, "reopen"): _HELD,
        (_EXPIRED, "correct"): _CAPTURED,
        (_VOIDED, "correct"): _CAPTURED,
        (_VOIDED, "reopen"): _HELD,
        (_HELD, FORGIVE): _HELD,
        (_CAPTURED, FORGIVE): _CAPTURED,
    }
)
"""(state, name of the step) → next state."""
