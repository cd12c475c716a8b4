"""A task that is cancelled again and again while all threads of the ledger are busy: what then still runs."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from x402guard.flow import drivers
from x402guard.flow.effects import Transact
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.view import Scope


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("is_end", [True, False], ids=["the end of an answer", "another change"])
def test_only_an_end_of_an_answer_is_written_nevertheless(is_end, times):
    """It is in no queue and no file before it is tried; another change has its caller, who reads the ledger."""
    shell, go, ran = SimpleNamespace(store=object()), threading.Event(), []
    effect = Transact(Scope(), lambda _view: None, LateEnd("h") if is_end else None)

    async def main():
        threads = drivers._ledger_threads(drivers.os.getpid(), id(shell.store))
        busy = [threads.submit(go.wait, 10) for _ in range(drivers._LEDGER_THREADS)]
        task = asyncio.create_task(drivers._run_effect_aside(effect, lambda: ran.append("it"), shell))
        for _ in range(times):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        for each in busy:
            each.result()

    asyncio.run(main())
    assert ran == (["it"] if is_end else [])


@pytest.mark.parametrize("what", ["a change", "an end"])
def test_a_call_is_made_once_where_no_further_thread_can_be_started(monkeypatch, what):
    """A pool takes a call into its queue before it starts a thread for it, so a busy thread made it once more."""
    shell, go, ran = SimpleNamespace(store=object()), threading.Event(), []
    start = threading.Thread.start

    def begun(call):
        return (
            drivers.finish_change(call, shell, lambda _: None) if what == "a change" else drivers.finish_closing(call)
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
