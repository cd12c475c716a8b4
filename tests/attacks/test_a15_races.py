"""Row 15: whoever asks at the same instant, what is signed never exceeds the budget, and reaches it."""

import json
import threading
from decimal import Decimal

import httpx
import pytest

from tests.support import processes
from tests.support.chain import MockChain
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from tests.support.refusals import fetch
from tests.support.signers import SpySigner
from x402guard import BudgetExhausted, Policy
from x402guard.ledger.findings import Unused

THREADS = 64
PRICE = 10_000


def _rush(payers, shop, count=THREADS):
    """One request a thread, all let go together; returns how many were refused."""
    barrier, refused, failed = threading.Barrier(count), [], []

    def buy(number):
        try:
            with client(payers[number % len(payers)], shop) as http:
                barrier.wait(30)
                http.get(f"{URL}/{number}")
        except BudgetExhausted:
            refused.append(number)
        except BaseException as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=buy, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    return len(refused)


@pytest.mark.parametrize("where", ["memory", "sqlite"])
@pytest.mark.parametrize("answer", ["receipt", "lost"])
def test_a15_64_threads_spend_exactly_the_budget(where, answer, ledger):
    shop = Shop(paid=None if answer == "receipt" else lambda *_: httpx.Response(503))
    with make_guard("memory://" if where == "memory" else ledger, policy=Policy(loop=None, breaker=None)) as guard:
        with guard.session("s", budget="$0.20") as session:
            refused = _rush([session], shop)
            assert session.held + session.spent == Decimal("0.20")
            assert session.remaining == 0
    assert shop.signed == 20 * PRICE
    assert (len(shop.nonces), len(shop.payments), refused) == (20, 20, 44)


def test_a15_siblings_never_spend_one_dollar_twice(guard):
    shop = Shop()
    with guard.session("parent", budget="$0.16") as parent:
        children = [parent.child(f"c{n}", budget="$0.10") for n in range(4)]
        refused = _rush(children, shop)
        assert parent.held + parent.spent == Decimal("0.16")
    assert (shop.signed, refused) == (16 * PRICE, 48)


def test_a15_odd_prices_stay_below_the_budget(guard):
    shop = Shop(terms=lambda r: required(accept(7_001 + 13 * int(r.url.path.rsplit("/", 1)[1]))))
    with guard.session("s", budget="$0.10") as session:
        _rush([session], shop)
        assert session.held + session.spent == Decimal(shop.signed) / 10**6
    assert 0 < shop.signed <= 100_000


def test_a15_processes_and_their_threads_share_one_sqlite_file(ledger):
    with make_guard(ledger, budget="$0.30") as guard, guard.session("fleet", budget="$0.20", id="fleet"):
        children = [
            processes.start("tests.support.buying_fleet", ledger, number, 12, module=True, strict=True)
            for number in range(3)
        ]
        try:
            assert [child.stdout.readline().strip() for child in children] == ["ready"] * 3
            for child in children:
                child.stdin.write("go\n")
                child.stdin.flush()
            ended = [child.communicate(timeout=60) for child in children]
            assert [child.returncode for child in children] == [0, 0, 0], [said for _, said in ended]
            bought = [json.loads(printed) for printed, _ in ended]
        finally:
            for child in children:
                child.kill()
                child.communicate()
        nonces = [nonce for each in bought for nonce in each["nonces"]]
        assert len(nonces) == len(set(nonces)) == 20
        assert sum(each["refused"] for each in bought) == 16
        assert [each["failed"] for each in bought] == [[], [], []]
        with guard.session("fleet", id="fleet") as session:
            assert (session.held + session.spent, session.remaining) == (Decimal("0.20"), 0)


def test_a15_a_sweep_between_hold_and_signature_does_not_spoil_the_payment(mode):
    """Another thread's chain read touches the row of a hold that is about to be signed; nothing it pays has changed."""
    spy = SpySigner()
    with make_guard(signer=spy, chains=MockChain(finding=Unused(0))) as guard:
        spy.before = lambda _: guard.sweep()
        with guard.session("s", budget="$1.00") as session:
            shop = Shop()
            assert fetch(mode, session, shop).status_code == 200
    assert len(shop.payments) == 1
