"""Every row of the list of attacks, 1 to 35, has a test that is named after it."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ACCIDENTS = (
    "two_cheques", "reorg", "last_second", "signer_that_times_out", "lost_commit", "midnight", "clock_that_jumps",
    "threads", "generator",
)  # fmt: skip


def named_tests():
    """Every test function of this folder, methods of classes included."""
    found = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                found.add(node.name)
    return found


@pytest.mark.parametrize("row", range(1, 36), ids=lambda row: f"a{row:02}")
def test_every_row_has_a_test(row):
    assert [name for name in named_tests() if name.startswith(f"test_a{row:02}_")]


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_every_accident_has_a_test(accident):
    assert [name for name in named_tests() if name.startswith("test_accident_") and accident in name]


def test_no_test_names_a_row_that_is_none():
    rows = {int(found[1]) for name in named_tests() if (found := re.match(r"test_a(\d+)_", name))}
    assert rows <= set(range(1, 36))
