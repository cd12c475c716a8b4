"""``install(budget=…)`` guards every httpx and httpx2 client of the process; ``uninstall()`` undoes it.

It covers clients made before and after, with their own transports and with mounts: it replaces the method by which a
client chooses the transport for a request. Where the libraries' own transports send, payments of other clients are judged
(``Policy.foreign_payments``), whatever transport made them. A request belongs to the session in context, else to the installed one;
tasks and ``to_thread`` inherit the context, plain threads get it by ``session.bind(fn)``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, get_args

import httpx
from msgspec import Struct

import x402guard.http.transport as on_httpx
from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async
from x402guard.guard.guard import Guard
from x402guard.guard.in_context import IN_CONTEXT, InContext
from x402guard.guard.session import Session
from x402guard.guard.unseen import clients_past_guard, refuse_aiohttp, unseen_libraries
from x402guard.http.families import Library
from x402guard.http.foreign import judge_leaving
from x402guard.http.guarded import OnRefusal, has_guard
from x402guard.money import Dollars
from x402guard.views.report import Report

_SEAM: Final = "_transport_for_url"  # the method of all clients, in both libraries, that chooses a request's transport
_WATCHED: Final = frozenset({"aiohttp", "google.genai"})  # refused by ``refuse_aiohttp``, so no warning is needed
_LOCK: Final = threading.Lock()


class _Installation(Struct, frozen=True):
    guard: Guard
    owned: bool
    session: Session
    originals: tuple[tuple[type[Any], str, Any], ...]
    allow_aiohttp: Callable[[], None]


_installed: _Installation | None = None


def install(
    budget: Dollars, *, guard: Guard | None = None, name: str = "installed", on_refusal: OnRefusal | None = None
) -> Session:
    """Guard every httpx and httpx2 client of this process. Returns the session that pays if no other is in context.

    Args:
        budget: of that session, in dollars.
        guard: its guard; by default ``Guard.from_env()``, which ``uninstall`` closes.
        name: of that session, in reports.
        on_refusal: as for the transports. By default httpx2 responds, and httpx raises, except to vendors' SDKs, which
            retry what a transport raises and hide it.

    A client that already has a guarded transport keeps it. Warns of loaded libraries whose requests are not seen.
    Raises ``ConfigError`` if it is installed already.
    """
    global _installed  # noqa: PLW0603 - it guards the whole process
    with _LOCK:
        if _installed is not None:
            raise ConfigError("install: x402guard is installed already; call uninstall() first")
        if on_refusal not in (None, *get_args(OnRefusal)):
            raise ConfigError(f"on_refusal: {on_refusal!r} is neither 'raise' nor 'respond'")
        unseen = [library for library in unseen_libraries(loaded=True) if library.name not in _WATCHED]
        if unseen:  # before anything is changed: a warning may be an error
            listed = "; ".join(f"{library.name} ({library.hint})" for library in unseen)
            warnings.warn(f"loaded, and not seen by x402guard: {listed}", stacklevel=2)
        for past in clients_past_guard():
            warnings.warn(f"{past}; until uninstall it pays from the installed session", stacklevel=2)
        if guard is not None and not isinstance(guard, Guard):
            raise ConfigError(f"guard: {guard!r:.60} is no Guard; leave it out for Guard.from_env()")
        owned, guard = guard is None, guard or Guard.from_env()
        try:
            session = guard.session(name, budget=budget)
            allow = refuse_aiohttp(IN_CONTEXT, guard.meter)
            IN_CONTEXT.installed = session
            _installed = _Installation(guard, owned, session, _patch(IN_CONTEXT, on_refusal), allow)
            with suppress(RuntimeError):  # no thread can start: the first LLM call loads what it needs
                threading.Thread(target=guard.warm, name="x402guard-warm", daemon=True).start()
        except BaseException:
            IN_CONTEXT.installed = None
            if owned:
                guard.close()
            raise
    return session


def uninstall() -> Report | None:
    """Undo ``install``: clients send as before. Returns the session's last report; None if nothing was installed."""
    global _installed
    with _LOCK:
        installation, _installed = _installed, None
        if installation is None:
            return None
        for kind, name, original in installation.originals:
            setattr(kind, name, original)
        installation.allow_aiohttp()
        IN_CONTEXT.installed = None
    installation.session.close()
    report = installation.session.report()
    if installation.owned:
        installation.guard.close()
    return report


