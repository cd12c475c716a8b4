"""What Permit2 may move, on a real chain: shown, granted as an exact sum, used up, and revoked; and mistakes."""

import json
import re
from decimal import Decimal

import pytest
from web3 import Web3

from tests.support.command_line import typed
from tests.support.market import market
from tests.support.merchant import KEY, make_guard
from x402guard import ConfigError, LocalSigner, Owner
from x402guard.assets import Asset
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses
from x402guard.guard import settings
from x402guard.guard.allowance import _terms, atomic_of
from x402guard.kernel.signer import AllowanceTerms
from x402guard.money import dollars_to_nanos
from x402guard.testing.contracts import PERMIT2, TOKEN

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("allowance")]


@pytest.fixture
def shop(make_engine, tmp_path):
    with market(make_engine, f"sqlite:///{tmp_path / 'x402guard.db'}") as opened:
        opened.guard().close()  # the ledger is there
        yield opened


@pytest.fixture
def run(shop, tmp_path):
    settings = {
        "X402GUARD_PRIVATE_KEY": shop.net.payer_key,
        "X402GUARD_CHAINS": json.dumps({shop.net.network: shop.net.rpc}),
    }

    def go(*arguments, **more):
        return typed("allowance", *arguments, cwd=tmp_path, **settings | more)

    return go


def on_chain(shop):
    abi = [{"name": "allowance", "type": "function", "stateMutability": "view",
            "inputs": [{"name": "o", "type": "address"}, {"name": "s", "type": "address"}],
            "outputs": [{"name": "", "type": "uint256"}]}]  # fmt: skip
    token = Web3(Web3.HTTPProvider(shop.net.rpc)).eth.contract(Web3.to_checksum_address(TOKEN), abi=abi)
    payer = LocalSigner.from_key(shop.net.payer_key).address
    return token.functions.allowance(payer, Web3.to_checksum_address(PERMIT2)).call()


def test_it_is_shown_granted_as_an_exact_sum_and_revoked(shop, run, tmp_path):
    done = run("grant", "20.00", "--yes")
    assert done.returncode == 0, done.stderr
    assert "of USDC on eip155:84532 → $20.00, by the transaction 0x" in done.stdout
    assert on_chain(shop) == 20_000_000
    (row,) = json.loads(run("show", "--json").stdout)
    assert (row["allowance"], row["symbol"], row["network"]) == ("20.00", "USDC", shop.net.network)
    assert "20.00" in run("show").stdout
    done = json.loads(
        run("grant", "$0.123456", "--yes", "--json", "--network", "base-sepolia", "--token", "usdc").stdout
    )
    assert (done["allowance"], on_chain(shop)) == ("0.123456", 123_456)
    assert run("revoke", "--yes").returncode == 0
    assert on_chain(shop) == 0
    with Owner(tmp_path / "x402guard.db") as owner:
        events = [
            event for event in owner.report("wallet").to_dict()["events"] if event["event"] == "allowance_requested"
        ]
        assert owner.verify() == []
    assert [event["amount"] for event in events] == ["20.00", "0.123456", "0.00"]


def test_a_permit2_payment_uses_it_up_and_the_next_is_refused(shop, run):
    assert run("grant", "0.10", "--yes").returncode == 0
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    assert shop.ask(session, "permit2").status_code == 200
    assert on_chain(shop) == 0
    (row,) = json.loads(run("show", "--json").stdout)
    assert (row["allowance"], row["exposed"]) == ("0.00", "0.00")


def test_without_a_yes_nothing_is_signed(shop, run):
    before = on_chain(shop)
    done = run("grant", "5.00")
    assert (done.returncode, "--yes does it without a question" in done.stderr) == (2, True)
    assert on_chain(shop) == before


@pytest.mark.parametrize(
    ("arguments", "more", "says"),
    [
        (("grant", "five"), {}, "amount: 'five' is not a dollar amount"),
        (("grant", "-1"), {}, "No such option"),
        (("grant", "0.0000001", "--yes"), {}, "is no whole number of units of USDC"),
        (
            ("grant", "1.00", "--token", "EURC"),
            {},
            "token: no token fits; name one with --network and --token: USDC on",
        ),
        (("grant", "1.00", "--network", "base"), {}, "token: no token fits"),
        (("show",), {"X402GUARD_PRIVATE_KEY": ""}, "private key: it is empty"),
        (
            ("show",),
            {"X402GUARD_CHAINS": "{}"},
            "chains: allowances are read from the chains of the settings; none is set",
        ),
        (("show",), {"X402GUARD_CHAINS": '{"base-sepolia": "http://127.0.0.1:9"}'}, "USDC cannot be read"),
    ],
    ids=["word", "minus", "too small", "token", "network", "no key", "no chain", "no node"],
)
def test_a_mistake_is_told_and_nothing_is_signed(shop, run, arguments, more, says):
    before = on_chain(shop)
    done = run(*arguments, **more)
    assert done.returncode == 2
    assert says in done.stderr
    assert on_chain(shop) == before


