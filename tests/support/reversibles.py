"""Functions that can be undone, and what they have done: a process of a test imports them, as an owner's own would be."""

import asyncio
import os
import threading
import time

import anyio
import httpx

import x402guard

DONE = []
"""What has been done and undone, in order."""

HOME = "tests.support.reversibles"


def note(*what):
    DONE.append(what)


@x402guard.reversible(undo=f"{HOME}:unput")
def put(key, value=1):
    note("put", key)
    return {"id": key}


def unput(action):
    note("unput", action.arguments["key"], action.result, action.returned)


@x402guard.reversible(undo=f"{HOME}:unput")
def half(key):
    note("half", key)
    raise OSError("the line broke")


@x402guard.reversible(undo=f"{HOME}:stuck")
def sticky(key):
    note("sticky", key)


def stuck(action):
    note("stuck", action.arguments["key"])
    raise SystemExit("no")


@x402guard.reversible(undo=f"{HOME}:aunput")
async def aput(key):
    note("aput", key)
    await anyio.sleep(0)
    return key


@x402guard.reversible(undo=f"{HOME}:aunput")
async def acancelled(key):
    """Cancels its own task as its last act: the cancellation comes while the end of the action is written."""
    note("acancelled", key)
    asyncio.current_task().cancel()
    return key


async def aunput(action):
    await anyio.sleep(0)
    note("aunput", action.arguments["key"], action.result)


@x402guard.reversible(undo=f"{HOME}:aunput")
async def ahalf(key):
    raise OSError(key)


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=60)
def later(key):
    note("later", key)


WAITS, GO_ON = threading.Semaphore(0), threading.Semaphore(0)
"""One is given out as the staged ``waiting`` begins; it ends once the other is."""


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=60)
def waiting(key):
    note("waiting", key)
    WAITS.release()
    if not GO_ON.acquire(timeout=10):
        raise TimeoutError(key)


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=0.05)
def soon(key):
    note("soon", key)


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=60)
async def alater(key):
    await anyio.sleep(0)
    note("alater", key)


@x402guard.reversible(undo=f"{HOME}:unput")
def opaque(key):
    note("opaque", key)
    return object()


@x402guard.reversible(undo=f"{HOME}:refund")
def order(key):
    note("order", key)


def refund(action):
    x402guard.current_session().charge("refund", "$0.04")
    note("refund", action.arguments["key"])


@x402guard.reversible(undo=f"{HOME}:pay_back")
def sell(key):
    note("sell", key)


def pay_back(action):
    from tests.support.merchant import URL, Shop
    from x402guard import GuardedTransport

    session = x402guard.current_session()
    http = httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(Shop())))
    note("pay_back", http.get(URL).status_code, os.getpid() == PID)


PID = os.getpid()
WAITING = []
"""(event that says that it is inside, event that lets it go on) for the next function that waits."""


def _wait():
    inside, go_on = WAITING.pop()
    inside.set()
    assert go_on.wait(20)


@x402guard.reversible(undo=f"{HOME}:unput")
def waits(key):
    _wait()
    note("waits", key)


@x402guard.reversible(undo=f"{HOME}:only_before")
def waits_stuck(key):
    _wait()
    note("waits", key)


def only_before(action):
    if action.returned:
        raise OSError("too late")


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=0.05)
def soon_waits(key):
    _wait()
    note("soon_waits", key)


@x402guard.reversible(undo=f"{HOME}:begin_another")
def begins(key):
    note("begins", key)


def begin_another(action):
    session = x402guard.current_session()
    thread = threading.Thread(target=session.bind(_begin_another))
    thread.start()
    thread.join(20)


def _begin_another():
    try:
        put("another")
    except x402guard.SessionClosed as error:
        note(type(error).__name__)


@x402guard.reversible(undo=f"{HOME}:unput", delay_s=60)
def later_fails(key):
    raise OSError("full")


@x402guard.reversible(undo=f"{HOME}:unput")
def stops(key):
    raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[key]


@x402guard.reversible(undo=f"{HOME}:aunput")
async def asleep(key):
    await anyio.sleep(60)


@x402guard.reversible(undo=f"{HOME}:unslow")
def slow(key):
    note("slow", key)


def unslow(action):
    time.sleep(0.1)


@x402guard.reversible(undo=f"{HOME}:move_back")
def move(source, target):
    note("move", source, target)


def move_back(action):
    move(action.arguments["target"], action.arguments["source"])


@x402guard.reversible(undo=f"{HOME}:commit_all")
def commits(key):
    note("commits", key)


def commit_all(action):
    x402guard.current_session().commit()


@x402guard.reversible(undo=f"{HOME}:tell")
def tells(key):
    note("tells", key)


def tell(action):
    raise OSError("SECRET")
