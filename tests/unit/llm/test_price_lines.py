"""The line of a model's prices, in whole numbers, against the price book at every point of each of its models."""

import pytest

from tests.unit.llm.test_prices import BOOK, NOW

COUNTS = [(0, 0), (1, 0), (0, 1), (7, 3), (999_999, 1), (1_000_000, 2_000_003), (123_456_789, 987_654_321)]


@pytest.mark.long
def test_the_line_of_a_models_price_is_the_price_of_genai_prices_at_every_point():
    from genai_prices import Usage as Counts

    lines = 0
    for provider, name in BOOK.names():
        priced = BOOK.find(provider, name, NOW)
        if priced is None:
            continue  # a name that the book lists for a model that another rule of it finds first
        for context in ({}, *({key: value} for key, value in priced.contexts)):
            prices, line = BOOK._rates_of(priced, BOOK._priced[priced.provider, priced.model], context)
            lines += line is not None
            for into, out in COUNTS if line is not None else ():
                usage = {"input_tokens": into, "output_tokens": out}
                expected = prices.calc_price(Counts(**usage))["total_price"]
                assert BOOK.cost(priced, usage, context) == expected, (provider, name, context, usage)
            if BOOK.is_flat(priced, context):
                for tokens in (1_000, 128_000, 1_000_000):
                    short, long = (BOOK.cost(priced, {"input_tokens": n}, context) for n in (tokens, 2 * tokens))
                    assert long <= 2 * short, "it costs more in a longer request"
    assert lines > 500


def test_a_model_with_prices_for_long_requests_is_not_flat():
    longer, plain = BOOK.find("google", "gemini-2.5-pro", NOW), BOOK.find("openai", "gpt-4o", NOW)
    assert (BOOK.is_flat(longer, {}), BOOK.is_flat(plain, {})) == (False, True)


def test_counts_that_are_no_whole_numbers_are_still_refused():
    priced = BOOK.find("openai", "gpt-4o", NOW)
    for wrong in (-1, "7", True):
        with pytest.raises((ValueError, TypeError)):
            BOOK.cost(priced, {"input_tokens": wrong}, {})
