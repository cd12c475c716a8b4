"""The test network's chain on anvil: what is on it, its blocks, its clock, finality and reorganizations."""

import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from eth_account import Account

from tests.support.engines import needs_anvil
from x402guard.testing import AnvilEngine, AnvilError, RpcError, Testnet
from x402guard.testing.chain_client import ChainClient, calldata
from x402guard.testing.contracts import EXACT_PROXY, PERMIT2, TOKEN, UPTO_PROXY, genesis_contracts

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("anvil"), pytest.mark.long]

NEVER_S = 3600.0
"""So long a tick that no block comes but those that a test asks for."""


@pytest.fixture(scope="module")
def start():
    """Start engines, each without blocks of its own accord, and see them all closed."""
    binary = needs_anvil()
    engines = []

    def begin(**arguments):
        engines.append(AnvilEngine(**{"binary": binary, "tick_s": NEVER_S} | arguments))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def block(engine, tag="latest"):
    return engine.rpc("eth_getBlockByNumber", [tag, False])


def height(engine, tag="latest"):
    return int(block(engine, tag)["number"], 16)


def clock(engine, tag="latest"):
    return int(block(engine, tag)["timestamp"], 16)


def until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it did not come to it in ten seconds"
        time.sleep(0.01)


# ---- a process ----


