"""What is written down is what is so: settings, commands, the ledger's table, the report's schema, the README's code."""

import ast
import json
import re
from pathlib import Path
from typing import get_args

import httpx
import jsonschema
import pytest
from typer.testing import CliRunner

from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted, PolicyDenied, SettlementUncertain, X402GuardError
from x402guard.cli import app
from x402guard.guard.settings import ENV_PREFIX, MeteringSettings, PolicySettings, Settings
from x402guard.ledger.model import TERMINATIONS
from x402guard.ledger.transitions import TABLE
from x402guard.llm.content import ALLOWANCES
from x402guard.llm.routes import ENDPOINTS
from x402guard.llm.settings import UnboundedOutput
from x402guard.policy.risk import DEFAULT_LEVELS
from x402guard.tools.counting import suggest_mode

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCHEMA = json.loads((DOCS / "report.schema.json").read_text())


def test_every_setting_is_documented_and_no_other():
    text = (DOCS / "settings.md").read_text()
    tables = {"policy": PolicySettings, "metering": MeteringSettings}
    top = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields if name not in tables}
    nested = {f"{ENV_PREFIX}{table.upper()}__{name.upper()}" for table in tables for name in tables[table].model_fields}
    assert set(re.findall(r"^\| `(X402GUARD_\w+)`", text, re.MULTILINE)) == top | nested


def test_every_metered_provider_and_allowance_is_documented():
    text = (DOCS / "metering.md").read_text()
    for endpoint in ENDPOINTS:
        assert endpoint.provider in text, endpoint
    assert set(ALLOWANCES) <= set(re.findall(r"`(\w+)`", text))
    for way in get_args(UnboundedOutput):
        assert f"| `{way}`" in text, way


def test_every_command_is_documented_and_has_help():
    text = (DOCS / "commands.md").read_text()
    commands = {(command.name,) for command in app.registered_commands}
    for group in app.registered_groups:
        commands |= {(group.name, command.name) for command in group.typer_instance.registered_commands}
        if group.typer_instance.info.invoke_without_command:
            commands.add((group.name,))
    documented = re.findall(r"^\| `x402guard ([a-z ]+)", text, re.MULTILINE)
    assert {tuple(words.split()) for words in documented} == commands
    for command in commands:
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert len(result.output) > 100


def test_the_ledgers_table_is_the_one_in_the_docs():
    text = (DOCS / "ledger.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\w+) \| (\w+) \|", text, re.MULTILINE)
    documented = {row for row in rows if row[0] not in ("from", "–")}
    assert documented == {(str(state), event.__name__.lower(), str(to)) for (state, event), to in TABLE.items()}
    assert ("–", "authorize", "held") in rows


def test_terminations_are_those_of_the_schema():
    assert SCHEMA["properties"]["terminated_by"]["enum"] == [None, *TERMINATIONS]


def test_a_report_with_everything_in_it_fits_its_schema():
    with make_guard() as guard, guard.session("s", budget="$0.035") as session:
        shop = Shop()
        http = client(session, shop)
        http.get(URL)
        http.get(f"{URL}/2")
        with session.scope("$0.005"), pytest.raises(BudgetExhausted):
            http.get(f"{URL}/3")
        shop.paid = httpx.ReadError("x")
        with pytest.raises(SettlementUncertain):
            http.get(f"{URL}/4")
        with pytest.raises(BudgetExhausted):
            http.get(f"{URL}/5")
        with pytest.raises(PolicyDenied):
            http.get("http://courts.example/plain")
        llm = client(
            session, lambda request: httpx.Response(200, json={"usage": {"prompt_tokens": 9, "completion_tokens": 9}})
        )
        llm.post(
            "https://api.openai.com/v1/chat/completions", json={"model": "gpt-4o-mini", "max_completion_tokens": 9}
        )
        report = session.report()
    jsonschema.validate(report.to_dict(), SCHEMA)
    assert json.loads(report.to_json()) == report.to_dict()
    assert report.to_dict()["outstanding"]
    with make_guard(budget=None) as guard:
        jsonschema.validate(guard.session("empty", budget="$1").report().to_dict(), SCHEMA)


def test_the_readme_gives_the_two_commands_and_nothing_before_them():
    text = (ROOT / "README.md").read_text()
    first = text.index("```sh")
    assert text[first:].startswith("```sh\nmake demo ")
    assert "make test" in text[first : text.index("```", first + 3)]
    assert "pip install" not in text[:first]


@pytest.mark.parametrize(("page", "count"), [("README.md", 6), ("docs/tools.md", 4)])
def test_the_python_of_a_page_is_python(page, count):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(blocks) == count
    for block in blocks:
        compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ("more than 50 %", (1000, 501)),
        ("50 % down to more than 20 %", (500, 201)),
        ("20 % down to 5 %", (200, 50)),
        ("less than 5 %", (49, 0)),
    ],
)
def test_the_modes_are_those_of_the_page(row, left):
    lines = (DOCS / "tools.md").read_text().splitlines()
    names = re.findall(r"`(\w+)`", next(line for line in lines if line.startswith("| remaining |")))
    modes = re.findall(r"`(\w+)`", next(line for line in lines if line.startswith(f"| {row} |")))
    for asked, shown in zip(names, modes, strict=True):
        assert {suggest_mode(asked, left=part, total=1000) for part in left} == {shown}


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_named_in_the_roadmap_exist():
    text = (DOCS / "roadmap.md").read_text()
    for target in re.findall(r"`(tests/[\w/.*]+)`", text):
        assert list(ROOT.glob(target.rstrip("/"))), target


def test_the_levels_of_risk_are_those_of_the_page():
    rows = [line.split("|")[1:3] for line in (DOCS / "guards.md").read_text().splitlines() if line.startswith("| ")]
    shown = {pattern: level.strip() for level, names in rows for pattern in re.findall(r"`([\w*]+)`", names)}
    assert {pattern: shown.get(pattern) for pattern in DEFAULT_LEVELS} == DEFAULT_LEVELS


def test_every_dependency_has_its_reason():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DOCS / "dependencies.md").read_text()
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["testnet"]):
        assert re.split(r"[<>=\[]", requirement)[0] in text, requirement


def every_error(kind=X402GuardError):
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in every_error(below))]


def test_the_errors_drawn_are_the_errors_there_are():
    import x402guard.errors

    drawn = set(re.findall(r"[├└]── (\w+)", x402guard.errors.__doc__)) | {"X402GuardError"}
    assert drawn == {kind.__name__ for kind in every_error()}
    for kind in every_error():
        assert not issubclass(kind, httpx.RequestError)
        assert kind.advice
        assert kind.phase in ("configuration", "request", "offer", "policy", "ledger", "signing", "settlement")
