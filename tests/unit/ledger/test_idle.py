"""What sessions keep idle in a store for many machines: who may write what, and that no cent is lost or counted twice."""

from decimal import Decimal
from functools import partial
from itertools import chain

import pytest

from tests.support.ledger import Books, a_transfer, an_id, sealed, usd
from x402guard.errors import InconsistentLedger
from x402guard.frozen import replace
from x402guard.kernel.rows import Evidence, HoldKind, NodeKind, NodeState, Window
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.budgets import recall, room_on_path, trip
from x402guard.ledger.events import Capture, Correct, Void
from x402guard.ledger.owner import set_limit
from x402guard.ledger.sessions import Closing, NodeRequest, close_node, open_node
from x402guard.ledger.tree import remaining
from x402guard.ledger.verify import Balances, verify_balances, verify_journal
from x402guard.stores.memory import MemoryStore


class FleetBooks(Books):
    """A store that keeps idle budget, with a wallet and the sessions ``s`` and ``t``."""

    def __init__(self, wallet="$10.00", sessions=("s", "t")):
        super().__init__(wallet=wallet, session=None, store=partial(MemoryStore, keeps_idle=True), soft=(500_000,))
        for session in sessions:
            self.open(session, "$9.00")

    def idle(self):
        return {node.id: self.row(node.id).idle for node in self.store.nodes() if node.id != "wallet"}


@pytest.fixture
def books():
    return FleetBooks()


def test_a_session_draws_four_times_its_need_and_pays_out_of_it_without_a_change_above(books):
    books.hold("h1", "$0.10")
    assert books.idle() == {"s": usd("$0.30"), "t": 0}
    before = books.row("wallet")
    for number in range(2, 5):
        books.hold(f"h{number}", "$0.10")
    assert books.row("wallet") == before
    assert books.idle()["s"] == 0
    books.hold("h5", "$0.10")
    assert books.row("wallet").seq == before.seq + 1


def test_little_is_drawn_of_what_is_left(books):
    books.hold("h1", "$8.00")  # 2.00 are left, a sixteenth of which is 0.125
    assert books.idle()["s"] == usd("$0.125")


def test_no_more_is_drawn_than_a_session_can_use():
    books = FleetBooks(sessions=())
    books.open("s", "$0.25")
    books.hold("h1", "$0.20")
    assert books.idle() == {"s": usd("$0.05")}


def test_a_wallet_without_a_limit_lends_too():
    books = FleetBooks(wallet=None)
    books.hold("h1", "$1.00")
    assert books.idle()["s"] == usd("$3.00")


def test_what_a_store_reads_knows_nothing_of_idle_budget(books):
    books.hold("h1", "$0.10", kind=HoldKind.TOOL)
    books.step("h1", Capture(usd("$0.04"), Evidence.CLAIMED))
    books.hold("h2", "$0.10", "t")
    nodes = {node.id: node for node in books.store.nodes()}
    wallet = nodes["wallet"]
    assert (wallet.used, wallet.spent, wallet.live) == (usd("$0.14"), usd("$0.04"), usd("$0.10"))
    assert remaining(nodes, "s") == usd("$8.96")
    assert remaining(nodes, "wallet") == usd("$9.86")
    assert all(node.granted_in == node.used for node in nodes.values() if node.id != "wallet")
    assert {node.id: node for node in books.store.nodes("t")} == {"t": nodes["t"], "wallet": wallet}


@pytest.mark.parametrize("edit", [{"granted_in": 1}, {"limit": 1}])
def test_a_row_that_was_edited_gives_no_idle_budget_back(books, edit):
    """It is loaded within the change, after the rows that the room asked for were looked at."""
    books.hold("h1", "$1.00", "t")
    rows, before = books.store._rows, books.row("s")
    rows.nodes["t"] = replace(rows.nodes["t"], **edit)
    with pytest.raises(InconsistentLedger, match="node t"):
        books.hold("h2", "$8.90", "s")
    assert books.row("s") == before
    assert books.store.hold(an_id("h2")) is None


def test_nothing_is_refused_that_fits_where_others_keep_what_is_missing(books):
    books.hold("h1", "$1.00", "t")  # and 3 x 1.00, of which 0.5625 is a sixteenth of the rest
    books.hold("h2", "$8.90", "s")
    assert books.idle()["t"] == 0
    refused = books.hold("h3", "$0.11", "t")
    assert isinstance(refused, Refusal)
    assert refused.available == usd("$0.10")
    assert "$0.10 left of $10.00" in refused.reason
    books.hold("h4", "$0.10", "t")
    assert books.node("wallet").used == usd("$10.00")


