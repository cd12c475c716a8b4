"""A price of one's own: each unit, longer requests, tiers and regions, another model's prices; and mistakes in it."""

import itertools
from decimal import Decimal

import pytest

from x402guard import ConfigError, ModelPrice
from x402guard.guard.settings import load_settings
from x402guard.vendors.genai_prices import GenaiPriceBook, _price_keys
from x402guard.vendors.model_price import UNITS
from x402guard.vendors.prices import RegisteredBook

AT = 1_796_040_000
BOOK = GenaiPriceBook()
TIERED = {"service_tier": "priority"}


def cost(price, usage, *, model="gpt-6-sol", provider="openai", context=None):
    book = RegisteredBook(BOOK, owner_prices={model: price})
    priced = book.find(provider, model, AT)
    return book.cost(priced, usage, context or {}) * 1_000_000


@pytest.mark.parametrize(
    ("price", "usage", "context", "dollars"),
    [
        ({}, {"input_tokens": 100, "output_tokens": 10}, {}, 100 * 3 + 10 * 12),
        ({}, {"input_tokens": 300_000}, {}, 300_000 * 6),  # twice as much from 272,000 on, as in the book
        ({"above": {}}, {"input_tokens": 300_000}, {}, 300_000 * 3),
        ({"above": {200_000: {"input": "9", "output": "20"}}}, {"input_tokens": 250_000, "output_tokens": 1}, {}, 250_000 * 9 + 20),
        ({"above": {200_000: {"input": "9"}}}, {"input_tokens": 250_000, "output_tokens": 1}, {}, 250_000 * 9 + 12),
        ({}, {"input_tokens": 100, "cache_write_tokens": 100}, {}, Decimal(100) * 3 * Decimal("1.25")),  # as in the book
        ({"units": {"cache_write_tokens": "5"}}, {"input_tokens": 100, "cache_write_tokens": 100}, {}, 100 * 5),
        ({"cached_input": "1"}, {"input_tokens": 100, "cache_read_tokens": 100}, {}, 100),
        ({}, {"input_tokens": 100, "cache_read_tokens": 100}, {}, 300),  # no cheaper than plain, unless it is said
        ({}, {"input_tokens": 100}, TIERED, 100 * 3 * 2),  # twice, as in the book
        ({"tiers": {"priority": "2.5"}}, {"input_tokens": 100}, TIERED, Decimal(750)),
        ({"tiers": {"batch": "0.5"}}, {"input_tokens": 100}, {"processing": "batch"}, 150),
        ({"units": {"web_searches": "0.02"}}, {"input_tokens": 100, "web_searches": 2}, {}, 300 + 40_000),
        ({}, {"input_tokens": 100, "web_searches": 2}, {}, 300 + 20_000),  # the book's
    ],
)  # fmt: skip
def test_a_price_costs_what_it_says_and_what_the_book_adds(price, usage, context, dollars):
    own = ModelPrice(**{"input": "3", "output": "12", **price})
    assert cost(own, usage, context=context) == dollars


@pytest.mark.parametrize(("factor", "times"), [(None, 1), ("1.1", Decimal("1.1")), ("0.8", Decimal("0.8"))])
def test_a_model_like_another_costs_what_that_one_does_times_a_factor(factor, times):
    own = ModelPrice(like="gpt-6.1-sol", factor=factor)
    for usage in ({"input_tokens": 100, "output_tokens": 10}, {"input_tokens": 300_000, "cache_write_tokens": 5}):
        book = RegisteredBook(BOOK)
        plain = book.cost(book.find("openai", "gpt-6.1-sol", AT), usage, {}) * 1_000_000
        assert cost(own, usage, model="mine") == plain * times
    assert RegisteredBook(BOOK, owner_prices={"mine": ModelPrice(like="gpt-99")}).find("openai", "mine", AT) is None
    other = RegisteredBook(BOOK, owner_prices={"mine": ModelPrice(like="openai/gpt-6.1-sol")})
    assert other.find("my-lab", "mine", AT).like == "openai/gpt-6.1-sol"


@pytest.mark.parametrize(
    ("price", "says"),
    [
        ({}, "input: it is missing"),
        ({"input": "1"}, "output: it is missing"),
        ({"like": ""}, "like: '' is not the name of a model"),
        ({"like": "gpt-4o", "input": "1"}, "input: 'gpt-4o' says all prices"),
        ({"like": "gpt-4o", "units": {"requests": "1"}}, "units: 'gpt-4o' says all prices"),
        ({"input": "1", "output": "1", "factor": "2"}, "factor: it is on the prices of another model"),
        ({"like": "gpt-4o", "factor": "0"}, "factor: '0' is not a factor"),
        ({"like": "gpt-4o", "factor": "1,1"}, "factor: '1,1' is not a factor above 0 .*, such as \"1.1\""),
        ({"like": "gpt-4o", "factor": 1.1}, "factor: money is never a float"),
        ({"input": "1", "output": "1", "region": "-1"}, "region: '-1'"),
        ({"input": "1", "output": "1", "units": {"input_audo_tokens": "1"}}, "did you mean 'input_audio_tokens'"),
        ({"input": "1", "output": "1", "units": {"requests": 0.5}}, r"units\.requests: money is never a float"),
        ({"input": "1", "output": "1", "units": ["requests"]}, "units: .* is not a mapping"),
        ({"input": "1", "output": "1", "tiers": {"priority": "x"}}, r"tiers\['priority'\]: 'x' is not a factor"),
        ({"input": "1", "output": "1", "above": {"many": {}}}, "above: 'many' is not a number of input tokens"),
        ({"input": "1", "output": "1", "above": {0: {}}}, "above: 0 is not"),
        ({"input": "1", "output": "1", "above": {200_000: {"inputs": "1"}}}, r"above\[200000\]\.inputs: 'inputs' is not a unit"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_price_is_named(price, says):
    with pytest.raises(ConfigError, match=says):
        ModelPrice(**price)


def test_each_unit_and_each_two_of_them_have_a_price_that_the_book_can_compute():
    assert UNITS - set(_price_keys()) == {"input_images"}
    for units in itertools.combinations(sorted(UNITS), 2):
        own = ModelPrice(input="1", output="2", units=dict.fromkeys(units, "3"))
        into, out = ("3" if f"{way}_tokens" in units else price for way, price in (("input", "1"), ("output", "2")))
        each = 3_000_000 if "requests" in units else 0  # a price of a request is added to each
        tokens = BOOK.cost_at(own.table, {"input_tokens": 100, "output_tokens": 10}) * 1_000_000
        assert tokens == 100 * int(into) + 10 * int(out) + each, units


TOML = """
[metering.models."my-deployment"]
like = "gpt-6.1-sol"
factor = "1.1"
[metering.models."own"]
input = "2.20"
output = "11.00"
region = "1.1"
[metering.models."own".units]
cache_write_1h_tokens = "4.40"
requests = "0.005"
[metering.models."own".tiers]
priority = "2.5"
[metering.models."own".above."272000"]
input = "4.40"
output = "16.50"
"""


def test_all_of_it_can_be_said_in_toml(tmp_path):
    (tmp_path / "x402guard.toml").write_text(TOML)
    models = load_settings(tmp_path / "x402guard.toml").metering.build().models
    assert models["my-deployment"] == ModelPrice(like="gpt-6.1-sol", factor="1.1")
    own = models["own"]
    assert (
        cost(own, {"input_tokens": 300_000, "output_tokens": 10}, model="own")
        == Decimal(300_000) * Decimal("4.40") + 165 + 5_000
    )
    assert own.region_factor == Decimal("1.1")
