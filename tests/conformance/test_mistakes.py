"""The mistakes of a new user, each with the whole message that it gets: ``tests/data/mistakes.txt`` is the table.

A line without indent is what was typed (``#alone``: outside any session); the lines below it are the error, with ``…``
for what differs from run to run.
Each message has the setting, the value unless it may be a secret, what is wrong, and the fix. Nothing is held or signed.
"""

import json
import logging
import os
import re
import threading
from unittest import mock

import anthropic
import anyio
import httpx
import httpx2
import pytest
from eth_account import Account

import x402guard
from tests.support.command_line import typed
from tests.support.merchant import KEY, Shop, client, make_guard
from tests.support.processes import ROOT
from tests.support.settings import owners_file
from x402guard.guard import settings

TABLE = (ROOT / "tests" / "data" / "mistakes.txt").read_text()
ROWS = re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", TABLE, re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a ledger, a keystore, and files that are neither; and no setting of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "_READ_BEFORE", {})
    for name in [name for name in os.environ if name.startswith("X402GUARD_")]:
        monkeypatch.delenv(name)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "none-of-ours.db").write_text("")
    (tmp_path / "text.db").write_text("this is a text, and no database\n" * 100)
    (tmp_path / "key.json").write_text(json.dumps(Account.encrypt(KEY, "right", kdf="pbkdf2", iterations=1_000)))
    with make_guard("sqlite:///x402guard.db") as guard:
        assert guard.session("s", budget="$1.00").id  # so that it is written
    logging.getLogger("x402guard").setLevel(logging.CRITICAL)
    yield tmp_path
    logging.getLogger("x402guard").setLevel(logging.NOTSET)


def env(**variables):
    """Make a guard from environment variables."""
    with mock.patch.dict(os.environ, variables):
        x402guard.Guard.from_env().close()


def toml(text):
    """Make a guard from a settings file."""
    owners_file(".", text)
    x402guard.Guard.from_env().close()


class Printed(Exception):  # noqa: N818 - no error of ours
    """What a command has printed on stderr, with its exit code."""


def cli(*arguments, ledger="sqlite:///none.db"):
    """Run a command."""
    done = typed(*arguments, cwd=".", X402GUARD_LEDGER=ledger)
    assert done.stdout == ""
    raise Printed(f"exit {done.returncode}\n{done.stderr.rstrip()}")


def in_a_plain_thread():
    with make_guard() as guard, guard.session("s", budget="$1.00"):
        found = []

        def asks():
            try:
                client(guard, Shop()).get("https://shop.example/x")
            except x402guard.ConfigError as error:
                found.append(error)

        thread = threading.Thread(target=asks)
        thread.start()
        thread.join()
        raise found[0]


def in_an_async_client(transport):
    async def asks():
        async with httpx.AsyncClient(transport=transport) as http:
            await http.get("https://shop.example/x")

    anyio.run(asks)


def after_the_block():
    with make_guard() as guard:
        session = guard.session("s", budget="$1.00")
    session.charge("serp", "$0.01")


def after_its_end():
    with make_guard() as guard:
        with guard.session("s", budget="$1.00", id="run") as session:
            pass
        session.charge("serp", "$0.01")


def names(guard, session):
    """What a typed line can use."""
    given = {name: getattr(x402guard, name) for name in x402guard.__all__}
    ours = {"env": env, "toml": toml, "cli": cli, "KEY": KEY, "anthropic": anthropic, "x402guard": x402guard}
    helps = {fn.__name__: fn for fn in (in_a_plain_thread, in_an_async_client, after_the_block, after_its_end)}
    web = {"httpx": httpx, "httpx2": httpx2, "http": client(session, Shop())}
    return {**given, **ours, **helps, **web, "guard": guard, "session": session}


def said(error):
    lines = [f"{type(error).__name__}: {error}"] if not isinstance(error, Printed) else [str(error)]
    advice = getattr(error, "advice", "")
    return "\n".join([*lines, *([advice] if advice and advice != "Nothing was sent or paid." else [])])


@pytest.mark.parametrize(("code", "expected"), ROWS, ids=[code[:60] for code, _ in ROWS])
def test_a_mistake_gets_its_message(code, expected):
    def types():
        if code.startswith("#alone "):
            exec(code.removeprefix("#alone "), names(None, make_guard().session("s", budget="$1.00")))  # noqa: S102
        with make_guard() as guard, guard.session("s", budget="$1.00") as session:
            exec(code, names(guard, session))  # noqa: S102 - the table is a test's own

    with pytest.raises(Exception) as caught:
        types()
    wanted = "\n".join(line.removeprefix("    ") for line in expected.rstrip("\n").split("\n"))
    pattern = ".*".join(map(re.escape, wanted.split("…")))
    assert re.fullmatch(pattern, said(caught.value), re.DOTALL), said(caught.value)
    with x402guard.Owner("x402guard.db") as owner:
        assert owner.holds() == []


def test_the_table_has_at_least_the_116_mistakes_that_were_made():
    assert len(ROWS) >= 116
    assert len({code for code, _ in ROWS}) == len(ROWS)
