"""The rules of the test network's contracts that no x402 payment reaches: approvals by signature, and nonces given up."""

import time

import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data

from x402guard.testing import RpcError, Testnet
from x402guard.testing.chain_client import calldata, selector
from x402guard.testing.contracts import EXACT_PROXY, PERMIT2, TOKEN, UPTO_PROXY

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("test_testnet_contracts")]

TOKEN_DOMAIN = {"name": "USDC", "version": "2", "chainId": 84532, "verifyingContract": TOKEN}
PERMIT2_DOMAIN = {"name": "Permit2", "chainId": 84532, "verifyingContract": PERMIT2}
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
AUTHORIZATION = "address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce"
TRANSFER = "transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,uint8,bytes32,bytes32)"
PERMIT = "permit(address,address,uint256,uint256,uint8,bytes32,bytes32)"
SETTLE = "(((address,uint256),uint256,uint256),address,(address,uint256),bytes)"
SETTLE_WITH_PERMIT = f"settleWithPermit((uint256,uint256,bytes32,bytes32,uint8),{SETTLE[1:]}"
PAYEE = "0x" + "22" * 20


@pytest.fixture(scope="module")
def net(make_engine):
    with Testnet(routes=(), make_engine=make_engine) as running:
        yield running


@pytest.fixture(scope="module")
def relay(net):
    """An account with coin that sends for others."""
    account = Account.create()
    net.fund(account.address, wei=10**19)
    return account


@pytest.fixture
def owner(net):
    """An account with a dollar, no coin and no approvals."""
    account = Account.create()
    net.fund(account.address, tokens=1_000_000)
    return account


def fields(declarations):
    return [dict(zip(("type", "name"), each.split(" "), strict=True)) for each in declarations.split(",")]


def sign(account, domain, types, message):
    parsed = {name: fields(declarations) for name, declarations in types.items()}
    return account.sign_message(encode_typed_data(domain, parsed, message))


def split(signed):
    return signed.v, signed.r.to_bytes(32, "big"), signed.s.to_bytes(32, "big")


def authorization(account, kind, *, after=0, before=None, nonce=b"\x01" * 32, to=PAYEE):
    values = (account.address, to, 1_000, after, before or int(time.time()) + 60, nonce)
    message = dict(zip(("from", "to", "value", "validAfter", "validBefore", "nonce"), values, strict=True))
    return values, sign(account, TOKEN_DOMAIN, {kind: AUTHORIZATION}, message)


def sent(chain, relay, to, data):
    return chain.receipt(chain.send(relay, to, data, gas=300_000))


def test_both_forms_of_an_authorization_move_money_once(net, chain, relay, owner):
    values, signed = authorization(owner, "TransferWithAuthorization")
    as_bytes = TRANSFER.replace("uint8,bytes32,bytes32)", "bytes)")
    before = net.balance(PAYEE)
    receipt = sent(chain, relay, TOKEN, calldata(as_bytes, *values, signed.signature))
    used = [
        log
        for log in receipt["logs"]
        if log["topics"][0] == "0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5"
    ]
    assert len(used) == 1
    assert used[0]["topics"][1:] == ["0x" + owner.address[2:].lower().rjust(64, "0"), "0x" + "01" * 32]
    assert chain.read_uint(TOKEN, "authorizationState(address,bytes32)", owner.address, b"\x01" * 32) == 1
    assert net.balance(PAYEE) == before + 1_000
    with pytest.raises(RpcError, match="authorization is used or canceled"):
        chain.call(TOKEN, calldata(TRANSFER, *values, *split(signed)))


def test_the_second_signature_of_the_same_authorization_is_refused(chain, owner):
    """Anybody can turn (r, s) into (r, n - s): such a signature must not count."""
    values, signed = authorization(owner, "TransferWithAuthorization")
    v, r, s = split(signed)
    chain.call(TOKEN, calldata(TRANSFER, *values, v, r, s))
    high = (ORDER - int.from_bytes(s, "big")).to_bytes(32, "big")
    with pytest.raises(RpcError, match="invalid signature"):
        chain.call(TOKEN, calldata(TRANSFER, *values, 55 - v, r, high))
    with pytest.raises(RpcError, match="invalid signature"):
        chain.call(TOKEN, calldata(TRANSFER, *values, 29, r, s))


