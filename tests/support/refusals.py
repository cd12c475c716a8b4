"""What a refusal looks like, over both transports; and the raw offers and odd streams that bring it about."""

import base64
import json

import anyio
import httpx
import pytest

from tests.support.merchant import URL, async_client, client
from x402guard import PolicyDenied, ProtocolError

BASE_USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
ZERO = "0x" + "0" * 40
CENT_NANOS = 10_000_000


def fetch(mode, payer, shop, url=URL, method="GET", **more) -> httpx.Response:
    """One request through a guarded client, blocking or in an event loop."""
    options = {name: more.pop(name) for name in ("on_refusal", "follow_redirects") if name in more}
    if mode == "sync":
        with client(payer, shop, **options) as http:
            return http.request(method, url, **more)

    async def go():
        async with async_client(payer, shop, **options) as http:
            return await http.request(method, url, **more)

    return anyio.run(go)


def assert_refused(mode, guard, shop, *, rule, says=(), kind=PolicyDenied, **more):
    """The offer is refused by *rule*, which names the setting, with the value in it or beside it; nothing is signed."""
    with guard.session("attacked", budget="$1.00") as session:
        with pytest.raises(kind) as caught:
            fetch(mode, session, shop, **more)
        assert caught.value.rule == rule
        for words in says:
            assert words in f"{caught.value} {caught.value.detail}"
        assert not caught.value.money_may_have_moved
        assert_untouched(session, shop)
        assert [(row["rule"], row["count"]) for row in session.report().to_dict()["refusals"]] == [(rule, 1)]
    return caught.value


def assert_malformed(mode, guard, shop, *, field="", **more):
    """The offer is a ``ProtocolError`` naming *field*; nothing is signed, nothing held."""
    with guard.session("attacked", budget="$1.00") as session:
        with pytest.raises(ProtocolError) as caught:
            fetch(mode, session, shop, **more)
        assert field in caught.value.field
        assert_untouched(session, shop)
    return caught.value


def assert_untouched(session, shop) -> None:
    assert shop.payments == []
    assert session.held == 0
    assert session.spent == 0
    assert not [e for e in session.report().to_dict()["events"] if e["event"] == "authorize"]


def raw_header(text) -> httpx.Response:
    """A 402 whose PAYMENT-REQUIRED is exactly this text in base64, however broken it is."""
    raw = text if isinstance(text, bytes) else text.encode()
    return httpx.Response(402, headers={"PAYMENT-REQUIRED": base64.b64encode(raw).decode()}, json={})


def events(session, name) -> list:
    return [event for event in session.report().to_dict()["events"] if event["event"] == name]


def authorization_of(request) -> dict:
    """The signed terms in a paid request's header."""
    header = request.headers.get("payment-signature") or request.headers["x-payment"]
    payload = json.loads(base64.b64decode(header))["payload"]
    return payload.get("authorization") or payload["permit2Authorization"]


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in exactly these pieces, and then breaks with *error* (made by a function), if there is one."""

    def __init__(self, *pieces, error=None) -> None:
        self.pieces, self.error = pieces, error

    def __iter__(self):
        yield from self.pieces
        if self.error is not None:
            raise self.error()

    async def __aiter__(self):
        for piece in self:
            yield piece


def fresh_address() -> str:
    from eth_account import Account

    return Account.create().address
