"""Where a key may come from, what is said of what is none, and that no message and no traceback shows it."""

import json
import os
import traceback

import pytest
from eth_account import Account

from tests.support.merchant import KEY, PAYER
from tests.support.settings import owners_file
from x402guard import ConfigError, Guard, LocalSigner
from x402guard.guard.settings import load_settings
from x402guard.kernel.evm import ORDER
from x402guard.x402.signer import address_in

WORDS = "test " * 11 + "junk"
KEY_BYTES = bytes.fromhex(KEY.removeprefix("0x"))
FAST = {"kdf": "pbkdf2", "iterations": 2}  # a keystore's own way takes two seconds


@pytest.fixture(scope="module")
def keystore(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "wallet.json"
    path.write_text(json.dumps(Account.encrypt(KEY, "correct horse", **FAST)))
    return path


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "it is None: the variable or secret that it comes from is not set"),
        ("", "it is empty"),
        ("  ", "it is empty"),
        (PAYER, "these 20 bytes are an address, which is public"),
        (WORDS, "these are 12 words, a recovery phrase; your wallet derives the key from it"),
        (WORDS + " " + WORDS, "these are 24 words, a recovery phrase"),
        ("ab" * 64, "these 64 bytes are a seed, from which a wallet derives keys"),
        ("ab" * 16, "these 16 bytes are a seed"),
        ("02" + "ab" * 32, "these 33 bytes are a public key"),
        ("04" + "ab" * 64, "these 65 bytes are a public key"),
        ("ab" * 31, "these are 31 bytes; a private key has 32 bytes, as hex with or without 0x"),
        (b"short", "these are 5 bytes"),
        (5, "it is of type int"),
        ("wallet.json", "this is a path; a keystore is read with LocalSigner.from_keystore"),
        ("/etc/key", "this is a path"),
        ('{"version": 3}', "this is JSON; write a keystore to a file"),
        ("hello", "this is a text of 5 characters that is not hex"),
        ("0x" + "zz" * 32, "this is a text of 66 characters that is not hex"),
        ("00" * 32, "these 32 bytes are no key of secp256k1: they are zero, or too large"),
        (f"{ORDER:064x}", "they are zero, or too large"),
    ],
)
def test_what_is_no_key_is_told_what_it_is(given, says):
    with pytest.raises(ConfigError) as caught:
        LocalSigner.from_key(given)
    assert str(caught.value).startswith("private key: ")
    assert says in str(caught.value)
    if isinstance(given, str) and len(given.strip()) > 10:
        told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
        ours = told[told.index("signer.py") :]
        assert given not in ours


@pytest.mark.parametrize(
    "given", [KEY, KEY.removeprefix("0x"), KEY.upper().replace("0X", "0x"), f" {KEY}\n", KEY_BYTES]
)
def test_a_key_is_read_however_it_is_written(given):
    assert LocalSigner.from_key(given).address == PAYER


def test_a_keystore_is_read_with_its_password(keystore):
    for path in (keystore, str(keystore)):
        assert LocalSigner.from_keystore(path, password="correct horse").address == PAYER


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "it cannot be read: not JSON"),
        ("[]", "it cannot be read: a JSON list instead of an object"),
        ('{"version": 3}', "it has no table crypto"),
        ('{"version": 1, "crypto": {}}', "its version is '1'; version 3 is read"),
        ('{"version": 3, "crypto": {}}', "it cannot be decrypted (KeyError)"),
        ('{"version": 3, "crypto": {"kdf": "rot13"}}', "it cannot be decrypted"),
        ("[" * 60_000, "it cannot be read: nested too deeply"),
    ],
)
def test_what_is_no_keystore_is_told(tmp_path, text, says):
    path = tmp_path / "wallet.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        LocalSigner.from_keystore(path, password="x")
    assert str(caught.value).startswith(f"keystore: {path}: ")
    assert says in str(caught.value)


def test_a_wrong_password_a_missing_file_and_none_are_told(keystore, tmp_path):
    with pytest.raises(ConfigError, match="the password is wrong, or the keystore is damaged"):
        LocalSigner.from_keystore(keystore, password="wrong horse")
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        LocalSigner.from_keystore(tmp_path / "none.json", password="x")
    with pytest.raises(ConfigError, match="the password is None"):
        LocalSigner.from_keystore(keystore, password=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 2**24},
        {"p": 2**10},
        {"r": 2**20},
        {"n": 2**20, "r": 64},
        {"n": -1},
        {"r": 0.5},
        {"n": "262144"},
        {"n": 2, "r": 2**13, "p": 8},
        {"n": 2, "r": 2**10, "p": 2},
    ],
)
def test_a_keystore_whose_password_would_take_minutes_or_all_memory_is_refused(tmp_path, changes):
    kdf = {"n": 2**18, "r": 8, "p": 1, "dklen": 32, "salt": "00" * 16} | changes
    crypto = {
        "kdf": "scrypt",
        "kdfparams": kdf,
        "ciphertext": "00" * 32,
        "mac": "00" * 32,
        "cipherparams": {"iv": "00"},
    }
    (tmp_path / "wallet.json").write_text(json.dumps({"version": 3, "crypto": crypto}))
    with pytest.raises(ConfigError, match="its kdfparams ask for over 1 GiB of memory, or for minutes"):
        LocalSigner.from_keystore(tmp_path / "wallet.json", password="x")


