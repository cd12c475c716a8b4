"""What the attacks share: odd streams, raw offers, a chain in a function, signers that watch, and what a refusal looks like."""

import base64
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import pytest
from eth_account import Account

from tests.support.merchant import KEY, NETWORK, URL, async_client, client
from x402guard import LocalSigner, PolicyDenied, ProtocolError
from x402guard.flow.ports import Funds
from x402guard.ledger.evidence import Unreadable

ROOT = Path(__file__).parents[2]
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
    """The offer is refused by *rule* in words that name value and setting; nothing is signed, nothing held."""
    with guard.session("attacked", budget="$1.00") as session:
        with pytest.raises(kind) as caught:
            fetch(mode, session, shop, **more)
        assert caught.value.rule == rule
        for words in says:
            assert words in str(caught.value)
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
    """A body that comes in exactly these pieces."""

    def __init__(self, *pieces) -> None:
        self.pieces = pieces

    def __iter__(self):
        yield from self.pieces

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


@dataclass
class Clock:
    """A clock that stands still until it is told otherwise; unix milliseconds."""

    ms: int = 1_760_000_000_000

    def __call__(self) -> int:
        return self.ms

    def forward(self, seconds) -> None:
        self.ms += int(seconds * 1000)


@dataclass
class MockChain:
    """A ``ChainReader`` whose findings are set by hold id, or by a function of the hold."""

    finding: object = None
    networks: frozenset = frozenset({NETWORK})
    asked: list = field(default_factory=list)

    def read(self, hold):
        self.asked.append(hold.id)
        found = self.finding(hold) if callable(self.finding) else self.finding
        return Unreadable("nothing is known") if found is None else found

    def funds(self, network, token, owner):
        return Funds(10**12, 10**12)

    def close(self) -> None:
        pass


class SpySigner:
    """A signer that does something around every signature of the real one, and counts them."""

    inline = False

    def __init__(self, *, before=None, after=None) -> None:
        self.inner = LocalSigner.from_key(KEY)
        self.before = before
        self.after = after
        self.signed = []

    @property
    def address(self):
        return self.inner.address

    def bind(self, lookup) -> None:
        self.inner.bind(lookup)

    def sign(self, hold) -> bytes:
        if self.before is not None:
            self.before(hold)
        signature = self.inner.sign(hold)
        self.signed.append(hold)
        return signature if self.after is None else self.after(signature)


def start(script, *args) -> subprocess.Popen:
    """Start a script of this package as a process of its own."""
    module = f"tests.support.{script}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", module, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def fresh_address() -> str:
    return Account.create().address
