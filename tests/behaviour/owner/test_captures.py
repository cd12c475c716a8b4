"""What was captured, entry by entry: it adds up to what is spent, in each format, and a file sent twice bills once."""

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal

import httpx
import jsonschema
import pytest

from tests.support.command_line import typed
from tests.support.delegations import NOW_S, world
from tests.support.ledger import weigh_proven
from tests.support.merchant import URL, Shop, b64, client, receipt, required, upto
from tests.support.processes import ROOT
from x402guard import ConfigError, Owner
from x402guard.frozen import replace
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled
from x402guard.ledger.view import Scope
from x402guard.views.export import export


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


def _claims_all(request, shop):
    """The receipt for an ``upto``: that all of it was taken, which the chain later corrects."""
    return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="10000"))})


@pytest.fixture
def spent(url):
    """Two customers with payments, calls of a model, tools, a correction downwards, a child and a scope."""
    with world(url) as books:
        guard = books.guard(unsafe_trust_receipts=True)
        for name, amount in (("cus_1", "$0.10"), ("cus_2", "$0.20")):
            with guard.budget(name, "$5.00").session("run", budget="$2.00", id=f"{name}-run") as session:
                client(session, Shop(required(upto(10_000)), paid=_claims_all)).get(f"{URL}/{name}?key=secret")
                session.record_usage("openai", "gpt-4o", {"input_tokens": 5, "output_tokens": 7})
                books.forward(3600)
                with session.child("reader", budget="$1.00") as child:
                    child.charge("search", amount)
                with session.scope("$0.50"):
                    session.charge("=HYPERLINK(1)", "$0.01")
        corrected = next(
            entry.hold_id
            for entry in books.store.entries("cus_1-run")
            if entry.event == "capture" and "claimed" in entry.data
        )
        less = Settled(4_000, "0xabc", 1, final=True)
        scope = Scope(holds=(corrected,), marks=weigh_marks(books.store.hold(corrected), less), durable=True)
        books.store.transact(scope, lambda view: weigh_proven(view, corrected, less))
        yield books


def lines_of(url, form, session="wallet", **between):
    with Owner(url, read_only=True) as owner:
        return list(export(owner.captures(session, **between), form))


def rows_of(url, session="wallet", **between):
    return list(csv.DictReader(io.StringIO("".join(lines_of(url, "csv", session, **between)))))


@pytest.mark.parametrize("session", ["wallet", "cus_1", "cus_2-run"])
def test_the_amounts_add_up_to_what_the_report_says(url, spent, session):
    with Owner(url, read_only=True) as owner:
        report = owner.report(session).to_dict()
        total = sum(row.nanos for row in owner.captures(session))
    assert sum(Decimal(row["dollars"]) for row in rows_of(url, session)) == Decimal(report["spent_total"])
    assert total == Decimal(report["spent_total"]) * 10**9


def test_a_line_says_who_what_and_on_what_evidence(url, spent):
    payment, *_, corrected = rows_of(url, "cus_1")
    assert (payment["dollars"], payment["customer"], payment["session"], payment["agent"]) == (
        "0.01", "cus_1", "cus_1-run", "run",
    )  # fmt: skip
    assert (payment["method"], payment["host"], payment["path"]) == ("GET", "courts.example", "/opinion/42/cus_1")
    assert payment["time"].startswith(datetime.fromtimestamp(NOW_S, UTC).strftime("%Y-%m-%dT%H:%M"))
    assert (corrected["dollars"], corrected["evidence"], corrected["event"]) == ("-0.006", "chain", "correct")
    assert (corrected["transaction"], corrected["hold"]) == ("0xabc", payment["hold"])
    assert "secret" not in "".join(lines_of(url, "csv") + lines_of(url, "orb"))
    agents = {row["agent"] for row in rows_of(url, "cus_1")}
    assert agents == {"run", "reader"}


def test_a_period_is_cut_without_a_gap_and_without_a_line_twice(url, spent):
    noon = datetime.fromtimestamp(NOW_S + 1800, UTC)
    before, after = rows_of(url, until=noon), rows_of(url, since=noon)
    assert before
    assert after
    assert before + after == rows_of(url)