def test_a_wallet_without_gas_is_told(shop, run, tmp_path):
    poor = {"X402GUARD_PRIVATE_KEY": "0x" + "77" * 32, "X402GUARD_LEDGER": "sqlite:///poor.db"}
    typed("budget", "set", "wallet", "1.00", "--new", cwd=tmp_path, **poor)
    done = run("grant", "1.00", "--yes", **poor)
    assert (done.returncode, done.stdout) == (2, "")
    assert "allowance: USDC on eip155:84532: eth_" in done.stderr
    assert (
        run("show", **poor).stdout == "the wallet has no token that Permit2 can move, on the chains of the settings\n"
    )


def test_a_sum_is_exact_in_the_tokens_own_units():
    token = Asset("eip155:1", "0x" + "ab" * 20, "EUR", 18, "EUR", "1", usd="1.25")
    assert atomic_of(token, dollars_to_nanos("1.25")) == 10**18
    with pytest.raises(ConfigError, match="no whole number"):
        atomic_of(Asset("eip155:1", "0x" + "ab" * 20, "X", 2, "X", "1"), dollars_to_nanos("0.001"))


def test_the_key_signs_no_more_than_an_approval_of_permit2():
    from eth_account import Account
    from eth_account.typed_transactions import TypedTransaction
    from hexbytes import HexBytes

    signer = LocalSigner.from_key(KEY)
    raw = signer.sign_allowance(AllowanceTerms(8453, TOKEN, 7, 3, 60_000, 10**9, 10**8))
    fields = TypedTransaction.from_bytes(HexBytes(raw)).as_dict()
    assert Account.recover_transaction(raw) == signer.address
    assert (fields["value"], fields["chainId"], fields["nonce"]) == (0, 8453, 3)
    assert fields["data"].hex().removeprefix("0x").startswith("095ea7b3" + PERMIT2[2:].lower().rjust(64, "0"))
    assert int.from_bytes(bytes(fields["data"])[-32:], "big") == 7


def test_an_allowance_needs_a_ledger_and_a_key_of_this_process(shop, tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'x402guard.db'}", signer=None) as guard:
        assert guard.context.payer is None
    with Owner(tmp_path / "x402guard.db", chains={shop.net.network: shop.net.rpc}) as owner:
        with pytest.raises(ConfigError, match="private_key"):
            owner.set_allowance(Decimal(1))


def test_a_node_that_is_gone_after_the_transaction_was_sent_is_told_with_its_hash(shop, tmp_path, monkeypatch):
    asked = JsonRpc.call

    def dies(self, method, *params):
        if method == "eth_getTransactionReceipt":
            raise ChainUnreadable("gone")
        return asked(self, method, *params)

    monkeypatch.setattr(JsonRpc, "call", dies)
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", shop.net.payer_key)
    monkeypatch.setattr(settings, "_READ_BEFORE", {})
    with Owner(tmp_path / "x402guard.db", chains={shop.net.network: shop.net.rpc}) as owner:
        with pytest.raises(
            ConfigError, match=r"allowance: 0x[0-9a-f]{64} was sent, and its block cannot be read"
        ) as caught:
            owner.set_allowance("3.00")
    assert "Look at it before you repeat this" in caught.value.advice
    sent = str(caught.value).split()[1]
    assert Web3(Web3.HTTPProvider(shop.net.rpc)).eth.wait_for_transaction_receipt(sent, timeout=20)["status"] == 1
    assert on_chain(shop) == 3_000_000


def answering(monkeypatch, **instead):
    """Let the node answer some methods with something else."""
    asked = JsonRpc.call

    def answer(self, method, *params):
        return instead[method](params) if method in instead else asked(self, method, *params)

    monkeypatch.setattr(JsonRpc, "call", answer)


@pytest.mark.parametrize(
    "dear",
    [
        {"eth_maxPriorityFeePerGas": lambda _: hex(10**18)},
        {"eth_estimateGas": lambda _: hex(2**62)},
        {"eth_getBlockByNumber": lambda _: {"baseFeePerGas": hex(10**17)}},
    ],
    ids=["tip", "gas", "base fee"],
)
def test_a_node_that_names_a_fee_without_measure_gets_no_signature(shop, tmp_path, monkeypatch, dear):
    before, sent = on_chain(shop), []
    answering(monkeypatch, **dear, eth_sendRawTransaction=sent.append)
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", shop.net.payer_key)
    monkeypatch.setattr(settings, "_READ_BEFORE", {})
    with Owner(tmp_path / "x402guard.db", chains={shop.net.network: shop.net.rpc}) as owner:
        with pytest.raises(ConfigError, match=r"fee of up to [0-9.]+ of the network's coin, more than [05.]+;"):
            owner.set_allowance("3.00")
    assert (sent, on_chain(shop)) == ([], before)


