"""Row 75: money leaves the wallet past the guard, the alarm is reset, and nobody looks again."""

from functools import partial

import pytest

from tests.support.command_line import typed
from tests.support.merchant import URL, Shop, client, make_guard
from tests.support.wallets import OTHER_TX, THIEF, TX, Wallet, leaves
from x402guard import ConfigError, Owner, Policy, SessionTripped

POLICIES = pytest.mark.parametrize("policy", ["warn", "trip"])


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


def buys(guard):
    with guard.session("s", budget="$1.00") as session:
        return client(session, Shop()).get(URL).status_code


@POLICIES
def test_a75_it_is_an_alarm_each_time_until_its_owner_acknowledges_it(url, policy):
    chain = Wallet()
    with make_guard(url, chains=chain, policy=Policy(unexplained_transfer=policy)) as guard:
        assert buys(guard) == 200
        chain.outgoing += [leaves(7_000_000), leaves(5, OTHER_TX)]
        for _ in range(3):
            assert guard.reconcile().is_alarming
            if policy == "trip":
                with pytest.raises(SessionTripped, match="unexplained_transfer"):
                    buys(guard)
            with Owner(url) as owner:
                if policy == "trip":
                    owner.reset("wallet")
                assert {row.transaction for row in owner.unexplained()} == {TX, OTHER_TX}
                assert owner.report("wallet").to_dict()["settlement"] is not None
        with Owner(url, by="ann") as owner:
            for row in owner.unexplained():
                assert owner.acknowledge(row.id[:5]) == row
            assert owner.unexplained() == []
            events = [entry.facts() for entry in owner._store.tail("wallet", 0)]
        known = [facts for facts in events if facts.get("name") == "transfer_acknowledged"]
        assert {(facts["transaction"], facts["by"]) for facts in known} == {(TX, "ann"), (OTHER_TX, "ann")}
        found = guard.reconcile()
        assert (found.unexplained, found.unexplained_total, found.is_alarming) == ([], 0, False)
        assert buys(guard) == 200
        chain.outgoing.append(leaves(9, "0x" + "77" * 32))  # the next one is an alarm of its own
        assert [row["payee"] for row in guard.reconcile().unexplained] == [THIEF]


def test_a75_the_report_counts_those_that_nobody_has_acknowledged(url):
    chain = Wallet(outgoing=[leaves(7_000_000), leaves(5, OTHER_TX)])
    with make_guard(url, chains=chain) as guard:
        buys(guard)
        guard.reconcile()
    with Owner(url) as owner:
        assert "2 transfers out of the wallet, $7.000005, no payment explains" in owner.report("wallet").to_text()
        [small] = [row for row in owner.unexplained() if row.transaction == OTHER_TX]
        owner.acknowledge(small.id)
        assert "1 transfer out of the wallet, $7.00, no payment explains" in owner.report("wallet").to_text()


def test_a75_the_command_lists_and_acknowledges(url, tmp_path):
    chain = Wallet(outgoing=[leaves(7_000_000)])
    with make_guard(url, chains=chain) as guard:
        buys(guard)
        guard.reconcile()
    acknowledge = partial(typed, "acknowledge", "--ledger", url, cwd=tmp_path)
    assert TX in acknowledge().stdout
    with Owner(url) as owner:
        [row] = owner.unexplained()
        with pytest.raises(ConfigError, match="no transfer has the id ''; see x402guard acknowledge"):
            owner.acknowledge("")
    wrong = acknowledge("nothing")
    assert (wrong.returncode, "no transfer has the id 'nothing'; see x402guard acknowledge" in wrong.stderr) == (
        2,
        True,
    )
    done = acknowledge(row.id)
    assert (done.returncode, f"$7 of USDC to {THIEF}" in done.stdout or "$7.00" in done.stdout) == (0, True), (
        done.stdout
    )
    assert acknowledge().stdout == "no transfer is unexplained\n"
    assert acknowledge(row.id).returncode == 2  # it is known by now
