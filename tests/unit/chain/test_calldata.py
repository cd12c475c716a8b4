"""Reads what a settling call says, and keeps only small calls that may be one."""

from x402guard.chain import calldata


def test_calls_of_others_and_large_ones_are_not_remembered():
    calldata._decode_again.cache_clear()
    types = ("address", "uint256")
    foreign, ours = b"\0" * 68, calldata._selector("f", types) + b"\0" * 64
    for _ in range(3):
        assert calldata._decoded("f", types, foreign) is None
        assert calldata._decoded("f", types, ours + b"\0" * 4_096) is not None
    assert calldata._decode_again.cache_info().currsize == 0
    assert calldata._decoded("f", types, ours) == calldata._decoded("f", types, ours)
    assert calldata._decode_again.cache_info().hits == 1
