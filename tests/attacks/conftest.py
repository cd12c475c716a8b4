"""Fixtures of the attacks."""

import coincurve
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


@pytest.fixture
def key_uses(monkeypatch):
    """Every digest that any private key of this process signs."""
    uses, real = [], coincurve.PrivateKey.sign_recoverable

    def counted(self, message, *args, **kwargs):
        uses.append(message)
        return real(self, message, *args, **kwargs)

    monkeypatch.setattr(coincurve.PrivateKey, "sign_recoverable", counted)
    return uses
