"""What every test stands on: the same examples each time, no limit on a slow machine's patience, and every store."""

import os

import pytest
from hypothesis import settings

from tests.support.ledger import Books, Clock

# Repeatable by default: a failure that nobody can repeat is no failure report. HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

STORES = ["memory", "sqlite"]


@pytest.fixture(params=STORES)
def ledger_url(request, tmp_path):
    """A ledger URL for every store that there is; a new store is one line above."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'ledger.db'}"


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
