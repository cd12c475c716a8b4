"""Makes the proofs of what a provider bills, and of what a caller states. They are believed, as a bill is."""

from __future__ import annotations

from typing import Final

from x402guard.kernel.proofs import Billed, Stated

BILLED_USAGE: Final = Billed("usage")
"""The usage is stated in the answer, or counted here."""

BILLED_REFUSED: Final = Billed("refused")
"""The price of a prompt that the provider has refused."""

BILLED_NOTHING: Final = Billed("nothing")
"""The provider bills nothing for such an answer, or was sent nothing."""

STATED: Final = Stated()
"""The caller's word for the cost of a tool, or for the tokens that were used."""
