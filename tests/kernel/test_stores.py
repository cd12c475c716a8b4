"""No store can leave the check out, and none is open twice with other limits."""

import pytest

from tests.support.merchant import make_guard
from x402guard import Asset, ConfigError
from x402guard.stores.memory import MemoryStore


@pytest.mark.parametrize("name", ["commit", "sign", "open_kernel", "_work", "__new__"])
def test_what_is_the_kernels_own_is_not_replaced(name):
    with pytest.raises(TypeError, match="no store replaces it"):
        type("Forgetful", (MemoryStore,), {name: lambda *given, **more: None})


def test_a_second_guard_on_one_store_has_the_same_tokens():
    store = MemoryStore()
    other = Asset(network="eip155:84532", address="0x" + "22" * 20, symbol="T", decimals=6, name="T", version="1")
    with make_guard(store), make_guard(store):
        with pytest.raises(ConfigError, match="open in another Guard"):
            make_guard(store, assets=[other])
