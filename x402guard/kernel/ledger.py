"""The ledger as the kernel holds it: load, propose, check, write, and only then sign.

A store keeps rows. It never sees a decision, and it is handed rows to write by the kernel alone, after the check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, final

import coincurve
from msgspec.structs import replace

from x402guard.errors import ConfigError, IllegalTransition, SignerError
from x402guard.kernel.change_set import MONEY_MARKS, Before, ChangeSet, Now, Opened
from x402guard.kernel.commit import check, check_worth
from x402guard.kernel.evm import Address, checksum_address, keccak, normalise_signature
from x402guard.kernel.proofs import Unsigned
from x402guard.kernel.released import Released
from x402guard.kernel.rows import Hold, Node
from x402guard.kernel.signer import KeySigner, Signable, committed, may_be_signed
from x402guard.kernel.sound import Sound
from x402guard.kernel.typed_data import digest

Clock = Callable[[], tuple[int, int]]
"""Returns the believed time in unix milliseconds, and how far the machine's clock is ahead of it. The store has it."""


class Rows(Protocol):
    """A store's rows within one transaction."""

    def load(self, scope: Any, clock: Clock) -> Loaded:
        """Return the rows that a room asks for with all their ancestors, as of the time of *clock*."""

    def busy(self) -> Iterable[Node]:
        """Return every node that keeps idle budget or holds something, and all above them; none where none may."""

    def add(self, change_set: ChangeSet) -> None:
        """Take the rows of a change set that was checked. The kernel alone calls it."""


class Loaded(Protocol):
    """What a store has loaded for one decision (``ledger.view.Loaded``). The kernel sets ``forget``: hold → ``Unsigned``, or None."""

    before: Before
    clock_ms: int
    now_ms: int
    forget: Callable[[str], Unsigned | None]
    keeps_idle: bool


Propose = Callable[[Any], ChangeSet]
"""A pure decision over what a store has loaded (``Loaded``). It may be run again, on rows that were loaded again."""


class Signs(Protocol):
    """A signer: this process's own, or one on another machine."""

    def sign(self, hold: Hold) -> bytes:
        """Return the 65-byte signature of a hold's payment."""

    @property
    def address(self) -> Address:
        """The account that pays."""


class Work:
    """All that happens inside of one transaction: load, propose, check, hand over. *ended*: payments its last run has ended."""

    def __init__(self, ledger: Ledger, scope: Any, propose: Propose, lost: frozenset[str]) -> None:
        self._ledger, self._scope, self._propose, self._lost = ledger, scope, propose, lost
        self.ended, self._begun = list[str](), list[str]()

    def __call__(self, rows: Rows) -> None:
        """Run it on the rows of a transaction. Raises what the decision raises, and ``IllegalTransition``."""
        ledger, released = self._ledger, self._ledger.released
        released.ended(self._begun)  # by a run of which nothing was written
        self.ended, self._begun = [], []
        loaded = rows.load(self._scope, ledger.clock())
        ledger.sound.look(loaded.before, keeps_idle=loaded.keeps_idle)
        loaded.forget = released.forget
        known, clock_ms, keeps_idle, opened = loaded.before, loaded.clock_ms, loaded.keeps_idle, ledger.opened
        before = Before(dict(known.nodes), dict(known.holds), dict(known.marks), known.purchase, known.named)
        proposed = self._propose(loaded)
        # Each field is read once, here: a room's iterator would be empty for what comes after.
        nodes, holds = tuple(proposed.nodes), tuple(proposed.holds)
        entries, steps, owner = tuple(proposed.entries), tuple(proposed.steps), tuple(proposed.owner)
        marks = tuple([(key, dict(row) if key[0] in MONEY_MARKS else row) for key, row in proposed.marks])
        if len(known.nodes) > len(before.nodes):  # the room has asked for those that keep idle budget
            for node in rows.busy():
                before.nodes.setdefault(node.id, node)
            ledger.sound.look(before, keeps_idle=keeps_idle)
        if not (nodes or holds or marks or entries):
            return
        change_set = ChangeSet(nodes, holds, marks, entries, steps, owner, proposed.durable and self._scope.durable)
        now_ms = max([clock_ms, *(node.last_ms for node in before.nodes.values() if node is not None)])
        now = Now(clock_ms, now_ms, *released.known(change_set.steps), self._lost)
        opened = opened if opened.keeps_idle is keeps_idle else replace(opened, keeps_idle=keeps_idle)
        check(opened, before, change_set, now)
        for hold in change_set.holds:
            if hold.intent is not None:
                parents = {n.id: n.parent_id for n in (*before.nodes.values(), *change_set.nodes) if n is not None}
                released.lies(hold.id, list(_path(hold.node_id, parents)))
                if not may_be_signed(hold):
                    self.ended.append(hold.id)
                elif before.holds[hold.id] is None and hold.id not in self._lost:
                    released.begun(hold.id)
                    self._begun.append(hold.id)
        rows.add(change_set)


