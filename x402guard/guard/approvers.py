"""Approvers: a function, a person at the terminal, or people who answer in another process through the ledger."""

from __future__ import annotations

import inspect
import io
import json
import os
import pwd
import select
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, TextIO, cast

import anyio

from x402guard.errors import ConfigError
from x402guard.flow.drivers import ABANDONED
from x402guard.flow.shell import Approver
from x402guard.frozen import replace
from x402guard.ledger.questions import Question, answer_of, approval_mark, put_question, take_answer
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Scope
from x402guard.policy.approvals import NO_ANSWER, Answer, ApprovalRequest, count_people
from x402guard.policy.steps import run_of
from x402guard.views.words import printable

_POLL_S: Final = 0.1
_SHOWN: Final = 4_000
_LEAST_SHOWN: Final = 100

Callback = Callable[[ApprovalRequest], object]


def operating_user() -> str:
    """Return the name of the operating system's user. The environment is not trusted."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


class _Asked:
    """A function, plain or ``async``: True is a yes, an ``Answer`` names the approver, and anything else is a no."""

    def __init__(self, function: Callback, name: str = "") -> None:
        self._function = function
        self._name = name or getattr(function, "__qualname__", type(function).__name__)

    def ask(self, request: ApprovalRequest) -> Answer:
        said = self._function(request)
        if inspect.isawaitable(said):
            said = Context().run(anyio.run, _awaited, said)  # an empty context: this thread has no event loop
        return said if isinstance(said, Answer) else Answer(said is True, (self._name,))


async def _awaited(said: Awaitable[object]) -> object:
    return await said


class _Several:
    """Several approvers, asked one after the other until one says no or enough people have said yes."""

    def __init__(self, approvers: Sequence[Approver]) -> None:
        self._approvers = approvers

    def ask(self, request: ApprovalRequest) -> Answer:
        people: tuple[str, ...] = ()
        for approver in self._approvers:
            missing = max(1, request.approvers - count_people(people))
            answer = approver.ask(replace(request, approvers=missing))
            if answer.allowed is not True:
                return replace(answer, allowed=False)
            people += answer.by
            if count_people(people) >= request.approvers:
                return Answer(allowed=True, by=people, reason=answer.reason)
        return Answer.no(f"{request.approvers} different approvers have to allow it", people)


class TerminalApprover:
    """Asks the user at the terminal, one question at a time. Without a terminal the answer is no.

    Args:
        terminal: where to ask, open for reading and writing; by default the process's own terminal.
    """

    def __init__(self, terminal: TextIO | None = None) -> None:
        self._terminal = terminal

    def ask(self, request: ApprovalRequest) -> Answer:
        """See ``Approver.ask``."""
        until_s = time.monotonic() + request.timeout_s
        if not _TERMINAL.acquire(timeout=request.timeout_s):
            return Answer.no(NO_ANSWER)
        try:
            if self._terminal is not None:
                return self._asked(self._terminal, request, until_s)
            with _own_terminal() as terminal:
                return self._asked(terminal, request, until_s)
        except OSError as error:
            return Answer.no(f"there is no terminal to ask at: {error.strerror or error}")
        finally:
            _TERMINAL.release()

    def _asked(self, terminal: TextIO, request: ApprovalRequest, until_s: float) -> Answer:
        with suppress(termios.error, OSError, ValueError):  # input from before the question is no answer
            termios.tcflush(terminal.fileno(), termios.TCIFLUSH)
        terminal.write(f"\n{describe(request)}\nAllow it, once? [y/N] ")
        terminal.flush()
        if ABANDONED.get()() or not _is_answered(terminal, max(0.0, until_s - time.monotonic())):
            terminal.write("\ntoo late\n")
            return Answer.no(NO_ANSWER)
        return Answer(terminal.readline().strip().lower() in ("y", "yes"), (operating_user(),))


_TERMINAL: Final = threading.Lock()  # one question at a time, so that it is clear which one an answer is to


def _own_terminal() -> TextIO:
    descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    return io.TextIOWrapper(io.FileIO(descriptor, "r+"), encoding="utf-8", write_through=True)  # as getpass does


def _is_answered(terminal: TextIO, timeout_s: float) -> bool:
    """Wait for a line. A terminal that is not a file of the system is read without waiting."""
    try:
        ready, _, _ = select.select([terminal.fileno()], [], [], timeout_s)
    except (OSError, ValueError):
        return True
    return bool(ready)


def _written(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text: every name, and as much of each value as fits."""
    each = max(_LEAST_SHOWN, _SHOWN // max(1, len(arguments)))
    written = []
    for name, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        written.append(f"{name}={text}" if len(text) <= each else f"{name}={text[:each]}… ({len(text):,} characters)")
    return ", ".join(written) or "nothing"


def describe(request: ApprovalRequest) -> str:
    """Return a question as text that is safe to print: an agent's texts may contain control characters."""
    whom = f" to {request.payee} on {request.network}" if request.payee else ""
    shown = "" if request.arguments is None else f" with {_written(request.arguments)}"
    if request.query:
        shown += f" with the query {json.dumps(request.query, ensure_ascii=False)}"
    if request.body:
        shown += f" and the body {json.dumps(request.body, ensure_ascii=False)}"
    so_far = f" ${request.spent} are spent so far." if request.spent else ""
    waits = f" Waiting too: {'; '.join(request.waiting)}." if request.waiting else ""
    return printable(
        f"x402guard: session {request.session} wants {request.what}{shown} for ${request.amount}{whom}. {request.reason}."
        f"{so_far}{waits}"
    )


class QueueApprover:
    """Writes the question into the ledger. ``x402guard approvals`` answers it from another process.

    The arguments of a tool are kept with the question and leave the ledger when it ends.
    """

    def __init__(self, store: LedgerStore, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self._pause = store, pause

    def ask(self, request: ApprovalRequest) -> Answer:
        """See ``Approver.ask``."""
        question = Question(
            id=request.id,
            session=request.session,
            what=request.what,
            words=describe(request),
            approvers=request.approvers,
            timeout_s=request.timeout_s,
        )
        scope = Scope(marks=(approval_mark(request.id),), durable=True)
        self._store.transact(scope, lambda view: put_question(view, question))
        give_up = time.monotonic() + request.timeout_s
        while time.monotonic() < give_up:
            if ABANDONED.get()():
                return Answer.no("the request was abandoned")  # an identical request takes the answer
            row: Mapping[str, Any] = self._store.marks("approval", request.id).get(request.id, {})
            if answer_of(row, self._store.now_ms()) is not None:
                break
            self._pause(_POLL_S)
        allowed, people, why = self._store.transact(scope, lambda view: take_answer(view, request.id))
        return Answer(allowed, people, why)


_MOST_OPEN: Final = 20
_SHARE: Final = 2
_MOST_SHARES: Final = 40


class _Limited:
    """Passes on few questions at a time: who is asked a hundred times at once says yes to get rid of them.

    At most twenty are open, and of a run that has fewer than two open, at most forty: twenty of one run stop no other one.
    """

    def __init__(self, approver: Approver) -> None:
        self._approver = approver
        self._open: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def ask(self, request: ApprovalRequest) -> Answer:
        """See ``Approver.ask``."""
        question = run_of(request.session), f"{request.what} for ${request.amount}"
        with self._lock:
            mine = sum(run == question[0] for run, _ in self._open)
            if len(self._open) >= (_MOST_OPEN if mine >= _SHARE else _MOST_SHARES):
                return Answer.no(f"{len(self._open)} other questions are open already")
            waiting = tuple(words for _, words in self._open)
            self._open.append(question)
        try:
            return self._approver.ask(replace(request, waiting=waiting))
        finally:
            with self._lock:
                self._open.remove(question)


def limited_approver(given: object, store: LedgerStore) -> Approver | None:
    """Return the approver of an argument, with few questions open at a time. Raises ``ConfigError``."""
    approver = as_approver(given, store)
    return None if approver is None else _Limited(approver)


def as_approver(given: object, store: LedgerStore | None = None) -> Approver | None:
    """Return the approver of an argument. Raises ``ConfigError`` naming ``approver``."""
    if given is None:
        return None
    if given == "terminal":
        return TerminalApprover()
    if given == "queue":
        return None if store is None else QueueApprover(store)
    if isinstance(given, (list, tuple)) and given:
        return _Several([_one(each, store) for each in given])
    ask = getattr(given, "ask", None)
    if callable(ask) and not isinstance(given, type):
        return _Asked(ask, type(given).__name__) if inspect.iscoroutinefunction(ask) else cast("Approver", given)
    if not callable(given) or isinstance(given, type):
        raise ConfigError(
            f"approver: {given!r} is not 'terminal', 'queue', a function of a request, or a list of these"
        )
    return _Asked(given)


def _one(given: object, store: LedgerStore | None) -> Approver:
    approver = as_approver(given, store)
    if approver is None and given is None:
        raise ConfigError("approver: None in a list is no approver; leave it out")
    return approver or TerminalApprover()  # without a store the argument is only checked
