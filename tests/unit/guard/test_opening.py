"""Opening a guard: where a relative ledger lies, and what a guard that cannot start leaves open."""

import pytest

from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import ConfigError
from x402guard.stores import open_store


def test_a_relative_ledger_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with make_guard("sqlite:///spend.db") as guard:
        session = guard.session("s", budget="$1")
        monkeypatch.chdir(tmp_path / "sub")
        assert client(session, Shop()).get(URL).status_code == 200
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == []


def test_a_guard_that_cannot_start_leaves_a_shared_store_open():
    store = open_store("memory://")
    with make_guard(store, budget="$5") as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(ConfigError):
            make_guard(store, budget="$6")
        make_guard(store).close()
        assert client(session, Shop()).get(URL).status_code == 200
