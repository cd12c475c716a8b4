"""Spikes and velocity on a clock that is turned by hand: which step is refused, by which rule, and when it passes again."""

import json
import time

import pytest

from tests.support.ledger import Books, usd
from x402guard import ConfigError, Policy, Seller, Spike, Velocity, VelocityExceeded
from x402guard.kernel.rows import HoldKind
from x402guard.policy.guards import give_step_back, guard_marks, judge_step, note_taken
from x402guard.policy.prices import PRICES, price_route
from x402guard.policy.steps import NOT_ASKED, Asked, Step

A, B = "0xA", "0xB"


class Run:
    """A run of ten dollars whose steps are judged at their price, and noted where nothing is said against them."""

    def __init__(self, **policy):
        self.policy, self.books = (
            Policy(loop=None, **{"spike": None, "velocity": None, **policy}),
            Books(session="$10.00"),
        )

    def step(self, amount, *, payee="", name="GET shop/docs/1", kind=HoldKind.PAYMENT, after_s=0, asks=NOT_ASKED):
        self.books.clock.tick(after_s)
        step = Step(kind, name, "", "s", asks=asks, routes=(name,)).at(usd(amount), payee)
        payees = (payee,) if payee else ()

        def change(view):
            refusal = judge_step(view, self.policy, step)
            if refusal is None:
                note_taken(view, self.policy, step)
            return refusal

        self.refusal = self.books.change(change, nodes=("s",), marks=guard_marks(self.policy, step, payees))
        return None if self.refusal is None else self.refusal.rule

    def give_back(self, amount, *, payee, name="GET shop/docs/1"):
        """Give back a step that was taken just now."""
        step, at_ms = Step(HoldKind.PAYMENT, name, "", "s", routes=(name,)).at(usd(amount), payee), self.books.clock()
        marks = guard_marks(self.policy, step, (payee,))
        self.books.change(lambda view: give_step_back(view, self.policy, step, at_ms), nodes=("s",), marks=marks)

    def events(self):
        return [entry.facts()["name"] for entry in self.books.store.entries("s") if entry.event == "event"]


TRIPS = Spike(action="trip", min_step="$0.01")


@pytest.mark.parametrize(
    ("costs", "stops"),
    [
        ([1, 1, 1, 1, 4], 5),
        ([1, 1, 1, 1, 3], None),
        ([1, 1, 1, 4], None),
        ([4, 1, 1, 1, 1, 4], 6),
        ([1, 1, 1, 1, 2, 3, 4, 5], None),
        ([0, 0, 0, 0, 9], None),
        ([0, 0, 0, 1, 1], 5),
        ([9, 1, 1, 1, 9, 1, 1, 1, 9], None),
    ],
)
def test_a_step_is_a_spike_above_three_times_the_mean_of_the_four_before_it(costs, stops):
    run = Run(spike=TRIPS)
    found = [run.step(f"${cost}.00") if cost else run.step("$0.00") for cost in costs]
    assert next((number for number, rule in enumerate(found, 1) if rule), None) == stops
    assert set(found) <= {None, "spend_spike"}


def test_a_spike_that_trips_latches_the_run():
    run = Run(spike=TRIPS)
    assert [run.step(f"${cost}.00") for cost in [1, 1, 1, 1, 4]][-1] == "spend_spike"
    assert (run.books.node().state, run.books.node().terminated_by) == ("tripped", "spend_spike")


def test_by_default_a_spike_warns_and_moves_the_mean():
    run = Run(spike=Spike())
    assert [run.step(amount) for amount in ["$0.10"] * 4 + ["$0.40", "$0.40"]] == [None] * 6
    assert run.events() == ["spend_spike"]
    assert run.books.node().state == "open"


def test_kinds_of_cost_are_looked_at_each_by_itself():
    run = Run(spike=Spike(action="trip"))
    assert all(run.step("$0.002", kind=HoldKind.LLM) is None for _ in range(5))
    assert run.step("$0.10") is None


def test_under_the_floor_no_step_is_a_spike():
    run = Run(spike=Spike(action="trip", min_step="$0.05"))
    assert [run.step(amount) for amount in ["$0.001"] * 4 + ["$0.0499"]] == [None] * 5
    assert run.step("$0.05") == "spend_spike"


