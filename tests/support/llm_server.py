"""Fixtures: an LLM server of the library's own with a plain client beside it, and that server as new for each test."""

import httpx
import pytest

from x402guard.testing import Completion, LlmServer


@pytest.fixture(scope="module")
def running():
    with LlmServer() as server, httpx.Client(trust_env=False, timeout=10) as http:
        yield server, http


@pytest.fixture
def server(running):
    server, _ = running
    server.reply = Completion()
    server.forget()
    return server
