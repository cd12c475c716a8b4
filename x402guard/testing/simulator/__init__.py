"""A simulator: whole runs of guards, sellers, chain, machines and faults in one thread, each one out of a seed.

See ``docs/explanation/simulation.md`` and ``docs/how-to/simulate-your-seller.md``.
"""

from x402guard.testing.simulator.case import VERSION, Case
from x402guard.testing.simulator.market import Answer, Seller, Visit
from x402guard.testing.simulator.minimise import as_test, minimise
from x402guard.testing.simulator.simulate import Found, Result, play, simulate
from x402guard.testing.simulator.world import BrokenActor, Violation

__all__ = [
    "VERSION", "Answer", "BrokenActor", "Case", "Found", "Result", "Seller", "Violation", "Visit", "as_test", "minimise",
    "play", "simulate",
]  # fmt: skip
