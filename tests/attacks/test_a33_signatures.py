"""Row 33: one authorization has one encoding on the wire, and the books know it by its nonce alone."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.merchant import Shop, make_guard, unb64
from tests.support.refusals import fetch
from tests.support.signers import SpySigner
from x402guard import SettlementUncertain
from x402guard.kernel.evm import normalise_signature

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def flipped(signature: bytes) -> bytes:
    """The other encoding of the same authorization: (r, −s) with the other parity."""
    s = ORDER - int.from_bytes(signature[32:64], "big")
    return signature[:32] + s.to_bytes(32, "big") + bytes([55 - signature[64]])


def counted_from_zero(signature: bytes) -> bytes:
    return signature[:64] + bytes([signature[64] - 27])


ENCODINGS = {
    "as it is": lambda signature: signature,
    "v from zero": counted_from_zero,
    "high s": flipped,
    "high s, v from zero": lambda signature: counted_from_zero(flipped(signature)),
}


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.integers(1, ORDER // 2), st.sampled_from([27, 28]))
def test_a33_every_encoding_normalises_to_one(r, s, v):
    signature = r + s.to_bytes(32, "big") + bytes([v])
    assert {normalise_signature(encode(signature)) for encode in ENCODINGS.values()} == {signature}


@pytest.mark.parametrize("v", [2, 3, 26, 29, 30, 31, 35, 255])
def test_a33_any_other_v_is_malformed(v):
    with pytest.raises(ValueError, match="malformed"):
        normalise_signature(b"\1" * 64 + bytes([v]))


@pytest.mark.parametrize("s", [0, ORDER, ORDER + 1, 2**256 - 1])
def test_a33_an_s_outside_the_group_is_malformed(s):
    with pytest.raises(ValueError, match="malformed"):
        normalise_signature(b"\1" * 32 + s.to_bytes(32, "big") + b"\x1b")


@pytest.mark.parametrize("length", [0, 1, 64, 66, 130])
def test_a33_any_other_length_is_malformed(length):
    with pytest.raises(ValueError, match="65 bytes"):
        normalise_signature(b"\1" * length)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a33_what_any_signer_returns_leaves_with_low_s_and_v_27_or_28(encoding):
    """A key in another process or device may encode as it likes; tokens take only the one form."""
    shop = Shop()
    with (
        make_guard(signer=SpySigner(after=ENCODINGS[encoding])) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        fetch("sync", session, shop)
    sent = bytes.fromhex(unb64(shop.seen[-1].headers["payment-signature"])["payload"]["signature"][2:])
    assert sent[64] in (27, 28)
    assert int.from_bytes(sent[32:64], "big") <= ORDER // 2


def test_a33_a_flipped_signature_is_the_same_hold(mode):
    """Each retry encodes the same authorization differently: one hold, one nonce, counted once."""
    encodings = iter([*ENCODINGS.values()])
    spy = SpySigner(after=lambda signature: next(encodings)(signature))
    shop = Shop(paid=httpx.ReadError("lost"))
    with make_guard(signer=spy) as guard, guard.session("s", budget="$1.00") as session:
        for _ in ENCODINGS:
            with pytest.raises(SettlementUncertain):
                fetch(mode, session, shop)
        assert float(session.held) == 0.01
        assert len(guard.shell.store.outstanding()) == 1
    assert len(shop.nonces) == 1
    assert {hold.id for hold in spy.signed} == {f"{nonce:064x}" for nonce in shop.nonces}
