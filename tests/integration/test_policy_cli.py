"""``x402guard policy``: a file is read as a guard would, and a real merchant's offer explained as it is judged."""

import json

import httpx
import pytest

from tests.support.command_line import forked, typed
from tests.support.merchant import KEY
from x402guard import Guard, GuardedTransport, LocalSigner, PaymentRefused
from x402guard.guard.settings import load_settings
from x402guard.testing import Merchant, Offer, Route, Server

pytestmark = pytest.mark.xdist_group("cli")

PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"
PLAIN = "0x036CbD53842c5426634e7929541eC2318f3dCF7e"


@pytest.fixture
def policy(tmp_path):
    def run(*arguments, text="", way=typed, **environment):
        (tmp_path / "rules.toml").write_text(text)
        done = way("policy", *arguments, cwd=tmp_path, **environment)
        assert "Traceback" not in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["rules.toml"], "no ledger is opened"
        return done.returncode, done.stdout + done.stderr

    return run


GOOD = """
[policy]
per_payment_cap = "$0.50"
hosts = ["courts.example"]
velocity = false
[policy.risk]
levels = { "wipe_*" = "CRITICAL" }
[policy.approvals]
above = "$0.20"
[[policy.rules]]
name = "no-films"
action = "deny"
match = "film*"
"""


def test_a_good_file_is_good_and_what_it_says_is_listed(policy):
    code, said = policy("check", "rules.toml", text=GOOD, way=forked)
    assert code == 0
    for words in (
        "rules.toml: the policy is valid",
        "$0.50 a payment",
        "courts.example",
        "'no-films': deny film*",
        "above $0.20",
        "wipe_*: CRITICAL",
        "velocity: off",
    ):
        assert words in said
    assert "loop: off" not in said


def test_an_empty_file_is_the_defaults(policy):
    code, said = policy("check", "rules.toml")
    assert code == 0
    assert "$1.00 a payment; any host" in said
    assert ": off" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[policy]\nrules = []", "policy.rules: an empty list"),
        ("[policy]\nhosts = []", "policy.hosts"),
        ("[[policy.rules]]\nname = 'x'\naction = 'block'", "policy.rules.action"),
        ("[[policy.rules]]\nname = 'x'\naction = 'narrow'", "policy.rules"),
        ("[[policy.rules]]\naction = 'deny'", "name"),
        ("[policy.approvals]\ntimeout_s = 0", "policy.approvals.timeout_s"),
        ("[policy.approvals]\ntimeout_s = -1", "policy.approvals.timeout_s"),
        ("[policy.approvals]\ntimeout_s = inf", "timeout_s"),
        ("[policy]\nper_payment_cap = 0.5", "as text"),
        ("[policy]\nper_paymnt_cap = '$1'", "did you mean per_payment_cap?"),
        ("[policy", "cannot be read"),
        ("private_key = '0x11'", "does not belong in a settings file"),
    ],
    ids=lambda text: text[:40].replace("\n", " "),
)
def test_a_mistake_is_exit_code_2_and_one_line(policy, text, says):
    code, said = policy("check", "rules.toml", text=text)
    assert code == 2
    assert says in said
    assert "is good" not in said


@pytest.mark.parametrize("name", ["nowhere.toml", "."])
def test_no_file_is_a_mistake(policy, name):
    code, said = policy("check", name)
    assert code == 2
    assert "there is no file" in said


@pytest.mark.parametrize(
    ("tool", "verdict", "rule"),
    [
        ("get_page", "LOW: allowed", ""),
        ("serp", "MEDIUM: allowed", ""),
        ("wipe_disk", "CRITICAL: denied", "risk"),
        ("drop_table", "CRITICAL: denied", "risk"),
        ("film", "MEDIUM: denied", "no-films"),
    ],
)
def test_a_tool_is_explained(policy, tool, verdict, rule):
    code, said = policy("explain", tool, "--config", "rules.toml", "--json", text=GOOD)
    [line] = json.loads(said)
    assert (code, line["what"], line["verdict"], line["rule"]) == (2 if "denied" in verdict else 0, tool, verdict, rule)
    assert f"{tool}: {verdict}" in policy("explain", tool, "--config", "rules.toml", text=GOOD)[1]


@pytest.mark.parametrize(("approver", "verdict"), [('approver = "queue"\n', "needs approval"), ("", "denied")])
def test_what_wants_a_person_is_denied_where_the_settings_name_nobody(policy, approver, verdict):
    [line] = json.loads(policy("explain", "delete_user", "--config", "rules.toml", "--json", text=approver)[1])
    assert verdict in line["verdict"]


