"""Runs the rows, each in a process of its own, prints the table, and writes it as JSON."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import os
import platform
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.timing import Figure

ROWS = (
    "header_to_header", "paid_request", "loopback", "pass_through", "proxy", "llm_call", "tools", "throughput", "growth", "live_holds", "fleet",
    "importing", "instructions",
)  # fmt: skip


def main() -> None:
    """Run the rows that are named, or all."""
    asked = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    asked.add_argument("rows", nargs="*", default=ROWS, help=f"of {', '.join(ROWS)}")
    asked.add_argument("--json", type=Path, help="write the figures to this file")
    asked.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.one:
        for figure in importlib.import_module(f"benchmarks.{given.rows[0]}").measure():
            print(json.dumps(asdict(figure)), flush=True)
        return
    print(f"| what | measured | goal | beside |\n|---|---|---|---|\n{machine()}", flush=True)
    found = [figure for row in given.rows for figure in run(row)]
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), "figures": found}, indent=2, ensure_ascii=False) + "\n")


def run(row: str) -> list[dict[str, Any]]:
    """Run one row in a process of its own, and print its lines."""
    found = []
    command = [sys.executable, "-m", "benchmarks", "--one", row]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - this module
        for line in process.stdout or ():
            told = json.loads(line)
            figure = Figure(**told)
            print(f"| {figure.name} | {figure.shown()} | {figure.goal} | {figure.peer} |", flush=True)
            found.append({"row": row, **told})
    if process.returncode:
        sys.exit(f"{row} failed; its error is above")
    return found


def machine() -> str:
    """Return a line of the table about the machine."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    parts = (
        dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        f"{platform.python_implementation()} {platform.python_version()}",
        f"SQLite {sqlite3.sqlite_version}",
        f"{os.cpu_count()} cores, load {load}",
    )
    return f"| machine | {'; '.join(parts)} | | |"


if __name__ == "__main__":
    main()
