"""A guard whose clock is days ahead of its ledger asks its owner, unless something shows that the clock is right."""

from datetime import UTC, datetime
from decimal import Decimal

import httpx
import pytest
from typer.testing import CliRunner

from tests.support.ledger import START_MS, Clock
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import ConfigError, Owner, PolicyDenied
from x402guard.cli import app
from x402guard.flow.surroundings import Surroundings
from x402guard.stores import open_store

DAY_S = 86_400


class Machine:
    """A machine with a clock that can be wrong and one that cannot; both in seconds since its boot."""

    def __init__(self, monkeypatch, tmp_path, boot="boot-1"):
        self.wall, self.steady, self.monkeypatch = Clock(), Clock(), monkeypatch
        self.url = f"sqlite:///{tmp_path}/l.db"
        self.reboots(boot)

    def reboots(self, boot):
        self.monkeypatch.setattr(Surroundings, "boot_id", lambda _: boot)

    def passes(self, seconds):
        self.wall.tick(seconds)
        self.steady.tick(seconds)

    def open(self, **more):
        return make_guard(open_store(self.url, clock_ms=self.wall, steady_ms=self.steady), **more)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def holds(guard):
    """A payment that is out: the seller answers with an error."""
    with client(guard.session("s", budget="$1.00", id="s"), Shop(paid=lambda *_: httpx.Response(500))) as http:
        http.get(URL)


def spends(guard):
    """Spending in a window of a day."""
    guard.budget("customer", "$1.00", per="day").session("s", budget="$1.00").charge("serp", "$0.40")


MATTERS = pytest.mark.parametrize("use", [holds, spends], ids=["a hold", "a window"])


def test_a_clock_that_is_set_right_is_believed_once_another_process_has_written(monkeypatch, tmp_path):
    behind, right = Machine(monkeypatch, tmp_path), Machine(monkeypatch, tmp_path)
    behind.wall.tick(-100)
    with behind.open() as guard, right.open() as other:
        behind.wall.tick(100)
        other.session("b", budget="$1.00").charge("serp", "$0.10")
        with client(guard.session("a", budget="$1.00"), Shop()) as http:
            assert http.get(URL).status_code == 200


@MATTERS
@pytest.mark.parametrize("how", ["jumped", "another machine"])
def test_a_clock_that_is_days_ahead_is_asked_about_and_nothing_is_written(machine, use, how):
    with machine.open() as guard:
        use(guard)
    if how == "jumped":
        machine.wall.tick(2 * DAY_S)  # while the steady clock stands
    else:
        machine.reboots("boot-2")
        machine.passes(2 * DAY_S)
    before = len(open_store(machine.url).entries("wallet"))
    with pytest.raises(
        ConfigError, match=r"clock: .* 48 hours ahead of the ledger's last entry.*ledger clock --accept"
    ):
        machine.open()
    assert len(open_store(machine.url).entries("wallet")) == before


@MATTERS
def test_days_that_have_passed_on_this_machine_are_no_question(machine, use):
    with machine.open() as guard:
        use(guard)
    for _ in range(3):
        machine.passes(7 * DAY_S)
        machine.open().close()


@MATTERS
def test_less_than_a_day_is_no_question(machine, use):
    with machine.open() as guard:
        use(guard)
    machine.wall.tick(DAY_S - 60)
    machine.open().close()


def test_a_ledger_for_which_the_time_makes_no_difference_is_not_asked_about(machine):
    with machine.open() as guard:
        guard.session("s", budget="$1.00").charge("serp", "$0.40")
        guard.budget("customer", "$1.00", per="day")
    machine.wall.tick(30 * DAY_S)
    machine.open().close()


