"""Declared once for all sessions: tools, functions that can be undone, clients. Finds the session in context."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

import anyio
from msgspec import Struct

from x402guard.errors import ConfigError, SessionClosed
from x402guard.flow.drivers import run, run_async, transact_now
from x402guard.flow.surroundings import here
from x402guard.flow.threads import finish_closing
from x402guard.guard.charges import DeclaresTools
from x402guard.guard.session import Session, current_session, outlived_session
from x402guard.ledger.actions import Action, ActionState
from x402guard.policy.steps import run_of
from x402guard.tools.actions import begin, begin_staged, finish
from x402guard.tools.undo import STAGED, UNDOING, find_undo, in_own_loop, note_begun, register_undo
from x402guard.tools.undo import undo as undo_action


class InContext(DeclaresTools):
    """Pays from the innermost session in context, or else from the installed one.

    ``x402guard.tool`` is its ``tool``: a decorator for functions that are declared before there is a session.
    """

    def __init__(self) -> None:
        self.installed: Session | None = None

    def innermost(self) -> Session:
        """Return the innermost budget in context. Raises ``ConfigError`` if there is none.

        What outlives its own run gets that run: the ledger refuses what it wants to spend, and tells once.
        """
        session = current_session()
        over = outlived_session() if session is None else None
        if over is not None:
            return over
        session = session or self.installed
        if session is None:
            raise ConfigError(
                "session: none is in context; enter `with guard.session(…)` around this call, and in a plain thread wrap "
                "the function with session.bind(…)"
            )
        return session.innermost()


IN_CONTEXT: Final = InContext()

tool: Final = IN_CONTEXT.tool


P = ParamSpec("P")
R = TypeVar("R")

_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_RECEIVERS: Final = ("self", "cls")
_MOST_CHARS: Final = 65_536
_LONGEST_DELAY_S: Final = 86_400


def reversible(*, undo: str, delay_s: float | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, plain or ``async``, whose effect another function can undo.

    Each call is written to the ledger before it begins, with its arguments, and after it, with its result. If the
    session in context ends abnormally (by an exception, a trip, an exhausted budget), what it has done and not
    committed is undone, the last action first; a call that raises is undone at once. ``session.commit()`` makes what
    was done final, and so does the normal end of the outermost session. A process undoes what it has begun itself. The
    rest, such as after a crash, the owner undoes: ``x402guard journal rollback SESSION MODULE``.

    Args:
        undo: the function that undoes a call, as ``module:function``, plain or ``async``. It gets an ``Action`` with
            ``arguments``, ``result`` and ``returned``, in this process or a new one, and possibly more than once.
        delay_s: stage each call of a function that returns None: it runs after that many seconds, or at ``commit``, and
            a stop cancels it. The call returns at once. It runs with copies of its arguments.

    The decorated function raises ``ConfigError`` outside a session, for an undo that cannot be imported, and for
    arguments that JSON cannot hold: nothing has run then. For such a result, the call is undone at once. It raises
    ``SessionTripped``, ``SessionClosed``, and ``LedgerUnavailable`` as a tool does.
    """
    if not isinstance(undo, str) or not _TARGET.fullmatch(undo):
        raise ConfigError(f"undo: {undo!r:.100} is not 'module:function', such as 'mail:unsend'")
    if delay_s is not None and (type(delay_s) not in (int, float) or not 0 < delay_s <= _LONGEST_DELAY_S):
        raise ConfigError(f"delay_s: {delay_s!r:.60} is not a number of seconds, up to {_LONGEST_DELAY_S:,}")

    register_undo(undo)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        lazy = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if not callable(function) or isinstance(function, type) or lazy:
            raise ConfigError(
                f"reversible: {function!r:.100} is not a function that returns a result; decorate one that does"
            )
        kind = _Reversible(function, inspect.signature(function), undo, delay_s)
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await kind.acall(args, kwargs)

            return cast("Callable[P, R]", awaited)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast("R", kind.call(args, kwargs))

        return called

    return decorate


