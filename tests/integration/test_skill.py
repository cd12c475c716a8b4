"""What agents read: the skill, followed to the letter in a new project, and the list of the pages."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.command_line import as_process
from tests.support.processes import ROOT

pytestmark = pytest.mark.chain
DOCS = ROOT / "docs"
SKILL = (ROOT / "docs/skill/SKILL.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", SKILL, re.DOTALL)


def test_it_is_a_skill():
    head = re.match(r"---\nname: (\S+)\ndescription: (.+)\n---\n", SKILL)
    assert head[1] == "x402guard"
    assert len(head[2]) <= 1024


def test_its_steps_end_as_they_say(tmp_path):
    wired, tested = blocks("python")
    (tmp_path / "agent.py").write_text(wired)
    (tmp_path / "test_agent.py").write_text(tested)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert commands[0].startswith("pip install ")
    told = ""
    for command in commands[1:]:
        program, *words = shlex.split(command)
        assert program == "x402guard"
        done = as_process(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told += done.stdout
    assert "the policy is valid" in told
    assert "unseen" not in "".join(line for line in told.splitlines() if line.startswith("warning"))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "."]
    done = subprocess.run(tests, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_without_the_guarded_transport_its_test_fails(tmp_path):
    wired, tested = blocks("python")
    (tmp_path / "agent.py").write_text(
        wired.replace("httpx.Client(transport=GuardedTransport(session))", "httpx.Client()")
    )
    (tmp_path / "test_agent.py").write_text(tested)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(tests, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "1 failed" in done.stdout


def test_the_site_has_a_list_for_agents_and_each_page_as_markdown(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    lines = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S.*\.$", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(lines) == pages
    assert all((tmp_path / page).read_text() == (DOCS / page).read_text() for page in pages)