def test_what_does_not_fit_takes_nothing_from_the_others(books):
    books.hold("h1", "$1.00", "t")
    kept = books.idle()["t"]
    books.open("u", "$100.00")
    refused = books.hold("h2", "$9.50", "u")
    assert refused.available == usd("$9.00")
    assert "the wallet has $9.00 left of $10.00 ($1.00 with sub-budgets)" in refused.reason
    assert books.idle()["t"] == kept > 0


def test_what_a_payment_frees_stays_up_to_four_times_that_payment(books):
    books.hold("h1", "$1.00")
    books.step("h1", Void("not signed"))
    assert books.idle()["s"] == usd("$1.5625")  # its own dollar, and what it drew beyond it
    books.hold("h2", "$0.01")
    books.step("h2", Capture(usd("$0.01"), Evidence.CLAIMED))
    assert books.idle()["s"] == usd("$0.04")


ENDS = {
    "a close": lambda view: close_node(view, "s", Closing("opener-of-s")),
    "a trip": lambda view: trip(view, "s", "kill_switch", "for a test"),
    "a lowered limit": lambda view: set_limit(view, "s", usd("$1.00"), "a test"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_ends_a_session_gives_its_idle_budget_back(books, end):
    books.hold("h1", "$0.10")
    books.change(end, nodes=("s",), marks=(("owner_limit", "s"), ("inputs", "s")))
    assert books.idle()["s"] == 0
    assert books.row("wallet").granted_out == usd("$0.10")
    books.step("h1", Void("not signed"))
    assert books.row("wallet").granted_out == 0 or books.row("s").state is NodeState.OPEN


def test_a_session_that_has_ended_draws_what_it_owes_and_no_more(books):
    books.hold("h1", "$0.10", kind=HoldKind.LLM)
    books.change(ENDS["a close"], nodes=("s",), marks=(("inputs", "s"),))
    books.step("h1", Capture(usd("$0.10"), Evidence.ASSUMED))
    books.step("h1", Correct(usd("$0.20"), Evidence.PROVIDER_USAGE))
    assert books.row("wallet").granted_out == usd("$0.20")


def test_a_bill_above_its_ceiling_takes_what_is_idle_before_it_trips_the_wallet(books):
    books.hold("h1", "$5.00", "s", chain_evidence=True)
    books.step("h1", Void("not signed"))
    books.hold("h2", "$2.00", "t", kind=HoldKind.LLM)
    books.hold("h3", "$2.00", "s")
    books.step("h2", Capture(usd("$1.00"), Evidence.ASSUMED))
    books.step("h2", Correct(usd("$8.00"), Evidence.ESTIMATE))
    assert books.row("wallet").state is NodeState.OPEN
    assert books.node("wallet").used == usd("$10.00")
    books.step("h2", Correct(usd("$8.01"), Evidence.PROVIDER_USAGE))
    assert books.row("wallet").state is NodeState.TRIPPED
    assert books.row("wallet").trip_reason == "$10.01 used of $10.00"


def test_a_lowered_limit_of_the_wallet_counts_what_is_used_and_not_what_is_idle(books):
    books.hold("h1", "$1.00")
    books.change(
        lambda view: set_limit(view, "wallet", usd("$1.00"), "a test"),
        nodes=("wallet",),
        marks=(("owner_limit", "wallet"),),
    )
    assert books.row("wallet").state is NodeState.OPEN
    assert books.idle()["s"] == 0
    assert isinstance(books.hold("h2", "$0.01"), Refusal)


def test_a_soft_limit_is_reached_by_what_is_spent_alone(books):
    books.hold("h1", "$2.00")
    books.hold("h2", "$2.90", "t")
    books.step("h1", Capture(usd("$2.00"), Evidence.CLAIMED))
    assert books.row("wallet").counted > usd("$5.00")
    assert books.row("wallet").warned == 0
    books.step("h2", Capture(usd("$2.90"), Evidence.CLAIMED))
    assert books.row("wallet").warned == 0
    books.hold("h3", "$0.10", "t")
    books.step("h3", Capture(usd("$0.10"), Evidence.CLAIMED))
    assert books.row("wallet").warned == 500_000


def test_nothing_is_kept_idle_below_a_window():
    books = FleetBooks(sessions=())
    request = NodeRequest("day", "wallet", NodeKind.BUDGET, "day", usd("$5.00"), "", window=Window("day", "UTC"))
    books.change(lambda view: open_node(view, request), nodes=("day", "wallet"))
    books.open("s", "$5.00", parent="day")
    books.hold("h1", "$0.10")
    assert books.idle() == {"day": usd("$0.30"), "s": 0}
    assert books.row("day").live == usd("$0.10")
    books.step("h1", Capture(usd("$0.10"), Evidence.CLAIMED))
    books.clock.tick(86_400)
    assert books.row("day").room == usd("$5.00")


def test_a_named_budget_lends_what_it_has_borrowed_and_a_recall_goes_all_the_way():
    books = FleetBooks(sessions=())
    books.open("team", "$9.00", kind=NodeKind.BUDGET)
    for session in ("s", "t"):
        books.open(session, "$9.00", parent="team")
    books.hold("h1", "$0.10", "s")
    assert books.idle()["s"] == usd("$0.30")
    assert books.idle()["team"] > 0
    books.change(lambda view: recall(view, "wallet"), nodes=("wallet",))
    assert set(books.idle().values()) == {0}
    assert books.row("wallet").granted_out == usd("$0.10")
    books.hold("h2", "$8.90", "t")
    assert isinstance(books.hold("h3", "$0.01", "s"), Refusal)


def test_what_is_returned_to_a_wallet_past_its_limit_is_returned_once():
    books = FleetBooks(wallet="$1.00", sessions=())
    request = NodeRequest("day", "wallet", NodeKind.BUDGET, "day", usd("$1.00"), "", window=Window("day", "UTC"))
    books.change(lambda view: open_node(view, request), nodes=("day", "wallet"))
    books.open("s", "$9.00", parent="day")
    for hold_id, kind in (("h1", HoldKind.LLM), ("h2", HoldKind.PAYMENT)):
        books.hold(hold_id, "$0.40", "s", kind=kind)
    books.step("h1", Capture(usd("$0.40"), Evidence.ASSUMED))
    books.step("h1", Correct(usd("$2.00"), Evidence.PROVIDER_USAGE))
    assert books.row("day").state is NodeState.TRIPPED
    books.step("h2", Void("not signed"))
    assert (books.row("wallet").granted_out, books.row("day").granted_in) == (usd("$2.00"), usd("$2.00"))


def test_a_recall_for_a_team_takes_from_its_own_sessions_first():
    books = FleetBooks(wallet="$1.00", sessions=())
    books.open("team", "$9.00", kind=NodeKind.BUDGET)
    for session in ("s", "t"):
        books.open(session, "$9.00", parent="team")
    books.hold("h1", "$0.10", "s")
    assert books.idle()["s"] > 0
    books.hold("h2", "$0.90", "t")
    assert set(books.idle().values()) == {0}, "nothing is left of which a part could be drawn"
    assert books.row("wallet").granted_out == usd("$1.00")


@pytest.mark.parametrize("then", ["a correction", "a limit of a sibling", "a limit of its own", "nothing"])
def test_a_tripped_budget_goes_on_counting_what_happens_below_it(then):
    """Its sessions are still open, so what they free stays idle with them; the budget itself keeps nothing."""
    books = FleetBooks(sessions=())
    books.open("team", "$5.00", kind=NodeKind.BUDGET)
    for session in ("s", "t"):
        books.open(session, "$9.00", parent="team")
    for hold_id in ("p", "q"):
        books.hold(hold_id, "$1.00", "s", scheme="upto")
    books.hold("llm", "$2.00", "s", kind=HoldKind.LLM)
    books.step("llm", Capture(usd("$4.50"), Evidence.PROVIDER_USAGE))
    assert books.row("team").trip_reason == "$6.50 used of $5.00"
    books.step("p", Void("not signed"))
    if then == "a correction":
        books.step("q", Capture(usd("$0.90"), Evidence.CHAIN, a_transfer()))
        books.step("q", Correct(usd("$1.00"), Evidence.CHAIN, a_transfer(log=1)))
    elif then != "nothing":
        node = "t" if then == "a limit of a sibling" else "team"
        limit = partial(set_limit, node_id=node, limit=usd("$4.00"), by="a test")
        books.change(limit, nodes=(node,), marks=(("owner_limit", node),))
    assert books.row("team").idle == 0
    assert books.node("wallet").used == usd("$5.50")


def test_what_is_held_at_a_lender_itself_takes_back_what_it_lent():
    books = FleetBooks(wallet="$1.00", sessions=("s",))
    books.hold("h1", "$0.80", "s")
    books.step("h1", Void("not signed"))
    assert books.idle()["s"] > usd("$0.50")
    books.hold("h2", "$0.50", "wallet", kind=HoldKind.TOOL)
    assert books.row("wallet").counted == usd("$0.50")


def test_a_trip_tells_of_what_is_used(books):
    books.hold("h1", "$0.10")
    told = []

    def change(view):
        trip(view, "wallet", "kill_switch", "for a test")
        told.extend(view.notices)

    books.change(change, nodes=("wallet",))
    assert [notice.amount for notice in told] == [Decimal("0.10")]


def test_a_scope_draws_exactly_what_it_uses(books):
    books.open("s/c", "$1.00", parent="s", kind=NodeKind.SCOPE)
    books.hold("h1", "$0.10", "s/c")
    assert books.idle() == {"s": usd("$0.30"), "t": 0, "s/c": 0}
    assert (books.row("s").live, books.row("s").spent) == (usd("$0.10"), 0)


def test_the_room_on_a_path_is_exact_where_it_is_less_than_enough(books):
    books.hold("h1", "$1.00", "t")

    def room(enough):
        return books.change(lambda view: room_on_path(view, "s", enough=enough), nodes=("s",))

    assert room(None) == usd("$9.00")
    assert usd("$8.00") <= room(usd("$8.00")) < usd("$9.00")


def test_a_grant_binds_the_journal_of_the_one_that_draws(books):
    books.hold("h1", "$0.10")
    grant = books.store.tail("wallet", 1)[0]
    drawn = next(entry for entry in books.store.tail("s", 0) if entry.event == "grant")
    assert grant.facts() == {"child": "s", "amount": usd("$0.40"), "seq": drawn.seq, "head": drawn.hash}


def test_a_history_of_a_session_that_was_written_anew_is_another_one_than_the_grant_says(books):
    """Every hash, sum and row agrees with it: the wallet's journal alone knows."""
    for number in range(6):
        books.hold(f"h{number}", "$0.10")
    entries = {node: [e for e in books.store.entries(node) if e.node_id == node] for node in ("wallet", "s", "t")}
    nodes = {node: books.row(node) for node in entries}

    def problems():
        return verify_journal(nodes.values(), chain.from_iterable(entries.values()), None, keeps_idle=True)[0]

    assert problems() == []
    anew, previous = [], ""
    for entry in entries["s"]:
        data = entry.data.replace("payment", "tool") if entry.hold_id == an_id("h0") else entry.data
        anew.append(sealed(replace(entry, data=data, previous=previous)))
        previous = anew[-1].hash
    entries["s"], nodes["s"] = anew, replace(nodes["s"], head=previous)
    grants = [entry.seq for entry in anew if entry.event == "grant"]
    assert problems() == [
        f"budget 's': entry {seq} is another one than the one that a grant was made for" for seq in grants
    ]
    entries["s"] = []
    assert len([problem for problem in problems() if "grant was made" in problem]) == len(grants)


def test_a_recall_takes_from_few_and_from_those_who_keep_most(books):
    books.open("u", "$9.00")
    for session, amount in (("s", "$0.10"), ("t", "$0.20"), ("u", "$0.30")):
        books.hold(f"first {session}", amount, session)
    idle = books.idle()
    missing, most = usd("$0.01"), max(idle, key=idle.get)
    room = books.row("wallet").room + idle[most]
    before = {session: books.row(session).seq for session in idle if session != most}
    books.change(lambda view: recall(view, "wallet", missing), nodes=("wallet",))
    assert books.row("wallet").room == room
    assert {session: books.row(session).seq for session in before} == before


def test_a_hold_gives_nothing_back(books):
    """Prices that vary would else change the wallet's row with each payment."""
    books.hold("h1", "$1.00")
    before = books.row("wallet")
    books.hold("h2", "$0.01")
    assert books.row("wallet") == before


def test_idle_budget_of_a_session_that_has_ended_is_told_by_verify(books):
    books.hold("h1", "$0.10")
    rows = {node: books.row(node) for node in ("wallet", "s")}

    def problems(state):
        nodes = [rows["wallet"], replace(rows["s"], state=state)]
        sums = {n.id: Balances(n.captured, n.held, n.granted_in, n.granted_out, n.seq) for n in nodes}
        return verify_balances(nodes, sums, {"s": usd("$0.10")}, keeps_idle=True)

    assert problems(NodeState.OPEN) == []
    assert problems(NodeState.CLOSED) == ["budget 's': it uses 100000000, but it has drawn 400000000 from its parent"]


@pytest.mark.parametrize("data", ["[]", "{", '{"head":"x"}', '{"child":[],"head":"x","seq":1}'])
def test_a_grant_whose_facts_cannot_be_read_is_a_fault_and_no_error(books, data):
    books.hold("h", "$0.10")
    entries = [replace(e, data=data) if e.event == "grant" else e for e in books.store.entries("wallet")]
    problems, _ = verify_journal([], entries, None, keeps_idle=True)
    assert any("cannot be read" in problem for problem in problems)
