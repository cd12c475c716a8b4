"""Another actor acts between the head of a paid answer and its end: a short one comes out as a long one does."""

import itertools
from contextlib import ExitStack, closing, suppress

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock, weigh_proven
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required, upto
from tests.support.refusals import Chunks
from x402guard import ConfigError, Policy, X402GuardError
from x402guard.flow.drivers import run
from x402guard.guard.owner import Owner
from x402guard.kernel.rows import Delivery
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled, Unused, Used
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.x402.settlement import sweep

pytestmark = pytest.mark.usefixtures("_before_the_books")


class Scene:
    """A purchase whose answer is being read."""

    def __init__(self, tmp_path, terms, length):
        self.clock = Clock()
        self.url = f"sqlite:///{tmp_path / 'spend.db'}"
        self.store = open_store(self.url, clock_ms=self.clock)
        self.guard = make_guard(self.store, policy=Policy(breaker=None, loop=None), chains=MockChain())
        self.shop = Shop(terms=terms)
        self.length = length
        self.left = ExitStack()
        self.left.enter_context(self.guard)
        self.session = self.left.enter_context(self.guard.session("s", budget="$1.00", id="run"))

    def answers(self, end):
        headers = {
            "PAYMENT-RESPONSE": b64(receipt(**({"amount": "10000"} if "facilitator" in str(self.shop.terms) else {})))
        }
        headers |= {"content-length": "9"} if self.length else {}
        error = (lambda: httpx.ReadError("cut")) if end == "broken" else None
        body = Chunks(b"the ", *(() if error else (b"goods",)), error=error)
        return lambda *_: httpx.Response(200, headers=headers, stream=body)

    @property
    def hold(self):
        [hold] = [hold for hold in map(self.store.hold, self.ids) if hold is not None]
        return hold

    @property
    def ids(self):
        return list(dict.fromkeys(entry.hold_id for entry in self.store.entries("run") if entry.hold_id))

    def found(self, finding):
        hold = self.hold
        scope = Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=weigh_marks(hold, finding), durable=True)
        self.store.transact(scope, lambda view: weigh_proven(view, hold.id, finding))

    def ask(self):
        try:
            with client(self.session, self.shop) as http:
                answer = http.get(URL)
            return answer.status_code, answer.extensions["x402guard"].presented
        except X402GuardError as error:
            return type(error).__name__

    def close(self):
        self.left.close()
        self.store.close()


def settled(scene, *, final, amount=None):
    units = scene.hold.payment().amount_atomic if amount is None else amount
    scene.found(Settled(units, "0x" + "ab" * 32, 0, final=final))


def proves_less(scene):
    """An ``exact`` of which less arrives, as of a token that keeps a fee, is captured in full."""
    settled(scene, final=True, amount=1)


def forgiven(scene):
    with Owner(scene.url) as owner, suppress(ConfigError):  # what was handed over keeps nothing open
        owner.forgive(scene.hold.id, unsafe_in_flight=True)


def restarted(scene):
    with make_guard(scene.url) as other, other.session("other", budget="$0.10"):
        pass


def later(seconds):
    return lambda scene: scene.clock.tick(seconds)


ACTORS = {
    "nothing": lambda _scene: None,
    "the chain shows it": lambda scene: settled(scene, final=False),
    "the chain proves it": lambda scene: settled(scene, final=True),
    "the chain proves less": proves_less,
    "the chain shows a used nonce": lambda scene: scene.found(Used(final=True)),
    "the chain is behind": lambda scene: scene.found(Unused(scene.clock() // 1000 - 5)),
    "the chain is past it": lambda scene: (scene.clock.tick(3_700), scene.found(Unused(scene.clock() // 1000))),
    "a sweep": lambda scene: run(sweep(scene.guard.context), scene.guard.shell),
    "a sweep after a while": lambda scene: (scene.clock.tick(400), run(sweep(scene.guard.context), scene.guard.shell)),
    "the owner forgives": forgiven,
    "another guard opens": restarted,
    "time passes": later(200),
    "a day passes": later(90_000),
    "the same request": lambda scene: setattr(scene, "beside", scene.ask()),
    "the same request after a while": lambda scene: (scene.clock.tick(200), setattr(scene, "beside", scene.ask())),
    "the session ends": lambda scene: scene.session.close(),
}
ENDS = ("read", "broken", "interrupted", "closed", "left")


def played(tmp_path, terms, actor, end, *, length):
    """Return what a purchase looks like at its end, and what the next request gets."""
    folder = tmp_path / f"{length}"
    folder.mkdir()
    scene = Scene(folder, terms, length)
    try:
        scene.shop.paid = scene.answers(end)
        http = scene.left.enter_context(client(scene.session, scene.shop))
        response = http.send(http.build_request("GET", URL), stream=True)
        scene.shop.paid = None
        ACTORS[actor](scene)
        told = ended(response, end)
        first = scene.store.hold(scene.ids[0])
        is_open = first.delivery in (Delivery.OPEN, Delivery.LOST) and end != "left"
        after = (first.captured, is_open, first.presented)
        again = [scene.ask() for _ in range(2)]
        assert not scene.guard.context.in_flight.keys() - ({(first.id, 0)} if end == "left" else set())
        counted = scene.session.spent + scene.session.held
        assert scene.store.audit() == []
        return told, after, getattr(scene, "beside", None), again, len(scene.shop.nonces), counted
    finally:
        scene.close()


def ended(response, end):
    if end == "left":
        return None
    try:
        with closing(response):
            if end == "closed":
                return "closed"
            if end == "interrupted":
                raise KeyboardInterrupt
            return response.read()
    except (httpx.HTTPError, X402GuardError, KeyboardInterrupt) as error:
        return type(error).__name__


@pytest.mark.one_in(3)
@pytest.mark.parametrize("terms", [required(), required(upto())], ids=["exact", "upto"])
@pytest.mark.parametrize(("actor", "end"), [*itertools.product(ACTORS, ENDS)])
def test_a_short_answer_comes_out_as_a_long_one(tmp_path, terms, actor, end):
    short, long = (played(tmp_path, terms, actor, end, length=length) for length in (True, False))
    asks = ("the same request", "the same request after a while")
    if (end == "broken" and actor in (*asks, "a day passes")) or (end, actor) == ("interrupted", "the owner forgives"):
        # It is recorded before its caller reads it. One that broke is presented again, by those who ask beside it, too,
        # and is remembered from then on; one that is handed over keeps nothing open that could be forgiven.
        assert (short[0], short[4] <= long[4] or actor == "a day passes") == (long[0], True), (short, long)
    else:
        assert short == long