class Nobody:
    """A settler that nobody may get to: explaining pays nothing."""

    async def aclose(self):
        return None

    async def verify(self, _payment, _requirements):
        raise AssertionError("a payment was sent")


@pytest.fixture(scope="module")
def merchant():
    routes = [
        Route(name="cents", path="/cents", answer=lambda _: {"n": 1}, offers=(Offer(price=10_000, asset=PLAIN),)),
        Route(
            name="old", path="/old", answer=lambda _: {"n": 1}, offers=(Offer(price=10_000, asset=PLAIN),), version=1
        ),
        Route(
            name="dear",
            path="/dear",
            answer=lambda _: {},
            offers=(Offer(price=300_000, asset=PLAIN), Offer(price=900_000, asset=PLAIN)),
        ),
        Route(name="free", path="/free", answer=lambda _: {}),
    ]
    with Server(Merchant(settler=Nobody(), payee=PAYEE, routes=routes, chain_id=84532).app) as server:
        yield server.url


RULES = {
    "paid": ("", "/cents", [("allowed", "")]),
    "v1": ("", "/old", [("allowed", "")]),
    "free": ("", "/free", [("requires no payment (status 200)", "")]),
    "missing": ("", "/nowhere", [("requires no payment (status 404)", "")]),
    "cap": (
        GOOD.replace('hosts = ["courts.example"]', ""),
        "/dear",
        [("needs approval", "approval"), ("denied", "per_payment_cap")],
    ),
    "host": (GOOD, "/cents", [("denied", "hosts")]),
    "rule": ('[[policy.rules]]\nname = "x"\naction = "deny"\nkinds = ["payment"]', "/cents", [("denied", "x")]),
    "place": (
        '[[policy.rules]]\nname = "x"\naction = "deny"\nmatch = "GET 127.0.0.1:*/cents"',
        "/cents",
        [("denied", "x")],
    ),
    "payee": (f'[[policy.rules]]\nname = "x"\naction = "deny"\npayees = ["{PAYEE}"]', "/cents", [("denied", "x")]),
    "narrowed": ('[[policy.rules]]\nname = "x"\naction = "narrow"\nceiling = "$0.001"', "/cents", [("denied", "x")]),
}


def test_a_url_without_its_scheme_is_no_tool(policy):
    """As a tool of that name it would be allowed, although the rules deny the host."""
    code, said = policy("explain", "evil.example/x", "--config", "rules.toml", text=GOOD)
    assert (code, "what: 'evil.example/x' is neither a URL nor a tool; write https://evil.example/x" in said) == (
        2,
        True,
    )
    assert "denied" in policy("explain", "crm/delete_user", "--config", "rules.toml", text=GOOD)[1]


@pytest.mark.parametrize("case", RULES)
def test_an_offer_is_explained_as_it_would_be_judged(policy, merchant, tmp_path, case):
    text, path, expected = RULES[case]
    text = 'approver = "queue"\n' + text
    code, said = policy(
        "explain",
        f"{merchant}{path}",
        "--config",
        "rules.toml",
        "--json",
        text=text,
        way=forked if case == "paid" else typed,
    )
    lines = json.loads(said)
    shown = [(line["verdict"].removeprefix("LOW: "), line["rule"]) for line in lines]
    is_denied = {"denied"} == {verdict for verdict, _ in expected}
    assert (code, shown) == (2 if is_denied else 0, expected)
    if "denied" in expected[0]:
        arguments = load_settings(tmp_path / "rules.toml").guard_arguments()
        arguments |= {"ledger": "memory://", "signer": LocalSigner.from_key(KEY), "approver": None}
        with Guard(**arguments) as guard, guard.session("s", budget="$5") as session:
            with httpx.Client(transport=GuardedTransport(session, on_refusal="raise"), trust_env=False) as http:
                with pytest.raises(PaymentRefused) as caught:
                    http.get(f"{merchant}{path}")
        assert caught.value.rule == expected[0][1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://", "ftp://courts.example/x", "http://[::1/x"])
def test_a_url_that_cannot_be_asked_is_a_mistake(policy, url):
    code, said = policy("explain", url, "--config", "rules.toml")
    assert code == 2
    assert "url: " in said


def test_no_key_is_needed_and_none_is_told(policy, merchant):
    code, said = policy("explain", f"{merchant}/cents", "--config", "rules.toml", way=forked, X402GUARD_PRIVATE_KEY=KEY)
    assert code == 0
    assert KEY[2:] not in said
