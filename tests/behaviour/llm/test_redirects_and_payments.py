"""What an LLM call may lead to: a body that ends late or never, a 402 that is paid, a redirect to another metered host."""

from decimal import Decimal

import anyio
import pytest

from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ERROR, SYNC, USED, Answer, Provider, ask, completion, every_way, metered
from tests.support.merchant import PAYEE, Shop, async_client, client, make_guard
from x402guard import PolicyDenied, Unpriced


@pytest.fixture
def session():
    with metered() as session:
        yield session


# -- never closed ------------------------------------------------------------------------------------------------------------


def left_open(session, usage):
    """A response that nobody reads or closes yet, and what was held for it."""
    provider = Provider(session, Answer.of(completion(usage)))
    http = SYNC.library.Client(transport=SYNC.transport(session, provider))
    body = ask(messages=[{"role": "user", "content": "word " * 100}])
    response = http.send(http.build_request("POST", CHAT, json=body), stream=True)
    return response, provider.held[0]


@pytest.mark.parametrize(
    ("usage", "corrected"), [(USED, False), ({"prompt_tokens": 400, "completion_tokens": 100}, True)]
)
def test_a_body_that_is_never_closed_lapses_to_its_ceiling_after_900_s(ledger_url, usage, corrected):
    clock = Clock()
    with metered(ledger_url, clock=clock) as session:
        response, ceiling = left_open(session, usage)
        clock.tick(900)
        SYNC.post(session, Provider(session, Answer.of(ERROR, 429)))
        assert (session.held, session.spent) == (ceiling, 0)
        clock.tick(1)
        SYNC.post(session, Provider(session, Answer.of(ERROR, 429)))
        assert (session.held, session.spent) == (0, ceiling)
        # It ends at last. What was assumed is never lowered on a provider's word, and raised where more is owed.
        response.read()
        more = Decimal("0.002")  # 400 x 2,500 + 100 x 10,000 nano-dollars
        assert more > ceiling
        assert (session.held, session.spent) == (0, more if corrected else ceiling)


def test_a_session_that_has_ended_still_books_what_a_body_says_at_last(ledger_url):
    with metered(ledger_url) as session:
        with session.child("c", budget="$1") as child:
            response, _ = left_open(child, USED)
        assert response.read()
        assert (child.held, child.spent) == (0, Decimal("0.0001"))


# -- a 402, and redirects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_402_from_a_metered_host_is_paid_like_any_other_and_its_llm_hold_given_back(mode, ledger_url):
    shop = Shop()
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        if mode == "sync":
            response = client(session, shop).post(CHAT, json=ask())
        else:

            async def call():
                async with async_client(session, shop) as http:
                    return await http.post(CHAT, json=ask())

            response = anyio.run(call)
        assert response.status_code == 200
        assert [(amount, payee) for _, amount, payee in shop.payments] == [(10_000, PAYEE)]
        report = session.report().to_dict()
        assert (session.held, session.spent) == (0, Decimal("0.01"))
        assert (report["llm"]["calls"], report["payments"]["calls"]) == (0, 1)
        assert response.extensions["x402guard"].amount == Decimal("0.01")


@every_way
def test_a_402_without_an_offer_costs_nothing(way, session):
    provider = Provider(session, Answer.of({"error": {"code": 402, "message": "Insufficient credits"}}, 402))
    assert way.post(session, provider)[0].status_code == 402
    assert provider.outcome == "void"


def test_a_402_that_cannot_be_paid_is_refused_with_nothing_held():
    with metered(guard={"signer": None}) as session:
        with pytest.raises(PolicyDenied, match="no_signer"):
            client(session, Shop()).post(CHAT, json=ask())
        assert (session.held, session.spent) == (0, 0)


def moved(to, status=307):
    return Answer(status, [], {"location": to})


@every_way
def test_each_hop_from_one_metered_host_to_another_has_a_hold_of_its_own(way, session):
    provider = Provider(session, moved("https://eu.api.openai.com/v1/chat/completions"), Answer.of())
    response, _ = way.post(session, provider, follow_redirects=True)
    assert response.extensions["x402guard"].evidence == "provider_usage"
    events = [event["event"] for event in session.report().to_dict()["events"]]
    assert (events, session.held, session.spent) == (
        ["authorize", "void", "authorize", "capture"],
        0,
        Decimal("0.0001"),
    )


@every_way
def test_a_redirect_to_a_host_where_nobody_can_price_the_model_is_refused(way, session):
    provider = Provider(session, moved("https://api.mistral.ai/v1/chat/completions"), Answer.of())
    with pytest.raises(Unpriced, match="redirected to is an LLM call that cannot be priced"):
        way.post(session, provider, follow_redirects=True)
    assert (len(provider.requests), session.held, session.spent) == (1, 0, 0)


@every_way
@pytest.mark.parametrize("status", [302, 303])
def test_a_redirect_that_turns_into_a_get_counts_the_ceiling(way, session, status):
    """The call has been made, and its answer may be there: hosts lead to it so when a call takes long."""
    provider = Provider(session, moved("https://api.openai.com/v1/models", status), Answer.of({"data": []}))
    way.post(session, provider, follow_redirects=True)
    assert [request.method for request in provider.requests] == ["POST", "GET"]
    assert [event["event"] for event in session.report().to_dict()["events"]] == ["authorize", "capture"]
    assert (session.held, session.spent) == (0, provider.held[0])


@every_way
@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_a_refusal_with_content_or_usage_counts_the_ceiling(way, session, status):
    provider = Provider(session, Answer.of(status=status), Answer.of({"error": {"message": "no"}}, status=status))
    for spends in (True, False):
        before = session.spent
        way.post(session, provider)
        assert (session.held, session.spent > before) == (0, spends)
