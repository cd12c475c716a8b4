"""`x402guard pay`: one request, paid once within its budget, or shown and not paid."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.command_line import forked
from tests.support.merchant import KEY
from tests.support.slow_server import Trickler, once_paid, paid_head
from x402guard import Guard, Owner

pytestmark = pytest.mark.chain


@pytest.fixture
def pay(net, tmp_path):
    def run(path, *words, command=("pay",), **more):
        environment = {"X402GUARD_PRIVATE_KEY": net.payer_key, **more}
        environment = {name: value for name, value in environment.items() if value is not None}
        opinion = net.merchant.routes["documents"].format(n=42)
        url = path if "://" in path else f"{net.merchant.url}{opinion if path == '/opinion/42' else path}"
        return forked(*command, url, *words, cwd=tmp_path, **environment)

    return run


def test_a_url_is_paid_once_and_its_answer_printed(pay, net, tmp_path):
    done = pay("/opinion/42", "--budget", "0.50", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["status"], shown["paid"]["state"], shown["paid"]["network"]) == (200, "captured", net.network)
    assert shown["paid"]["payee"] == net.merchant.payee
    with Owner(tmp_path / "x402guard.db") as owner:
        assert [str(row.spent) for row in owner.sessions(name="x402guard pay")] == [shown["paid"]["amount"]]


def test_the_answer_is_on_stdout_and_the_rest_on_stderr(pay):
    done = pay("/opinion/42", "--budget", "0.50")
    assert done.returncode == 0
    json.loads(done.stdout)
    assert "\nstatus 200; $0.10 to 0x" in done.stderr
    assert "a new ledger is made at" in done.stderr


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize("place", [">/dev/full", "| true"])
def test_an_answer_that_cannot_be_printed_was_paid_all_the_same_and_that_is_said(net, tmp_path, place, words):
    done = piped(net, tmp_path, place, *words)
    assert "\nstatus 200; $0.10 to 0x" in done.stderr
    assert "Running it again signs a new payment." in done.stderr
    assert ("No space left on device" in done.stderr) == (place == ">/dev/full")


@pytest.mark.parametrize("charset", ["hex", "rot13", "idna"])
def test_a_charset_that_decodes_no_text_hides_no_payment(net, tmp_path, charset):
    head = paid_head(b"content-length: 3\r\n\r\n").replace(b"text/plain", f"text/plain; charset={charset}".encode())
    with Trickler() as server:
        server.answers["/x"] = once_paid(lambda line: line.send(head + "\u00e9!".encode()))
        key = {"X402GUARD_PRIVATE_KEY": net.payer_key}
        done = forked("pay", f"{server.url}/x", "--budget", "0.50", "--json", cwd=tmp_path, **key)
    shown = json.loads(done.stdout)
    assert (shown["status"], shown["paid"]["amount"], shown["body"]) == (200, "0.01", "\u00e9!")


def test_nothing_is_paid_for_an_answer_that_has_no_place(net, tmp_path):
    done = piped(net, tmp_path, ">&-")
    assert "stdout is closed: what is paid for would be lost" in done.stderr
    assert list(tmp_path.iterdir()) == []


def piped(net, folder, place, *words):
    url = f"{net.merchant.url}{net.merchant.routes['documents'].format(n=42)}"
    line = shlex.join([sys.executable, "-m", "x402guard", "pay", url, "--budget", "0.50", *words])
    environment = {**os.environ, "X402GUARD_PRIVATE_KEY": net.payer_key}
    command = ["sh", "-c", f"{line} {place}"]
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=60)


def test_a_dry_run_pays_nothing_and_shows_what_would_be_signed(pay, tmp_path):
    done = pay("/opinion/42", "--budget", "0.50", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert ": allowed" in done.stdout
    assert "would sign 100000 units of" in done.stdout
    assert "by exact/eip3009, good for" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_the_budget_and_the_wallet_would(pay, tmp_path):
    done = pay("/opinion/42", "--budget", "0.05", "--dry-run")
    assert "left of $0.05" in done.stdout
    assert "would sign" not in done.stdout
    with Guard(ledger=f"sqlite:///{tmp_path / 'x402guard.db'}", budget="$0.08"):
        pass
    done = pay("/opinion/42", "--budget", "0.50", "--dry-run")
    assert "the wallet has $0.08 left" in done.stdout
    with Owner(tmp_path / "x402guard.db") as owner:
        owner.set_budget("wallet", "$5.00")
        assert ": allowed" in pay("/opinion/42", "--budget", "0.50", "--dry-run").stdout
        owner.trip("wallet")
    done = pay("/opinion/42", "--budget", "0.50", "--dry-run")
    assert "only its owner can reset it: x402guard reset wallet\n" in done.stdout


def _trips(folder, _environment):
    with Owner(folder / "x402guard.db") as owner:
        owner.trip("wallet")


def _kills(folder, environment):
    (folder / "stop").touch()
    environment["X402GUARD_KILL_FILE"] = str(folder / "stop")


REFUSED = {
    "budget": lambda folder, environment: environment.update(BUDGET="0.05"),
    "session_tripped": _trips,
    "kill_file": _kills,
    "balance": lambda folder, environment: environment.update(X402GUARD_PRIVATE_KEY=KEY),
    "hosts": lambda folder, environment: environment.update(X402GUARD_POLICY='{"hosts": ["seller.example"]}'),
    "dollars_per_day": lambda folder, environment: environment.update(
        X402GUARD_POLICY='{"velocity": {"dollars_per_day": "0.05"}}'
    ),
    "no_signer": lambda folder, environment: environment.update(X402GUARD_PRIVATE_KEY=""),
}


def _named(text):
    """The text without the id of the session, which is another one each time."""
    return re.sub(r"s_[0-9a-f]{16}", "s_…", text)


@pytest.mark.parametrize("rule", REFUSED)
def test_a_dry_run_refuses_by_the_same_rule_as_pay_and_changes_nothing(pay, net, tmp_path, rule):
    environment = {"X402GUARD_CHAINS": json.dumps({net.network: net.rpc}), "BUDGET": "0.50"}
    url = f"sqlite:///{tmp_path / 'x402guard.db'}"
    with Guard(ledger=url, budget="$5.00") as guard, guard.session("before", budget="$1.00") as session:
        session.charge("serp", "$0.01")
    REFUSED[rule](tmp_path, environment)
    budget = ("--budget", environment.pop("BUDGET"))
    if environment.get("X402GUARD_PRIVATE_KEY") == "":
        environment["X402GUARD_PRIVATE_KEY"] = None
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    dry = pay("/opinion/42", *budget, "--dry-run", "--json", **environment)
    explained = pay("/opinion/42", command=("policy", "explain"), **environment)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    real = pay("/opinion/42", *budget, **environment)
    [line] = json.loads(dry.stdout)
    assert (dry.returncode, line["verdict"], real.returncode) == (2, "denied", 2)
    assert _named(f"x402guard: {line['rule']}: {line['reason']}") in _named(real.stderr)
    assert line["rule"] == {"kill_file": "session_tripped"}.get(rule, rule)
    assert explained.returncode == (0 if rule in ("budget", "no_signer") else 2), explained.stdout


@pytest.mark.parametrize("command", ["pay", "policy"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/images/generations"])
def test_what_a_provider_bills_is_sent_to_no_provider_without_a_hold(command, path, tmp_path):
    with Trickler() as provider:
        settings = {"X402GUARD_METERING": json.dumps({"endpoints": {f"{provider.url}/v1": "openai"}})}
        url, body = f"{provider.url}{path}", ("--data", '{"model": "gpt-4o"}')
        words = ("pay", url, "--budget", "0.50", "--dry-run") if command == "pay" else ("policy", "explain", url)
        done = forked(*words, *body, cwd=tmp_path, **settings)
    assert (done.returncode, provider.asked) == (2, [])
    assert "is metered, so asking would cost what the call costs" in " ".join(done.stderr.split())


def test_what_does_not_fit_is_refused_and_nothing_is_paid(pay, tmp_path):
    done = pay("/opinion/42", "--budget", "0.001")
    assert done.returncode == 2
    assert done.stderr.count("does not fit") == 1, "it is said once"
    with Owner(tmp_path / "x402guard.db") as owner:
        assert {str(row.spent) for row in owner.sessions()} == {"0.00"}


@pytest.mark.parametrize(
    ("path", "words", "says"),
    [
        ("/opinion/42", ("--budget", "lots"), "--budget: 'lots' is not a dollar amount"),
        ("ftp://x.example/y", ("--budget", "1"), "url: 'ftp://x.example/y' is no URL; write https://"),
        ("http://127.0.0.1:1/x", ("--budget", "1"), "url: the request to 'http://127.0.0.1:1/x' failed: ConnectError"),
        ("/opinion/42", ("--budget", "1", "-H", "nonsense"), "--header: 'nonsense' is no header; write 'Name: value'"),
        ("/opinion/42", ("--budget", "1", "-d", "@none.json"), "--data: 'none.json' cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_costs_nothing(pay, path, words, says, tmp_path):
    done = pay(path, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert KEY not in done.stderr


def test_a_free_answer_costs_nothing(pay):
    done = pay("/nowhere", "--budget", "0.50")
    assert done.returncode == 1
    assert "status 404; nothing was paid" in done.stderr


def test_an_answer_that_breaks_off_after_it_was_paid_is_no_nothing(net, tmp_path):
    """Whoever reads "nothing was paid" runs it again, and pays again."""
    with Trickler() as server:
        server.answers["/cut"] = once_paid(lambda line: (line.send(paid_head() + b"half"), False)[1])
        key = {"X402GUARD_PRIVATE_KEY": net.payer_key}
        done = forked("pay", f"{server.url}/cut", "--budget", "0.50", cwd=tmp_path, **key)
    assert done.returncode == 2
    assert "$0.01 to 0x" in done.stderr
    assert "was paid, or may still be taken (hold" in done.stderr
    assert "Running it again signs a new payment" in done.stderr
    assert "othing was" not in done.stderr


def test_a_call_of_a_model_whose_answer_is_lost_is_no_nothing(net, tmp_path):
    asked = json.dumps({"model": "gpt-4o", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]})
    with Trickler() as server:
        server.answers["/v1/chat/completions"] = lambda line: False
        settings = {"X402GUARD_METERING": json.dumps({"endpoints": {f"{server.url}/v1": "openai"}})}
        url, key = f"{server.url}/v1/chat/completions", {"X402GUARD_PRIVATE_KEY": net.payer_key}
        done = forked("pay", url, "--data", asked, "--budget", "0.50", cwd=tmp_path, **key, **settings)
    assert done.returncode == 2
    assert "othing was" not in done.stderr
    assert "may bill the call all the same" in " ".join(done.stderr.split())


def test_method_header_and_body_are_what_was_typed():
    from x402guard.cli.arguments import typed_request

    request = typed_request("https://x.example/y", "GET", ["X-Own: 1", "accept: text/plain"], '{"pages": 3}')
    assert (request.method, request.read(), request.headers["x-own"]) == ("POST", b'{"pages": 3}', "1")
    assert request.headers["content-type"] == "application/json"
    assert typed_request("https://x.example/y", "PUT", None, "x").method == "PUT"
