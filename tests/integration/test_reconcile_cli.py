"""``reconcile``, ``holds``, ``holds cancel`` and ``verify`` as an owner runs them, on a real chain."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from eth_account import Account

from tests.support.command_line import forked, typed
from tests.support.merchant import make_guard
from x402guard import GuardedTransport, LocalSigner, SettlementUncertain
from x402guard.testing import Testnet
from x402guard.testing.chain_client import ChainClient, calldata

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile_cli")]


@pytest.fixture
def net():  # one a test: a wallet on its own chain has no payments of an earlier owner
    with Testnet() as running:
        yield running


class Lost(httpx.BaseTransport):
    """Loses a payment on its way: the seller never gets it."""

    def __init__(self):
        self.inner = httpx.HTTPTransport()

    def handle_request(self, request):
        if "payment-signature" in request.headers:
            raise httpx.ReadTimeout("lost")
        return self.inner.handle_request(request)

    def close(self):
        self.inner.close()


class Owner:
    """Runs commands on one ledger."""

    def __init__(self, net, path):
        self.url = f"sqlite:///{path}"
        chains = json.dumps({"base-sepolia": ["http://127.0.0.1:9", net.rpc]})
        self.env = {"X402GUARD_LEDGER": self.url, "X402GUARD_CHAINS": chains, "COLUMNS": "200"}

    def run(self, *words, code=0, way=typed, **env):
        done = way(*words, cwd=".", **self.env | env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def owner(net, tmp_path):
    """An owner whose agent has bought one thing, and lost the payment for another on its way."""
    owner = Owner(net, tmp_path / "spend.db")
    with make_guard(owner.url, signer=LocalSigner.from_key(net.payer_key), chains={net.network: net.rpc}) as guard:
        with guard.session("agent", budget="$1.00", id="agent") as session:
            for transport, path in ((None, "/documents/1"), (Lost(), "/documents/2")):
                with httpx.Client(
                    transport=GuardedTransport(session, transport), base_url=net.merchant.url, trust_env=False
                ) as http:
                    try:
                        http.get(path)
                    except SettlementUncertain as error:
                        owner.hold_id = error.hold_id
    return owner


def test_what_is_claimed_is_proven_and_what_is_out_stays_out(owner):
    said = owner.run("reconcile", way=forked)
    assert "asked about 2: 1 proven; 1 still open" in said
    assert "Permit2 may move $" in said
    [held] = json.loads(owner.run("holds", "--json"))
    assert (held["id"], held["amount"], held["in_doubt"]) == (owner.hold_id, "0.10", True)
    report = json.loads(owner.run("report", "agent", "--json"))
    settlement = {"proven": "0.10", "claimed": "0.00", "assumed": "0.00", "exposed": "0.10"}
    assert report["settlement"] == settlement | {"exposed_to_reorg": "0.00"}
    [out] = report["outstanding"]
    assert out["exposed_until"] == out["deadline"]
    assert "the ledger is consistent" in owner.run("verify")


def test_a_payment_is_cancelled_by_whoever_pays_the_gas_and_freed_by_the_chain_alone(net, owner):
    assert "X402GUARD_PRIVATE_KEY" in owner.run("holds", "cancel", owner.hold_id[:12], code=2)
    assert "no payment" in owner.run("holds", "cancel", "zz", code=2, X402GUARD_PRIVATE_KEY=net.payer_key)
    call = json.loads(owner.run("holds", "cancel", owner.hold_id[:12], "--json", X402GUARD_PRIVATE_KEY=net.payer_key))
    assert (call["hold_id"], call["to"]) == (owner.hold_id, net.token)
    assert "1 still open" in owner.run("reconcile"), "asking for it frees nothing"
    somebody = Account.create()
    net.fund(somebody.address, wei=10**18)
    chain = ChainClient(net.rpc, net.chain_id)
    sent = chain.send(somebody, call["to"], call["data"], gas=200_000)
    assert chain.receipt(sent)["status"] == "0x1"
    chain.close()
    assert "1 voided" in owner.run("reconcile")
    assert owner.run("holds") == "nothing is held\n"


def test_it_goes_on_until_it_is_stopped(owner):
    process = subprocess.Popen(
        [sys.executable, "-m", "x402guard", "reconcile", "--every", "1s", "--json"],
        env=os.environ | owner.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    looks = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert [look["proven"] for look in looks] == [1, 0]


def test_what_left_the_wallet_past_the_guard_is_an_alarm_until_it_is_acknowledged(net, owner):
    owner.run("reconcile")
    net._confirm(net.token, calldata("transfer(address,uint256)", net.payee, 123_456))
    said = owner.run("reconcile", code=1)
    assert re.search(r"left the wallet, not in the ledger: \$0\.123456 to 0x", said)
    assert "not in the ledger" in owner.run("reconcile", code=1)
    [known] = re.findall(r"x402guard acknowledge (\w+)", said)
    assert "acknowledged by" in owner.run("acknowledge", known)
    assert "not in the ledger" not in owner.run("reconcile")


def test_mistakes_are_said_in_words(net, owner):
    assert "write 30s, 5m or 1h" in owner.run("reconcile", "--every", "0s", code=2)
    other = json.dumps({"base": net.rpc})
    assert "serves chain 84532" in owner.run("reconcile", code=2, X402GUARD_CHAINS=other)
    soon = json.dumps({"base-sepolia": {"urls": net.rpc, "finality": "soon"}})
    assert "finality" in owner.run("reconcile", code=2, X402GUARD_CHAINS=soon)
    dead = json.dumps({"base-sepolia": "http://127.0.0.1:9"})
    assert "could not read eip155:84532" in owner.run("reconcile", code=1, X402GUARD_CHAINS=dead)
    assert "no ledger yet at nowhere.db" in owner.run("verify", "--ledger", "sqlite:///nowhere.db", code=2)
