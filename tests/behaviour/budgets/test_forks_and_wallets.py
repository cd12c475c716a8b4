"""One ledger is of one wallet, and a forked child has no budget of its own."""

import os
import time
from contextlib import contextmanager, suppress

import pytest

from tests.support.merchant import (
    make_guard,
)
from x402guard import (
    ConfigError,
    LedgerUnavailable,
    LocalSigner,
    Policy,
)
from x402guard.stores import open_store


@contextmanager
def writing(store):
    if hasattr(store, "_line"):
        assert store._line.join(5)
        yield
        store._line.leave()
    else:
        with store._lock:
            yield


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_forked_child_has_no_budget_of_its_own(kind, tmp_path):
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'l.db'}"
    with make_guard(url) as guard:
        session = guard.session("s", budget="$1")
        with writing(guard.shell.store):  # another thread writes while we fork
            child = os.fork()
            if child == 0:
                try:
                    session.report()
                except LedgerUnavailable:
                    os._exit(7)
                os._exit(1)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 7


def test_one_ledger_is_of_one_wallet():
    store = open_store("memory://")
    make_guard(store)
    with pytest.raises(ConfigError, match="belongs to the wallet"):
        make_guard(store, signer=LocalSigner.from_key("0x" + "22" * 32))
    make_guard(store, signer=None)


CALM = Policy(loop=None, breaker=None, spike=None, bulkhead=None, velocity=None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_what_a_childs_own_guard_has_written_outlives_the_close_of_its_parents(tmp_path):
    """SQLite's list of locks is one of the process, which a fork copies: so the child locks nothing in the kernel.

    Each round closes the parent's guard at another moment; one in thirty lost what was written, and the ledger with it.
    """
    for number in range(40):
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        guard = make_guard(url, budget="$100", policy=CALM)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                session = make_guard(url, budget="$100", policy=CALM).session("c", budget="$50", id="c")
                os.write(tell, b"!")
                while True:
                    session.charge("x", "$0.01")
                    os.write(tell, b".")
            os._exit(0)
        os.close(tell)
        assert os.read(told, 1) == b"!"
        time.sleep(number / 2_000)
        guard.close()
        charged = 0
        while some := os.read(told, 65_536):
            charged += len(some)
        os.close(told)
        os.waitpid(child, 0)
        with make_guard(url, budget="$100", policy=CALM) as after:
            assert after.session("c", id="c").spent * 100 >= charged