@pytest.mark.parametrize(
    ("window", "frees_s"), [("minute", 65), ("hour", 3_660), ("day", 90_000)], ids=["minute", "hour", "day"]
)
def test_dollars_and_calls_free_with_their_window_and_not_before_it(window, frees_s):
    dollars = Run(velocity=Velocity(**{f"dollars_per_{window}": "$1.00"}))
    assert [dollars.step("$0.50"), dollars.step("$0.50"), dollars.step("$0.01")] == [
        None,
        None,
        f"dollars_per_{window}",
    ]
    calls = Run(velocity=Velocity(**{f"calls_per_{window}": 2}))
    assert [calls.step("$0.00"), calls.step("$0.00"), calls.step("$0.00")] == [None, None, f"calls_per_{window}"]
    length = {"minute": 60, "hour": 3_600, "day": 86_400}[window]
    for run, rule in ((dollars, f"dollars_per_{window}"), (calls, f"calls_per_{window}")):
        assert run.step("$1.00", after_s=length) == rule  # never too early
        assert run.step("$1.00", after_s=frees_s - length) is None
        assert run.books.node().state == "open"


def test_a_window_never_goes_back():
    run = Run(velocity=Velocity(calls_per_minute=2))
    assert [run.step("$0.01"), run.step("$0.01")] == [None, None]
    run.books.clock.tick(-3_600)
    assert run.step("$0.01") == "calls_per_minute"


def test_a_ring_has_no_more_buckets_than_its_window():
    run = Run(velocity=Velocity(calls_per_day=10**6, calls_per_minute=10**6))
    for _ in range(500):
        run.step("$0.001", after_s=601)
    assert len(json.dumps(list(run.books.store.marks("velocity", "").values()))) < 1_500


def test_ten_new_payees_a_day_in_one_run():
    run = Run(velocity=Velocity())
    found = [run.step("$0.01", payee=f"0x{n}", name=f"GET shop-{n}/x") for n in range(11)]
    assert found == [None] * 10 + ["new_payees_per_day"]
    assert run.step("$0.01", payee="0x3") is None  # known by now
    assert run.step("$0.01", payee="0xnew", after_s=90_000) is None