def test_the_process_is_gone_after_close_and_so_is_its_folder(start, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = start()
    assert alive(engine.pid)
    assert len(list(tmp_path.iterdir())) == 1
    engine.close()
    assert not alive(engine.pid)
    assert list(tmp_path.iterdir()) == []
    engine.close()
    with pytest.raises(AnvilError, match="this anvil was closed"):
        engine.rpc("eth_blockNumber", [])


def test_a_thousand_blocks_neither_stall_it_nor_leave_the_folder(start, monkeypatch, tmp_path):
    """It prints of every block and moves old states to disk: the pipe is read, and the disk is ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = start()
    engine.rpc("anvil_setBalance", [PERMIT2, "0x7"])
    for _ in range(10):
        engine.rpc("anvil_mine", ["0x64"])
    assert height(engine) == 1000
    assert engine.rpc("eth_getBalance", [PERMIT2, "0x1"]) == "0x7"
    assert any(tmp_path.rglob("*.json"))
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_an_anvil_that_dies_is_a_clear_error(start):
    engine = start()
    with Testnet(routes=(), make_engine=lambda **arguments: start(**arguments)) as net:
        assert isinstance(net.engine, AnvilEngine)
        os.kill(net.engine.pid, signal.SIGKILL)
        call = {"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": []}
        told = httpx.post(net.rpc, json=call, trust_env=False).json()["error"]
    assert told["code"] == -32603
    assert told["message"].startswith("AnvilError: anvil gave no answer to eth_blockNumber")
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(AnvilError, match=r"it ended with code -9 and this output: .*Listening on"):
        engine.rpc("eth_blockNumber", [])
    engine.close()
    assert not alive(engine.pid)


def test_two_at_once_keep_their_own_ids_and_money(start):
    rich = Account.create().address
    one, other = start(chain_id=84532, balances={rich: 5}), start(chain_id=31337)
    assert one.pid != other.pid
    assert (one.chain_id, other.chain_id) == (84532, 31337)
    call = [{"to": TOKEN, "data": calldata("DOMAIN_SEPARATOR()")}, "latest"]
    assert one.rpc("eth_call", call) != other.rpc("eth_call", call)
    assert (one.rpc("eth_chainId", []), other.rpc("eth_chainId", [])) == (hex(84532), hex(31337))
    assert [each.rpc("eth_getBalance", [rich, "latest"]) for each in (one, other)] == ["0x5", "0x0"]
    one.close()
    assert other.rpc("eth_blockNumber", []) == "0x0"


# ---- what is on it ----


def test_contracts_lie_at_their_addresses_from_the_first_block_on(start):
    engine = start()
    first = block(engine)["hash"]
    engine.rpc("anvil_mine", ["0x5"])
    for address in (TOKEN, PERMIT2, EXACT_PROXY, UPTO_PROXY):
        code = "0x" + genesis_contracts()[address].hex()
        for when in ("latest", "0x0", {"blockHash": first, "requireCanonical": True}):
            assert engine.rpc("eth_getCode", [address, when]) == code
    bare = start(contracts={PERMIT2: b"\xfe"})
    assert bare.rpc("eth_getCode", [PERMIT2, "latest"]) == "0xfe"
    assert bare.rpc("eth_getCode", [TOKEN, "latest"]) == "0x"


def test_it_knows_no_keys_and_signs_for_nobody(start):
    engine = start(balances={PERMIT2: 10**20})
    assert engine.rpc("eth_accounts", []) == []
    with pytest.raises(RpcError, match="No Signer available"):
        engine.rpc("eth_sendTransaction", [{"from": PERMIT2, "to": TOKEN, "value": "0x1"}])


def test_two_hundred_sends_from_eight_threads_all_arrive_once(start):
    """anvil takes a transaction before it is mined, so that a receipt may need a second look."""
    payee = Account.create().address
    with Testnet(routes=(), make_engine=lambda **arguments: start(tick_s=0.1, **arguments)) as net:
        payer, chain = Account.from_key(net.payer_key), ChainClient(net.rpc, net.chain_id)
        nonce = int(chain.rpc("eth_getTransactionCount", net.payer, "latest"), 16)
        transfers, data = len(net.transfers()), calldata("transfer(address,uint256)", payee, 3)

        def send(_number):
            return chain.receipt(chain.send(payer, TOKEN, data, gas=100_000))

        with ThreadPoolExecutor(8) as pool:
            receipts = list(pool.map(send, range(200)))
        assert [receipt["status"] for receipt in receipts] == ["0x1"] * 200
        assert len({receipt["transactionHash"] for receipt in receipts}) == 200
        assert net.balance(payee) == 600
        assert len(net.transfers()) == transfers + 200
        assert int(chain.rpc("eth_getTransactionCount", net.payer, "latest"), 16) == nonce + 200
        chain.close()


# ---- blocks, time and finality ----


def test_idle_blocks_keep_coming_and_the_clock_is_real(start):
    engine = start(tick_s=0.05)
    until(lambda: height(engine) >= 40)
    assert abs(clock(engine) - time.time()) < 2, "forty blocks must not take forty seconds"


def test_without_a_tick_blocks_come_with_transactions_alone(start):
    with Testnet(routes=(), make_engine=lambda **arguments: start(**arguments)) as net:
        before = height(net.engine)
        net.fund(PERMIT2, tokens=1)
        assert height(net.engine) == before + 1
        time.sleep(0.3)
        assert height(net.engine) == before + 1


def test_the_clock_moves_on_by_what_it_is_told(start):
    engine = start()
    before = clock(engine)
    engine.advance(500)
    assert height(engine) == 1
    assert 500 <= clock(engine) - before < 505
    engine.advance(0)
    engine.advance(100)
    assert 600 <= clock(engine) - before < 610
    with pytest.raises(ValueError, match="back"):
        engine.advance(-1)
    assert height(engine) == 3


@pytest.mark.parametrize(("slots", "final", "safe"), [(None, 64, 32), (1, 2, 1), (4, 8, 4), (0, 0, 0)])
def test_a_block_is_final_two_epochs_back(start, slots, final, safe):
    engine = start() if slots is None else start(slots_in_an_epoch=slots)
    assert height(engine, "finalized") == height(engine, "safe") == 0
    engine.rpc("anvil_mine", [hex(final)])
    assert height(engine, "finalized") == 0
    engine.rpc("anvil_mine", ["0x3"])
    assert height(engine) == final + 3
    assert height(engine, "finalized") == 3
    assert height(engine, "safe") == final + 3 - safe


# ---- reorganizations ----


@pytest.fixture
def net(start):
    with Testnet(routes=(), make_engine=lambda **arguments: start(**arguments)) as running:
        yield running


@pytest.fixture
def chain(net):
    client = ChainClient(net.rpc, net.chain_id)
    yield client
    client.close()


def test_a_reorganization_undoes_a_transfer_and_nothing_older(net, chain):
    payer, payee = Account.from_key(net.payer_key), Account.create().address
    older = chain.receipt(chain.send(payer, TOKEN, calldata("transfer(address,uint256)", payee, 5), gas=100_000))
    data, nonce = (
        calldata("transfer(address,uint256)", payee, 7),
        chain.rpc("eth_getTransactionCount", net.payer, "latest"),
    )
    newer = chain.receipt(chain.send(payer, TOKEN, data, gas=100_000))
    assert (net.balance(payee), len(net.transfers())) == (12, 2)
    tip = height(net.engine)
    net.engine.reorg(1)
    assert (net.balance(payee), [each.amount for each in net.transfers()]) == (5, [5])
    assert height(net.engine) == tip
    assert block(net.engine)["hash"] != newer["blockHash"]
    assert block(net.engine, hex(tip - 1))["hash"] == older["blockHash"]
    assert chain.rpc("eth_getTransactionReceipt", newer["transactionHash"]) is None
    assert chain.rpc("eth_getTransactionByHash", newer["transactionHash"]) is None
    assert chain.rpc("eth_getTransactionCount", net.payer, "pending") == nonce
    net.engine.rpc("evm_mine", [])
    assert net.balance(payee) == 5, "what was undone does not come back of its own accord"
    assert chain.receipt(chain.send(payer, TOKEN, data, gas=100_000))["status"] == "0x1"
    assert net.balance(payee) == 12


def test_a_state_that_was_read_at_a_replaced_block_cannot_be_read_there_again(net, chain):
    payee = Account.create().address
    net.fund(payee, tokens=5)
    gone, call = block(net.engine)["hash"], {"to": TOKEN, "data": calldata("balanceOf(address)", payee)}
    where = {"blockHash": gone, "requireCanonical": True}
    assert int(chain.rpc("eth_call", call, where), 16) == 5
    net.engine.reorg(1)
    with pytest.raises(RpcError):
        chain.rpc("eth_call", call, where)


def test_the_clock_does_not_go_back_with_the_blocks(net):
    before = clock(net.engine)
    net.advance(1000)
    net.engine.reorg(1)
    net.engine.rpc("evm_mine", [])
    assert 1000 <= clock(net.engine) - before < 1010
    net.advance(500)
    assert 1500 <= clock(net.engine) - before < 1510


def test_a_reorganization_of_nothing_or_of_everything_is_refused(net):
    tip = block(net.engine)["hash"]
    for depth in (0, -1):
        with pytest.raises(ValueError, match="at least one block"):
            net.engine.reorg(depth)
    with pytest.raises(RpcError, match="depth"):
        net.engine.reorg(1000)
    assert block(net.engine)["hash"] == tip


def test_errors_come_with_their_codes_and_data(start):
    engine = start()
    data = calldata("transfer(address,uint256)", PERMIT2, 1)
    with pytest.raises(RpcError, match="transfer amount exceeds balance") as reverted:
        engine.rpc("eth_call", [{"to": TOKEN, "data": data}, "latest"])
    assert (reverted.value.code, reverted.value.data[:10]) == (3, "0x08c379a0")
    with pytest.raises(RpcError) as unknown:
        engine.rpc("eth_nothing", [])
    assert (unknown.value.code, unknown.value.data) == (-32601, None)
    assert engine.rpc("eth_getBlockByNumber", ["0x63", False]) is None
