"""What the code does rightly, and a rule could refuse. Each stands here; the stories beside it are in the file that it names.

Clocks that an owner accepts are in ``tests/behaviour/budgets/test_accepted_clocks.py``; archives, moves and restores in
``tests/unit/stores/``; idle budget that is recalled inside a change in ``tests/unit/ledger/test_idle.py``.
"""

import httpx
import pytest

from tests.support.ledger import Books, usd, weigh_proven
from tests.support.merchant import NETWORK, USDC, Shop, client, make_guard, open_terms
from x402guard import Asset, SessionTripped, SettlementUncertain, SignerError
from x402guard.kernel.rows import Evidence, HoldKind, HoldState
from x402guard.ledger.bills import BILLED_USAGE
from x402guard.ledger.budgets import trip
from x402guard.ledger.events import Capture
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled, Unused
from x402guard.ledger.lost import LateEnd, Written, count_again, write_end
from x402guard.ledger.view import Scope
from x402guard.x402.signer import LocalSigner

KEY = "0x" + "11" * 32
LOST = {"paid": httpx.ReadError("the answer is lost")}


def test_a_closed_session_is_resumed(ledger_url):
    with make_guard(ledger_url) as guard:
        for number in range(2):
            with (
                guard.session("s", budget="$1.00", id="run") as session,
                client(session, Shop(terms=open_terms)) as http,
            ):
                assert http.get(f"https://shop.example/{number}").status_code == 200
                assert str(session.spent) == f"0.0{number + 1}"


def test_code_lowers_a_limit_below_what_is_used_and_the_session_trips():
    with make_guard() as guard:
        with guard.session("s", budget="$1.00", id="run") as session:
            session.charge("serp", "$0.50")
        with guard.session("s", budget="$0.20", id="run") as session, pytest.raises(SessionTripped):
            session.charge("serp", "$0.01")


def test_a_bill_is_recorded_in_a_session_that_is_tripped():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        scope = Scope(nodes=(session.id,), durable=True)
        guard.shell.store.transact(scope, lambda view: trip(view, session.id, "kill_switch", "stop"))
        with pytest.raises(SessionTripped):
            session.record_usage("openai", "gpt-4o-mini", {"input_tokens": 1_000, "output_tokens": 1_000})
        assert session.spent > 0


def test_a_block_that_is_undone_reopens_a_payment():
    """See ``tests/unit/ledger/test_evidence.py``."""
    books = Books(session="$1.00")
    books.hold("h", "$0.10", scheme="upto", chain_evidence=True, deadline_s=600)
    for finding in (Settled(40_000, "0x" + "ab" * 32, 0, final=True), Unused(books.clock() // 1000 + 80)):
        hold = books.stored("h")
        books.clock.tick(40)
        books.change(
            lambda view, finding=finding: weigh_proven(view, "h", finding),
            holds=("h",), nodes=("s",), marks=weigh_marks(hold, finding),
        )  # fmt: skip
    assert books.stored("h").state is HoldState.HELD


def test_what_a_failover_has_lost_is_entered_again_past_a_limit():
    """See ``tests/unit/ledger/test_count_again.py``."""
    lost, books = Books(session="$1.00"), Books(session="$0.15")
    lost.hold("mine", "$0.10")
    books.hold("theirs", "$0.10")
    written = [Written(lost.stored("mine"), {"kind": "payment"}, ("s", "wallet"))]
    ids = tuple(each.hold.id for each in written)
    assert books.change(lambda view: count_again(view, written), nodes=("s",), holds=ids, lost=ids) == 1
    assert (books.node().state, books.node().held) == ("tripped", usd("$0.20"))


def test_tokens_are_counted_without_holds():
    with make_guard() as guard, guard.session("s", budget="$1.00", tokens=10_000) as session:
        session.record_usage("openai", "gpt-4o-mini", {"input_tokens": 100, "output_tokens": 100})
        assert session.tokens.used == 200


def test_a_tool_costs_nothing():
    with make_guard() as guard, guard.session("s", budget="$0.01") as session:
        for number in range(3):
            session.charge("free", "$0", arguments={"n": number})
        assert session.spent == 0


class Remote:
    """A signer on another machine: it says no, once, and then signs."""

    inline = False

    def __init__(self):
        self._key, self.said_no = LocalSigner.from_key(KEY), False
        self.address = self._key.address

    def bind(self, lookup):
        self._key.bind(lookup)

    def sign(self, hold):
        if not self.said_no:
            self.said_no = True
            raise SignerError("not today")
        return self._key.sign(hold)


def test_a_remote_signers_no_gives_the_hold_back():
    shop = Shop(terms=open_terms)
    with (
        make_guard(signer=Remote()) as guard,
        guard.session("s", budget="$1.00") as session,
        client(session, shop) as http,
    ):
        with pytest.raises(SignerError, match="not today"):
            http.get("https://shop.example/1")
        assert session.held == 0
        assert http.get("https://shop.example/1").status_code == 200


def test_a_live_payment_is_presented_again_after_a_restart_with_another_price_of_its_token(tmp_path):
    url, shop = f"sqlite:///{tmp_path / 'spend.db'}", Shop(terms=open_terms, **LOST)
    with (
        make_guard(url) as guard,
        guard.session("s", budget="$1.00", id="run") as session,
        client(session, shop) as http,
    ):
        with pytest.raises(SettlementUncertain):
            http.get("https://shop.example/1")
    shop.paid = None
    dearer = Asset(
        network=NETWORK,
        address=USDC,
        symbol="USDC",
        decimals=6,
        name="USDC",
        version="2",
        usd="2.00",
        unsafe_replace_builtin=True,
    )
    with (
        make_guard(url, assets=[dearer], unsafe_no_chain=True) as guard,
        guard.session("s", budget="$1.00", id="run") as session,
    ):
        with client(session, shop) as http:
            assert http.get("https://shop.example/1").status_code == 200
    assert len(shop.nonces) == 1


def test_an_end_that_another_process_has_left_is_entered():
    """See ``tests/unit/ledger/test_late_ends.py`` and ``tests/integration/test_postgres_late_ends.py``."""
    books = Books(session="$1.00")
    books.hold("h", "$0.10", kind=HoldKind.LLM)
    end = LateEnd("h", capture=Capture(usd("$0.03"), Evidence.PROVIDER_USAGE), proof=BILLED_USAGE)
    assert books.store.transact(*write_end(end))
    assert books.node().captured == usd("$0.03")
