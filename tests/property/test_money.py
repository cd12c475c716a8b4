"""Money is integers, rounded against the spender."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from x402guard.kernel.rows import MAX_NANOS
from x402guard.money import atomic_to_nanos, dollars_to_nanos, format_dollars, nanos_to_decimal

nanos = st.integers(0, MAX_NANOS)


@given(nanos)
def test_every_amount_survives_being_written_and_read(amount):
    assert dollars_to_nanos(format_dollars(amount)) == amount
    assert dollars_to_nanos(f"${format_dollars(amount)}") == amount
    assert dollars_to_nanos(nanos_to_decimal(amount)) == amount
    assert nanos_to_decimal(amount) * 10**9 == amount


@given(st.integers(0, 2**256 - 1), st.integers(0, 36), st.integers(1, 10**12))
def test_tokens_are_never_counted_below_their_worth(atomic, decimals, peg):
    counted = atomic_to_nanos(atomic, decimals=decimals, peg_nanos=peg)
    exact = atomic * peg
    assert counted * 10**decimals >= exact
    assert (counted - 1) * 10**decimals < exact or counted == 0


@given(st.lists(st.integers(0, 10**30), max_size=20), st.integers(0, 36))
def test_parts_are_never_counted_below_the_whole(parts, decimals):
    whole = atomic_to_nanos(sum(parts), decimals=decimals)
    assert sum(atomic_to_nanos(part, decimals=decimals) for part in parts) >= whole


@given(st.floats())
def test_a_float_raises_and_shows_the_fix(value):
    with pytest.raises(TypeError, match='never a float; write it as text, "\\$'):
        dollars_to_nanos(value)
    with pytest.raises(TypeError):
        atomic_to_nanos(value, decimals=6)


@pytest.mark.parametrize(
    "text", ["", "$", "-1", "$-1", "+1", "1e3", "1,000", "0x10", "NaN", "Infinity", "1.", ".5", "1.0000000001", "١", "１", "1 000", "9" * 13, "1\n2"]
)  # fmt: skip
def test_what_is_no_dollar_amount_is_refused(text):
    with pytest.raises(ValueError, match="budget"):
        dollars_to_nanos(text, field="budget")


@pytest.mark.parametrize(
    ("written", "amount"),
    [("$1.50", 1_500_000_000), ("0.01", 10_000_000), (5, 5_000_000_000), (Decimal("0.000000001"), 1), ("  $2 ", 2_000_000_000), (Decimal("1E+2"), 100 * 10**9)],
)  # fmt: skip
def test_how_amounts_are_written(written, amount):
    assert dollars_to_nanos(written) == amount


@pytest.mark.parametrize("value", [True, None, b"1", [1]])
def test_other_types_are_no_money(value):
    with pytest.raises(TypeError, match="money is never"):
        dollars_to_nanos(value)
