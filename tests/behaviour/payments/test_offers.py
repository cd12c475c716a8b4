"""Which of the offers is taken."""

from tests.support.merchant import (
    URL,
    Shop,
    accept,
    client,
    make_guard,
    required,
    upto,
)


def test_the_best_offer_that_the_ledgers_memory_allows_is_taken():
    shop = Shop()
    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        for digit in "123":
            shop.terms = required(upto(10_000, "0x" + digit * 40))
            client(session, shop).get(f"{URL}/{digit}")
        shop.terms = required(upto(10_000, "0x" + "4" * 40), accept(20_000))
        client(session, shop).get(f"{URL}/4")
        assert shop.payments[-1][1] == 20_000
