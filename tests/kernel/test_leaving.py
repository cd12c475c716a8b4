"""What may leave a ledger: for a file what has ended and is final, for another ledger all of it."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import LLM, ONE, TEN, TOOL, UPTO, captured, ended, node
from x402guard.errors import IllegalTransition
from x402guard.kernel.leaving import Leaving, check_leaving, check_moved, is_final, leave
from x402guard.kernel.rows import WALLET, Delivery, Evidence, HoldState
from x402guard.ledger.verify import Checked

PROVEN = captured(ONE, TEN, evidence=Evidence.CHAIN, proof="eip155:84532/0xaa/0")
SPENT = captured(TOOL, TEN, evidence=Evidence.ASSUMED)
NODE = node("s", WALLET, captured=2 * TEN, granted_in=2 * TEN, seq=7, head="h")
SAID = Checked(7, "h", 2 * TEN, 0, 2 * TEN, 0)
LEAVING = Leaving((NODE,), (PROVEN, SPENT), {"s": SAID}, {hold.id: hold for hold in (PROVEN, SPENT)})


def refused(rule, what, **fields):
    with pytest.raises(IllegalTransition, match=what) as caught:
        check_leaving(replace(LEAVING, **fields))
    assert caught.value.rule == rule


def test_what_has_ended_and_is_in_the_file_leaves():
    check_leaving(LEAVING)
    check_leaving(Leaving((), (), {}, {}))


@pytest.mark.parametrize("name", ["seq", "head", "captured", "held", "granted_in", "granted_out"])
def test_the_file_says_the_sums_that_stay(name):
    other = "x" if name == "head" else getattr(SAID, name) + 1
    refused("books", "node s: .*other sums than its row", said={"s": replace(SAID, **{name: other})})


def test_a_budget_that_the_file_lacks_stays():
    refused("books", "node s: the file says another journal", said={})


def test_a_budget_that_holds_something_stays():
    said = replace(SAID, held=TEN)
    refused("lifecycle", f"node s: {TEN} are held", nodes=(replace(NODE, held=TEN),), said={"s": said})


def test_a_hold_leaves_as_it_is_and_with_its_journal():
    refused("books", f"hold {PROVEN.id}: the file does not have it as it is", filed={SPENT.id: SPENT})
    edited = replace(PROVEN, delivery=Delivery.LOST)
    refused("books", f"hold {PROVEN.id}", filed={PROVEN.id: edited, SPENT.id: SPENT})
    elsewhere = replace(SPENT, node_id="t")
    refused("books", f"hold {SPENT.id}", holds=(elsewhere,), filed={SPENT.id: elsewhere})
    refused("books", "or not the journal of its budget", nodes=())


FINAL = [
    (PROVEN, True),
    (replace(PROVEN, delivery=Delivery.FORGIVEN), True),
    (replace(PROVEN, delivery=Delivery.OPEN), False),
    (replace(PROVEN, delivery=Delivery.LOST), False),
    (replace(PROVEN, proof=None), False),
    (replace(PROVEN, evidence=Evidence.CHAIN_HEAD), False),
    (replace(PROVEN, evidence=Evidence.CLAIMED), False),
    (captured(UPTO, 0, evidence=Evidence.CHAIN, delivery=Delivery.LOST), True),
    (captured(UPTO, 0, evidence=Evidence.CLAIMED), False),
    (ONE, False),
    (ended(ONE, HoldState.VOIDED, delivery=Delivery.OPEN), True),
    (ended(ONE, HoldState.EXPIRED), True),
    (TOOL, False),
    (SPENT, True),
    (captured(LLM, 0, evidence=Evidence.PROVIDER_USAGE), True),
    (ended(LLM, HoldState.VOIDED), True),
]


@pytest.mark.parametrize(("hold", "leaves"), FINAL)
def test_only_what_is_final_leaves(hold, leaves):
    assert is_final(hold) == leaves
    if not leaves:
        refused("lifecycle", f"hold {hold.id}: it is {hold.state}", holds=(hold,), filed={hold.id: hold})


def test_it_is_chosen_checked_and_removed_in_one_transaction():
    done = []

    def write(work):
        done.append("begin")
        left = work("query")
        done.append("commit")
        return left

    def choose(query):
        done.append(("choose", query))
        return LEAVING

    def remove(query, leaving):
        done.append(("remove", query, leaving))

    assert leave(write, choose, remove) is LEAVING
    assert done == ["begin", ("choose", "query"), ("remove", "query", LEAVING), "commit"]
    done.clear()
    with pytest.raises(IllegalTransition):
        leave(write, lambda _: replace(LEAVING, said={}), remove)
    assert done == ["begin"]


def test_all_rows_arrive_but_for_what_each_store_says_is_live():
    rows = [replace(NODE, live=5), PROVEN, SPENT]
    check_moved(rows, [NODE, PROVEN, SPENT])
    check_moved([], [])
    for arrived in ([NODE, PROVEN], [NODE, PROVEN, replace(SPENT, captured=1)], [replace(NODE, limit=1), PROVEN, SPENT],
                    [NODE, SPENT, PROVEN], [*rows, TOOL]):  # fmt: skip
        with pytest.raises(IllegalTransition, match="it would not arrive as it left") as caught:
            check_moved(rows, arrived)
        assert caught.value.rule == "books"
        assert "None" not in str(caught.value)