def test_the_zero_address_has_signed_nothing(net, chain):
    net.fund("0x" + "00" * 20, tokens=5_000)
    values = ("0x" + "00" * 20, PAYEE, 1_000, 0, 2**40, b"\x05" * 32)
    with pytest.raises(RpcError, match="invalid signature"):
        chain.call(TOKEN, calldata(TRANSFER, *values, 27, b"\x01" * 32, b"\xff" * 32))


def test_an_authorization_holds_between_its_two_times_and_at_neither(chain, owner):
    # By the chain's clock: a node asks with the time of its latest block, which may be two seconds old.
    now = int(chain.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)
    for after, before, complaint in [
        (now + 3_600, now + 7_200, "not yet valid"),
        (0, now, "expired"),
    ]:
        values, signed = authorization(owner, "TransferWithAuthorization", after=after, before=before)
        with pytest.raises(RpcError, match=complaint):
            chain.call(TOKEN, calldata(TRANSFER, *values, *split(signed)))


def test_only_the_payee_receives_with_an_authorization(chain, owner):
    receive = TRANSFER.replace("transferWith", "receiveWith")
    values, signed = authorization(owner, "ReceiveWithAuthorization")
    chain.call(TOKEN, calldata(receive, *values, *split(signed)), sender=PAYEE)
    with pytest.raises(RpcError, match="caller must be the payee"):
        chain.call(TOKEN, calldata(receive, *values, *split(signed)), sender=PERMIT2)
    with pytest.raises(RpcError, match="invalid signature"):
        chain.call(TOKEN, calldata(TRANSFER, *values, *split(signed)), sender=PAYEE)


def test_a_canceled_authorization_is_dead(chain, relay, owner):
    nonce = b"\x09" * 32
    values, signed = authorization(owner, "TransferWithAuthorization", nonce=nonce)
    message = {"authorizer": owner.address, "nonce": nonce}
    cancel = sign(owner, TOKEN_DOMAIN, {"CancelAuthorization": "address authorizer,bytes32 nonce"}, message)
    data = calldata("cancelAuthorization(address,bytes32,uint8,bytes32,bytes32)", owner.address, nonce, *split(cancel))
    assert len(sent(chain, relay, TOKEN, data)["logs"]) == 1
    with pytest.raises(RpcError, match="authorization is used or canceled"):
        chain.call(TOKEN, calldata(TRANSFER, *values, *split(signed)))


def permit_2612(account, value, *, nonce=0):
    deadline = int(time.time()) + 60
    message = {"owner": account.address, "spender": PERMIT2, "value": value, "nonce": nonce, "deadline": deadline}
    kind = "address owner,address spender,uint256 value,uint256 nonce,uint256 deadline"
    return deadline, sign(account, TOKEN_DOMAIN, {"Permit": kind}, message)


def test_a_permit_approves_once(chain, relay, owner):
    deadline, signed = permit_2612(owner, 500)
    data = calldata(PERMIT, owner.address, PERMIT2, 500, deadline, *split(signed))
    assert sent(chain, relay, TOKEN, data)["status"] == "0x1"
    assert chain.read_uint(TOKEN, "allowance(address,address)", owner.address, PERMIT2) == 500
    assert chain.read_uint(TOKEN, "nonces(address)", owner.address) == 1
    with pytest.raises(RpcError, match="invalid signature"):
        chain.call(TOKEN, data)


def permit2_settlement(account, amount, *, nonce, proxy=EXACT_PROXY):
    deadline = int(time.time()) + 60
    types = {
        "PermitWitnessTransferFrom": "TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline,Witness witness",
        "TokenPermissions": "address token,uint256 amount",
        "Witness": "address to,uint256 validAfter",
    }
    message = {
        "permitted": {"token": TOKEN, "amount": amount},
        "spender": proxy,
        "nonce": nonce,
        "deadline": deadline,
        "witness": {"to": PAYEE, "validAfter": 0},
    }
    signed = sign(account, PERMIT2_DOMAIN, types, message)
    return ((TOKEN, amount), nonce, deadline), account.address, (PAYEE, 0), signed.signature


def test_approval_and_settlement_in_one_transaction(net, chain, relay, owner):
    settlement = permit2_settlement(owner, 700, nonce=5)
    with pytest.raises(RpcError, match="exceeds allowance"):
        chain.call(EXACT_PROXY, calldata(f"settle{SETTLE}", *settlement))
    deadline, signed = permit_2612(owner, 700)
    v, r, s = split(signed)
    before = net.balance(PAYEE)
    receipt = sent(chain, relay, EXACT_PROXY, calldata(SETTLE_WITH_PERMIT, (700, deadline, r, s, v), *settlement))
    assert receipt["status"] == "0x1"
    assert net.balance(PAYEE) == before + 700
    assert chain.read_uint(PERMIT2, "nonceBitmap(address,uint256)", owner.address, 0) == 1 << 5
    assert all(log["address"] != PERMIT2.lower() for log in receipt["logs"]), "Permit2 says nothing of a used nonce"


