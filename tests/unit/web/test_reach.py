"""Which addresses are of one machine of the internet."""

import anyio
import httpx
import pytest

from tests.support import proxy
from x402guard import Policy, PolicyDenied
from x402guard.web.reach import Reach, denied_by_address, is_public

shop = proxy.shop


@pytest.mark.parametrize("address", ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:830::200e"])
def test_one_of_the_internet_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.0.8",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::127.0.0.1", "::a00:1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::", "2001::1", "2001:db8::1", "fe80::1",
        "fec0::1", "fd00::1", "ff02::1",
    ],
)  # fmt: skip
def test_one_of_a_network_or_in_disguise_is_not(address):
    assert not is_public(address)


def asked(url, named=(), **rules):
    """Ask a URL through the transport of a reach, as the proxy and the wallet do."""

    async def ask():
        reach = Reach(Policy(**rules), named)
        denied = reach.judge(httpx.URL(url))
        if denied is not None:
            raise denied
        async with reach.transport() as transport, httpx.AsyncClient(transport=transport) as client:
            try:
                return (await client.get(url)).status_code
            except httpx.ConnectError as error:
                denied = denied_by_address(error)
                if denied is not None:
                    raise denied from None
                raise

    return anyio.run(ask)


@pytest.mark.parametrize(
    "url",
    [
        "http://seller.example/", "https://localhost/", "https://127.0.0.1/", "https://[::1]/", "https://2130706433/",
        "https://0x7f.1/", "https://[64:ff9b::a9fe:a9fe]/", "https://169.254.169.254/",
    ],
)  # fmt: skip
def test_a_host_inside_is_refused(url):
    with pytest.raises((PolicyDenied, httpx.ConnectError)):
        asked(url)


def test_a_name_that_leads_inside_is_refused_where_it_is_connected_to(monkeypatch):
    """The name is looked up once: a server of names that answers otherwise the second time gains nothing."""
    looked_up = []

    def inside(host, *_, **__):
        looked_up.append(host)
        return [(0, 0, 0, "", (address, 443)) for address in ("93.184.215.14", "10.0.0.7")]

    monkeypatch.setattr("x402guard.web.reach.socket.getaddrinfo", inside)
    with pytest.raises(PolicyDenied, match=r"host seller\.example is inside this network; the owner can list it"):
        asked("https://seller.example/x")
    assert looked_up == ["seller.example"]


def test_the_owners_list_is_the_owners_word(shop):
    port = httpx.URL(shop.url).port
    for more in ({"hosts": {"127.0.0.1"}}, {"hosts": {f"127.0.0.1:{port}"}}, {"named": {shop.url}}):
        assert asked(f"{shop.url}/free", **more) < 500
    with pytest.raises(PolicyDenied, match=r"host 127.0.0.1:8001 is not in policy.hosts"):
        asked("http://127.0.0.1:8001/", hosts={"127.0.0.1:8000"})


def test_of_an_api_that_the_owner_has_named_what_is_below_its_base_is_reached(shop):
    base = f"{shop.url}/v1"
    assert asked(f"{base}/models", named={base}) < 500
    assert asked(f"{shop.url}/v1", named={base}) < 500
    port = httpx.URL(shop.url).port
    for beside in (
        f"{shop.url}/admin", f"{shop.url}/v1/../admin", f"{shop.url}/v1/%2e%2e/admin", f"{shop.url}/v10", f"{shop.url}/V1/x",
        f"https://127.0.0.1:{port}/v1/x", f"http://127.0.0.1:{port + 1}/v1/x", f"https://seller.example:{port}/",
    ):  # fmt: skip
        with pytest.raises((PolicyDenied, httpx.ConnectError)):
            asked(beside, named={base})


def test_a_host_of_an_api_is_reached_elsewhere_by_no_other_scheme_or_path():
    """It is connected to wherever its name leads, so that nothing else of it may be asked."""
    with pytest.raises(PolicyDenied, match="inside this network"):
        asked("https://llm.example/admin", named={"https://llm.example/v1"})
