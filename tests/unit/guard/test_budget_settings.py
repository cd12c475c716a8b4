"""What is wrong about budgets, soft limits, windows and webhooks is said at once, by name, with what is allowed."""

import pickle
from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError, Guard, Policy, Webhook
from x402guard.guard.settings import load_settings

SECRET = "sixteen characters or more"
URL = "https://example.com/hook"


@pytest.fixture(scope="module")
def guard():
    with make_guard() as guard:
        yield guard


def counted(guard):
    return len(guard.shell.store.nodes())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"session_budget": 5.0}, "session_budget: money is never a float"),
        ({"session_budget": "lots"}, "session_budget: 'lots' is not a dollar amount"),
        ({"session_budget": "-1"}, "session_budget: '-1' is not a dollar amount"),
        ({"session_budget": True}, "session_budget: money is never a bool"),
        ({"budget": "1e3"}, "budget: '1e3' is not a dollar amount"),
        ({"budget": "2000000000"}, "budget: .* more than a billion dollars"),
        ({"on_notice": "print"}, "on_notice: 'print' is not a function"),
        ({"on_notice": 5}, "on_notice: 5 is not a function"),
        ({"webhook": URL}, r"webhook: a str is not a Webhook; write Webhook\(url=…, secret=…\)"),
        ({"webhook": {"url": URL}}, "webhook: a dict is not a Webhook"),
        ({"max_clock_jump_s": 0}, "max_clock_jump_s: 0 is not a positive whole number"),
        ({"max_clock_jump_s": -5}, "max_clock_jump_s: -5"),
        ({"max_clock_jump_s": 1.5}, "max_clock_jump_s: 1.5"),
        ({"max_clock_jump_s": "300"}, "max_clock_jump_s: '300'"),
        ({"max_clock_jump_s": None}, "max_clock_jump_s: None"),
        ({"max_clock_jump_s": True}, "max_clock_jump_s: True"),
    ],
)
def test_of_a_guard(arguments, says):
    with pytest.raises(ConfigError, match=says):
        Guard(ledger="memory://", **arguments)


SOFT = [
    0, 1, 2, -0.5, 0.0, 1.0, 1.5, True, False, float("nan"), float("inf"), "90%", "", "nearly", b"0.9", object(), {"a": 1},
    [0.5, 1.0], [0.5, "x"], [None], [[0.5]], [0.5, True], [0.01 * n for n in range(1, 22)], iter([0.5]), "0.0000001",
    Decimal("NaN"), Decimal("-0.1"), "1e-9999999", "0." + "9" * 40,
]  # fmt: skip


@pytest.mark.parametrize("soft", SOFT, ids=lambda value: ascii(value).partition(" at 0x")[0][:30])
def test_of_soft_limits(guard, soft):
    with pytest.raises(ConfigError, match=r"^policy\.soft_limits: ") as caught:
        Policy(soft_limits=soft)
    assert "0.9" in str(caught.value), "it says what is allowed"
    assert len(str(caught.value)) < 300
    if hasattr(soft, "__next__"):
        return
    before = counted(guard)
    with pytest.raises(ConfigError, match=r"^soft_limit: "):
        guard.session("s", budget="$1", soft_limit=soft)
    assert counted(guard) == before


def test_none_is_no_choice_of_a_policy():
    with pytest.raises(ConfigError, match=r"^policy\.soft_limits: None"):
        Policy(soft_limits=None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"reserve": 0.1}, "reserve: money is never a float.*; or a part of the budget, such as '10%'"),
        ({"reserve": True}, "reserve: money is never a bool"),
        ({"reserve": "100%"}, "reserve: '100%' is not a dollar amount.*'10%'"),
        ({"reserve": "-5%"}, "reserve: '-5%'"),
        ({"reserve": "12.5%"}, "reserve: '12.5%'"),
        ({"reserve": "%"}, "reserve: '%'"),
        ({"reserve": "ten"}, "reserve: 'ten'"),
        ({"reserve": "٥%"}, "reserve: "),
        ({"reserve": "-1"}, "reserve: '-1'"),
        ({"reserve": "$1.00"}, r"reserve: \$1.00 of a budget of \$1.00 would leave nothing for payments"),
        ({"reserve": "$5"}, r"reserve: \$5.00 of a budget of \$1.00"),
        ({"reserve": "1%", "budget": "$0"}, r"reserve: \$0.00 of a budget of \$0.00"),
        ({"reserve": [1]}, "reserve: money is never a list"),
        ({"budget": 1.0}, "budget: money is never a float"),
        ({"budget": "1 000"}, "budget: '1 000' is not a dollar amount"),
        ({"budget": None}, 'to resume, and a new one needs budget="\\$5.00"'),
        (
            {"budget": None, "reserve": "10%"},
            "budget: there is no session .* to resume",
        ),
        ({"tokens": 0}, "tokens: 0 is not a positive whole number"),
    ],
)
def test_of_a_session(guard, arguments, says):
    before = counted(guard)
    for parent in (guard, guard.budget("c", "$9")):
        with pytest.raises(ConfigError, match=says):
            parent.session("s", **{"budget": "$1.00", **arguments})
    assert counted(guard) <= before + 1


