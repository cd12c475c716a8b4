"""Our client on a real chain: every scheme, both transports, and books that equal the chain's."""

import json
from decimal import Decimal

import anyio
import httpx
import pytest

from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, GuardedTransport, LocalSigner, Policy, PolicyDenied
from x402guard.frozen import replace
from x402guard.testing import Testnet

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("payments")]

DOLLAR = 10**6
ROUTES = {
    "documents": ("GET", 100_000, "exact"),
    "cents": ("GET", 10_000, "exact"),
    "permit2": ("GET", 100_000, "exact"),
    "llm": ("POST", 12_345, "upto"),
    "v1": ("GET", 100_000, "exact"),
    "summaries": ("POST", 100_000, "exact"),
    "multi": ("GET", 20_000, "exact"),
}


@pytest.fixture(scope="module")
def net(make_engine):
    with Testnet(make_engine=make_engine) as net:
        yield net


@pytest.fixture
def guard(net, tmp_path):
    signer = LocalSigner.from_key(net.payer_key)
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 'spend.db'}", chains={net.network: net.rpc}) as guard:
        yield guard


def ask(kind, session, net, method, path, **options):
    if kind == "sync":
        with httpx.Client(transport=GuardedTransport(session), base_url=net.merchant.url, timeout=30) as http:
            return http.request(method, path, **options)

    async def main():
        transport = AsyncGuardedTransport(session)
        async with httpx.AsyncClient(transport=transport, base_url=net.merchant.url, timeout=30) as http:
            return await http.request(method, path, **options)

    return anyio.run(main)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("route", sorted(ROUTES))
def test_what_the_chain_moved_is_what_the_books_say(net, guard, kind, route):
    method, price, scheme = ROUTES[route]
    before = net.balance(net.payer), net.balance(net.merchant.payee), len(net.transfers())
    with guard.session("agent", budget="$1.00") as session:
        options = {"json": {"text": "the court finds"}} if method == "POST" else {}
        response = ask(kind, session, net, method, net.merchant.routes[route].format(n=7), **options)
        assert response.status_code == 200
        moved = before[0] - net.balance(net.payer)
        assert moved == price == net.balance(net.merchant.payee) - before[1]
        assert len(net.transfers()) == before[2] + 1
        found = session.reconcile()
        assert (found.still_open, found.contradicted, found.unreadable) == (0, [], {})
        assert session.spent * DOLLAR == price
        assert session.held == 0
        receipt = response.extensions["x402guard"]
        assert receipt.transaction == net.transfers()[-1].transaction
        report = session.report().to_dict()
        assert Decimal(report["evidence"]["chain"]) * DOLLAR == price
        assert Decimal(report["payments"]["by_scheme"][scheme]) * DOLLAR == price
        if route == "summaries":
            assert "the court finds" in json.dumps(response.json())


def test_nothing_is_paid_for_what_is_free(net, guard):
    with guard.session("agent", budget="$1.00") as session:
        assert ask("sync", session, net, "GET", net.merchant.routes["free"]).status_code == 200
        assert session.spent == session.held == 0


def test_five_ceilings_of_five_cents_fit_into_ten_because_the_chain_shows_what_was_used(net, guard):
    with guard.session("agent", budget="$0.10") as session:
        for _ in range(5):
            assert ask("sync", session, net, "POST", net.merchant.routes["llm"], json={}).status_code == 200
        with pytest.raises(BudgetExhausted):
            ask("sync", session, net, "POST", net.merchant.routes["llm"], json={})
        assert (session.spent * DOLLAR, session.held) == (5 * 12_345, 0)


def test_a_poor_account_is_refused_before_anything_is_signed(net, guard, tmp_path):
    pauper = LocalSigner.from_key("0x" + "77" * 32)
    chains = {net.network: net.rpc}
    with Guard(signer=pauper, ledger=f"sqlite:///{tmp_path / 'poor.db'}", chains=chains) as poor:
        with poor.session("agent", budget="$1.00") as session:
            with pytest.raises(PolicyDenied, match=r"balance: 0x.* has 0 units of USDC"):
                ask("sync", session, net, "GET", "/documents/1")
            assert session.held == 0


def test_a_missing_permit2_allowance_is_named_before_anything_is_signed(net, tmp_path):
    from eth_account import Account

    key = "0x" + "78" * 32
    net.fund(Account.from_key(key).address, tokens=DOLLAR)
    signer = LocalSigner.from_key(key)
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 'p.db'}", chains={net.network: net.rpc}) as guard:
        with guard.session("agent", budget="$1.00") as session:
            with pytest.raises(
                PolicyDenied, match=r"permit2_allowance: .* allow an exact sum with .x402guard allowance grant"
            ):
                ask("sync", session, net, "GET", net.merchant.routes["permit2"].format(n=1))
            assert session.held == 0


def test_a_missing_permit2_allowance_that_only_the_server_sees_leaves_the_payment_in_doubt(net, tmp_path):
    """Without a chain of our own the server says 412 after the signature is out: it stays counted."""
    from eth_account import Account

    key = "0x" + "79" * 32
    net.fund(Account.from_key(key).address, tokens=DOLLAR)
    with Guard(signer=LocalSigner.from_key(key), ledger=f"sqlite:///{tmp_path / 'p.db'}") as guard:
        with guard.session("agent", budget="$1.00") as session:
            response = ask("sync", session, net, "GET", net.merchant.routes["permit2"].format(n=1))
            assert response.status_code == 412
            assert response.extensions["x402guard"].in_doubt
            assert session.held * DOLLAR == 100_000


def test_the_wrong_chain_is_no_evidence(net, tmp_path):
    signer = LocalSigner.from_key(net.payer_key)
    other = "eip155:421614"
    policy = Policy(networks={other, net.network})
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 'w.db'}", chains={other: net.rpc}, policy=policy) as guard:
        with guard.session("agent", budget="$1.00") as session:
            response = ask("sync", session, net, "GET", "/documents/1")
            assert response.extensions["x402guard"].evidence == "claimed"

        from tests.support.ledger import a_hold, an_intent

        intent = replace(an_intent(), network=other, chain_id=421614)
        finding = guard.shell.chain.read(replace(a_hold(), intent=intent))
        assert "serves chain 84532" in finding.reason
