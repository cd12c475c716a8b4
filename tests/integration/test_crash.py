"""kill -9 with a signature out, and two processes on one ledger."""

import signal
import textwrap
from contextlib import closing
from decimal import Decimal

import httpx
import pytest

from tests.support import processes
from tests.support.merchant import KEY, Shop
from x402guard import Guard, GuardedTransport, LocalSigner
from x402guard.stores import open_store
from x402guard.testing import Testnet

pytestmark = pytest.mark.xdist_group("crash")

DIES = textwrap.dedent("""
    import os, signal, sys
    import httpx
    from tests.support.merchant import KEY, Shop, make_guard
    from x402guard import GuardedTransport

    stage, ledger = sys.argv[1:]
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    shop = Shop(paid=die if stage == "sent" else None)
    guard = make_guard("sqlite:///" + ledger, budget="$1.00")
    if stage == "signed":
        sign = guard.shell.signer.sign
        import x402guard.x402.flow
        real = x402guard.x402.flow.payment_header
        x402guard.x402.flow.payment_header = lambda intent, signature: (real(intent, signature), die())
    session = guard.session("agent", budget="$1.00", id="run-1")
    httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(shop))).get("https://courts.example/opinion/42")
""")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", ["signed", "sent"])
def test_kill_9_after_signing_leaves_the_hold_counted_in_full(stage, tmp_path):
    ledger = tmp_path / "spend.db"
    died = processes.run(DIES, stage, ledger)
    assert died.returncode == -signal.SIGKILL
    with Guard(signer=LocalSigner.from_key(KEY), ledger=f"sqlite:///{ledger}") as guard:
        with guard.session("agent", id="run-1") as session:
            assert (session.spent, session.held, session.remaining) == (0, Decimal("0.01"), Decimal("0.99"))
            [hold] = guard.shell.store.outstanding()
            # The owner is dead, so the very same request presents the very same payment, at once.
            shop = Shop()
            with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(shop))) as http:
                response = http.get("https://courts.example/opinion/42")
            assert response.extensions["x402guard"].represented
            assert [f"{nonce:064x}" for nonce in shop.nonces] == [hold.id]
            assert (session.spent, session.held) == (Decimal("0.01"), 0)


DIES_IN_A_CROWD = textwrap.dedent("""
    import os, signal, sys, threading
    import httpx
    from tests.support.merchant import Shop, make_guard, recover_payment
    from x402guard import GuardedTransport, Policy

    moment, ledger, told = sys.argv[1:]
    seen = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    shop = Shop()

    def sell(request):
        header = request.headers.get("payment-signature")
        if header:
            os.write(seen, f"{recover_payment(header)[1]:064x}\\n".encode())
        return shop(request)

    guard = make_guard("sqlite:///" + ledger, budget="$1.00", policy=Policy(breaker=None, loop=None))
    session = guard.session("agent", budget="$1.00", id="run-1")
    store, shared = guard.shell.store, []
    commit, flush = store._commit, store._rows.flush

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def committed(batch):
        shared.append(len(batch))
        last = len(batch) > 2 and len(shared) > 20
        if last and moment == "before":
            store._rows.flush = lambda: (flush(), die())
        commit(batch)
        if last:
            die()

    store._commit = committed

    def buy(first):
        http = httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(sell)))
        for number in range(200):
            http.get(f"https://courts.example/opinion/{first + number}")

    for first in range(0, 1_600, 200):
        threading.Thread(target=buy, args=(first,)).start()
""")


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_9_in_a_commit_that_threads_share_leaves_books_that_add_up(moment, tmp_path):
    ledger, told = tmp_path / "spend.db", tmp_path / "told"
    died = processes.run(DIES_IN_A_CROWD, moment, ledger, told)
    assert died.returncode == -signal.SIGKILL, died.stderr
    with closing(open_store(f"sqlite:///{ledger}")) as store:
        assert not store.audit()
        assert {nonce for nonce in told.read_text().split() if store.hold(nonce) is None} == set()
        [node] = [node for node in store.nodes() if node.id == "run-1"]
        live = [hold.amount for hold in store.outstanding()]
        assert node.held == sum(live) <= 8 * 10_000_000
        assert node.captured % 10_000_000 == 0 < node.captured


SPENDS = textwrap.dedent("""
    import sys
    import httpx
    from x402guard import BudgetExhausted, Guard, GuardedTransport, LocalSigner

    ledger, rpc, merchant, key, start = sys.argv[1:]
    guard = Guard(signer=LocalSigner.from_key(key), ledger="sqlite:///" + ledger, chains={"eip155:84532": rpc})
    session = guard.session("fleet", id="fleet")
    http = httpx.Client(transport=GuardedTransport(session), base_url=merchant, timeout=60)
    print("ready", flush=True)
    sys.stdin.readline()
    bought = 0
    for number in range(20):
        try:
            bought += http.get(f"/cents/{int(start) + number}").status_code == 200
        except BudgetExhausted:
            pass
    print(bought, flush=True)
    http.close()
    guard.close()
""")


@pytest.mark.long
@pytest.mark.chain
def test_two_processes_share_one_budget_on_one_chain(tmp_path):
    ledger = tmp_path / "spend.db"
    with Testnet() as net:
        with Guard(ledger=f"sqlite:///{ledger}") as owner:
            session = owner.session("fleet", budget="$0.25", id="fleet")
            arguments = [str(ledger), net.rpc, net.merchant.url, net.payer_key]
            workers = [processes.start(SPENDS, *arguments, start) for start in ("0", "100")]
            try:
                for worker in workers:
                    assert worker.stdout.readline() == "ready\n"
                for worker in workers:
                    worker.stdin.write("go\n")
                    worker.stdin.flush()
                bought = [int(worker.stdout.readline()) for worker in workers]
            finally:
                for worker in workers:
                    worker.communicate(timeout=60)
            assert sum(bought) == 25
            assert session.spent == Decimal("0.25")
            assert sum(t.amount for t in net.transfers()) == 250_000
