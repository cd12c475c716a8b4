"""The kernel around a store: what it notes of a commit, and what it lets another machine sign."""

import coincurve
import pytest
from msgspec.structs import replace

from tests.kernel.rows import NEW, OPENED, TEN, TOOL, captured
from tests.kernel.test_signer import ADDRESS, GOOD, SECRET, signed_by
from tests.support.ledger import PAYEE, START_MS, Clock
from x402guard.errors import ConfigError, IllegalTransition, SignerError
from x402guard.kernel.change_set import ChangeSet
from x402guard.kernel.ledger import Ledger
from x402guard.kernel.proofs import Lost, Unsent, Unsigned
from x402guard.kernel.released import Released
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldState, Nanos, NodeKind
from x402guard.kernel.signer import KeySigner
from x402guard.kernel.typed_data import digest
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.sessions import NodeRequest, ensure_wallet, open_node
from x402guard.ledger.transitions import apply, begin
from x402guard.ledger.view import LedgerView, Scope
from x402guard.stores.memory import MemoryStore

NAMES = ("__new__", "commit", "sign", "open_kernel", "_work")


def a_store(*holds, **options):
    store = MemoryStore(clock_ms=Clock(START_MS), **options)
    store.open_kernel(replace(OPENED, keeps_idle=bool(options)))
    opening = NodeRequest("s", WALLET, NodeKind.SESSION, "s", Nanos(5 * TEN), "o#1")
    change(store, lambda view: (ensure_wallet(view, Nanos(10 * TEN)), open_node(view, opening)), "s")
    for hold in holds:
        change(store, lambda view, hold=hold: begin(view, hold, {}), hold.id)
    return store


def change(store, act, *hold_ids, lost=frozenset()):
    """One commit, without a room in between."""

    def propose(loaded):
        view = LedgerView(loaded)
        act(view)
        return view.change_set(durable=True)

    store.commit(Scope(nodes=(WALLET, "s"), holds=hold_ids, durable=True), propose, lost=lost)


@pytest.mark.parametrize("name", NAMES)
def test_no_store_replaces_what_is_the_kernels_own(name):
    with pytest.raises(TypeError, match=f"Own.{name}: the kernel's own, and no store replaces it"):
        type("Own", (Ledger,), {name: None})
    with pytest.raises(TypeError, match="the kernel's own"):
        type("Own", (MemoryStore,), {name: None})
    type("Other", (MemoryStore,), {"more": None})


def test_a_kernel_is_opened_once():
    store = a_store()
    store.open_kernel(OPENED)
    assert store.opened is OPENED
    with pytest.raises(ConfigError, match="this store is open in another Guard with other assets or settings"):
        store.open_kernel(replace(OPENED, memory_ms=1))
    assert store.opened is OPENED


def test_what_a_process_begins_is_its_own_to_give_back():
    store = a_store(GOOD, TOOL)
    assert store.released.forget(GOOD.id) == Unsigned(GOOD.id)
    assert store.released.forget(TOOL.id) is None
    change(store, lambda view: apply(view, GOOD.id, Void("x"), view.unsigned(GOOD.id)), GOOD.id)
    assert store.hold(GOOD.id).state is HoldState.VOIDED
    assert store.released.forget(GOOD.id) is None, "its row says that it has ended"


def test_what_is_entered_again_and_what_is_written_again_was_not_begun_here():
    store = a_store()
    change(store, lambda view: begin(view, GOOD, {}, Lost(GOOD.id)), GOOD.id, lost=frozenset([GOOD.id]))
    assert store.released.forget(GOOD.id) is None
    with pytest.raises(IllegalTransition, match="this process has not noted it"):
        change(store, lambda view: begin(view, NEW, {}, Lost(NEW.id)), NEW.id)
    store = a_store(GOOD)
    store.sign(KeySignerElsewhere(), GOOD, within="s")
    change(store, lambda view: view.put_hold(replace(GOOD, doubt="x")), GOOD.id)
    assert store.released.forget(GOOD.id) is None


def test_it_was_sent_once_or_not_at_all():
    store = a_store(GOOD)
    for _ in range(2):
        store.sign(KeySignerElsewhere(), GOOD, within="s")
    with pytest.raises(IllegalTransition, match="does not show that"):
        change(store, lambda view: apply(view, GOOD.id, Void("x"), Unsent(GOOD.id)), GOOD.id)
    store = a_store(GOOD)
    store.sign(KeySignerElsewhere(), GOOD, within="s")
    change(store, lambda view: apply(view, GOOD.id, Void("x"), Unsent(GOOD.id)), GOOD.id)
    assert store.hold(GOOD.id).state is HoldState.VOIDED


def test_what_ends_is_not_begun():
    """It ends in the change that it is taken in: then nothing is left to give back."""
    store = a_store(GOOD)
    change(store, lambda view: apply(view, GOOD.id, Capture(GOOD.amount, Evidence.CLAIMED)), GOOD.id)
    assert store.released.forget(GOOD.id) is None


