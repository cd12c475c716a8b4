"""Lost answers of an MCP tool, in every order of how it was lost, who looked at the chain meanwhile, and what it said."""

from decimal import Decimal

import anyio
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.support.chain import MockChain
from tests.support.merchant import b64, make_guard, recover_payment, required
from x402guard import GuardedMCPSession, Owner, PaidNotDelivered, SettlementUncertain
from x402guard.ledger.evidence import Settled, Unused

CENT = Decimal("0.01")

LOST = {
    "the connection breaks": ConnectionError("gone"),
    "the connection is closed": MCPError(-32000, "Connection closed"),
    "the request times out": MCPError(-32001, "Request timed out"),
    "an error of the server": MCPError(-32603, "Internal error"),
    "an error as a result": types.CallToolResult(
        content=[types.TextContent(type="text", text="closed")], is_error=True
    ),
    "it is cancelled": None,
}
FINDINGS = {
    "taken": lambda hold: Settled(10_000, "0x" + "ab" * 32, 0, final=True),
    "unused": Unused(0),
    "unreadable": None,
}


class Seller:
    """A client session whose server asks for a cent, takes the payment, and then loses the answer."""

    server_info = None

    def __init__(self, lost):
        self.lost, self.nonces = lost, []

    async def call_tool(self, name, arguments=None, *, meta=None):
        if meta is None:
            terms = required(url=f"mcp://tool/{name}")
            return types.CallToolResult(content=[], structured_content=terms, is_error=True)
        self.nonces.append(recover_payment(b64(meta["x402/payment"]))[1])
        if self.lost is None:
            await anyio.sleep(60)
        if isinstance(self.lost, Exception):
            raise self.lost
        return self.lost


def bought(seller, session):
    async def call():
        with anyio.move_on_after(0.05 if seller.lost is None else 30):
            await GuardedMCPSession(seller, session, server="weather").call_tool("forecast", {"city": "Oslo"})

    try:
        anyio.run(call)
    except (SettlementUncertain, PaidNotDelivered, MCPError) as no:
        return no
    return None


def look(between, guard, session, url, chain):
    if between == "a sweep":
        guard.sweep()
    elif between == "reconcile":
        guard.reconcile()
    elif between == "another guard":
        with make_guard(url, chains=chain) as other:
            other.reconcile()
    elif between == "the owner's reset":
        session.trip("enough")
        with Owner(url) as owner:
            owner.reset("s")


@pytest.mark.parametrize("between", ["nothing", "a sweep", "reconcile", "another guard", "the owner's reset"])
@pytest.mark.parametrize("finding", FINDINGS)
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_answer_of_a_tool_never_signs_a_second_payment_in_any_order(lost, finding, between, tmp_path):
    url, chain, seller = f"sqlite:///{tmp_path / 'spend.db'}", MockChain(FINDINGS[finding]), Seller(LOST[lost])
    with make_guard(url, chains=chain) as guard, guard.session("s", budget="$1.00", id="s") as session:
        for _ in range(3):
            no = bought(seller, session)
            assert not isinstance(no, PaidNotDelivered) or finding == "taken"
            look(between, guard, session, url, chain)
        assert len(set(seller.nonces)) == 1
        assert session.spent + session.held == CENT
