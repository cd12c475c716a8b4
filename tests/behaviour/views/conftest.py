"""A ledger in a file, and a world in it whose clock a test moves."""

import pytest

from tests.support.delegations import world


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


@pytest.fixture
def books(url):
    with world(url) as made:
        yield made


@pytest.fixture(autouse=True)
def _opened_again(_before_the_books):
    """Commands here open the books once more, by the clock of this machine."""
