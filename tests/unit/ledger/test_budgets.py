"""Budgets nest: a child's dollar is its parent's dollar at every instant."""

import pytest

from tests.support.ledger import Books, usd
from x402guard.errors import ConfigError, IllegalTransition
from x402guard.frozen import replace
from x402guard.kernel.rows import Evidence, HoldKind, NodeState
from x402guard.ledger.authorize import Refusal, note_refusal, refused_mark
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.sessions import Closing, close_node, ensure_wallet


@pytest.mark.parametrize(
    ("budget", "calls"), [("$0.01", 1), ("$0.05", 5), ("$0.10", 10), ("$0.50", 50), ("$1.00", 100)]
)
def test_cents_fit_exactly(budget, calls):
    books = Books(session=budget)
    made = 0
    while not isinstance(books.hold(f"h{made}", "$0.01"), Refusal):
        books.step(f"h{made}", Capture(usd("$0.01"), Evidence.CLAIMED))
        made += 1
    assert made == calls
    assert books.node().captured == usd(budget)


def test_siblings_cannot_spend_one_dollar_twice():
    books = Books(wallet="$10.00", session=None)
    for child in range(6):
        books.open(f"c{child}", "$2.00")
    held = [not isinstance(books.hold(f"h{c}-{n}", "$1.00", f"c{c}"), Refusal) for n in range(3) for c in range(6)]
    assert sum(held) == 10
    assert books.node("wallet").granted_out == usd("$10.00")
    for child in range(6):
        assert books.node(f"c{child}").held <= usd("$2.00")


def test_a_grandchild_draws_through_every_level_and_gives_back_through_every_level():
    books = Books(wallet="$5.00", session="$3.00")
    books.open("s/a", "$2.00", parent="s")
    books.open("s/a/b", "$1.00", parent="s/a")
    books.hold("h", "$0.40", "s/a/b")
    assert [books.balances(n) for n in ("s/a/b", "s/a", "s", "wallet")] == [
        (0, usd("$0.40"), usd("$0.40"), 0),
        (0, 0, usd("$0.40"), usd("$0.40")),
        (0, 0, usd("$0.40"), usd("$0.40")),
        (0, 0, 0, usd("$0.40")),
    ]
    books.step("h", Void("not signed"))
    assert all(books.balances(n) == (0, 0, 0, 0) for n in ("s/a/b", "s/a", "s", "wallet"))


@pytest.mark.parametrize(
    ("wallet", "session", "child", "named"),
    [
        ("$0.05", "$1.00", "$1.00", "the wallet"),
        ("$1.00", "$0.05", "$1.00", "session 's'"),
        ("$1.00", "$1.00", "$0.05", "session 's/c'"),
    ],
)
def test_the_refusal_names_the_budget_that_is_short(wallet, session, child, named):
    books = Books(wallet=wallet, session=session)
    books.open("s/c", child, parent="s")
    refusal = books.hold("h", "$0.06", "s/c")
    assert (refusal.rule, refusal.requested, refusal.available) == ("budget", usd("$0.06"), usd("$0.05"))
    assert named in refusal.reason
    assert books.balances("s/c") == (0, 0, 0, 0)


def test_a_bill_above_the_ceiling_trips_every_node_that_it_exceeds():
    books = Books(wallet="$1.00", session="$0.90")
    books.open("s/c", "$0.80", parent="s")
    books.hold("h", "$0.50", "s/c", kind=HoldKind.LLM)
    books.step("h", Capture(usd("$0.95"), Evidence.PROVIDER_USAGE))
    states = {n: books.node(n).state for n in ("s/c", "s", "wallet")}
    assert states == {"s/c": NodeState.TRIPPED, "s": NodeState.TRIPPED, "wallet": NodeState.OPEN}


def test_an_amount_that_a_64_bit_column_cannot_hold_is_refused():
    books = Books(session="$1000000000")
    hold = books.hold("h", "$1000000000")
    assert not isinstance(hold, Refusal)

    from tests.support.ledger import a_hold
    from x402guard.ledger.authorize import authorize

    huge = replace(a_hold("g"), amount=2**128)
    refusal = books.change(lambda view: authorize(view, huge, {}), nodes=("s",), holds=("g",))
    assert refusal.rule == "amount_too_large"


def test_a_session_is_resumed_with_what_it_has_left_and_only_lowered():
    books = Books(session="$1.00")
    books.hold("h", "$0.30")
    assert books.open("s", None).limit == usd("$1.00")
    assert books.open("s", "$0.50").limit == usd("$0.50")
    with pytest.raises(ConfigError, match="never raised"):
        books.open("s", "$0.60")
    assert books.hold("h2", "$0.21").rule == "budget"
    assert not isinstance(books.hold("h3", "$0.20"), Refusal)


def test_a_limit_lowered_below_what_is_used_trips():
    books = Books(session="$1.00")
    books.hold("h", "$0.30")
    books.open("s", "$0.20")
    assert books.node().state is NodeState.TRIPPED


