"""Where a path of the proxy leads."""

import pytest

from x402guard.web.upstream import target


@pytest.mark.parametrize("host", ["[::1]:80", "%5B::1%5D:80", "%5b::1%5d:80"])
def test_an_ipv6_address_is_one_however_a_client_escapes_it(host):
    """To ``requests`` and ``aiohttp`` it stands in a path, where its brackets are escaped."""
    found = target(f"/http://{host}/a%5Bb%5D", "x=%5B1%5D", {})
    assert found.url == "http://[::1]:80/a%5Bb%5D?x=%5B1%5D"
