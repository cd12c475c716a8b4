"""The walks over the tree of nodes end, whatever rows a writer of the file has made."""

import pytest

from tests.support.ledger import usd
from x402guard.errors import LedgerUnavailable
from x402guard.ledger.model import WALLET, Node, NodeKind
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
