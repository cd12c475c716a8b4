"""Decoy names: a session whose id or name is another budget's, so that the owner trips the wrong one."""

import json

import pytest
from typer.testing import CliRunner

from tests.support.merchant import make_guard
from x402guard import ConfigError
from x402guard.cli import app
from x402guard.stores import open_store


def run(ledger, *words):
    return CliRunner().invoke(app, [*words, "--ledger", ledger])


def states(ledger):
    store = open_store(ledger)
    try:
        return {node.id: str(node.state) for node in store.nodes()}
    finally:
        store.close()


@pytest.mark.parametrize("first", ["budget", "session"])
def test_a60_an_id_that_is_another_ones_name_is_refused(first, ledger):
    with make_guard(ledger) as guard:
        if first == "budget":
            guard.budget("customer-7", "$2.00")
            named = "budget:customer-7"
        else:
            named = guard.session("customer-7", budget="$2.00").id
        with pytest.raises(ConfigError, match=rf"id: 'customer-7' is the name of another budget \({named}\)"):
            guard.session("decoy", budget="$0.01", id="customer-7")
        assert guard.session("customer-7", budget="$0.01").id != "customer-7"  # names may repeat
        guard.session("own", budget="$0.01", id="own")
    with make_guard(ledger) as guard:
        guard.session("own", id="own")  # resumes


@pytest.mark.parametrize("command", [("trip",), ("reset",), ("budget", "set")])
def test_a60_a_command_refuses_a_word_that_may_mean_two(command, ledger):
    with make_guard(ledger) as guard:
        guard.session("decoy", budget="$0.01", id="customer-7")  # before the customer's budget exists
        guard.budget("customer-7", "$2.00")
        guard.session("quiet", budget="$1.00", id="quiet")
        amount = ("$1.50",) if "set" in command else ()
        before = states(ledger)
        ended = run(ledger, *command, "customer-7", *amount)
        assert ended.exit_code != 0
        for meant in (
            "may mean 2 of them",
            "session 'decoy' by id=customer-7",
            "budget 'customer-7' by id=budget:customer-7",
        ):
            assert meant in " ".join(str(ended.exception or ended.output).split())
        assert states(ledger) == before


@pytest.mark.parametrize("decoy", ["named as the customer", "named as the session's id"])
def test_a60_a_report_is_no_other_ones(decoy, ledger):
    """A session takes its name from a user: the bill of a customer is not that of who takes the customer's name."""
    word = "customer-7" if "customer" in decoy else "run-42"
    with make_guard(ledger) as guard:
        with guard.budget("customer-7", "$2.00").session("court", budget="$2.00", id="run-42") as session:
            session.charge("search", "$1.50")
        with guard.session(word, budget="$0.01", id="decoy") as session:
            session.charge("search", "$0.01")
        for more in (), ("--json",), ("--format", "stripe-meter"):
            ended = run(ledger, "report", word, *more)
            assert (ended.exit_code, "may mean 2 of them" in str(ended.exception)) == (1, True), ended.output
            assert not ended.stdout
        named = "id=budget:customer-7" if "customer" in decoy else "id=run-42"
        assert json.loads(run(ledger, "report", named, "--json").stdout)["spent"] == "1.50"


def test_a60_of_two_sessions_with_one_name_a_report_is_the_later_ones(ledger):
    with make_guard(ledger) as guard:
        for cost in ("$0.01", "$0.02"):
            with guard.session("nightly", budget="$1.00") as session:
                session.charge("search", cost)
        assert json.loads(run(ledger, "report", "nightly", "--json").stdout)["spent"] == "0.02"


def test_a60_either_one_is_meant_by_its_id(ledger):
    with make_guard(ledger) as guard:
        guard.session("decoy", budget="$0.01", id="customer-7")
        guard.budget("customer-7", "$2.00")
        assert run(ledger, "trip", "id=budget:customer-7").exit_code == 0
        assert (states(ledger)["budget:customer-7"], states(ledger)["customer-7"]) == ("tripped", "open")
        assert run(ledger, "trip", "id=customer-7").exit_code == 0
        assert run(ledger, "reset", "id=budget:customer-7").exit_code == 0
        assert (states(ledger)["budget:customer-7"], states(ledger)["customer-7"]) == ("open", "tripped")
        assert run(ledger, "trip", "id=nobody").exit_code != 0


def test_a60_a_child_takes_no_name_from_a_run(ledger):
    with make_guard(ledger) as guard, guard.session("run", budget="$1.00") as session:
        session.child("nightly", budget="$0.10")
        guard.session("other", budget="$1.00", id="nightly")
        assert run(ledger, "trip", "nightly").exit_code == 0
        assert states(ledger)["nightly"] == "tripped"
