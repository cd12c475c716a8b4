"""One fresh test network a module and engine; and what is long."""

from pathlib import Path

import pytest
from eth_account import Account
from web3 import HTTPProvider, Web3

from tests.support import official_sdk, postgres
from tests.support.engines import ENGINES, engine_maker
from tests.support.files import is_in_make_test
from tests.support.postgres_way import Way
from tests.support.testnet import EXTRA_ROUTES
from x402guard import Guard, LocalSigner, Policy
from x402guard.stores import open_store
from x402guard.testing import (
    Server,
    Testnet,
    default_routes,
)
from x402guard.testing.chain_client import ChainClient


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and not is_in_make_test(item.path):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    """The name of the chain that the module's test network runs on."""
    return request.param


@pytest.fixture(scope="module")
def make_engine(engine):
    return engine_maker(engine)


@pytest.fixture(scope="module")
def net(make_engine):
    with Testnet(routes=default_routes() + EXTRA_ROUTES, make_engine=make_engine) as running:
        yield running


@pytest.fixture(scope="module")
def chain(net):
    client = ChainClient(net.rpc, net.chain_id)
    yield client
    client.close()


@pytest.fixture(scope="module")
def w3(net):
    provider = HTTPProvider(net.rpc)
    yield Web3(provider)
    for session in provider._request_session_manager.session_cache._data.values():
        session.close()


@pytest.fixture(scope="module")
def official_facilitator(net):
    key = Account.create()
    net.fund(key.address, wei=10**19)
    with Server(official_sdk.facilitator_app(rpc_url=net.rpc, key=key.key.hex(), network=net.network)) as server:
        yield server.url


@pytest.fixture
def guarded(net, tmp_path):
    """Opens a guard with the network's payer on one ledger in a file, again and again; without a guard that looks at repeats."""

    def make(**more):
        usual = {"signer": LocalSigner.from_key(net.payer_key), "ledger": f"sqlite:///{tmp_path / 'spend.db'}"}
        usual |= {
            "policy": Policy(breaker=None, loop=None),
            "chains": {net.network: net.rpc},
            "background_checks": False,
        }
        return Guard(**usual | more)

    return make


@pytest.fixture
def way():
    """The way to the server of the ledgers in PostgreSQL, which fails on demand."""
    way = Way(postgres.server())
    yield way
    way.close()


@pytest.fixture
def straight(url):
    """The same ledger, past that way."""
    store = open_store(url)
    yield store
    store.close()
