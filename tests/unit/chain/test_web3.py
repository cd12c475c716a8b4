"""A ``web3.Web3`` among the endpoints of a chain: what is none is told, and no error shows its URL."""

import logging
import traceback

import pytest
from web3 import AsyncHTTPProvider, AsyncWeb3, HTTPProvider, Web3
from web3.providers.rpc.utils import ExceptionRetryConfiguration

from tests.support.merchant import make_guard
from x402guard import Chain, ConfigError
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses

KEY = "an-access-key-of-the-test"
ONCE = ExceptionRetryConfiguration(errors=(ConnectionError,), retries=1, backoff_factor=0.01)
GONE = Web3(HTTPProvider(f"http://127.0.0.1:9/v2/{KEY}", exception_retry_configuration=ONCE))


class Node:
    """A provider that answers by a table."""

    def __init__(self, **answers):
        self.answers, self.asked = {"eth_chainId": {"result": "0x14a34"}, **answers}, []

    def make_request(self, method, params):
        self.asked.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Holder:
    def __init__(self, **answers):
        self.provider = Node(**answers)


def rpc_of(*endpoints):
    return JsonRpc("eip155:84532", endpoints, pause=lambda _seconds: None)


def test_its_provider_is_asked_and_checked_once_for_its_chain():
    node = Holder(eth_blockNumber={"result": "0x7"})
    rpc = rpc_of(node)
    assert [rpc.call("eth_blockNumber") for _ in range(3)] == ["0x7"] * 3
    assert node.provider.asked == ["eth_chainId", *["eth_blockNumber"] * 3]


def test_one_that_fails_hands_over_to_the_next():
    node = Holder(eth_blockNumber={"result": "0x7"})
    assert rpc_of(Holder(eth_blockNumber=OSError("gone")), node).call("eth_blockNumber") == "0x7"


def test_a_web3_of_another_chain_is_a_setting_that_is_wrong():
    with pytest.raises(ConfigError, match="the Web3 that is given serves chain 1"):
        rpc_of(Holder(eth_chainId={"result": "0x1"})).call("eth_blockNumber")


@pytest.mark.parametrize("answer", [{"error": {"code": -32601, "message": "no such method"}}, {}, None, [], "0x7"])
def test_an_answer_that_is_none_is_a_refusal_of_the_node(answer):
    with pytest.raises((NodeRefuses, ChainUnreadable)):
        rpc_of(Holder(eth_blockNumber=answer)).call("eth_blockNumber")


def test_no_error_and_no_log_shows_its_url(caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(ChainUnreadable) as caught:
        rpc_of(GONE).call("eth_blockNumber")
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(Chain(GONE))
    assert KEY not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (AsyncWeb3(AsyncHTTPProvider("http://127.0.0.1:9")), r"chains\['eip155:84532'\]: an AsyncWeb3 is awaited"),
        ([GONE, "ftp://x"], r"not an http:// or https:// URL of a JSON-RPC endpoint, a web3.Web3, or a list"),
        (object(), "not an http:// or https:// URL"),
        (7, "not an http:// or https:// URL"),
        (None, "not an http:// or https:// URL"),
        ([], "the list of endpoints is empty"),
        (f"ws://{KEY}", "not an http:// or https:// URL"),
    ],
    ids=["async", "list", "object", "number", "none", "empty", "websocket"],
)
def test_what_is_no_endpoint_is_told_before_anything_opens(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_guard(chains={"eip155:84532": given})
    assert KEY not in "".join(traceback.format_exception(caught.value))
