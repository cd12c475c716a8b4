"""Row 6: the address to pay differs from the one seen before, or listed. Refused before anything is signed."""

import httpx
import pytest

from tests.support import processes
from tests.support.merchant import (
    OTHER_PAYEE,
    PAYEE,
    URL,
    Shop,
    accept,
    make_guard,
    permit2,
    required,
    required_v1,
    upto,
)
from tests.support.refusals import assert_refused, fetch
from x402guard import (
    BudgetExhausted,
    PaymentRefused,
    Policy,
    PolicyDenied,
    SettlementUncertain,
    Velocity,
    VelocityExceeded,
)

STRICT = Policy(payee_change="refuse", breaker=None)
MAKERS = {
    "exact": lambda **more: required(accept(**more)),
    "permit2": lambda **more: required(permit2(**more)),
    "upto": lambda **more: required(upto(**more)),
}


def refused(mode, session, shop, rule, **more):
    paid = list(shop.payments)
    before = (session.held, session.spent)
    with pytest.raises(PolicyDenied) as caught:
        fetch(mode, session, shop, **more)
    assert caught.value.rule == rule
    assert OTHER_PAYEE.lower() in str(caught.value).lower()
    assert shop.payments == paid
    assert (session.held, session.spent) == before


@pytest.mark.parametrize("made", MAKERS)
def test_a06_the_second_402_names_another_payee_and_nothing_is_signed(mode, ledger, made):
    shop = Shop(terms=MAKERS[made]())
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        fetch(mode, session, shop)
        shop.terms = MAKERS[made](payTo=OTHER_PAYEE)
        refused(mode, session, shop, "payee_change", url=f"{URL}/2")
        shop.terms = MAKERS[made]()
        fetch(mode, session, shop, url=f"{URL}/3")
        assert {payee.lower() for _, _, payee in shop.payments} == {PAYEE.lower()}


def test_a06_in_v1_too(mode, ledger):
    shop = Shop(terms=required_v1())
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        fetch(mode, session, shop)
        shop.terms = required_v1(accept(network="base-sepolia", payTo=OTHER_PAYEE))
        refused(mode, session, shop, "payee_change", url=f"{URL}/2")


