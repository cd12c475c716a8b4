"""Atheris, guided by what the library's own code does with the bytes: ``python -m tests.support.fuzz_harness ENTRY RUNS``.

ENTRY is a name of ``fuzz_entries.PURE``, ``any`` (the first byte chooses one), or ``rpc``. It ends with an error at the first input that gets out what may not.
"""

import sys

import atheris

with atheris.instrument_imports(include=["x402guard"]):
    from tests.support import fuzz_entries


def main(entry: str, runs: int) -> None:
    arguments = [sys.argv[0], f"-runs={runs}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=1024"]
    if entry != "rpc":
        atheris.Setup(arguments, fuzz_entries.any_entry if entry == "any" else fuzz_entries.PURE[entry])
        atheris.Fuzz()
        return
    with fuzz_entries.node() as world:
        atheris.Setup(arguments, lambda raw: fuzz_entries.rpc(world, raw))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
