"""Fixtures of the tests of actions that can be undone."""

import pytest

from tests.support.merchant import make_guard
from tests.support.reversibles import DONE
from x402guard import Policy


@pytest.fixture
def _nothing_done():
    DONE.clear()
    yield
    DONE.clear()


@pytest.fixture(params=["memory", "sqlite"])
def guard(request, tmp_path):
    ledger = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'spend.db'}"
    with make_guard(ledger, policy=Policy(loop=None, breaker=None)) as made:
        yield made
