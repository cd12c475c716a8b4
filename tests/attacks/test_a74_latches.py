"""Row 74: what one seller did once is held against another one for ever, and nobody sees why."""

import json
from contextlib import closing
from functools import partial

import httpx
import pytest

from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import Shop, accept, client, make_guard, required, required_v1, upto
from x402guard import Approvals, Breaker, ConfigError, Owner, PaymentRefused, Policy, Velocity
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.views.live import live_of
from x402guard.views.live_page import Choice, live_page

FIRST, SECOND = "https://c0urts.example/x", "https://courts.example/x"
DAY = 86_400
PAYEES = [f"0x{number:040x}" for number in range(1, 40)]


class Ledger:
    """A ledger on a clock that a test turns. Each purchase is made by a guard of its own, in a run of its own."""

    def __init__(self, url, policy):
        self.url, self.policy, self.clock = url, policy, Clock()

    def buy(self, url, *terms, run="run", times=1, paid=None):
        """Buy at a URL, with each of *terms* after the other; return the rule of the refusal, or None."""
        store = open_store(self.url, clock_ms=self.clock, steady_ms=self.clock)
        try:
            with make_guard(store, policy=self.policy) as guard, guard.session(run, id=run, budget="$5.00") as session:
                for number in range(times):
                    for offer in terms or [accept()]:
                        shop = Shop(offer if "x402Version" in offer else required(offer, url=url), paid=paid)
                        client(session, shop).get(f"{url}?{number}")
        except PaymentRefused as error:
            return error.rule
        finally:
            store.close()
        return None

    def owner(self):
        return Owner(self.url)


@pytest.fixture
def ledger(tmp_path):
    return lambda **policy: Ledger(f"sqlite:///{tmp_path / 'spend.db'}", Policy(**{"breaker": None, **policy}))


def failing(request, shop):
    return httpx.Response(500)


def look_alike(books):
    assert books.buy(FIRST) is None
    return lambda run: books.buy(SECOND, run=run)


def downgraded(books):
    assert books.buy(SECOND) is None
    return lambda run: books.buy(SECOND, required_v1(url=SECOND), run=run)


def another_payee(books):
    assert books.buy(SECOND) is None
    return lambda run: books.buy(SECOND, accept(payTo=PAYEES[7]), run=run)


def fourth_facilitator(books):
    for number in range(3):
        assert books.buy(SECOND, upto(10_000, facilitator=PAYEES[number]), run=f"run{number}") is None
    return lambda run: books.buy(SECOND, upto(10_000, facilitator=PAYEES[9]), run=run)


def new_payees(books):
    for number in range(2):
        assert books.buy(f"https://shop-{PAYEES[number][-1]}.example/x", accept(payTo=PAYEES[number])) is None
    return lambda run: books.buy(SECOND, accept(payTo=PAYEES[9]), run="run")


def dearer(books):
    assert books.buy(SECOND, times=5) is None
    return lambda run: books.buy(SECOND, accept(amount=50_000), run=run)


def at_rest(books):
    for number in range(2):
        books.buy(f"{SECOND}/{number}", accept(payTo=PAYEES[number]), paid=failing)
    return lambda run: books.buy(f"{SECOND}/9", run="run")


def many_small_ones(books):
    assert books.buy(SECOND, times=2) is None
    return lambda run: books.buy(f"{SECOND}/9", run="run")


KINDS = {
    "look_alike_host": (look_alike, {}, 30 * DAY),
    "version_downgrade": (downgraded, {}, 30 * DAY),
    "payee_change": (another_payee, {"payee_change": "refuse"}, 30 * DAY),
    "facilitators": (fourth_facilitator, {"latch_days": 3}, 3 * DAY),
    "new_payees_per_day": (new_payees, {"velocity": Velocity(new_payees_per_day=2)}, 25 * 3600),
    "price_ratio": (dearer, {}, 30 * DAY),
    "breaker_open": (at_rest, {"breaker": Breaker(failures=2, rest_s=600)}, 600),
    "needs_review": (many_small_ones, {"approvals": Approvals(above="$0.025")}, DAY),
}
each_kind = pytest.mark.parametrize("rule", KINDS)


