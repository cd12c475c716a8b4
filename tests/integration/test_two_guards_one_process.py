"""Two guards of one process on one file, while other processes come and go: nobody may believe itself alone with the books."""

from decimal import Decimal
from pathlib import Path

import pytest

from tests.support import processes
from x402guard import BudgetExhausted, Guard

LOOKS = "from x402guard.stores import open_store; import sys; s = open_store(sys.argv[1]); list(s.nodes()); s.close()"
SPENDS = """
import sys
from x402guard import BudgetExhausted, Guard
with Guard(ledger=sys.argv[1]) as guard, guard.session("other", budget="$0.95") as session:
    try:
        session.charge("serp", sys.argv[2])
        print("spent")
    except BudgetExhausted:
        print("refused")
"""


def run(script, *arguments):
    done = processes.run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("closes_first", [False, True])
def test_what_one_guard_opens_takes_no_lock_from_another(tmp_path, closes_first):
    path = tmp_path / "spend.db"
    url = f"sqlite:///{path}"
    with Guard(ledger=url, budget="$1.00") as first:
        one = first.session("one", budget="$1.00")
        one.charge("serp", "$0.01")
        second = Guard(ledger=url)
        two = second.session("two", budget="$1.00")
        two.charge("serp", "$0.10")
        if closes_first:
            second.close()
            spender = one
        else:
            spender = two
        run(LOOKS, url)
        assert Path(f"{path}-wal").exists(), "the last one out deletes it, and we are still in"
        spender.charge("serp", "$0.80")
        assert run(SPENDS, url, "0.85") == "refused"
        assert run(SPENDS, url, "0.05") == "spent"
        with pytest.raises(BudgetExhausted):
            spender.charge("serp", "$0.05")
        assert sum(node.captured for node in first.shell.store.nodes()) == 960_000_000
        assert spender.spent in (Decimal("0.90"), Decimal("0.81"))
        second.close()
