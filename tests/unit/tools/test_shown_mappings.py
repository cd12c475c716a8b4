"""What an approver is shown of a large mapping says that something is left out."""

import pytest

from x402guard.tools.arguments import Readable


@pytest.mark.parametrize("count", [0, 1, 500])
def test_a_mapping_that_is_shown_whole_has_no_mark(count):
    given = {str(number): True for number in range(count)}
    assert Readable(given).cut() == given


@pytest.mark.parametrize("count", [501, 5_000])
@pytest.mark.parametrize("inside", [False, True])
def test_a_mapping_that_is_cut_says_how_many_there_are(count, inside):
    given = {str(number): None for number in range(count)} | {"bcc": "eve"}
    shown = Readable({"fields": given} if inside else given).cut()
    found = shown["fields"] if inside else shown
    assert found["…"] == f"({count + 1:,} in all)"
    assert "bcc" not in found
