"""How a guard is set up: by keywords, by the environment, by a file; and what is wrong is said at once."""

import os
from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import KEY, PAYER, make_guard
from tests.support.settings import owners_file
from x402guard import Asset, AsyncGuardedTransport, ConfigError, Guard, GuardedTransport, LocalSigner, Policy

TOKEN = {
    "network": "base-sepolia",
    "address": "0x857b06519E91e3A54538791bDbb0E22373e36b66",
    "symbol": "EXA",
    "decimals": 18,
    "name": "Example",
    "version": "1",
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("X402GUARD_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"signer": KEY}, "signer: a value of type str is not a signer"),
        ({"signer": LocalSigner}, "signer: the class LocalSigner is not a signer"),
        ({"ledger": 5}, "ledger: 5 is neither"),
        ({"ledger": "mysql://x"}, "is not a ledger"),
        ({"policy": {"hosts": ["a"]}}, "policy: a dict is not a Policy"),
        ({"chains": ["http://x"]}, "chains: a list is no mapping from network to URL"),
        ({"chains": {"mars": "http://x"}}, "chains: 'mars' is not an EVM network"),
        ({"chains": {84532: "http://x"}}, "chains: 84532 is not an EVM network"),
        ({"chains": {"base-sepolia": "wss://x/SECRET"}}, "not an http:// or https:// URL"),
        ({"chains": {"base-sepolia": "http://a", "eip155:84532": "http://b"}}, "is named twice"),
        ({"assets": 5}, "assets: 5 is not a list of Asset"),
        ({"assets": [TOKEN]}, "is not an Asset"),
        ({"budget": 5.0}, 'budget: money is never a float; write it as text, "\\$5.00"'),
        ({"budget": "-1"}, "budget: '-1' is not a dollar amount"),
        ({"policy": Policy(networks={"base"})}, "chains: policy.networks allows eip155:8453"),
        ({"unsafe_no_chain": "false"}, "unsafe_no_chain: 'false' is neither True nor False"),
        ({"flight_s": 0}, "flight_s: 0 is not a positive whole number"),
        ({"max_body_bytes": 1.5}, "max_body_bytes: 1.5 is not"),
    ],
)
def test_a_wrong_argument_is_named_at_once_and_its_secret_is_not(arguments, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Guard(**{"ledger": "memory://", **arguments})
    assert "SECRET" not in str(caught.value)
    assert KEY[2:] not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"network": "mars"}, "Asset.network: 'mars'"),
        ({"network": 84532}, "Asset.network: 84532 is not a text"),
        ({"address": "0x12"}, "Asset.address: '0x12' is not an address"),
        ({"decimals": 6.0}, "Asset.decimals: 6.0"),
        ({"decimals": 37}, "Asset.decimals: 37"),
        ({"name": None}, "Asset.name: None"),
        ({"usd": 1.0}, "Asset.usd: money is never a float"),
        ({"usd": "0"}, "Asset.usd: a token without value"),
        ({"methods": "eip3009"}, "Asset.methods: 'eip3009'"),
        ({"methods": None}, "Asset.methods: None"),
    ],
)
def test_a_wrong_asset_is_named(changes, says):
    with pytest.raises(ConfigError, match=says):
        Asset(**{**TOKEN, **changes})


@pytest.mark.parametrize("name", ["", 5, None, "a\nb", "\ud800", "x" * 201])
def test_a_session_needs_a_name_that_can_be_printed(name):
    with make_guard() as guard, pytest.raises(ConfigError, match="is not a name for a session"):
        guard.session(name, budget="$1")


@pytest.mark.parametrize("session_id", ["", "wallet", "a b", "a/b", 5, "x" * 101, "ü"])
def test_an_id_is_one_that_a_command_line_can_take(session_id):
    with make_guard() as guard, pytest.raises(ConfigError, match="cannot be a session's id"):
        guard.session("s", budget="$1", id=session_id)


