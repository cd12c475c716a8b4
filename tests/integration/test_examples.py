"""The examples run as they are: without a key, and with no network but loopback."""

import re

import pytest

from tests.integration.test_frameworks import AUTOGEN, CLAUDE, CREWAI, LLAMAINDEX
from tests.support import processes
from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
DOCKETS = [
    r"^I read 2 dockets; then: refused: budget: \$0\.02 does not fit",
    r"models +4 +\$0\.0000837",
    r"tools +2 +\$0\.04 ",
]
FRAMEWORKS = {
    "openai_sdk": [r"call 5 is refused: budget: \$0\.00031375 does not fit", r"models +4 +\$0\.0007272 "],
    "anthropic_sdk": [r"^Marbury v\. Madison, in 1803\.$", r"refused: budget: ", r"models +1 +\$0\.00008 "],
    "langchain_agent": DOCKETS,
    "langgraph_agent": [r"^I read 2 documents; then: refused: budget: \$0\.10 does not fit", r"payments +2 +\$0\.20 "],
    "openai_agents": DOCKETS,
    "pydantic_ai_agent": DOCKETS,
    "fastapi_server": [r"^100 customers: \{\('200', '0\.02'\)\}$", r"^100 customers: \{\('refused', '0\.00'\)\}$"],
}


def run(name, folder):
    done = processes.run((EXAMPLES / f"{name}.py").read_text(), cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.chain
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n == "fastapi_server" else ()) for n in FRAMEWORKS]
)
def test_the_example_of_a_framework_runs_and_is_short(tmp_path, name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 70
    shown = run(name, tmp_path).stdout
    for line in FRAMEWORKS[name]:
        assert re.search(line, shown, re.MULTILINE), f"{line} is not in:\n{shown}"


UNDONE = {
    "undo_a_deletion": [
        "after a run that went well: Ada, Bob",
        "the next run failed: Ada is a customer of ours",
        "and left behind: Ada, Bob",
    ],
    "cancel_an_email": [
        "a run that ends well sends at its end: ['offer to ada@example.com']",
        "stopped: budget",
        "a run that is stopped has sent: []",
        "['action_staged', 'action_staged', 'action_undone', 'action_undone']",
    ],
}


@pytest.mark.parametrize("name", UNDONE)
def test_the_example_of_an_undo_runs_and_is_short(tmp_path, name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
    assert run(name, tmp_path).stdout.splitlines() == UNDONE[name]


def test_the_example_of_a_delegation_runs_and_is_short(tmp_path):
    assert len((EXAMPLES / "three_researchers.py").read_text().splitlines()) < 60
    shown = run("three_researchers", tmp_path).stdout.splitlines()
    assert shown[0] == "letters: completed, {'found': 42}, for $0.04"
    assert shown[1].startswith("portraits: held back, ")
    assert shown[2] == "machines: failed, the worker has ended by BudgetExhausted, for $0.06"
    tree = [line.split() for line in shown if "└ research " in line]
    assert [(row[-3], row[-1]) for row in tree] == [
        ("$0.04", "completed"),
        ("$0.04", "completed"),
        ("$0.06", "budget_exhausted"),
    ]


def test_each_example_is_run_here():
    named = set(FRAMEWORKS) | set(UNDONE) | {"research_agent", "two_budgets", "court_research", "three_researchers"}
    elsewhere = {
        path.removesuffix(".py") for path in (CREWAI.example, AUTOGEN.example, LLAMAINDEX.example, CLAUDE.example)
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == named | elsewhere


@pytest.mark.chain
def test_the_agent_that_thinks_and_buys_runs(tmp_path):
    done = run("research_agent", tmp_path)
    assert "stopped after 4 documents: budget: $0.10 does not fit" in done.stdout
    assert re.search(r"models +5 +\$0\.0039375 ", done.stdout)
    assert re.search(r"payments +4 +\$0\.40 ", done.stdout)


def test_the_agent_with_two_budgets_runs(tmp_path):
    done = run("two_budgets", tmp_path)
    assert "stopped at search 11: budget: $0.02 does not fit" in done.stdout
    assert re.findall(r"shown as (\w+)", done.stdout) == ["raw"] * 3 + ["table"] * 7
    assert re.search(r"tools +23 +\$0\.236 ", done.stdout)
    assert "tokens       8,078 of 10,000 used (80.8 %), 1,922 left" in done.stdout
    assert "tokens: 8,078 of 10,000 are used in 'two-budgets'; the soft limit is 8,000\n" in done.stderr
    assert "session 'two-budgets' has spent $0.2064725 of $0.25, over 80 %\n" in done.stderr


@pytest.mark.chain
def test_the_agent_that_reads_until_its_budget_says_no_runs(tmp_path):
    done = run("court_research", tmp_path)
    assert "stopped after 5 documents: budget: $0.10 does not fit" in done.stdout
    assert "answers: [200, 200, 200]" in done.stdout
    assert "$0.537035 spent + " in done.stdout
