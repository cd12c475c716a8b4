"""What is written down is what is so: settings, commands, the ledger's table, the report's schema, the README's code."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import httpx
import jsonschema
import pytest
from typer.testing import CliRunner

from tests.support import defaults_page, processes
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted, PolicyDenied, SettlementUncertain, X402GuardError
from x402guard.cli import app
from x402guard.guard.settings import ENV_PREFIX, MeteringSettings, PolicySettings, Settings
from x402guard.guard.tables import ProxySettings
from x402guard.ledger.budgets import TERMINATIONS
from x402guard.ledger.events import TABLE
from x402guard.ledger.transitions import _LOGGED
from x402guard.llm.content import ALLOWANCES
from x402guard.llm.settings import UnboundedOutput
from x402guard.policy.risk import _ASSETS, DEFAULT_LEVELS
from x402guard.tools.counting import suggest_mode
from x402guard.vendors.routes import METERED_HOSTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PACKAGE = ROOT / "x402guard"
SCHEMA = json.loads((REFERENCE / "report.schema.json").read_text())
PAGES = sorted(DOCS.rglob("*.md"))
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
WRITTEN = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def name_of(page):
    return str(page.relative_to(ROOT))


def section(page, heading):
    """The part of a page below a heading of the second level."""
    return (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(text):
    """What stands in backticks in the first cell of each row of the tables in a text."""
    return {word for row in re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE) for word in re.findall(r"`([^`]+)`", row)}


def test_every_setting_is_documented_and_no_other():
    text = (REFERENCE / "settings.md").read_text()
    tables = {"policy": PolicySettings, "metering": MeteringSettings, "proxy": ProxySettings}
    top = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields if name not in tables}
    nested = {f"{ENV_PREFIX}{table.upper()}__{name.upper()}" for table in tables for name in tables[table].model_fields}
    assert set(re.findall(r"^\| `(X402GUARD_\w+)`", text, re.MULTILINE)) == top | nested


def test_the_page_of_defaults_is_made_from_the_code():
    assert (REFERENCE / "defaults.md").read_text() == defaults_page.page()


def test_every_metered_provider_and_allowance_is_documented():
    text = (REFERENCE / "metering.md").read_text()
    for endpoint in METERED_HOSTS:
        assert endpoint.provider in text, endpoint
    assert set(ALLOWANCES) <= set(re.findall(r"`(\w+)`", text))
    for way in get_args(UnboundedOutput):
        assert f"| `{way}`" in text, way


def commands():
    groups = [(group.name, group.typer_instance.registered_commands) for group in app.registered_groups]
    return {(command.name,): command for command in app.registered_commands} | {
        (name, command.name): command for name, inside in groups for command in inside
    }


def test_every_command_is_documented_and_has_help():
    text = (REFERENCE / "commands.md").read_text()
    groups = {(group.name,) for group in app.registered_groups if group.typer_instance.info.invoke_without_command}
    documented = re.findall(r"^\| `x402guard ([a-z]+(?:[ -][a-z]+)*)", text, re.MULTILINE)
    assert {tuple(words.split()) for words in documented} == groups | set(commands())
    for command in groups | set(commands()):
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert len(result.output) > 100
        assert "Example: x402guard" in " ".join(result.output.split()), command


def test_every_command_of_a_group_that_a_text_of_ours_names_is_there():
    groups = {group.name for group in app.registered_groups}
    named = set()
    for file in [*(ROOT / "x402guard").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        named |= set(re.findall(r"x402guard (\w+) ([a-z][\w-]*)", file.read_text()))
    named = {names for names in named if names[0] in groups and names[1] != "and"}
    assert len(named) > 10
    assert named <= set(commands())


ALWAYS_TEXT = {("init",), ("demo",)}  # one writes a file, one is a show; testnet prints JSON in any case


def test_every_command_takes_json():
    without = {
        name for name, command in commands().items() if "as_json" not in inspect.signature(command.callback).parameters
    }
    assert without == ALWAYS_TEXT | {("testnet",), ("serve",), ("mcp",)}


def test_the_ledgers_table_is_the_one_in_the_docs():
    text = section("ledger.md", "The table of transitions")
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


def test_the_first_command_of_the_readme_installs_and_a_clone_needs_two():
    text = (ROOT / "README.md").read_text()
    first = text.index("```sh")
    assert text[first:].startswith("```sh\npip install x402guard")
    second = text.index("```sh", first + 3)
    assert text[second:].startswith("```sh\nmake demo ")
    assert "make test" in text[second : text.index("```", second + 3)]


def blocks_of(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in WRITTEN if "```python\n" in page.read_text()], ids=name_of)
def test_the_python_of_a_page_is_python(page):
    for block in blocks_of(page, "python"):
        compile(block, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


OVER_MCP = DOCS / "how-to" / "pay-an-offer.md"  # its server is in tests/integration/test_mcp_client.py
APART = ("any-language", "mcp-wallet", "a-fleet", "sellers", "in-production")  # run, or used, in tests of their own
ELSEWHERE = {DOCS / "how-to" / f"{name}.md" for name in APART}
IN_A_TERMINAL = DOCS / "tutorial" / "in-a-terminal.md"
RUN = sorted({*DOCS.glob("tutorial/*.md"), *DOCS.glob("how-to/*.md")} - {*ELSEWHERE, IN_A_TERMINAL, OVER_MCP})


@pytest.mark.chain
@pytest.mark.long
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_a_page_runs_as_it_is_written(page, tmp_path):
    """The Python of a page, from top to bottom as one program, prints what the page says that it prints."""
    done = processes.run("\n".join(blocks_of(page, "python")), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    shown = [line.strip() for block in blocks_of(page, "text") for line in block.splitlines()]
    assert shown
    for line in shown:
        pattern = ".*".join(map(re.escape, line.split("…")))  # what differs from run to run
        assert re.search(rf"^\s*{pattern}\s*$", done.stdout, re.MULTILINE), f"{line!r} is not in:\n{done.stdout}"


ALONE = [(ROOT / "README.md", number) for number in range(len(blocks_of(ROOT / "README.md", "python")))]
SKILL = DOCS / "skill" / "SKILL.md"  # it is followed in tests/integration/test_skill.py
REST = [page for page in WRITTEN if page not in {*RUN, SKILL} and "```python\n" in page.read_text()]
OWN_TEST = {REFERENCE / "testing.md", DOCS / "how-to" / "sellers.md"}  # run whole, in a test of its own
WORLD = "from tests.support import local_world\nlocal_world.begin()\n"
AFTER = {2: 'import asyncio\nprint(asyncio.run(handle("anna", "q")).status_code)'}


@pytest.mark.parametrize(("page", "number"), ALONE)
def test_a_block_of_the_readme_runs_as_it_is_pasted(page, number, tmp_path):
    code = blocks_of(page, "python")[number]
    done = processes.run(f"{WORLD}{code}\n{AFTER.get(number, '')}", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search({0: r"payments +1 +\$0\.01", 2: "200"}.get(number, ""), done.stdout)


@pytest.mark.parametrize(
    "page", [page for page in REST if page.name != "README.md" and page not in OWN_TEST], ids=name_of
)
def test_the_blocks_of_a_page_run_as_they_are_pasted(page, tmp_path):
    done = processes.run(WORLD + "\n".join(blocks_of(page, "python")), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr


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
    lines = (REFERENCE / "tools.md").read_text().splitlines()
    names = re.findall(r"`(\w+)`", next(line for line in lines if line.startswith("| remaining |")))
    modes = re.findall(r"`(\w+)`", next(line for line in lines if line.startswith(f"| {row} |")))
    for asked, shown in zip(names, modes, strict=True):
        assert {suggest_mode(asked, left=part, total=1000) for part in left} == {shown}


_VARIES = (
    r"0x[0-9a-fA-F]{40}",
    r"s_[0-9a-f]{16}",
    r"/home/ada/research",
    r"0x[0-9a-fA-F]{4}…[0-9a-fA-F]{4}",
    r" *\d+ [A-Z][a-z]{2} \d{4}, \d\d:\d\d:\d\d UTC",
    r"\d\d:\d\d:\d\d UTC",
    r" *\d+ s(?=, wallet)",
    r"\d+\.\d+(?:\.\d+)?(?= on linux|, |\n| s\b)",
)


@pytest.mark.long
def test_the_session_in_a_terminal_prints_what_the_page_says(tmp_path):
    """The commands of the page, typed into one bash, print what stands below them."""
    text = "".join(blocks_of(IN_A_TERMINAL, "console"))
    agent = re.search(r"^\$ cat agent\.py\n(.*?)(?=^\$ )", text, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "agent.py").write_text(agent)
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    script = "\n".join(
        f"printf '%s\\n' {shlex.quote(f'$ {command}')}\n{command} 2>&1 </dev/null" for command in commands
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("X402GUARD_")}
    env = kept | {"PATH": path, "COLUMNS": "110", "PYTHONUNBUFFERED": "1"}  # as at a terminal
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=100
    )
    shown = "\n".join(line.rstrip() for line in done.stdout.splitlines()).replace(
        str(tmp_path.resolve()), "/home/ada/research"
    )
    wanted, found = (re.sub("|".join(_VARIES), "…", part.strip()).splitlines() for part in (text, shown))
    assert found == wanted


def commands_of(page):
    """The commands of x402guard in a page: in its text, where one may stand on two lines, and in its blocks for a shell."""
    text = page.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [
        line
        for language in ("sh", "bash", "console")
        for block in blocks_of(page, language)
        for line in block.splitlines()
    ]
    found = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)] + [
        line.removeprefix("$ ") for line in lines
    ]
    return [command for command in found if command.startswith(("x402guard ", "uv run x402guard "))]


def as_a_shell_reads(command):
    ran = subprocess.run(
        ["bash", "-uc", f"printf '%s\\0' {command}"], check=False, capture_output=True, text=True, timeout=10
    )
    return ran.stdout.split("\0")[:-1]


@pytest.mark.parametrize("page", [page for page in WRITTEN if commands_of(page)], ids=name_of)
def test_a_shell_changes_no_word_of_a_command(page):
    """Without its quotes, `$20.00` is the value of `$2` and then 0.00."""
    for command in commands_of(page):
        if page == IN_A_TERMINAL and command == "x402guard budget set court-research $10.00":
            continue  # the mistake that the page shows
        asked = command.partition(" > ")[0]  # where its output goes is no word of it
        assert as_a_shell_reads(asked) == shlex.split(asked, comments=True), command


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *PAGES):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_of_the_tests_named_in_a_page_exist(page):
    for target in re.findall(r"`(tests/[\w/.*{},-]+)`", page.read_text()):
        assert list(ROOT.glob(target.rstrip("/"))), target


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_modules_named_in_a_page_exist(page):
    for target in re.findall(r"`(?:x402guard/)?((?:\w+/)+\w+(?:\.py)?)[`:]", page.read_text()):
        if target.split("/")[0] in ROOMS and "NAME" not in target:
            assert list(PACKAGE.glob(f"{target.removesuffix('.py')}*")), target


def test_every_page_stands_in_the_navigation():
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize("page", [page for page in WRITTEN if page != IN_A_TERMINAL], ids=name_of)
def test_prose_is_no_wider_than_120_columns(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 120 or line.startswith(("|", "description: ")), f"line {number}"


def test_every_function_of_a_walk_exists():
    walked = re.findall(r"`([\w/]+\.py):(\w+)`", (DOCS / "architecture.md").read_text())
    assert len(walked) > 50
    for path, function in walked:
        assert (PACKAGE / path).exists(), f"{path}:{function}"
        nodes = ast.walk(ast.parse((PACKAGE / path).read_text()))
        assert function in {node.name for node in nodes if isinstance(node, NAMED)}, f"{path}:{function}"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = (*FUNCTIONS, ast.ClassDef)
TREES = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]


def texts():
    """The module-level constants of the package that are text, by name."""
    found = {}
    for node in (node for tree in TREES for node in tree.body):
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and isinstance(getattr(node.value, "value", None), str):
            found[target.id] = node.value.value
    return found


def text_of(node):
    value = node.value if isinstance(node, ast.Constant) else texts().get(getattr(node, "id", ""))
    return {value} if isinstance(value, str) else set()


def is_key(node):
    if isinstance(node, ast.AnnAssign):
        return "MarkKey" in ast.unparse(node.annotation)
    return getattr(node.targets[0], "id", "") in ("key", "mark")


def marks_in_the_source():
    """The kind of each key: a pair that begins with text, where its annotation says that it is one, or where it is read."""
    found = set()

    def note(node):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            found.update(text_of(node.elts[0]))

    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, FUNCTIONS) and node.returns is not None and "MarkKey" in ast.unparse(node.returns):
            for inside in ast.walk(node):
                note(inside)
        elif isinstance(node, (ast.AnnAssign, ast.Assign)) and is_key(node):
            note(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "marks" and node.args:
            found.update(text_of(node.args[0]))
    return found


def test_every_kind_of_mark_is_listed():
    kinds = marks_in_the_source()
    assert len(kinds) >= 32
    assert first_cells(section("ledger.md", "Marks")) == kinds


def test_every_journal_event_is_listed():
    listed = first_cells(section("ledger.md", "Journal events"))
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    recorded = [call for call in calls if getattr(call.func, "attr", "") == "record" and len(call.args) == 2]
    assert len(recorded) > 20
    assert set().union(*(text_of(call.args[1]) for call in recorded)) <= listed
    assert {event.__name__.lower() for _, event in TABLE} <= listed
    tables = [
        node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Dict) and None not in node.keys[:1]
    ]
    named = [
        {getattr(key, "value", ""): value for key, value in zip(node.keys, node.values, strict=True)} for node in tables
    ]
    facts = [each["name"] for each in named if "name" in each and "kind" not in each]
    assert len(facts) > 15
    events = {name for node in facts for name in text_of(node)}
    assert events <= listed, events - listed


def test_every_notice_is_listed():
    listed = first_cells((REFERENCE / "notices.md").read_text().partition("\n## ")[0])
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    told = [
        call
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in ("tell", "asked", "Notice")
    ]
    told = [call for call in told if len(call.args) >= 3]
    assert len(told) >= 12
    named = {name for call in told for name in text_of(call.args[0])} | set(_LOGGED.values())
    assert named <= listed
    assert listed == named, "a notice in the table that is never sent"


def test_every_key_of_a_report_is_listed():
    listed = first_cells((REFERENCE / "report.md").read_text())
    assert set(SCHEMA["properties"]) <= listed
    assert set(TERMINATIONS) <= listed


@pytest.mark.parametrize(
    "term",
    [
        "hold", "authorize", "capture", "void", "expire", "lapse", "correct", "reopen", "evidence", "in doubt", "mark", "step", "run",
        "scope", "trip", "reset", "settle", "reconcile", "slot", "route", "notice", "ceiling", "presented again", "deduplication key",
        "single flight", "circuit open", "grant", "claim", "proof", "idempotent", "owner", "instance", "approver",
        "verdict", "seat", "bulkhead", "payer", "finalizing", "consent", "probe", "outcome", "shell", "context", "flow", "rule",
    ],
)  # fmt: skip
def test_every_term_is_defined_once(term):
    assert len(re.findall(rf"^{term}\n:   ", (DOCS / "glossary.md").read_text(), re.MULTILINE)) == 1


def test_the_levels_of_risk_are_those_of_the_page():
    rows = [
        line.split("|")[1:3]
        for line in (DOCS / "explanation/guards.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    shown = {pattern: level.strip() for level, names in rows for pattern in re.findall(r"`([\w*]+)`", names)}
    assets = {f"send_{asset}_*" for asset in _ASSETS}
    assert {pattern: shown.get(pattern) for pattern in DEFAULT_LEVELS if pattern not in assets} == {
        pattern: level for pattern, level in DEFAULT_LEVELS.items() if pattern not in assets
    }


def test_every_dependency_has_its_reason():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (REFERENCE / "dependencies.md").read_text()
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["testnet"], *extras["docs"]):
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


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_is_documented(kind):
    text = (REFERENCE / "errors.md").read_text()
    part = text.split(f"\n### `{kind.__name__}`\n")[1].split("\n#")[0]
    for said in (kind.code, kind.phase, kind.retry):
        assert f"`{said}`" in part, said
