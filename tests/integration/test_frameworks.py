"""Frameworks that need an environment of their own run their example; CrewAI and AutoGen also run two agents under ``install``.

Opt-in, as CI does: each is installed from the package registry. That takes minutes, and a gigabyte until the tests have run.

    RUN_FRAMEWORK_TESTS=1 python -m pytest tests/integration/test_frameworks.py

CrewAI and LlamaIndex hold openai below 3, which sends by httpx; AutoGen takes the newest, which sends by httpx2. So both are
seen here. The Claude Agent SDK starts a program of 400 MB, which sends through the proxy.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from x402guard.testing import Completion, LlmServer, ToolCall

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "support"
SWITCH = "RUN_FRAMEWORK_TESTS"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        os.environ.get(SWITCH) != "1",
        reason=f"installs four frameworks from the package registry, which takes minutes: set {SWITCH}=1",
    ),
]

QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "AUTOGEN_DISABLE_RUNTIME_TRACING": "true",
    "ANONYMIZED_TELEMETRY": "False",  # chromadb, which CrewAI brings
    "OTEL_SDK_DISABLED": "true",
}
"""What keeps the frameworks from telling their makers."""

TEXT = "It was granted in part."
CALLS = ["gpt-4o", "gpt-4o", "gpt-4o-mini"]
"""The clerk asks for the docket, reads it and answers; the writer writes."""


@dataclass(frozen=True)
class Framework:
    """What is installed beside x402guard, its example, and what that prints.

    *script* runs two agents under ``install``; *keeps_causes*: the framework's errors lead back to what they are of.
    """

    name: str
    requirements: tuple[str, ...]
    example: str
    tells: str
    script: str = ""
    keeps_causes: bool = False


READ_TWO = r"^I read 2 dockets; then: {}budget: \$0\.02 does not fit: .* has \$0\.0099406 left of \$0\.05"

CREWAI = Framework(
    "crewai",
    ("crewai>=1.15.30,<2",),
    "crewai_agent.py",
    READ_TWO.format("Error executing tool: "),
    script="crewai_task.py",
    keeps_causes=True,
)
AUTOGEN = Framework(
    "autogen",
    ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8"),
    "autogen_agent.py",
    READ_TWO.format(""),
    script="autogen_task.py",  # a team raises a RuntimeError that has the text of what went wrong, and nothing else
)
LLAMAINDEX = Framework(
    "llamaindex",
    ("llama-index-core>=0.14.25,<0.15", "llama-index-llms-openai>=0.8.3,<0.9"),
    "llamaindex_agent.py",
    READ_TWO.format(""),
)
CLAUDE = Framework(
    "claude",
    ("claude-agent-sdk>=0.2.188,<0.3",),
    "claude_agent.py",
    r"^I read 2 documents; then: budget: \$0\.10 does not fit: session 'proxy' has \$0\.0[0-9]+ left of \$0\.25",
)


def under(*frameworks):
    """Run a test under each framework; a worker installs one once."""
    each = [pytest.param(f, id=f.name, marks=pytest.mark.xdist_group(f.name)) for f in frameworks]
    return pytest.mark.parametrize("installed", each, indirect=True, scope="module")


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory):
    """A framework, and the Python that has it and x402guard, newly made; pip finds nothing to complain of."""
    folder = tmp_path_factory.mktemp(request.param.name) / "venv"
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    wanted = (f"{ROOT}[testnet,serve]", *request.param.requirements)
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *wanted], check=True, timeout=1200)
    subprocess.run([*pip, "check"], check=True, timeout=120)
    subprocess.run([*pip, "list"], check=True, timeout=120)  # for who reads of a failure
    yield request.param, python
    shutil.rmtree(folder)


@under(CREWAI, CLAUDE, LLAMAINDEX, AUTOGEN)
def test_its_example_stops_at_its_budget_and_its_model_reads_why(installed, tmp_path):
    framework, python = installed
    example = ROOT / "examples" / framework.example
    assert len(example.read_text().splitlines()) <= 80
    done = subprocess.run(
        [python, str(example)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **QUIET},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert re.search(framework.tells, done.stdout, re.MULTILINE), done.stdout


def reply(call):
    """The docket first, where the clerk has not read it yet."""
    if call.model == "gpt-4o-mini":
        return Completion(TEXT, input_tokens=20, output_tokens=18)
    has_read = any(message["role"] == "tool" for message in call.body["messages"])
    asks = () if has_read else (ToolCall("docket", {"number": 42}),)
    return Completion("Granted in part.", tool_calls=asks, input_tokens=100, output_tokens=160)


@pytest.fixture
def work(installed, tmp_path):
    """Run the framework's two agents on a budget; return what its script tells, and the calls that reached the server."""
    framework, python = installed

    def run(budget):
        with LlmServer(reply) as server:
            url = server.base("openai") + "/v1"
            # Nothing of this process's environment: keys, proxies, and the switch, which is no setting of a guard's.
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "LLM_URL": url,
                "BUDGET": budget,
                "X402GUARD_LEDGER": f"sqlite:///{tmp_path / 'spend.db'}",
                "X402GUARD_METERING__ENDPOINTS": json.dumps({url: "openai"}),
                **QUIET,
            }
            done = subprocess.run(
                [python, str(SCRIPTS / framework.script)],
                env=environment,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=300,
            )
            return json.loads(done.stdout.splitlines()[-1]), server.calls

    return run


@under(CREWAI, AUTOGEN)
def test_two_agents_work_and_every_call_of_theirs_stands_in_the_books(work):
    told, calls = work("$1.00")
    assert (told["error"], told["answer"]) == (None, TEXT)
    assert [call.model for call in calls] == CALLS
    report = told["report"]
    assert (report["llm"]["total"], report["llm"]["calls"]) == ("0.0037138", len(calls))
    # 2 · (100 · $2.50 + 160 · $10.00) and 20 · $0.15 + 18 · $0.60, a million
    amounts = {model: row["amount"] for model, row in report["llm"]["by_model"].items()}
    assert amounts == {"gpt-4o": "0.0037", "gpt-4o-mini": "0.0000138"}
    assert (report["spent"], report["evidence"]["provider_usage"]) == ("0.0037138", "0.0037138")
    assert (report["held"], report["outstanding"], report["remaining"]) == ("0.00", [], "0.9962862")
    assert (report["refusals"], report["state"]) == ([], "open")


@under(CREWAI, AUTOGEN)
def test_a_budget_that_no_answer_fits_into_lets_no_call_out(work, installed):
    told, calls = work("$0.0001")
    assert calls == []
    assert told["answer"] is None
    assert told["error"]
    report = told["report"]
    assert [refusal["rule"] for refusal in report["refusals"]] == ["budget"]
    assert (report["spent"], report["held"], report["outstanding"]) == ("0.00", "0.00", [])
    assert report["llm"]["calls"] == 0
    if installed[0].keeps_causes:
        assert told["refusal"] == "BudgetExhausted"
