"""The page about testing says what there is, and its example runs as a user's own test would."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from tests.support.processes import ROOT
from x402guard.testing import BEHAVIOURS, CHAIN_LIES, FACILITATOR_LIES

PAGE = (ROOT / "docs/reference/testing.md").read_text()


def test_every_way_to_misbehave_is_documented_in_its_own_words():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    ways = [(name, behaviour.does) for name, behaviour in BEHAVIOURS.items()]
    assert rows[-len(ways) - len(FACILITATOR_LIES) - len(CHAIN_LIES) :] == [
        *ways,
        *FACILITATOR_LIES.items(),
        *CHAIN_LIES.items(),
    ]
    assert f"{len(BEHAVIOURS)} ways" in (ROOT / "CHANGELOG.md").read_text().replace("thirty-two", "32")


def test_every_fixture_is_documented():
    from x402guard.testing import fixtures

    found_by_itself = entry_points(group="pytest11")["x402guard"].load()
    kind = type(found_by_itself.guard)
    offered = {*fixtures.__all__, *(name for name, value in vars(found_by_itself).items() if isinstance(value, kind))}
    assert len(offered) == 8
    assert set(re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE)) >= offered


@pytest.mark.long
@pytest.mark.chain
def test_the_pages_examples_pass_as_a_users_own_tests(tmp_path):
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
