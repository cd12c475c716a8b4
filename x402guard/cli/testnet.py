"""Defines the command ``testnet``."""

from __future__ import annotations

import json
import signal
import threading
from types import FrameType

import typer

from x402guard.cli.engines import EngineName, EngineOption, engine_maker


def testnet(engine: EngineOption = EngineName.ETH_TESTER) -> None:  # noqa: PT028 - a command, no test
    """Run a local chain that poses as Base Sepolia, a facilitator and a merchant. Prints their addresses as JSON.

    The printed key is a test key without value on any other network. Ctrl-C or SIGTERM stops the command.
    Example: x402guard testnet
    """
    from x402guard.testing import Testnet

    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    with Testnet(make_engine=engine_maker(engine)) as net:
        typer.echo(json.dumps(net.describe(), indent=2))
        while not stop.wait(timeout=3600):
            pass
