"""Serves an ASGI application on a loopback port, in a separate thread with its own event loop."""

import difflib
import socket
import threading
from collections.abc import Iterable
from typing import Self

import uvicorn
from starlette.types import ASGIApp

_LONGEST_SHUTDOWN_S = 2
_KEEP_ALIVE_S = 60


def check_behaviour(name: str, known: Iterable[str]) -> None:
    """Raise ``KeyError`` for a behaviour that is not *known*. It names the nearest one, or all."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise KeyError(f"there is no behaviour {name!r}; {hint}")


class _ReportingServer(uvicorn.Server):
    """A uvicorn server that signals when it has started or failed to start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.decided = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.decided.set()


class Server:
    """Serves `app` over HTTP on 127.0.0.1, at a port that the system chooses, until `close`.

    Usable as a context manager. Raises RuntimeError if the application refuses to start.
    """

    def __init__(self, app: ASGIApp) -> None:
        # asyncio disables Nagle's algorithm only for sockets that name TCP. With it, every answer takes 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        """The URL of the application, without a slash at the end."""
        config = uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=_LONGEST_SHUTDOWN_S,
            # Longer than clients keep connections: if the server closes one during a payment, the answer is lost.
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _ReportingServer(config)
        self._thread = threading.Thread(target=self._run, name=f"x402guard-server {self.url}", daemon=True)
        self._thread.start()
        self._server.decided.wait()
        if not self._server.started:
            self.close()
            raise RuntimeError("the application failed to start")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._server.decided.set()

    def close(self) -> None:
        """Stop accepting requests, let running ones end for at most two seconds, and stop. Idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()


class Hosted:
    """Base class of objects that serve their ASGI application on loopback between `start` and `close`."""

    app: ASGIApp
    """The application. It can also be called in this process, without a server."""

    _server: Server | None = None

    def start(self) -> Self:
        """Serve the application on loopback; return this object."""
        if self._server is None:
            self._server = Server(self.app)
        return self

    @property
    def url(self) -> str:
        """The URL of the application, without a slash at the end; raise RuntimeError before `start`."""
        if self._server is None:
            raise RuntimeError(f"this {type(self).__name__} is not being served: call start() first")
        return self._server.url

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
