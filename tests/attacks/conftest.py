"""Fixtures of the attacks."""

import pytest

from tests.support.merchant import make_guard


@pytest.fixture(params=["sync", "async"])
def mode(request):
    return request.param


@pytest.fixture
def guard():
    with make_guard() as made:
        yield made


@pytest.fixture
def ledger(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"