def test_a_new_session_needs_a_budget():
    with pytest.raises(ConfigError, match="a new one needs budget="):
        Books(session=None).open("s", None)


def test_two_processes_cannot_believe_in_different_wallet_limits():
    books = Books(wallet="$5.00")
    with pytest.raises(ConfigError, match=r"limit of \$5\.00"):
        books.change(lambda view: ensure_wallet(view, usd("$6.00")), nodes=("wallet",))
    assert books.change(lambda view: ensure_wallet(view, None), nodes=("wallet",)).limit == usd("$5.00")


def close(books, *, left_by_refusal=False):
    def change(view):
        return close_node(view, "s", Closing("opener-of-s", left_by_refusal=left_by_refusal))

    return books.change(change, nodes=("s",))


def refuse(books, amount="$5.00", kind=HoldKind.PAYMENT):
    refusal = books.hold("too much", amount, kind=kind)
    of = None if kind is HoldKind.PAYMENT else (kind, "what")
    marks = (("refusals", "s budget"), *(() if of is None else (refused_mark("s", *of),)))
    books.change(lambda view: note_refusal(view, "s", refusal, of), nodes=("s",), marks=marks)


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (lambda b: close(b), None),
        (lambda b: (refuse(b), close(b))[1], "budget_exhausted"),
        (lambda b: (refuse(b), b.hold("h", "$0.10"), close(b))[2], None),
        (lambda b: (b.hold("h", "$0.10"), refuse(b), close(b))[2], "budget_exhausted"),
        (lambda b: close(b, left_by_refusal=True), "budget_exhausted"),
    ],
    ids=["quiet end", "refused last", "refused, then paid", "paid, then refused", "left by the refusal"],
)
def test_how_a_session_ended(run, word):
    node = run(Books())
    assert (node.state, node.terminated_by) == (NodeState.CLOSED, word)


KINDS = (HoldKind.PAYMENT, HoldKind.LLM, HoldKind.TOOL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granted", KINDS)
def test_a_refusal_for_lack_of_budget_is_forgotten_once_its_kind_or_a_payment_is_granted(kind, granted):
    books = Books()
    refuse(books, kind=kind)
    books.hold("h", "$0.10", kind=granted)
    assert close(books).terminated_by == (None if granted in (kind, HoldKind.PAYMENT) else "budget_exhausted")


@pytest.mark.parametrize("order", [KINDS[:0:-1], KINDS[1:], KINDS[:1]])
def test_each_kind_that_was_refused_has_to_be_granted(order):
    books = Books()
    for kind in KINDS if order == KINDS[:1] else KINDS[1:]:
        refuse(books, kind=kind)
    for number, kind in enumerate(order):
        assert books.node().starved
        books.hold(f"h{number}", "$0.10", kind=kind)
    assert (books.node().starved, close(books).terminated_by) == (0, None)


def test_a_closed_session_refuses_and_its_holds_go_on_counting():
    books = Books(wallet="$1.00")
    books.hold("h", "$0.90")
    close(books)
    assert books.hold("h2", "$0.01").rule == "session_closed"
    books.open("other", "$1.00")
    assert books.hold("h3", "$0.20", "other").available == usd("$0.10")


def test_refusals_are_a_counter_with_the_first_and_last_hundred():
    books = Books()
    for number in range(350):
        refusal = Refusal("hosts", f"number {number}", usd("$0.01"))
        scope = {"nodes": ("s",), "marks": (("refusals", "s hosts"),), "durable": False}
        books.change(lambda view, r=refusal: note_refusal(view, "s", r), **scope)
    [counter] = books.store.marks("refusals", "s ").values()
    assert (counter["count"], counter["reason"]) == (350, "number 349")
    samples = books.store.marks("refusal", "s hosts ")
    assert len(samples) == 200
    kept = {int(sample["reason"].split()[1]) for sample in samples.values()}
    assert kept == set(range(100)) | set(range(250, 350))


def test_a_change_that_restrains_needs_a_durable_scope():
    from tests.support.ledger import a_hold
    from x402guard.ledger.authorize import authorize

    books = Books()
    with pytest.raises(IllegalTransition, match="power cut"):
        books.change(lambda view: authorize(view, a_hold(), {}), nodes=("s",), holds=("h1",), durable=False)
    assert books.balances() == (0, 0, 0, 0)


@pytest.mark.parametrize("level", ["wallet", "s", "s/c"])
def test_a_budget_is_exact_to_the_nano_dollar_on_every_level(level):
    limits = {"wallet": "$1.00", "s": "$1.00", "s/c": "$1.00", level: "$0.000000100"}
    books = Books(wallet=limits["wallet"], session=limits["s"])
    books.open("s/c", limits["s/c"], parent="s")
    assert books.hold("too much", "$0.000000101", "s/c", kind=HoldKind.TOOL).available == 100
    assert not isinstance(books.hold("all", "$0.000000100", "s/c", kind=HoldKind.TOOL), Refusal)
    assert books.hold("one more", "$0.000000001", "s/c", kind=HoldKind.TOOL).available == 0
