"""Every rule of the policy: what it lets pass, what it refuses, and that the refusal names rule, value and setting."""

import pytest

from tests.support.merchant import FACILITATOR, OTHER_PAYEE, PAYEE, USDC, accept, permit2, required, required_v1, upto
from x402guard import ConfigError, Policy
from x402guard.assets import AssetRegistry
from x402guard.flow.request import RequestFacts
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.offer_rules import Case, judge_offer, rank
from x402guard.x402.wire import parse_payment_required

MAINNET = {
    "network": "eip155:8453",
    "asset": "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
    "extra": {"name": "USD Coin", "version": "2"},
}


def offers(*accepts, terms=required, **more):
    return normalise(parse_payment_required(terms(*accepts, **more), field="t"), AssetRegistry())


def facts(host="courts.example", *, secure=True, loopback=False, **more):
    origin = f"{'https' if secure else 'http'}://{host}:443"
    return RequestFacts("GET", f"https://{host}/x", origin, host, secure, loopback, "00" * 32, b"\1" * 32, **more)


def judge(policy=None, offer=None, **request):
    [made] = offers(offer or accept())
    assert isinstance(made, Offer), made
    return judge_offer(policy or Policy(), Case(facts(**request), made))


ALLOWED = {
    "defaults": ({}, {}, {}),
    "host": ({"hosts": {"Courts.Example"}}, {}, {}),
    "host with port": ({"hosts": {"courts.example:8443"}}, {}, {"host": "courts.example:8443"}),
    "host of any port": ({"hosts": {"courts.example"}}, {}, {"host": "courts.example:8443"}),
    "below a domain": ({"hosts": {"*.example"}}, {}, {}),
    "payee in lower case": ({"payees": {PAYEE.lower()}}, {}, {}),
    "v1 name": ({"networks": {"base-sepolia"}}, {}, {}),
    "symbol": ({"assets": {"usdc"}}, {}, {}),
    "contract": ({"assets": {USDC}}, {}, {}),
    "real network by name": ({"networks": {"base"}}, MAINNET, {}),
    "any network": ({"networks": None}, MAINNET, {}),
    "no cap": ({"per_payment_cap": None}, {"amount": "5000000000"}, {}),
    "just the cap": ({"per_payment_cap": "$0.01"}, {"amount": "10000"}, {}),
    "loopback on a test network": ({}, {}, {"host": "localhost:8000", "secure": False, "loopback": True}),
    "after a redirect, unsafely": ({"unsafe_pay_after_redirect": True}, {}, {"redirected_from": "https://a:443"}),
    "upfront, allowed": ({"flows": {"upfront"}}, {"extra": {"paymentFlow": "upfront"}}, {}),
    "another resource, warned of": ({}, {}, {"host": "other.example"}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_rule_lets_pass(name):
    policy, offer, request = ALLOWED[name]
    assert judge(Policy(**policy), accept(**offer), **request) is None


REFUSED = {
    "hosts": ({"hosts": {"other.example"}}, {}, {}, ["courts.example", "policy.hosts", "other.example"]),
    "hosts: not the domain itself": ({"hosts": {"*.courts.example"}}, {}, {}, ["courts.example", "policy.hosts"]),
    "hosts: another port": ({"hosts": {"courts.example:1"}}, {}, {"host": "courts.example:2"}, ["courts.example:2"]),
    "hosts: a name that only ends alike": (
        {"hosts": {"*.example.com"}},
        {},
        {"host": "badexample.com"},
        ["badexample.com"],
    ),
    "payees": ({"payees": {OTHER_PAYEE}}, {}, {}, [PAYEE, "policy.payees"]),
    "networks": ({}, MAINNET, {}, ["eip155:8453", "real money", "policy.networks"]),
    "assets": ({"assets": {"EURC"}}, {}, {}, ["USDC", "policy.assets"]),
    "schemes": ({"schemes": {"upto"}}, {}, {}, ["exact", "policy.schemes"]),
    "flows": ({}, {"extra": {"paymentFlow": "escrow"}}, {}, ["escrow", "policy.flows"]),
    "lifetime": ({}, {"maxTimeoutSeconds": 9}, {}, ["maxTimeoutSeconds 9"]),
    "per_payment_cap": ({}, {"amount": "1000001"}, {}, ["$1.000001", "policy.per_payment_cap ($1.00)"]),
    "https": ({}, {}, {"secure": False}, ["plain http"]),
    "https: real money on loopback": ({"networks": None}, MAINNET, {"secure": False, "loopback": True}, ["plain http"]),
    "redirect": ({}, {}, {"redirected_from": "https://a:443"}, ["https://a:443", "unsafe_pay_after_redirect"]),
    "resource_mismatch": (
        {"resource_mismatch": "refuse"},
        {},
        {"host": "other.example"},
        ["courts.example", "policy.resource_mismatch"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_refuses_and_says_why(name):
    policy, offer, request, says = REFUSED[name]
    rejection = judge(Policy(**policy), accept(**offer), **request)
    assert rejection.rule == name.partition(":")[0]
    for part in says:
        assert part in f"{rejection.reason} {rejection.words}"


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        (accept(scheme="deferred"), "schemes"),
        (accept(network="solana:5eykt4UsFv8P8NJdTREpY1vzqKqZKvdp"), "networks"),
        (accept(asset=OTHER_PAYEE), "assets"),
        (accept(extra={"name": "Evil", "version": "2"}), "asset_domain"),
        (accept(extra={"name": "USDC", "version": "9"}), "asset_domain"),
        (accept(extra={"decimals": 18}), "asset_domain"),
        (accept(extra={"assetTransferMethod": "erc7710"}), "methods"),
    ],
)
def test_what_is_no_offer_of_ours_is_passed_over(entry, rule):
    [rejection] = offers(entry)
    assert rejection.rule == rule


def test_a_domain_mismatch_shows_both():
    [rejection] = offers(accept(extra={"name": "Evil"}))
    assert rejection.words == "Evil"
    assert "'USDC'" in rejection.reason


def test_v1_and_v2_become_the_same_offer():
    [two] = offers(accept())
    [one] = offers(accept(network="base-sepolia"), terms=required_v1)
    for field in ("scheme", "method", "asset", "amount_atomic", "amount_nanos", "payee", "max_timeout_s", "network"):
        assert getattr(one, field) == getattr(two, field)
    assert (one.version, two.version) == (1, 2)


def test_v1_knows_no_upto():
    [rejection] = offers(upto(network="base-sepolia"), terms=required_v1)
    assert rejection.rule == "schemes"


def test_the_cheapest_comes_first_and_among_equals_eip3009():
    made = offers(permit2(10_000), accept(20_000), accept(10_000), accept(10_000, payTo=OTHER_PAYEE))
    cases = [Case(facts(), offer) for offer in made]
    assert [case.offer.position for case in rank(cases)] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"per_payment_cap": 0.5}, 'never a float; write it as text, "\\$0.50"'),
        ({"per_payment_cap": "$0"}, "a cap of zero pays nothing"),
        ({"per_payment_cap": "lots"}, "policy.per_payment_cap: 'lots' is not a dollar amount"),
        ({"networks": set()}, "policy.networks: an empty list would allow nothing"),
        ({"networks": "base"}, "policy.networks: write a set or list"),
        ({"networks": {"mars"}}, "'mars' is not a known network"),
        ({"hosts": {"https://courts.example/x"}}, "write the host alone, such as 'courts.example'"),
        ({"hosts": {"*"}}, "policy.hosts: .* is not a host"),
        ({"hosts": {" courts.example"}}, "is not a host"),
        ({"payees": {"0x1234"}}, "policy.payees: '0x1234' is not an address"),
        ({"payees": {PAYEE.replace("B", "b")}}, "fails its EIP-55 checksum"),
        ({"facilitators": [FACILITATOR, 7]}, "policy.facilitators"),
        ({"schemes": {"deferred"}}, "'deferred' is not a supported scheme"),
        ({"schemes": None}, "policy.schemes: None is not a choice"),
        ({"flows": None}, "policy.flows: None is not a choice"),
        ({"max_lifetime_s": 9}, "policy.max_lifetime_s: 9 is not"),
        ({"max_lifetime_s": 86_401}, "policy.max_lifetime_s"),
        ({"max_lifetime_s": True}, "policy.max_lifetime_s"),
        ({"resource_mismatch": "ignore"}, "not one of 'warn', 'refuse'"),
        ({"unsafe_pay_after_redirect": "no"}, "'no' is neither True nor False"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_written_down(settings, says):
    with pytest.raises(ConfigError, match=says):
        Policy(**settings)
