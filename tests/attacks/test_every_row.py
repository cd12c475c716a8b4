"""Every row of the table in docs/attacks.md has a test that is named after it, in the file that the row names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs/attacks.md").read_text()
ROWS = {int(row): files for row, files in re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE)}
ACCIDENTS = (
    "two_cheques", "reorg", "last_second", "signer_that_times_out", "lost_commit", "midnight", "clock_that_jumps",
    "threads", "generator",
)  # fmt: skip


@cache
def named_tests():
    """Every test function of this folder, methods of classes included."""
    found = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                found.add(node.name)
    return found


def test_the_table_has_a_row_for_each_number():
    assert sorted(ROWS) == [*range(1, len(ROWS) + 1)]


@pytest.mark.parametrize("row", sorted(ROWS), ids=lambda row: f"a{row:02}")
def test_every_row_has_a_test(row):
    assert [name for name in named_tests() if name.startswith(f"test_a{row:02}_")]
    named = re.findall(r"`(tests/[^`]+)`", ROWS[row])
    assert named
    for path in named:
        assert f"def test_a{row:02}_" in (ROOT / path).read_text(), path


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_every_accident_has_a_test(accident):
    assert [name for name in named_tests() if name.startswith("test_accident_") and accident in name]


def test_no_test_names_a_row_that_is_none():
    rows = {int(found[1]) for name in named_tests() if (found := re.match(r"test_a(\d+)_", name))}
    assert rows <= set(ROWS)
