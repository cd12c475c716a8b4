"""A process that dies at a step of its choice, by SIGKILL, as often as it is told to.

It reads one order a line (JSON) and answers each with how its child ended: negative is the signal. Everything slow is imported
once; the child is a fork that opens a guard of its own, and is as dead as any process when it is killed.

An order: ``ledger`` (URL), ``chain`` ([network, RPC URL]), ``key``, ``told`` (a file that the child writes what it does into, line by
line), ``session``, ``url`` (of the merchant; ``{pid}`` becomes the child's), ``at`` (the number of the step at which it dies, or
null), ``mode`` (sync or async), ``task`` (``buy`` or ``reconcile``), ``asks`` (a person is asked first), ``ahead_s`` (of the clock).
"""

import json
import os
import signal
import ssl
import sys
import time
import traceback

import anyio
import anyio._backends._asyncio
import eth_abi.abi  # noqa: F401 - so that no child has to load it
import h2.connection  # noqa: F401 - as above
import httpcore  # noqa: F401 - as above
import httpx

from x402guard import (
    AsyncGuardedTransport,
    Guard,
    GuardedTransport,
    LocalSigner,
    Policy,
    Rule,
    X402GuardError,
)
from x402guard.flow import drivers
from x402guard.stores import open_store
from x402guard.stores.postgres_rows import LoadedRows
from x402guard.stores.sqlite_rows import SqliteRows

TLS = ssl.create_default_context()  # made once: it takes longer than a payment


class Steps:
    """Counts what a conversation does: before, inside and after each effect. At the one that was chosen, the process is no more."""

    def __init__(self, told, at):
        self._told, self._at = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), at
        self._count, self._armed = 0, False

    def tell(self, line):
        os.write(self._told, f"{line}\n".encode())

    def reach(self, where, effect):
        if not self._armed or effect is None:
            return
        self.tell(f"step {where} {effect}")
        if self._count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._count += 1

    def __enter__(self):
        """Watch every flow that this process runs from here on."""
        self._armed, last = True, None
        advance, write = drivers._advance, SqliteRows.flush

        def watched(flow, answer, failure):
            nonlocal last
            self.reach("after", last)
            effect = advance(flow, answer, failure)
            last = None if isinstance(effect, drivers._Result) else type(getattr(effect, "question", effect)).__name__
            self.reach("before", last)
            return effect

        def written(rows):
            write(rows)
            self.reach("inside", "Transact")  # all is written, nothing is committed

        text = LoadedRows.to_json

        def decided(rows, turns):
            told = text(rows, turns)
            self.reach("inside", "Transact")  # all is decided, and nothing is sent
            return told

        drivers._advance, SqliteRows.flush, LoadedRows.to_json = watched, written, decided
        return self

    def __exit__(self, *error):
        self._armed = False


class TellingSigner:
    """A real signer that says which nonces it has signed, before anybody else has the signature."""

    def __init__(self, key, steps):
        self.inner, self.steps = LocalSigner.from_key(key), steps
        self.inline = self.inner.inline

    @property
    def address(self):
        return self.inner.address

    def bind(self, lookup):
        self.inner.bind(lookup)

    def sign(self, hold):
        signature = self.inner.sign(hold)
        self.steps.tell(f"signed {hold.id}")
        return signature


def buy(session, order, steps):
    url = order["url"].replace("{pid}", str(os.getpid()))
    steps.tell(f"url {url}")
    if order["mode"] == "sync":
        inner = httpx.HTTPTransport(verify=TLS)
        with httpx.Client(transport=GuardedTransport(session, inner), timeout=30) as http, steps:
            return http.get(url)

    async def go():
        inner = httpx.AsyncHTTPTransport(verify=TLS)
        async with httpx.AsyncClient(transport=AsyncGuardedTransport(session, inner), timeout=30) as http:
            with steps:
                return await http.get(url)

    return anyio.run(go)


def live(order):
    os.environ["XDG_STATE_HOME"] = order["state"]
    steps = Steps(order["told"], order["at"])
    rules = [Rule(name="ask", action="ask")] if order.get("asks") else None
    store = open_store(order["ledger"], clock_ms=lambda: time.time_ns() // 10**6 + order.get("ahead_s", 0) * 1000)
    network, rpc = order["chain"]
    with Guard(
        signer=TellingSigner(order["key"], steps),
        ledger=store,
        chains={network: rpc},
        policy=Policy(breaker=None, rules=rules),
        approver=(lambda request: True) if rules else None,
        kill_file=f"{order['told']}.kill",
        background_checks=False,
    ) as guard:
        if order["task"] == "reconcile":
            with steps:
                guard.reconcile()
        else:
            with guard.session(order["session"], budget="$1.00", id=order["session"]) as session:
                try:
                    response = buy(session, order, steps)
                    steps.tell(f"ended {response.status_code}")
                except X402GuardError as error:
                    steps.tell(f"ended {type(error).__name__}")
    store.close()


def main():
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                live(order)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
