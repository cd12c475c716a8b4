"""The counters of the guards, counted again from the journals: what says less than they do is told."""

import json
from contextlib import closing

import httpx
import pytest

from tests.support import postgres
from tests.support.buyers import KINDS
from tests.support.command_line import typed
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, believed, make_guard
from x402guard import GuardedTransport, Owner, PaymentRefused, Policy, Velocity
from x402guard.stores import open_store
from x402guard.stores.archiving import archive

RULES = """
ledger = "spend.db"
[policy]
max_steps = 1000
[policy.max_calls]
serp = 100
"*" = 1000
[policy.velocity]
dollars_per_day = "$100"
calls_per_hour = 1000
"""
COUNTING = Policy(
    breaker=None,
    max_steps=1000,
    max_calls={"serp": 100, "*": 1000},
    velocity=Velocity(dollars_per_day="$100", calls_per_hour=1000),
)
ROWS = {
    "steps run": ("count", 12, "counter steps 'run' says 3, and the journals say 12"),
    "calls run serp": ("count", 4, "counter calls 'run serp' says 3, and the journals say 4"),
    "velocity run day": ("buckets", None, "counter velocity 'run day' says $0.00 in 0 calls, and the journals say $"),
    "velocity run hour": ("buckets", None, "counter velocity 'run hour' says $0.00 in 0 calls, and the journals say $"),
}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def spent(request, tmp_path):
    """A ledger in which a run has spent in every way, with a call that was refused, one that was never sent, and a child."""
    url = f"sqlite:///{tmp_path / 'spend.db'}" if request.param == "sqlite" else postgres.empty_database()
    with make_guard(url, policy=COUNTING) as guard, guard.session("run", budget="$5.00", id="run") as session:
        for kind in KINDS:
            kind().buy(session, "bought")
        for number in range(3):
            session.charge("serp", "$0.02", arguments={"n": number})
        provider = httpx.MockTransport(lambda _request: httpx.Response(200, json=completion()))
        with httpx.Client(transport=GuardedTransport(session, provider)) as http:
            http.post(CHAT, json=ask())
        session.record_usage("openai", "gpt-4o", {"prompt_tokens": 20, "completion_tokens": 5})
        unreachable = httpx.MockTransport(Shop(paid=httpx.ConnectError("no route")))
        with believed(session, unreachable) as http, pytest.raises(httpx.ConnectError):
            http.get(URL)
        with pytest.raises(PaymentRefused):
            session.charge("serp", "$50.00")
        with session.child("child", budget="$1.00") as child:
            child.charge("serp", "$0.03")
    return url


def told(url, policy=COUNTING):
    with Owner(url) as owner:
        assert owner.verify() == []
        return owner.verify_counters(policy)


def change(url, kind, key, value):
    """Write a row past the library, as an attacker with the file or the database does; None removes it."""
    with closing(open_store(url)) as store, store.one_moment() as query:
        [(before,)] = query("SELECT value FROM marks WHERE kind = ? AND key = ?", (kind, key))
    after = None if value is None else json.dumps({**json.loads(before), **value})

    def write(query):
        if after is None:
            query("DELETE FROM marks WHERE kind = ? AND key = ?", (kind, key))
        else:
            query("UPDATE marks SET value = ? WHERE kind = ? AND key = ?", (after, kind, key))

    with closing(open_store(url)) as store:
        store.one_write(write)


def test_what_was_counted_is_what_the_journals_say(spent):
    assert told(spent) == []


@pytest.mark.parametrize("name", ROWS)
def test_a_counter_that_says_less_is_told(spent, name):
    kind, _, key = name.partition(" ")
    field, right, sentence = ROWS[name]
    change(spent, kind, key, {field: 3 if right else {}})
    [line] = told(spent)
    assert line.startswith(sentence)


@pytest.mark.parametrize("kind", ["steps", "calls", "paid_to", "payee", "velocity"])
def test_a_counter_that_is_gone_is_told(spent, kind):
    with closing(open_store(spent)) as store:
        keys = list(store.marks(kind, ""))
    assert keys
    for key in keys:
        change(spent, kind, key, None)
    assert sorted(line.split("'")[1] for line in told(spent)) == sorted(keys)


def test_a_counter_that_says_more_refuses_more_and_is_no_matter(spent):
    change(spent, "steps", "run", {"count": 900})
    assert told(spent) == []


def test_what_another_policy_did_not_count_differs(spent):
    assert told(spent, Policy(max_calls={"another": 5})) == []
    other = Policy(max_calls={"s*": 5}, velocity=None)
    assert told(spent, other) == ["counter calls 'run s*' says 0, and the journals say 4"]


def test_what_has_left_its_window_is_not_compared(spent):
    change(spent, "velocity", "run hour", None)
    with closing(open_store(spent)) as store:
        later = store.now_ms() + 3 * 3_600_000
    with Owner(spent) as owner:
        owner._store.now_ms = lambda: later
        assert owner.verify_counters(COUNTING) == []


def test_what_is_in_files_is_counted_as_well(spent, tmp_path):
    with make_guard(spent, policy=COUNTING) as guard, guard.session("old", budget="$1.00", id="old") as session:
        session.charge("serp", "$0.02")
    (tmp_path / "files").mkdir()
    with closing(open_store(spent)) as store:
        assert archive(store, store.now_ms() + 10**10, tmp_path / "files", gone=("",)).sessions == 1
    assert told(spent) == []
    change(spent, "steps", "old", None)
    assert told(spent) == ["counter steps 'old' says 0, and the journals say 1"]
    with Owner(spent) as owner:
        assert owner.verify_counters(COUNTING, archives=False) == []


def test_the_command(tmp_path):
    (tmp_path / "x402guard.toml").write_text(RULES)
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}", policy=COUNTING) as guard:
        with guard.session("run", budget="$1.00", id="run") as session:
            session.charge("serp", "$0.02")
    done = typed("verify", "--counters", "x402guard.toml", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "the counters of the guards say no less than the journals, under x402guard.toml" in done.stdout
    change(f"sqlite:///{tmp_path / 'spend.db'}", "steps", "run", None)
    done = typed("verify", "--counters", "x402guard.toml", cwd=tmp_path)
    line, hint = done.stdout.splitlines()
    assert (done.returncode, line) == (1, "counter steps 'run' says 0, and the journals say 1")
    assert hint == "The policy is that of x402guard.toml; an agent with another policy counts otherwise."
    assert typed("verify", cwd=tmp_path).returncode == 0
    done = typed("verify", "--counters", "missing.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "missing.toml" in done.stderr
