"""``python -m x402guard.testing.simulator``: plays new runs for a time, or one run again."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from x402guard.errors import ConfigError
from x402guard.testing.simulator.case import DEFAULT_LENGTH, VERSION, Case, Flavour, Store
from x402guard.testing.simulator.many import MOST_FOUND, play_many
from x402guard.testing.simulator.minimise import as_test, minimise
from x402guard.testing.simulator.simulate import Found, Result, play

_FOLDER: Final = Path("simulator-found")

app = typer.Typer(add_completion=False)


@app.command()
def run(  # noqa: PLR0917 - typer's options
    seconds: Annotated[float, typer.Option(min=1, help="How long to play new runs.")] = 600,
    seed: Annotated[int | None, typer.Option(help="Play this one run, and tell its story.")] = None,
    first: Annotated[int | None, typer.Option(help="The first seed of many; by default a new one.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="How many runs to play, instead of a time.")] = None,
    length: Annotated[int, typer.Option(help="How many things happen from outside in a run.")] = DEFAULT_LENGTH,
    off: Annotated[str, typer.Option(help="Faults that do not happen, with commas between them.")] = "",
    keep: Annotated[str, typer.Option(help="The numbers of what happens, with commas between them.")] = "",
    store: Annotated[Store, typer.Option(help="Where the ledger of a run is kept.")] = "memory",
    version: Annotated[int, typer.Option(help="Of the simulator that the seed belongs to.")] = VERSION,
    flavour: Annotated[Flavour | None, typer.Option(help="What the runs look for; by default each draws it.")] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="How many runs to play at once; by default one for each core.")
    ] = 0,
    coverage: Annotated[bool, typer.Option(help="Print what was reached, and what was not.")] = False,
) -> None:
    """Play runs of the simulator. The last line says steps, payments and violations."""
    try:
        one = _one_case(seed, length, off, keep, store=store, version=version, flavour=flavour)
        if one is None:
            begin = secrets.randbelow(10**12) if first is None else first
            typer.echo(f"seeds from {begin} on, version {VERSION}")
            limit, cores = None if runs is not None else seconds, workers or os.cpu_count() or 1
            result = play_many(begin, length, store, flavour=flavour, seconds=limit, runs=runs, workers=cores)
        else:
            result = _told(one)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for found in result.violations[:MOST_FOUND]:
        _keep(found, smaller=seed is None)
    if coverage:
        typer.echo(result.coverage.table())
        for table, missing in result.coverage.unreached().items():
            typer.echo(f"not reached, {table}: {', '.join(missing) or 'nothing'}")
    typer.echo(result.summary())
    raise typer.Exit(1 if result.violations else 0)


def _one_case(
    seed: int | None, length: int, off: str, keep: str, *, store: Store, version: int, flavour: Flavour | None
) -> Case | None:
    """Return the one run that the options name, or None for many. Raises ``ConfigError``."""
    if seed is None and (off or keep):
        raise ConfigError("off, keep: they belong to one run; name it with --seed")
    faults = frozenset(off.split(",")) if off else frozenset[str]()
    kept = _numbers(keep) if keep else None
    return None if seed is None else Case(seed, length, faults, kept, store, version, flavour)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"keep: {text!r:.80} is not a list of numbers; write 3,14,15")
    return tuple(map(int, parts))


def _told(case: Case) -> Result:
    """Play one run, and print its story."""
    story: list[str] = []
    result = play(case, trace=story)
    for line in story:
        typer.echo(line)
    return result


def _keep(found: Found, *, smaller: bool) -> None:
    typer.echo(str(found))
    if not smaller:
        return
    least = minimise(found)
    _FOLDER.mkdir(exist_ok=True)
    path = _FOLDER / f"test_{found.kind.replace('-', '_')}_{found.case.seed}.py"
    path.write_text(as_test(least), encoding="utf-8")
    kept = least.case.length if least.case.kept is None else len(least.case.kept)
    typer.echo(f"  smallest run: {kept} events, at step {least.step:,}; kept as {path}\n  {least.case.command()}")


if __name__ == "__main__":
    app()