@pytest.mark.parametrize(
    "crypto",
    [
        {"kdf": "scrypt", "kdfparams": {"N": 2**24, "r": 8}},
        {"kdf": "scrypt", "KdfParams": {"n": 2**24, "r": 8}},
        {"kdf": "scrypt", "kdfparams": {"n": 2, "r": 1, "p": 2**24}},
        {"kdf": "pbkdf2", "kdfparams": {"c": 20_000_000, "dklen": 1_024}},
    ],
)
def test_a_keystore_is_bounded_however_its_parameters_are_spelled(tmp_path, crypto):
    (tmp_path / "wallet.json").write_text(json.dumps({"version": 3, "Crypto": crypto}))
    with pytest.raises(ConfigError, match="its kdfparams ask for"):
        LocalSigner.from_keystore(tmp_path / "wallet.json", password="x")
    (tmp_path / "wallet.json").write_text(json.dumps({"version": 3, "Crypto": crypto, "crypto": {}}))
    with pytest.raises(ConfigError, match="a name appears twice"):
        LocalSigner.from_keystore(tmp_path / "wallet.json", password="x")


def test_what_is_no_regular_file_is_no_keystore(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.json").write_bytes(b"{" * 70_000)
    for name, says in (("pipe", "no regular file"), (".", "no regular file"), ("large.json", "more than 65,536 bytes")):
        with pytest.raises(ConfigError, match=says):
            LocalSigner.from_keystore(tmp_path / name, password="x")
        with pytest.raises(ConfigError, match=says):
            address_in(tmp_path / name)
    with pytest.raises(ConfigError, match="it is no text, or no path"):
        LocalSigner.from_keystore("wallet\0.json", password="x")


def test_a_keystore_in_the_home_folder_is_found(keystore, monkeypatch):
    monkeypatch.setenv("HOME", str(keystore.parent))
    assert LocalSigner.from_keystore("~/wallet.json", password="correct horse").address == PAYER
    assert address_in("~/wallet.json") == PAYER


def changed(keystore, path, value):
    store = json.loads(keystore.read_text())
    part = store
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return json.dumps(store)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("address",), "ab" * 20, "it names the address 0xabab.*, but its key is that of 0x19E7"),
        (("crypto", "cipherparams", "iv"), "00" * 16, "but its key is that of"),
        (("crypto", "kdfparams", "c"), 10**30, "its kdfparams ask for"),
        (("crypto", "kdfparams", "c"), "1", "its kdfparams ask for"),
        (("crypto", "kdfparams", "dklen"), 10**30, "its kdfparams ask for"),
        (("crypto", "kdfparams", "n"), 2**24, "its kdfparams ask for"),
        (("crypto", "kdfparams", "prf"), "x", "it cannot be decrypted"),
    ],
)
def test_a_keystore_that_was_changed_is_told_and_shows_no_password(keystore, tmp_path, path, value, says):
    (tmp_path / "wallet.json").write_text(changed(keystore, path, value))
    with pytest.raises(ConfigError, match=says) as caught:
        LocalSigner.from_keystore(tmp_path / "wallet.json", password="correct horse")
    told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "correct horse" not in told[told.index("signer.py") :]


def test_no_traceback_of_a_keystore_shows_password_or_key(keystore):
    for password in ("wrong horse battery", None):
        with pytest.raises(ConfigError) as caught:
            LocalSigner.from_keystore(keystore, password=password)
        told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
        assert "horse battery" not in told[told.index("signer.py") :]


def test_an_account_of_eth_account_signs():
    with Guard(signer=Account.from_key(KEY), ledger="memory://") as guard:
        assert guard.shell.signer.address == PAYER
        assert isinstance(guard.shell.signer, LocalSigner)


def test_the_second_guard_of_a_process_pays_with_the_key_of_the_first(monkeypatch):
    """The key is taken out of the environment when it is read, so that no child process inherits it."""
    monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", KEY)
    with Guard.from_env() as first, Guard.from_env() as second:
        assert [guard.shell.signer.address for guard in (first, second)] == [PAYER, PAYER]
        assert first.shell.signer is not second.shell.signer
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", "0x" + "22" * 32)  # a new one is the one that counts
    with Guard.from_env() as third:
        assert third.shell.signer.address != PAYER


def test_a_process_that_never_had_a_key_has_none():
    with Guard.from_env() as guard:
        assert guard.shell.signer is None


def test_a_keystore_is_set_in_the_environment_or_the_file(monkeypatch, keystore, tmp_path):
    monkeypatch.setenv("X402GUARD_KEYSTORE_PASSWORD", "correct horse")
    owners_file(tmp_path, f"keystore = '{keystore}'\n")
    with Guard.from_env() as guard, Guard.from_env() as second:
        assert [each.shell.signer.address for each in (guard, second)] == [PAYER, PAYER]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("KEYSTORE",), "has a password; set X402GUARD_KEYSTORE_PASSWORD"),
        (("KEYSTORE", "PRIVATE_KEY"), "keystore: X402GUARD_PRIVATE_KEY is set too, or was when this process began"),
    ],
)
def test_a_keystore_alone_or_beside_a_key_is_told(monkeypatch, keystore, names, says):
    given = {"KEYSTORE": str(keystore), "PRIVATE_KEY": KEY}
    for name in names:
        monkeypatch.setenv(f"X402GUARD_{name}", given[name])
    for _ in range(2):  # a second try is no way around it
        with pytest.raises(ConfigError, match=says):
            Guard.from_env()


def test_a_password_does_not_stand_in_a_file(tmp_path):
    owners_file(tmp_path, "keystore_password = 'x'\n")
    with pytest.raises(
        ConfigError, match="a password does not belong in a settings file; set X402GUARD_KEYSTORE_PASSWORD"
    ):
        load_settings()
