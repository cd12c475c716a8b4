"""First-quote bait: cheap in a listing, dear in the offer. What was quoted is the most that is paid."""

from decimal import Decimal

import pytest

from tests.support.merchant import URL, Shop, accept, make_guard, required, upto
from tests.support.refusals import fetch
from x402guard import ConfigError, PolicyDenied

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
PLACE = "GET courts.example/*"


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1.00") as opened:
        yield opened


def refused(mode, session, shop, **more):
    with pytest.raises(PolicyDenied) as caught:
        fetch(mode, session, shop, **more)
    error = caught.value
    assert (error.rule, shop.payments, session.held, session.spent) == ("price_above_quote", [], 0, 0)
    return error


@MODES
@pytest.mark.parametrize("offer", [accept(900_000), upto(900_000)], ids=["exact", "upto"])
def test_a43_a_dearer_offer_than_the_quote_is_refused_with_both_figures(mode, session, offer):
    error = refused(mode, session, Shop(required(offer)), extensions={"max_price": "$0.0009"})
    assert (error.requested, error.available) == (Decimal("0.90"), Decimal("0.0009"))
    assert "$0.90" in str(error)
    assert "$0.0009" in str(error)


@MODES
def test_a43_an_offer_at_the_quote_is_paid_and_of_several_the_one_that_fits(mode, session):
    shop = Shop(required(accept(900_000), accept(10_000)))
    assert fetch(mode, session, shop, extensions={"max_price": "$0.01"}).status_code == 200
    assert session.spent == Decimal("0.01")


@MODES
@pytest.mark.parametrize("inside", ["session", "child", "scope"])
def test_a43_a_price_that_a_session_expects_holds_for_its_places_and_for_all_below_it(mode, session, inside):
    session.expect(PLACE, "$0.005")
    if inside == "child":
        with session.child("c", budget="$0.50") as child:
            refused(mode, child, Shop())
    elif inside == "scope":
        with session.scope("$0.50"):
            refused(mode, session, Shop())
    else:
        refused(mode, session, Shop())
    session.expect(PLACE, "$1.00")  # a later word does not loosen an earlier one
    refused(mode, session, Shop())
    elsewhere = Shop(required(url="https://other.example/a"))
    assert fetch(mode, session, elsewhere, url="https://other.example/a").status_code == 200


@MODES
def test_a43_the_lowest_of_all_quotes_counts(mode, session):
    session.expect(PLACE, "$0.50")
    session.expect("* courts.example/opinion/*", "$0.02")
    refused(mode, session, Shop(), extensions={"max_price": "$0.001"})
    assert fetch(mode, session, Shop(), extensions={"max_price": "$0.01"}).status_code == 200


@MODES
@pytest.mark.parametrize("quote", [0.01, "", "free", "-$1", "$1e9", True, b"$1", object()])
def test_a43_a_quote_that_is_no_price_is_an_error_and_nothing_is_sent(mode, session, quote):
    shop = Shop()
    with pytest.raises(ConfigError, match="max_price"):
        fetch(mode, session, shop, url=URL, extensions={"max_price": quote})
    assert shop.seen == []
    with pytest.raises(ConfigError, match="price"):
        session.expect(PLACE, quote)


@pytest.mark.parametrize("pattern", ["", "courts", "delete_*", "https://courts.example/", 7, None])
def test_a43_a_pattern_that_is_no_route_is_an_error(session, pattern):
    with pytest.raises(ConfigError, match="pattern"):
        session.expect(pattern, "$0.01")
