"""The server of ``serve`` and ``proxy``: signals end it in order, one or many, whenever they come."""

import asyncio
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from x402guard.web.server import Server

QUIET = {"lifespan": "off", "log_level": "critical", "timeout_graceful_shutdown": 20}


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def run(server, listening, ask):
    """Run the server in this thread, as the commands do; ``ask`` runs beside it. Return what it has returned.

    It waits for its answer for as long as that takes: beside other work a server begins late.
    """
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def asked():
        try:
            return ask(url)
        except BaseException:
            server.should_exit = True  # nobody else would end it
            raise

    with ThreadPoolExecutor(1) as beside:
        answered = beside.submit(asked)
        server.run(sockets=[listening])
        return answered.result()


def ends(url):
    return httpx.get(f"{url}/end", timeout=None).text  # noqa: S113 - pytest's own limit ends it


def application(number):
    async def end(_):
        signal.raise_signal(number)
        return PlainTextResponse("answered")

    return Starlette(routes=[Route("/end", end)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_its_answers_and_is_not_raised_again(listening, number):
    before, called = signal.getsignal(number), []
    server = Server(application(number), on_exit=lambda: called.append(number), **QUIET)
    assert run(server, listening, ends) == "answered"
    assert called == [number]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_while_its_loop_is_closed_breaks_nothing(listening, monkeypatch, number):
    closing = asyncio.BaseEventLoop.shutdown_asyncgens

    def interrupted(loop):
        for _ in range(3):
            signal.raise_signal(number)
        return closing(loop)

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_asyncgens", interrupted)
    assert run(Server(application(number), loop="asyncio", **QUIET), listening, ends) == "answered"


def test_a_second_ctrl_c_does_not_wait_for_an_answer_that_stays_open(listening):
    async def open_answer(_):
        async def parts():
            yield b"begun"
            signal.raise_signal(signal.SIGINT)
            asyncio.get_running_loop().call_later(0.3, signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(60)

        return StreamingResponse(parts())

    def ask(url):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}/open", timeout=None)  # noqa: S113 - pytest's own limit ends it
        return "cut"

    server = Server(Starlette(routes=[Route("/open", open_answer)]), **QUIET)
    assert run(server, listening, ask) == "cut"
