import pytest

from tests.books import Books, Clock

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
