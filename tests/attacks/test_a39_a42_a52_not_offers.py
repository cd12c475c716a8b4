"""402s that are no offer to pay: deposits, channels, later captures, a deposit at Circle, a request to sign in; signed offers."""

import json
import socket
from base64 import urlsafe_b64encode
from decimal import Decimal

import httpx
import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data

from tests.support.merchant import (
    NETWORK,
    OTHER_PAYEE,
    PAYEE,
    URL,
    USDC,
    Shop,
    accept,
    b64,
    make_guard,
    required,
    required_v1,
)
from tests.support.refusals import assert_refused, events, fetch
from x402guard import Policy, PolicyDenied, ProtocolError

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
SIGN_IN = {
    "sign-in-with-x": {
        "info": {"domain": "courts.example", "uri": "https://courts.example/", "version": "1", "nonce": "a1b2c3d4"},
        "supportedChains": [{"chainId": "eip155:8453", "type": "eip191"}],
    }
}
OTHER_ORIGIN = {"sign-in-with-x": {**SIGN_IN["sign-in-with-x"], "info": {"domain": "bank.example"}}}


@MODES
def test_a39_a_deposit_is_refused_as_not_supported(mode):
    bait = accept(10_000, scheme="batch-settlement", extra={"minDeposit": "100000", "withdrawDelay": 2_592_000})
    with make_guard() as guard:
        assert_refused(
            mode, guard, Shop(terms=required(bait)), rule="schemes", says=["batch-settlement is not supported"]
        )


CHANNEL = {"channelId": "0x" + "11" * 32, "balance": "100000", "totalClaimed": "0", "withdrawRequestedAt": 0}


@MODES
@pytest.mark.parametrize("scheme", ["batch-settlement", "batched"])
def test_a40_a_corrected_sum_of_a_channel_is_never_signed(mode, scheme, key_uses):
    """The price was $0.01; the server answers the payment with a channel in which $9.99 are "spent already"."""
    state = {"chargedCumulativeAmount": "9990000", "signedMaxClaimable": "9990000", "signature": "0x" + "00" * 65}
    corrected = accept(10_000, scheme=scheme, extra={**state, "channelState": {**CHANNEL, **state}})
    poisoned = {**required(corrected), "error": "batch_settlement_stale_cumulative_amount"}
    refused = httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(poisoned)})
    shop = Shop(paid=lambda *_: refused)
    with make_guard() as guard, guard.session("s", budget="$10.00") as session:
        fetch(mode, session, shop)
        assert (len(key_uses), session.held) == (1, Decimal("0.01"))  # the first price, and in doubt
        shop.terms = poisoned
        assert fetch(mode, session, shop).status_code == 402  # the same payment goes out again, and no other one
        assert (len(set(shop.payments)), session.held) == (1, Decimal("0.01"))


@MODES
def test_a41_a_payment_that_is_captured_later_is_refused_as_not_supported(mode):
    offer = accept(10_000, scheme="auth-capture", extra={"captureDeadline": 2_000_000_000, "feeBps": 100})
    with make_guard() as guard:
        assert_refused(mode, guard, Shop(terms=required(offer)), rule="schemes", says=["auth-capture is not supported"])


@MODES
@pytest.mark.parametrize("extensions", [SIGN_IN, OTHER_ORIGIN], ids=["own origin", "another origin"])
def test_a42_a_request_to_sign_in_is_handed_over_untouched(mode, extensions, key_uses):
    shop = Shop(terms={**required(), "accepts": [], "extensions": extensions})
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(2):
            answer = fetch(mode, session, shop)
            assert (answer.status_code, "payment-required" in answer.headers) == (402, True)
        assert [e["place"] for e in events(session, "sign_in_asked")] == ["GET courts.example/opinion/42"]
        assert (key_uses, shop.payments, session.held, session.report().to_dict()["refusals"]) == ([], [], 0, [])


