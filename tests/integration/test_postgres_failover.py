"""A second server takes over. What the first one had not sent it is gone, so real money asks for a synchronous one."""

import re
import subprocess
import sys
import time

import httpx
import pytest

from tests.support import postgres
from tests.support.merchant import accept, client, make_guard, offer_response, required
from x402guard import LedgerUnavailable, Owner, PaymentRefused, Policy

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.timeout(120)]

URL = "https://courts.example/opinion/42"
REAL = "eip155:8453"
OFFER = accept(
    network=REAL, asset="0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913", extra={"name": "USD Coin", "version": "2"}
)


def sells(request):
    paid = "payment-signature" in request.headers
    return httpx.Response(200, text="sold") if paid else offer_response(required(OFFER))


@pytest.fixture
def two_servers():
    """(the folder of a primary server, that of its streaming replica)."""
    if postgres.programs() is None:
        postgres.server()
    with postgres.a_folder() as first, postgres.a_folder() as second:
        postgres.make_cluster(first)
        postgres.start(first)
        try:
            postgres.copy(first, second)
            postgres.start(second)
            yield first, second
        finally:
            for folder in (second, first):
                if (folder / "data/postmaster.pid").exists():
                    postgres.stop(folder, "immediate")


def asked(url, **more):
    """What a guard says to an offer of real money."""
    policy = Policy(networks={REAL}, breaker=None)
    with make_guard(url, policy=policy, unsafe_no_chain=True, **more) as guard:
        with guard.session("s", budget="$1.00") as session, client(session, sells) as http:
            try:
                return http.get(URL).status_code
            except PaymentRefused as refused:
                return refused.rule


def test_real_money_asks_for_a_synchronous_replica_and_a_lone_server_has_nothing_to_lose(two_servers):
    first, second = two_servers
    url = postgres.url(first, "postgres")
    postgres.say(first, "SELECT count(*) FROM pg_stat_replication", until=(1,))
    assert asked(url) == "async_failover"
    assert asked(url, unsafe_async_failover=True) == 200
    postgres.say(first, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    postgres.say(first, "SELECT pg_reload_conf()")
    postgres.say(first, "SELECT current_setting('synchronous_standby_names')", until=("*",))
    assert asked(url) == 200
    postgres.say(first, "ALTER SYSTEM RESET synchronous_standby_names")
    postgres.say(first, "SELECT pg_reload_conf()")
    postgres.stop(second)
    postgres.say(first, "SELECT count(*) FROM pg_stat_replication", until=(0,))
    assert asked(url) == 200


def test_a_replica_serves_reports_and_takes_no_payment(two_servers):
    first, second = two_servers
    with make_guard(postgres.url(first, "postgres")) as guard, guard.session("s", budget="$1.00") as session:
        session.charge("search", "$0.10")
    theirs = postgres.url(second, "postgres")
    postgres.say(second, "SELECT count(*) > 3 FROM x402guard.entries", until=(True,))
    done = subprocess.run(
        [sys.executable, "-m", "x402guard", "report", "s", "--ledger", theirs],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, "0.10" in done.stdout) == (0, True), done.stderr
    assert re.fullmatch(r"read from a replica, as of 2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", done.stderr)
    with Owner(theirs, read_only=True) as owner, Owner(postgres.url(first, "postgres")) as there:
        assert abs(owner.as_of - time.time()) < 60
        assert there.as_of is None
        assert owner.verify() == []
    with pytest.raises(Exception, match="read-only transaction") as caught:
        make_guard(theirs)
    assert "primary server" in caught.value.advice


def test_a_replica_that_takes_over_without_the_newest_payments_is_found_out_before_the_next_one(two_servers):
    """$1.00 less than all: without that, the lost payments could be paid a second time within the limit."""
    first, second = two_servers
    url = f"postgresql://owner@/postgres?host={first},{second}&target_session_attrs=read-write"
    with (
        pytest.raises(LedgerUnavailable, match="has lost the newest entries"),  # nor can the end be written
        make_guard(url, unsafe_async_failover=True) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        session.charge("search", "$0.10")
        postgres.say(second, "SELECT count(*) > 3 FROM x402guard.entries", until=(True,))
        postgres.stop(second)
        session.charge("search", "$0.60")
        postgres.stop(first, "immediate")
        postgres.start(second)
        postgres.say(second, "SELECT pg_promote()")
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries") as caught:
            session.charge("search", "$0.60")
        assert "end the agents" in str(caught.value)
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            session.charge("search", "$0.10")
