"""`x402guard keys`: keys go into keystores and are asked for; none is an argument, and none is printed."""

import json
import stat
from pathlib import Path

import pytest
from eth_account import Account

from tests.support.command_line import forked, typed
from tests.support.merchant import KEY, PAYER
from tests.support.terminal import at_terminal
from x402guard import ConfigError, Guard, LocalSigner
from x402guard.cli.arguments import without_keys
from x402guard.x402.signer import address_in


def test_a_new_key_is_in_a_keystore_that_only_its_owner_can_read(tmp_path):
    done = typed("keys", "new", "wallet.json", cwd=tmp_path, X402GUARD_KEYSTORE_PASSWORD="correct horse")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "wallet.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["wallet.json"]
    key = Account.decrypt(json.loads(path.read_text()), "correct horse").hex()
    address = Account.from_key(key).address
    assert (
        done.stdout
        == f"{address} is in wallet.json; set X402GUARD_KEYSTORE=wallet.json and X402GUARD_KEYSTORE_PASSWORD\n"
    )
    assert typed("keys", "address", "wallet.json", cwd=tmp_path).stdout == f"{address}\n"
    shown = typed("keys", "address", cwd=tmp_path, X402GUARD_KEYSTORE="wallet.json")
    assert (shown.stdout, key in done.stdout + done.stderr) == (f"{address}\n", False)


def test_a_key_is_imported_from_a_pipe(tmp_path):
    done = forked(
        "keys", "import", "wallet.json", cwd=tmp_path, answer=f"{KEY}\n", X402GUARD_KEYSTORE_PASSWORD="correct horse"
    )
    assert done.returncode == 0, done.stderr
    assert LocalSigner.from_keystore(tmp_path / "wallet.json", password="correct horse").address == PAYER
    assert KEY.removeprefix("0x") not in done.stdout + done.stderr


def test_key_and_password_are_asked_for_at_a_terminal_and_not_shown(tmp_path):
    shown = at_terminal([KEY, "correct horse", "correct horse"], "keys", "import", "wallet.json", cwd=tmp_path)
    assert "private key: " in shown
    assert f"{PAYER} is in wallet.json" in shown
    assert "horse" not in shown
    assert KEY.removeprefix("0x") not in shown


@pytest.mark.parametrize(
    ("words", "answer", "says"),
    [
        (("new", "old.json"), "", "old.json already exists, and a key is never overwritten"),
        (("import", "old.json"), KEY, "old.json already exists"),
        (("new", "none/wallet.json"), "", "there is no folder none"),
        (("new", "wallet.json"), "", "it needs a password; run this at a terminal, or set X402GUARD_KEYSTORE_PASSWORD"),
        (("import", "wallet.json"), PAYER, "private key: these 20 bytes are an address, which is public"),
        (("import", "wallet.json"), "", "private key: it is empty"),
        (("address", "none.json"), "", "No such file"),
        (("address", "old.json"), "", "it is no keystore"),
        (("address",), "", "no key is set; name a keystore file"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, words, answer, says):
    (tmp_path / "old.json").write_text("{}")
    done = typed("keys", *words, cwd=tmp_path, answer=f"{answer}\n")
    assert done.returncode == 2
    assert says in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["old.json"]


LOST = "4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318"


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("keys", "address", "KEY"), {}),
        (("keys", "new", "KEY/x"), {}),
        (("keys", "address"), {"X402GUARD_KEYSTORE": "KEY"}),
        (("doctor",), {"X402GUARD_KEYSTORE": "KEY"}),
        (("doctor", "--json"), {"X402GUARD_LEDGER": "KEY"}),
        (("doctor",), {"X402GUARD_CONFIG": "KEY"}),
        (("doctor",), {"X402GUARD_BUDGET": "KEY"}),
        (("sessions", "--ledger", "KEY"), {}),
        (("init", "KEY/x"), {}),
        (("pay", "KEY", "--budget", "1.00"), {}),
        (("pay", "http://127.0.0.1:1/", "--budget", "KEY"), {}),
        (("proxy", "--session", "KEY"), {}),
        (("prices", "diff", "KEY"), {}),
        (("verify-report", "KEY", "--key", "KEY"), {}),
        (("keys", "new", "a", "KEY"), {}),
    ],
)
@pytest.mark.parametrize("key", ["0x" + LOST, LOST.upper()], ids=["0x", "bare"])
def test_a_key_in_the_wrong_place_is_not_shown_once_more(tmp_path, arguments, settings, key):
    done = typed(
        *(text.replace("KEY", key) for text in arguments),
        cwd=tmp_path,
        **{name: text.replace("KEY", key) for name, text in settings.items()},
    )
    assert done.returncode != 0
    said = (done.stdout + done.stderr).lower()
    assert LOST[:20] not in said, said


def test_the_hash_of_a_transaction_is_shown(tmp_path):
    assert without_keys(f"0x{LOST} is sent") == f"0x{LOST} is sent"


def test_a_library_that_gets_a_key_for_a_keystore_says_so_without_it():
    for read in (lambda: LocalSigner.from_keystore("0x" + LOST, password="x"), lambda: address_in(Path(LOST))):
        with pytest.raises(ConfigError, match="this is a private key, not the path of a file") as caught:
            read()
        assert LOST[:20] not in str(caught.value)


@pytest.mark.parametrize("setting", ["ledger", "keystore", "budget"])
def test_a_key_in_the_settings_file_is_not_shown_once_more(tmp_path, setting):
    (tmp_path / "x402guard.toml").write_text(f'{setting} = "0x{LOST}"\n')
    for command in (["doctor"], ["sessions"], ["keys", "address"]):
        done = typed(*command, cwd=tmp_path)
        assert LOST[:20] not in done.stdout + done.stderr


def test_a_library_that_gets_a_key_for_a_keystore_in_the_environment_says_so_without_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_KEYSTORE", "0x" + LOST)
    with pytest.raises(ConfigError, match="this is a private key, not the path of a file") as caught:
        Guard.from_env()
    assert LOST[:20] not in str(caught.value)