def test_a_transport_of_the_wrong_kind_is_named_when_it_is_made():
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(ConfigError, match="AsyncGuardedTransport"):
            GuardedTransport(session, httpx.AsyncHTTPTransport())
        with pytest.raises(ConfigError, match="use GuardedTransport"):
            AsyncGuardedTransport(session, httpx.HTTPTransport())
        with pytest.raises(ConfigError, match="neither a Session nor a Guard"):
            GuardedTransport(Guard)
        with pytest.raises(ConfigError, match="on_refusal"):
            GuardedTransport(session, on_refusal="ignore")


def test_everything_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", KEY)
    monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
    monkeypatch.setenv("X402GUARD_BUDGET", "$2.50")
    monkeypatch.setenv("X402GUARD_POLICY__PER_PAYMENT_CAP", "$0.25")
    monkeypatch.setenv("X402GUARD_POLICY__HOSTS", '["courts.example"]')
    monkeypatch.setenv("X402GUARD_CHAINS", '{"base-sepolia": "http://127.0.0.1:1"}')
    with Guard.from_env() as guard:
        assert guard.context.payer == PAYER
        assert guard.policy.cap_nanos == 250_000_000
        assert guard.policy.hosts == {"courts.example"}
        assert guard.context.chains == {"eip155:84532"}
        assert guard.session("s", budget="$9").remaining == Decimal("2.50")
    assert "X402GUARD_PRIVATE_KEY" not in os.environ


def test_everything_but_the_key_can_come_from_a_file_and_the_environment_wins(tmp_path, monkeypatch):
    owners_file(
        tmp_path,
        'ledger = "memory://"\nbudget = "$2.50"\n[policy]\nper_payment_cap = "$0.25"\nmax_lifetime_s = 60\n'
        '[[assets]]\nnetwork = "base-sepolia"\naddress = "0x857b06519E91e3A54538791bDbb0E22373e36b66"\n'
        'symbol = "EXA"\ndecimals = 18\nname = "Example"\nversion = "1"\n',
    )
    monkeypatch.setenv("X402GUARD_POLICY__PER_PAYMENT_CAP", "$0.50")
    with Guard.from_env() as guard:
        assert (guard.policy.cap_nanos, guard.policy.max_lifetime_s) == (500_000_000, 300)  # not the file's policy
        assert guard.context.registry.find("eip155:84532", TOKEN["address"]).symbol == "EXA"
    monkeypatch.delenv("X402GUARD_POLICY__PER_PAYMENT_CAP")
    with Guard.from_env(str(tmp_path / "x402guard.toml")) as guard:
        assert guard.policy.max_lifetime_s == 60


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("budget = 5", 'budget: .* write it as text, such as "\\$5.00"'),
        ('bugdet = "$5"', "bugdet: there is no such setting .*x402guard.toml.*; did you mean budget"),
        ('[policy]\nhost = ["a"]', "policy.host: .* did you mean hosts"),
        ('[policy]\nhosts = "a"', "policy.hosts: .* write a list"),
        ("budget = ", "x402guard.toml: cannot be read"),
        (f'private_key = "{KEY}"', "private_key: a key does not belong in a settings file"),
    ],
)
def test_a_wrong_file_is_named_with_the_line_to_mend(tmp_path, text, says):
    owners_file(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        Guard.from_env()
    assert KEY[2:] not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        Guard.from_env(tmp_path / "none.toml")


def test_a_guard_shows_who_pays_and_nothing_else_of_the_key():
    with make_guard() as guard:
        assert repr(guard) == f"Guard(payer={PAYER}, instance={guard.instance!r})"
    assert repr(Guard.__new__(Guard)) == "Guard(unfinished)"


def test_a_ledger_that_was_not_named_is_told_once_when_it_is_made(tmp_path, caplog):
    for _ in range(2):
        Guard().close()
    Guard(ledger="sqlite:///named.db").close()
    told = [record.getMessage() for record in caplog.records if "a new ledger" in record.getMessage()]
    assert told == [
        f"a new ledger is made at {tmp_path / 'x402guard.db'}; Guard(ledger=…), X402GUARD_LEDGER or x402guard.toml names another place"
    ]
