"""Archiving a ledger without the command, and its tables as another program reads and writes them."""

import sqlite3
from contextlib import closing

import psycopg

from x402guard.stores import archiving, open_store

LATER = 4_000_000_000_000


def archive(ledger, folder, before_ms=LATER, gone=()):
    with closing(open_store(ledger)) as store:
        return archiving.archive(store, before_ms, folder, gone=gone)


def run(ledger, sql):
    """Rows of the ledger's own tables, by a connection of another program."""
    if ledger.startswith("sqlite"):
        with closing(sqlite3.connect(ledger.removeprefix("sqlite:///"))) as raw:
            found = raw.execute(sql).fetchall()
            raw.commit()
            return found
    with psycopg.connect(ledger) as raw:
        raw.execute("SET search_path = x402guard")
        cursor = raw.execute(sql)
        return cursor.fetchall() if cursor.description else []


def only(folder):
    [path] = folder.iterdir()
    return path
