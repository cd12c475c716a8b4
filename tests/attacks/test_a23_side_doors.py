"""Row 23: the signer itself refuses whatever is not a live hold of its own ledger, and nothing else reaches the key."""

import ast
from pathlib import Path

import httpx
import pytest

import x402guard
from tests.support.merchant import KEY, OTHER_PAYEE, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import LocalSigner, SettlementUncertain, SignerError
from x402guard.frozen import replace
from x402guard.kernel.rows import Hold, HoldKind, Purpose
from x402guard.kernel.typed_data import digest
from x402guard.ledger.authorize import authorize
from x402guard.ledger.view import Scope
from x402guard.stores import MemoryStore

PACKAGE = Path(x402guard.__file__).parent
KEY_WORDS = {
    "coincurve",
    "eth_account",
    "eth_keys",
    "PrivateKey",
    "sign_recoverable",
    "unsafe_sign_hash",
    "sign_digest",
}


@pytest.fixture
def signer():
    return LocalSigner.from_key(KEY)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def bound(signer, store):
    with make_guard(store, signer=signer) as guard:
        yield guard


def _live(guard) -> Hold:
    """A hold that is live because its answer was lost."""
    with guard.session("s", budget="$1.00") as session, pytest.raises(SettlementUncertain):
        fetch("sync", session, Shop(paid=httpx.ReadError("lost")))
    return guard.shell.store.outstanding()[-1]


def _ended(guard, answer) -> Hold:
    with guard.session("s", budget="$1.00") as session:
        fetch("sync", session, Shop(paid=answer))
        holds = [e["hold_id"] for e in session.report().to_dict()["events"] if e["event"] == "authorize"]
    return guard.shell.store.hold(holds[0])


def test_a23_a_live_hold_is_signed(signer, bound):
    assert len(signer.sign(_live(bound))) == 65


def test_a23_no_ledger_no_signature(bound):
    with pytest.raises(SignerError, match="not bound to a ledger"):
        LocalSigner.from_key(KEY).sign(_live(bound))


@pytest.mark.parametrize("shown", [b"\x19\x01" + b"0" * 64, "0x" + "ab" * 32, None, {"domain": {}, "message": {}}, 7])
def test_a23_a_bare_message_is_no_hold(signer, bound, shown):
    with pytest.raises(SignerError, match="the payment is not in the ledger"):
        signer.sign(shown)


def test_a23_typed_data_and_intents_are_no_holds(signer, bound):
    intent = _live(bound).payment()
    for shown in (intent, digest(intent)):
        with pytest.raises(SignerError, match="the payment is not in the ledger"):
            signer.sign(shown)


def test_a23_a_fabricated_hold_is_refused(signer, bound):
    with pytest.raises(SignerError, match="the payment is not in the ledger"):
        signer.sign(replace(_live(bound), id="f" * 64))


def test_a23_a_hold_of_another_ledger_is_refused(signer, bound):
    with make_guard() as other:
        with pytest.raises(SignerError, match="the payment is not in the ledger"):
            signer.sign(_live(other))
        with pytest.raises(SignerError, match="another ledger"):
            signer.bind(other.shell.store.hold)
    with pytest.raises(SignerError, match="another ledger"):
        make_guard(signer=signer)


INTENT_CHANGES = {
    "payee": {"payee": OTHER_PAYEE},
    "amount": {"amount_atomic": 10_001},
    "token": {"token": OTHER_PAYEE},
    "payer": {"payer": OTHER_PAYEE},
    "network": {"network_as_offered": "eip155:8453"},
    "deadline": {"valid_until": 2_000_000_000},
    "nonce": {"nonce": 1},
    "chain": {"chain_id": 8453},
    "domain": {"domain_name": "Evil"},
    "version of the domain": {"domain_version": "9"},
    "start": {"valid_after": 1},
    "digest": {"digest": "00" * 32},
    "method": {"method": "permit2"},
}


def _changed(hold, name):
    if name == "hold amount":
        return replace(hold, amount=1)
    if name == "hold deadline":
        return replace(hold, deadline_unix=hold.deadline_unix + 1)
    return replace(hold, intent=replace(hold.payment(), **INTENT_CHANGES[name]))


@pytest.mark.parametrize("name", [*INTENT_CHANGES, "hold amount", "hold deadline"])
def test_a23_a_mutated_hold_is_refused(signer, bound, name):
    with pytest.raises(SignerError, match="differs from the hold given"):
        signer.sign(_changed(_live(bound), name))


@pytest.mark.parametrize("name", [*INTENT_CHANGES, "hold deadline"])
def test_a23_a_row_that_was_changed_in_the_ledger_is_refused(signer, bound, store, name):
    """Shown and stored agree; the digest and the offer it was made from do not."""
    changed = _changed(_live(bound), name)
    store._rows.holds[changed.id] = changed
    with pytest.raises(SignerError, match=changed.id):
        signer.sign(changed)


