"""While 32 threads pay, every report is of one moment: its evidence is what is spent, its parts are the limit."""

import threading

import pytest

from tests.support.merchant import Shop, client, make_guard
from x402guard import Owner, Policy

THREADS, EACH = 32, 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("store", ["memory", "sqlite", "another process's file"])
def test_reports_add_up_while_32_threads_pay(store, tmp_path):
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'spend.db'}"
    policy = Policy(loop=None, spike=None, breaker=None, velocity=None)
    with make_guard(url, policy=policy) as guard, guard.session("run", budget="$50.00", id="run") as session:
        done, failures = threading.Event(), []

        def buy(number):
            try:
                with client(session, Shop()) as http:
                    for turn in range(EACH):
                        http.get(f"https://courts.example/{number}/{turn}")
                        session.charge("serp", "$0.01")
            except Exception as error:
                failures.append(error)

        buyers = [threading.Thread(target=buy, args=(number,)) for number in range(THREADS)]
        waiter = threading.Thread(target=lambda: ([buyer.join() for buyer in buyers], done.set()))
        for thread in (*buyers, waiter):
            thread.start()
        looks = 0
        while not done.is_set() or looks < 3:
            if store.startswith("another"):
                with Owner(url, read_only=True, verified=False) as owner:
                    view = owner.report("run").view
                    captured = sum(row.nanos for row in owner.captures("run"))
                    now = owner.live()
                    assert view.sums.spent <= captured <= now.spent  # each of its own moment, one after another
                    assert sum(each.spent for each in now.sessions) == now.spent
                    assert sum(each.out for each in now.sessions) == now.out
                    assert sum(row.amount for row in now.outstanding) == now.out
            else:
                view = session.report().view
            assert view.gap == 0
            assert view.spent + view.sums.out + view.left == view.limit
            assert sum(row.sums.total for row in view.kinds) == view.sums.total
            assert sum(row.amount for row in view.outstanding) == view.sums.out or view.outstanding_count > 200
            looks += 1
        waiter.join()
        assert failures == []
        view = session.report().view
        assert (view.sums.claimed, view.sums.priced) == (THREADS * EACH * 10**7, THREADS * EACH * 10**7)
        assert view.sums.out == 0
