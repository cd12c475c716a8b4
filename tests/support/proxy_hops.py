"""Redirects of a shop behind the proxy, and a download that was paid for and broke behind one."""

import httpx
import pytest

from tests.support.merchant import b64, receipt
from tests.support.proxy import asked
from tests.support.slow_server import CHUNKED, HEAD, once_paid


def redirect(where, *, paid=False):
    shown = f"PAYMENT-RESPONSE: {b64(receipt())}\r\n" if paid else ""
    return f"HTTP/1.1 302 Found\r\nlocation: {where}\r\n{shown}content-length: 0\r\n\r\n".encode()


BROKEN = HEAD + CHUNKED + b"4\r\nhalf\r\n"


def broken_download(shop, proxied):
    """The place of a download that was paid for and broke behind its redirect, as its caller sees it."""
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/files/download", paid=True)))
    shop.answers["/files/download"] = lambda line: line.send(BROKEN) or False
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, hop)
    return hop
