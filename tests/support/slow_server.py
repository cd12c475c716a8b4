"""A server over raw sockets that sends as little as it likes as rarely as it likes, and what is asked of it over every transport."""

import json
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import anyio
import httpx
import httpx2

import x402guard
import x402guard.httpx2
from tests.support.llm_provider import Way
from tests.support.merchant import accept, b64, receipt, required, required_v1, unb64

WAYS = [Way(library, mode) for library in (httpx, httpx2) for mode in ("sync", "asyncio")] + [Way(httpx, "trio")]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
OPEN_END = b"connection: close\r\n\r\n"  # the body ends where the connection does
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def paid_head(rest=b"content-length: 40\r\n\r\n"):
    return HEAD + f"PAYMENT-RESPONSE: {b64(receipt())}\r\n".encode() + rest


@dataclass
class Asked:
    """One request as it came."""

    path: str
    nonce: str | None
    body: bytes
    headers: dict
    method: str

    def header(self, name):
        return self.headers.get(name)


class Trickler:
    """Answers a 402 to what is not paid, unless its path says otherwise; ``answers`` maps a path to a function of a ``Line``."""

    def __init__(self, terms=None):
        self.terms = terms or required(accept())
        self.answers = {}
        self.asked = []
        self.done = threading.Event()
        self._open = set()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"http://{self.host}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.let_go()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def let_go(self):
        """Close every connection, and send nothing any more."""
        self.done.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def nonces(self):
        return [asked.nonce for asked in self.asked if asked.nonce is not None]

    def _accept(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError), connection:
            while not self.done.is_set():
                asked = _read(connection)
                if asked is None:
                    break
                self.asked.append(asked)
                line = Line(self, connection, asked)
                answer = self.answers.get(asked.path, Line.sell)
                if answer(line) is False:
                    break
        with self._lock:
            self._open.discard(connection)


class Line:
    """A connection with a question on it."""

    def __init__(self, server, connection, asked):
        self.server, self.connection, self.asked = server, connection, asked

    def send(self, raw):
        self.connection.sendall(raw)

    def trickle(self, raw, pause_s=0.1):
        """Send byte by byte, with a pause between two, at most for as long as the server stands."""
        for at in range(len(raw)):
            if at and self.server.done.wait(pause_s):
                return False
            self.send(raw[at : at + 1])
        return True

    def hang(self):
        self.server.done.wait(60)
        return False

    def offer(self):
        terms = self.server.terms
        body, header = b"pay first", f"PAYMENT-REQUIRED: {b64(terms)}\r\n"
        if terms["x402Version"] == 1:
            body, header = json.dumps(terms).encode(), ""
        head = (
            f"HTTP/1.1 402 Payment Required\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n{header}\r\n"
        )
        self.send(head.encode() + body)

    def sell(self):
        """A shop like any other."""
        if self.asked.nonce is None:
            self.offer()
        else:
            self.send(paid_head(b"content-length: 4\r\n\r\nsold"))


def _read(connection):
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = connection.recv(65536)
        if not piece:
            return None
        raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length and len(body) < int(length[1]):
        body += connection.recv(65536)
    header = re.search(rb"(?:payment-signature|x-payment): *(\S+)", head, re.IGNORECASE)
    nonce = unb64(header[1])["payload"]["authorization"]["nonce"] if header else None
    lines = (line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:])
    method, path, _ = head.split(b" ", 2)
    return Asked(path.decode(), nonce, body, {name.lower(): value for name, _, value in lines}, method.decode())


def once_paid(answer):
    """A shop that answers its payments so."""

    def reply(line):
        return line.offer() if line.asked.nonce is None else answer(line)

    return reply


SLOW_ANSWERS = {
    "head": once_paid(lambda line: line.trickle(paid_head() + b"x" * 40)),
    "body": once_paid(lambda line: (line.send(paid_head()), line.trickle(b"x" * 40, 0.3))[1]),
    "chunk header": once_paid(lambda line: (line.send(paid_head(CHUNKED)), line.trickle(b"0" * 600 + b"4\r\n"))[1]),
    "silence": once_paid(Line.hang),
    "open end": once_paid(lambda line: (line.send(paid_head(OPEN_END) + b"xx"), line.hang())[1]),
    "half a body": once_paid(lambda line: (line.send(paid_head() + b"x" * 20), line.hang())[1]),
}


def slow_terms(line):
    """A v1 offer, a byte at a time."""
    line.send(b"HTTP/1.1 402 Payment Required\r\ncontent-type: application/json\r\ncontent-length: 4000\r\n\r\n")
    terms = b'{"x402Version": 1, "accepts": [' + str(required_v1()).encode()
    return line.trickle(terms.ljust(4000))


class Lag:
    """Seconds for which this process had to wait for its turn, while it is entered: no time limit can be kept in them."""

    def __init__(self):
        self.seconds, self._over = 0.0, threading.Event()

    def __enter__(self):
        self._over.clear()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()

    def _look(self):
        begun = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self.seconds, begun = self.seconds + now - begun - 0.01, now


LAG = Lag()


@dataclass
class Came:
    """What came of one request, after how many seconds, and in how many of them this process was not kept waiting by others."""

    took_s: float
    awake_s: float
    error: BaseException | None
    response: object = None
    content: bytes = b""


def fetch(way, session, url, *, http=None, **options):
    """GET *url* whole; errors of ours are returned, and how long it took."""
    begun, lag = time.monotonic(), LAG.seconds

    def came(*what):
        took_s = time.monotonic() - begun
        return Came(took_s, took_s - (LAG.seconds - lag), *what)

    try:
        response = _whole(way, session, url, http, options)
    except x402guard.X402GuardError as error:
        return came(error)
    return came(None, response, response.content)


def settings_of(way, session):
    """What a client of *way* is made with: over the library's own transport, with no time limit of its own."""
    return {"transport": way.transport(session), "timeout": None, "trust_env": False}


def _whole(way, session, url, http, options):
    if http is not None:
        return http.get(url, **options)
    if way.mode == "sync":
        with way.library.Client(**settings_of(way, session)) as made:
            return made.get(url, **options)

    async def go():
        async with way.library.AsyncClient(**settings_of(way, session)) as made:
            return await made.get(url, **options)

    return anyio.run(go, backend=way.mode)
