"""Rows 16, 19 and 20: what an offer adds beside its price is not signed, not trusted and not paid."""

import pytest

from tests.support.merchant import (
    FACILITATOR,
    URL,
    USDC,
    Shop,
    accept,
    make_guard,
    permit2,
    required,
    required_v1,
    unb64,
    upto,
)
from tests.support.refusals import assert_malformed, assert_refused, authorization_of, fetch, fresh_address
from tests.support.signers import SpySigner
from x402guard import NoAcceptableOffer, Policy, PolicyDenied

PERMIT2 = "0x000000000022D473030F116dDEE9F6B43aC78BA3"
PROXIES = {"0x402085c248eea27d92e8b30b2c58ed07f9e20001", "0x4020a4f3b7b90cca423b9fabcc0ce57c6c240002"}
SPONSORING = {
    "eip2612GasSponsoring": {
        "info": {
            "description": "The facilitator accepts EIP-2612 gasless Permit to `Permit2` canonical contract.",
            "version": "1",
        },
        "schema": {
            "type": "object",
            "required": ["from", "asset", "spender", "amount", "nonce", "deadline", "signature"],
        },
    },
    "erc20ApprovalGasSponsoring": {
        "info": {"description": "The facilitator broadcasts a raw signed approval transaction.", "version": "1"},
        "schema": {"type": "object", "required": ["from", "asset", "spender", "amount", "signedTransaction"]},
    },
}


@pytest.mark.parametrize("offer", [accept(), permit2(), upto()], ids=["eip3009", "permit2", "upto"])
@pytest.mark.parametrize("offered", [["eip2612GasSponsoring"], ["erc20ApprovalGasSponsoring"], list(SPONSORING)])
def test_a16_gas_sponsoring_gets_no_second_signature(mode, key_uses, offer, offered):
    spy = SpySigner()
    extensions = {name: SPONSORING[name] for name in offered}
    shop = Shop(terms=required(offer, extensions=extensions))
    with make_guard(signer=spy) as guard, guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
        [hold] = spy.signed
    assert key_uses == [bytes.fromhex(hold.payment().digest)]
    message = unb64(shop.seen[-1].headers["payment-signature"])
    assert message["extensions"] == extensions, "nothing was filled in: no permit, no approval, no raw transaction"
    assert set(message["payload"]) <= {"authorization", "permit2Authorization", "signature"}


def test_a16_a_permit2_payment_allows_no_more_than_its_price(guard):
    shop = Shop(terms=required(permit2(), extensions=SPONSORING))
    with guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
    signed = authorization_of(shop.seen[-1])
    assert signed["permitted"] == {"token": USDC, "amount": "10000"}
    assert signed["spender"].lower() in PROXIES


@pytest.mark.parametrize(
    "extra", [{"spender": fresh_address()}, {"proxy": fresh_address()}, {"permit2": fresh_address()}]
)
def test_a16_the_spender_is_never_the_servers(guard, extra):
    shop = Shop(terms=required(permit2() | {"extra": {**permit2()["extra"], **extra}}))
    with guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
    assert authorization_of(shop.seen[-1])["spender"].lower() in PROXIES


def _upto_by(facilitator):
    return Shop(terms=required(upto(facilitator=facilitator)))


def test_a19_a_facilitator_beside_the_list_is_refused(mode):
    chosen = fresh_address()
    with make_guard(policy=Policy(facilitators={FACILITATOR})) as guard:
        assert_refused(mode, guard, _upto_by(chosen), rule="facilitators", says=[chosen, "policy.facilitators"])
        with guard.session("s", budget="$1.00") as session:
            for number in range(5):
                fetch(mode, session, _upto_by(FACILITATOR), url=f"{URL}/{number}")


def test_a19_the_fourth_facilitator_of_an_origin_is_refused(mode, guard):
    known = [fresh_address() for _ in range(3)]
    with guard.session("s", budget="$1.00") as session:
        for number, facilitator in enumerate([*known, *known]):
            assert fetch(mode, session, _upto_by(facilitator), url=f"{URL}/{number}").status_code == 200
    fourth = fresh_address()
    assert_refused(mode, guard, _upto_by(fourth), rule="facilitators", says=[fourth, "fourth", "policy.facilitators"])
    with guard.session("s2", budget="$1.00") as session:
        fetch(mode, session, _upto_by(fourth), url="https://other.example/")  # another origin has three of its own


