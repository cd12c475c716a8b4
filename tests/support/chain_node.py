"""A node that answers what it is told to, and the logs and calldata of what settles a payment."""

from eth_abi.abi import encode
from eth_hash.auto import keccak

from tests.support.ledger import PAYEE, PAYER, START_MS, an_intent
from x402guard.chain.rpc import selector
from x402guard.frozen import replace
from x402guard.kernel.typed_data import EXACT_PROXY, UPTO_PROXY

TX = "0x" + "ab" * 32
OTHER = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
FACILITATOR = "0x6C6D4539DE4FC56445d4Eff7Da256B40D6014233"
TOKEN = an_intent().token
NOW = START_MS // 1000


PERMIT, PERMIT_2612 = "((address,uint256),uint256,uint256)", "(uint256,uint256,bytes32,bytes32,uint8)"


TRANSFER = "0x" + keccak(b"Transfer(address,address,uint256)").hex()
INTENTS = {
    "eip3009": an_intent(7, 100_000),
    "exact permit2": replace(an_intent(7, 100_000, method="permit2"), spender=EXACT_PROXY),
    "upto": replace(
        an_intent(7, 100_000, scheme="upto", method="permit2"), spender=UPTO_PROXY, facilitator=FACILITATOR
    ),
}


def topic(address):
    return "0x" + address[2:].lower().rjust(64, "0")


def log(amount, payer=PAYER, payee=PAYEE, token=TOKEN, index=3):
    return {
        "address": token,
        "topics": [TRANSFER, topic(payer), topic(payee)],
        "data": f"0x{amount:064x}",
        "logIndex": hex(index),
    }


def in_a_block(entry, number):
    return {**entry, "transactionHash": TX, "blockNumber": hex(number)}


def call_for(intent, amount, *, with_permit=False, **changes):
    """(to, calldata) of the transaction that settles *intent*, with any term changed."""
    terms = {
        "payer": intent.payer,
        "payee": intent.payee,
        "nonce": intent.nonce,
        "ceiling": intent.amount_atomic,
        **changes,
    }
    if intent.method == "eip3009":
        types = ["address", "address", "uint256", "uint256", "uint256", "bytes32", "bytes"]
        values = [
            terms["payer"],
            terms["payee"],
            terms["ceiling"],
            0,
            intent.valid_until,
            terms["nonce"].to_bytes(32, "big"),
            b"s",
        ]
        return intent.token, selector("transferWithAuthorization", types) + encode(types, values)
    permit = ((terms.get("token", intent.token), terms["ceiling"]), terms["nonce"], intent.valid_until)
    if intent.scheme == "exact":
        to, types = EXACT_PROXY, [PERMIT, "address", "(address,uint256)", "bytes"]
        values = [permit, terms["payer"], (terms["payee"], 0), b"s"]
    else:
        to, types = UPTO_PROXY, [PERMIT, "uint256", "address", "(address,address,uint256)", "bytes"]
        values = [permit, amount, terms["payer"], (terms["payee"], FACILITATOR, 0), b"s"]
    name = "settle"
    if with_permit:
        name, types, values = "settleWithPermit", [PERMIT_2612, *types], [(1, 2, b"r" * 32, b"s" * 32, 27), *values]
    return to, selector(name, types) + encode(types, values)


class Rpc:
    """A node that answers what it is told to, in JSON-RPC's own forms."""

    def __init__(self, intent, amount=None, **changes):
        self.amount = intent.amount_atomic if amount is None else amount
        to, data = call_for(intent, self.amount)
        self.used_final = self.used_head = True
        self.final_time = NOW
        self.sent = {"to": to, "input": "0x" + data.hex()}
        self.receipt = {"status": "0x1", "blockNumber": "0x10", "logs": [log(self.amount)]}
        self.__dict__.update(changes)

    def each_node(self):
        yield self

    def others(self):
        return ()

    def check_chain(self):
        pass

    def view(self, contract, name, types, values, block):
        used = self.used_head if block == "latest" else self.used_final
        return int(used) if name == "authorizationState" else int(used) << ((values[1] and 0) or 7)

    def call(self, method, *params):
        if method == "eth_getBlockByNumber":
            return {"hash": "0x" + "11" * 32, "number": "0x20", "timestamp": hex(self.final_time)}
        if method == "eth_getLogs":
            return []
        return {
            "eth_blockNumber": "0x20",
            "eth_getTransactionByHash": self.sent,
            "eth_getTransactionReceipt": self.receipt,
        }[method]
