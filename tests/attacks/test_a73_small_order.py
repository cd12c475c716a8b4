"""A73: a public key of small order fits signatures that nobody made, so a report or an anchor by it is none."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.support.merchant import make_guard
from x402guard import ConfigError, ReportKey, verify_anchor, verify_report

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
PRIME_ORDER = 2**252 + 27742317777372353535851937790883648493


def _sum(a, b):
    (x1, y1), (x2, y2) = a, b
    part = D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + part, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - part, -1, P) % P


def _times(number, point):
    found = (0, 1)
    for bit in f"{number:b}":
        found = _sum(found, found)
        if bit == "1":
            found = _sum(found, point)
    return found


def _small_points():
    """The eight points of small order, from points of the curve times its prime order: not by the formula of the guard."""
    root, found = pow(2, (P - 1) // 4, P), set()
    for y in range(2, 60):
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        x = x if x * x % P == square else x * root % P
        if x * x % P == square:
            found |= {_times(PRIME_ORDER, point) for point in ((x, y), (P - x, y))}
    return sorted(found)


def _keys():
    for x, y in _small_points():
        for value in (y, y + P):
            if value < 2**255:
                for sign in {x & 1, 1}:
                    yield (value | sign << 255).to_bytes(32, "little").hex()


def test_there_are_eight_points_of_small_order():
    assert len(_small_points()) == 8


@pytest.mark.parametrize("key", sorted(set(_keys())))
def test_a73_no_key_of_small_order_signs(key):
    for verify in (verify_report, verify_anchor):
        with pytest.raises(ConfigError, match="is of small order: it fits signatures that nobody made"):
            verify("{}", key)


def test_a73_a_report_that_nobody_signed_is_none():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        session.charge("serp", "$0.01")
    signed = json.loads(ReportKey.new().sign(session.report(), at_unix=1))
    nobody = (1).to_bytes(32, "little")
    forged = nobody + bytes(32)  # R = S·B + h·A is the neutral point, for each message
    Ed25519PublicKey.from_public_bytes(nobody).verify(forged, b"what nobody signed")
    signed |= {"public_key": nobody.hex(), "signature": forged.hex()}
    signed["report"]["spent"] = "0.000001"
    with pytest.raises(ConfigError, match="Ask who signs for another key"):
        verify_report(json.dumps(signed), nobody.hex())


def test_a73_the_keys_that_are_made_are_taken():
    for _ in range(50):
        with pytest.raises(ConfigError, match="it is no"):
            verify_report("{}", ReportKey.new().public)
