"""Random draws that are the same on every machine and every Python: SplitMix64, one stream for each name.

Each event of a run draws from a stream of its own, named by the seed and the event. So an event that is taken out of a
run changes no draw of the others, which is what makes a failing run minimisable. Source: Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators" (OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final, TypeVar

T = TypeVar("T")

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_PARTS: Final = 1 << 64

_AT_ONCE: Final = 16
"""So many draws are worked out at once, each in 128 bits of one whole number: one by one takes Python three times as long."""

_EACH: Final = sum(1 << 128 * at for at in range(_AT_ONCE))
_STEPS: Final = sum((_GOLDEN * (_AT_ONCE - at) & _MASK) << 128 * at for at in range(_AT_ONCE))
_LOW: Final = {bits: _EACH * ((1 << bits) - 1) for bits in (33, 34, 37, 64)}
_UNPACKED: Final = Struct("<" + "Q8x" * _AT_ONCE).unpack


class Draws:
    """A stream of draws. *seed* is any whole number; equal seeds give equal streams."""

    __slots__ = ("_ready", "_state")

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK
        self._ready: list[int] = []
        """The next draws, the first one last."""

    @classmethod
    def named(cls, seed: int, *names: str | int) -> Draws:
        """Return the stream of a name under a seed."""
        text = "/".join(map(str, (seed, *names)))
        return cls(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))

    def bits64(self) -> int:
        """Return a whole number from 0 to 2**64 - 1."""
        return (self._ready or self._drawn()).pop()

    def _drawn(self) -> list[int]:
        drawn = (_EACH * self._state + _STEPS) & _LOW[64]
        drawn = ((drawn ^ (drawn >> 30 & _LOW[34])) * 0xBF58476D1CE4E5B9) & _LOW[64]
        drawn = ((drawn ^ (drawn >> 27 & _LOW[37])) * 0x94D049BB133111EB) & _LOW[64]
        drawn ^= drawn >> 31 & _LOW[33]
        self._state = (self._state + _GOLDEN * _AT_ONCE) & _MASK
        self._ready = list(_UNPACKED(drawn.to_bytes(16 * _AT_ONCE, "little")))
        return self._ready

    def bits(self, count: int) -> int:
        """Return a whole number of *count* bits."""
        value = 0
        for _ in range(-(-count // 64)):
            value = value << 64 | self.bits64()
        return value >> -count % 64

    def octets(self, count: int) -> bytes:
        """Return *count* bytes."""
        return self.bits(8 * count).to_bytes(count, "big")

    def chance(self, part: float) -> bool:
        """Return True in *part* (0 to 1) of all draws."""
        return (self._ready or self._drawn()).pop() < part * _PARTS

    def below(self, most: int) -> int:
        """Return a whole number from 0 to *most* - 1."""
        return self.bits64() * most >> 64

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of *choices*."""
        return choices[(self._ready or self._drawn()).pop() * len(choices) >> 64]

    def weighted(self, weights: Mapping[T, int]) -> T:
        """Return a key of *weights*, each as often as its weight says."""
        left = self.below(sum(weights.values()))
        for key, weight in weights.items():
            left -= weight
            if left < 0:
                return key
        raise ValueError("no weight is above 0")

    def shuffle(self, items: list[T]) -> None:
        """Put a list into a random order."""
        for at in range(len(items) - 1, 0, -1):
            other = self.below(at + 1)
            items[at], items[other] = items[other], items[at]
