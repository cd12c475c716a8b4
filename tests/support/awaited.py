"""One question to both twins of a function: the one that blocks, and the one that is awaited on either event loop."""

import inspect
from functools import partial

import anyio
import pytest

WAYS = ("blocking", "asyncio", "trio")
each_way = pytest.mark.parametrize("way", WAYS)


def call(way, thing, name, *arguments):
    """Call the method of that name; its awaited twin has an ``a`` before it."""
    if way == "blocking":
        return getattr(thing, name)(*arguments)
    twin = getattr(thing, f"a{name}")
    assert inspect.iscoroutinefunction(twin)
    return anyio.run(partial(twin, *arguments), backend=way)
