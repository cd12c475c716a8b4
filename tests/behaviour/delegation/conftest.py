"""Fixtures of the tests of delegation."""

import pytest

from tests.support.delegations import world


@pytest.fixture(params=["memory", "sqlite"])
def books(request, tmp_path):
    with world("memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'spend.db'}") as made:
        yield made


@pytest.fixture
def planner(books):
    with books.guard().session("planner", budget="$1.00", id="plan") as session:
        yield session


@pytest.fixture
def workers(books):
    return books.guard()


@pytest.fixture(autouse=True)
def _opened_again(_before_the_books):
    """Commands here open the books once more, by the clock of this machine."""