def test_an_answer_that_is_lost_is_no_grant_that_failed(shop, run, monkeypatch):
    """The node has taken it, and says the second time that it knows it."""
    asked = JsonRpc.call

    def knows(self, method, *params):
        found = asked(self, method, *params)
        if method == "eth_sendRawTransaction":
            raise NodeRefuses("eth_sendRawTransaction: already known")
        return found

    monkeypatch.setattr(JsonRpc, "call", knows)
    done = run("grant", "4.00", "--yes")
    assert (done.returncode, "by the transaction 0x" in " ".join(done.stdout.split())) == (0, True), done.stderr
    assert on_chain(shop) == 4_000_000


def test_ctrl_c_while_its_block_is_awaited_tells_the_hash(shop, tmp_path, monkeypatch, caplog):
    asked = JsonRpc.call

    def is_interrupted(self, method, *params):
        if method == "eth_getTransactionReceipt":
            raise KeyboardInterrupt
        return asked(self, method, *params)

    monkeypatch.setattr(JsonRpc, "call", is_interrupted)
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", shop.net.payer_key)
    monkeypatch.setattr(settings, "_READ_BEFORE", {})
    with Owner(tmp_path / "x402guard.db", chains={shop.net.network: shop.net.rpc}) as owner:
        with pytest.raises(KeyboardInterrupt):
            owner.set_allowance("3.00")
    assert re.search(r"allowance: 0x[0-9a-f]{64} was sent, and its block is not awaited", caplog.text)


@pytest.mark.parametrize("block", [None, [1], "0x1"])
def test_a_block_or_a_receipt_that_is_none_is_told(shop, run, monkeypatch, block):
    before = on_chain(shop)
    answering(monkeypatch, eth_getBlockByNumber=lambda _: block)
    done = run("grant", "4.50", "--yes")
    assert (done.returncode, "the node gives no block" in done.stderr, on_chain(shop)) == (2, True, before)
    monkeypatch.undo()
    answering(monkeypatch, eth_getTransactionReceipt=lambda _: block or {})
    done = run("grant", "4.50", "--yes")
    said = " ".join(done.stderr.split())
    assert (done.returncode, "was sent, and its block cannot be read" in said) == (2, True)
    assert "Nothing was sent or paid" not in said


@pytest.mark.parametrize("odd", [{"eth_estimateGas": "0x0"}, {"eth_getTransactionCount": hex(2**64)}])
def test_what_no_transaction_has_gets_no_signature(shop, run, monkeypatch, odd):
    before = on_chain(shop)
    answering(monkeypatch, **{method: lambda _, value=value: value for method, value in odd.items()})
    done = run("grant", "4.50", "--yes")
    assert (done.returncode, "which no transaction has" in done.stderr, on_chain(shop)) == (2, True, before)


def test_a_revocation_that_the_chain_does_not_show_is_an_error(shop, run, tmp_path, monkeypatch):
    """A node that is behind, or a token that ignores it: the owner must not count on it."""
    assert run("grant", "5.00", "--yes").returncode == 0
    shown = JsonRpc.view

    def old(self, contract, name, *rest):
        return 5_000_000 if name == "allowance" else shown(self, contract, name, *rest)

    monkeypatch.setattr(JsonRpc, "view", old)
    done = run("revoke", "--yes")
    assert (done.returncode, "and the node shows $5.00, not $0.00" in " ".join(done.stderr.split())) == (2, True)


def test_a_node_that_limits_after_the_block_is_asked_again_and_told_with_the_transaction(shop, run, monkeypatch):
    shown, asked = JsonRpc.view, []

    def limits(self, contract, name, *rest):
        if name == "allowance":
            asked.append(name)
            if 1 < len(asked) < limited:
                raise ChainUnreadable("HTTP 429")
        return shown(self, contract, name, *rest)

    monkeypatch.setattr(JsonRpc, "view", limits)
    limited = 5
    assert run("grant", "2.00", "--yes").returncode == 0
    asked.clear()
    limited = 1_000
    done = run("revoke", "--yes")
    said = " ".join(done.stderr.split())
    assert (done.returncode, "is in a block, and the node does not show the allowance;" in said) == (2, True), said


def test_a_coin_that_is_worth_little_may_be_paid_in_a_larger_number():
    class Node:
        def call(self, method, *_):
            return {"eth_getBlockByNumber": {"baseFeePerGas": hex(5 * 10**11)}}.get(method, hex(46_000))

    # The coins of MegaETH and of a chain that was not known here are ether and bitcoin.
    polygon, *others = (
        Asset(f"eip155:{chain}", "0x" + "ab" * 20, "USDC", 6, "USDC", "2") for chain in (137, 1, 4326, 31612)
    )
    assert _terms(Node(), "0x" + "11" * 20, polygon, 0).gas == 55_200
    for other in others:
        with pytest.raises(ConfigError, match=r"more than 0\.05"):
            _terms(Node(), "0x" + "11" * 20, other, 0)
