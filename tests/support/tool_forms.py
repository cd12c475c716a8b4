"""Every form of a tool, as one function of a session and of what a use of it comes to; and all accounts of a session at once."""

import functools
import inspect
from dataclasses import dataclass
from decimal import Decimal

import anyio
import anyio.lowlevel
import pytest

CEILING = "$0.05"


class BrokenError(Exception):
    pass


def amounts(table):
    return {name: Decimal(row["amount"] if isinstance(row, dict) else row) for name, row in table.items()}


def events(session, *names):
    return [event for event in session.report().to_dict()["events"] if not names or event["event"] in names]


def check(session, spent, word=None, *, calls=1, tool="serp", held="0"):
    """All accounts of a session of a dollar at once: amounts, whose word they rest on, and the report's line for the tool."""
    spent, held = Decimal(spent), Decimal(held)
    assert (session.spent, session.held) == (spent, held)
    assert session.remaining == max(Decimal(0), Decimal(1) - spent - held)
    report = session.report().to_dict()
    assert (Decimal(report["spent"]), Decimal(report["held"])) == (spent, held)
    said_by = {name: amount for name, amount in amounts(report["evidence"]).items() if amount}
    assert said_by == ({word: spent} if spent else {})
    tools = report["tools"]
    assert (Decimal(tools["total"]), tools["calls"]) == (spent, calls)
    assert amounts(tools["by_tool"]) == ({tool: spent} if calls else {})


def check_untouched(session):
    check(session, "0", calls=0)
    assert events(session) == []


def said(what):
    if isinstance(what, BaseException):
        raise what
    return what


def plain(body):
    def serp(*given, what):
        return body(what)

    return serp


def awaited(body):
    async def serp(*given, what):
        await anyio.lowlevel.checkpoint()
        return body(what)

    return serp


def owner(**names):
    """A class with these attributes, and one of its objects."""
    return type("Engine", (), names)()


KINDS = {
    "function": lambda tool, function: tool(function),
    "method": lambda tool, function: owner(serp=tool(function)).serp,
    "static method": lambda tool, function: owner(serp=staticmethod(tool(function))).serp,
    "bound method": lambda tool, function: tool(owner(serp=function).serp),
    "object": lambda tool, function: tool(owner(__call__=function)),
    "partial": lambda tool, function: tool(functools.partial(function, "de")),
}


@dataclass(frozen=True)
class Form:
    """A way to decorate, and the event loop that its calls run on, or None."""

    kind: str
    backend: str | None

    def __str__(self):
        return f"{self.kind}-{self.backend or 'plain'}"

    def decorate(self, decorator, body):
        return KINDS[self.kind](decorator, awaited(body) if self.backend else plain(body))

    def call(self, tool, **arguments):
        assert inspect.iscoroutinefunction(tool) is (self.backend is not None)
        call = functools.partial(tool, **arguments)
        return anyio.run(call, backend=self.backend) if self.backend else call()

    def use(self, session, what, seen):
        """A tool whose cost is what it returns."""

        def body(what):
            seen.append((session.held, session.spent))
            return said(what)

        tool = self.decorate(session.tool(cost=lambda result: result, up_to=CEILING, name="serp"), body)
        assert self.call(tool, what=what) == what


FORMS = [Form(kind, backend) for kind in KINDS for backend in (None, "asyncio", "trio")]


@dataclass(frozen=True)
class Block:
    """``with``, or ``async with`` on an event loop."""

    backend: str | None

    def __str__(self):
        return f"block-{self.backend or 'plain'}"

    def run(self, hold, body):
        if self.backend is None:
            with hold:
                body(hold)
            return hold

        async def main():
            async with hold as entered:
                assert entered is hold
                await anyio.lowlevel.checkpoint()
                body(hold)

        anyio.run(main, backend=self.backend)
        return hold

    def use(self, session, what, seen):
        def body(hold):
            seen.append((session.held, session.spent))
            hold.capture(said(what))

        self.run(session.hold("serp", up_to=CEILING), body)


BLOCKS = [Block(None), Block("asyncio"), Block("trio")]


every_form = pytest.mark.parametrize("form", [*BLOCKS, *FORMS], ids=str)


every_decorated = pytest.mark.parametrize("form", FORMS, ids=str)


every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
