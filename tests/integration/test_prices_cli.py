"""``x402guard prices``: list, compare, take in; real processes, a small price file made by hand, and a call that it prices."""

import copy
import hashlib
import json
import re
from functools import partial

import httpx
import pytest

from tests.support import sdks
from tests.support.command_line import forked, typed
from tests.support.sdks import LIMITED, TEXT, dollars
from x402guard import ConfigError, Guard, GuardedTransport, Unpriced

running, server = sdks.running, sdks.server

pytestmark = pytest.mark.xdist_group("prices")

EXTRACTOR = {
    "api_flavor": "chat",
    "root": "usage",
    "model_path": "model",
    "mappings": [
        {"path": "prompt_tokens", "dest": "input_tokens", "required": True},
        {"path": "completion_tokens", "dest": "output_tokens", "required": True},
    ],
}
BASE = [  # two of the bundled prices
    {
        "id": "openai",
        "name": "OpenAI",
        "api_pattern": "https://api\\.openai\\.com",
        "extractors": [EXTRACTOR],
        "models": [
            {
                "id": "gpt-4o-mini",
                "match": {"equals": "gpt-4o-mini"},
                "context_window": 128_000,
                "prices": {"input_mtok": "0.15", "cache_read_mtok": "0.075", "output_mtok": "0.60"},
            },
            {
                "id": "gpt-4o",
                "match": {"equals": "gpt-4o"},
                "context_window": 128_000,
                "prices": {"input_mtok": "2.5", "cache_read_mtok": "1.25", "output_mtok": "10"},
            },
        ],
    }
]
WRITTEN = "x402guard-prices.json"
IN_USE = {"X402GUARD_METERING__PRICES": WRITTEN}