def test_of_a_resumed_session(guard):
    guard.session("s", budget="$1.00", reserve="10%", id="run")
    for reserve in ("$1.00", "$7", "$0.01"):
        with pytest.raises(ConfigError, match="reserve: "):
            guard.session("s", id="run", reserve=reserve)
    assert guard.session("s", id="run").remaining == Decimal("0.90")
    assert guard.session("s", id="run", reserve="1%").remaining == Decimal("0.90")  # of the budget in the ledger
    assert guard.session("s", id="run", reserve="20%").remaining == Decimal("0.80")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "name: '' is not a name"),
        (("a/b", "$1"), "name: 'a/b' cannot be a budget's name: a slash"),
        (("wallet", "$1"), "name: 'wallet'"),
        ((5, "$1"), "name: 5"),
        ((None, "$1"), "name: None"),
        (("a\nb", "$1"), "name: "),
        (("\ud800", "$1"), "name: "),
        (("x" * 201, "$1"), "name: "),
        (("new",), "limit: the budget 'new' is new; give it a limit: guard.budget\\('new', "),
        (("new", 2.0), "limit: money is never a float"),
        (("new", "two"), "limit: 'two' is not a dollar amount"),
        (("new", "-2"), "limit: '-2' is not a dollar amount"),
    ],
)
def test_of_a_named_budget(guard, arguments, says):
    before = counted(guard)
    with pytest.raises(ConfigError, match=says):
        guard.budget(*arguments)
    assert counted(guard) == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"per": "hour"}, "per: 'hour' is not one of 'day', 'week' and 'month'"),
        ({"per": "Day"}, "per: 'Day' is not one"),
        ({"per": ""}, "per: '' is not one"),
        ({"per": 1}, "per: 1 is not one"),
        (
            {"per": "day", "tz": "Berlin"},
            "tz: 'Berlin' is not a time zone that each machine knows; write a name such as 'UTC' or 'Europe/Berlin'",
        ),
        ({"per": "day", "tz": ""}, "tz: '' is not a time zone"),
        ({"per": "day", "tz": "../../etc/passwd"}, "tz: '../../etc/passwd' is not a time zone"),
        ({"per": "day", "tz": 1}, "tz: 1 is not the name"),
        ({"tz": "Mars/Olympus"}, "tz: 'Mars/Olympus'"),
    ],
)
def test_of_a_window(guard, more, says):
    before = counted(guard)
    with pytest.raises(ConfigError, match=says):
        guard.budget("new", "$1.00", **more)
    assert counted(guard) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "http://example.com/x"}, "webhook.url: example.com is another machine, and plain http"),
        ({"url": "http://10.0.0.1/x"}, "webhook.url: 10.0.0.1 is another machine"),
        ({"url": "http://localhost.evil.example/x"}, "webhook.url: localhost.evil.example is another"),
        ({"url": "http://127.0.0.1@example.com/x"}, "webhook.url: example.com is another"),
        ({"url": "ftp://example.com"}, "webhook.url: not a URL; write https://…"),
        ({"url": "example.com/x"}, "webhook.url: "),
        ({"url": "https://"}, "webhook.url: "),
        ({"url": ""}, "webhook.url: "),
        ({"url": 5}, "webhook.url: "),
        ({"url": None}, "webhook.url: "),
        ({"url": "https://[::1/x"}, "webhook.url: "),
        ({"url": "https://example.com:99999/x"}, "webhook.url: "),
        ({"url": "https://example.com:port/x"}, "webhook.url: "),
        ({"url": "https://exa mple.com/x"}, "webhook.url: "),
        ({"url": "https://example.com/\ud800"}, "webhook.url: "),
        ({"url": "https://" + "a" * 64 + ".com/"}, "webhook.url: "),
        ({"secret": "fifteen charact"}, "webhook.secret: a secret of at least 16 characters"),
        ({"secret": ""}, "webhook.secret: "),
        ({"secret": None}, "webhook.secret: "),
        ({"secret": b"sixteen characters or more"}, "webhook.secret: "),
        ({"secret": "\ud800" * 16}, "webhook.secret: "),
    ],
)
def test_of_a_webhook(arguments, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Webhook(**{"url": URL, "secret": SECRET, **arguments})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://localhost:1/x", "http://127.0.0.1/", "http://[::1]:8080/x", "https://exämple.com/x"]
)
def test_a_webhook_here_may_be_plain_and_elsewhere_any_https(url):
    webhook = Webhook(url=url, secret=SECRET)
    assert SECRET not in f"{webhook!r} {webhook}"
    with pytest.raises(TypeError):
        pickle.dumps(webhook)