@pytest.mark.parametrize("window", ["minute", "hour", "day"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_above_the_limit_by_itself_is_never_said_to_pass_later(window, is_first):
    run = Run(velocity=Velocity(**{f"dollars_per_{window}": "$0.02"}))
    assert is_first or run.step("$0.01") is None
    assert run.step("$0.03") == f"dollars_per_{window}"
    error = VelocityExceeded(run.refusal.reason, rule=run.refusal.rule, retry_after=run.refusal.retry_after_s)
    assert (run.refusal.retry_after_s, error.retry) == (None, "after_change")
    assert "above the limit by itself" in error.advice


@pytest.mark.parametrize("a_day", [1, 10, 1_000])
def test_one_host_counts_once_and_names_five_payees(a_day):
    run = Run(velocity=Velocity(new_payees_per_day=a_day))
    found = [run.step("$0.001", payee=f"0x{n}", name=f"GET shop:{8000 + n}/x") for n in range(6)]
    assert found == [None] * 5 + ["new_payees_per_day"]
    found = [run.step("$0.001", payee=f"0xa{n}", name=f"GET shop-{n}/x") for n in range(min(a_day, 12))]
    assert found.count(None) == min(a_day - 1, 12)


@pytest.mark.parametrize(
    ("velocity", "least_s"),
    [
        (Velocity(calls_per_minute=2), 50),
        (Velocity(dollars_per_hour="$0.02"), 3_540),
        (Velocity(calls_per_day=2), 82_800),
        (Velocity(new_payees_per_day=2), 82_800),
    ],
    ids=["calls a minute", "dollars an hour", "calls a day", "new payees"],
)
@pytest.mark.parametrize("begun_s", [0, 7, 3_599])
def test_a_refusal_says_after_how_many_seconds_it_passes(velocity, least_s, begun_s):
    run = Run(velocity=velocity)
    run.books.clock.tick(begun_s)
    steps = [{"payee": f"0x{n}", "name": f"GET shop-{n}/x"} for n in range(3)]
    assert [run.step("$0.01", **step, after_s=1) for step in steps[:2]] == [None, None]
    assert run.step("$0.01", **steps[2], after_s=2) is not None
    wait_s = run.refusal.retry_after_s
    assert least_s <= wait_s <= 90_000
    assert run.step("$0.01", **steps[2], after_s=wait_s - 1) is not None
    assert run.step("$0.01", **steps[2], after_s=1) is None


def test_a_new_payee_that_was_never_paid_is_given_back():
    run = Run(velocity=Velocity(new_payees_per_day=2))
    one, two, three = ({"payee": f"0x{n}", "name": f"GET shop-{n}/x"} for n in (1, 2, 3))
    for _ in range(7):
        assert run.step("$0.01", **one) is None
        run.give_back("$0.01", **one)
    assert run.step("$0.01", **two) is None
    assert run.step("$0.01", **three, after_s=1) is None
    assert run.step("$0.01", **one, after_s=1) == "new_payees_per_day"
    assert run.step("$0.01", **two, after_s=1) is None
    run.give_back("$0.01", **two)  # another step than the one that made it known
    assert run.step("$0.01", **two, after_s=1) is None


def test_what_one_seller_may_cost_a_day_is_given_back_and_frees_with_the_day():
    run = Run(sellers={"shop": Seller(payees="any", daily="$0.02")})
    for number in range(4):
        assert run.step("$0.02", payee=f"0x{number}") is None
        assert run.step("$0.01", payee=f"0xa{number}") == "seller_daily"
        assert 82_000 < run.refusal.retry_after_s <= 90_000
        run.give_back("$0.02", payee=f"0x{number}")
    assert run.step("$0.02", payee="0x7") is None
    assert run.step("$0.03", payee="0x8") == "seller_daily"
    assert run.refusal.retry_after_s is None  # above the limit by itself
    assert run.step("$0.02", payee="0x9", after_s=90_000) is None


def test_thirty_new_hosts_in_a_minute_end_at_the_tenth():
    run = Run(velocity=Velocity())
    found = [run.step("$0.01", payee=f"0x{n}", name=f"GET shop-{n}/x", after_s=2) for n in range(30)]
    assert found.count(None) == 10


def test_one_host_does_not_use_up_the_new_payees_of_all():
    run = Run(velocity=Velocity())
    found = [run.step("$0.01", payee=f"0x{n}", name=f"GET shop:{8000 + n}/x") for n in range(30)]
    assert found == [None] * 5 + ["new_payees_per_day"] * 25
    assert run.step("$0.01", payee="0xanother", name="GET honest/x") is None


def test_a_price_of_nearly_nothing_poisons_no_route_and_no_other_seller():
    run = Run(velocity=Velocity())
    for _ in range(6):
        run.step("$0.000001", payee=A)
    assert run.step("$0.0099", payee=A) is None
    assert run.step("$0.01", payee=A) == "price_ratio"
    assert run.step("$0.01", payee=B) == "price_ratio"  # a seller is its host
    assert run.step("$0.01", payee=A, name="GET other/opinion") is None
    assert run.step("$0.01", payee=A, after_s=90_000) == "price_ratio"  # a quiet day forgets nothing
    assert run.step("$0.01", payee=A, after_s=30 * 86_400) is None  # and nothing counts for ever


def test_a_long_path_is_a_route_at_once():
    begun = time.monotonic()
    assert price_route("GET shop/" + "a" * 200_000) == "GET shop/" + "a" * 200_000
    assert time.monotonic() - begun < 0.5


def test_what_does_not_fit_is_no_spike_and_a_reset_forgets_what_was():
    run = Run(spike=TRIPS)
    for _ in range(4):
        run.step("$1.00")
    assert run.step("$500.00") is None  # the budget refuses it, and it alone
    assert run.books.node().state == "open"


def test_a_share_of_the_budget_to_one_payee():
    run = Run(velocity=Velocity(percent_per_payee=50))
    assert [run.step("$2.50", payee=A), run.step("$2.50", payee=A)] == [None, None]
    assert run.step("$0.01", payee=A) == "percent_per_payee"
    assert run.step("$2.50", payee=B) is None


def test_what_was_given_back_is_no_part_of_a_payees_share():
    run = Run(velocity=Velocity(percent_per_payee=50))
    assert run.step("$5.00", payee=A) is None
    run.give_back("$5.00", payee=A)
    assert [run.step("$5.00", payee=A), run.step("$0.01", payee=A)] == [None, "percent_per_payee"]


def test_a_price_above_twice_the_median_of_its_route():
    run = Run(velocity=Velocity())
    assert [run.step("$0.10", payee=A, name=f"GET shop/docs/{n}") for n in range(5)] == [None] * 5
    assert run.step("$0.20", payee=A, name="GET shop/docs/6") is None
    assert run.step("$0.21", payee=A, name="GET shop/docs/7") == "price_ratio"
    assert run.step("$0.21", payee=A, name="GET shop/films/7") is None  # another route
    assert run.step("$0.10", payee=A, name="GET shop/docs/8") is None


def test_nine_times_the_price_after_a_quiet_day_is_not_bought_unasked():
    run = Run(velocity=Velocity())
    assert [run.step("$0.10", payee=A, after_s=3_600) for _ in range(24)] == [None] * 24
    assert run.step("$0.90", payee=A, after_s=2 * 86_400) == "price_ratio"


def test_only_the_last_prices_of_few_classes_are_kept():
    run = Run(velocity=Velocity())
    for number in range(60):
        run.step("$0.10", payee=A, asks=Asked(100, 0, f"model-{number % 12}", ""))
    [row] = run.books.store.marks(PRICES, "").values()
    assert (len(row["prices"]), len(row["classes"])) == (20, 8)
    assert max(map(len, row["classes"].values())) <= 10


def test_a_ramp_of_five_percent_stops_at_the_computed_call():
    run, price, paid = Run(velocity=Velocity()), 1.0, []
    for _ in range(60):
        if run.step(f"${price / 100:.9f}", payee=A) is not None:
            break
        paid.append(price)
        price *= 1.05
    # A price enters while it is at most 1.25 times the median of those before it: 1.05^0 to 1.05^7. The median then stands at
    # 1.05^3, and the first price above twice that is 1.05^18: the nineteenth call.
    assert len(paid) == 18


def test_a_price_that_rises_slowly_over_many_calls_is_followed():
    run = Run(velocity=Velocity())
    for cents in (10, 12, 15, 18, 22, 27, 33):
        assert [run.step(f"$0.{cents}", payee=A, after_s=9_000) for _ in range(12)] == [None] * 12


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("GET shop/docs/42", "GET shop/docs/*"),
        ("GET shop/v1/users/8f3a/docs", "GET shop/v1/users/*/docs"),
        ("GET shop/v12", "GET shop/v12"),
        ("GET shop/v1a/v123/1v", "GET shop/*/*/*"),
        ("GET shop", "GET shop"),
        ("GET shop:8443/docs", "GET shop:8443/docs"),
    ],
)
def test_a_route_is_a_place_without_what_changes(name, route):
    assert price_route(name) == route


