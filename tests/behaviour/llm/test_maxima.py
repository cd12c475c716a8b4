"""Output limits that the provider does not read are none, and a maximum that is named is made true."""

import json

import httpx

from tests.support.llm_provider import CHAT, ask, completion, metered
from tests.support.llm_replies import posted, used
from tests.support.merchant import client
from x402guard import Guard, Metering, ModelPrice


def test_a_limit_that_its_provider_does_not_read_is_none():
    request = ask(model="deepseek-chat", max_completion_tokens=5)
    with metered(budget="$5") as session:
        _, report = posted(session, "https://api.deepseek.com/chat/completions", request, completion({**used(20, 760)}))
        assert (report["state"], session.spent > 0) == ("open", True)
    assert report["events"][0]["ceiling"]["output_tokens"] > 100_000


def test_a_maximum_that_somebody_names_is_made_true():
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=completion(used(20, 5)))

    metering = Metering(models={"mine": ModelPrice(input="$1", output="$2", max_output=512)})
    with Guard(ledger="memory://", metering=metering) as guard, guard.session("s", budget="$5") as session:
        client(session, answer).post(CHAT, json=ask(model="mine", max_completion_tokens=None))
        assert (sent[0]["max_completion_tokens"], str(session.spent)) == (512, "0.00003")