@MATTERS
def test_a_chain_shows_that_the_clock_is_right(machine, use, monkeypatch):
    class Chain:
        networks = frozenset({"eip155:84532"})

        def __init__(self, head):
            self.head = head

        def head_unix(self, _network):
            return self.head

        def read(self, _hold):
            raise AssertionError

        funds = read

        def close(self):
            pass

    with machine.open() as guard:
        use(guard)
    machine.wall.tick(2 * DAY_S)
    for head in (None, START_MS // 1000):
        with pytest.raises(ConfigError, match="clock:"):
            machine.open(chains=Chain(head))
    machine.open(chains=Chain(machine.wall() // 1000 - 600)).close()


def run(*words):
    return CliRunner().invoke(app, ["ledger", "clock", *words])


@MATTERS
def test_the_owner_accepts_the_clock(machine, use, monkeypatch):
    with machine.open() as guard:
        use(guard)
    machine.wall.tick(2 * DAY_S)
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", machine.wall)
    said = run("--ledger", machine.url)
    assert "this machine: " in said.output
    with pytest.raises(ConfigError, match="clock:"):
        machine.open()
    assert "accepted" in run("--accept", "--ledger", machine.url).output
    machine.open().close()


def test_the_owners_commands_do_not_take_a_wrong_clock_in(machine, monkeypatch):
    with machine.open() as guard:
        holds(guard)
    machine.wall.tick(30 * DAY_S)
    machine.reboots("boot-2")
    monkeypatch.setattr(Surroundings, "boot_id", lambda _: "boot-2")
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", machine.wall)
    for words in (["budget", "set", "wallet", "$20"], ["trip", "wallet"], ["trip", "s"]):
        said = CliRunner().invoke(app, [*words, "--ledger", machine.url])
        assert "ledger clock --accept" in str(said.exception)
    with pytest.raises(ConfigError, match="clock:"):
        machine.open()


def test_a_ledger_without_a_guard_has_no_time_to_accept(tmp_path):
    open_store(f"sqlite:///{tmp_path}/l.db").close()
    assert "no guard has used this ledger yet" in str(
        run("--accept", "--ledger", f"sqlite:///{tmp_path}/l.db").exception
    )


def test_a_clock_that_was_taken_in_is_mended(machine, monkeypatch):
    """The ledger was used with a clock a year ahead; then the clock is set right, and the ledger is ahead of it."""
    with machine.open() as guard:
        spends(guard)
    machine.wall.tick(365 * DAY_S)
    machine.steady.tick(365 * DAY_S)
    with machine.open() as guard:
        spends(guard)
    machine.wall.tick(-365 * DAY_S)
    machine.reboots("boot-2")
    guard = machine.open()
    with pytest.raises(PolicyDenied, match="behind the ledger's last entry"):
        with client(guard.session("s", budget="$1.00"), Shop()) as http:
            http.get(URL)
    guard.close()
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", machine.wall)
    said = run("--ledger", machine.url)
    assert "the ledger is ahead of this clock" in said.output
    assert datetime.fromtimestamp(machine.wall() / 1000, UTC).strftime("this machine: %Y-%m-%d") in said.output
    assert run("--accept", "--ledger", machine.url).exit_code == 0
    with machine.open() as guard, client(guard.session("s", budget="$1.00"), Shop()) as http:
        assert http.get(URL).status_code == 200
        customer = guard.budget("customer")
        assert customer.spent >= Decimal("0.40")
        machine.passes(DAY_S)
        assert guard.budget("customer").spent == 0  # its window goes on by the right clock
    assert CliRunner().invoke(app, ["verify", "--ledger", machine.url]).exit_code == 0


def test_what_today_has_used_counts_after_a_clock_that_was_ahead_is_set_back(machine, monkeypatch):
    def spend(dollars):
        with machine.open() as guard:
            guard.budget("customer", "$1.00", per="day").session("s", budget="$1.00").charge("serp", dollars)

    spend("$0.05")
    machine.passes(DAY_S)
    spend("$0.40")
    machine.passes(60)
    for _ in range(2):  # it begins a window tomorrow, and the day after
        machine.passes(DAY_S)
        spend("$0.10")
    machine.wall.tick(-2 * DAY_S)
    machine.reboots("boot-2")
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", machine.wall)
    assert run("--accept", "--ledger", machine.url).exit_code == 0
    with machine.open() as guard:
        assert guard.budget("customer").spent == Decimal("0.60")
    assert CliRunner().invoke(app, ["verify", "--ledger", machine.url]).exit_code == 0


def test_a_clock_that_is_days_ahead_archives_nothing(machine, tmp_path, monkeypatch):
    with machine.open() as guard:
        spends(guard)
    machine.wall.tick(20 * DAY_S)
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", machine.wall)
    monkeypatch.setattr("x402guard.stores.transacts._steady_ms", machine.steady, raising=False)
    done = CliRunner().invoke(
        app, ["ledger", "archive", "--before", "10d", "--to", str(tmp_path), "--ledger", machine.url]
    )
    assert isinstance(done.exception, ConfigError), done.output
    assert "ledger clock --accept" in str(done.exception)


@pytest.mark.long
@MATTERS
@pytest.mark.parametrize("ahead_s", [3_000, 4_000, 25 * 3_600])
def test_a_server_whose_clock_is_ahead_of_this_machines_is_asked_about(url, use, ahead_s, monkeypatch):
    monkeypatch.setattr(Surroundings, "boot_id", lambda _: "boot-1")
    with make_guard(url) as guard:
        use(guard)
    monkeypatch.setattr(Surroundings, "boot_id", lambda _: "boot-2")  # a machine that has not opened it before
    store = open_store(url)
    monkeypatch.setattr(store, "here_ms", lambda: store.now_ms() - ahead_s * 1000)
    if ahead_s < 3_600:
        make_guard(store).close()
        store.close()
        return
    hours = f"{ahead_s / 3_600:.1f}"
    with pytest.raises(ConfigError, match=f"clock: the clock of the ledger's server is {hours} hours ahead of this"):
        make_guard(store)
    with Owner(url) as owner:
        owner._store.here_ms = store.here_ms
        owner.trip("wallet")  # the machine on which the owner is may have the wrong clock
        owner.reset("wallet")
    assert run("--accept", "--ledger", url).exit_code == 0
    make_guard(store).close()
    store.close()
