"""Which settings file is read: the owner's, never one that an agent or another user could have written."""

import os
import pwd

import pytest
from typer.testing import CliRunner

from tests.support.settings import owners_file
from x402guard import ConfigError
from x402guard.cli import app
from x402guard.guard.settings import load_settings

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = owners_file(tmp_path, 'budget = "$9.00"\n[policy]\nhosts = ["courts.example"]\nmax_steps = 7\n')
    path.chmod(0o600)
    return path


def test_the_users_own_file_is_read(file):
    assert load_settings().budget == "$9.00"


@NEEDS_ROOT
def test_a_file_of_root_is_read_and_one_of_another_user_is_not(file):
    os.chown(file, 54321, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 54321\).*X402GUARD_CONFIG=none"):
        load_settings()


@pytest.mark.parametrize("mode", [0o602, 0o666, 0o646])
def test_a_file_that_everybody_can_write_is_not_read(file, mode):
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"other users can write it.*chmod go-w x402guard\.toml"):
        load_settings()


def test_a_file_that_its_group_can_write_is_read_only_if_the_group_is_its_owners_alone(file, monkeypatch):
    file.chmod(0o664)
    state, me = file.stat(), pwd.getpwuid(os.getuid()).pw_name

    def group(name, members):
        class Group:
            gr_name, gr_mem = name, members

        monkeypatch.setattr("x402guard.guard.settings_file.grp.getgrgid", lambda gid: {state.st_gid: Group}[gid])

    for name, members in ((me, []), (me, [me])):
        group(name, members)
        assert load_settings().budget == "$9.00"
    for name, members in (("staff", []), (me, [me, "agent"]), ("staff", [me])):
        group(name, members)
        with pytest.raises(ConfigError, match="other users can write it"):
            load_settings()


def test_a_file_of_a_group_without_a_name_is_not_read(file, monkeypatch):
    file.chmod(0o664)

    def unknown(gid):
        raise KeyError(gid)

    monkeypatch.setattr("x402guard.guard.settings_file.grp.getgrgid", unknown)
    with pytest.raises(ConfigError, match="other users can write it"):
        load_settings()


def test_none_reads_no_file(file, monkeypatch):
    file.chmod(0o666)
    monkeypatch.setenv("X402GUARD_CONFIG", "none")
    settings = load_settings()
    assert (settings.budget, settings.policy.build().max_steps) == (None, None)
    assert load_settings(file).budget == "$9.00"  # an argument goes before the environment


def test_a_named_file_is_read_from_anywhere(file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setenv("X402GUARD_CONFIG", str(file))
    assert load_settings().budget == "$9.00"
    monkeypatch.setenv("X402GUARD_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"there is no file .*gone\.toml"):
        load_settings()


@pytest.mark.parametrize("variable", [("X402GUARD_POLICY__MAX_STEPS", "9"), ("X402GUARD_POLICY", '{"max_steps": 9}')])
def test_the_environments_policy_replaces_the_files(file, monkeypatch, variable):
    monkeypatch.setenv(*variable)
    settings = load_settings()
    policy = settings.policy.build()
    assert (policy.max_steps, policy.hosts, settings.budget) == (9, None, "$9.00")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "nothing from the environment; budget, policy from {file}"),
        ({"X402GUARD_CONFIG": "none"}, "nothing from the environment; no file"),
        (
            {"X402GUARD_POLICY__MAX_STEPS": "9", "X402GUARD_LEDGER": "memory://"},
            (
                "X402GUARD_LEDGER, X402GUARD_POLICY__MAX_STEPS from the environment; budget, policy from {file}; its table "
                "[policy] is not used, because the environment sets the policy"
            ),
        ),
    ],
)
def test_doctor_says_what_was_read_from_where(file, monkeypatch, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(app, ["doctor"]).output
    assert f"a guard can be created from them: {says.format(file=file)}\n" in told


def test_doctor_names_a_file_that_is_not_read(file):
    file.chmod(0o666)
    ended = CliRunner().invoke(app, ["doctor"])
    assert (ended.exit_code, "other users can write it" in ended.output) == (1, True)
