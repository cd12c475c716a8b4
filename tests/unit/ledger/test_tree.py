"""The walks over the tree of nodes end, whatever rows a writer of the file has made."""

import pytest

from tests.support.ledger import usd
from x402guard.errors import LedgerUnavailable
from x402guard.kernel.rows import WALLET, Node, NodeKind
from x402guard.ledger.tree import below, path


def nodes(**parents):
    return {name: Node(name, parent, NodeKind.SESSION, name, usd("$1"), 1, 1) for name, parent in parents.items()}


@pytest.mark.parametrize("false", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}])
def test_a_row_that_is_below_itself_is_refused(false):
    rows = nodes(wallet=None, s=WALLET, **false)
    with pytest.raises(LedgerUnavailable, match="node a is below itself"):
        path(rows, "a")
    assert [node.id for node in path(rows, "s")] == ["s", WALLET]
    assert [node.id for node in below(rows, WALLET)] == [WALLET, "s"]


def test_what_is_below_a_row_keeps_the_order_of_the_rows():
    rows = nodes(c="b", wallet=None, b="a", other=WALLET, a=WALLET, stray="gone")
    assert [node.id for node in below(rows, "a")] == ["c", "b", "a"]
    assert [node.id for node in below(rows, "b")] == ["c", "b"]
    assert below(rows, "gone") == []
    assert [node.id for node in below(nodes(a="b", b="a"), "a")] == ["a", "b"]


def test_a_wide_tree_is_walked_once():
    """It took eight seconds for ten thousand sessions: each asked all others for their parent."""
    rows = Counted(nodes(wallet=None, **{f"s{n}": WALLET for n in range(1_000)}))
    assert len(below(rows, WALLET)) == 1_001
    assert rows.looks <= 2


class Counted(dict):
    looks = 0

    def values(self):
        self.looks += 1
        return super().values()
