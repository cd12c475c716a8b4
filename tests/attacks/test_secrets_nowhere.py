"""Row 25, beside logs: no key, signature or payment header in any repr, pickle, copy, report, ledger row or child process."""

import copy
import io
import os
import pickle
import pprint
import sqlite3
import subprocess
import sys

import httpx
import pytest
import rich.console
import rich.traceback

from tests.support.merchant import (
    KEY,
    Shop,
    accept,
    b64,
    client,
    make_guard,
    permit2,
    required,
    required_v1,
    upto,
)
from tests.support.payment_secrets import forms_of, found, payment_header, signature_of
from x402guard import (
    BudgetExhausted,
    LocalSigner,
    Policy,
    SettlementUncertain,
)
from x402guard.flow.sealed import Sealed
from x402guard.guard.settings import load_settings

OFFERS = {
    "exact": required(),
    "permit2": required(permit2()),
    "upto": required(upto()),
    "v1": required_v1(),
}
TOKEN = "token-of-the-callers-own-0123456789"


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a25_a_sealed_value_is_not_pickled_copied_or_shown(act):
    sealed = Sealed("the value")
    with pytest.raises(TypeError, match="never pickled"):
        act(sealed)
    out = io.StringIO()
    rich.console.Console(file=out).print([sealed], pprint.pformat([sealed]), f"{sealed}", vars(Sealed))
    assert "the value" not in out.getvalue()
    assert sealed.reveal() == "the value"


@pytest.fixture
def traded(tmp_path):
    """A ledger in which something was paid, lost, presented again and refused, in all ways to pay; and all there is of it."""
    things, shops = [], []
    with (
        make_guard(f"sqlite:///{tmp_path / 'spend.db'}", policy=Policy(breaker=None, loop=None)) as guard,
        guard.session("s", budget="$0.50") as session,
    ):
        things += [guard, guard.shell, guard.context, session, guard.shell.signer]
        for number, terms in enumerate(OFFERS.values()):
            url = f"https://shop{number}.example/a?token={TOKEN}"
            resource = {**terms, "resource": {**terms["resource"], "url": url}} if "resource" in terms else terms
            shops.append(Shop(resource, lambda request, shop: httpx.Response(500)))
            answers = [client(session, shops[-1]).get(url) for _ in range(2)]
            shops[-1].paid = httpx.ReadError("lost")
            with pytest.raises(SettlementUncertain) as lost:
                client(session, shops[-1]).get(url + "2")
            with pytest.raises(BudgetExhausted) as refused:
                client(session, Shop(required(accept(900_000)))).get(url + "3")
            things += [answer.extensions["x402guard"] for answer in answers]
            things += [lost.value, refused.value, answers[0], answers[0].request, answers[0].request.headers]
        things += list(guard.shell.store.outstanding())
        things += [hold.intent for hold in guard.shell.store.outstanding()]
        things += list(guard.shell.store.entries("wallet"))
        yield guard, session, things, shops


def _secrets(shops) -> set:
    headers = {payment_header(request): b64(shop.terms) for shop in shops for request in _paid(shop)}
    assert len(headers) == 2 * len(OFFERS)
    return {form for header, offer in headers.items() for form in forms_of(header, offer)} | {KEY[2:]}


def test_a25_nothing_of_ours_shows_a_payment_by_repr_pickle_or_copy(traded):
    _, _, things, shops = traded
    secrets = _secrets(shops)
    pickled = 0
    for thing in things:
        shown = [repr(thing), str(thing), pprint.pformat(thing)]
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            try:
                made = act(thing)
            except (TypeError, AttributeError, pickle.PicklingError) as refusal:
                shown.append(str(refusal))
            else:
                pickled += act is pickle.dumps
                shown.append(made.decode("latin-1") if isinstance(made, bytes) else repr(made))
        assert not found(secrets, "\n".join(shown)), type(thing)
    assert pickled > 20


def test_a25_the_report_has_neither_payment_nor_query(traded):
    _, session, _, shops = traded
    report = session.report()
    told = report.to_json() + report.to_text() + repr(report.to_dict()) + repr(report)
    assert "shop3.example" in told
    assert not found(_secrets(shops), told)
    assert TOKEN not in told


def test_a25_no_byte_of_the_ledger_files_is_of_a_payment(traded, tmp_path):
    guard, _, _, shops = traded
    secrets = _secrets(shops)
    signatures = [bytes.fromhex(signature_of(payment_header(request))) for shop in shops for request in _paid(shop)]
    for state in ("as written", "checkpointed"):
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert (len(files["spend.db-wal"]) > 10_000) == (state == "as written")
        for content in files.values():
            assert not found(secrets, content.decode("latin-1"))
            assert not [raw for raw in signatures if raw[:32] in content or raw[32:64] in content]
        raw = sqlite3.connect(tmp_path / "spend.db")
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        raw.close()
    assert guard.shell.store.outstanding()


def _paid(shop) -> list:
    return [request for request in shop.seen if payment_header(request)]


CHILD = """
import json, multiprocessing, os, subprocess, sys
def environment(queue=None):
    told = dict(os.environ)
    return told if queue is None else queue.put(told)
if __name__ == "__main__":
    from x402guard import Guard
    guard = Guard.from_env()
    script = "import json, os; print(json.dumps([dict(os.environ), open('/proc/self/environ').read() if os.path.exists('/proc/self/environ') else '']))"
    seen = [json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)]
    for way in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(way)
        queue = context.SimpleQueue()
        child = context.Process(target=environment, args=(queue,))
        child.start()
        seen.append(queue.get())
        child.join()
    guard.close()
    print(json.dumps(seen))
"""


def test_a25_no_child_in_any_way_of_starting_one_inherits_a_secret(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    secret = "webhook-secret-0123456789"
    settings = {
        "X402GUARD_PRIVATE_KEY": KEY,
        "X402GUARD_WEBHOOK_SECRET": secret,
        "X402GUARD_WEBHOOK_URL": "https://hooks.example/services/abcdefghijklmnop",
        "X402GUARD_LEDGER": "memory://",
    }
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("X402GUARD_")}
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        env={**kept, **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("X402GUARD_LEDGER") == 4 + os.path.exists("/proc/self/environ")
    assert not found([KEY[2:], secret, "PRIVATE_KEY", "WEBHOOK_SECRET"], done.stdout + done.stderr)


def test_a25_settings_show_no_url_that_holds_a_key(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_CHAINS", '{"base-sepolia": "https://node.example/v3/0123456789abcdef"}')
    monkeypatch.setenv("X402GUARD_WEBHOOK_URL", "https://hooks.example/services/abcdefghijklmnop")
    monkeypatch.setenv("X402GUARD_WEBHOOK_SECRET", "webhook-secret-0123456789")
    settings = load_settings()
    assert settings.chains["base-sepolia"].urls[0].endswith("0123456789abcdef")
    told = repr(settings) + str(settings) + repr(settings.guard_arguments()["webhook"])
    assert "base-sepolia" not in told
    assert not found(["0123456789abcdef", "abcdefghijklmnop", "webhook-secret"], told)


def test_a25_a_signer_shows_its_address_and_nothing_else():
    signer = LocalSigner.from_key(KEY)
    assert repr(signer) == f"LocalSigner({signer.address})"
