"""The key of a ledger is changed, and the ledger goes on: on a real chain, with a process that still has the old key."""

import json
from decimal import Decimal

import httpx
import pytest
from eth_account import Account

from tests.support.command_line import typed
from x402guard import (
    ConfigError,
    Guard,
    GuardedTransport,
    LocalSigner,
    Owner,
    PaidNotDelivered,
    Policy,
    SettlementUncertain,
)

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("rotate")]

PASSWORD = {"X402GUARD_KEYSTORE_PASSWORD": "of the test only"}


@pytest.fixture
def world(net, tmp_path):
    """A keystore with a key that has money on the chain, and the ledger of the payer of before."""
    done = typed("keys", "new", "new.json", "--json", cwd=tmp_path, **PASSWORD)
    new = json.loads(done.stdout)["address"]
    net.fund(new, tokens=10_000_000)
    return net, f"sqlite:///{tmp_path / 'x402guard.db'}", new, tmp_path


def guard_of(net, url, signer, **more):
    chains = {net.network: net.rpc}
    return Guard(signer=signer, ledger=url, chains=chains, background_checks=False, policy=Policy(breaker=None), **more)


def old_key(net):
    return LocalSigner.from_key(net.payer_key)


def new_key(folder):
    return LocalSigner.from_keystore(folder / "new.json", password=PASSWORD["X402GUARD_KEYSTORE_PASSWORD"])


def buys(session, net, what="opinion"):
    url = f"{net.merchant.url}{net.merchant.routes['documents'].format(n=what)}"
    with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
        return http.get(url).extensions["x402guard"]


def test_budgets_and_history_go_on_and_the_key_of_before_signs_nothing(world):
    net, url, new, folder = world
    old = guard_of(net, url, old_key(net), budget="$1.00")
    customer = old.budget("acme", "$0.50", per="day", tz="UTC")
    session = customer.session("s", budget="$0.50", id="s")
    first = buys(session, net, "1")
    done = typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"the ledger belongs to {new} now, no more to {net.payer}" in done.stdout
    held = old.shell.store.tally()[1]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"x402guard keys rotate.*signs nothing any more; use the key of 0x"):
            buys(session, net, "2")
    assert old.shell.store.tally()[1] == held, "nothing is held for it"
    with pytest.raises(ConfigError, match="signs nothing any more"):
        guard_of(net, url, old_key(net))
    session.close()
    old.close()
    balances = [net.balance(net.payer), net.balance(new)]
    with guard_of(net, url, new_key(folder)) as guard, guard.budget("acme").session("s", budget="$0.50") as session:
        assert (str(guard.budget("acme").spent), first.amount) == ("0.10", Decimal("0.1"))
        buys(session, net, "3")
        found = guard.reconcile()
        assert (found.proven, found.unexplained, found.contradicted) == (2, [], [])
        assert str(guard.budget("acme").spent) == "0.20"
    assert [net.balance(net.payer), net.balance(new)] == [balances[0], balances[1] - 100_000]
    with Owner(url) as owner:
        assert owner.verify() == []
        assert owner.report("wallet").view.wallet == new


def test_a_transfer_out_of_either_account_is_compared(world):
    net, url, _, folder = world
    with guard_of(net, url, old_key(net), budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        buys(session, net, "1")
        # One that the ledger does not know: of another ledger with the same key.
        with guard_of(net, "memory://", old_key(net)) as other, other.session("x", budget="$1.00") as stranger:
            buys(stranger, net, "foreign")
    assert typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder).returncode == 0
    with guard_of(net, url, new_key(folder)) as guard:
        found = guard.reconcile()
        assert found.unexplained_total == 100_000_000, "the account of before is read, too"
        assert (found.proven, found.complete) == (1, True)


def test_an_open_purchase_of_the_key_of_before_is_never_signed_anew(world):
    net, url, _, folder = world
    with (
        guard_of(net, url, old_key(net), budget="$1.00") as guard,
        guard.session("s", budget="$1.00", id="s") as session,
    ):

        def lost(request):
            with httpx.Client(trust_env=False) as plain:
                answer = plain.send(request)
            if "payment-signature" in request.headers or "x-payment" in request.headers:
                raise httpx.ReadError("lost", request=request)
            answer.read()
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

        url_of = f"{net.merchant.url}{net.merchant.routes['documents'].format(n='lost')}"
        with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(lost))) as http:
            with pytest.raises((SettlementUncertain, httpx.ReadError)):
                http.get(url_of, extensions={"purchase": "the one"})
    assert typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder).returncode == 0
    before = net.balance(net.payer)
    with guard_of(net, url, new_key(folder)) as guard, guard.session("s", id="s") as session:
        with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
            with pytest.raises((SettlementUncertain, PaidNotDelivered)) as refused:
                http.get(url_of, extensions={"purchase": "the one"})
        assert refused.value.money_may_have_moved
        signed = [hold.payment().payer for hold in guard.shell.store.outstanding() if hold.intent is not None]
        assert set(signed) <= {net.payer}
    assert net.balance(net.payer) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere.json",), "nowhere.json"),
        (("x402guard.db",), "x402guard.db"),
        ((), "Missing argument"),
    ],
)
def test_what_is_no_key_changes_nothing(world, words, says):
    net, url, _, folder = world
    with guard_of(net, url, old_key(net), budget="$1.00"):
        pass
    done = typed("keys", "rotate", *words, "--ledger", url, cwd=folder)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    guard_of(net, url, old_key(net)).close()


def test_a_ledger_without_a_key_and_the_same_key_have_nothing_to_change(world):
    net, url, _, folder = world
    with guard_of(net, url, None, budget="$1.00"):
        pass
    done = typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder)
    assert (done.returncode, "no key was ever used with it" in done.stderr) == (2, True)
    guard_of(net, url, LocalSigner.from_key(Account.create().key)).close()
    assert typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder).returncode == 0
    again = typed("keys", "rotate", "new.json", "--ledger", url, cwd=folder)
    assert (again.returncode, "already" in again.stderr) == (2, True)


def test_a_key_that_comes_back_is_read_once(world):
    net, url, new, _ = world
    with guard_of(net, url, old_key(net), budget="$1.00"):
        pass
    with Owner(url) as owner:
        for address in (new, net.payer, new, net.payer):
            owner.change_key(address)
        row = owner._store.marks("wallet", "payer")["payer"]
    assert (row["address"], row["before"]) == (net.payer, [new])
    with guard_of(net, url, old_key(net)) as guard, guard.session("s", budget="$1.00") as session:
        buys(session, net, "back")
        assert guard.reconcile().unexplained == []
