"""What is looked at as rows are loaded, and what the signer of a process was given."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import ONE, TEN, TOOL, captured, ended, node
from x402guard.errors import InconsistentLedger, SignerError
from x402guard.kernel import sound
from x402guard.kernel.change_set import Before, Step
from x402guard.kernel.proofs import Unsent, Unsigned
from x402guard.kernel.released import Released
from x402guard.kernel.rows import HoldKind, HoldState, Nanos, NodeKind, NodeState
from x402guard.kernel.sound import Sound


def looked(*rows, keeps_idle=False, by=None):
    """What is said of rows: "" or the sentence."""
    nodes = {row.id: row for row in rows if hasattr(row, "parent_id")}
    holds = {row.id: row for row in rows if not hasattr(row, "parent_id")}
    try:
        (by or Sound()).look(Before({"none": None, **nodes}, {"none": None, **holds}, {}), keeps_idle=keeps_idle)
    except InconsistentLedger as error:
        return str(error)
    return ""


S = node("s", "wallet")
ROOT = node("wallet", None, NodeKind.WALLET)
NODES = {
    "nothing used": (S, {}, ""),
    "captured below zero": (S, {"captured": -1, "held": 1}, "'books': node s: a balance is negative"),
    "held below zero": (S, {"held": -1, "captured": 1}, "a balance is negative"),
    "granted below zero": (S, {"granted_out": -1, "held": 1}, "a balance is negative"),
    "drawn below zero": (ROOT, {"granted_in": -1}, "a balance is negative"),
    "a root that has drawn": (ROOT, {"granted_in": 1}, "'books': node wallet: it has no parent, and has drawn 1 from one"),
    "a root that has granted": (ROOT, {"granted_out": 1}, ""),
    "all that it uses": (S, {"held": 5, "granted_in": 5}, ""),
    "less": (S, {"held": 5, "granted_in": 4}, "'books': node s: it uses 5, and has drawn 4"),
    "more": (S, {"held": 5, "granted_in": 6}, "'books': node s: it uses 5, and has drawn 6"),
    "all of its limit": (S, {"held": 5 * TEN, "granted_in": 5 * TEN}, ""),
    "past its limit": (
        S, {"held": 5 * TEN + 1, "granted_in": 5 * TEN + 1}, "'room': node s: it is 1 past its limit, and open"),
    "past its limit and tripped": (
        S, {"held": 5 * TEN + 1, "granted_in": 5 * TEN + 1, "state": NodeState.TRIPPED}, ""),
    "tokens past their limit": (ROOT, {"kind": NodeKind.TOKENS, "captured": 5 * TEN + 1}, ""),
    "no limit": (ROOT, {"limit": None, "held": 5}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("row", "fields", "what"), NODES.values(), ids=NODES)
def test_a_node_that_was_edited_is_named(row, fields, what):
    said = looked(replace(row, **fields))
    assert what in said
    assert bool(what) == bool(said)


@pytest.mark.parametrize(("drawn", "keeps_idle", "is_sound"), [(6, True, True), (4, True, False), (6, False, False)])
def test_idle_budget_is_kept_where_the_store_keeps_it(drawn, keeps_idle, is_sound):
    assert (looked(replace(S, held=5, granted_in=drawn), keeps_idle=keeps_idle) == "") == is_sound


INTENT = ONE.intent
HOLDS = {
    "live": (ONE, {}, ""),
    "of nothing": (ONE, {"amount": Nanos(0)}, "'lifecycle': hold"),
    "of the least": (ONE, {"amount": Nanos(1)}, ""),
    "captured below zero": (captured(ONE, -1), {}, "with -1 captured"),
    "captured": (captured(ONE, 1), {}, ""),
    "captured for nothing": (captured(ONE, 0), {}, ""),
    "live, with something captured": (ONE, {"captured": Nanos(1)}, "it is held for 100000000, with 1 captured"),
    "void": (ended(ONE, HoldState.VOIDED), {}, ""),
    "void, with something captured": (ended(ONE, HoldState.VOIDED, 1), {}, "it is voided"),
    "a tool": (TOOL, {}, ""),
    "a tool with an intent": (TOOL, {"intent": INTENT}, "'lifecycle': hold tool: it is of kind tool, and what has"),
    "a payment without one": (ONE, {"intent": None}, "it is of kind payment"),
    "another nonce": (ONE, {"intent": replace(INTENT, nonce=1)}, "'lifecycle': hold"),
    "another deadline": (ONE, {"deadline_unix": 1}, "its nonce or deadline is not the one that is signed"),
    "a call with any deadline": (TOOL, {"deadline_unix": 1, "kind": HoldKind.LLM}, ""),
}


@pytest.mark.parametrize(("row", "fields", "what"), HOLDS.values(), ids=HOLDS)
def test_a_hold_that_was_edited_is_named(row, fields, what):
    said = looked(replace(row, **fields))
    assert what in said
    assert bool(what) == bool(said)


def test_the_same_row_is_looked_at_once(monkeypatch):
    seen = []
    monkeypatch.setattr(sound, "_look_at_node", lambda row, *, keeps_idle: seen.append(row))
    monkeypatch.setattr(sound, "_look_at_hold", seen.append)
    one = Sound()
    rows = S, ROOT, ONE, TOOL
    for _ in range(2):
        looked(*rows, by=one)
    assert seen == list(rows)
    looked(replace(S, held=0), replace(ONE, doubt=None), by=one)
    assert seen == [*rows, S, ONE]
    many = [replace(S, id=f"s{number}") for number in range(4_092)]
    looked(*many, by=one)
    looked(*rows[1:2], rows[3], by=one)
    assert len(seen) == 6 + 4_092
    looked(replace(S, id="one more"), by=one)
    looked(*rows[1:2], rows[3], by=one)
    assert len(seen) == 6 + 4_092 + 3, "what is known is forgotten where it is too much"


def known(released, *names, by=Unsigned):
    """What is known of the holds that steps with such a proof give back."""
    return released.known(iter([Step(name, "void", HoldState.VOIDED, 0, 0, by(name)) for name in names]))


def given(released, *names):
    return known(released, *names, by=Unsent)[1]


def test_only_what_was_not_given_to_the_signer_is_unsigned():
    released = Released()
    for hold_id in ("fresh", "given"):
        released.begun(hold_id)
    assert released.give("given", is_first=True)
    assert released.forget("given") is None
    assert released.forget("of another process") is None
    assert released.forget("fresh") == released.forget("fresh") == Unsigned("fresh")
    for is_first in (True, False):
        with pytest.raises(SignerError, match="hold fresh was given back unsigned, so it is never signed"):
            released.give("fresh", is_first=is_first)
    assert known(released, "fresh", "given", "other") == (frozenset(["fresh"]), {})
    assert known(released, "fresh", "given", "other", by=Unsent) == (frozenset(), {"fresh": 0, "given": 1, "other": 0})
    assert released.known([Step("fresh", "void", HoldState.VOIDED, 0, 0)]) == (frozenset(), {})


def test_it_is_signed_first_by_who_wrote_it():
    released = Released()
    with pytest.raises(SignerError, match="hold other was written by another process"):
        released.give("other", is_first=True)
    assert not released.give("other", is_first=False), "and again by any"
    assert not released.give("other", is_first=True)
    assert given(released, "other") == {"other": 2}
    released.begun("mine")
    assert released.give("mine", is_first=True)
    assert not released.give("mine", is_first=True)
    assert given(released, "mine", "other") == {"mine": 2, "other": 2}


def test_a_no_of_a_signer_elsewhere_leaves_it_as_it_was():
    released = Released()
    released.begun("h")
    assert released.give("h", is_first=True)
    released.refused("h", was_fresh=True)
    assert given(released, "h") == {"h": 0}
    assert released.give("h", is_first=True)
    assert not released.give("h", is_first=True)
    released.refused("h", was_fresh=False)
    assert given(released, "h") == {"h": 1}
    assert released.forget("h") is None
    released.refused("h", was_fresh=True)
    assert released.forget("h") == Unsigned("h")


def test_what_has_ended_is_known_no_more():
    released = Released()
    for hold_id in ("fresh", "forgotten", "given"):
        released.begun(hold_id)
    released.forget("forgotten")
    released.give("given", is_first=True)
    released.ended(["fresh", "forgotten", "given", "never known"])
    assert known(released, "fresh", "forgotten", "given") == (frozenset(), {})
    assert given(released, "given") == {"given": 0}
    assert [released.forget(each) for each in ("fresh", "forgotten", "given")] == [None, None, None]
    with pytest.raises(SignerError, match="another process"):
        released.give("given", is_first=True)
    released.refused("nothing known", was_fresh=False)
    assert given(released, "nothing known") == {"nothing known": 0}


def test_a_no_frees_only_what_no_one_else_was_given():
    """Two threads may sign the same payment: the other answer may be a signature. Nor is another process's payment ours."""
    released = Released()
    released.begun("h")
    assert released.give("h", is_first=True)
    assert not released.give("h", is_first=True)
    released.refused("h", was_fresh=True)
    assert released.forget("h") is None
    assert not released.give("other", is_first=False)
    released.refused("other", was_fresh=False)
    assert released.forget("other") is None
