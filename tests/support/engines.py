"""The chains that a test network is tested on, and what they answer differently."""

import os
from functools import partial

import pytest

from x402guard import ConfigError
from x402guard.testing import AnvilEngine, EthTesterEngine, find_anvil

SWITCH = "REQUIRE_ANVIL"
"""Set to 1, a missing anvil is a failure and no reason to skip. No setting of a guard's, so without its prefix."""

# All of anvil's tests go to one worker, and those of the other chain stay with their module.
ENGINES = ["eth-tester", pytest.param("anvil", marks=[pytest.mark.xdist_group("anvil"), pytest.mark.long])]


def needs_anvil():
    """Skip the test where no anvil is installed, or fail it where one has to be."""
    try:
        return find_anvil()
    except ConfigError as missing:
        reason = f"{missing}. {missing.advice}"
    if os.environ.get(SWITCH) == "1":
        pytest.fail(f"{SWITCH}=1, but {reason}")
    pytest.skip(reason)


def engine_maker(name):
    """What makes the chain called `name`, for a Testnet. The latest block is final on both."""
    if name == "eth-tester":
        return EthTesterEngine
    return partial(AnvilEngine, binary=needs_anvil(), slots_in_an_epoch=0)
