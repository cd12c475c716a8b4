"""Which addresses are of one machine of the internet."""

import anyio
import httpx
import pytest

from x402guard import Policy, PolicyDenied
from x402guard.web.reach import is_public, refuse_inside


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


def judged(url, **rules):
    return anyio.run(refuse_inside, httpx.URL(url), Policy(**rules))


@pytest.mark.parametrize(
    "url",
    [
        "http://seller.example/", "https://localhost/", "https://127.0.0.1/", "https://[::1]/", "https://2130706433/",
        "https://0x7f.1/", "https://[64:ff9b::a9fe:a9fe]/", "https://169.254.169.254/",
    ],
)  # fmt: skip
def test_a_host_inside_is_refused(url):
    with pytest.raises((PolicyDenied, httpx.ConnectError)):
        judged(url)


def test_the_owners_list_is_the_owners_word():
    judged("http://127.0.0.1:8000/", hosts={"127.0.0.1:8000"})
    with pytest.raises(PolicyDenied, match=r"host 127.0.0.1:8001 is not in policy.hosts"):
        judged("http://127.0.0.1:8001/", hosts={"127.0.0.1:8000"})
