"""A settings file that merely lies in the working directory decides nothing, until its owner has trusted it as it is."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from tests.support.command_line import as_process, typed
from tests.support.settings import owners_file
from x402guard import ConfigError, Guard
from x402guard.guard.settings import load_settings
from x402guard.guard.settings_file import _say_untrusted, forget, read_settings_file, trust
from x402guard.stores.outbox import state_folder

HOSTILE = 'mode = "shadow"\nunsafe_no_chain = true\nbudget = "900.00"\n[policy]\nhosts = ["evil.example"]\n'


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _say_untrusted.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    "text", [HOSTILE, "this is no toml [", "\0\xff", "x" * 2_000_000], ids=["hostile", "no toml", "no text", "long"]
)
def test_a62_a_file_that_lies_there_is_not_read_and_that_is_said_once(here, text, caplog):
    (here / "x402guard.toml").write_text(text)
    for _ in range(3):
        assert (load_settings().mode, load_settings().budget, load_settings().unsafe_no_chain) == (
            "enforce",
            None,
            False,
        )
    with Guard.from_env() as guard:
        assert guard.policy.hosts is None
    [said] = [text for text in caplog.messages if "is not read" in text]
    assert "x402guard.toml is not read" in said
    assert "x402guard config trust" in said
    assert f"X402GUARD_CONFIG={here / 'x402guard.toml'}" in said


@pytest.mark.parametrize("what", ["folder", "pipe", "link to nothing", "unreadable"])
def test_a62_nor_is_what_is_no_file(here, what, monkeypatch):
    path = here / "x402guard.toml"
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to(here / "gone")
        case _:
            path.write_text(HOSTILE)
            monkeypatch.setattr("pathlib.Path.open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert load_settings().mode == "enforce"


def test_a62_it_is_read_as_it_was_trusted_and_a_change_is_asked_about(here):
    path = owners_file(here, 'budget = "9.00"')
    assert load_settings().budget == "9.00"
    path.write_text('budget = "9.01"')
    with pytest.raises(ConfigError, match=r"it is not the file that was trusted here.*x402guard config trust"):
        load_settings()
    trust(read_settings_file(path))
    assert load_settings().budget == "9.01"
    assert load_settings(path).budget == "9.01"


def test_a62_a_copy_in_another_folder_is_another_file(here, monkeypatch):
    owners_file(here, 'budget = "9.00"')
    (here / "clone").mkdir()
    (here / "clone" / "x402guard.toml").write_text('budget = "9.00"')
    monkeypatch.chdir(here / "clone")
    assert load_settings().budget is None


def _others_can_write(kept, _monkeypatch):
    kept.chmod(0o666)


def _of_another_user(_kept, monkeypatch):
    monkeypatch.setattr("x402guard.guard.settings_file.os.getuid", lambda: 12345)


def _cannot_be_read(kept, _monkeypatch):
    kept.unlink()
    kept.mkdir()


def _broken(kept, _monkeypatch):
    kept.write_text('{"a')


def _no_list(kept, _monkeypatch):
    kept.write_text("5")


@pytest.mark.parametrize("breaks", [_others_can_write, _of_another_user, _cannot_be_read, _broken, _no_list])
def test_a62_where_a_file_lies_a_list_that_cannot_be_believed_is_an_error(here, monkeypatch, breaks):
    """Without it the owner's own rules would be left out, and more would pass."""
    path = owners_file(here, 'budget = "9.00"')
    breaks(state_folder() / "trusted.json", monkeypatch)
    with pytest.raises(ConfigError, match=r"trusted\.json .*; or set X402GUARD_CONFIG=none") as caught:
        load_settings()
    assert "whether it is trusted cannot be told" in str(caught.value)
    with pytest.raises(ConfigError, match=r"trusted\.json"):
        trust(read_settings_file(path))
    monkeypatch.setenv("X402GUARD_CONFIG", str(path))
    assert load_settings().budget == "9.00"
    monkeypatch.setenv("X402GUARD_CONFIG", "none")
    assert load_settings().budget is None
    monkeypatch.delenv("X402GUARD_CONFIG")
    path.unlink()
    assert load_settings().budget is None, "where none lies there is nothing to leave out"


def test_a62_files_that_are_trusted_at_once_are_all_trusted(here):
    paths = []
    for number in range(12):
        (here / str(number)).mkdir()
        paths.append(here / str(number) / "x402guard.toml")
        paths[-1].write_text(f'budget = "{number}.00"')
    script = "import sys; from pathlib import Path; from x402guard.guard.settings_file import *; trust(read_settings_file(Path(sys.argv[1])))"
    running = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for path in paths]
    assert [each.wait(60) for each in running] == [0] * 12
    assert len(json.loads((state_folder() / "trusted.json").read_text())) == 12


def test_a62_without_a_home_nothing_is_trusted(here, monkeypatch):
    path = owners_file(here, 'budget = "9.00"')
    monkeypatch.setattr("x402guard.guard.settings_file.state_folder", lambda: None)
    assert load_settings().budget is None
    with pytest.raises(ConfigError, match="no home folder"):
        trust(read_settings_file(path))


