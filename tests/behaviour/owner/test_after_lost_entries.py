"""The wallet after its server has lost entries: reset once what was signed and lost is dead, final and reconciled."""

from functools import partial
from itertools import permutations

import pytest

from tests.behaviour.reconciling.test_undecided import PAYER, START_MS, TOKEN, to_the_end
from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner, Policy, Session
from x402guard.flow.ports import Transfers, WalletTransfers
from x402guard.kernel.rows import WALLET
from x402guard.ledger.lost import ROLLED_BACK_MARK, trip_rolled_back
from x402guard.ledger.view import Scope
from x402guard.x402.reconciliation import Reconciliation, reconcile_wallet, scan_mark

SCOPE = Scope(nodes=(WALLET,), marks=(ROLLED_BACK_MARK,), durable=True)


@pytest.fixture
def ledger(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


def loses(guard, seconds_ago=0):
    """The server loses entries, and a process finds that out so many seconds ago."""
    store = guard.shell.store

    def change(view):
        trip_rolled_back(view, "another server took over")
        view.put_mark(ROLLED_BACK_MARK, {"at_ms": view.mark(ROLLED_BACK_MARK)["at_ms"] - seconds_ago * 1000})

    store.transact(SCOPE, change)
    return store.marks(*ROLLED_BACK_MARK)[WALLET]["at_ms"] // 1000


def compares(guard, block, unix, *, complete=True):
    """Reconcile: the wallet is compared up to a final block of that time."""

    def answer(question):
        return Transfers(block, (), complete, unix) if isinstance(question, WalletTransfers) else None

    flow = reconcile_wallet(guard.context, TOKEN, PAYER, START_MS // 1000, Reconciliation())
    to_the_end(flow, guard.shell.store, answer)
    return guard.shell.store.marks(*scan_mark(TOKEN, PAYER))[scan_mark(TOKEN, PAYER)[1]]["unix"]


def reset(ledger, **more):
    with Owner(ledger) as owner:
        return owner.reset("wallet", **more).state


def test_it_stays_tripped_until_a_final_block_after_the_longest_signature_was_compared(ledger):
    with make_guard(ledger) as guard:
        lost_unix = loses(guard)
        with pytest.raises(ConfigError, match=r"lost with them can be taken until \d\d:\d\d:\d\d UTC: wait, and run"):
            reset(ledger)
        lost_unix = loses(guard, 302)
        with pytest.raises(ConfigError, match="no chain was compared since: run x402guard reconcile, with the chains"):
            reset(ledger)
        assert compares(guard, 7, lost_unix + 300) == lost_unix + 300
        with pytest.raises(ConfigError, match=f"{TOKEN.network} was not compared up to a final block after"):
            reset(ledger)
        assert compares(guard, 8, lost_unix + 301) == lost_unix + 301
        assert reset(ledger) == "open"
        guard.shell.store.transact(SCOPE, partial(trip_rolled_back, reason="again"))
        with pytest.raises(ConfigError, match="can be taken until"):
            reset(ledger)


def passes(guard, seconds):
    """Let time pass: what the ledger noted was so much longer ago."""
    store, scan = guard.shell.store, scan_mark(TOKEN, PAYER)

    def change(view):
        for key in (ROLLED_BACK_MARK, scan):
            row = view.mark(key)
            if row is not None:
                gone = {"at_ms": row["at_ms"] - seconds * 1000} | (
                    {"unix": row["unix"] - seconds} if key == scan else {}
                )
                view.put_mark(key, {**row, **gone})

    store.transact(Scope(nodes=(WALLET,), marks=(ROLLED_BACK_MARK, scan), durable=True), change)


@pytest.mark.parametrize("order", sorted(set(permutations(["loses", "passes", "compares", "compares"]))), ids="-".join)
def test_in_every_order_it_opens_after_a_comparison_that_came_after_the_last_signature(ledger, order):
    with make_guard(ledger) as guard:
        loses(guard)
        dead = compared = False
        for block, what in enumerate(order, start=1):
            if what == "loses":  # another process finds out
                loses(guard)
                dead = compared = False
            elif what == "passes":
                passes(guard, 302)
                dead = True
            else:
                compares(guard, block, guard.shell.store.now_ms() // 1000)
                compared = compared or dead
            if compared:
                break
            with pytest.raises(ConfigError, match="has lost entries"):
                reset(ledger)
        if compared:
            assert reset(ledger) == "open"


def test_a_comparison_that_was_cut_short_is_none(ledger):
    with make_guard(ledger) as guard:
        lost_unix = loses(guard, 1_000)
        assert compares(guard, 7, 0, complete=False) == 0
        with pytest.raises(ConfigError, match="was not compared"):
            reset(ledger)
        assert compares(guard, 8, lost_unix + 301) == lost_unix + 301
        assert compares(guard, 9, 0, complete=False) == lost_unix + 301
        assert reset(ledger) == "open"


def test_the_longest_lifetime_of_any_process_counts(ledger):
    with make_guard(ledger, policy=Policy(max_lifetime_s=3_600)):
        pass
    with make_guard(ledger) as guard:
        lost_unix = loses(guard, 3_590)
        compares(guard, 7, lost_unix + 3_700)
        with pytest.raises(ConfigError, match="can be taken until"):
            reset(ledger)
        lost_unix = loses(guard, 3_602)
        compares(guard, 8, lost_unix + 3_601)
        assert reset(ledger) == "open"


def test_a_trip_of_the_owners_own_is_no_way_around(ledger):
    with make_guard(ledger) as guard, Owner(ledger) as owner:
        owner.trip("wallet")
        loses(guard)
        with pytest.raises(ConfigError, match="can be taken until"):
            owner.reset("wallet")


def test_a_wallet_that_signs_nothing_has_lost_no_signature(ledger):
    with make_guard(ledger, signer=None) as guard:
        loses(guard)
        assert reset(ledger) == "open"


def test_the_owner_can_do_it_at_once_and_says_so(ledger, tmp_path):
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="s") as session:
        loses(guard)
        done = typed("reset", "wallet", "--ledger", ledger, cwd=tmp_path)
        assert (done.returncode, "--unsafe-early" in done.stderr) == (2, True)
        assert typed("reset", "wallet", "--unsafe-early", "--ledger", ledger, cwd=tmp_path).returncode == 0
        assert isinstance(session, Session)
        session.charge("search", "$0.01")
        with Owner(ledger) as owner:
            owner.trip("wallet", "another matter")
            assert owner.reset("wallet").state == "open"  # it was said once