@pytest.mark.parametrize(
    ("kind", "arguments", "names"),
    [
        (Spike, {"multiplier": 0}, "spike.multiplier: 0"),
        (Spike, {"multiplier": 0.9}, "spike.multiplier: 0.9"),
        (Spike, {"multiplier": float("nan")}, "spike.multiplier: nan"),
        (Spike, {"multiplier": True}, "spike.multiplier: True"),
        (Spike, {"multiplier": "3"}, "spike.multiplier: '3'"),
        (Spike, {"window": 1}, "spike.window: 1"),
        (Spike, {"action": "stop"}, "spike.action: 'stop'"),
        (Spike, {"min_step": 0.05}, 'spike.min_step: .*"\\$0.05"'),
        (Velocity, {"dollars_per_minute": 1.0}, 'velocity.dollars_per_minute: .*"\\$1.00"'),
        (Velocity, {"dollars_per_day": "-1"}, "velocity.dollars_per_day: '-1'"),
        (Velocity, {"calls_per_hour": 0}, "velocity.calls_per_hour: 0"),
        (Velocity, {"new_payees_per_day": True}, "velocity.new_payees_per_day: True"),
        (Velocity, {"percent_per_payee": 101}, "velocity.percent_per_payee: 101"),
        (Velocity, {"price_ratio": "2"}, "velocity.price_ratio: '2'"),
    ],
)
def test_a_wrong_setting_is_named(kind, arguments, names):
    with pytest.raises(ConfigError, match=f"^policy.{names}"):
        kind(**arguments)
