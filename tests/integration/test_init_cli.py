"""`x402guard init`: a settings file that changes nothing, whose every line can be taken as it stands."""

import dataclasses
import subprocess
import sys

import pytest

from tests.support.command_line import typed
from x402guard.guard.defaults import each_default, settings_text
from x402guard.guard.settings import Settings, load_settings

SET = [each for each in each_default() if each.value is not None]


def test_a_new_settings_file_changes_nothing_and_says_what_is_on(tmp_path):
    done = typed("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "payments on test networks alone, $1.00 each at most" in done.stdout
    path = tmp_path / "x402guard.toml"
    assert path.read_text() == settings_text()
    made = load_settings(path)
    assert (made.policy.build(), made.metering.build()) == (Settings().policy.build(), Settings().metering.build())
    assert made.model_dump(exclude={"policy", "metering"}) == Settings().model_dump(exclude={"policy", "metering"})
    assert typed("policy", "check", "x402guard.toml", cwd=tmp_path).returncode == 0


def test_a_settings_file_that_a_full_disk_cuts_off_is_not_left(tmp_path):
    command = ["sh", "-c", f"ulimit -f 8; exec {sys.executable} -m x402guard init"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert "x402guard.toml cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def shown(table):
    """What a table sets, each argument as text; a list in a file is the tuple of a default."""
    built = table.build()
    return {
        field.name: tuple(value) if isinstance(value := getattr(built, field.name), list) else value
        for field in dataclasses.fields(built)
        if field.init
    }


@pytest.mark.parametrize("each", SET, ids=lambda each: f"{each.table}.{each.name}".lstrip("."))
def test_each_line_can_be_taken_as_it_stands(tmp_path, each):
    """A default that is written out is the default."""
    line = f"# {each.name} = {each.value}\n"
    before, header, rest = settings_text().partition(f"\n[{each.table}]\n") if each.table else ("", "", settings_text())
    assert line in rest
    path = tmp_path / "x402guard.toml"
    path.write_text(before + header + rest.replace(line, line.removeprefix("# "), 1))
    made = load_settings(path)
    assert shown(made.policy) == shown(Settings().policy)
    assert shown(made.metering) == shown(Settings().metering)
    assert made.model_dump(exclude={"policy", "metering"}) == Settings().model_dump(exclude={"policy", "metering"})


def test_every_setting_has_its_meaning():
    assert [each for each in each_default() if not each.meaning] == []
    assert len({(each.table, each.name) for each in each_default()}) == len(list(each_default())) > 80


@pytest.mark.parametrize(("words", "says"), [((), "already exists"), (("none/x.toml",), "cannot be written")])
def test_a_file_is_never_overwritten(tmp_path, words, says):
    (tmp_path / "x402guard.toml").write_text("# mine\n")
    done = typed("init", *words, cwd=tmp_path)
    assert (done.returncode, says in done.stderr) == (2, True)
    assert (tmp_path / "x402guard.toml").read_text() == "# mine\n"


def test_it_shows_no_python_word_for_what_is_not_set():
    assert "None" not in settings_text()
