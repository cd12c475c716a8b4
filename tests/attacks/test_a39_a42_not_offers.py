"""402s that are no offer to pay: deposits, later captures, a wallet's deposit at Circle, a request to sign in."""

import pytest

from tests.support.merchant import Shop, accept, make_guard, required, required_v1
from tests.support.refusals import assert_refused, events, fetch
from x402guard import ProtocolError

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