@pytest.mark.parametrize("amount", [0.2, None, True, [1]])
def test_of_would_exceed_by_type(guard, amount):
    with pytest.raises(TypeError, match="amount: "):
        guard.session("s", budget="$1").would_exceed(amount)


@pytest.mark.parametrize("amount", ["", "lots", "-1", "1e3", "0.0000000001", "99999999999"])
def test_of_would_exceed_by_value(guard, amount):
    with pytest.raises(ValueError, match="amount: "):
        guard.session("s", budget="$1").would_exceed(amount)


@pytest.mark.parametrize("reason", ["", "  ", None, 5])
def test_of_a_reason_to_trip(guard, reason):
    customer = guard.budget("tripped", "$1")
    with pytest.raises(ConfigError, match=r"reason: .* says nothing; write why"):
        customer.trip(reason)
    customer.session("s", budget="$1").charge("serp", "$0.10")


@pytest.mark.parametrize("budget", [None, 1.0, "lots", "-1", True])
def test_of_children_and_scopes(guard, budget):
    with guard.session("s", budget="$1") as session:
        with pytest.raises(ConfigError, match="budget: "):
            session.child("k", budget=budget)
        with pytest.raises(ConfigError, match="budget: "), session.scope(budget):
            pass


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[policy]\nsoft_limits = 1.5\n", r"policy\.soft_limits"),
        ("[policy]\nsoft_limits = [0.5, 2]\n", r"policy\.soft_limits"),
        ('[policy]\nsoft_limits = "90%"\n', r"policy\.soft_limits"),
        ("session_budget = 5.0\n", "session_budget"),
        ('session_budget = "lots"\n', "session_budget"),
        ("max_clock_jump_s = 0\n", "max_clock_jump_s"),
        ('max_clock_jump_s = "soon"\n', "max_clock_jump_s"),
        ('webhook_url = "http://example.com/x"\n', r"webhook\.url"),
        ('webhook_url = "https://example.com/x"\n', r"webhook\.secret"),
        ('webhook_secret = "it stands in a file, and that is wrong"\n', "webhook_secret"),
        ('webhok_url = "https://example.com/x"\n', "webhok_url"),
    ],
)
def test_of_a_settings_file(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x402guard.toml"
    path.write_text('ledger = "memory://"\n' + text)
    with pytest.raises(ConfigError, match=says):
        Guard(**load_settings(path).guard_arguments())


def test_a_settings_file_says_it_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_WEBHOOK_SECRET", SECRET)
    path = tmp_path / "x402guard.toml"
    path.write_text(
        'ledger = "memory://"\nsession_budget = "$0.25"\nmax_clock_jump_s = 60\nwebhook_url = "https://example.com/x"\n'
        "[policy]\nsoft_limits = 0.25\n"
    )
    with Guard(**load_settings(path).guard_arguments()) as guard:
        assert guard.policy.soft_parts == (250_000,)
        assert guard.context.max_clock_jump_ms == 60_000
        assert guard.session("s").limit == Decimal("0.25")
