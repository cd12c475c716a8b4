"""What every test stands on: the same examples each time, no limit on a slow machine's patience, and every store."""

import asyncio
import gc
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

import eth_account  # noqa: F401 - it raises the limit of recursion as it loads, which hypothesis would take for a test's doing
import pytest
import uvicorn
from hypothesis import settings

from tests.support import postgres
from tests.support.examples import PROFILE
from tests.support.files import is_in_make_test
from tests.support.ledger import Books, Clock
from x402guard.guard import notices
from x402guard.guard import settings as guard_settings
from x402guard.testing.both_ways import both_ways

settings.load_profile(PROFILE)

BOTH_WAYS = both_ways()
BOTH_WAYS.__enter__()  # for all tests: an ordinary step is decided both ways, and a difference fails the test

STORES = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.long)]


class _Sooner:
    """What uvicorn takes for asyncio: with ten times as many looks a second whether it may stop. Hundreds of servers are stopped."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds):
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _Sooner()


@pytest.fixture(autouse=True)
def no_key_read_before(monkeypatch):
    """A process that has read a key from its settings keeps it for its next guard; a test begins as a new process."""
    monkeypatch.setattr(guard_settings, "_READ_BEFORE", {})


@pytest.fixture(autouse=True)
def nothing_kept_by_other_tests(monkeypatch, tmp_path_factory):
    """Tests on a server share a ledger that is emptied between them, which is what a server that loses entries looks like."""
    state = tmp_path_factory.getbasetemp() / "state" / uuid4().hex
    monkeypatch.setenv("XDG_STATE_HOME", str(state))


@pytest.fixture
def inline_notices(monkeypatch):
    """The owner's function is called by the thread that found the notice, so that a test need not wait for it."""
    queued = notices.Background.put

    def put(lane, notice):
        (notices.Background.attempt if lane.name == "on_notice" else queued)(lane, notice)

    monkeypatch.setattr(notices.Background, "put", put)


# Whole files go to one worker, which then starts a module's chain once; the slowest first, so that both end together.
FIRST = ("integration", "attacks", "property", "behaviour")


MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder in it that is its user's alone
ROOM = 2**30


MADE = []
BEHAVIOUR = Path(__file__).parent / "behaviour"


def pytest_configure():
    """Ledgers of tests lie in memory where there is room: they sync thousands of times, and what a sync keeps is shown by other means."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

    if postgres.make_folder():
        MADE.append(True)


def pytest_unconfigure():
    if MADE:
        postgres.remove_folder()


def pytest_ignore_collect(collection_path, config):
    """`make test` does not load the files of which it runs nothing: many load a vendor's SDK."""
    if config.option.markexpr == "not long" and collection_path.parent.name == "integration":
        return (collection_path.stem.startswith("test_") and not is_in_make_test(collection_path)) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        given = getattr(item, "callspec", None)
        if item.path.is_relative_to(BEHAVIOUR) and given is not None and given.params.get("ledger_url") == "postgres":
            item.add_marker(pytest.mark.fleet)
    _leave_one_in_n(items)
    # With workers, group by file whatever names no group of its own.
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_order)


def _leave_one_in_n(items):
    """Of a test that names ``one_in(n)``, leave each n-th case to `make test`, and the others to `make test-long`.

    Of one that is long, leave each n-th case to `make test-long`, and the others to `make test-large`.
    """
    seen = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % marker.args[0]:
                item.add_marker(pytest.mark.long if item.get_closest_marker("long") is None else pytest.mark.large)
            seen[test] += 1


def _order(item):
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Refuse a run whose groups have no effect: tests that share a server, its roles or a chain would disturb each other."""
    if node.config.option.dist == "loadgroup" and not all("@" in name.rpartition("]")[2] for name in ids):
        pytest.exit(f"pytest {pytest.__version__} and this pytest-xdist do not group tests; see pyproject.toml", 4)


def pytest_collection_finish():
    """What is loaded by now stays to the end: no garbage collection need look at it again, and fewer need look at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """Ctrl-C interrupts, though a shell has what it runs in the background ignore it, with all that this starts."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def _before_the_books(monkeypatch):
    """The clock of this machine stays behind those of the tests' books, which stand at a date that will come."""
    ago_ms = 10 * 365 * 86_400_000
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", lambda: time.time_ns() // 10**6 - ago_ms)


@pytest.fixture(params=STORES)
def ledger_url(request, tmp_path):
    """A ledger URL for every store that there is; a new store is one line above."""
    urls = {"memory": lambda: "memory://", "sqlite": lambda: f"sqlite:///{tmp_path / 'ledger.db'}"}
    return urls.get(request.param, postgres.empty_database)()


@pytest.fixture
def url():
    """The URL of an empty ledger in PostgreSQL."""
    return postgres.empty_database()


@pytest.fixture
def make_books(ledger_url):
    """Opens the same ledger, any number of times, on one clock."""
    opened, clock = [], Clock()

    def make(**options):
        books = Books(ledger_url, clock=options.pop("clock", clock), **options)
        opened.append(books)
        return books

    yield make
    for books in opened:
        books.close()
