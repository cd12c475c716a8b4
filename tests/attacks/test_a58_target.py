"""What leaves is what was judged: httpx's ``target`` sends another path than the URL says."""

from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import URL, Shop, client, make_guard
from tests.support.refusals import fetch
from x402guard import BudgetExhausted, PolicyDenied, Rule, Unpriced
from x402guard.policy import Policy


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("target", [b"/buy", "/buy", b"", None, 7])
def test_a58_a_request_that_sends_another_path_than_its_url_is_refused(mode, target):
    shop = Shop()
    policy = Policy(breaker=None, rules=[Rule(name="no buying", action="deny", match="GET api.example/buy")])
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="target") as caught:
            fetch(mode, session, shop, url="https://api.example/free", extensions={"target": target})
        assert (caught.value.rule, caught.value.request.url.path) == ("target", "/free")
        assert (shop.seen, session.held, session.spent) == ([], 0, 0)


def test_a58_the_mark_of_a_guarded_request_counts_for_that_object_once():
    """A transport below the guard copies the extensions, and the caller sends them along: no way past."""
    shop, sent = Shop(), []

    def below(request):
        sent.append(request)
        return shop(request)

    with make_guard() as guard, guard.session("s", budget="$0.01") as session, client(session, below) as http:
        assert http.get(URL).status_code == 200
        copied = {key: value for key, value in sent[0].extensions.items() if "guarded" in key}
        assert copied
        for request in (http.build_request("GET", f"{URL}/2", extensions=copied), sent[0], sent[0]):
            request.headers.pop("payment-signature", None)
            with pytest.raises(BudgetExhausted):  # so it is guarded
                http.send(request)
        assert (len(shop.payments), session.spent) == (1, Decimal("0.01"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a58_a_host_header_of_another_host_is_not_paid(mode):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match=r"Host: seller\.example") as caught:
            fetch(mode, session, shop, headers={"Host": "seller.example"})
        assert (caught.value.rule, shop.payments, session.held) == ("host_header", [], 0)
        assert fetch(mode, session, shop, headers={"Host": "Courts.example:443"}).status_code == 200


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a58_a_host_header_of_another_host_is_not_metered(mode):
    seen = []

    def server(request):
        seen.append(request)
        return httpx.Response(200, json={})

    asks = {"model": "gpt-4o-mini", "max_completion_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    url, headers = "https://api.openai.com/v1/chat/completions", {"Host": "elsewhere.example"}
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(Unpriced, match="host_header"):
            fetch(mode, session, server_of(server), url=url, method="POST", headers=headers, json=asks)
        assert (seen, session.held, session.spent) == ([], 0, 0)


def server_of(handler):
    async def answer(request):
        return handler(request)

    handler.answer = answer
    return handler
