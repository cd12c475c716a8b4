"""Row 76: a model writes the same request again in another spelling, and it is bought again."""

import httpx
import pytest

from tests.support.merchant import Shop, make_guard
from tests.support.refusals import fetch
from x402guard import Policy, PolicyDenied

SPELT = (
    [
        ("GET", "https://shop.example:443/v1/./%6Fpinion/42?b=2&a=1%20x", b""),
        ("GET", "HTTPS://Shop.example/v1/opinion/42?a=1+x&b=2", b""),
    ],
    [
        ("POST", "https://shop.example/v1", b'{"q": "Roe", "page": 1.0}'),
        ("POST", "https://shop.example/v1#part", b'{"page":1.00,"q":"\\u0052oe"}\n'),
        ("POST", "https://shop.example/v1", '{"q": "Roe", "page": 1.0}'.encode("utf-16")),
    ],
)
APART = [
    ("GET", "https://shop.example/v1?a=1&a=2", b""),
    ("GET", "https://shop.example/v1?a=1", b""),
    ("GET", "https://shop.example/v1?a=2&a=1", b""),
    ("GET", "https://shop.example/v1/a/b", b""),
    ("GET", "https://shop.example/v1/a%2Fb", b""),
    ("GET", "https://shop.example/v1/%E4", b""),
    ("GET", "https://shop.example/v1/%FC", b""),
    ("GET", "https://shop.example/v1?a=%ff", b""),
    ("GET", "https://shop.example/v1?a=%fe", b""),
    ("GET", "http://127.0.0.1:8443/v1?a=1", b""),
    ("GET", "http://127.0.0.1/v1?a=1", b""),
    ("POST", "https://shop.example/v1?a=1", b""),
    ("POST", "https://shop.example/v1?a=1", b'{"q": [1, 2]}'),
    ("POST", "https://shop.example/v1?a=1", b'{"q": [2, 1]}'),
    ("POST", "https://shop.example/v1?a=1", b'{"q": "1"}'),
    ("POST", "https://shop.example/v1?a=1", b'{"q": 1.' + b"0" * 40 + b"1}"),
    ("POST", "https://shop.example/v1?a=1", b'{"q": 1.' + b"0" * 40 + b"2}"),
    ("POST", "https://shop.example/v1?a=1", b"[1]"),
    ("POST", "https://shop.example/v1?a=1", b'[1],"x":[2]'),
    ("POST", "https://shop.example/v1?a=1", b'{"q": 1, "q": 2}'),
    ("POST", "https://shop.example/v1?a=1", b'{"stream": true, "q": "1"}'),
]


@pytest.mark.parametrize("spelt", SPELT, ids=["url", "json"])
def test_a76_one_request_that_is_spelt_anew_is_a_repeat(spelt):
    (method, url, body), *others = spelt
    shop = Shop()
    with make_guard(policy=Policy(repeat="refuse")) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop, method=method, url=url, content=body)
        for method, url, body in others:
            with pytest.raises(PolicyDenied, match="bought the same request before"):
                fetch("sync", session, shop, method=method, url=url, content=body)
    assert len(shop.payments) == 1


def test_a76_requests_that_say_another_thing_are_no_repeats():
    shop = Shop()
    with (
        make_guard(policy=Policy(repeat="refuse", velocity=None)) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        for method, url, body in APART:
            assert fetch("sync", session, shop, method=method, url=url, content=body).status_code == 200
    assert len(shop.payments) == len(APART)


@pytest.mark.parametrize("size", [2**18 - 100, 2**18 + 100])
def test_a76_a_large_body_counts_by_its_bytes(size):
    bodies = [b'{"q": "' + b"x" * size + b'", "a": 1}', b'{"a": 1, "q": "' + b"x" * size + b'"}']
    shop = Shop()
    with make_guard(policy=Policy(repeat="refuse")) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop, method="POST", content=bodies[0])
        for body in bodies if size < 2**18 else bodies[:1]:
            with pytest.raises(PolicyDenied, match="bought the same request before"):
                fetch("sync", session, shop, method="POST", content=body)
        if size > 2**18:
            assert fetch("sync", session, shop, method="POST", content=bodies[1]).status_code == 200


def test_a76_a_purchase_in_doubt_is_presented_again_in_any_spelling():
    """A seller keeps the payment and answers 502; the model writes the parameters in another order."""
    shop = Shop(paid=lambda *_: httpx.Response(502))
    with (
        make_guard(policy=Policy(repeat="refuse", breaker=None)) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        for url in (
            "https://shop.example/v1?a=1&b=2",
            "https://shop.example/v1?b=2&a=1",
            "https://shop.example/v1?b=%32&a=1",
        ):
            fetch("sync", session, shop, url=url)
        assert (len(shop.payments), len(shop.nonces)) == (3, 1)
