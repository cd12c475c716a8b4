"""Changes the kernel in one place at a time, and counts which changes the tests notice.

    python -m tests.kernel.mutate [--files commit.py …] [--sample N [--seed S]] [--json FILE]

The tests are collected once. Each mutant is made in a fork of this process: there the code of one function is exchanged,
and the tests that run its lines follow, the most telling first, up to the first that fails. What stands outside of functions
is imported anew, with all that uses it. ``survivors.txt`` lists the mutants that no test can tell from the kernel, each
with its reason; a survivor that is not listed there, and a listed one that is killed, fails the run.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import _pytest.main
import pytest

from tests.kernel.mutant_forks import OPTIONS, TESTS, Killed, exchange, in_a_fork, is_direct, load_anew, run_directly
from tests.kernel.mutations import mutations_of

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "x402guard" / "kernel"
LISTED = Path(__file__).with_name("survivors.txt")
FILES = (
    "commit.py", "moved.py", "changes.py", "given_back.py", "released.py", "sound.py", "ledger.py", "signer.py", "windows.py",
    "change_set.py", "table.py", "typed_data.py", "leaving.py", "evm.py", "intent.py",
)  # fmt: skip
MOST_CPU_S = 90
SLOW_S = 0.3
WORKERS = 2


def listed() -> dict[tuple[str, str, str], str]:
    """The survivors that are known, each with its reason."""
    rows = LISTED.read_text().splitlines() if LISTED.exists() else []
    parts = [[part.strip() for part in row.split(" | ")] for row in rows if row and not row.startswith("#")]
    return {(file, function, what): reason for file, function, what, reason in parts}


class Lines:
    """Notes which lines of the kernel each test runs, how long it takes, and whether it passes as things are."""

    def __init__(self) -> None:
        self.seen, self.failed, self.seconds = {}, set(), {}
        self._now: set[tuple[str, int]] = set()

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(str(KERNEL)) else None

    def _line(self, frame, event, argument):
        self._now.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno))
        return self._line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self._now, begun = set(), time.perf_counter()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        yield
        sys.settrace(None)
        threading.settrace(None)
        self.seen[item.nodeid], self.seconds[item.nodeid] = sorted(self._now), time.perf_counter() - begun

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)


class Run:
    """Makes the mutants in place of the tests that were collected, and counts them."""

    def __init__(self, asked, trees, until=float("inf")) -> None:
        self.until = until
        self.asked, self.trees, self.results = asked, trees, []
        self._kills: Counter[tuple[tuple[str, ...], str]] = Counter()
        self._items = {}
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # noqa: S108
        self._numbers = iter(range(10**9))

    def _begin(self, run, limit_s=MOST_CPU_S):
        folder = self._folder / str(next(self._numbers))
        return in_a_fork(run, folder, limit_s), folder

    def _look(self, session) -> tuple[dict, dict]:
        """Run all tests once as things are. Returns each line's tests, and how long each test takes."""

        def run(say):
            lines = Lines()
            run_directly(session.items, lines.failed.add)
            session.config.pluginmanager.register(lines)
            _pytest.main.pytest_runtestloop(session)
            say(json.dumps([{key: value for key, value in lines.seen.items() if key not in lines.failed}, lines.seconds,
                            sorted(lines.failed)]))  # fmt: skip

        pid, folder = self._begin(run, 1_200)
        os.waitpid(pid, 0)
        seen, seconds, failed = json.loads((folder / "said").read_text())
        print(f"{len(seen)} tests pass as things are; {len(failed)} do not, and are left out", *failed, sep="\n  ")
        tests: dict[tuple[str, int], set[str]] = {}
        for test, lines in seen.items():
            for file, line in lines:
                tests.setdefault((file, line), set()).add(test)
        return tests, seconds

    def _runner(self, mutation, session, items):
        def run(say):
            tree = self.trees[mutation.path]
            if not mutation.function or not items or not exchange(mutation, tree):  # what no test runs, an import may
                load_anew(mutation, tree, say)
                return
            session.items = run_directly(items, say)
            session.config.pluginmanager.register(Killed(say))
            with contextlib.suppress(session.Failed):
                _pytest.main.pytest_runtestloop(session)

        return run

    def _note(self, mutation, status, folder, is_run) -> None:
        said = (folder / "said").read_text() if (folder / "said").exists() else ""
        if said.startswith("!"):
            raise RuntimeError(f"{mutation.key}: {said}")
        survives = status == 0
        for place in (mutation.key[:1], mutation.key[:2]):
            self._kills[place, said] += 1
        self.results.append((mutation, not survives, said or ("" if survives else f"stopped, {status}")))
        shutil.rmtree(folder, ignore_errors=True)
        if survives:
            print(
                *mutation.key, f"line {mutation.lines[0]}", "" if is_run else "no test runs it", sep=" | ", flush=True
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        tests, seconds = self._look(session)
        items = self._items = {item.nodeid: item for item in session.items}
        running = {}
        for mutation in sorted(self.asked, key=lambda each: not each.function):  # to load anew takes longer
            if time.time() > self.until:
                break
            first, last = mutation.lines
            names = set().union(*(tests.get((mutation.path.name, line), set()) for line in range(first, last + 1)))
            chosen = [items[name] for name in sorted(names, key=self._order(mutation, seconds))]
            if len(running) >= WORKERS:
                self._wait(running)
            pid, folder = self._begin(self._runner(mutation, session, chosen))
            running[pid] = mutation, folder, chosen or not mutation.function
        while running:
            self._wait(running)
        shutil.rmtree(self._folder, ignore_errors=True)
        return True

    def _order(self, mutation, seconds):
        """The kernel's own quick ones first; of these, those that have killed others of the function or the file."""
        function, file = mutation.key[:2], mutation.key[:1]
        return lambda name: (not is_direct(self._items[name]) or seconds[name] > SLOW_S, -self._kills[function, name],
                             -self._kills[file, name], seconds[name], name)  # fmt: skip

    def _wait(self, running) -> None:
        pid, status = os.wait()
        mutation, folder, is_run = running.pop(pid)
        self._note(mutation, status, folder, is_run)


def report(run: Run, *, is_whole: bool, out: str | None, began: float) -> int:
    """Print the counts by file, and what is not as it is listed. Returns 1 if something is not."""
    known = listed()
    made, killed = Counter(), Counter()
    for mutation, is_killed, _ in run.results:
        made[mutation.path.name] += 1
        killed[mutation.path.name] += is_killed
    survivors = {mutation.key for mutation, is_killed, _ in run.results if not is_killed}
    tried = {mutation.key for mutation, _, _ in run.results}
    wrong = [("not listed", *key) for key in sorted(survivors - known.keys())]
    wrong += [("listed, and killed", *key) for key in sorted((known.keys() & tried) - survivors)]
    if is_whole:
        wrong += [("listed, and no mutant", *key) for key in sorted(known.keys() - tried)]
    for file in made:
        print(f"{file}: {made[file]} made, {killed[file]} killed, {made[file] - killed[file]} survive")
    total, most = killed.total(), made.total()
    if most < len(run.asked):
        print(f"{len(run.asked) - most} were not made: the time was over")
    equal = len(survivors & known.keys())
    print(f"{most} made, {total} killed ({total / max(most, 1):.1%}), {equal} listed, in {time.time() - began:.0f} s")
    for each in wrong:
        print(" | ".join(each))
    if out:
        rows = [{"key": mutation.key, "lines": mutation.lines, "killed": is_killed, "by": by}
                for mutation, is_killed, by in run.results]  # fmt: skip
        Path(out).write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    return int(bool(wrong))


def main() -> int:
    """Make the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES, metavar="FILE")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after that")
    parser.add_argument("--json")
    parser.add_argument("--again", metavar="FILE", help="make only those that survived by the JSON of an earlier run")
    parser.add_argument("--only", default="", help="make only those whose description has this text")
    options = parser.parse_args()
    began = time.time()
    os.chdir(ROOT)
    found = [(path, *mutations_of(path)) for path in (KERNEL / name for name in options.files)]
    asked = [each for _, _, mutations in found for each in mutations if options.only in " | ".join(each.key)]
    if options.again:
        rows = json.loads(Path(options.again).read_text())
        survived = {tuple(row["key"]) for row in rows if not row["killed"]}
        asked = [each for each in asked if each.key in survived]
    if options.sample is not None:
        asked = random.Random(options.seed).sample(asked, min(options.sample, len(asked)))
    run = Run(asked, {path: tree for path, tree, _ in found}, began + options.seconds)
    pytest.main([*OPTIONS, *TESTS], plugins=[run])
    is_whole = (
        len(run.results) == len(asked)
        and not (options.sample or options.only or options.again)
        and set(options.files) == set(FILES)
    )
    return report(run, is_whole=is_whole, out=options.json, began=began)


if __name__ == "__main__":
    sys.exit(main())