def canonical(providers):
    return json.dumps(providers, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def changed(**changes):
    """The base with other keys in its gpt-4o-mini; `prices` are added to those that it has."""
    book = copy.deepcopy(BASE)
    found = book[0]["models"][0]
    prices = changes.pop("prices", None)
    found |= changes
    if isinstance(prices, dict):
        found["prices"] |= prices
    elif prices is not None:
        found["prices"] = prices
    return book


NEWER = changed(prices={"input_mtok": "0.10"})
"""A price that falls by a third."""


@pytest.fixture
def prices(tmp_path):
    """Run `x402guard prices` in a folder of its own: the whole command line, but for the process."""
    return partial(typed, "prices", cwd=tmp_path)


process = partial(forked, "prices")


@pytest.fixture
def file(tmp_path):
    """Write a book to a file, as somebody may have fetched it."""

    def file(book=NEWER, name="newer.json"):
        path = tmp_path / name
        path.write_text(book if isinstance(book, str) else canonical(book))
        return path

    return file


@pytest.fixture
def base(tmp_path):
    """The base as an update writes it: what a newer file is compared with, in place of two thousand bundled prices."""
    written = tmp_path / WRITTEN
    written.write_text(canonical(wrapped(BASE)))
    return written


def wrapped(providers):
    return {
        "format": "x402guard.llm.genai_prices.v1",
        "sha256": sha256(canonical(providers)),
        "providers": providers,
    }


def rows(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def prices_in(written):
    return [model["prices"] for model in json.loads(written.read_text())["providers"][0]["models"]]


# ---- list ----


def test_list_shows_the_bundled_prices_by_model_and_provider(prices):
    found = {(row["provider"], row["model"]): row for row in rows(prices("list", "openai/gpt-4o-mini", "--json"))}
    row = found["openai", "gpt-4o-mini"]
    assert (row["input"], row["cached_input"], row["output"]) == ("0.15", "0.075", "0.6")
    assert all("openai/gpt-4o-mini" in "/".join(key) for key in found)
    table = prices("list", "GPT-4O-MINI").stdout.splitlines()
    assert table[0].split() == ["provider", "model", "input", "cached_input", "output"]
    assert ["openai", "gpt-4o-mini", "0.15", "0.075", "0.6"] in [line.split() for line in table]
    assert prices("list", "gpt-99").stdout == "no model with that name has a price\n"


# ---- diff ----


def test_diff_shows_every_price_that_differs_and_the_hash_and_changes_nothing(prices, file, base, tmp_path):
    path, before = file(), base.read_text()
    assert rows(prices("diff", path, "--json", **IN_USE)) == [
        {"provider": "openai", "model": "gpt-4o-mini", "unit": "input_tokens", "before": "0.15", "after": "0.10"}
    ]
    done = prices("diff", path, **IN_USE)
    assert ["openai", "gpt-4o-mini", "input_tokens", "0.15", "0.10"] in [
        line.split() for line in done.stdout.splitlines()
    ]
    assert done.stdout.splitlines()[-1] == f"1 prices differ; sha256 {sha256(path.read_text())}"
    assert (base.read_text(), sorted(tmp_path.iterdir())) == (before, sorted([base, path]))


def test_diff_with_the_bundled_prices_shows_also_what_is_gone(prices, file, tmp_path):
    path = file()
    found = {(row["model"], row["unit"]): (row["before"], row["after"]) for row in rows(prices("diff", path, "--json"))}
    assert found["gpt-4o-mini", "input_tokens"] == ("0.15", "0.10")
    assert ("gpt-4o", "input_tokens") not in found
    assert found["claude-sonnet-4-5", "input_tokens"] == ("3", None)
    assert list(tmp_path.iterdir()) == [path]


def test_diff_with_the_same_prices_shows_none(prices, file, base):
    done = prices("diff", file(BASE), **IN_USE)
    assert done.stdout == f"no price differs\n0 prices differ; sha256 {sha256(canonical(BASE))}\n"


def test_the_same_as_a_process(file, tmp_path):
    """Against the bundled prices: whatever the file lacks may fall to another model's price, so it needs a yes."""
    path = file()
    shown = process("diff", path, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    refused = process("update", path, cwd=tmp_path)
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert list(tmp_path.iterdir()) == [path]
    taken = process("update", path, cwd=tmp_path, answer="y\n")
    assert (taken.returncode, taken.stderr) == (0, "")
    hashes = [re.search("sha256 ([0-9a-f]{64})", done.stdout)[1] for done in (shown, refused, taken)]
    assert hashes == [json.loads((tmp_path / WRITTEN).read_text())["sha256"]] * 3
    [row] = rows(process("list", "gpt-4o-mini", "--json", cwd=tmp_path, **IN_USE))
    assert row["input"] == "0.10"


# ---- update ----


def test_update_writes_the_prices_with_their_hash_and_says_how_to_use_them(prices, file, tmp_path):
    done = prices("update", file(), "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / WRITTEN).read_text())
    assert written == wrapped(NEWER)
    assert f"sha256 {written['sha256']}" in done.stdout
    assert f"written to {WRITTEN}; to use it, set prices = " in done.stdout
    assert "X402GUARD_METERING__PRICES" in done.stdout
    found = rows(prices("list", "--json", **IN_USE))
    assert [(row["model"], row["input"]) for row in found] == [("gpt-4o-mini", "0.10"), ("gpt-4o", "2.5")]


def test_a_price_that_falls_by_less_is_taken_without_a_question(prices, file, base):
    done = prices("update", file(), **IN_USE)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"written to {WRITTEN}")
    assert prices_in(base)[0]["input_mtok"] == "0.10"


@pytest.mark.parametrize("answer", ["n\n", "", "\n", "maybe\nn\n"], ids=["no", "end of input", "default", "then no"])
def test_a_price_that_falls_by_more_than_half_is_not_taken_without_a_yes(prices, file, base, tmp_path, answer):
    path, before = file(changed(prices={"output_mtok": "0.29"})), base.read_text()
    done = prices("update", path, answer=answer, **IN_USE)
    assert done.returncode == 1
    assert "1 prices fall by more than half." in done.stdout
    assert ["openai", "gpt-4o-mini", "output_tokens", "0.60", "0.29"] in [
        line.split() for line in done.stdout.splitlines()
    ]
    assert "written" not in done.stdout
    assert (base.read_text(), sorted(tmp_path.iterdir())) == (before, sorted([base, path]))


@pytest.mark.parametrize(("arguments", "answer"), [((), "y\n"), (("--yes",), "")], ids=["asked", "told"])
def test_a_yes_takes_it(prices, file, base, arguments, answer):
    done = prices("update", file(changed(prices={"output_mtok": "0.29"})), *arguments, answer=answer, **IN_USE)
    assert done.returncode == 0, done.stderr
    assert prices_in(base)[0]["output_mtok"] == "0.29"


@pytest.mark.parametrize(
    ("output", "taken"), [("0.30", True), ("0.2999", False), ("0", False)], ids=["half", "more", "free"]
)
def test_half_is_the_border(prices, file, base, output, taken):
    done = prices("update", file(changed(prices={"output_mtok": output})), **IN_USE)
    assert done.returncode == (0 if taken else 1)


def conditional(*steps):
    """Prices that change: (constraint or None, price of the output) one after the other."""
    plain = BASE[0]["models"][0]["prices"]
    return [
        {"prices": plain | {"output_mtok": output}} | ({"constraint": constraint} if constraint else {})
        for constraint, output in steps
    ]


HIDDEN = {
    "from some day on": {"prices": conditional((None, "0.60"), ({"start_date": "2099-01-01"}, "0.0001"))},
    "at some time of the day": {
        "prices": conditional(
            (None, "0.60"), ({"start_time": "00:00:00.000001Z", "end_time": "00:00:00.000002Z"}, "0.0001")
        )
    },
    "in a larger tier": {
        "prices": {"output_mtok": {"base": "0.60", "tiers": [{"start": 1, "price": "0.0001"}]}},
    },
    "at a service tier": {
        "price_variants": [{"when": {"service_tier": "default"}, "prices": {"output_mtok": "0.0001"}}],
    },
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_price_that_falls_where_nobody_looks_needs_a_yes_too(prices, file, base, hidden):
    """Any price that falls by more than half needs a yes: whoever can write the file could make every call look cheap."""
    before = base.read_text()
    assert prices("update", file(changed(**hidden)), **IN_USE).returncode == 1
    assert base.read_text() == before


def test_a_name_that_moves_to_a_cheaper_model_needs_a_yes_too(prices, file, base):
    book = changed(match={"or": [{"equals": "gpt-4o-mini"}, {"equals": "gpt-4o"}]})
    assert prices("update", file(book), **IN_USE).returncode == 1


def test_update_writes_where_the_settings_look_though_nothing_is_there_yet(prices, file, tmp_path):
    where = {"X402GUARD_METERING__PRICES": "mine.json"}
    done = prices("update", file(), "--yes", **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "written to mine.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "newer.json"]


# ---- a call at those prices ----


@pytest.fixture
def settings(server, tmp_path, monkeypatch):
    """Set the environment of a guard that prices by the file written in the folder, and meters the server."""

    def settings():
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
        monkeypatch.setenv("X402GUARD_METERING__ENDPOINTS", json.dumps({server.base("openai"): "openai"}))
        monkeypatch.setenv("X402GUARD_METERING__PRICES", WRITTEN)

    return settings


def test_the_written_file_prices_a_call(prices, file, base, server, settings):
    assert prices("update", file(), **IN_USE).returncode == 0
    settings()
    with Guard.from_env() as guard, guard.session("s", budget="$1.00") as session:
        with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
            answer = http.post(server.base("openai") + "/v1/chat/completions", json=LIMITED)
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
            with pytest.raises(Unpriced, match=r"openai has no price for 'gpt-4\.1'"):
                http.post(server.base("openai") + "/v1/chat/completions", json=LIMITED | {"model": "gpt-4.1"})
        assert session.spent == dollars((20, "0.10"), (18, "0.60"))  # 2 + 10.8 = 12.8 millionths, 13.8 as bundled
        [held] = [event for event in session.report().to_dict()["events"] if event["event"] == "authorize"]
    price = held["price"]
    assert (price["source"], price["version"]) == (WRITTEN, f"sha256:{sha256(canonical(NEWER))[:12]}")


def test_a_file_whose_extractor_leaves_the_output_out_makes_no_call_cheap(prices, file, base, server, settings):
    """How usage is read is no price: what a price file says of it is asked about, or has no effect, or the ceiling stands."""
    book = changed()
    book[0]["extractors"] = [EXTRACTOR | {"mappings": EXTRACTOR["mappings"][:1]}]
    if prices("update", file(book), **IN_USE).returncode != 0:
        return
    settings()
    with Guard.from_env() as guard, guard.session("s", budget="$1.00") as session:
        with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
            http.post(server.base("openai") + "/v1/chat/completions", json=LIMITED)
        assert session.spent >= dollars((20, "0.15"), (18, "0.60"))


def test_a_tampered_file_is_refused(prices, file, base, settings):
    content = json.loads(base.read_text())
    content["providers"][0]["models"][0]["prices"]["output_mtok"] = "0.0001"
    base.write_text(json.dumps(content))
    for command in (("list",), ("diff", file()), ("update", file())):
        done = prices(*command, **IN_USE)
        assert done.returncode == 2
        assert "was changed after its import" in done.stderr
    assert json.loads(base.read_text()) == content
    settings()
    with pytest.raises(ConfigError, match=r"metering\.prices: .* was changed after its import"):
        Guard.from_env()


def test_a_file_that_was_not_taken_in_is_refused(prices, file, settings):
    file(name=WRITTEN)
    done = prices("list", **IN_USE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "was not written by `x402guard prices update`" in done.stderr
    settings()
    with pytest.raises(ConfigError, match="was not written by"):
        Guard.from_env()


BAD = {
    "no json": "prices?",
    "no list": "{}",
    "empty": "[]",
    "no provider": '[{"id": "openai"}]',
    "a price in words": canonical(changed(prices={"output_mtok": "cheap"})),
    "a negative price": canonical(changed(prices={"output_mtok": "-0.60"})),
    "no number": canonical(changed(prices={"output_mtok": "NaN"})),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_file_that_holds_no_prices_is_refused_and_nothing_is_written(prices, file, tmp_path, text):
    path = file(text)
    done = prices("update", path, "--yes")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert str(path) in done.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_there_is_named(prices, tmp_path):
    done = prices("diff", "nowhere.json")
    assert (done.returncode, "nowhere.json" in done.stderr, list(tmp_path.iterdir())) == (2, True, [])
