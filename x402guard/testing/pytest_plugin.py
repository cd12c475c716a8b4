"""Fixtures for the tests of an agent, in every project that has x402guard installed: pytest finds them by itself.

They need ``pip install "x402guard[testnet]"``, and no other machine. Each loads what it needs when it is first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from x402guard.guard.guard import Guard
    from x402guard.testing import HostileServer, Merchant, Testnet


@pytest.fixture
def x402_testnet() -> Iterator[Testnet]:
    """A chain, a facilitator and an honest merchant, with a payer that has $1,000."""
    from x402guard.testing import Testnet

    with Testnet() as net:
        yield net


@pytest.fixture
def paid_server(x402_testnet: Testnet) -> Merchant:
    """The honest merchant of the testnet: ``paid_server.url + "/documents/1"`` costs ten cents."""
    return x402_testnet.merchant


@pytest.fixture
def hostile_server() -> Iterator[HostileServer]:
    """A seller that misbehaves in one way per path, and checks signatures without a chain."""
    from x402guard.testing import HostileServer

    with HostileServer() as server:
        yield server


@pytest.fixture
def guard(x402_testnet: Testnet, tmp_path: Path) -> Iterator[Guard]:
    """A guard with the testnet's payer and chain, and a new ledger in a file."""
    from x402guard.guard.guard import Guard
    from x402guard.x402.signer import LocalSigner

    signer, chains = LocalSigner.from_key(x402_testnet.payer_key), {x402_testnet.network: x402_testnet.rpc}
    with Guard(signer=signer, ledger=f"sqlite:///{tmp_path / 'spend.db'}", chains=chains) as made:
        yield made
