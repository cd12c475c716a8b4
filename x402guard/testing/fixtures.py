"""Provides pytest fixtures with hostile servers for a user's own tests.

    pytest_plugins = ["x402guard.testing.fixtures"]

Each test gets new objects: `hostile_server`, `hostile_clock`, `testnet`, and in front of the testnet `hostile_chain`
and `hostile_facilitator`. They need pytest and `pip install "x402guard[testnet]"`, and no other machine.
"""

from collections.abc import Iterator

import pytest

from x402guard.testing.hostile_chain import HostileChain
from x402guard.testing.hostile_clock import HostileClock
from x402guard.testing.hostile_facilitator import HostileFacilitator
from x402guard.testing.pytest_plugin import hostile_server, x402_testnet
from x402guard.testing.testnet import Testnet

__all__ = ["hostile_chain", "hostile_clock", "hostile_facilitator", "hostile_server", "testnet", "x402_testnet"]


@pytest.fixture
def hostile_clock() -> HostileClock:
    """A clock that stands still until a test moves it, for `open_store(url, clock_ms=hostile_clock)`."""
    return HostileClock()


@pytest.fixture
def testnet(x402_testnet: Testnet) -> Testnet:
    """The same as ``x402_testnet``."""
    return x402_testnet


@pytest.fixture
def hostile_chain(testnet: Testnet) -> Iterator[HostileChain]:
    """JSON-RPC that lies about the testnet's chain after `misbehave`: `chains={testnet.network: hostile_chain.url}`."""
    with HostileChain(testnet.engine) as chain:
        yield chain


@pytest.fixture
def hostile_facilitator(testnet: Testnet) -> Iterator[HostileFacilitator]:
    """A facilitator that lies about the settlements of the testnet's facilitator after `misbehave`."""
    with HostileFacilitator(testnet.facilitator) as facilitator:
        yield facilitator
