"""``python -m x402guard.testing.simulator``: plays new runs for a time, or one run again."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from x402guard.errors import ConfigError
from x402guard.testing.simulator.case import DEFAULT_LENGTH, VERSION, Case
from x402guard.testing.simulator.many import MOST_FOUND, play_many
from x402guard.testing.simulator.minimise import as_test, minimise
from x402guard.testing.simulator.play import Play
from x402guard.testing.simulator.simulate import Found, Result, play

_FOLDER: Final = Path("simulator-found")

app = typer.Typer(add_completion=False)


@app.command()
def run(  # noqa: PLR0917 - typer's options
    seconds: Annotated[float, typer.Option(help="How long to play new runs.")] = 600,
    seed: Annotated[int | None, typer.Option(help="Play this one run, and tell its story.")] = None,
    first: Annotated[int | None, typer.Option(help="The first seed of many; by default a new one.")] = None,
    runs: Annotated[int | None, typer.Option(help="How many runs to play, instead of a time.")] = None,
    length: Annotated[int, typer.Option(help="How many things happen from outside in a run.")] = DEFAULT_LENGTH,
    off: Annotated[str, typer.Option(help="Faults that do not happen, with commas between them.")] = "",
    keep: Annotated[str, typer.Option(help="The numbers of what happens, with commas between them.")] = "",
    store: Annotated[str, typer.Option(help="memory or sqlite.")] = "memory",
    version: Annotated[int, typer.Option(help="Of the simulator that the seed belongs to.")] = VERSION,
    workers: Annotated[int, typer.Option(help="How many runs to play at once; by default one for each core.")] = 0,
    coverage: Annotated[bool, typer.Option(help="Print what was reached, and what was not.")] = False,
) -> None:
    """Play runs of the simulator. The last line says steps, payments and violations."""
    try:
        if seed is not None:
            kept = _numbers(keep) if keep else None
            faults = frozenset(off.split(",")) if off else frozenset[str]()
            one = Case(seed, length, faults, kept, store, version)  # type: ignore[arg-type]  # checked by the class
            result = _told(one)
        else:
            begin = secrets.randbelow(10**12) if first is None else first
            typer.echo(f"seeds from {begin} on, version {VERSION}")
            result = play_many(
                begin,
                length,
                store,
                seconds=None if runs is not None else seconds,
                runs=runs,
                workers=workers or os.cpu_count() or 1,
            )
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


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"keep: {text!r:.80} is not a list of numbers; write 3,14,15")
    return tuple(map(int, parts))


def _told(case: Case) -> Result:
    """Play one run, and print its story."""
    told = Play(case, traced=True)
    try:
        told.run()
    except Exception as error:
        typer.echo(f"{type(error).__name__}: {error}"[:1_000])
    for line in told.world.trace or ():
        typer.echo(line)
    return play(case)


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
