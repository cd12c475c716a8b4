"""Makes a failing run small: the fewest faults, and the fewest stimuli, with which the same invariant still breaks.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (IEEE TSE 2002): take parts of the schedule
away, larger ones first, and keep what still fails. Each event draws from a stream of its own, so that what is left does
what it did before.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from x402guard.errors import ConfigError
from x402guard.frozen import replace
from x402guard.policy import Policy
from x402guard.testing.simulator.case import Case
from x402guard.testing.simulator.market import Seller
from x402guard.testing.simulator.simulate import Found, play
from x402guard.testing.simulator.world import FAULTS


def minimise(
    found: Found,
    *,
    tries: int = 400,
    sellers: Callable[[], Sequence[Seller]] | None = None,
    policy: Policy | None = None,
    fails: Callable[[Case], Found | None] | None = None,
) -> Found:
    """Return a smaller run that breaks the same invariant, or the same run.

    *sellers* and *policy* are those that the run was played with. *fails* plays a case, at most *tries* times. Raises
    ``ConfigError`` if the run had sellers or a policy of the caller's own, and they are not given.
    """
    given = {"sellers": sellers, "policy": policy}
    for name in found.own if fails is None else ():
        if given[name] is None:
            raise ConfigError(f"{name}: the run had its own; write minimise(found, {name}=…)")

    def failure(case: Case) -> Found | None:
        violations = play(case, sellers=sellers, policy=policy).violations
        return violations[0] if violations else None

    smaller = _Smaller(found, tries, fails or failure)
    smaller.shorten()
    smaller.drop_faults()
    smaller.drop_stimuli()
    smaller.drop_faults()
    return smaller.best


class _Smaller:
    def __init__(self, found: Found, tries: int, fails: Callable[[Case], Found | None]) -> None:
        self.best, self._left, self._fails = found, tries, fails

    def _still_fails(self, case: Case) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        again = self._fails(case)
        if again is None or again.kind != self.best.kind:
            return False
        self.best = again
        return True

    def shorten(self) -> None:
        """Cut the end of the schedule off."""
        low, high = 1, self.best.case.length
        kept = range(high) if self.best.case.kept is None else self.best.case.kept
        while low < high:
            middle = (low + high) // 2
            if self._still_fails(replace(self.best.case, kept=tuple(n for n in kept if n < middle))):
                high = middle
            else:
                low = middle + 1

    def drop_faults(self) -> None:
        """Turn every fault off that the failure does not need."""
        for fault in FAULTS:
            case = self.best.case
            if fault not in case.off:
                self._still_fails(replace(case, off=case.off | {fault}))

    def drop_stimuli(self) -> None:
        """Take stimuli away, in parts of half of them, a quarter, and so on to single ones."""
        parts = 2
        while True:
            kept = self._kept()
            size = max(1, len(kept) // parts)
            smaller = False
            for start in range(0, len(kept), size):
                now = self._kept()
                away = set(kept[start : start + size])
                left = tuple(n for n in now if n not in away)
                if left != now and left and self._still_fails(replace(self.best.case, kept=left)):
                    smaller = True
            if size == 1 and not smaller:
                return
            if not smaller:
                parts = min(2 * parts, max(2, len(self._kept())))
            if self._left <= 0:
                return

    def _kept(self) -> Sequence[int]:
        case = self.best.case
        return tuple(range(case.length)) if case.kept is None else case.kept


def as_test(found: Found) -> str:
    """Return a test file that plays the run, ready to be kept.

    Sellers and a policy of the caller's own are fixtures of pytest there, ``sellers`` and ``policy``, which the caller
    writes.
    """
    case = found.case
    given = [f"{case.seed}, {case.length}"]
    if case.off:
        given.append("off=frozenset(OFF.split())")
    if case.kept is not None:
        given.append("kept=tuple(map(int, KEPT.split()))")
    given.append(f'store="{case.store}", version={case.version}')
    given += [f'flavour="{case.flavour}"'] if case.flavour is not None else []
    own = "".join(f", {name}={name}" for name in found.own)
    names = (("OFF", sorted(case.off)), ("KEPT", case.kept or ()))
    blocks = [f'{name} = """\n{_lines(words)}\n"""\n' for name, words in names if words]
    return f'''"""Found by the simulator: {found.kind}, at step {found.step:,}."""

from x402guard.testing.simulator import Case, play

{"".join(blocks)}

def test_run_{case.seed}_holds({", ".join(found.own)}):
    case = Case(
        {", ".join(given)}
    )
    assert play(case{own}).violations == []
'''


def _lines(words: Iterable[object]) -> str:
    return textwrap.fill(" ".join(map(str, words)), 100)
