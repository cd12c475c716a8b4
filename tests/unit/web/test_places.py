"""Which spellings of a URL are one place: those that a client may make of another one, and no others."""

import pytest

from x402guard.web.hops import place_of

HOST = "https://shop.example"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("/dl/abc%3D%3D", "/dl/abc=="), ("/dl/a%26b%3Bc", "/dl/a&b;c"), ("/dl?n=100%", "/dl?n=100%25"), ("/dl/a b", "/dl/a%20b"),
        ("/dl#part", "/dl"), ("/dl/%c3%bc", "/dl/ü"), ("/a%2fb", "/a%2Fb"), ("/a|b", "/a%7Cb"),
    ],
)  # fmt: skip
def test_what_clients_make_of_a_place_is_that_place(given, asked):
    """aiohttp writes some delimiters of a path plain, and aiohttp and requests a bare percent sign as %25."""
    assert place_of(f"{HOST}{given}") == place_of(f"{HOST}{asked}")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("/dl?of=a%26sum", "/dl?of=a&sum"),
        ("/a%2Fb", "/a/b"),
        ("/a%3Fb", "/a?b"),
        ("/a%2523", "/a%23"),
        ("/a%23b", "/a#b"),
    ],
)
def test_an_escaped_delimiter_is_none(given, asked):
    assert place_of(f"{HOST}{given}") != place_of(f"{HOST}{asked}")
