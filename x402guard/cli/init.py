"""Defines the commands ``init``, ``config trust`` and ``config show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, say, without_keys
from x402guard.errors import ConfigError
from x402guard.guard.defaults import each_default, on_by_default, settings_text
from x402guard.guard.settings import Stated, check_settings, load_settings, stated_settings
from x402guard.guard.settings_file import CONFIG_FILE, SettingsFile, forget, read_settings_file, trust
from x402guard.views.words import json_text, printable


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
            file.write(text := settings_text())
    except FileExistsError:
        raise ConfigError(f"init: {path} already exists, and is not overwritten; name another file") from None
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)  # a part of it would be read as settings, and never be written over
        raise ConfigError(f"init: {path} cannot be written: {error.strerror}") from None
    trust(SettingsFile(path, text.encode()))
    typer.echo(f"{path} is written; it changes nothing yet.\n\n{on_by_default()}")
    typer.echo(
        "\nNext: x402guard keys new wallet.json   x402guard budget set wallet 20.00 --per month --new   x402guard doctor"
    )
    typer.echo(
        f"It is read as it is now; after a change: x402guard config trust {path if path.name != CONFIG_FILE else ''}".rstrip()
    )


config = typer.Typer(help="Trust a settings file, and show where each setting comes from.", no_args_is_help=True)


@config.command("trust")
def trust_file(
    path: Annotated[Path, typer.Argument(help="The settings file.")] = Path(CONFIG_FILE),
    *,
    drop: Annotated[bool, typer.Option("--forget", help="Trust what lies there no more, also if it is gone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trust the settings file of a folder as it is now: guards and commands that run there read it.

    Shows all that it states. A change of the file is asked about again. Example: x402guard config trust
    """
    if drop:
        forget(path)
        say(f"{path} is trusted no more", {"file": str(path.absolute()), "trusted": False}, as_json=as_json)
        return
    file = read_settings_file(path)
    rows = check_settings(file)  # an error in it is told before it is trusted
    trust(file)
    if as_json:
        typer.echo(json_text({"file": str(path.absolute()), "trusted": True, "settings": [_row(row) for row in rows]}))
        return
    typer.echo(f"{printable(str(path.absolute()))} is trusted as it is now: {len(rows)} settings")
    for row in sorted(rows, key=lambda each: not each.loosens):
        mark = "loosens: " if row.loosens else ""
        typer.echo(without_keys(printable(f"  {mark}{row.name} = {row.value}")))


@config.command("show")
def show(as_json: AsJson = False) -> None:
    """Show each setting with its value, and where it comes from: a variable, the settings file, or the default.

    Example: x402guard config show
    """
    rows = stated_settings()
    load_settings()
    named = {row.name for row in rows}
    for each in each_default():
        name = f"{each.table}.{each.name}" if each.table else each.name
        if not any(name == known or name.startswith(f"{known}.") for known in named):
            rows.append(Stated(name, each.value or "not set", "default", loosens=False))
    if as_json:
        typer.echo(json_text({"settings": [_row(row) for row in rows]}))
        return
    for row in rows:
        mark = "  (loosens)" if row.loosens else ""
        typer.echo(without_keys(printable(f"{row.name} = {row.value}  # {row.source}{mark}")))


def _row(row: Stated) -> dict[str, object]:
    return {"name": row.name, "value": without_keys(row.value), "source": row.source, "loosens": row.loosens}
