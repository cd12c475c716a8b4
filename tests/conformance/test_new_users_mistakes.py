"""What a new user does wrong in the first ten minutes, and the message: the setting, the value, what is wrong, the fix."""

import anyio
import httpx
import httpx2
import pytest

import x402guard.httpx2
from tests.support.merchant import Shop, accept, client, make_guard, required
from x402guard import (
    AsyncGuardedTransport,
    BudgetExhausted,
    ConfigError,
    GuardedTransport,
    LedgerUnavailable,
    ProtocolError,
)


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        yield session


BLOCKING = [(httpx, GuardedTransport), (httpx2, x402guard.httpx2.GuardedTransport)]
AWAITED = [(httpx, AsyncGuardedTransport), (httpx2, x402guard.httpx2.AsyncGuardedTransport)]


@pytest.mark.parametrize(("library", "transport"), BLOCKING, ids=["httpx", "httpx2"])
@pytest.mark.parametrize("block", [True, False])
def test_a_blocking_transport_in_an_asynchronous_client(session, library, transport, block):
    async def go():
        http = library.AsyncClient(transport=transport(session))
        if block:
            async with http:
                await http.get("https://shop.example/x")
        try:
            await http.get("https://shop.example/x")
        finally:
            await http.aclose()

    with pytest.raises(
        ConfigError, match="transport: GuardedTransport is for blocking clients; use AsyncGuardedTransport"
    ):
        anyio.run(go)


@pytest.mark.parametrize(("library", "transport"), AWAITED, ids=["httpx", "httpx2"])
@pytest.mark.parametrize("block", [True, False])
def test_an_asynchronous_transport_in_a_blocking_client(session, library, transport, block):
    def go():
        http = library.Client(transport=transport(session))
        if block:
            with http:
                http.get("https://shop.example/x")
        try:
            http.get("https://shop.example/x")
        finally:
            http.close()

    with pytest.raises(
        ConfigError, match="transport: AsyncGuardedTransport is for asynchronous clients; use GuardedTransport"
    ):
        go()


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        (required(accept(amount="0.01")), 'amount: it is not a whole number of atomic units as text, such as "10000"'),
        (required(accept(payTo=5)), "payTo: it is not text"),
        (required(accept(maxTimeoutSeconds="1m")), "maxTimeoutSeconds: it is not a whole number"),
        ({**required(accept()), "accepts": {}}, "accepts: it is not a list"),
        ({**required(accept()), "x402Version": 3}, "x402Version: it is neither 1 nor 2"),
    ],
)
def test_a_seller_whose_terms_are_wrong(session, terms, says):
    with pytest.raises(ProtocolError) as caught:
        client(session, Shop(terms)).get("https://shop.example/x")
    assert says in str(caught.value)
    assert session.held == 0


def test_a_guard_that_is_used_after_its_block():
    with make_guard() as guard:
        session = guard.session("s", budget="$1.00")
    with pytest.raises(LedgerUnavailable, match="closed, with its guard: the block of `with Guard") as caught:
        client(session, Shop()).get("https://shop.example/x")
    assert "inside the block" in caught.value.advice


def test_a_budget_or_a_session_without_an_amount():
    with make_guard() as guard:
        with pytest.raises(
            ConfigError, match=r"limit: the budget 'team' is new; give it a limit: guard\.budget\('team', "
        ):
            guard.budget("team")
        with pytest.raises(
            ConfigError, match=r"budget: there is no session 'run' to resume, and a new one needs budget="
        ):
            guard.session("s", id="run")


def test_a_budget_that_is_used_up_says_what_is_left_and_where_it_went(session):
    session.charge("serp", "$0.95")
    with pytest.raises(BudgetExhausted, match=r"session 's' has \$0\.05 left of \$1\.00 \(\$0\.95 spent\)"):
        session.charge("serp", "$0.10")