BY_WORTH = {
    "amount": "rule 'worth': .* its signature can take 10001000",
    "token": "rule 'worth': .* not in the kernel's table",
}
"""What the kernel itself refuses first, as it looks the row up."""


@pytest.mark.parametrize("name", ["payee", "amount", "token"])
def test_a23_nor_with_a_digest_made_to_fit(signer, bound, store, name):
    changed = _changed(_live(bound), name)
    fitting = replace(changed.payment(), digest=digest(changed.payment()).hex())
    store._rows.holds[changed.id] = replace(changed, intent=fitting)
    with pytest.raises(SignerError, match=BY_WORTH.get(name, "terms is")):
        signer.sign(store._rows.holds[changed.id])
    alone = LocalSigner.from_key(KEY)  # one whose rows the kernel does not check
    alone.bind(store._rows.holds.get)
    with pytest.raises(SignerError, match="terms is"):
        alone.sign(store._rows.holds[changed.id])


def test_a23_a_captured_hold_is_refused(signer, bound):
    hold = _ended(bound, None)
    assert hold.state == "captured"
    with pytest.raises(SignerError, match="is captured in the ledger"):
        signer.sign(hold)
    with pytest.raises(SignerError, match="is captured in the ledger"):
        signer.sign(replace(hold, state="held"))


def test_a23_a_voided_hold_is_refused(signer, bound, monkeypatch):
    shown = []

    def refuse(self, hold):
        shown.append(hold)
        raise SignerError("not today")

    with monkeypatch.context() as patched, bound.session("s", budget="$1.00") as session:
        patched.setattr(LocalSigner, "sign", refuse)
        with pytest.raises(SignerError, match="not today"):
            fetch("sync", session, Shop())
        assert session.held == 0
    with pytest.raises(SignerError, match="is voided in the ledger"):
        signer.sign(shown[0])


def test_a23_a_hold_for_something_else_is_refused(signer, bound):
    with bound.session("s", budget="$1.00") as session:
        hold = Hold(
            "e" * 64, session.id, HoldKind.LLM, 10_000_000, 1, 2_000_000_000, 1, "somebody", Purpose(tool="gpt")
        )
        scope = Scope(nodes=(session.id,), holds=(hold.id,), durable=True)
        written = bound.shell.store.transact(scope, lambda view: authorize(view, hold, {"kind": HoldKind.LLM}))
        with pytest.raises(SignerError):
            signer.sign(written)


def test_a23_a_closed_ledger_signs_nothing(signer, ledger):
    guard = make_guard(ledger, signer=signer)
    hold = _live(guard)
    guard.close()
    with pytest.raises(SignerError, match="closed"):
        signer.sign(hold)


def test_a23_no_signer_no_payment(mode):
    shop = Shop()
    with make_guard(signer=None) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(x402guard.PolicyDenied, match="no_signer"):
            fetch(mode, session, shop)
        assert session.held == 0
    assert shop.payments == []


def _words(path):
    """Every name, attribute and import of a source file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((part, node.lineno) for part in (node.module or "").split("."))
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((part, node.lineno) for alias in node.names for part in alias.name.split("."))


def _sources():
    """The library without the rig that ships for tests, which plays facilitator with keys of its own."""
    files = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.relative_to(PACKAGE).parts]
    assert len(files) > 30
    return files


def test_a23_only_the_signers_reach_a_key():
    found = {
        (f"{path.parent.name}/{path.name}", word)
        for path in _sources()
        for word, _ in _words(path)
        if word in KEY_WORDS
    }
    named = {("guard/guard.py", "LocalAccount"), ("guard/guard.py", "eth_account")}  # the type of an argument
    named.add(("kernel/ledger.py", "coincurve"))  # the public key of a signature from another machine
    assert {name for name, _ in found - named} == {"kernel/signer.py", "x402/signer.py", "x402/keys.py"}
    assert {name for name, word in found if word == "sign_recoverable"} == {"kernel/signer.py"}


def test_a23_only_the_settings_unwrap_the_secret():
    places = {path.name for path in _sources() for word, _ in _words(path) if word == "get_secret_value"}
    assert places <= {"settings.py", "doctor.py"}


def test_a23_the_flow_asks_for_a_signature_in_one_place():
    calls = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sign":
                calls.append((path.name, ast.unparse(node.func)))
    # The flow asks the ledger, and the ledger asks the signer: one of this process, or one elsewhere. The others sign reports and the tokens of delegations, with keys that are no wallet's.
    assert sorted(calls) == [
        ("drivers.py", "shell.store.sign"),
        ("ledger.py", "signer.sign"),
        ("ledger.py", "signer.sign"),
        ("report.py", "key.sign"),
        ("signed_report.py", "self._key.sign"),
        ("token.py", "self._key.sign"),
    ]


def test_a23_the_agents_side_has_no_way_to_a_key(bound):
    with bound.session("s", budget="$1.00") as session:
        for thing in (bound, session, session.report()):
            assert not [name for name in dir(thing) if "key" in name.lower() and not name.startswith("__")]
