"""The source has tests too: length, names, docstrings, exports, swallowed exceptions."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import x402guard
from tests.support.structure import import_circle, is_of, whole_import_graph

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "x402guard"
FILES = sorted(path for folder in (PACKAGE, ROOT / "tests", ROOT / "examples") for path in folder.rglob("*.py"))
SOURCES = [path for path in FILES if path.is_relative_to(PACKAGE)]
FACES = ["x402guard", "x402guard.httpx2", "x402guard.stores", "x402guard.testing", "x402guard.testing.fixtures"]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|manager|common|process)(_|$)")
BANNED_TEXT = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")


def name(path):
    return str(path.relative_to(ROOT))


def faults_of(paths, look):
    """What *look* says of each file: one test for all files, as each test costs more than most files."""
    return [f"{name(path)}: {fault}" for path in paths for fault in look(path, text_of(path), tree_of(path))]


@cache
def text_of(path):
    return path.read_text()


@cache
def tree_of(path):
    return ast.parse(text_of(path))


@cache
def statements_of(path):
    """Every statement of a file, and every except clause."""
    found, above = [], [tree_of(path)]
    while above:
        node = above.pop()
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, part, ())
            if isinstance(inside, list):  # the body of a lambda is no statement
                found += inside
                above += inside
    return found


def test_no_file_is_longer_than_500_lines_and_no_function_than_60():
    def look(path, text, _):
        if text.count("\n") > 500:
            yield "it is too long"
        for node in statements_of(path):
            if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno >= 60:
                yield f"{node.name} is too long"

    assert faults_of(FILES, look) == []


def test_msgspec_describes_a_struct_while_a_module_is_imported():
    """It is not safe when two threads describe a struct first, so a decoder is made at import, and ``frozen`` converts."""

    def look(path, text, _):
        if path.name != "frozen.py" and re.search(r"from msgspec import .*\bconvert\b|msgspec\.convert\(", text):
            yield "it converts without frozen.read_struct"
        functions = (node for node in statements_of(path) if isinstance(node, FUNCTIONS)) if "Decoder(" in text else ()
        for function in functions:
            made = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            if path.name != "frozen.py" and any(
                ast.unparse(call.func) in {"Decoder", "msgspec.json.Decoder"} for call in made
            ):
                yield f"{function.name} makes a decoder"

    assert faults_of(SOURCES, look) == []


def test_the_root_has_at_most_9_modules_and_a_room_25():
    assert len(list(PACKAGE.glob("*.py"))) <= 9
    for room in (path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "testing"):
        assert len(list(room.rglob("*.py"))) <= 25, room.name


def test_imports_go_in_no_circle():
    """Imports inside functions and for type checkers count too: they may hide a circle, and do not undo it."""
    assert import_circle(whole_import_graph()) == []


def test_the_name_of_a_clones_folder_makes_no_test_a_part_of_the_package():
    clone = Path("/home/me/x402guard")  # the name that git gives it
    for path, is_its in (("x402guard/errors.py", True), ("tests/test_tidy.py", False), (".venv/lib/x.py", False)):
        assert is_of(clone / "x402guard", str(clone / path)) is is_its

    def look(_, text, __):
        if re.search(r"""["']/x402guard/["'] (not )?in """, text):
            yield "it takes each file of such a clone for one of the package; ask structure.is_ours"

    assert faults_of(FILES, look) == []


def test_names_are_the_fields_own():
    def look(path, _, __):
        if BANNED_NAMES.search(path.stem):
            yield "its name"
        for node in statements_of(path):
            is_ours = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and "override" not in map(
                ast.unparse, node.decorator_list
            )
            if is_ours and BANNED_NAMES.search(node.name.lower()):
                yield node.name

    assert faults_of(SOURCES, look) == []


def test_nothing_is_left_for_later_and_no_exception_is_swallowed():
    def look(path, text, _):
        if BANNED_TEXT.search(text):
            yield "something is left for later"
        for node in (node for node in statements_of(path) if isinstance(node, ast.ExceptHandler)):
            if node.type is None:
                yield f"line {node.lineno}: a bare except"
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            if broad and all(isinstance(statement, ast.Pass) for statement in node.body):
                yield f"line {node.lineno}: an exception is swallowed"

    assert faults_of(SOURCES, look) == []


def test_every_public_name_is_documented():
    def look(_, __, tree):
        if not ast.get_docstring(tree):
            yield "a module says what it is for"
        for node in tree.body:
            is_public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                yield f"{node.name} has no docstring"

    assert faults_of(SOURCES, look) == []


@pytest.mark.parametrize("module", FACES)
def test_a_face_says_what_it_exports(module):
    """Inside the package a name without an underscore is public; what users import from lists its names."""
    exported = importlib.import_module(module).__all__
    assert sorted(exported) == list(dict.fromkeys(sorted(exported)))
    for public in exported:
        assert getattr(importlib.import_module(module), public, None) is not None, public


def test_what_a_user_writes_imports_from_the_top():
    for public in x402guard.__all__:
        assert hasattr(x402guard, public)


CORE = [
    "errors",
    "money",
    "evm",
    "assets",
    "views.report",
    "policy",
    "x402.wire",
    "x402.offer",
    "x402.schemes",
    "x402.flow",
    "llm.flow",
    "tools.flow",
]
POSSESSIVE = re.compile(r"\)[*+?]\+|\)\{[0-9,]+\}\+")


def test_no_pattern_repeats_a_group_possessively():
    """Before Python 3.11.5 such a group is gone back into, so that what had to be hidden was shown (gh-106052)."""

    def look(_path, _text, tree):
        texts = (
            node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
        )
        found = ((node.lineno, str(node.value)) for node in texts)
        return [f"line {line}: {text:.60}" for line, text in found if POSSESSIVE.search(text) and "(" in text]

    assert faults_of(SOURCES, look) == []


SHELL = ["httpx", "httpx2", "web3", "eth_account", "sqlite3", "psycopg", "genai_prices"]


def test_the_core_loads_no_shell():
    """Each in a fork that has loaded nothing, with the package's own `__init__` out of the way: it is the shell's front door."""
    script = f"""
import os, sys, types
package = types.ModuleType("x402guard"); package.__path__ = [{str(PACKAGE)!r}]
sys.modules["x402guard"] = package
for module in {CORE!r}:
    if os.fork() == 0:
        __import__("x402guard." + module)
        print(module, [name for name in {SHELL!r} if name in sys.modules], flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [f"{module} []" for module in CORE], done.stderr


def test_heavy_dependencies_load_on_first_use():
    later = (
        "asyncio", "concurrent.futures", "eth_abi", "eth_account", "eth_hash", "eth_tester", "importlib.resources",
        "pydantic", "sqlite3", "subprocess", "uvicorn", "web3", "x402guard.chain.rpc", "x402guard.views.build",
        "x402guard.x402.reconciliation",
    )  # fmt: skip
    script = f"import sys, x402guard; print([name for name in {later!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


KEY_FILES = ("kernel/signer.py", "kernel/ledger.py", "x402/signer.py", "x402/keys.py")
"""The signer, which alone signs; what recovers an address from a signature; and the two that read keys."""


def test_only_four_files_touch_a_key():
    for path in SOURCES:
        if name(path).removeprefix("x402guard/") in KEY_FILES or path.is_relative_to(PACKAGE / "testing"):
            continue
        if not any(word in text_of(path) for word in ("sign_recoverable", "unsafe_sign_hash", "coincurve")):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("sign_recoverable", "unsafe_sign_hash"), name(path)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert "coincurve" not in modules, name(path)
