"""The ledger behind a pooler that gives each transaction another connection, and answers for a server that is lost."""

import os
import shutil
import subprocess
import time

import psycopg
import pytest

from tests.support import postgres
from tests.support.ledger import Books, an_id, usd
from tests.support.postgres_way import PORT
from x402guard import LedgerUnavailable
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.stores.postgres_rows import Asked

pytestmark = pytest.mark.xdist_group("postgres")

CENT, SESSION = "$0.01", "s"
CONFIG = """
[databases]
* = host={folder} port={port}
[pgbouncer]
listen_addr =
listen_port = {own}
unix_socket_dir = {folder}
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = 3
server_login_retry = 1
"""


@pytest.fixture
def straight():
    return postgres.empty_database()


@pytest.fixture
def url(straight, way):
    program, folder = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer", postgres.server()
    if not os.access(program, os.X_OK):
        if os.environ.get("REQUIRE_POSTGRES"):
            pytest.fail("REQUIRE_POSTGRES is set, and there is no pgbouncer: apt-get install pgbouncer")
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    config, own = folder / f"pgbouncer{PORT}.ini", PORT + 1
    config.write_text(CONFIG.format(folder=folder, port=PORT, own=own))
    (folder / "users").write_text('"owner" ""\n')
    with (folder / f"pgbouncer{PORT}.log").open("w") as log:
        process = subprocess.Popen([program, str(config)], stdout=log, stderr=log, **postgres.as_user())
    try:
        started = time.monotonic()
        while not (folder / f".s.PGSQL.{own}").exists():
            assert process.poll() is None, log.name
            assert time.monotonic() - started < 30, log.name
            time.sleep(0.02)
        yield f"{straight}&port={own}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("turns", ["", "in turn"])
def test_several_stores_sell_exactly_the_budget_through_it(url, straight, turns):
    stores = [Books(url, wallet="$0.20")] + [Books(url, session=None) for _ in range(3)]
    for books in stores if turns else ():
        books.store._hot = {SESSION: time.monotonic() + 60}
    held = 0
    for number in range(40):
        held += not isinstance(stores[number % 4].hold(f"h{number}", CENT), Refusal)
    assert held == 20
    assert all(books.store._hot_of(Asked([Scope(nodes=(SESSION,))])) for books in stores) is bool(turns)
    for books in stores:
        assert books.balances("wallet")[3] == usd("$0.20")
        assert books.store.audit() == []
        books.close()
    with psycopg.connect(straight) as connection:
        schemas = "SELECT count(*) FROM pg_tables WHERE tablename = 'nodes'"
        assert connection.execute(schemas).fetchone() == (1,), (
            "a setting that a pooler drops would make a second ledger"
        )


def test_its_answer_for_a_lost_server_is_no_answer(url, straight, way):
    books, direct = Books(url, wallet="$5.00"), open_store(straight)
    way.plan = "after"
    assert not isinstance(books.hold("h1", CENT), Refusal)
    assert (way.cuts, direct.hold(an_id("h1")).amount) == (1, usd(CENT))
    way.plan = "late"
    with pytest.raises(LedgerUnavailable):
        books.hold("h2", CENT)
    way.deliver()
    time.sleep(0.2)
    assert direct.hold(an_id("h2")) is None
    assert direct.audit() == []
    direct.close()
    books.close()