@pytest.mark.parametrize("part", ["nodes", "holds", "marks", "entries"])
def test_what_proposes_nothing_writes_nothing(part, monkeypatch):
    store, added = a_store(GOOD), []
    monkeypatch.setattr(store._rows, "add", added.append)
    store.commit(Scope(), lambda loaded: ChangeSet(durable=True))
    assert added == []
    wanted = {
        "nodes": lambda view: view.put_node(replace(view.node("s"), starved=1)),
        "holds": lambda view: view.put_hold(replace(GOOD, doubt="x")),
        "marks": lambda view: view.put_mark(("origin", "x"), {"a": 1}),
        "entries": lambda view: view.record("s", "event"),
    }
    if part == "entries":
        with pytest.raises(IllegalTransition, match="its row is not written"):
            store.commit(Scope(nodes=("s",)), lambda loaded: only_entries(LedgerView(loaded)))
        return
    change(store, wanted[part], GOOD.id)
    assert len(added) == 1


def only_entries(view):
    view.record("s", "event")
    return replace(view.change_set(durable=True), nodes=())


@pytest.mark.parametrize("keeps_idle", [True, False])
def test_the_rows_say_whether_idle_budget_is_kept(keeps_idle):
    """Not what the kernel was opened with: a store that keeps none is checked as one that keeps none."""
    store = a_store(**({"keeps_idle": True} if keeps_idle else {}))
    change(store, lambda view: begin(view, GOOD, {}), GOOD.id)
    store.opened = replace(store.opened, keeps_idle=not keeps_idle)
    change(store, lambda view: begin(view, TOOL, {}), TOOL.id)
    assert store._rows.nodes["s"].idle == (0 if not keeps_idle else store._rows.nodes["s"].granted_in - 2 * TEN)


class KeySignerElsewhere:
    """A signer on another machine: with the key, or with what it is told to answer."""

    address = ADDRESS

    def __init__(self, answer=None, address=None):
        self._answer, self.seen = answer, []
        self.address = address or ADDRESS

    def sign(self, hold):
        self.seen.append(hold)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer or raw(digest(hold.payment()))


def raw(digest, secret=SECRET):
    signature = coincurve.PrivateKey(secret).sign_recoverable(digest, hasher=None)
    return signature[:64] + bytes([signature[64] + 27])


DIGEST = digest(GOOD.intent)


def test_a_signer_elsewhere_signs_a_committed_payment():
    store, signer = a_store(GOOD), KeySignerElsewhere()
    assert signed_by(store.sign(signer, GOOD, within="s"), DIGEST)
    assert signer.seen == [GOOD]
    assert signed_by(store.sign(KeySignerElsewhere(address=ADDRESS.lower()), GOOD, within="s"), DIGEST)
    assert store.released.forget(GOOD.id) is None


def test_a_signer_here_reads_the_row_itself():
    store, signer = a_store(GOOD), KeySigner(SECRET)
    signer.bind(store.signable)
    assert signed_by(store.sign(signer, GOOD, within="s"), DIGEST)
    with pytest.raises(SignerError, match="or differs from the hold"):
        store.sign(signer, replace(GOOD, instance="x"), within="s")


@pytest.mark.parametrize("hold", [NEW, TOOL], ids=["not in the ledger", "no payment"])
def test_nothing_else_reaches_a_signer(hold):
    store, signer = a_store(TOOL), KeySignerElsewhere()
    with pytest.raises(SignerError, match="is no payment that this process has in the ledger within 's'"):
        store.sign(signer, hold, within="s")
    assert signer.seen == []


@pytest.mark.parametrize("is_here", [True, False])
def test_a_session_signs_in_its_node_or_below(is_here):
    store, signer = a_store(GOOD), KeySigner(SECRET) if is_here else KeySignerElsewhere()
    if is_here:
        signer.bind(store.signable)
    for other in ("t", "", "s/below", GOOD.id):
        with pytest.raises(SignerError, match=f"within '{other}'"):
            store.sign(signer, GOOD, within=other)
    assert signed_by(store.sign(signer, GOOD, within="wallet"), DIGEST)
    assert store.released.given == {GOOD.id: 1}


def test_a_payment_of_another_process_is_signed_by_who_presents_it():
    """Its path is known from the commit that takes it over, and until its sale is over."""
    store = a_store(GOOD)
    store.released = Released()
    with pytest.raises(SignerError, match="no payment that this process has"):
        store.sign(KeySignerElsewhere(), GOOD, within="s")
    again = replace(GOOD, presented=1, instance="other", delivery=Delivery.LOST)
    change(store, lambda view: view.put_hold(again), GOOD.id)
    assert signed_by(store.sign(KeySignerElsewhere(), again, within="s"), DIGEST)
    change(store, lambda view: apply(view, GOOD.id, Capture(GOOD.amount, Evidence.CLAIMED)), GOOD.id)
    taken = store.hold(GOOD.id)
    assert signed_by(store.sign(KeySignerElsewhere(), taken, within="s"), DIGEST)
    change(store, lambda view: view.put_hold(replace(taken, delivery=Delivery.OPEN)), GOOD.id)
    change(store, lambda view: view.put_hold(replace(taken, delivery=Delivery.DONE)), GOOD.id)
    with pytest.raises(SignerError, match="no payment that this process has"):
        store.sign(KeySignerElsewhere(), store.hold(GOOD.id), within="s")