def test_a19_the_count_survives_the_process(ledger):
    for number in range(3):
        with make_guard(ledger) as guard, guard.session(f"s{number}", budget="$1.00") as session:
            fetch("sync", session, _upto_by(fresh_address()))
    with make_guard(ledger) as guard:
        assert_refused("sync", guard, _upto_by(fresh_address()), rule="facilitators", says=["policy.facilitators"])


def test_a19_another_port_or_spelling_is_counted_apart_or_together_but_never_reset(guard):
    with guard.session("s", budget="$1.00") as session:
        for spelling in ("https://courts.example/1", "https://COURTS.example/2", "https://courts.example:443/3"):
            fetch("sync", session, _upto_by(fresh_address()), url=spelling)
        with pytest.raises(PolicyDenied, match="fourth"):
            fetch("sync", session, _upto_by(fresh_address()), url="https://Courts.Example:443/4")


@pytest.mark.parametrize("facilitator", [None, "", "0x" + "0" * 40, "0x12", FACILITATOR.swapcase(), 7, [FACILITATOR]])
def test_a19_an_upto_without_a_real_facilitator_is_no_offer(mode, guard, facilitator):
    offer = upto()
    offer["extra"]["facilitatorAddress"] = facilitator
    assert_malformed(mode, guard, Shop(terms=required(offer)), field="extra.facilitatorAddress")


FLOWS = ["upfront", "escrow", "batch-settlement", "teleport", "", "Authorization", "authorization ", "x y " * 500]


def _flow(flow, make=accept):
    offer = make()
    offer["extra"] = {**offer["extra"], "paymentFlow": flow}
    return offer


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("make", [accept, permit2, upto])
def test_a20_flow_downgrade_is_refused(guard, flow, make):
    says = ["extra.paymentFlow is not in policy.flows (authorization)"]
    error = assert_refused("sync", guard, Shop(terms=required(_flow(flow, make))), rule="flows", says=says)
    assert error.detail == (repr(flow[:200]) if flow else "")


def test_a20_a_v1_offer_is_judged_alike(mode, guard):
    shop = Shop(terms=required_v1({**_flow("escrow"), "network": "base-sepolia"}))
    assert_refused(mode, guard, shop, rule="flows", says=["'escrow'"])


@pytest.mark.parametrize("flow", [1, True, ["authorization"], {"authorization": 1}])
def test_a20_a_flow_that_is_no_text_is_malformed(mode, guard, flow):
    assert_malformed(mode, guard, Shop(terms=required(_flow(flow))), field="extra.paymentFlow")


@pytest.mark.parametrize("flow", ["upfront", "escrow"])
def test_a20_a_flow_that_the_owner_lists_is_held_in_full_and_paid(mode, flow):
    shop = Shop(terms=required(_flow(flow)))
    with (
        make_guard(policy=Policy(flows={"authorization", flow})) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        fetch(mode, session, shop)
        assert float(session.spent) == 0.01
    assert len(shop.payments) == 1


@pytest.mark.parametrize("scheme", ["escrow", "deposit", "EXACT", "exact "])
def test_a20_a_scheme_that_pays_ahead_is_none_of_ours(mode, guard, scheme):
    assert_refused(mode, guard, Shop(terms=required(accept(scheme=scheme))), rule="schemes", says=[repr(scheme)])


def test_a20_only_the_offer_that_keeps_the_flow_is_paid(mode, guard):
    shop = Shop(terms=required(_flow("upfront"), {**accept(20_000)}))
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop)
    assert [amount for _, amount, _ in shop.payments] == [20_000]


def test_a20_none_is_paid_where_all_pay_ahead(mode, guard):
    shop = Shop(terms=required(_flow("upfront"), _flow("escrow")))
    says = ["'upfront; escrow'", "policy.flows"]
    assert_refused(mode, guard, shop, rule="no_acceptable_offer", says=says, kind=NoAcceptableOffer)
