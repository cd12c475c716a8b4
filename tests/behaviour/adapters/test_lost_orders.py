"""Lost answers past HTTP, in every order of who pays, how the answer is lost, who looks at the chain meanwhile, and what it says."""

from decimal import Decimal

import mcp_types as types
import pytest
from a2a.types import TaskState
from mcp.shared.exceptions import MCPError

from tests.support.buyers import LOOKS, BySDK, BySDKAwaited, OverA2A, OverMCP, look
from tests.support.chain import MockChain
from tests.support.merchant import make_guard
from x402guard import PaidNotDelivered, SettlementUncertain
from x402guard.ledger.findings import Settled, Unused

CENT = Decimal("0.01")
FINDINGS = {
    "taken": lambda hold: Settled(10_000, "0x" + "ab" * 32, 0, final=True),
    "unused": Unused(0),
    "unreadable": None,
}


ERROR = types.CallToolResult(content=[types.TextContent(type="text", text="closed")], is_error=True)
BROKEN = ConnectionError("gone")
WAYS = [
    *((OverMCP, lost) for lost in (BROKEN, None, ERROR)),
    *((OverMCP, MCPError(code, words)) for code, words in ((-32000, "closed"), (-32001, "timed out"), (-32603, "no"))),
    *((OverA2A, lost) for lost in (BROKEN, None, TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_FAILED)),
    *((kind, lost) for kind in (BySDK, BySDKAwaited) for lost in (None, 402, 503)),
]


def bought(seller, session):
    try:
        seller.buy(session)
    except (SettlementUncertain, PaidNotDelivered) as no:
        return no
    return None


def _name(value):
    return value.__name__ if isinstance(value, type) else type(value).__name__ if value is ERROR else str(value)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("between", LOOKS)
@pytest.mark.parametrize("finding", FINDINGS)
@pytest.mark.parametrize(("kind", "lost"), WAYS, ids=_name)
def test_a_lost_answer_never_signs_a_second_payment_in_any_order(kind, lost, finding, between, tmp_path):
    url, chain, seller = f"sqlite:///{tmp_path / 'spend.db'}", MockChain(FINDINGS[finding]), kind(lost)
    with make_guard(url, chains=chain) as guard, guard.session("s", budget="$1.00", id="s") as session:
        for _ in range(3):
            no = bought(seller, session)
            assert not isinstance(no, PaidNotDelivered) or finding == "taken"
            look(between, guard, session, url, chain)
        assert len(set(seller.nonces)) == 1
        assert session.spent + session.held == CENT
