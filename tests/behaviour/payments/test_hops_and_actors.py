"""The orders of those who act while a redirect of a paid answer is followed through the proxy, as a product.

A purchase is open from its payment until the whole of what it has paid for has come: until then each request for it
presents that payment, whatever else is asked for meanwhile, by which caller, and in which process.
"""

import itertools
import json
from contextlib import ExitStack, closing

import anyio
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock, weigh_proven
from tests.support.merchant import b64, make_guard, receipt
from tests.support.slow_server import CHUNKED, HEAD, Trickler, once_paid
from x402guard import Policy
from x402guard.flow.drivers import run
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.web.access import Access
from x402guard.web.hops import Hops
from x402guard.web.proxy import SESSION, Proxy
from x402guard.web.reach import Reach
from x402guard.x402.settlement import sweep

TOKEN = "x402_of-the-callers"
FLIGHT_S = 150  # three of them are less than the ten minutes for which a hop is known
GOODS = b"content-length: 9\r\n\r\nthe goods"
PART = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-2/9\r\ncontent-length: 3\r\n\r\nthe"


class Scene:
    """A shop whose paid answers lead to a file, and two processes with a proxy each, over one ledger."""

    def __init__(self, folder, leads):
        self.left, self.clock, self.breaks = ExitStack(), Clock(), False
        self.shop, other = (self.left.enter_context(Trickler()) for _ in range(2))
        self.shop.answers["/buy"] = once_paid(self.redirects)
        self.files = other if leads == "another host" else self.shop
        self.files.answers |= {
            "/file": self.gives,
            "/page": lambda line: line.send(HEAD + b"content-length: 1\r\n\r\nx"),
        }
        self.guards, self.hops = [], []
        self.proxies = [self.proxy(f"sqlite:///{folder / 'spend.db'}") for _ in range(2)]

    def proxy(self, ledger):
        store = self.left.enter_context(closing(open_store(ledger, clock_ms=self.clock)))
        policy = Policy(breaker=None, loop=None)
        guard = self.left.enter_context(make_guard(store, policy=policy, chains=MockChain(), flight_s=FLIGHT_S))
        session = self.left.enter_context(closing(guard.session("s", budget="$1.00", id="run")))
        access = Access(names=("testserver",), viewer="", owner="")
        reach = Reach(Policy(hosts={"127.0.0.1"}))
        proxy = Proxy({TOKEN: session}, upstreams={}, keys={}, reach=reach, access=access, own=("testserver", 1))
        proxy._hops = Hops(lambda: self.clock() / 1000)
        self.guards.append(guard)
        return proxy

    def redirects(self, line):
        shown = b64(receipt(transaction=f"0x{int(line.asked.nonce, 16):064x}"))
        head = f"HTTP/1.1 303 See Other\r\nlocation: {self.files.url}/file\r\nPAYMENT-RESPONSE: {shown}\r\n"
        line.send(head.encode() + b"content-length: 0\r\n\r\n")

    def gives(self, line):
        if line.asked.header("range"):
            return line.send(PART)
        if line.asked.header("if-none-match"):
            return line.send(b"HTTP/1.1 304 Not Modified\r\n\r\n")
        if self.breaks:
            return line.send(HEAD + CHUNKED + b"3\r\nthe\r\n") or False
        return line.send(HEAD + (GOODS.removesuffix(b"the goods") if line.asked.method == "HEAD" else GOODS))

    @property
    def payments(self):
        return len(set(self.shop.nonces)) + len(set(self.files.nonces) - set(self.shop.nonces))

    async def ask(self, path, *, at=0, method="GET", **headers):
        """Return (status, Location, body, whether it came whole) of a request to the proxy *at*."""
        told, sent = iter([{"type": "http.request", "body": b"", "more_body": False}]), []

        async def receive():
            return next(told, None) or await anyio.sleep_forever()

        async def send(message):
            sent.append(message)

        lines = {
            "host": "testserver",
            SESSION: TOKEN,
            **{name.replace("_", "-"): each for name, each in headers.items()},
        }
        raw = [(name.encode(), value.encode()) for name, value in lines.items()]
        scope = {"type": "http", "method": method, "raw_path": path.encode(), "query_string": b"", "headers": raw}
        await self.proxies[at](scope, receive, send)
        head, parts = dict(sent[0]["headers"]), [each for each in sent if each["type"] == "http.response.body"]
        where = head.get(b"location", b"").decode()
        return sent[0]["status"], where, b"".join(each["body"] for each in parts), not parts[-1].get("more_body")

    async def buys(self, at=0):
        """Ask for what is sold, once a hop that is on its way has come or does not; return why it is not sold."""
        self.clock.tick(11)
        status, where, body, _ = await self.ask(f"/{self.shop.url}/buy", at=at)
        if status != 303:
            told = json.loads(body)
            return told.get("rule", told["code"])
        self.hops.append((where, self.payments, at))
        return None

    async def follows(self, which=-1, **more):
        where, _, at = self.hops[which]
        return await self.ask(where, at=at, **more)

    async def breaks_off(self):
        self.breaks = True
        try:
            assert not (await self.follows())[3]
        finally:
            self.breaks = False

    async def reads(self, which=-1):
        status, _, body, is_whole = await self.follows(which)
        assert (status, body, is_whole) == (200, b"the goods", True)

    async def reads_elsewhere(self):
        """The process that has not paid knows nothing of the hop, and passes its answer on."""
        where, _, at = self.hops[-1]
        assert (await self.ask(where, at=1 - at))[2] == b"the goods"

    async def reads_beside(self):
        where, _, at = self.hops[-1]
        assert (await self.ask(where.removesuffix("file") + "page", at=at))[2] == b"x"

    async def waits(self):
        self.clock.tick(FLIGHT_S)

    def proves(self):
        store = self.guards[1].shell.store
        for hold_id in list(store.unsettled(0)):
            hold = store.hold(hold_id)
            finding = Settled(hold.payment().amount_atomic, f"0x{hold.payment().nonce:064x}", 0, final=True)
            scope = Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=weigh_marks(hold, finding), durable=True)
            store.transact(scope, lambda view, hold=hold, finding=finding: weigh_proven(view, hold.id, finding))

    def sweeps(self):
        for guard in self.guards:
            run(sweep(guard.context), guard.shell)