def _path(node_id: str | None, parents: Mapping[str, str | None]) -> Iterator[str]:
    while node_id is not None:
        yield node_id
        node_id = parents[node_id]


class Ledger(ABC):
    """What every store of a ledger is. ``commit`` is the only way to write nodes, holds, entries and marks.

    Attributes:
        opened: what the kernel is opened with.
        released: what the signer of this process was given.
        signable: what a signer reads its holds by: committed rows, of payments that may be signed.
        sound: looks at rows as they are loaded.
    """

    opened: Opened
    released: Released
    signable: Signable
    sound: Sound
    _given: Opened | None

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make a store with a kernel of its own, whatever its ``__init__`` does."""
        self = super().__new__(cls)
        self.opened, self.released, self.signable = self._built_in(), Released(), _Signable(self)
        self.sound = Sound()
        self._given = None
        return self

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name in ("__new__", "commit", "sign", "open_kernel", "_work"):
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name}: the kernel's own, and no store replaces it")

    @final
    def open_kernel(self, opened: Opened) -> None:
        """Give the kernel its table of tokens and its limits, once. Raises ``ConfigError`` for others later."""
        if self._given not in (None, opened):
            raise ConfigError(
                "ledger: this store is open in another Guard with other assets or settings; open a store for each Guard"
            )
        self.opened = self._given = opened

    @final
    def commit(self, scope: Any, propose: Propose, *, lost: frozenset[str] = frozenset()) -> None:
        """Run *propose* on the rows of *scope* in one transaction, check what it proposes, and write that durably.

        Raises ``IllegalTransition`` for a change set that breaks a rule: nothing is written. Raises what *propose* raises,
        and ``LedgerUnavailable`` if the ledger cannot be read or written. *lost*: the store's own note of holds that it had
        committed, and that its server does not have; only these may be entered again.
        """
        work = self._work(scope, propose, lost)
        self._in_transaction(scope, work)
        if work.ended:
            self.released.ended(work.ended)

    @abstractmethod
    def _in_transaction(self, scope: Any, work: Work) -> None:
        """Open a transaction, run *work* on its rows (again on new rows, if it has to), and commit durably.

        If *work* raises, nothing is written.
        """

    @final
    def _work(self, scope: Any, propose: Propose, lost: frozenset[str] = frozenset()) -> Work:
        """Return what happens inside of one transaction."""
        return Work(self, scope, propose, lost)

    @abstractmethod
    def clock(self) -> Clock:
        """Return the clock that the kernel reads."""

    @abstractmethod
    def _built_in(self) -> Opened:
        """Return what the kernel is opened with as long as no Guard says otherwise."""

    @abstractmethod
    def hold(self, hold_id: str) -> Hold | None:
        """Return one hold as committed, or None."""

    @final
    def sign(self, signer: Signs, hold: Hold, *, within: str) -> bytes:
        """Return the signature of a committed payment, 65 bytes, low s. It lies *within* the session that signs, or below.

        Raises ``SignerError`` for a definite no, the kernel's own or the signer's. Any other exception means that a
        signature may exist somewhere: also ``ValueError``, for one that is not this payment's by the signer's address.
        """
        self.released.check_within(hold.id, within)
        if isinstance(signer, KeySigner):
            return signer.sign(hold)  # it reads the row itself
        row = committed(self.signable, hold, signer.address)
        was_fresh = self.signable.give(row)
        times = self.released.given[hold.id]
        try:
            signature = normalise_signature(signer.sign(row))
        except SignerError:
            self.released.refused(hold.id, was_fresh=was_fresh)
            raise
        _check_signature(signature, row, signer.address)
        if self.released.given.get(hold.id, 0) > times:
            self.released.given[hold.id] = times  # the signer wraps the kernel's own, which was given it once more
        return signature


class _Signable:
    """Reads what may be signed: rows that are committed, and count at least what their signature can take."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, hold_id: str) -> Hold | None:
        row = self._ledger.hold(hold_id)
        if row is None or row.intent is None:
            return row
        try:
            check_worth(self._ledger.opened, row)
        except IllegalTransition as error:
            # The payment of another process in a token of its own is presented again as it was: it adds no liability.
            if not row.presented:
                raise SignerError(str(error)) from error
        return row

    def give(self, row: Hold) -> bool:
        """See ``Signable.give``."""
        return self._ledger.released.give(row.id, is_first=not row.presented)


def _check_signature(signature: bytes, hold: Hold, address: Address) -> None:
    """Raise ``ValueError`` unless *signature* is that of *address* over this payment: another machine has made it."""
    compact = signature[:64] + bytes([signature[64] - 27])
    try:
        key = coincurve.PublicKey.from_signature_and_message(compact, digest(hold.payment()), hasher=None)
    except Exception as error:
        raise ValueError("the signer returned no signature of this payment") from error
    if checksum_address(keccak(key.format(compressed=False)[1:])[12:]).lower() != address.lower():
        raise ValueError("the signer returned a signature by another key, or of another message")
