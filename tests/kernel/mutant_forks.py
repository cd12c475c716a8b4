"""Makes one mutant in a fork of the process that has collected the tests, and runs the tests on it there."""

import importlib
import importlib.util
import inspect
import os
import resource
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

TESTS = (
    "tests/kernel", "tests/unit/ledger", "tests/unit/x402", "tests/unit/stores", "tests/unit/guard/test_keys.py",
    "tests/attacks/test_a23_side_doors.py", "tests/attacks/test_a24_key_theft.py", "tests/attacks/test_a33_signatures.py",
)  # fmt: skip
OPTIONS = (
    "-q", "--capture=sys", "-m", "not long", "-k", "not sqlite and not postgres", "-o", "timeout=60",
    "--ignore=tests/kernel/test_rooms.py",
)  # fmt: skip
QUICK = (
    *(str(path) for name in ("test_rules*.py", "test_s*.py") for path in sorted(Path(__file__).parent.glob(name))),
    "tests/unit/x402/test_schemes.py", "tests/unit/ledger/test_windows.py",
)  # fmt: skip
"""What tells most, for mutants that the package is loaded again for."""

DIRECT = ("test_rules", "test_sound", "test_signer", "test_ledger.py")
"""Files of this folder whose tests need no pytest."""

MOST_BYTES = 6 * 2**30


class Killed:
    """Ends this process at the first test that fails, and tells its name."""

    def __init__(self, say) -> None:
        self._say = say

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._say(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self._say(f"{report.nodeid} is not even loaded")


def is_direct(item) -> bool:
    """True for a test of the kernel's own that asks for nothing but its parameters: it is called as it stands."""
    asked = set(inspect.signature(item.obj).parameters)
    given = getattr(getattr(item, "callspec", None), "params", {})
    return item.path.name.startswith(DIRECT) and asked <= set(given)


def run_directly(items, say) -> list:
    """Call the tests that need no pytest, a hundred in the time of one. Returns the others."""
    for item in items:
        if is_direct(item):
            try:
                item.obj(**getattr(getattr(item, "callspec", None), "params", {}))
            except BaseException:
                say(item.nodeid)
    return [item for item in items if not is_direct(item)]


def in_a_fork(run, folder: Path, limit_s: int) -> int:
    """Run a function in a child that writes what it says into a folder of its own. Returns its process id."""
    folder.mkdir()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)

        def say(text):
            (folder / "said").write_text(text)
            os._exit(1)

        run(say)
        os._exit(0)
    except BaseException:
        (folder / "said").write_text(f"! {traceback.format_exc()}")
    finally:
        os._exit(1)


def exchange(mutation, tree) -> bool:
    """Give a function of the loaded kernel the code that it has in the changed tree. False for one that cannot be given."""
    mutation.make()
    found = importlib.import_module(f"x402guard.kernel.{mutation.path.stem}")
    *classes, name = mutation.function.split(".")
    for each in classes:
        found = getattr(found, each)
    function = vars(found)[name]
    for attribute in ("cache_clear", "fget", "__func__", "__wrapped__"):
        inner = getattr(function, attribute, None)
        if attribute == "cache_clear" and inner is not None:
            inner()
        elif inner is not None:
            function = inner
    above = [compile(tree, str(mutation.path), "exec")]
    while above:
        code = above.pop()
        if code.co_qualname == mutation.function and code.co_name == function.__code__.co_name:
            if function.__code__.co_freevars != code.co_freevars:
                return False
            function.__code__ = code
            return True
        above += [each for each in code.co_consts if hasattr(each, "co_code")]
    raise LookupError(mutation.function)


class Changed(SourceFileLoader):
    """Loads one module of the kernel from its changed tree."""

    tree = None

    def get_code(self, fullname):
        return compile(self.tree, self.path, "exec")

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)
        return None


def load_anew(mutation, tree, say) -> None:
    """Run all tests with the package imported again, one module of it changed."""
    mutation.make()
    for name in [each for each in sys.modules if each.split(".")[0] in ("x402guard", "tests")]:
        del sys.modules[name]
    loader = Changed(f"x402guard.kernel.{mutation.path.stem}", str(mutation.path))
    loader.tree = tree
    sys.meta_path.insert(0, loader)
    for tests in (QUICK, TESTS):
        status = pytest.main([*OPTIONS, "-x", *tests], plugins=[Killed(say)])
        if status:
            say(f"pytest ends with {status}")
