"""Bills that are plausible are believed, others disputed: compactions, documents, searches, cheaper tiers."""

import pytest

from tests.support.llm_provider import CHAT, ask, completion, metered
from tests.support.llm_replies import ANTHROPIC, CLAUDE, message, posted


def test_a_compaction_is_billed_with_the_answer_and_needs_an_allowance():
    edits = {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    first = {"type": "compaction", "input_tokens": 50_000, "output_tokens": 3_500}
    usage = message(
        input_tokens=3_000,
        output_tokens=500,
        iterations=[first, {"type": "message", "input_tokens": 3_000, "output_tokens": 500}],
    )
    with metered(budget="$5") as session, pytest.raises(Exception, match=r"context_management: .*stored_conversation"):
        posted(session, ANTHROPIC, CLAUDE | edits, usage)
    with metered(budget="$5", allowances={"stored_conversation": "$1"}) as session:
        _, report = posted(session, ANTHROPIC, CLAUDE | edits, usage)
    assert report["spent"] == "0.219"  # 53,000 x 3,000 + 4,000 x 15,000 nano-dollars
    assert report["state"] == "open"


def test_a_document_under_an_allowance_is_no_lie_when_it_is_long():
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    request = CLAUDE | {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}
    with metered(budget="$5", allowances={"document": "$0.50"}) as session:
        _, report = posted(session, ANTHROPIC, request, message(input_tokens=3_000, output_tokens=10))
    assert (report["spent"], report["state"]) == ("0.00915", "open")


@pytest.mark.parametrize(("count", "spent"), [(1, "0.010135"), (1_000, "10.000135"), (1_001, "10.010135")])
def test_a_search_that_was_never_offered_is_booked_as_the_provider_states_it(count, spent):
    """20 x 3,000 + 5 x 15,000 nano-dollars, and a cent for each search."""
    usage = message(input_tokens=20, output_tokens=5, server_tool_use={"web_search_requests": count})
    with metered(budget="$50") as parent, parent.child("c", budget="$1") as child:
        posted(child, ANTHROPIC, CLAUDE, usage)
        assert str(child.spent) == spent
        assert child.report().to_dict()["terminated_by"] == (None if count == 1 else "overshoot")
        assert parent.report().to_dict()["state"] == "open"


def test_more_searches_than_an_answer_can_hold_are_disputed():
    usage = message(input_tokens=20, output_tokens=5, server_tool_use={"web_search_requests": 100_000})
    with metered(budget="$50") as session:
        _, report = posted(session, ANTHROPIC, CLAUDE, usage)
    assert 10 < float(report["spent"]) < 35
    assert float(report["disputed"]) == pytest.approx(1000.000135 - float(report["spent"]))


@pytest.mark.parametrize(("asked", "said", "cost"), [("flex", None, "0.0001"), ("flex", "flex", "0.00005")])
def test_a_cheaper_tier_is_believed_on_the_answers_word_alone(asked, said, cost):
    usage = completion(
        {"prompt_tokens": 40, "completion_tokens": 5}, model="gpt-5", **({"service_tier": said} if said else {})
    )
    request = ask(model="gpt-5", service_tier=asked, messages=[{"role": "user", "content": "hi " * 40}])
    with metered(budget="$5") as session:
        _, report = posted(session, CHAT, request, usage)
    assert report["spent"] == cost  # 40 x 1,250 + 5 x 10,000 nano-dollars, and half of it
