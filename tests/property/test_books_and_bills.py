"""Over any sequence of answers, with any count in them, the books are never below what the list of prices says."""

from decimal import Decimal

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Policy

URL = "https://api.openai.com/v1/chat/completions"
CLAUDE = "https://api.anthropic.com/v1/messages"
ASKED = {"messages": [{"role": "user", "content": "hi " * 40_000}], "max_tokens": 16_000}
CHEAPEST = {
    "gpt-4o-audio-preview": Decimal("2.50"),
    "claude-sonnet-4-5": Decimal("3.00"),
}  # dollars a million, not cached
COUNTS = st.integers(0, 20_000)
NAMES = st.sampled_from(
    ["holograms", "scent_tokens", "avatar_seconds", "x_units", "dream_requests", "aTokenCount", "prompt_images"]
)
UNKNOWN = st.dictionaries(NAMES, COUNTS, max_size=3)


@st.composite
def chatted(draw):
    """A usage of OpenAI's, and what it costs at least: cached input is free here, sound costs as text."""
    into, out = draw(COUNTS), draw(st.integers(1, 16_000))
    cached, heard = draw(st.integers(0, into)), draw(st.integers(0, into))
    more, nested = draw(UNKNOWN), draw(UNKNOWN)
    details = {"cached_tokens": cached, "audio_tokens": heard, **nested}
    usage = {"prompt_tokens": into, "completion_tokens": out, "prompt_tokens_details": details, **more}
    least = (
        (into - cached) * Decimal("2.50")
        + out * Decimal(10)
        + sum((*more.values(), *nested.values())) * CHEAPEST["gpt-4o-audio-preview"]
    )
    return (
        URL,
        "gpt-4o-audio-preview",
        {"usage": usage, "choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]},
        least,
    )


ROUNDS = st.lists(
    st.tuples(st.sampled_from([None, "claude-fable-5", "claude-haiku-4-5"]), COUNTS, st.integers(0, 4_000)), max_size=4
)
PRICES = {None: (3, 15), "claude-fable-5": (10, 50), "claude-haiku-4-5": (1, 5)}


@st.composite
def messaged(draw):
    """A usage of Anthropic's with rounds of other models in it, and what it costs at least."""
    rounds, more = draw(ROUNDS), draw(UNKNOWN)
    iterations = [
        {
            "type": "message" if model is None else "advisor_message",
            "input_tokens": into,
            "output_tokens": out,
            **({} if model is None else {"model": model}),
        }
        for model, into, out in rounds
    ]
    into = sum(each[1] for each in rounds if each[0] is None) + draw(COUNTS)
    out = sum(each[2] for each in rounds if each[0] is None) + draw(st.integers(1, 1_000))
    least = Decimal(
        into * 3 + out * 15 + sum(PRICES[m][0] * i + PRICES[m][1] * o for m, i, o in rounds if m is not None)
    )
    least += sum(more.values()) * CHEAPEST["claude-sonnet-4-5"]
    usage = {"input_tokens": into, "output_tokens": out, "iterations": iterations, **more}
    answer = {"type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn", "usage": usage}
    return CLAUDE, "claude-sonnet-4-5", answer, least


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.one_of(chatted(), messaged()), min_size=1, max_size=4))
def test_the_books_are_never_below_the_bill(answers):
    left = iter(answers)
    policy = Policy(loop=None, spike=None, velocity=None)
    with make_guard(policy=policy) as guard, guard.session("s", budget="$90000.00") as session:
        inner = httpx.MockTransport(lambda _: httpx.Response(200, json={"model": "m", **current[2]}))
        with httpx.Client(transport=GuardedTransport(session, inner)) as http:
            for current in left:
                before = session.spent
                http.post(current[0], json={"model": current[1], **ASKED})
                assert (session.spent - before) * 1_000_000 >= current[3]
        assert session.report().to_dict()["state"] == "open"