class _Reversible(Struct, frozen=True):
    function: Callable[..., Any]
    signature: inspect.Signature
    undo: str
    delay_s: float | None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if UNDOING.get():
            return self.function(*args, **kwargs)
        session = IN_CONTEXT.innermost()
        args, kwargs = self._kept(args, kwargs)
        action = run(begin(session.context, self._action(session, args, kwargs), self._delay_ms()), session.shell)
        if self.delay_s is None:
            return _perform(session, action, partial(self.function, *args, **kwargs))
        self._stage(session, action, partial(self.function, *args, **kwargs))
        return None

    async def acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if UNDOING.get():
            return await self.function(*args, **kwargs)
        session = IN_CONTEXT.innermost()
        args, kwargs = self._kept(args, kwargs)
        action = self._action(session, args, kwargs)
        action = await run_async(begin(session.context, action, self._delay_ms()), session.shell)
        if self.delay_s is not None:
            self._stage(session, action, partial(in_own_loop, partial(self.function, *args, **kwargs)))
            return None
        try:
            result = await self.function(*args, **kwargs)
            plain = _as_json("result", result)
        except BaseException:
            await finish_closing(partial(_undo_now, session, action))
            raise
        try:
            await finish_closing(partial(_finish, session, action, plain))
        except anyio.get_cancelled_exc_class():
            await finish_closing(partial(_undo_now, session, action))  # its caller has no result, and may ask again
            raise
        return result

    def _delay_ms(self) -> int:
        return 0 if self.delay_s is None else max(1, round(self.delay_s * 1000))

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the function gets. A staged call gets copies: its caller may change its own until then."""
        if self.delay_s is None:
            return args, kwargs
        own = 1 if args and next(iter(self.signature.parameters), "") in _RECEIVERS else 0
        bound = self.signature.bind(*args, **kwargs).arguments
        unsaid = {
            name: each.default
            for name, each in self.signature.parameters.items()
            if name not in bound and each.kind is not each.POSITIONAL_ONLY
        }
        kwargs = kwargs | {name: value for name, value in unsaid.items() if isinstance(value, (dict, list, set))}
        try:
            copied: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((args[own:], kwargs))
        except Exception as error:  # noqa: BLE001 - it is the caller's code
            raise ConfigError(
                f"arguments: they cannot be copied ({type(error).__name__}), and a staged call runs later; use text, "
                "numbers, lists and dicts"
            ) from None
        return (*args[:own], *copied[0]), copied[1]

    def _action(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Action:
        find_undo(self.undo)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        first = next(iter(bound.arguments), "")
        named = {name: value for name, value in bound.arguments.items() if name != first or name not in _RECEIVERS}
        session_id = session.context.session_id
        action = Action(
            id=f"{run_of(session_id)}/{here().random_bytes(6).hex()}",
            session=session_id,
            name=getattr(self.function, "__qualname__", type(self.function).__name__),
            undo=self.undo,
            arguments=_arguments(named),
        )
        note_begun(action)
        return action

    def _stage(self, session: Session, action: Action, call: Callable[[], Any]) -> None:
        def perform() -> None:
            begun = run(begin_staged(session.context, action), session.shell)
            if begun is not None:
                around = session.nearest_open()
                around.bind(_perform)(around, begun, call)

        STAGED.add(action.id, self.delay_s or 0.0, perform)


def _perform(session: Session, action: Action, call: Callable[[], Any]) -> Any:
    try:
        result = call()
        plain = _as_json("result", result)
    except BaseException:  # also Ctrl-C: a part of it may be done
        _undo_now(session, action)
        raise
    _finish(session, action, plain)
    return result


def _finish(session: Session, action: Action, plain: Any) -> None:
    note_begun(action, plain)
    done, late = run(finish(action, plain), session.shell)
    if late:
        was = "was" if _undo_now(session, done).state is ActionState.UNDONE else "cannot be"
        raise SessionClosed(
            f"the session ended while {action.name} ran, so it {was} undone", rule="session_closed", session=action.session,
            advice="Wait for what a session does before its end.",
        )  # fmt: skip


def _undo_now(session: Session, action: Action) -> Action:
    return session.bind(undo_action)(partial(transact_now, session.shell), action)


def _arguments(named: Mapping[str, Any]) -> Mapping[str, Any]:
    plain = {name: _as_json(f"arguments: {name}", value) for name, value in named.items()}
    if len(json.dumps(plain, ensure_ascii=False)) > _MOST_CHARS:
        raise ConfigError(f"arguments: more than {_MOST_CHARS:,} characters of JSON; pass an id of what is large")
    return plain


def _as_json(field: str, value: object) -> Any:
    """Return *value* as JSON holds it. Raises ``ConfigError`` naming *field* if JSON cannot hold it."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{field}: a {type(value).__name__} is not JSON ({str(error)[:100]}), so an undo in a new process could not have "
            "it; use text, numbers, lists and dicts"
        ) from None
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"{field}: more than {_MOST_CHARS:,} characters of JSON; use an id of what is large")
    return plain
