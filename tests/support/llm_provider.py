"""An LLM provider in a function, and the same call over every transport: httpx and httpx2, blocking and awaiting."""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from types import ModuleType

import anyio
import httpx
import httpx2
import pytest

import x402guard
import x402guard.httpx2
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import Metering
from x402guard.stores import open_store
from x402guard.vendors.genai_prices import GenaiPriceBook
from x402guard.vendors.tiktoken_counter import TiktokenCounter

CHAT = "https://api.openai.com/v1/chat/completions"
GEMINI = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash"
USED = {"prompt_tokens": 20, "completion_tokens": 5}
COST = Decimal("0.0001")  # of USED at gpt-4o's $2.50 and $10 a million: 20 x 2,500 + 5 x 10,000 nano-dollars
ERROR = {"error": {"message": "The server is overloaded.", "type": "server_error", "code": "overloaded"}}
COUNTER, BOOK = TiktokenCounter(), GenaiPriceBook()
COUNTER.count("", provider="openai", model="gpt-4o")  # they load once, and here: what has loaded runs on the event loop
BOOK.find("openai", "gpt-4o", 0)


def ask(**changes) -> dict:
    """A chat with gpt-4o of at most 100 tokens; what is changed to None is left out."""
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 100, **changes}
    return {key: value for key, value in body.items() if value is not None}


def completion(usage=USED, **more) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "gpt-4o",
        "choices": [choice],
        "usage": usage,
        **more,
    }


def chunk(text=None, *, finish=None, **more) -> dict:
    delta = {} if text is None else {"content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more}


def sse(*events, end="\n") -> list:
    """Server-sent events, one piece each."""
    lines = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return [f"data: {line}{end}{end}".encode() for line in lines]


@dataclass
class Answer:
    """What a provider answers. ``breaks`` is raised after the last piece: an exception, or the name of one of the library's."""

    status: int = 200
    pieces: list = field(default_factory=list)
    headers: dict = field(default_factory=dict)
    breaks: object = None
    asked: int = 0
    closed: bool = False

    @classmethod
    def of(cls, content=None, status=200, **more):
        """Whole: JSON, or bytes or text as they stand."""
        content = completion() if content is None else content
        raw = content.encode() if isinstance(content, str) else content
        pieces = [raw if isinstance(raw, bytes) else json.dumps(raw).encode()]
        return cls(status, pieces, {"content-type": "application/json", **more.pop("headers", {})}, **more)

    @classmethod
    def stream(cls, *pieces, **more):
        return cls(200, list(pieces), {"content-type": "text/event-stream", **more.pop("headers", {})}, **more)


class _Body:
    def __init__(self, answer, library):
        self.answer, self.library = answer, library

    def __iter__(self):
        for piece in self.answer.pieces:
            self.answer.asked += 1
            yield piece
        if self.answer.breaks is not None:
            raise raised(self.library, self.answer.breaks)

    async def __aiter__(self):
        for piece in self:
            if callable(piece):
                await piece()
            else:
                yield piece

    def close(self):
        self.answer.closed = True

    async def aclose(self):
        self.answer.closed = True


def raised(library, error):
    return getattr(library, error)("on the wire") if isinstance(error, str) else error


class Provider:
    """Gives its answers in turn, the last again and again; remembers what it was asked, and what was held meanwhile.

    An answer is an ``Answer``, an exception, the name of one of the HTTP library's, or a function of the request.
    """

    def __init__(self, session, *answers):
        self.session, self.answers = session, list(answers) or [Answer.of()]
        self.requests, self.held = [], []

    def __call__(self, request):
        self.requests.append(request)
        self.held.append(self.session.held)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        return answer(request) if callable(answer) and not isinstance(answer, type) else answer

    @property
    def bodies(self) -> list:
        return [json.loads(request.content) for request in self.requests]

    @property
    def outcome(self) -> str:
        """How its only call ended: ``void``, ``ceiling`` or ``usage``; anything else in the words of the report."""
        report = self.session.report().to_dict()
        evidence = {key: Decimal(amount) for key, amount in report["evidence"].items() if Decimal(amount)}
        names = [event["event"] for event in report["events"]]
        ceiling = next((Decimal(event["amount"]) for event in report["events"]), None)
        ends = {
            "void": (["authorize", "void"], {}),
            "ceiling": (["authorize", "capture"], {"assumed": ceiling}),
            "usage": (["authorize", "capture"], {"provider_usage": COST}),
        }
        for word, end in ends.items():
            if (names, evidence) == end and self.session.held == 0:
                assert set(self.held) <= {ceiling}, "the ceiling was held while the call was out"
                return word
        return f"{names}, {evidence}, ${self.session.held} held"


@dataclass(frozen=True)
class Way:
    """One of the transports, and a client over it."""

    library: ModuleType
    mode: str

    def __str__(self):
        return f"{self.library.__name__}-{self.mode}"

    def transport(self, session, provider=None, **options):
        """Guarded, over *provider*, or over the library's own transport."""
        ours = x402guard if self.library is httpx else x402guard.httpx2
        kind = ours.GuardedTransport if self.mode == "sync" else ours.AsyncGuardedTransport
        inner = (
            None if provider is None else self.library.MockTransport(lambda request: self._answer(provider, request))
        )
        return kind(session, inner, **{"on_refusal": "raise", **options})

    def _answer(self, provider, request):
        answer = provider(request)
        if isinstance(answer, (str, BaseException)):
            raise raised(self.library, answer)
        kind = type("Body", (_Body, self.library.SyncByteStream, self.library.AsyncByteStream), {})
        return self.library.Response(answer.status, headers=answer.headers, stream=kind(answer, self.library))

    def post(self, session, provider=None, body=None, *, url=CHAT, headers=(), take=None, each=None, **options):
        """One call. Returns the response and the raw chunks that were read: all, or the first *take* before it is closed.

        *each* is called after every chunk.
        """
        client = {"transport": self.transport(session, provider), **options, "trust_env": False}
        headers, content = {"content-type": "application/json", **dict(headers)}, body
        if body is None or isinstance(body, dict):
            content = json.dumps(ask() if body is None else body).encode()
        chunks = []

        def enough(got):
            chunks.append(got)
            if each is not None:
                each()
            return len(chunks) == take

        if self.mode == "sync":
            with self.library.Client(**client) as http:
                with http.stream("POST", url, content=content, headers=headers) as response:
                    if take != 0:
                        any(map(enough, response.iter_raw()))
            return response, chunks

        async def go():
            async with self.library.AsyncClient(**client) as http:
                async with http.stream("POST", url, content=content, headers=headers) as response:
                    if take != 0:
                        async for got in response.aiter_raw():
                            if enough(got):
                                break
            return response, chunks

        return anyio.run(go, backend=self.mode)


WAYS = [Way(library, mode) for library in (httpx, httpx2) for mode in ("sync", "asyncio")]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)
both_modes = pytest.mark.parametrize("way", WAYS[:2], ids=str)
SYNC = WAYS[0]


@contextmanager
def metered(ledger="memory://", *, budget="$5", clock=None, store=None, guard=None, **settings):
    """A session whose LLM calls are metered, on a ledger whose clock can be turned. *guard* goes to the guard itself.

    The project's tier is the standard one, so that the figures of a test are those of the price list.
    """
    books = store or open_store(ledger, clock_ms=clock or Clock())
    metering = Metering(
        **{"counter": COUNTER, "prices": BOOK, "price_context": {"service_tier": "default"}, **settings}
    )
    try:
        with make_guard(books, metering=metering, **(guard or {})) as made, made.session("s", budget=budget) as session:
            yield session
    finally:
        books.close()
