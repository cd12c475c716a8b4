"""Row 77: under ``install``, what was begun in a run goes on after its end."""

import asyncio
import contextvars
import threading
from functools import partial

import anyio
import httpx
import openai
import pytest

from tests.support import sdks
from tests.support.sdks import MINI, TEXT, ask_openai
from x402guard import SessionClosed
from x402guard.http.refusal_from import refusal_from

running, server, install = sdks.running, sdks.server, sdks.install

pytestmark = [pytest.mark.xdist_group("install"), pytest.mark.filterwarnings(sdks.ALL_LOADED)]


@pytest.mark.parametrize("way", ["thread", "bound", "task", "task of a task"])
def test_a77_what_outlives_a_run_of_its_own_does_not_spend_from_the_installed_session(running, server, install, way):
    """It is refused by the ledger and told once; requests that cost nothing pass."""
    _, guard = running
    installed, told = install(), []

    def asks():
        with openai.OpenAI(max_retries=0) as client:
            for _ in range(2):
                try:
                    told.append(ask_openai(client))
                except openai.APIStatusError as error:
                    refusal = refusal_from(error)
                    told.append((type(refusal), refusal.rule, refusal.session))
        told.append(httpx.get(f"{server.base('openai')}/v1/models").status_code)

    async def late():
        await anyio.sleep(0)
        await asyncio.to_thread(asks) if way == "task" else await asyncio.create_task(asyncio.to_thread(asks))

    async def main():
        async with guard.session("own", budget="$1.00") as own:
            task = asyncio.create_task(late())
        await task
        return own

    if way.startswith("task"):
        own = asyncio.run(main())
    else:
        with guard.session("own", budget="$1.00") as own:
            inherits = contextvars.copy_context()
            outlives = partial(inherits.run, asks) if way == "thread" else own.bind(asks)
        thread = threading.Thread(target=outlives)
        thread.start()
        thread.join()
    assert told[:2] == [(SessionClosed, "session_closed", own.id)] * 2
    assert told[2] < 500
    assert (installed.spent, installed.held) == (0, 0)
    [row] = own.report().to_dict()["refusals"]
    assert (row["rule"], row["count"]) == ("session_closed", 2)
    with openai.OpenAI() as client:
        assert ask_openai(client) == TEXT  # who was never in a run pays as before
    assert installed.spent == MINI


@pytest.mark.parametrize("kind", ["run", "child"])
def test_a77_a_run_that_is_closed_in_its_own_block_is_closed_there(running, server, install, kind):
    """A watchdog's thread or a callback closes it: what goes on in its block pays from no session around it."""
    _, guard = running
    installed = install()
    with guard.session("outer", budget="$1.00") as outer:
        inner = guard.session("own", budget="$1.00") if kind == "run" else outer.child("own", budget="$0.50")
        with inner, openai.OpenAI(max_retries=0) as client:
            assert ask_openai(client) == TEXT
            thread = threading.Thread(target=inner.close)
            thread.start()
            thread.join()
            with pytest.raises((openai.APIStatusError, SessionClosed)) as caught:
                ask_openai(client)
            refusal = refusal_from(caught.value) or caught.value
            assert isinstance(refusal, SessionClosed)
        assert outer.spent == (MINI if kind == "child" else 0)
    assert (installed.spent, installed.held) == (0, 0)