def test_a_permit_of_another_amount_does_not_settle(chain, owner):
    deadline, signed = permit_2612(owner, 701)
    v, r, s = split(signed)
    data = calldata(SETTLE_WITH_PERMIT, (701, deadline, r, s, v), *permit2_settlement(owner, 700, nonce=5))
    with pytest.raises(RpcError) as refused:
        chain.call(EXACT_PROXY, data)
    assert refused.value.data == selector("Permit2612AmountMismatch()")


def test_an_invalidated_nonce_cannot_be_used(net, chain):
    payer, nonce = Account.from_key(net.payer_key), (7 << 8) | 200
    settlement = permit2_settlement(payer, 10, nonce=nonce)
    chain.call(EXACT_PROXY, calldata(f"settle{SETTLE}", *settlement))
    receipt = sent(chain, payer, PERMIT2, calldata("invalidateUnorderedNonces(uint256,uint256)", 7, 1 << 200))
    assert receipt["logs"][0]["topics"][0] == "0x3704902f963766a4e561bbaab6e6cdc1b1dd12f6e9e99648da8843b3f46b918d"
    with pytest.raises(RpcError) as refused:
        chain.call(EXACT_PROXY, calldata(f"settle{SETTLE}", *settlement))
    assert refused.value.data == selector("InvalidNonce()")


def test_permit2_takes_only_the_signed_spender_and_amount(net, chain):
    payer = Account.from_key(net.payer_key)
    for settlement in (
        permit2_settlement(payer, 10, nonce=77, proxy=UPTO_PROXY),
        (((TOKEN, 11), *permit2_settlement(payer, 10, nonce=77)[0][1:]), *permit2_settlement(payer, 10, nonce=77)[1:]),
    ):
        with pytest.raises(RpcError) as refused:
            chain.call(EXACT_PROXY, calldata(f"settle{SETTLE}", *settlement))
        assert refused.value.data == selector("InvalidSigner()")


def test_permit2_transfers_without_a_witness_to_the_caller_that_was_signed(net, chain):
    payer, deadline, spender = Account.from_key(net.payer_key), int(time.time()) + 60, "0x" + "33" * 20
    types = {
        "PermitTransferFrom": "TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline",
        "TokenPermissions": "address token,uint256 amount",
    }
    permitted = {"token": TOKEN, "amount": 10}
    message = {"permitted": permitted, "spender": spender, "nonce": 3, "deadline": deadline}
    signature = sign(payer, PERMIT2_DOMAIN, types, message).signature
    transfer = "permitTransferFrom(((address,uint256),uint256,uint256),(address,uint256),address,bytes)"

    def call(amount, sender):
        permit = ((TOKEN, 10), 3, deadline)
        chain.call(PERMIT2, calldata(transfer, permit, (PAYEE, amount), payer.address, signature), sender=sender)

    call(10, spender)
    call(4, spender)
    for amount, sender, error in [(11, spender, "InvalidAmount(uint256)"), (10, PERMIT2, "InvalidSigner()")]:
        with pytest.raises(RpcError) as refused:
            call(amount, sender)
        assert refused.value.data.startswith(selector(error))


def test_the_proxies_have_the_interface_of_the_official_constants():
    from x402.mechanisms.evm import constants

    from x402guard.testing.contracts import abi_at

    def inputs(entry):
        return [
            (each["type"], inputs(each)) if "components" in each else each["type"]
            for each in entry.get("inputs", entry.get("components", ()))
        ]

    for official, ours in [
        (constants.X402_EXACT_PERMIT2_PROXY_ABI, EXACT_PROXY),
        (constants.X402_EXACT_PERMIT2_PROXY_SETTLE_WITH_PERMIT_ABI, EXACT_PROXY),
        (constants.X402_UPTO_PERMIT2_PROXY_ABI, UPTO_PROXY),
        (constants.X402_UPTO_PERMIT2_PROXY_SETTLE_WITH_PERMIT_ABI, UPTO_PROXY),
    ]:
        (wanted,) = official
        (found,) = (entry for entry in abi_at(ours) if entry.get("name") == wanted["name"])
        assert inputs(found) == inputs(wanted)
