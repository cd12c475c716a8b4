"""The proofs: why a hold may count less, or why what the rules forbid may happen this once.

Each is made in one place (``tests/kernel/test_rooms.py`` lists them). The kernel believes none by its name: it compares
what a proof says with the hold's row. It cannot see whether a proof is true; who makes one answers for that.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from x402guard.kernel.evm import Address


class Unsigned(Struct, frozen=True, tag=True):
    """The signer has not been given the hold, and never will be: ``kernel.released`` makes it, and refuses it from then on."""

    hold_id: str


class Unsent(Struct, frozen=True, tag=True):
    """No byte of the only request with this payment has left this machine. The transport makes it."""

    hold_id: str


class OfPayment(Struct, frozen=True):
    """What a chain shows of one payment: of its network, token and payer, and of its *nonce*, 64 hex digits, the hold's id."""

    network: str
    token: Address
    payer: Address
    nonce: str


class AtHead(OfPayment, frozen=True, tag=True):
    """A block that is not final shows a payment settled. It gives back no more than ``opened.most_exposed`` in sum.

    Attributes:
        payee, amount_atomic: what the Transfer moved, and to whom.
        transaction, log_index: the Transfer; with the network it proves one hold, and no other.
    """

    payee: Address
    amount_atomic: int
    transaction: str
    log_index: int


class Final(AtHead, frozen=True, tag=True):
    """As ``AtHead``, in a block that cannot be undone."""


class Cancelled(OfPayment, frozen=True, tag=True):
    """A final block shows that *transaction* has cancelled the nonce: nothing was taken, and nothing can be."""

    transaction: str


class UnusedPastDeadline(OfPayment, frozen=True, tag=True):
    """A final block of ``block_time`` (unix seconds) shows the nonce unused, and can no longer take the payment."""

    block_time: int


class Undone(OfPayment, frozen=True, tag=True):
    """What a chain proof has ended is open again: the block that showed it was undone. It frees nothing."""


class Billed(Struct, frozen=True, tag=True):
    """What an LLM provider bills for a call.

    ``usage``: it is stated in the answer, or counted here. ``refused``: the price of a prompt that was refused.
    ``nothing``: the provider bills nothing for such an answer, or was sent nothing.
    """

    why: Literal["usage", "refused", "nothing"]


class Stated(Struct, frozen=True, tag=True):
    """The caller's word for what a tool has cost, or how many tokens were used: also $0, and none."""


class ByOwner(Struct, frozen=True, tag=True):
    """A named command of the owner on one budget. *by* is who gave it."""

    node_id: str
    command: Literal["limit", "reset", "clock", "forgive", "payer"]
    by: str


class PayAgain(Struct, frozen=True, tag=True):
    """The caller's word that the same purchase may be paid a second time."""


class Lost(Struct, frozen=True, tag=True):
    """This process's own record of a hold that it had committed, and that the ledger's server has lost."""

    hold_id: str


ChainProof = AtHead | Final | Cancelled | UnusedPastDeadline | Undone
"""What the chain reader finds."""

Proof = Unsigned | Unsent | ChainProof | Billed | Stated | ByOwner | PayAgain | Lost
