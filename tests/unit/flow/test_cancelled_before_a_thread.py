"""A task that is cancelled again and again while the thread of the ledger is busy: what then still runs."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from x402guard.flow import drivers, threads
from x402guard.flow.change_queue import change_in_queue
from x402guard.flow.effects import Transact
from x402guard.flow.shell import Shell
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.view import Scope
from x402guard.stores import open_store


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("is_end", [True, False], ids=["the end of an answer", "another change"])
def test_only_an_end_of_an_answer_is_written_nevertheless(is_end, times):
    """It is in no queue and no file before it is tried; another change has its caller, who reads the ledger."""
    store, go, ran = open_store("memory://"), threading.Event(), []
    effect = Transact(Scope(), lambda _view: ran.append("it"), LateEnd("h") if is_end else None)
    shell = Shell(store=store, signer=None, chain=None)

    async def main():
        busy = asyncio.create_task(
            change_in_queue(store, Scope(), lambda _view: go.wait(10), lambda _: None, may_drop=True)
        )
        await asyncio.sleep(0.05)
        task = asyncio.create_task(drivers._run_aside(effect, shell))
        for _ in range(times):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await busy

    asyncio.run(main())
    assert ran == (["it"] if is_end else [])


@pytest.mark.parametrize("what", ["a change", "an end"])
def test_a_call_is_made_once_where_no_further_thread_can_be_started(monkeypatch, what):
    """A pool takes a call into its queue before it starts a thread for it, so a busy thread made it once more."""
    shell, go, ran = SimpleNamespace(store=object()), threading.Event(), []
    start = threading.Thread.start

    def begun(call):
        return (
            threads.finish_change(call, shell, lambda _: None) if what == "a change" else threads.finish_closing(call)
        )

    async def main():
        busy = asyncio.create_task(begun(lambda: go.wait(10)))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no threads")))
        await begun(lambda: ran.append("it"))
        monkeypatch.setattr(threading.Thread, "start", start)
        go.set()
        await busy
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert ran == ["it"]
