"""What a shell, a Makefile, an editor or a mount leaves in a setting is refused by name, and never another budget or no rule."""

import pytest

from tests.support.merchant import make_guard
from tests.support.settings import owners_file
from x402guard import ConfigError
from x402guard.guard.settings import load_settings
from x402guard.guard.settings_file import read_settings_file, trust
from x402guard.stores import as_ledger_url, check_ledger_url


@pytest.mark.parametrize(
    "ledger",
    [
        "spend.db\r", "./spend.db\r", "./spend.db ", " ./spend.db", "sqlite:///spend.db\r", "sqlite:///spend.db ",
        'sqlite:///"spend.db"', "'./spend.db'", "./spend.db;", "./spend.db # ours", "./spend.db\u200b", "./$LEDGER",
        "./$TENANT.db", "./spend-$TENANT.db", "./${TENANT}-spend.db", "./${TENANT:-a}.db", "./$(hostname).db", "sqlite:///${LEDGER}", "sqlite:////var/$NAME/a.db", "./sp\nend.db", "sqlite:spend.db", "file:./a.db", "postgresql:u@h/d.db",
    ],
)  # fmt: skip
def test_a_ledger_that_would_be_another_one_is_refused(tmp_path, monkeypatch, ledger):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^ledger: "):
        make_guard(ledger)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "ledger",
    ["./a b.db", "sqlite:///~/spend.db", "./ünï.db", "./a$5.db", "./cash$flow.db", "./می\u200cخواهم.db", "spend.db"],
)
def test_a_name_that_can_be_meant_is_one(ledger):
    check_ledger_url(as_ledger_url(ledger))


@pytest.mark.parametrize(
    "name",
    [
        "stop ",
        " stop",
        "stop\r",
        "stop;",
        "stop # the kill file",
        "stop\u200b",
        "./$KILL",
        "$AGENT.stop",
        "stop-${AGENT}",
        "${AGENT:-a}",
        "$(hostname)",
        "~nobody-here/stop",
        '"stop"',
        "'stop'",
        "$HOME/stop",
        "file:///run/stop",
        "nowhere/stop",
        "~/none/stop",
    ],
)
def test_a_kill_file_that_nothing_can_make_is_refused(tmp_path, monkeypatch, name):
    """Its owner makes the file that they meant, and the agent pays on."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^kill_file: "):
        make_guard(kill_file=name)


def test_a_kill_file_in_the_home_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with make_guard(kill_file="~/stop") as guard, guard.session("s", budget="$1.00") as session:
        session.charge("search", "$0.01")
        (tmp_path / "stop").touch()
        with pytest.raises(Exception, match="kill"):
            session.charge("search", "$0.02")


@pytest.mark.parametrize("amount", ["0", "$0", "$0\\r", "0.00", "$0.00", "00"])
@pytest.mark.parametrize("window", ["minute", "hour", "day"])
def test_a_limit_in_dollars_that_a_shell_has_made_nothing_is_refused(tmp_path, monkeypatch, window, amount):
    """``"$10"`` in a here document is ``"0"``: it would be no limit at all."""
    monkeypatch.chdir(tmp_path)
    owners_file(tmp_path, f'[policy.velocity]\ndollars_per_{window} = "{amount}"\n')
    (tmp_path / "x402guard.toml").chmod(0o600)
    with pytest.raises(ConfigError, match=rf"policy\.velocity\.dollars_per_{window}: .* lets nothing pass"):
        load_settings().policy.build()


def test_a_wallet_budget_of_nothing_by_the_month_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_BUDGET", '{"amount": "0.00", "per": "month"}')
    with pytest.raises(ConfigError, match=r"^budget: '0\.00' is a budget of nothing; write it without the \$"):
        load_settings().guard_arguments(pays=False)


@pytest.mark.parametrize("name", ["BUDGET", "SESSION_BUDGET"])
@pytest.mark.parametrize("amount", ["0.00", "$0", "0", "0.00\r", "0\t"])
def test_a_budget_of_nothing_in_the_settings_is_refused(tmp_path, monkeypatch, name, amount):
    """An unquoted ``$20.00`` is ``0.00``, and would stand in the ledger as the wallet's limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"X402GUARD_{name}", amount)
    with pytest.raises(ConfigError, match=rf"^{name.lower()}: .* is a budget of nothing; write it without the \$"):
        load_settings().guard_arguments(pays=False)


def test_a_link_whose_file_is_away_is_not_no_file(tmp_path, monkeypatch):
    """A volume that is not mounted takes all rules along."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    away = owners_file(tmp_path / "away", "budget = '9.00'")
    (tmp_path / "x402guard.toml").symlink_to(away)
    trust(read_settings_file(tmp_path / "x402guard.toml"))
    assert load_settings().budget == "9.00"
    away.unlink()
    with pytest.raises(ConfigError, match="it is not the file that was trusted here"):
        load_settings()


@pytest.mark.parametrize(
    "ledger", ["host=db password=s3cret", "postgresql:u:s3cret@h", "mysql://u:s3cret@h/db", "u:s3cret@h/x.db"]
)
def test_a_password_in_what_is_no_ledger_is_not_shown(ledger):
    with pytest.raises(ConfigError, match=r"^ledger: ") as caught:
        make_guard(ledger)
    assert "s3cret" not in str(caught.value)
