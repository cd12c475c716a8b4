"""A power cut after any commit: what was synced survives, and it counts at least what the chain can take."""

import random
import sqlite3
import ssl

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.disks import FULL, Disk, revived, watching
from tests.support.ledger import Clock
from tests.support.merchant import KEY, URL, Shop, accept, b64, make_guard, permit2, receipt, required, upto
from tests.support.refusals import fetch
from x402guard import GuardedTransport, LocalSigner, Policy, Rule, X402GuardError
from x402guard.cli import approvals, owner
from x402guard.guard.approvers import QueueApprover
from x402guard.kernel.rows import HoldState, NodeState
from x402guard.ledger.findings import Settled, Unused
from x402guard.stores import open_store

TLS = ssl.create_default_context()
PRICE, CHARGED = 50_000, 12_345
OFFERS = {"exact": accept(PRICE), "permit2": permit2(PRICE), "upto": upto(PRICE)}


class TellingSigner:
    """A real signer that tells what it has signed."""

    inline = False

    def __init__(self, signed):
        self.inner, self.signed = LocalSigner.from_key(KEY), signed

    @property
    def address(self):
        return self.inner.address

    def bind(self, lookup):
        self.inner.bind(lookup)

    def sign(self, hold):
        signature = self.inner.sign(hold)
        self.signed(hold)
        return signature