@pytest.mark.parametrize("form", ["stripe-meter", "orb"])
def test_each_line_fits_the_schema_of_its_receiver(url, spent, form):
    name = {"stripe-meter": "stripe-meter-event", "orb": "orb-event"}[form]
    schema = json.loads((ROOT / "tests" / "data" / f"{name}.schema.json").read_text())
    events = [json.loads(line) for line in lines_of(url, form)]
    for event in events:
        jsonschema.validate(event, schema)
    keys = [event.get("identifier") or event["idempotency_key"] for event in events]
    assert keys == [row["entry"] for row in rows_of(url)]
    assert len(set(keys)) == len(keys)
    assert lines_of(url, form) == lines_of(url, form)  # the same keys again: the receiver drops them
    if form == "stripe-meter":
        billed = {event["payload"]["stripe_customer_id"]: 0 for event in events}
        for event in events:
            billed[event["payload"]["stripe_customer_id"]] += int(event["payload"]["value"])
        with Owner(url, read_only=True) as owner:
            assert billed == {name: int(owner.budget(name).spent * 10**9) for name in ("cus_1", "cus_2")}


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@sum", "'@sum"), ("\tx", "'�x"), ("two\nlines", "two�lines"),
        ("\u202egpj.exe", "�gpj.exe"), ('say "hi", you', 'say "hi", you'), ("search", "search"),
        ("\uff1d1+1", "'\uff1d1+1"), ("a;=cmd|' /C calc'!A0", "a;'=cmd|' /C calc'!A0"), ("a; b", "a; b"),
    ],
)  # fmt: skip
def test_no_cell_is_a_formula_and_no_cell_breaks_a_line(url, spent, text, cell):
    with Owner(url, read_only=True) as owner:
        [first, *_] = owner.captures("cus_1")
    lines = list(export([replace(first, tool=text, host=text)], "csv"))
    [row] = csv.DictReader(io.StringIO("".join(lines)))
    assert (row["tool"], row["host"], row["dollars"]) == (cell, cell, "0.01")
    assert len(lines) == len("".join(lines).splitlines()) == 2


def test_what_no_customer_owes_is_not_billed(url):
    with world(url) as books, books.guard().session("s", budget="$1.00", id="s") as session:
        session.charge("search", "$0.01")
    for form in ("stripe-meter", "orb"):
        with pytest.raises(ConfigError, match=r"^customer: session 's' is in no named budget"):
            lines_of(url, form)
    assert len(rows_of(url)) == 1


def test_the_command_writes_them(url, spent, tmp_path):
    done = typed("report", "wallet", "--format", "csv", "--ledger", url, cwd=tmp_path)
    assert done.returncode == 0
    assert [row["entry"] for row in csv.DictReader(io.StringIO(done.stdout))] == [row["entry"] for row in rows_of(url)]
    named = typed("report", "cus_1", "--format", "orb", "--event-name", "agents", "--ledger", url, cwd=tmp_path)
    assert {json.loads(line)["event_name"] for line in named.stdout.splitlines()} == {"agents"}


WRONG = [
    (("--format", "pdf"), "--format: 'pdf' is not one of 'csv', 'stripe-meter', 'orb'"),
    (("--format", "csv", "--since", "soon"), "--since: 'soon' is no time; write 2026-11-01, 24h or 7d"),
    (("--format", "csv", "--until", "soon"), "--until: 'soon' is no time"),
    (("--format", "csv", "--json"), "--format: it does not go with --json"),
    (("--html", "out.html", "--json"), "--html: it does not go with --json; leave one of them out"),
    (("--since", "2026-11-02", "--until", "2026-11-01"), "--until: it is not after --since"),
    (("--since", "soon"), "--since: 'soon' is no time"),
    (("--sign", "key.json", "--since", "7d"), "--sign: only the report of all time is signed"),
    (("--event-name", "agents"), "--event-name: it goes with --format"),
    (("--format", "orb", "--event-name", ""), "--event-name: '' is no name"),
    (("--format", "orb", "--event-name", "x" * 101), "at most 100 characters"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda each: str(each)[:30])
def test_a_mistake_is_told_in_one_line(url, spent, tmp_path, options, words):
    done = typed("report", "wallet", *options, "--ledger", url, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
