"""Defines the command ``init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from x402guard.errors import ConfigError
from x402guard.guard.defaults import on_by_default, settings_text
from x402guard.guard.settings import CONFIG_FILE


def init(
    path: Annotated[Path, typer.Argument(help="The settings file to write.")] = Path(CONFIG_FILE),
) -> None:
    """Write a settings file in which each setting stands as a comment, with its default and its meaning.

    Says what is on by default. A file that exists is never overwritten. Example: x402guard init
    """
    made = False
    try:
        with path.open("x", encoding="utf-8") as file:
            made = True
            file.write(settings_text())
    except FileExistsError:
        raise ConfigError(f"init: {path} already exists, and is not overwritten; name another file") from None
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)  # a part of it would be read as settings, and never be written over
        raise ConfigError(f"init: {path} cannot be written: {error.strerror}") from None
    typer.echo(f"{path} is written; it changes nothing yet.\n\n{on_by_default()}")
    typer.echo("\nNext: x402guard keys new wallet.json   x402guard budget set wallet 20.00 --new   x402guard doctor")