class World:
    """A guard on a disk that is watched, a seller who takes what it may, and a chain that tells the truth."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.clock = folder, Clock()
        self.cheques, self.taken, self.unsent = {}, {}, set()
        self.disk = Disk(folder / "spend.db", self.takable)
        monkeypatch.setattr(sqlite3, "connect", watching(self.disk))
        self.url = f"sqlite:///{self.disk.path}"
        self.store = open_store(self.url, clock_ms=self.clock)

    def guard(self, **more):
        given = {"signer": TellingSigner(self.signed), "chains": MockChain(finding=self.finding)}
        return make_guard(self.store, **given | more)

    def signed(self, hold):
        self.cheques[hold.id] = hold
        self.disk.promise(lambda store: store.hold(hold.id) is not None)

    def takable(self):
        """Atomic units: what was taken, and what every signature that is out and good can still take."""
        now = self.clock() // 1000
        out = [hold for hold in self.cheques.values() if hold.id not in {*self.taken, *self.unsent}]
        live = sum(hold.intent.amount_atomic for hold in out if not hold.intent.dead_at(now))
        return live + sum(self.taken.values())

    def finding(self, hold):
        if hold.id in self.taken:
            return Settled(self.taken[hold.id], f"0x{hold.id}", 0, final=True)
        return Unused(self.clock() // 1000)

    def shop(self, offer, way):
        def paid(request, shop):
            nonce = f"{shop.payments[-1][0]:064x}"
            if way == "unsent":
                self.unsent.add(nonce)
                raise httpx.ConnectError("no route")
            if way in ("settles", "dies"):
                self.taken[nonce] = CHARGED if offer == "upto" else PRICE
                self.disk.moment()
            if way == "dies":
                raise httpx.ReadError("gone")
            if way == "refuses":
                return httpx.Response(500)
            more = {"amount": str(CHARGED)} if offer == "upto" else {}
            return httpx.Response(
                200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction=f"0x{nonce}", **more))}, json={}
            )

        return Shop(terms=required(OFFERS[offer]), paid=paid)

    def buy(self, session, offer, way, number=0):
        # Of the library's own transport alone it is believed that nothing left this machine.
        inner = httpx.HTTPTransport(verify=TLS)
        inner.handle_request = httpx.MockTransport(self.shop(offer, way)).handle_request
        try:
            with httpx.Client(transport=GuardedTransport(session, inner)) as http:
                return http.get(f"{URL}/{offer}/{way}/{number}").status_code
        except X402GuardError as error:
            return type(error).__name__
        except httpx.ConnectError:
            return "ConnectError"

    def check(self):
        self.disk.moment()
        self.disk.check(self.folder, self.clock)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    made.store.close()


ENDS = {"settles": 200, "refuses": 500, "dies": "SettlementUncertain", "unsent": "ConnectError", "lies": 200}


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("offer", OFFERS)
def test_a_cut_at_any_moment_of_paying_loses_no_signature(world, offer, way):
    with world.guard() as guard, guard.session("s", budget="$1.00") as session:
        for number in range(3):
            assert world.buy(session, offer, way, number) == ENDS[way]
    world.check()
    assert len(world.cheques) == 3
    assert FULL in world.disk.commits
    assert {1, 2} == set(world.disk.commits), "something is committed without a sync, or this shows nothing"


@pytest.mark.parametrize("offer", OFFERS)
def test_a_cut_at_any_moment_of_reconciling_counts_what_the_chain_took(world, offer):
    with world.guard() as guard, guard.session("s", budget="$1.00") as session:
        for number, way in enumerate(("settles", "dies", "refuses", "lies")):
            world.buy(session, offer, way, number)
        for _ in range(2):
            world.clock.tick(40)
            guard.reconcile()
            world.check()
        assert session.spent + session.held > 0
    assert world.disk.images[-1].least == sum(world.taken.values())


def test_a_cut_right_after_a_correction_upwards_does_not_take_it_back(world):
    """Believed without a chain, the seller has claimed next to nothing; the chain says later what was taken."""
    with world.guard(chains=None, unsafe_trust_receipts=True, unsafe_no_chain=True) as guard:
        with guard.session("s", budget="$1.00", id="s") as session:
            lie = httpx.Response(
                200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction="0x" + "77" * 32, amount="1"))}
            )
            fetch("sync", session, Shop(terms=required(OFFERS["upto"]), paid=lambda *_: lie))
            assert int(session.spent * 10**6) == 1
    [nonce] = world.cheques
    world.store.close()  # its kernel believes receipts for good
    world.store = open_store(world.url, clock_ms=world.clock)
    world.taken[nonce], world.disk.least = PRICE, lambda: 0  # nobody knows better yet
    world.disk.images.clear()
    with world.guard() as guard:
        guard.reconcile()
        world.disk.images[-1].least = PRICE  # reconcile has returned: it was told
        with guard.session("s", id="s") as session:
            assert int(session.spent * 10**6) == PRICE
    revived(world.folder / "after.db", *world.disk.read(), world.disk.images[-1], world.clock)
    corrected = [image for image in world.disk.images if image.least == PRICE]
    for number, image in enumerate(corrected):
        revived(world.folder / f"{number}.db", image.database, image.log, image, world.clock)


def limited(node_id, atomic):
    return lambda store: next(node.limit for node in store.nodes() if node.id == node_id) <= atomic * 1000


def test_a_cut_keeps_trips_and_lowered_limits(world):
    with world.guard(budget="$2.00") as guard, guard.session("s", budget="$1.00", id="s") as session:
        world.disk.promise(limited("s", 1_000_000))
        world.buy(session, "exact", "settles")
        with guard.session("s", budget="$0.50", id="s"):
            world.disk.promise(limited("s", 500_000))
        owner.set_budget("s", "$0.30", ledger=world.url)
        world.disk.promise(limited("s", 300_000))
        owner.set_budget("wallet", "$1.50", ledger=world.url)
        world.disk.promise(limited("wallet", 1_500_000))
        world.buy(session, "exact", "refuses", 1)
        session.trip("enough")
        world.disk.promise(lambda store: [n.state for n in store.nodes() if n.id == "s"] == [NodeState.TRIPPED])
        assert world.buy(session, "exact", "settles", 2) == "SessionTripped"
    world.check()


def test_a_cut_keeps_a_kill_files_trip(world):
    kill = world.folder / "stop"
    with world.guard(kill_file=kill) as guard, guard.session("s", budget="$1.00", id="s") as session:
        world.buy(session, "exact", "settles")
        kill.touch()
        assert world.buy(session, "exact", "settles", 1) == "SessionTripped"
        world.disk.promise(lambda store: [n.state for n in store.nodes() if n.id == "s"] == [NodeState.TRIPPED])
    world.check()


def test_a_cut_keeps_what_a_person_has_denied(world):
    """The answer is on the disk when the person who gave it is told so."""

    def deny(_seconds):
        [question] = world.store.marks("approval", "")
        approvals._answer(question, "ada", world.url, yes=False, as_json=False)
        world.disk.promise(lambda store: store.marks("approval", "")[question]["said"] == {"ada": False})

    asking = Policy(rules=[Rule(name="ask", action="ask")], breaker=None)
    with world.guard(policy=asking, approver=QueueApprover(world.store, pause=deny)) as guard:
        with guard.session("s", budget="$1.00") as session:
            assert world.buy(session, "exact", "settles") == "ApprovalDenied"
    assert world.disk.kept
    assert world.cheques == {}
    world.check()


def torn(image, log):
    """Logs of which the part after the last sync came to the disk in part, or as something else."""
    synced, chance = len(image.log), random.Random(7)
    assert log[:synced] == image.log, "the log has begun anew"
    assert len(log) > synced, "nothing was committed after the last sync"
    frames = range(synced, len(log) + 1, 24 + 4096)
    near = {offset + shift for offset in frames for shift in (-1, 0, 1, 8, 24, 25, 2000)}
    for offset in sorted(near | {chance.randrange(synced, len(log)) for _ in range(30)}):
        if synced <= offset <= len(log):
            yield log[:offset]
            yield log[:offset] + chance.randbytes(len(log) - offset)


@pytest.mark.parametrize("way", ["settles", "unsent"])
def test_a_torn_tail_of_the_log_costs_nothing_that_was_synced(world, way):
    with world.guard() as guard, guard.session("s", budget="$1.00") as session:
        world.buy(session, "exact", "settles", 0)
        world.buy(session, "upto", way, 1)
        world.disk.moment()
        image = world.disk.images[-1]
        database, log = world.disk.read()
        assert database == image.database, "no checkpoint has come between"
        least, image.least = image.least, world.takable()
        counted = set()
        for number, each in enumerate(torn(image, log)):
            counted.add(revived(world.folder / f"torn-{number}.db", database, each, image, world.clock))
        whole = int((session.spent + session.held) * 10**6)
    assert whole in counted
    assert min(counted) >= world.takable()
    assert max(counted) >= least


def test_a_log_that_loses_what_was_synced_is_noticed_here(world):
    """The proof that the checks above can fail: a disk that lies about its syncs."""
    with world.guard() as guard, guard.session("s", budget="$1.00") as session:
        world.buy(session, "exact", "dies")
        image = world.disk.images[-1]
        with pytest.raises(AssertionError):
            for cut in range(1, len(image.log) // 4120):  # frames of an earlier round may follow the last ones
                log = image.log[: -cut * 4120]
                revived(world.folder / f"lost-{cut}.db", image.database, log, image, world.clock)
        assert world.store.hold(next(iter(world.cheques))).state is HoldState.HELD
