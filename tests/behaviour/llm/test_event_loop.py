"""Counting and pricing a large call leaves the event loop free; a small one does not cost a thread."""

import asyncio
import threading

import httpx
import pytest

from tests.support.merchant import async_client
from x402guard import Guard, Metering

URL = "https://api.openai.com/v1/chat/completions"


class WhereCounter:
    """Counts nothing and remembers on which threads it was asked to."""

    def __init__(self):
        self.threads = set()

    def count(self, text, *, provider, model):
        self.threads.add(threading.current_thread())
        return len(text)


@pytest.mark.parametrize(("size", "on_the_loop"), [(100, True), (1_000_000, False)])
def test_a_large_body_is_counted_off_the_event_loop(size, on_the_loop):
    counter = WhereCounter()
    answer = {"usage": {"prompt_tokens": 9, "completion_tokens": 9}}

    async def call(http, size):
        body = {
            "model": "gpt-4o-mini",
            "max_completion_tokens": 9,
            "messages": [{"role": "user", "content": "x" * size}],
        }
        assert (await http.post(URL, json=body)).status_code == 200

    async def run():
        with Guard(ledger="memory://", metering=Metering(counter=counter)) as guard:
            async with guard.session("s", budget="$5.00") as session:
                async with async_client(session, answers) as http:
                    await call(http, 1)  # prices load at the first call, off the loop too
                    counter.threads.clear()
                    await call(http, size)
        return threading.current_thread()

    async def answers(request):
        return httpx.Response(200, json=answer)

    loop_thread = asyncio.run(run())
    assert (counter.threads == {loop_thread}) == on_the_loop