@pytest.mark.parametrize("was_fresh", [True, False])
def test_a_definite_no_leaves_it_unsigned(was_fresh):
    store = a_store(GOOD)
    if not was_fresh:
        store.sign(KeySignerElsewhere(), GOOD, within="s")
    with pytest.raises(SignerError, match="the owner says no"):
        store.sign(KeySignerElsewhere(SignerError("the owner says no")), GOOD, within="s")
    assert (store.released.forget(GOOD.id) is not None) == was_fresh


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (OSError("gone"), "gone"),
        (raw(b"x" * 32), "by another key, or of another message"),
        (raw(DIGEST, b"\1" * 32), "by another key, or of another message"),
        ((1).to_bytes(32, "big") + (5).to_bytes(32, "big") + b"\x1b", "signature"),
        (b"\0" * 65, "signature"),
        (
            (5).to_bytes(32, "big") + (1).to_bytes(32, "big") + b"\x1b",
            "no signature of this payment",
        ),  # no point has x = 5
    ],
)
def test_an_answer_that_is_no_signature_of_it_may_be_one(answer, what):
    store = a_store(GOOD)
    with pytest.raises((ValueError, OSError), match=what):
        store.sign(KeySignerElsewhere(answer), GOOD, within="s")
    assert store.released.forget(GOOD.id) is None


def test_what_counts_less_than_its_signature_takes_is_not_signed():
    """But another process's payment in its own token is presented again as it was."""
    for presented in (0, 1):
        store = a_store(GOOD)
        store._rows.holds[GOOD.id] = row = replace(GOOD, presented=presented)
        store.opened = replace(OPENED, tokens={})
        if presented:
            assert store.signable(GOOD.id) is row
            assert not a_store().signable.give(row), "it may be given again by who has not written it"
        else:
            with pytest.raises(SignerError, match="is not in the kernel's table"):
                store.signable(GOOD.id)
            with pytest.raises(SignerError, match="was written by another process"):
                a_store().signable.give(row)
    assert a_store(TOOL).signable(TOOL.id) == TOOL
    assert a_store().signable("x") is None


def test_a_signer_that_wraps_the_kernels_own_gives_one_signature():
    """Each asks the kernel. After a no, what the inner one has signed counts."""

    class Wrapping:
        address = ADDRESS

        def __init__(self, store, error=None):
            self.inner, self.error = KeySigner(SECRET), error
            self.inner.bind(store.signable)

        def sign(self, hold):
            signature = self.inner.sign(hold)
            if self.error is not None:
                raise self.error
            return signature

    store = a_store(GOOD)
    store.sign(Wrapping(store), GOOD, within="s")
    assert store.released.given == {GOOD.id: 1}
    store = a_store(GOOD)
    with pytest.raises(SignerError, match="no"):
        store.sign(Wrapping(store, SignerError("no")), GOOD, within="s")
    assert store.released.forget(GOOD.id) is None


def test_a_payment_that_ends_while_it_is_signed_is_known_no_more():
    store = a_store(GOOD)

    class Slow(KeySignerElsewhere):
        def sign(self, hold):
            change(store, lambda view: apply(view, hold.id, Capture(hold.amount, Evidence.CLAIMED)), hold.id)
            return super().sign(hold)

    store.sign(Slow(), GOOD, within="s")
    assert store.released.given == {}


def test_a_payment_that_ends_is_known_no_more_and_another_is():
    store = a_store(GOOD, TOOL)
    store.sign(KeySignerElsewhere(), GOOD, within="s")
    change(store, lambda view: apply(view, TOOL.id, Capture(TOOL.amount, Evidence.CLAIMED)), TOOL.id)
    assert store.released.given == {GOOD.id: 1}
    change(store, lambda view: apply(view, GOOD.id, Capture(GOOD.amount, Evidence.CLAIMED)), GOOD.id)
    assert store.released.given == {}
    assert captured(GOOD, TEN).counts == store.hold(GOOD.id).counts
    assert GOOD.intent.payee == PAYEE


@pytest.mark.parametrize("part", ["nodes", "holds", "marks", "entries", "steps", "owner"])
def test_a_field_that_can_be_read_once_is_read_once(part):
    """A room's iterator in place of a tuple: what is checked is what is written."""
    store = a_store(GOOD)

    def lazily(loaded):
        view = LedgerView(loaded)
        apply(view, GOOD.id, Capture(GOOD.amount, Evidence.CLAIMED))
        made = view.change_set(durable=True)
        return replace(made, **{part: iter(getattr(made, part))})

    store.commit(Scope(nodes=(WALLET, "s"), holds=(GOOD.id,), durable=True), lazily)
    assert store.hold(GOOD.id).state is HoldState.CAPTURED
    assert store._rows.nodes["s"].captured == GOOD.amount