def _patch(payer: InContext, on_refusal: OnRefusal | None) -> tuple[tuple[type[Any], str, Any], ...]:
    import httpx2  # it takes a tenth of a second, and most programs never install

    import x402guard.httpx2 as on_httpx2

    sync, asynchronous = (
        (on_httpx.GuardedTransport, on_httpx.AsyncGuardedTransport)
        if on_refusal
        else (_MindfulOfSdks, _AsyncMindfulOfSdks)
    )
    wraps: tuple[tuple[type[Any], type[Any], OnRefusal], ...] = (
        (httpx.Client, sync, "raise"),
        (httpx.AsyncClient, asynchronous, "raise"),
        (httpx2.Client, on_httpx2.GuardedTransport, "respond"),
        (httpx2.AsyncClient, on_httpx2.AsyncGuardedTransport, "respond"),
    )
    missing = [kind for kind, _, _ in wraps if not callable(getattr(kind, _SEAM, None))]
    if missing:
        raise ConfigError(
            f"install: {missing[0].__module__} has changed; guard its clients one by one with a transport"
        )
    lowest: tuple[tuple[type[Any], str, Any], ...] = tuple(
        (kind, name, judging)
        for library in (on_httpx.HTTPX, on_httpx2.HTTPX2)
        for kind, name, judging in zip(
            library.stock,
            ("handle_request", "handle_async_request"),
            _judging(library, payer),
            strict=True,
        )
    )
    originals = tuple((kind, _SEAM, getattr(kind, _SEAM)) for kind, _, _ in wraps)
    originals += tuple((kind, name, getattr(kind, name)) for kind, name, _ in lowest)
    for kind, wrapper, default in wraps:
        setattr(kind, _SEAM, _choosing(getattr(kind, _SEAM), wrapper, payer, on_refusal or default))
    for kind, name, judging in lowest:
        setattr(kind, name, judging(getattr(kind, name)))
    return originals


def _judging(library: Library, payer: InContext) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the two wrappers of the library's own transports, which judge payments that no guard knows."""

    def blocking(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def handle_request(transport: Any, request: Any) -> Any:
            judgement = judge_leaving(payer.innermost, library, request)
            if judgement is not None:
                run(*judgement)
            return original(transport, request)

        return handle_request

    def awaited(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def handle_async_request(transport: Any, request: Any) -> Any:
            judgement = judge_leaving(payer.innermost, library, request)
            if judgement is not None:
                await run_async(*judgement)
            return await original(transport, request)

        return handle_async_request

    return blocking, awaited


def _is_of_sdk(request: httpx.Request) -> bool:
    """Return whether a request is of an SDK that retries what a transport raises; its headers show that."""
    return any(name.startswith("x-stainless-") for name in request.headers)


class _MindfulOfSdks(on_httpx.GuardedTransport):
    def answers(self, request: httpx.Request) -> bool:
        return _is_of_sdk(request)


class _AsyncMindfulOfSdks(on_httpx.AsyncGuardedTransport):
    def answers(self, request: httpx.Request) -> bool:
        return _is_of_sdk(request)


def _choosing(
    original: Callable[[Any, Any], Any], wrapper: type[Any], payer: InContext, on_refusal: OnRefusal
) -> Callable[[Any, Any], Any]:
    from x402guard.chain.rpc import RpcClient  # loaded with the first chain, or here

    def transport_for_url(client: Any, url: Any) -> Any:
        chosen = original(client, url)
        if has_guard(chosen) or isinstance(client, RpcClient):
            return chosen  # already guarded; or our own client for a chain, which pays for nothing
        return wrapper.around(payer, chosen, on_refusal)

    return transport_for_url