def refusing(ledger, rule):
    """A ledger in which a latch has refused a call, and what makes that call again, in a run of another name."""
    arrange, policy, lasts_s = KINDS[rule]
    books = ledger(**policy)
    again = arrange(books)
    assert again("other") == rule
    return books, again, lasts_s


@each_kind
def test_a74_it_ages(ledger, rule):
    books, again, lasts_s = refusing(ledger, rule)
    books.clock.tick(lasts_s // 2)
    assert again("later") == rule
    books.clock.tick(lasts_s // 2 + 120)
    with books.owner() as owner:
        owner._store.now_ms = lambda: int(books.clock())
        assert owner.latches() == []
    assert again("much-later") is None


@each_kind
def test_a74_its_owner_sees_why_and_since_when_and_clears_it(ledger, rule):
    books, again, _ = refusing(ledger, rule)
    with books.owner() as owner:
        owner._store.now_ms = lambda: int(books.clock())
        [row] = owner.latches()
        assert (row.rule, row.since <= row.refused < row.ends) == (rule, True)
        assert len(row.reason) > 20
        page = live_page(live_of(owner._store), Choice())
        assert f"x402guard latches --clear {row.id}" in page
        assert owner.clear_latch(row.id[:6]) == row
        assert owner.latches() == []
        assert live_of(owner._store).latches == ()
        [event] = [entry for entry in owner._store.tail("wallet", 0) if entry.facts().get("name") == "latch_cleared"]
        assert (event.facts()["rule"], event.facts()["by"]) == (rule, owner.by)
    assert again("after-it") is None


def test_a74_without_days_it_holds_until_it_is_cleared(ledger):
    books = ledger(latch_days=None)
    again = look_alike(books)
    assert again("one") == "look_alike_host"
    books.clock.tick(400 * DAY)
    assert again("two") == "look_alike_host"
    with books.owner() as owner:
        [row] = owner.latches()
        assert row.ends is None


def test_a74_a_host_that_is_paid_again_and_again_does_not_age(ledger):
    books = ledger(latch_days=3)
    for _ in range(4):
        assert books.buy(FIRST) is None
        books.clock.tick(2 * DAY)
    assert books.buy(SECOND) == "look_alike_host"


def test_a74_what_an_earlier_version_wrote_ages_from_the_day_it_is_met(ledger):
    books = ledger(latch_days=3)
    again = look_alike(books)
    with closing(open_store(books.url)) as store:
        [name] = store.marks("shape", "")
        scope = Scope(marks=(("shape", name),))
        store.transact(scope, lambda view: view.put_mark(("shape", name), {"host": "c0urts.example"}))
    books.clock.tick(100 * DAY)
    assert again("first-met") == "look_alike_host"
    books.clock.tick(2 * DAY)
    assert again("held") == "look_alike_host"
    books.clock.tick(2 * DAY)
    assert again("aged") is None


def test_a74_two_runs_that_were_led_astray_use_up_no_new_payees_of_others(ledger):
    books = ledger()
    for run in ("astray", "astray too"):
        paid = 0
        for number in range(30):
            url = f"https://shop-{run[-3:].strip()}-{number}.example/x"
            paid += (
                books.buy(url, accept(payTo=f"0x{hash((run, number)) % 16**39:040x}"), run=run.replace(" ", "-"))
                is None
            )
        assert paid == 10
    assert books.buy(SECOND, accept(payTo=PAYEES[9]), run="honest") is None


def test_a74_the_command_lists_and_clears(ledger, tmp_path):
    books, again, _ = refusing(ledger, "look_alike_host")
    latches = partial(typed, "latches", "--ledger", books.url, cwd=tmp_path)
    assert "courts.example looks like c0urts.example" in latches().stdout
    [row] = json.loads(latches("--json").stdout)
    assert "no latch has the id 'zz'; see x402guard latches" in latches("--clear", "zz").stderr
    assert "cleared by" in latches("--clear", row["id"]).stdout
    assert "no latch holds" in latches().stdout
    assert again("after-it") is None


def test_a74_latch_days_are_checked():
    with pytest.raises(
        ConfigError, match=r"policy\.latch_days: 0 is not a whole number of days from 1 to 3,650, or None"
    ):
        Policy(latch_days=0)
