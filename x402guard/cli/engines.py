"""Defines the option ``--engine``: the chain that a local test network runs on."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from x402guard.testing import Engine


class EngineName(StrEnum):
    """The chains that a local test network can run on."""

    ETH_TESTER = "eth-tester"
    ANVIL = "anvil"


EngineOption = Annotated[
    EngineName,
    typer.Option("--engine", help="The engine of the chain: eth-tester, in this process, or Foundry's anvil."),
]
"""The option `--engine`."""


def engine_maker(name: EngineName, *, final_at_once: bool = False) -> Callable[..., Engine]:
    """Return the factory of a `Testnet`'s chain.

    On anvil the 64th block before the latest is final; with *final_at_once*, the latest. Raises ``ConfigError`` if
    anvil is not installed.
    """
    from x402guard.testing import AnvilEngine, EthTesterEngine, find_anvil

    if name is EngineName.ETH_TESTER:
        return EthTesterEngine
    on_anvil = partial(AnvilEngine, binary=find_anvil())
    return partial(on_anvil, slots_in_an_epoch=0) if final_at_once else on_anvil
