"""Serves the wire formats of LLM providers, so that agents can be tested without a key or a network.

It generates nothing: the test sets the answer and the numbers of tokens.
"""

import json
import secrets
import threading
from collections.abc import Mapping

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from x402guard.testing.engine import JSON
from x402guard.testing.llm_anthropic import ANTHROPIC
from x402guard.testing.llm_calls import Completion, Failure, LlmCall, Reply
from x402guard.testing.llm_cohere import COHERE
from x402guard.testing.llm_compatible import DEEPSEEK, GROQ, MISTRAL, OPENROUTER
from x402guard.testing.llm_google import GOOGLE
from x402guard.testing.llm_openai import AZURE, OPENAI, openai_error
from x402guard.testing.llm_shapes import Document, Endpoint, Provider, Rendered, compact, phrase
from x402guard.testing.server import Hosted

_PROVIDERS = (OPENAI, AZURE, ANTHROPIC, GOOGLE, MISTRAL, COHERE, GROQ, DEEPSEEK, OPENROUTER)
PROVIDERS = tuple(provider.name for provider in _PROVIDERS)
"""The providers whose formats an LlmServer speaks."""

# Served without a prefix too, like Azure's deployments. If another provider has OpenAI's path, OpenAI answers.
_AT_ROOT = (OPENAI, ANTHROPIC, GOOGLE)
_DEPLOYMENTS = "/openai/deployments/"
_NOBODY = Provider("", (), openai_error)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class LlmServer(Hosted):
    """Answers like every provider of PROVIDERS, each below its own prefix, with the answer in `reply`.

    `reply` may be changed at any time. A function is called in a thread other than the server's, so it may block;
    several calls may run at once. An exception in it becomes the provider's error 500.
    """

    def __init__(self, reply: Reply | None = None) -> None:
        self.reply = Completion() if reply is None else reply
        self._calls: list[LlmCall] = []
        self._lock = threading.Lock()
        # They begin like the prefix of another provider, so they have to be matched first.
        deployments = [endpoint for endpoint in AZURE.endpoints if endpoint.path.startswith(_DEPLOYMENTS)]
        routes = [self._mounted(AZURE, endpoint, "") for endpoint in deployments]
        for provider in _PROVIDERS:
            prefix = f"/{provider.name}"
            routes += [self._mounted(provider, endpoint, prefix) for endpoint in provider.endpoints]
            routes.append(self._catching(provider, prefix))
        for provider in _AT_ROOT:
            routes += [self._mounted(provider, endpoint, "") for endpoint in provider.endpoints]
        self.app = Starlette(routes=[*routes, self._catching(_NOBODY, "")])

    def base(self, provider: str) -> str:
        """The URL that replaces a provider's origin, without a slash at the end.

        Raises ValueError for a name that is not in PROVIDERS, RuntimeError before `start`.
        """
        if provider not in PROVIDERS:
            raise ValueError(f"no provider {provider!r}; use one of {', '.join(PROVIDERS)}")
        return f"{self.url}/{provider}"

    @property
    def calls(self) -> list[LlmCall]:
        """A copy of the calls that arrived so far, in order. May be read from any thread."""
        with self._lock:
            return list(self._calls)

    def forget(self) -> None:
        """Clear `calls`."""
        with self._lock:
            self._calls.clear()

    # ---- HTTP ----

    def _mounted(self, provider: Provider, endpoint: Endpoint, prefix: str) -> Route:
        async def answer(request: Request) -> StreamingResponse:
            call = await _arrived(request, provider, prefix)
            self._note(call)
            missing = [name for name in endpoint.required if name not in call.body]
            if missing:
                return _failed(provider, call, Failure(400, message=f"{missing[0]}: field required"))
            outcome = await run_in_threadpool(self._outcome, call)
            if isinstance(outcome, Failure):
                return _failed(provider, call, outcome)
            try:
                return _Answer.of(endpoint.answer(call, outcome), outcome, headers=_numbered(provider))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                # The body has an unreadable shape.
                return _failed(provider, call, Failure(400, message=f"unreadable request: {error!r}"))

        return Route(prefix + endpoint.path, answer, methods=[endpoint.method])

    def _catching(self, provider: Provider, prefix: str) -> Route:
        async def answer(request: Request) -> StreamingResponse:
            call = await _arrived(request, provider, prefix)
            self._note(call)
            return _failed(provider, call, Failure(404, message=f"no {request.method} {call.path} here"))

        return Route(prefix + "/{rest:path}", answer, methods=list(_METHODS))

    def _note(self, call: LlmCall) -> None:
        with self._lock:
            self._calls.append(call)

    def _outcome(self, call: LlmCall) -> Completion | Failure:
        reply = self.reply
        if not callable(reply):
            return reply
        try:
            return reply(call)
        except Exception as error:
            return Failure(500, message=f"the reply raised {error!r}")


async def _arrived(request: Request, provider: Provider, prefix: str) -> LlmCall:
    try:
        body = json.loads(await request.body())
    except ValueError:
        body = None
    body = body if isinstance(body, dict) else {}
    return LlmCall(
        provider=provider.name,
        path=request.url.path.removeprefix(prefix),
        model=str(request.path_params.get("model") or body.get("model") or ""),
        body=body,
        headers=dict(request.headers),
        query=dict(request.query_params),
    )


class _Answer(StreamingResponse):
    """Sends `parts` after a delay and with pauses, completely or until the connection has to break."""

    def __init__(
        self, parts: tuple[bytes, ...], *, whole: bool = True, delay_s: float, gap_s: float = 0.0, **more: JSON
    ) -> None:
        super().__init__((), **more)
        self._parts = parts
        self._whole = whole
        self._delay_s = delay_s
        self._gap_s = gap_s

    @classmethod
    def of(cls, rendered: Rendered, completion: Completion, *, headers: Mapping[str, str]) -> "_Answer":
        """The answer to a call, cut if the completion says so."""
        cut, delay_s = completion.cut_after, completion.delay_s
        if isinstance(rendered, Document):
            return cls.document(rendered.content, headers=headers, delay_s=delay_s, whole=cut is None)
        whole = cut is None or cut > len(rendered.events)
        pauses = {"delay_s": delay_s, "gap_s": completion.gap_s}
        return cls(rendered.events[:cut], whole=whole, headers=headers, media_type=rendered.media_type, **pauses)

    @classmethod
    def document(
        cls, content: JSON, *, headers: Mapping[str, str], status: int = 200, delay_s: float = 0.0, whole: bool = True
    ) -> "_Answer":
        """JSON with its content length; only half of it is sent unless `whole`."""
        written = compact(content).encode()
        sized = {**headers, "content-length": str(len(written))}
        part = written if whole else written[: len(written) // 2]
        return cls(
            (part,), whole=whole, delay_s=delay_s, status_code=status, headers=sized, media_type="application/json"
        )

    async def stream_response(self, send: Send) -> None:
        await anyio.sleep(self._delay_s)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, part in enumerate(self._parts):
            if number:
                await anyio.sleep(self._gap_s)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        # If an application returns without its last part, the server closes the connection.
        if self._whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _failed(provider: Provider, call: LlmCall, failure: Failure) -> _Answer:
    content = provider.error(call, failure.status, failure.message or phrase(failure.status))
    headers = {**_numbered(provider), **failure.headers}
    return _Answer.document(content, status=failure.status, headers=headers, delay_s=failure.delay_s)


def _numbered(provider: Provider) -> dict[str, str]:
    return {provider.id_header: f"req_{secrets.token_hex(12)}"}