def test_a06_another_method_path_price_or_scheme_excuses_no_other_payee(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        fetch(mode, session, shop)
        for terms, more in (
            (accept(1), {"url": "https://courts.example/elsewhere"}), (permit2(), {"url": f"{URL}?x=1"}),
            (upto(), {"method": "POST"}), (accept(), {"url": "https://COURTS.example:443/opinion/42"}),
        ):  # fmt: skip
            shop.terms = required({**terms, "payTo": OTHER_PAYEE})
            refused(mode, session, shop, "payee_change", **more)


def test_a06_the_same_address_in_other_letters_is_the_same(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        for number, payee in enumerate((PAYEE, PAYEE.lower())):
            shop.terms = required(accept(payTo=payee))
            fetch(mode, session, shop, url=f"{URL}/{number}")
        assert len(shop.payments) == 2


def test_a06_beside_a_new_payee_the_known_one_is_paid_though_dearer(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        fetch(mode, session, shop)
        shop.terms = required(accept(1, payTo=OTHER_PAYEE), accept(20_000))
        fetch(mode, session, shop, url=f"{URL}/2")
        assert [(amount, payee.lower()) for _, amount, payee in shop.payments][1:] == [(20_000, PAYEE.lower())]


def test_a06_another_origin_has_its_own_payee(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        fetch(mode, session, shop)
        shop.terms = required(accept(payTo=OTHER_PAYEE))
        fetch(mode, session, shop, url="https://archive.example/1")
        assert len(shop.payments) == 2


def test_a06_what_was_only_offered_or_refused_is_no_payee(mode, ledger):
    """An attacker who is first to be refused must not lock the honest seller out."""
    shop = Shop(terms=required(accept(900_000_000, payTo=OTHER_PAYEE)))
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied):
            fetch(mode, session, shop)
        shop.terms = required(accept())
        fetch(mode, session, shop)
        assert len(shop.payments) == 1


def test_a06_it_is_remembered_after_a_restart_and_in_another_session(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("one", budget="$1") as session:
        fetch(mode, session, shop)
    shop.terms = required(accept(payTo=OTHER_PAYEE))
    with make_guard(ledger, policy=STRICT) as guard, guard.session("two", budget="$1") as session:
        refused(mode, session, shop, "payee_change")


def test_a06_whom_an_origin_was_paid_by_is_known_when_the_owner_turns_it_on(mode, ledger):
    shop = Shop()
    with make_guard(ledger) as guard, guard.session("before", budget="$1") as session:
        fetch(mode, session, shop)
    shop.terms = required(accept(payTo=OTHER_PAYEE))
    with make_guard(ledger, policy=STRICT) as guard, guard.session("after", budget="$1") as session:
        refused(mode, session, shop, "payee_change")


BUYER = """
import sys
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import Policy, PolicyDenied
with make_guard(sys.argv[1], policy=Policy(payee_change="refuse", breaker=None)) as guard:
    with guard.session("s", budget="$1") as session:
        sys.stdin.readline()
        shop = Shop(terms=required(accept(payTo=sys.argv[2])))
        try:
            client(session, shop).get(URL)
        except PolicyDenied as error:
            print(error.rule)
        print(len(shop.payments))
"""


def test_a06_of_two_processes_with_two_payees_one_alone_pays(ledger):
    with make_guard(ledger, policy=STRICT):
        pass
    buyers = [processes.start(BUYER, ledger, payee) for payee in (PAYEE, OTHER_PAYEE)]
    ended = [buyer.communicate("go\n", timeout=90)[0].split() for buyer in buyers]
    assert sorted(ended) == [["1"], ["payee_change", "0"]]


def test_a06_a_swap_while_a_payment_is_in_doubt_signs_no_second_one(mode, ledger):
    shop = Shop(paid=httpx.ReadError("reset"))
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(SettlementUncertain):
            fetch(mode, session, shop)
        shop.terms = required(accept(payTo=OTHER_PAYEE))
        with pytest.raises((SettlementUncertain, PolicyDenied)):
            fetch(mode, session, shop)
        assert {payee.lower() for _, _, payee in shop.payments} == {PAYEE.lower()}
        assert len(shop.nonces) == 1


@pytest.mark.parametrize("payees", [{PAYEE}, [PAYEE.lower()], (PAYEE, "0x" + "1" * 40)], ids=["as is", "lower", "two"])
@pytest.mark.parametrize("made", MAKERS)
def test_a06_a_payee_that_is_not_listed_is_refused(mode, payees, made):
    with make_guard(policy=Policy(payees=payees)) as guard:
        shop = Shop(terms=MAKERS[made](payTo=OTHER_PAYEE))
        assert_refused(mode, guard, shop, rule="payees", says=["policy.payees"])
        shop.terms = MAKERS[made]()
        with guard.session("s", budget="$1") as session:
            fetch(mode, session, shop)
            assert [payee.lower() for _, _, payee in shop.payments] == [PAYEE.lower()]


def test_a06_honest_sellers_rotate_and_are_paid_unless_the_owner_says_otherwise(mode):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        for number, payee in enumerate((PAYEE, OTHER_PAYEE, PAYEE)):
            shop.terms = required(accept(payTo=payee))
            fetch(mode, session, shop, url=f"{URL}/{number}")
        assert len(shop.payments) == 3


def test_a06_but_only_so_many_new_ones_a_day(mode, ledger):
    policy = Policy(velocity=Velocity(new_payees_per_day=10), breaker=None)
    shop = Shop()
    with make_guard(ledger, policy=policy) as guard, guard.session("s", budget="$1") as session:
        for number in range(5):
            shop.terms = required(accept(payTo=f"0x{number + 1:040x}"))
            fetch(mode, session, shop, url=f"{URL}/{number}")
        shop.terms = required(accept(payTo=f"0x{9:040x}"))
        with pytest.raises(VelocityExceeded):
            fetch(mode, session, shop, url=f"{URL}/9")
        shop.terms = required(accept(payTo=f"0x{1:040x}"))
        fetch(mode, session, shop, url=f"{URL}/10")
        assert len(shop.payments) == 6


def test_a06_a_purchase_that_did_not_fit_makes_nobody_forget_the_payee(mode, ledger):
    shop = Shop()
    with make_guard(ledger, policy=STRICT) as guard, guard.session("s", budget="$0.50") as session:
        fetch(mode, session, shop)
        shop.terms = required(accept(900_000))
        with pytest.raises(BudgetExhausted):
            fetch(mode, session, shop, url=f"{URL}/2")
        shop.terms = required(accept(payTo=OTHER_PAYEE))
        refused(mode, session, shop, "payee_change", url=f"{URL}/3")


def test_a06_an_origin_that_has_named_two_payees_has_kept_none(mode, ledger):
    """The rule is for hosts that keep one; what bounds such a one is the number of its new payees."""
    shop = Shop()
    with make_guard(ledger) as guard, guard.session("before", budget="$1") as session:
        for number, payee in enumerate((PAYEE, OTHER_PAYEE)):
            shop.terms = required(accept(payTo=payee))
            fetch(mode, session, shop, url=f"{URL}/{number}")
    with make_guard(ledger, policy=STRICT) as guard, guard.session("after", budget="$1") as session:
        for number, payee in enumerate((PAYEE, OTHER_PAYEE, PAYEE)):
            shop.terms = required(accept(payTo=payee))
            fetch(mode, session, shop, url=f"{URL}/{number}/again")
        found = []
        for number in range(3, 9):
            shop.terms = required(accept(payTo="0x" + str(number) * 40))
            try:
                fetch(mode, session, shop, url=f"{URL}/{number}")
                found.append("")
            except PaymentRefused as refused:
                found.append(refused.rule)
        assert found == [""] * 5 + ["new_payees_per_day"]
