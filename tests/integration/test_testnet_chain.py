"""The local chain itself: what it answers, what it refuses, and its clock."""

import json
import time
from pathlib import Path

import httpx
import pytest
from eth_account import Account
from web3 import Web3
from web3.exceptions import ContractLogicError

from tests.support import official_sdk
from tests.support.testnet import EXTRA_ROUTES, again, broken, decoded
from x402guard import testing
from x402guard.testing import (
    EthTesterEngine,
    Offer,
    Route,
    RpcError,
    Testnet,
)
from x402guard.testing.chain_client import ChainClient, calldata
from x402guard.testing.contracts import PERMIT2, TOKEN, abi_at

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("testnet_chain")]


def test_contracts_and_clients_see_the_same_chain(net, w3):
    assert w3.eth.chain_id == net.chain_id == 84532
    assert w3.net.version == "84532"
    token = w3.eth.contract(address=TOKEN, abi=abi_at(TOKEN))
    separator = token.functions.DOMAIN_SEPARATOR().call()
    domain = Web3.solidity_keccak(
        ["bytes32", "bytes32", "bytes32", "bytes32", "bytes32"],
        [
            Web3.keccak(text="EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
            Web3.keccak(text="USDC"),
            Web3.keccak(text="2"),
            (84532).to_bytes(32, "big"),
            bytes(12) + bytes.fromhex(TOKEN[2:]),
        ],
    )
    assert separator == domain


def test_two_chains_in_one_process_keep_their_own_ids():
    one, other = EthTesterEngine(chain_id=84532), EthTesterEngine(chain_id=31337)
    try:
        call = [{"to": TOKEN, "data": calldata("DOMAIN_SEPARATOR()")}]
        assert one.rpc("eth_call", call) != other.rpc("eth_call", call)
        assert (one.rpc("eth_chainId", []), other.rpc("eth_chainId", [])) == (hex(84532), hex(31337))
    finally:
        one.close()
        other.close()


def signed(account, *, nonce, chain_id=84532, data="0x", to=TOKEN):
    transaction = {
        "to": to,
        "value": 0,
        "data": data,
        "gas": 200_000,
        "nonce": nonce,
        "maxFeePerGas": 10**10,
        "maxPriorityFeePerGas": 10**9,
        "chainId": chain_id,
    }
    return "0x" + account.sign_transaction(transaction).raw_transaction.hex()


def test_a_transaction_for_another_chain_is_refused(net, chain):
    for raw, complaint in [
        (signed(Account.from_key(net.payer_key), nonce=0, chain_id=1), "chain id"),
        (signed(Account.from_key(net.payer_key), nonce=0), "nonce too low"),
        ("0x02c0", "not a transaction|Failed to decode transaction"),
        ("0x", "not a transaction|Empty transaction data"),
    ]:
        with pytest.raises(RpcError, match=complaint):
            chain.rpc("eth_sendRawTransaction", raw)


def test_a_transaction_that_comes_too_early_waits_for_its_turn(net, chain):
    sender = Account.create()
    net.fund(sender.address, wei=10**18)
    approvals = [calldata("approve(address,uint256)", PERMIT2, amount) for amount in (1, 2, 3)]
    third, second, first = (
        chain.rpc("eth_sendRawTransaction", signed(sender, nonce=nonce, data=approvals[nonce])) for nonce in (2, 1, 0)
    )
    assert [chain.receipt(each)["status"] for each in (first, second, third)] == ["0x1"] * 3
    blocks = [int(chain.rpc("eth_getTransactionByHash", each)["blockNumber"], 16) for each in (first, second, third)]
    assert blocks == sorted(blocks)
    assert chain.read_uint(TOKEN, "allowance(address,address)", sender.address, PERMIT2) == 3
    early = chain.rpc("eth_sendRawTransaction", signed(sender, nonce=9))
    assert chain.rpc("eth_getTransactionReceipt", early) is None
    assert chain.rpc("eth_getTransactionByHash", early)["blockHash"] is None


def test_state_can_be_read_at_a_block_by_its_hash(net, chain, w3):
    old = w3.eth.get_block("latest")
    fresh = Account.create().address
    net.fund(fresh, tokens=77)
    call = {"to": TOKEN, "data": calldata("balanceOf(address)", fresh)}

    def at(block):
        return int(w3.eth.call(call, block).hex(), 16)

    assert at({"blockHash": old["hash"].to_0x_hex(), "requireCanonical": True}) == 0
    assert at(old["number"]) == 0
    assert [at(tag) for tag in ("latest", "pending", "safe", "finalized")] == [77] * 4
    assert at({"blockHash": w3.eth.get_block("finalized")["hash"].to_0x_hex()}) == 77
    with pytest.raises(RpcError) as unknown:
        chain.rpc("eth_call", call, {"blockHash": "0x" + "00" * 32, "requireCanonical": True})
    assert unknown.value.code == -32001


def test_logs_can_be_asked_for_by_block_hash_range_and_topic(net, chain):
    fresh = Account.create().address
    net.fund(fresh, tokens=5)
    latest = chain.rpc("eth_getBlockByNumber", "latest", True)
    while not latest["transactions"]:
        latest = chain.rpc("eth_getBlockByHash", latest["parentHash"], True)
    (log,) = chain.rpc("eth_getLogs", {"blockHash": latest["hash"], "address": TOKEN.upper().replace("0X", "0x")})
    topic = "0x" + fresh[2:].lower().rjust(64, "0")
    assert log["topics"][2] == topic
    everywhere = {"fromBlock": "earliest", "toBlock": "latest"}
    assert chain.rpc("eth_getLogs", everywhere | {"topics": [None, None, [topic]]}) == [log]
    assert chain.rpc("eth_getLogs", everywhere | {"address": [PERMIT2]}) == []
    assert chain.rpc("eth_getLogs", {"fromBlock": latest["number"], "topics": [None, topic]}) == []


def test_a_reverted_call_is_error_3_with_its_data(chain, w3):
    data = calldata("transfer(address,uint256)", PERMIT2, 1)
    for method in ("eth_call", "eth_estimateGas"):
        with pytest.raises(RpcError, match="transfer amount exceeds balance") as reverted:
            chain.rpc(method, {"to": TOKEN, "data": data})
        assert reverted.value.code == 3
        assert reverted.value.data.startswith("0x08c379a0")
    token = w3.eth.contract(address=TOKEN, abi=abi_at(TOKEN))
    with pytest.raises(ContractLogicError, match="exceeds balance"):
        token.functions.transfer(PERMIT2, 1).call()


def test_a_revert_without_words_is_error_3_too(chain):
    with pytest.raises(RpcError) as reverted:
        chain.rpc("eth_call", {"to": None, "data": "0x60006000fd"}, "latest")
    assert (reverted.value.code, reverted.value.data) == (3, "0x")


def test_a_contract_can_be_deployed(net, chain):
    folder = Path(testing.__file__).parent / "artifacts"
    compiled = json.loads((folder / "DollarToken.json").read_text(encoding="utf-8"))
    sender = Account.create()
    net.fund(sender.address, wei=10**19)
    transaction = {
        "data": compiled["bytecode"],
        "gas": 3_000_000,
        "gasPrice": 10**10,
        "nonce": 0,
        "value": 0,
        "chainId": net.chain_id,
    }
    raw = "0x" + sender.sign_transaction(transaction).raw_transaction.hex()
    receipt = chain.receipt(chain.rpc("eth_sendRawTransaction", raw))
    assert receipt["status"] == "0x1"
    assert chain.rpc("eth_getCode", receipt["contractAddress"], "latest") == compiled["deployedBytecode"]
    assert chain.read_uint(receipt["contractAddress"], "decimals()") == 6
    assert chain.rpc("eth_getTransactionByHash", receipt["transactionHash"])["to"] is None


def test_gas_estimates_are_enough_and_a_reverted_transaction_has_status_0(net, chain):
    sender = Account.from_key(net.payer_key)
    data = calldata("approve(address,uint256)", PERMIT2, 2**256 - 1)
    estimate = int(chain.rpc("eth_estimateGas", {"from": net.payer, "to": TOKEN, "data": data}), 16)
    assert chain.receipt(chain.send(sender, TOKEN, data, gas=estimate))["status"] == "0x1"
    greedy = calldata("transfer(address,uint256)", PERMIT2, 10**30)
    receipt = chain.receipt(chain.send(sender, TOKEN, greedy, gas=200_000))
    assert (receipt["status"], receipt["logs"]) == ("0x0", [])


def test_web3_understands_blocks_transactions_and_receipts(net, w3):
    official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/cents/3")
    name = net.transfers()[-1].transaction
    receipt, transaction = w3.eth.get_transaction_receipt(name), w3.eth.get_transaction(name)
    block = w3.eth.get_block(receipt["blockNumber"], full_transactions=True)
    assert receipt["blockHash"] == block["hash"] == transaction["blockHash"]
    assert block["transactions"][0]["hash"] == receipt["transactionHash"]
    assert transaction["from"] == net.facilitator_address
    assert w3.eth.get_block("latest")["baseFeePerGas"] > 0
    assert w3.eth.get_transaction_count(net.payer, "pending") == w3.eth.get_transaction_count(net.payer)
    assert w3.eth.get_balance(net.payer) > 0
    assert len(w3.eth.get_code(TOKEN)) > 1000


def test_rpc_answers_batches_and_survives_nonsense(net, engine):
    def post(content):
        return httpx.post(net.rpc, content=content, trust_env=False)

    batch = [
        {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []},
        {"jsonrpc": "2.0", "id": "two", "method": "eth_nothing", "params": []},
        {"jsonrpc": "2.0", "method": "eth_chainId", "params": []},
        7,
    ]
    replies = post(json.dumps(batch)).json()
    assert [(each["id"], each.get("result"), each.get("error", {}).get("code")) for each in replies] == [
        (1, "0x14a34", None),
        ("two", None, -32601),
        (None, None, -32600),
    ]
    codes = {
        b"{": -32700,
        b"\xff\xfe": -32700,
        b"[]": -32600,
        b'"eth_chainId"': -32600,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": {}}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": []}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [{"to": "0x12"}, "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_getBalance", "params": ["nobody", "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [7, "latest"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_getLogs", "params": ["all"]}': -32602,
        b'{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [{"to": null, "data": "0xfe"}]}': {
            "eth-tester": -32000,
            "anvil": -32603,
        }[engine],
    }
    assert {content: post(content).json()["error"]["code"] for content in codes} == codes
    assert post(b'{"jsonrpc": "2.0", "method": "eth_chainId"}').status_code == 204
    assert post(b'{"jsonrpc": "2.0", "id": 1, "method": "eth_accounts"}').json()["result"] == []


def test_answers_do_not_wait_for_a_delayed_acknowledgement(net):
    """With Nagle's algorithm on, every call after the first on a connection would take 40 ms."""
    with httpx.Client(trust_env=False) as client:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            client.get(f"{net.merchant.url}/free")
            times.append(time.perf_counter() - start)
    assert min(times[1:]) < 0.03


def test_idle_blocks_keep_coming_and_the_clock_is_real():
    engine = EthTesterEngine(tick_s=0.02)
    try:
        start = int(engine.rpc("eth_blockNumber", []), 16)
        deadline = time.monotonic() + 5
        while int(engine.rpc("eth_blockNumber", []), 16) < start + 40:
            assert time.monotonic() < deadline, "no idle blocks"
            time.sleep(0.02)
        latest = engine.rpc("eth_getBlockByNumber", ["latest", False])
        assert abs(int(latest["timestamp"], 16) - time.time()) < 2, "forty blocks must not take forty seconds"
        with pytest.raises(ValueError, match="back"):
            engine.advance(-1)
        with pytest.raises(RpcError, match="back"):
            engine.rpc("evm_increaseTime", [-1])
        engine.rpc("evm_increaseTime", [100])
        engine.rpc("evm_mine", [])
        moved = engine.rpc("eth_getBlockByNumber", ["latest", False])
        assert 100 <= int(moved["timestamp"], 16) - int(latest["timestamp"], 16) < 105
    finally:
        engine.close()
    stopped = engine.rpc("eth_blockNumber", [])
    time.sleep(0.1)
    assert engine.rpc("eth_blockNumber", []) == stopped


def test_time_can_be_moved_on_until_a_payment_has_lapsed(make_engine):
    routes = [
        *EXTRA_ROUTES,
        Route(name="held", path="/held", answer=broken, offers=(Offer(price=1),), max_timeout_s=60),
    ]
    with Testnet(routes=routes, make_engine=make_engine) as net:
        chain = ChainClient(net.rpc, net.chain_id)
        _, requests = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/held")
        before = int(chain.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)
        net.advance(61)
        after = int(chain.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)
        chain.close()
        assert 61 <= after - before <= 65
        late = again(requests[-1])
        assert late.status_code == 402
        error = decoded(late.headers["PAYMENT-REQUIRED"])["error"]
        assert error == "invalid_exact_evm_payload_authorization_valid_before"
