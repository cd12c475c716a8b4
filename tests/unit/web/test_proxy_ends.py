"""What the proxy does with an answer that its caller does not take, and with one that it cannot give."""

import json
import sys

import anyio
import httpx
import pytest

from x402guard.http.logical import LogicalRequest
from x402guard.web import answers
from x402guard.web import proxy as module


class Watching(httpx.AsyncByteStream):
    """A body without an end, which knows while which error it is closed."""

    closed_by: type[BaseException] | None = None
    closed = 0

    async def __aiter__(self):
        while True:
            yield b"piece"

    async def aclose(self):
        self.closed, self.closed_by = self.closed + 1, self.closed_by or sys.exc_info()[0]


def test_an_answer_that_its_caller_does_not_take_is_cut_off(monkeypatch):
    """Eight of them would keep a host's places from all other sessions without an end."""
    monkeypatch.setattr(module, "_UNREAD_S", 0.05)
    stream, sent = Watching(), []

    async def hung(message):
        sent.append(message["type"])
        if message.get("body"):
            await anyio.sleep_forever()

    async def go():
        with anyio.fail_after(10):
            await module._pass_on(httpx.Response(200, stream=stream), [], hung)

    anyio.run(go)
    assert sent == ["http.response.start", "http.response.body"]
    assert stream.closed_by is TimeoutError  # so its guard notes that it was cut off, and not that it was handed over


@pytest.mark.parametrize("metered", [True, False])
def test_the_end_of_the_proxy_denies_no_call_that_may_be_billed(metered):
    request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")
    LogicalRequest.of(request).is_metered = metered
    told = json.loads(answers.ended(request).body)
    assert ("nothing was paid" in told["detail"]) is not metered
    assert ("may be billed" in told["detail"]) is metered
