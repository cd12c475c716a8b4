"""Rows 28 and 29: a route that has spoken v2 is not believed in v1, and nobody is paid over plain http."""

import httpx
import pytest

from tests.support.merchant import URL, Shop, accept, make_guard, required, required_v1
from tests.support.refusals import BASE_USDC, assert_refused, fetch
from x402guard import NoAcceptableOffer, Policy, PolicyDenied

V1 = required_v1()
ORIGIN = "https://courts.example:443"
NEXT = "https://courts.example/opinion/43"
"""The same route: a segment with digits varies."""


def test_a28_version_downgrade_is_refused(mode, guard):
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, Shop())
    error = assert_refused(mode, guard, Shop(terms=V1), rule="version_downgrade", says=[ORIGIN, "v2", "v1"])
    assert "may have been removed" in str(error)


def test_a28_version_downgrade_is_refused_after_reopening(mode, ledger):
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00") as session:
        fetch(mode, session, Shop())
    with make_guard(ledger) as guard:
        assert_refused(mode, guard, Shop(terms=V1), rule="version_downgrade", says=[ORIGIN], url=NEXT)


def test_a28_the_session_does_not_matter_and_the_spelling_neither(mode, guard):
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, Shop())
    url = "https://COURTS.example:443/opinion/7?page=2"
    assert_refused(mode, guard, Shop(terms=V1), rule="version_downgrade", says=[ORIGIN], url=url)


def test_a28_v1_is_taken_until_then_and_elsewhere(mode, guard):
    with guard.session("s", budget="$1.00") as session:
        for number in range(2):
            assert fetch(mode, session, Shop(terms=V1), url=f"{URL}/{number}").status_code == 200
        fetch(mode, session, Shop(), url=f"{URL}/2")
        assert fetch(mode, session, Shop(terms=V1), url="https://other.example/").status_code == 200
        with pytest.raises(PolicyDenied, match="version_downgrade"):
            fetch(mode, session, Shop(terms=V1), url=f"{URL}/3")
        assert fetch(mode, session, Shop(terms=V1), url="https://courts.example/judges").status_code == 200


def test_a28_a_v2_payment_without_an_answer_counts_too(mode, guard):
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, Shop(paid=lambda *_: httpx.Response(500)))
    assert_refused(mode, guard, Shop(terms=V1), rule="version_downgrade", says=[ORIGIN], url=NEXT)


@pytest.mark.parametrize(
    "terms",
    [required(accept(5_000_000)), required(accept(scheme="other")), required(accept(5_000_000), accept(6_000_000))],
    ids=["over the cap", "another scheme", "two over the cap"],
)
def test_a28_a_v2_offer_that_we_refused_was_spoken_all_the_same(mode, guard, terms):
    with guard.session("s", budget="$1.00") as session, pytest.raises((PolicyDenied, NoAcceptableOffer)):
        fetch(mode, session, Shop(terms=terms))
    assert_refused(mode, guard, Shop(terms=V1), rule="version_downgrade", says=[ORIGIN])


PLAIN = [
    "http://courts.example/opinion/42",
    "http://courts.example:443/",
    "http://10.0.0.7/",
    "http://192.168.1.1:8080/",
    "http://169.254.169.254/latest/meta-data",
    "http://0.0.0.0:4021/",
    "http://[::ffff:10.0.0.1]/",
    "http://[fe80::1]/",
    "http://localhost.evil.example/",
    "http://127.0.0.1.evil.example/",
    "http://evil.example/127.0.0.1",
    "http://127.0.0.1@evil.example/",
    "http://2130706433/",
    "http://127.1/",
]


@pytest.mark.parametrize("url", PLAIN)
@pytest.mark.parametrize("terms", [required(), V1], ids=["v2", "v1"])
def test_a29_plain_http_is_refused(mode, guard, url, terms):
    says = ["plain http to another machine", "https"]
    assert_refused(mode, guard, Shop(terms=terms), rule="https", says=says, url=url)


LOOPBACK = [
    "http://127.0.0.1:4021/",
    "http://localhost:4021/",
    "http://LOCALHOST/",
    "http://[::1]:4021/",
    "http://127.9.9.9/",
]


@pytest.mark.parametrize("url", LOOPBACK)
def test_a29_loopback_on_a_test_network_may_be_plain(mode, guard, url):
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, Shop(), url=url).status_code == 200


@pytest.mark.parametrize("url", LOOPBACK)
def test_a29_loopback_on_a_real_network_may_not(mode, url):
    real = accept(network="eip155:8453", asset=BASE_USDC, extra={"name": "USD Coin", "version": "2"})
    policy = Policy(networks={"eip155:8453"})
    with make_guard(policy=policy, unsafe_no_chain=True) as guard:
        says = ["plain http to a real network"]
        assert_refused(mode, guard, Shop(terms=required(real)), rule="https", says=says, url=url)


def test_a29_a_redirect_to_plain_http_is_refused_even_where_redirects_are_paid(mode):
    def terms(request):
        away = httpx.Response(302, headers={"Location": "http://courts.example/plain"})
        return away if request.url.scheme == "https" else required()

    with make_guard(policy=Policy(unsafe_pay_after_redirect=True)) as guard:
        assert_refused(mode, guard, Shop(terms=terms), rule="https", says=["plain http"], follow_redirects=True)