HOPS = {
    "HEAD": lambda scene: scene.follows(method="HEAD"),
    "a part": lambda scene: scene.follows(range="bytes=0-2"),
    "unchanged": lambda scene: scene.follows(if_none_match='"x"'),
    "a post": lambda scene: scene.follows(method="POST"),
    "a body that breaks": lambda scene: scene.breaks_off(),
}
"""What a caller asks for where the redirect leads; none of it is what was paid for."""

ACTORS = {
    **HOPS,
    "a page beside it": lambda scene: scene.reads_beside(),
    "in the other process": lambda scene: scene.reads_elsewhere(),
    "the chain proves it": lambda scene: anyio.to_thread.run_sync(scene.proves),
    "a sweep": lambda scene: anyio.to_thread.run_sync(scene.sweeps),
    "time passes": lambda scene: scene.waits(),
    "a caller buys": lambda scene: scene.buys(),
    "another process buys": lambda scene: scene.buys(at=1),
    "it is read": lambda scene: scene.reads(),
    "the first one is read": lambda scene: scene.reads(0),
}


async def played(scene, order):
    """Play an order of actors, and hold the payments and the answers against what they should be after each."""
    bought, delivered, by, until = 0, {0}, 0, 0
    try:
        for name in ("a caller buys", *order, "it is read", "a caller buys"):
            at, is_open = int("another" in name), bought not in delivered
            said = await ACTORS[name](scene)
            if name.endswith("buys"):
                in_time = scene.clock() < until
                refused = "in_flight" if in_time and by not in (None, at) else None if in_time else "paid_not_delivered"
                assert said == (refused if is_open else None), (order, name)
                if not is_open:
                    bought, until = bought + 1, scene.clock() + 50_000
                by = at if said is None else by
            elif name.endswith("read"):
                # A payment that was presented again is delivered by what follows that: it has the later answer.
                _, purchase, _ = read = scene.hops[0 if "first" in name else -1]
                if read == [hop for hop in scene.hops if hop[1] == purchase][-1]:
                    delivered.add(purchase)
            elif name in HOPS and is_open:
                # What has broken is lost in the ledger, and any process presents it; another hop has it under way again.
                by = None if name.endswith("breaks") else scene.hops[-1][2]
            assert scene.payments == bought, (order, name)
    finally:
        for proxy in scene.proxies:
            await proxy._inner.aclose()


LEADS = ("the same host", "another host")


@pytest.mark.one_in(7)
@pytest.mark.parametrize("leads", LEADS)
@pytest.mark.parametrize("first", ACTORS)
def test_orders_of_two(tmp_path, leads, first):
    for number, order in enumerate(itertools.product([first], ACTORS)):
        check(tmp_path / str(number), leads, order)


@pytest.mark.long
@pytest.mark.one_in(5)
@pytest.mark.parametrize("leads", LEADS)
@pytest.mark.parametrize(("first", "second"), [*itertools.product(ACTORS, repeat=2)])
def test_orders_of_three(tmp_path, leads, first, second):
    for number, order in enumerate(itertools.product([first], [second], ACTORS)):
        check(tmp_path / str(number), leads, order)


def check(folder, leads, order):
    folder.mkdir()
    scene = Scene(folder, leads)
    with scene.left:
        anyio.run(played, scene, order)
