"""The table of CONTRIBUTING.md names files, functions and lists that are there."""

import ast
import re
from functools import cache

import pytest

from tests.support.processes import ROOT
from tests.support.structure import PACKAGE

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RULES = TEXT.partition("\n## Rules of the house\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| \*\*an? ([\w ]+)\*\*[^|]* \| (.*) \|$", TEXT, re.MULTILINE))


@cache
def source():
    """All of the package and of what tests share, as text."""
    folders = (PACKAGE, ROOT / "tests")
    return "\n".join(path.read_text() for folder in folders for path in sorted(folder.rglob("*.py")))


def found(path):
    """The files that a path means: in the package, or from the root on."""
    pattern = re.sub("[A-Z]{2,}(?=[._])", "*", path)
    return [each for base in (PACKAGE, ROOT) for each in base.glob(pattern)]


def faults(row):
    """What a row names that is not there."""
    for code in re.findall(r"`([^`]+)`", row):
        if "/" in code:
            if not found(code):
                yield f"there is no {code}"
        elif called := re.match(r"([\w.]+)\(", code):
            if f"{called[1]}(" not in source():
                yield f"nobody calls {called[1]}"
        elif re.fullmatch(r"\w+", code) and not re.search(rf"\b{code}\b", source()):
            yield f"there is no {code}"


@pytest.mark.parametrize("what", ROWS)
def test_what_a_row_names_is_there(what):
    assert list(faults(ROWS[what])) == []


def test_a_name_with_a_file_behind_it_stands_in_that_file():
    """``NAME`` (``path``), and ``NAME`` of ``path``."""
    named = re.findall(r"`(\w+)`(?: \(|, | of )`([\w/]+\.py)`", "\n".join([*ROWS.values(), RULES]))
    assert len(named) >= 15
    for name, path in named:
        [file] = found(path)
        defined = {
            getattr(node, "name", None) or getattr(node, "id", None) for node in ast.walk(ast.parse(file.read_text()))
        }
        assert name in defined, f"{name} is not in {path}"


def test_the_table_speaks_of_each_of_these():
    assert len(ROWS) >= 14
    assert {"notice", "error", "scheme", "ledger backend", "journal event", "mark", "policy rule", "guard"} <= set(ROWS)


def test_a_ledger_backend_is_told_of_all_that_the_kernel_wants_of_it():
    from x402guard.stores.transacts import Transacts

    told = re.findall(r"`(\w+)`", ROWS["ledger backend"])
    assert set(Transacts.__abstractmethods__) <= set(told)
