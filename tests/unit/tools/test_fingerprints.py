"""Arguments are told apart by their fingerprint."""

import datetime as dt
import uuid
from decimal import Decimal

import pytest

from x402guard.tools.arguments import fingerprint, plain_arguments


def fingerprint_of(arguments):
    return fingerprint(plain_arguments(arguments))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a", b"b"),
        (Decimal(1), Decimal(2)),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        ({1: 1}, {"1": 1}),
        ({"a", "b"}, {"a", "c"}),
    ],
)
def test_arguments_are_told_apart(one, other):
    assert fingerprint_of({"x": one}) != fingerprint_of({"x": other})
    assert fingerprint_of({"x": one}) == fingerprint_of({"x": one})
