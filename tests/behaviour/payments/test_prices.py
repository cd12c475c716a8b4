"""A price is compared with that of a like request: what an honest seller asks is paid, and what a greedy one asks is not."""

import json
from contextlib import suppress

import httpx
import pytest

from tests.support.merchant import Shop, accept, client, make_guard, required
from x402guard import ConfigError, Owner, Policy, PolicyDenied
from x402guard.policy.prices import asked_of
from x402guard.policy.steps import read_body

PLACE = "https://llm.example/chat"
ROUTE = "POST llm.example/chat"


class Priced(Shop):
    """A seller whose price, in dollars, follows from the request's JSON."""

    def __init__(self, price):
        super().__init__(lambda r: required(accept(round(price(json.loads(r.content)) * 1e6)), url=PLACE))


def asks(session, shop, bodies, **extensions):
    """How many of the requests are bought."""
    bought = 0
    with client(session, shop) as http:
        for body in bodies:
            try:
                http.post(PLACE, json=body, extensions=extensions)
                bought += 1
            except PolicyDenied as refused:
                assert refused.rule == "price_ratio", refused
    return bought


def words(count, start="why"):
    return " ".join([start, *(f"w{number:04d}" for number in range(count))])


def chat(model, tokens, **more):
    return {"model": model, "messages": [{"role": "user", "content": words(tokens // 2)}], **more}


def per_token(dollars):
    return lambda body: dollars * len(json.dumps(body)) / 3


RATES = {"small-1": 0.000_004, "large-1": 0.000_060}
SIZES = {"256x256": 0.016, "1024x1024": 0.09, "512x512": 0.03}


def by_model(body):
    return 0.01 * RATES[body["model"]] / RATES["small-1"]


HONEST = {
    "a longer prompt": (
        lambda body: 0.006 if len(body["prompt"]) < 200 else 0.054,
        [{"prompt": f"{word} {words(14)}"} for word in "abcdef"] + [{"prompt": words(150)}],
    ),
    "a chat that grows": (per_token(0.000_004), [chat("small-1", 1_500 * turn) for turn in range(1, 17)]),
    "a cheap model, then the large one": (
        by_model,
        [chat("small-1", 100 + n) for n in range(8)] + [chat("large-1", 100 + n) for n in range(4)],
    ),
    "a planner and three workers": (
        by_model,
        [chat("small-1" if n % 4 else "large-1", 100 + n) for n in range(24)],
    ),
    "small pictures, then large ones": (
        lambda body: SIZES[body["size"]],
        [{"prompt": f"cat {n}", "size": "256x256"} for n in range(6)]
        + [{"prompt": f"cat {n}", "size": "1024x1024"} for n in range(3)],
    ),
    "more output": (
        lambda body: 0.01 * body["max_tokens"] / 100,
        [chat("small-1", 50 + n, max_tokens=100) for n in range(6)] + [chat("small-1", 50, max_tokens=1_000)] * 2,
    ),
    "longer films": (
        lambda body: 0.02 * body["input"]["seconds"],
        [{"input": {"prompt": f"sea {n}", "seconds": 2}} for n in range(6)]
        + [{"input": {"prompt": "sea", "seconds": 10}}],
    ),
    "short questions after long ones": (
        per_token(0.000_004),
        [chat("small-1", 9_000 - 1_000 * n) for n in range(9)],
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_an_honest_price_that_follows_from_the_request_is_paid(case):
    price, bodies = HONEST[case]
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        assert asks(session, Priced(price), bodies) == len(bodies)


def rising(times, prices):
    """A seller that asks its usual price, and then these, whatever the request says."""
    turns = iter([0.02] * times + prices)
    return Priced(lambda _body: next(turns))


@pytest.mark.parametrize(
    ("prices", "bought"),
    [([0.041], 0), ([0.9], 0), ([0.04], 1), ([0.9] * 5, 0)],
    ids=["a little over double", "the whole cap", "double", "again and again"],
)
def test_a_price_that_rises_for_the_same_request_is_refused(prices, bought):
    bodies = [chat("small-1", 100)] * (6 + len(prices))
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        assert asks(session, rising(6, prices), bodies) == 6 + bought


def test_a_ramp_is_refused_also_of_a_chat_that_grows():
    """A fifth more a token with each turn: what is in proportion passes, and no more than double of it."""
    price = iter(range(100))
    greedy = Priced(lambda body: 0.000_002 * 1.2 ** next(price) * len(json.dumps(body)) / 3)
    bodies = [chat("small-1", 1_000 + 300 * turn) for turn in range(20)]
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        assert asks(session, greedy, bodies) < 10


def test_a_new_name_for_each_request_passes_nothing():
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        shop = rising(6, [0.09] * 20)
        assert asks(session, shop, [{"prompt": "x"}] * 6) == 6
        for number in range(10):
            assert asks(session, shop, [{"prompt": "x"}], price_class=f"hd {number}") == 0


def test_three_models_a_day_may_cost_ten_times_that_of_a_like_request_and_a_fourth_may_not():
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        shop = rising(6, [0.41, *[0.39] * 20])
        assert asks(session, shop, [chat("small-1", 100)] * 6) == 6
        assert asks(session, shop, [chat("huge-0", 100)]) == 0  # over twenty times
        assert asks(session, shop, [chat(f"huge-{number}", 100) for number in range(8)]) == 3
        assert asks(session, shop, [chat(f"huge-{number}", 100) for number in range(3)]) == 3  # known by now
    shop = rising(9, [0.041])
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$50.00") as session:
        models = ["small-1"] * 6 + ["large-1"] * 3 + ["large-1"]
        assert (
            asks(session, shop, [chat(model, 100) for model in models]) == 9
        )  # a known model is held to its own price


def test_the_owner_accepts_a_price_and_takes_it_back(tmp_path):
    url, told = f"sqlite:///{tmp_path / 'books.db'}", []
    shop = rising(6, [0.09] * 20)
    with make_guard(url, policy=Policy(loop=None), on_notice=told.append) as guard:
        with guard.session("s", budget="$5.00") as session:
            assert asks(session, shop, [chat("small-1", 100)] * 8) == 6
            with pytest.raises(PolicyDenied) as refused:
                client(session, shop).post(PLACE, json=chat("small-1", 100))
            assert f"x402guard prices accept '{ROUTE}' 0.09" in str(refused.value)
            with Owner(url, by="ann") as owner:
                assert owner.accept_price("post LLM.example/chat", "$0.09") == ROUTE
            assert asks(session, shop, [chat("small-1", 100)] * 2) == 2
            with Owner(url) as owner:
                owner.accept_price(ROUTE, "0")
            assert asks(session, shop, [chat("small-1", 100)] * 2) == 0
        with guard.session("other", budget="$5.00") as session:
            assert asks(session, shop, [chat("small-1", 100)]) == 0  # for all runs
    assert ("refused", "price_ratio") in [(notice.kind, notice.rule) for notice in told]
    with Owner(url) as owner:
        said = [row for row in owner.report("wallet").to_dict()["events"] if "price_accepted" in str(row)]
    assert ("ann", ROUTE) in [(row.get("by"), row.get("route")) for row in said]


def test_the_approver_is_asked_for_a_price_that_is_too_high():
    asked = []

    def approve(request):
        asked.append(request.reason)
        return len(asked) == 1

    shop = rising(6, [0.09] * 5)
    with make_guard(policy=Policy(loop=None), approver=approve) as guard, guard.session("s", budget="$5.00") as session:
        assert asks(session, shop, [chat("small-1", 100)] * 6) == 6
        assert client(session, shop).post(PLACE, json=chat("small-1", 100)).status_code == 200
        with pytest.raises(Exception, match="denied"):
            client(session, shop).post(PLACE, json=chat("small-1", 101))
    assert len(asked) == 2
    assert "over 2 times its usual $0.02" in asked[0]


@pytest.mark.parametrize(
    "route",
    [
        "",
        "GET",
        "GET shop.example",
        "https://shop.example/x",
        "GET https://a.example/x",
        "GET a/x?y",
        "FETCH a.example/x",
        "GET *.a.example/x",
        "GET a b/x",
        "GET a_ä/x",
    ],
)
def test_what_is_no_route_is_named(route, tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    make_guard(url, budget="$1.00").close()
    with Owner(url) as owner, pytest.raises(ConfigError, match="is no route; write it as the refusal does"):
        owner.accept_price(route, "$1.00")


@pytest.mark.parametrize("named", [5, "x" * 61, "a\nb"])
def test_what_is_no_name_of_a_price_class_is_an_error_before_anything_is_sent(named):
    shop = Shop()
    with (
        make_guard() as guard,
        guard.session("s", budget="$5.00") as session,
        pytest.raises(ConfigError, match="price_class"),
    ):
        client(session, shop).get(PLACE, extensions={"price_class": named})
    assert shop.seen == []


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({}, 0),
        ({"max_tokens": 500}, 500),
        ({"max_tokens": 500, "max_completion_tokens": 700, "n": 2}, 1_400),
        ({"size": "1024x512"}, 524_288),
        ({"size": "1080p", "duration": "5s"}, 1_080**2 * 5),
        ({"width": 10, "height": 20, "num_images": 3}, 600),
        ({"input": {"seconds": 8}}, 8),
        ({"n": True, "size": 7, "seconds": None, "duration": [3]}, 0),
        ({"n": -4, "max_tokens": "1e9", "size": "x" * 10_000}, 0),
        ({"n": 10**30, "seconds": 10**8}, 10**8),
        ({"seconds": 2.5, "n": 999_999_999, "max_tokens": 999_999_999}, 10**12),
    ],
    ids=str,
)
def test_how_much_output_a_request_asks_for(body, output):
    said = read_body(json.dumps(body).encode())
    assert asked_of(said, "https://a.example/x", 10, "").output == output


def test_what_a_query_asks_for_counts_as_well():
    asked = asked_of("", "https://a.example/x?model=m&n=3&seconds=3&size=10x10#f", 0, "hd")
    assert (asked.model, asked.output, asked.named, asked.label) == ("m", 300, "hd", "m hd")


def test_a_default_port_is_left_out_and_a_ledger_in_memory_has_no_routes(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    make_guard(url, budget="$1.00").close()
    with Owner(url) as owner:
        assert owner.accept_price("post Shop.Example:443/v1/chat/7", "$1.00") == "POST shop.example/v1/chat/*"
    with Owner("memory://") as owner, pytest.raises(ConfigError, match="memory:// has no wallet yet"):
        owner.accept_price(ROUTE, "$1.00")


def test_what_is_accepted_for_one_version_of_an_api_is_not_for_another(tmp_path):
    url, shop = f"sqlite:///{tmp_path / 'books.db'}", rising(6, [0.09] * 20)
    with make_guard(url, policy=Policy(loop=None)) as guard, guard.session("s", budget="$5.00") as session:
        assert asks(session, shop, [chat("small-1", 100)] * 6) == 6
        with Owner(url) as owner:
            owner.accept_price("POST llm.example/v1/chat", "$0.09")
        assert asks(session, shop, [chat("small-1", 100)]) == 0


def moving(prices, to):
    """A seller that leads each request to a place of its own naming, another one from the seventh on, at its next price."""
    asked, places = iter(prices), iter(["/moved"] * 6 + to)
    sold = Shop(lambda _r: required(accept(round(next(asked) * 1e6)), url=PLACE))

    def shop(request):
        return httpx.Response(307, headers={"location": next(places)}) if request.url.path == "/chat" else sold(request)

    return shop


@pytest.mark.parametrize(
    "to",
    [
        ["/moved"] * 6,
        [f"/moved?q={words(1_000).replace(' ', '+')}"] * 6,
        [f"/moved?model={each}" for each in "abcdef"],
        [f"/{each}" for each in "abcdef"],
    ],
    ids=["the same", "a longer query", "another model", "another path"],
)
def test_the_place_of_a_redirect_raises_no_price(to):
    """What a like request has cost is judged by what the caller has asked for, and where."""
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$9.00") as session:
        bought = 0
        with client(session, moving([0.01] * 6 + [0.09] * 6, to), follow_redirects=True) as http:
            for number in range(12):
                with suppress(PolicyDenied):
                    http.post(PLACE, json={"prompt": f"why {number:02d}"})
                    bought += 1
        assert bought == 6
        assert str(session.held + session.spent) == "0.06"


def test_large_requests_between_do_not_raise_what_a_small_one_may_cost():
    """A ramp hides behind other sizes: what is small is compared with what was small."""
    prices = {"small": 0.01, "large": 0.3}
    shop = Priced(lambda body: prices["large" if len(body["prompt"]) > 1_000 else "small"])
    with (
        make_guard(policy=Policy(loop=None)) as guard,
        guard.session("s", budget="$99.00") as session,
    ):
        small, large = (
            [{"prompt": f"why {n:03d}"} for n in range(50)],
            [{"prompt": words(900, f"l{n}")} for n in range(50)],
        )
        assert asks(session, shop, small[:6]) == 6
        for n in range(16):
            assert asks(session, shop, [large[n]]) == 1
        prices["small"] = 0.09
        assert asks(session, shop, small[6:12]) == 0


def test_models_that_a_row_remembers_are_bounded():
    """Where nothing is refused, a route remembers no more of them than the rule counts."""
    with make_guard(mode="shadow", policy=Policy(loop=None)) as guard, guard.session("s", budget="$99.00") as session:
        assert asks(session, rising(6, [0.09] * 34), [chat(f"m{n}", 100) for n in range(40)]) == 40
        rows = [row for key, row in guard.shell.store.marks("prices", "").items()]
        assert rows
        assert all(len(row.get("models", [])) <= 3 for row in rows)


def test_a_model_that_is_no_text_is_one_for_the_ledger(ledger_url):
    body = b'{"model": "\\ud800x", "prompt": "why"}'
    shop = Shop()
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session, client(session, shop) as http:
        assert http.post(PLACE, content=body).status_code == 200
