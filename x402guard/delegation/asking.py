"""The conversations in which one agent waits for another, asks it, reads what it is asked, and replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from x402guard.errors import ConfigError, LedgerUnavailable, SessionClosed
from x402guard.flow.context import Context
from x402guard.flow.effects import Checkpoint, Flow, Interrupted, Transact, cause, transact_anyway
from x402guard.flow.refusals import refused
from x402guard.flow.surroundings import here
from x402guard.kernel.rows import NodeKind
from x402guard.ledger.authorize import Refusal, check_open
from x402guard.ledger.inputs import (
    Input,
    Wait,
    begin_wait,
    end_wait,
    input_mark,
    input_of,
    inputs_mark,
    is_same,
    note_read,
    put_input,
    put_reply,
    senders_of,
    take_reply,
    wait_mark,
)
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.steps import run_of

REPLY_S: Final = 300.0
"""Seconds for which a question to another agent waits for its reply, by default."""

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5)  # then every half second

Look = Callable[[LedgerView], Any]


def waited(context: Context, wait: Wait, timeout_s: float | None, scope: Scope, look: Look) -> Flow[Any]:
    """Look again and again until there is something, and note in the ledger that a session waits for another.

    Raises ``TimeoutError`` after *timeout_s* seconds, ``ConfigError`` where the wait would block an event loop.
    """
    number, until_ms, blocks = 0, None, False
    mark, call = wait_mark(wait.waiter, wait.target), f"{context.instance}#{here().random_bytes(6).hex()}"
    looked = replace(scope, marks=(*scope.marks, mark))

    def change(view: LedgerView) -> tuple[Any, int]:
        found = look(view)
        (end_wait if found is not None else begin_wait)(view, wait, call)
        return found, view.now_ms

    try:
        while True:
            found, now_ms = yield Transact(looked, change)
            if found is not None:
                break
            if until_ms is None and timeout_s is not None:
                until_ms = now_ms + timeout_s * 1000
            if until_ms is not None and now_ms >= until_ms:
                break
            number += 1
            blocks = (yield Checkpoint(_PAUSES_S[min(number, len(_PAUSES_S)) - 1], others=True)) is False
            if blocks:
                break
    except (Exception, Interrupted) as error:
        try:  # also where nothing is known to be written: a cancelled task does not know
            yield from transact_anyway(Scope(marks=(mark,)), lambda view: end_wait(view, wait, call))
        except LedgerUnavailable as unwritten:
            cause(error).add_note(f"the end of the wait could not be written: {unwritten}")
        raise
    if found is None:
        yield Transact(Scope(marks=(mark,)), lambda view: end_wait(view, wait, call))
        if blocks:
            raise _blocks(wait)
        raise TimeoutError(f"{wait.target}: no {wait.awaits} after {timeout_s:g} s; it goes on, and may be asked again")
    if isinstance(found, Refusal):
        raise (yield from refused(context, found))
    return found


def _blocks(wait: Wait) -> ConfigError:
    call = "task.aresult()" if wait.awaits == "result" else "session.aask(…)"
    return ConfigError(f"{wait.awaits}: waiting for it here would block the event loop; write `await {call}`")


def ask(context: Context, to: str, payload: Any, timeout_s: float) -> Flow[Any]:
    """Ask another session of the same run, wait for its reply, and return it.

    Raises ``ConfigError`` if there is no such session, the refusal of the asking session, ``SessionClosed`` if the other
    one has ended, and ``TimeoutError`` after *timeout_s* seconds: the question stays, and the same one again waits on.
    """
    me = context.session_id

    def look(view: LedgerView) -> Input | Refusal | None:
        refusal = check_open(view, context.node_id)
        if refusal is not None:
            return refusal
        if not view.has_node(to) or view.node(to).kind is not NodeKind.SESSION or run_of(to) != run_of(me) or to == me:
            raise ConfigError(f"session: {to!r:.200} is no other session of this run; give the id of one")
        asked = input_of(view, to, me)
        if asked is not None and not asked.is_open and not asked.taken and is_same(asked.payload, payload):
            return take_reply(view, asked)
        ended = check_open(view, to)
        if ended is not None:
            return Refusal("session_closed", f"no reply can come: {ended.reason}", error=SessionClosed, advice=_GO_ON)
        put_input(view, to, me, payload)
        return None

    scope = Scope((me, context.node_id, to), marks=(input_mark(to, me), inputs_mark(to)))
    found: Input = yield from waited(context, Wait(me, to, "reply"), timeout_s, scope, look)
    return found.reply


_GO_ON: Final = "Go on without its reply."


def read_inputs(context: Context) -> Flow[list[Input]]:
    """Return the questions to this session that have no reply, and note that they are read."""
    me = context.session_id
    senders = yield Transact(Scope(marks=(inputs_mark(me),)), lambda view: senders_of(view, me))
    marks = (inputs_mark(me), *(input_mark(me, sender) for sender in senders))

    def change(view: LedgerView) -> list[Input]:
        return [found for sender in senders if (found := note_read(view, me, sender)) is not None]

    read: list[Input] = yield Transact(Scope(marks=marks), change)
    return read


def reply(context: Context, sender: str, payload: Any, number: int | None = None) -> Flow[None]:
    """Write the reply to the question of a session. Raises ``ConfigError`` if it has none that is open."""
    me = context.session_id
    scope = Scope((me,), marks=(input_mark(me, sender), inputs_mark(me)))
    yield Transact(scope, lambda view: put_reply(view, me, sender, payload, number))