@MODES
def test_a42_an_offer_beside_a_request_to_sign_in_is_paid_and_nothing_else_is_signed(mode, key_uses):
    shop = Shop(terms=required(extensions=OTHER_ORIGIN))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
        assert (len(key_uses), "sign-in-with-x" in shop.seen[-1].headers) == (1, False)


@pytest.mark.parametrize("extensions", [None, {}, {"sign-in-with-y": {}}])
def test_a42_no_offer_at_all_is_malformed(extensions):
    shop = Shop(terms={**required(), "accepts": [], "extensions": extensions})
    with (
        make_guard() as guard,
        guard.session("s", budget="$1.00") as session,
        pytest.raises(ProtocolError, match="empty"),
    ):
        fetch("sync", session, shop)


@MODES
@pytest.mark.parametrize("version", [1, 2])
def test_an_offer_on_a_deposit_at_circle_is_refused_as_what_it_is(mode, version):
    domain = {"name": "GatewayWalletBatched", "version": "1", "verifyingContract": "0x" + "77" * 20}
    make, network = (required, {}) if version == 2 else (required_v1, {"network": "base-sepolia"})
    with make_guard() as guard:
        error = assert_refused(
            mode,
            guard,
            Shop(terms=make(accept(extra=domain, **network))),
            rule="unsupported_wallet",
            says=["Circle Gateway"],
        )
        assert "registry" not in f"{error} {error.advice}"


TERMS = {
    "version": 1, "resourceUrl": URL, "scheme": "exact", "network": NETWORK, "asset": USDC, "payTo": PAYEE, "amount": "10000",
    "validUntil": 4_000_000_000,
}  # fmt: skip
OFFER_TYPE = [("version", "uint256"), *((name, "string") for name in list(TERMS)[1:-1]), ("validUntil", "uint256")]


def by_eip712(terms):
    """The offer extension's signature by a key that anyone may make."""
    message = encode_typed_data(
        {"name": "x402 offer", "version": "1", "chainId": 1},
        {"Offer": [{"name": name, "type": kind} for name, kind in OFFER_TYPE]},
        terms,
    )
    signed = Account.create().sign_message(message)
    return {"format": "eip712", "acceptIndex": 0, "payload": terms, "signature": "0x" + signed.signature.hex()}


def by_jws(kid):
    header = {"alg": "ES256K", "kid": kid, "jwk": {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}}
    head, body = (urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, TERMS))
    return {"format": "jws", "acceptIndex": 0, "signature": f"{head}.{body}.{'A' * 86}"}


SIGNED_BY = {
    "its own key": by_eip712(TERMS),
    "a key in the header": by_jws("did:web:courts.example#key-1"),
    "a private address": by_jws("did:web:169.254.169.254%3A80#key-1"),
    "an address on loopback": by_jws("did:web:localhost%3A8080#key-1"),
    "no envelope": TERMS,
    "nothing": None,
}


@MODES
@pytest.mark.parametrize("by", SIGNED_BY)
def test_a52_a_signature_under_an_offer_gives_it_no_trust_and_fetches_no_key(mode, by, monkeypatch, key_uses):
    """Signed or not, in whatever envelope: the rules judge what stands in ``accepts``, and no key is looked up."""
    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **_: looked_up.append(asked))
    signed = {"offer-receipt": {"info": {"offers": [SIGNED_BY[by]]}}}
    policy = Policy(per_payment_cap="$0.05", payees=[PAYEE])
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        for bait in (accept(60_000), accept(10_000, payTo=OTHER_PAYEE)):  # the signed terms are harmless, these are not
            with pytest.raises(PolicyDenied):
                fetch(mode, session, Shop(terms=required(bait, extensions=signed)))
        assert (key_uses, session.held) == ([], 0)
        shop = Shop(terms=required(extensions=signed))
        assert fetch(mode, session, shop).status_code == 200
        assert (session.spent, len(key_uses), looked_up) == (Decimal("0.01"), 1, [])