def test_a62_a_link_is_trusted_where_it_lies_and_not_for_what_it_leads_to(here, monkeypatch):
    for name, text in (("lab", HOSTILE), ("prod", 'budget = "9.00"'), ("repo", "")):
        (here / name).mkdir()
        if text:
            owners_file(here / name, text)
    (here / "repo" / "x402guard.toml").symlink_to(here / "lab" / "x402guard.toml")
    monkeypatch.chdir(here / "repo")
    assert load_settings().mode == "enforce"
    monkeypatch.chdir(here / "prod")
    (here / "prod" / "x402guard.toml").unlink()
    (here / "prod" / "x402guard.toml").symlink_to(here / "lab" / "x402guard.toml")
    with pytest.raises(ConfigError, match="it is not the file that was trusted here"):
        load_settings()


def test_a62_a_trusted_file_that_is_gone_is_an_error_until_it_is_forgotten(here):
    path = owners_file(here, 'budget = "9.00"')
    path.unlink()
    with pytest.raises(ConfigError, match="or is gone"):
        load_settings()
    assert typed("config", "trust", "--forget", cwd=here).returncode == 0
    assert load_settings().budget is None
    owners_file(here, 'budget = "9.00"')
    forget(path)
    assert load_settings().budget is None


def test_a62_the_name_of_a_folder_trusts_no_second_one(here, monkeypatch):
    evil = here / "evil"
    evil.mkdir()
    (evil / "x402guard.toml").write_text(HOSTILE)
    digest = hashlib.sha256(HOSTILE.encode()).hexdigest()
    odd = here / f"docs\n{digest}  {str(evil).replace('/', '')}"
    odd.mkdir()
    owners_file(odd, 'budget = "9.00"')
    monkeypatch.chdir(evil)
    assert load_settings().mode == "enforce"


COMMANDS = [("report", "x"), ("doctor",), ("journal", "show", "x"), ("sessions",), ("config", "show"),
            ("pay", "http://127.0.0.1:9/", "--budget", "1.00")]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a62_no_command_reads_it_and_each_says_so(tmp_path, words):
    _say_untrusted.cache_clear()
    (tmp_path / "x402guard.toml").write_text(HOSTILE + 'ledger = "sqlite:///evil.db"\n')
    done = as_process(*words, cwd=tmp_path, trusts=False)
    said = done.stdout + done.stderr
    assert said.count("is not read, because its owner has not trusted it") == 1, said
    assert "evil" not in said
    assert "shadow" not in said
    assert not (tmp_path / "evil.db").exists()


def test_a62_init_trusts_what_it_writes_and_trust_shows_what_it_lets_pass(tmp_path):
    assert typed("init", cwd=tmp_path, trusts=False).returncode == 0
    assert "is not read" not in typed("doctor", cwd=tmp_path, trusts=False).stderr
    (tmp_path / "x402guard.toml").write_text(HOSTILE)
    done = typed("doctor", cwd=tmp_path, trusts=False)
    assert "it is not the file that was trusted here" in done.stdout + done.stderr
    done = typed("config", "trust", cwd=tmp_path, trusts=False)
    assert done.returncode == 0
    for said in (
        "4 settings",
        "loosens: mode = shadow",
        "loosens: unsafe_no_chain = True",
        "  policy.hosts = ['evil.example']",
    ):
        assert said in done.stdout
    done = typed("doctor", cwd=tmp_path, trusts=False)
    assert f"mode = shadow, by {tmp_path / 'x402guard.toml'}" in done.stdout
    (tmp_path / "x402guard.toml").write_text("mode = 5")
    done = typed("config", "trust", cwd=tmp_path, trusts=False)
    assert (done.returncode, "mode: 5 is not" in done.stderr) == (2, True)


def test_a62_each_setting_is_shown_with_where_it_comes_from(tmp_path):
    file = owners_file(
        tmp_path, 'session_budget = "2.00"\n[chains]\nbase = "https://rpc.example/k3y"\n[policy]\nmax_steps = 7\n'
    )
    done = typed("config", "show", cwd=tmp_path, X402GUARD_BUDGET="1.00", X402GUARD_POLICY__MAX_STEPS="9",
                 X402GUARD_PRIVATE_KEY="0x" + "11" * 32)  # fmt: skip
    lines = done.stdout.splitlines()
    assert "budget = 1.00  # X402GUARD_BUDGET" in lines
    assert f"session_budget = 2.00  # {file}" in lines
    assert f"chains = set  # {file}  (loosens)" in lines
    assert "policy.max_steps = 9  # X402GUARD_POLICY__MAX_STEPS" in lines
    assert "policy.max_steps = 7" not in done.stdout, "the environment's policy replaces the file's"
    assert 'mode = "enforce"  # default' in lines
    assert "private_key = set  # X402GUARD_PRIVATE_KEY" in lines
    assert "k3y" not in done.stdout
    assert "1111" not in done.stdout


def test_a62_nothing_is_imported_from_the_working_directory(tmp_path):
    """What the command loads after its own package: a driver, a table's reader, a page's server."""
    for name in ("psycopg", "pydantic_settings", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    for words in (("journal", "show", "x", "--ledger", "postgresql://o@127.0.0.1:1/x"), ("doctor",)):
        as_process(*words, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
