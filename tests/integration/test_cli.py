"""The command line as a user meets it: real output, real exit codes, and real processes where those make a difference."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.command_line import as_process, forked, typed
from tests.support.merchant import KEY, URL, Shop, client, make_guard
from tests.support.terminal import at_terminal
from x402guard import BudgetExhausted, Guard, LedgerUnavailable, SettlementUncertain

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def spent(tmp_path_factory):
    """A folder with the ledger of an agent that paid twice, lost an answer, and was refused."""
    folder = tmp_path_factory.mktemp("spent")
    with make_guard(f"sqlite:///{folder / 'x402guard.db'}", budget="$20.00") as guard:
        with guard.session("court-research", budget="$0.03", id="run-42") as session:
            shop = Shop()
            http = client(session, shop)
            http.get(f"{URL}/1")
            http.get(f"{URL}/2")
            shop.paid = httpx.ReadError("reset")
            with pytest.raises(SettlementUncertain):
                http.get(f"{URL}/3?key=hidden")
            with pytest.raises(BudgetExhausted):
                http.get(f"{URL}/4")
    return folder


def test_sessions_lists_what_there_is(spent):
    done = typed("sessions", "--json", cwd=spent)
    assert done.returncode == 0, done.stderr
    wallet, session = json.loads(done.stdout)
    assert (wallet["id"], wallet["budget"], wallet["spent"], wallet["held"]) == ("wallet", "20.00", "0.02", "0.01")
    assert (session["id"], session["state"], session["terminated_by"]) == ("run-42", "closed", "budget_exhausted")
    assert (session["spent"], session["held"], session["remaining"]) == ("0.02", "0.01", "0.00")
    assert "court-research" in typed("sessions", cwd=spent).stdout


@pytest.mark.parametrize("which", [(), ("run-42",), ("court-research",)], ids=["last", "by id", "by name"])
def test_report_prints_the_accounts(spent, which):
    done = typed("report", *which, "--json", cwd=spent)
    report = json.loads(done.stdout)
    assert (report["spent"], report["held"], report["terminated_by"]) == ("0.02", "0.01", "budget_exhausted")
    text = typed("report", *which, cwd=spent).stdout
    assert "budget_exhausted" in text
    assert "still out" in text


def test_holds_lists_what_may_still_be_taken_and_no_secrets(spent):
    done = typed("holds", "--json", cwd=spent)
    [hold] = json.loads(done.stdout)
    assert (hold["amount"], hold["in_doubt"], hold["doubt"]) == ("0.01", True, "no answer: ReadError")
    assert hold["request"] == f"GET {URL}/3"
    assert "hidden" not in done.stdout
    assert "0.01" in typed("holds", cwd=spent).stdout


def test_a_ledger_that_is_not_there_is_not_made_by_looking(tmp_path):
    done = typed("sessions", cwd=tmp_path)
    assert done.returncode == 2
    assert "no ledger yet at" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("report", "nobody"), {}, "no session 'nobody'"),
        (("sessions", "--ledger", "mysql://x"), {}, "is not a ledger"),
        (
            ("sessions",),
            {"X402GUARD_BUGDET": "$5"},
            "X402GUARD_BUGDET: there is no such setting; did you mean X402GUARD_BUDGET?",
        ),
        (("sessions",), {"X402GUARD_CHAINS": "not json"}, "X402GUARD_CHAINS: not JSON"),
        (
            ("sessions",),
            {"X402GUARD_POLICY__HOSTS": '"x.com"'},
            "policy.hosts: 'x.com' is not a list; write a list",
        ),
    ],
)
def test_mistakes_get_one_line_and_what_to_do(spent, arguments, environment, says):
    done = typed(*arguments, cwd=spent, **environment)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


SAME = [
    ("report", "run-42"),
    ("sessions", "--ledger", "mysql://x"),
    ("doctor", "--json"),
]


@pytest.mark.long
def test_a_process_says_the_same_with_the_same_exit_code(spent):
    """So the other tests may do without one."""
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda words: as_process(*words, cwd=spent), SAME))
    assert said == [typed(*words, cwd=spent) for words in SAME]
    assert said == [forked(*words, cwd=spent) for words in SAME]
    assert [done.returncode for done in said] == [0, 2, 0]


def test_doctor_says_what_works(spent):
    done = typed("doctor", "--json", cwd=spent, X402GUARD_PRIVATE_KEY=KEY)
    findings = {f["check"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 0
    assert findings["key"]["detail"].startswith("pays from 0x")
    assert findings["ledger"]["verdict"] == "ok"
    assert KEY.removeprefix("0x") not in done.stdout + done.stderr


def test_doctor_takes_a_path_for_a_ledger_in_a_file(spent):
    [file] = spent.glob("*.db")
    for given in (str(file), f"sqlite:///{file}"):
        done = typed("doctor", "--json", "--ledger", given, cwd=spent)
        told = [found["detail"] for found in json.loads(done.stdout) if found["check"] == "ledger"]
        assert [detail.partition(": ")[0] for detail in told] == [f"sqlite:///{file}"]


def found_by_doctor(folder, **environment):
    done = typed("doctor", "--json", cwd=folder, **environment)
    return [(found["check"], found["verdict"], found["detail"]) for found in json.loads(done.stdout)]


def test_doctor_tells_whose_limit_counts_and_where_the_kill_file_is(tmp_path):
    (tmp_path / "x402guard.toml").write_text(
        f'budget = "$10.00"\nkill_file = "{tmp_path}/stop"\nledger = "./spend.db"\n[policy]\nhosts = ["a.example"]\n'
    )
    (tmp_path / "x402guard.toml").chmod(0o600)
    assert typed("budget", "set", "wallet", "10.00", "--new", cwd=tmp_path).returncode == 0
    found = found_by_doctor(tmp_path)
    assert [each for each in found if each[0] == "ledger"] == [
        ("ledger", "ok", "sqlite:///./spend.db: 0 live holds; its wallet has a limit of $10.00")
    ]
    assert ("kill file", "ok", f"while there is a file {tmp_path}/stop, nothing is paid") in found
    assert typed("budget", "set", "wallet", "20.00", cwd=tmp_path).returncode == 0
    told = "budget is $10.00, but its wallet has a limit of $20.00, which its owner has set; that counts"
    assert ("ledger", "ok", told) in found_by_doctor(tmp_path)
    told = "budget is $7.00, but its wallet has a limit of $20.00, so no guard starts; leave budget out"
    assert ("ledger", "problem", told) in found_by_doctor(tmp_path, X402GUARD_BUDGET="$7.00")
    settings = [each for each in found_by_doctor(tmp_path, X402GUARD_POLICY__MAX_STEPS="50") if each[0] == "settings"]
    assert [(verdict, "[policy] is not used" in detail) for _, verdict, detail in settings] == [("warning", True)]


@pytest.mark.parametrize(
    ("environment", "check"),
    [
        ({"X402GUARD_PRIVATE_KEY": "0x1234"}, "settings"),
        ({"X402GUARD_BUDGET": "five"}, "settings"),
        ({"X402GUARD_FLIGHT_S": "0"}, "settings"),
        ({"X402GUARD_POLICY__NETWORKS": '["base"]'}, "settings"),
        ({"X402GUARD_ASSETS": '[{"network": "nope"}]'}, "settings"),
        ({"X402GUARD_POLICY__PER_PAYMENT_CAP": "lots"}, "settings"),
        ({"X402GUARD_CHAINS": '{"base-sepolia": "http://127.0.0.1:9"}'}, "chain"),
        ({"X402GUARD_LEDGER": "sqlite:////proc/none/x.db"}, "ledger"),
    ],
)
def test_doctor_names_what_does_not(tmp_path, environment, check):
    done = typed("doctor", "--json", cwd=tmp_path, **environment)
    problems = [f["check"] for f in json.loads(done.stdout) if f["verdict"] == "problem"]
    assert problems == [check]
    assert done.returncode == 1
    assert "1234" not in done.stdout


@pytest.mark.chain
def test_the_demo_agrees_with_the_chain(tmp_path):
    done = as_process("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused before signing" in done.stdout
    assert "Ledger and chain agree to the atomic unit: 912345 units counted." in done.stdout
    assert re.search(r"models +2 +\$0\.002347 +▓", done.stdout)
    assert re.search(r"tools +4 +\$0\.02 ", done.stdout)
    assert re.findall(r"at its price, as (\w+),", done.stdout) == ["raw", "table", "table", "summary"]
    assert re.search(r"tokens +2,269 of 2,800 used", done.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.chain
def test_the_testnet_prints_where_it_is_and_stops_when_told(tmp_path):
    process = processes.start("x402guard", "testnet", module=True, cwd=tmp_path)
    try:
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], "the testnet ended before it said where it is"
        net = json.loads("".join(lines))
        assert set(net) == {"rpc", "chain_id", "token", "permit2", "facilitator", "merchant", "payer_key"}
        call = {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []}
        assert httpx.post(net["rpc"], json=call).json()["result"] == hex(84532) == hex(net["chain_id"])
        assert httpx.get(net["merchant"]["url"] + "/documents/1").status_code == 402
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.long
def test_what_changes_something_says_so_as_json_too(tmp_path):
    ledger = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{ledger}") as guard:
        guard.session("court-research", budget="$1.00", id="run")

    def done(*arguments, **more):
        ran = typed(*arguments, "--json", cwd=tmp_path, X402GUARD_LEDGER=f"sqlite:///{ledger}", **more)
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return json.loads(ran.stdout)

    assert done("budget", "set", "run", "2.00")["limit"] == "2.00"
    tripped = done("trip", "run")
    assert (tripped["state"], tripped["outstanding"]) == ("tripped", [])
    assert done("reset", "run")["state"] == "abandoned", "its process has ended"
    assert done("ledger", "clock")["accepted"] is False
    assert done("ledger", "clock", "--accept")["accepted"] is True
    (tmp_path / "x402guard.toml").write_text('[policy]\nper_payment_cap = "$0.10"\n')
    assert done("policy", "check", "x402guard.toml")["rules"][0].startswith("payments: at most $0.10")
    made = done("keys", "new", "key.json", X402GUARD_KEYSTORE_PASSWORD="of the test only")
    assert done("keys", "address", "key.json") == {"address": made["address"]}
    public = done("keys", "report", "report.json", X402GUARD_REPORT_KEY_PASSWORD="of the test only")["public_key"]
    assert len(public) == 64


def test_a_report_reads_alone_and_replaces_no_page_of_others(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard, guard.session("run", budget="$1.00") as session:
        session.charge("serp", "$0.04")
    empty = tmp_path / "empty.db"
    empty.touch()
    for command in (("report", "wallet"), ("report", "wallet", "--json"), ("sessions",), ("holds",)):
        assert typed(*command, "--ledger", "empty.db", cwd=tmp_path).returncode == 2
        assert empty.stat().st_size == 0
    page = tmp_path / "index.html"
    page.write_text("<!doctype html>\n<title>My own page</title>\n")
    done = typed("report", "--html", "index.html", "--ledger", "spend.db", cwd=tmp_path)
    assert (done.returncode, "is there and is no report" in done.stderr) == (2, True)
    assert "My own page" in page.read_text()
    for _ in range(2):  # one of ours is replaced
        assert typed("report", "--html", "own.html", "--ledger", "spend.db", cwd=tmp_path).returncode == 0


def test_an_id_stays_whole_on_a_narrow_terminal(tmp_path):
    with (
        make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard,
        guard.session("research", budget="$1.00") as session,
    ):
        pass
    assert session.id in at_terminal([], "sessions", "--ledger", "spend.db", cwd=tmp_path)


@pytest.mark.parametrize("name", ["a#b.db", "100%.db", "why?.db"])
def test_a_name_that_a_url_cannot_have_is_refused_by_its_letter(tmp_path, name):
    [letter] = set(name) & set("#%?")
    for command in (("budget", "set", "wallet", "1.00", "--new"), ("sessions",)):
        done = typed(*command, "--ledger", name, cwd=tmp_path)
        assert (done.returncode, f"contains '{letter}'" in done.stderr) == (2, True), (command, done)
    assert list(tmp_path.iterdir()) == []


LONG = "x" * 300  # no file can have such a name, and to look for it is an error, as in a folder that is shut


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "--ledger", f"./{LONG}.db"),
        ("trip", "wallet", "--ledger", f"./{LONG}.db"),
        ("budget", "set", "wallet", "2.00", "--new", "--ledger", f"./{LONG}.db"),
        ("ledger", "clock", "--ledger", f"./{LONG}.db"),
        ("policy", "check", LONG),
        ("keys", "new", LONG),
        ("keys", "report", LONG),
        ("keys", "address", LONG),
        ("init", LONG),
        ("verify-report", LONG, "--key", "00"),
    ],
    ids=lambda given: " ".join(given[:2]),
)
def test_a_file_that_cannot_be_looked_at_is_told_in_two_lines(tmp_path, arguments):
    secret = {"X402GUARD_KEYSTORE_PASSWORD": "p" * 20, "X402GUARD_REPORT_KEY_PASSWORD": "p" * 20}
    done = typed(*arguments, cwd=tmp_path, **secret)
    assert (done.returncode, done.stdout) == (2, "")
    assert "File name too long" in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("setting", ["X402GUARD_CONFIG", "X402GUARD_LEDGER", "X402GUARD_KILL_FILE"])
def test_doctor_tells_of_a_file_that_cannot_be_looked_at(tmp_path, setting):
    done = typed("doctor", cwd=tmp_path, **{setting: f"./{LONG}"})
    assert (done.returncode, "File name too long" in done.stdout) == (1, True), done


def test_a_ledger_that_was_deleted_is_told_by_each_command(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}", budget="$5.00"):
        pass
    (tmp_path / "spend.db").unlink()
    for command in (["sessions"], ["trip", "wallet"], ["budget", "set", "wallet", "5.00", "--new"], ["doctor"]):
        done = typed(*command, "--ledger", "./spend.db", cwd=tmp_path)
        said = done.stdout + done.stderr
        assert (done.returncode, "existed here and is missing" in said) == (
            1 if command == ["doctor"] else 2,
            True,
        ), said


def hard_link(folder):
    os.link(folder / "x402guard.db", folder / "second.db")


def cut_to_nothing(folder):
    (folder / "x402guard.db").write_bytes(b"")


def moved_away(folder):
    lock = folder / "x402guard.db-lock"
    lock.write_bytes(lock.read_bytes()[:52] + b"postgresql://h/d")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (hard_link, "has a second name"),
        (cut_to_nothing, "has nothing in it, and one was here"),
        (moved_away, "was moved to"),
    ],
)
def test_doctor_says_of_a_ledger_what_a_guard_says_of_it(spent, tmp_path, change, says):
    spent = shutil.copytree(spent, tmp_path / "copy")
    change(spent)
    with pytest.raises(LedgerUnavailable, match=says):
        Guard(ledger=f"sqlite:///{spent / 'x402guard.db'}")
    before = {path.name: path.read_bytes() for path in spent.iterdir()}
    found = found_by_doctor(spent)
    assert [verdict for check, verdict, detail in found if check == "ledger" and says in detail] == ["problem"]
    assert {path.name: path.read_bytes() for path in spent.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "x402guard.toml: the working directory is gone: change to another one, or name the file by X402GUARD_CONFIG"),
        ({"X402GUARD_CONFIG": "none"}, "The working directory is gone: change to another one, or name another ledger."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["doctor", "sessions"])
def test_a_working_directory_that_is_gone_is_named(tmp_path, command, config, says):
    line = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m x402guard {command}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **config}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=env, check=False, capture_output=True, text=True, timeout=60
    )
    assert says in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
