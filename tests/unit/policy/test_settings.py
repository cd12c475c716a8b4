"""What is no rule, no level and no time to wait: said when it is written down, by the name of the setting."""

import re

import pytest

from tests.support.merchant import PAYEE
from x402guard import Answer, Approvals, ConfigError, Guard, Narrow, Policy, Risk, Rule
from x402guard.guard.approvers import as_approver
from x402guard.guard.settings import load_settings

GOOD = {"name": "r", "action": "deny"}
NARROW = {"name": "r", "action": "narrow"}
RULES = [
    ({**GOOD, "name": ""}, "rules.name"),
    ({**GOOD, "name": "a\nb"}, "rules.name"),
    ({**GOOD, "name": 5}, "rules.name"),
    ({**GOOD, "name": None}, "rules.name"),
    ({**GOOD, "name": "x" * 101}, "rules.name"),
    ({**GOOD, "action": "block"}, "rules.action"),
    ({**GOOD, "action": "DENY"}, "rules.action"),
    ({**GOOD, "action": None}, "rules.action"),
    ({**GOOD, "action": ["deny"]}, "rules.action"),
    ({**GOOD, "match": ""}, "rules.match"),
    ({**GOOD, "match": "  "}, "rules.match"),
    ({**GOOD, "match": None}, "rules.match"),
    ({**GOOD, "match": ["a"]}, "rules.match"),
    ({**GOOD, "match": "https://courts.example/*"}, "rules.match"),
    ({**GOOD, "kinds": []}, "rules.kinds"),
    ({**GOOD, "kinds": "tool"}, "rules.kinds"),
    ({**GOOD, "kinds": {"tools"}}, "rules.kinds"),
    ({**GOOD, "kinds": None}, "rules.kinds"),
    ({**GOOD, "kinds": 5}, "rules.kinds"),
    ({**GOOD, "kinds": [["tool"]]}, "rules.kinds"),
    ({**GOOD, "above": 0.5}, "rules.above"),
    ({**GOOD, "above": "-$1"}, "rules.above"),
    ({**GOOD, "above": "NaN"}, "rules.above"),
    ({**GOOD, "above": "lots"}, "rules.above"),
    ({**GOOD, "above": True}, "rules.above"),
    ({**GOOD, "payees": []}, "rules.payees"),
    ({**GOOD, "payees": PAYEE}, "rules.payees"),
    ({**GOOD, "payees": 5}, "rules.payees"),
    ({**GOOD, "payees": ["nobody"]}, "rules.payees"),
    ({**GOOD, "payees": [PAYEE[:-1]]}, "rules.payees"),
    ({**GOOD, "approvers": 0}, "rules.approvers"),
    ({**GOOD, "approvers": -1}, "rules.approvers"),
    ({**GOOD, "approvers": 11}, "rules.approvers"),
    ({**GOOD, "approvers": True}, "rules.approvers"),
    ({**GOOD, "approvers": 1.0}, "rules.approvers"),
    ({**GOOD, "approvers": "2"}, "rules.approvers"),
    ({**GOOD, "ceiling": "$1"}, "narrow"),
    ({**GOOD, "output_limit": 5}, "narrow"),
    ({**GOOD, "remove": ["x"]}, "narrow"),
    (NARROW, "narrow"),
    ({**NARROW, "remove": []}, "narrow"),
    ({**NARROW, "ceiling": 0.1}, "rules.ceiling"),
    ({**NARROW, "ceiling": "-$1"}, "rules.ceiling"),
    ({**NARROW, "output_limit": 0}, "rules.output_limit"),
    ({**NARROW, "output_limit": -5}, "rules.output_limit"),
    ({**NARROW, "output_limit": True}, "rules.output_limit"),
    ({**NARROW, "output_limit": 1.5}, "rules.output_limit"),
    ({**NARROW, "remove": "user"}, "rules.remove"),
    ({**NARROW, "remove": [""]}, "rules.remove"),
    ({**NARROW, "remove": [5]}, "rules.remove"),
    ({**NARROW, "remove": 5}, "rules.remove"),
]


@pytest.mark.parametrize(("terms", "names"), RULES, ids=str)
def test_what_is_no_rule_is_named(terms, names):
    with pytest.raises(ConfigError, match=r"policy\.rules") as caught:
        Rule(**terms)
    assert names in str(caught.value)


def test_what_is_read_once_is_read_whole_or_not_at_all():
    for field, values in (("remove", ["user"]), ("kinds", ["tool"]), ("payees", [PAYEE])):
        terms = {**NARROW, "ceiling": "$1", field: iter(values)}
        try:
            made = getattr(Rule(**terms), field)
        except ConfigError:
            continue
        assert len(made) == 1, f"{field} is lost without a word"


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([], "an empty list"),
        ((), "an empty list"),
        (set(), "an empty list"),
        (iter(()), "an empty list"),
        ("deny", "not a list of Rule"),
        ({"name": "r"}, "not a list of Rule"),
        (5, "not a list of Rule"),
        ([GOOD], "is not a Rule"),
        ([None], "is not a Rule"),
        ([Rule], "is not a Rule"),
        ([Rule(**GOOD), Rule(**NARROW, ceiling="$1")], "two rules are named 'r'"),
    ],
)
def test_what_is_no_list_of_rules(rules, says):
    with pytest.raises(ConfigError, match=r"policy\.rules") as caught:
        Policy(rules=rules)
    assert says in str(caught.value)


@pytest.mark.parametrize("terms", [{}, {"remove": ()}, {"ceiling": 0.1}, {"output_limit": 0}, {"remove": "x"}], ids=str)
def test_a_narrow_that_says_nothing_or_nonsense(terms):
    with pytest.raises(ConfigError, match=r"policy\.rules"):
        Narrow(**terms)


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ({"levels": ["delete_*"]}, "levels"),
        ({"levels": {"": "HIGH"}}, "levels"),
        ({"levels": {" ": "HIGH"}}, "levels"),
        ({"levels": {5: "HIGH"}}, "levels"),
        ({"levels": {"x": "high"}}, "levels"),
        ({"levels": {"x": 3}}, "levels"),
        ({"levels": {"x": None}}, "levels"),
        ({"levels": {"x": ["HIGH"]}}, "levels"),
        ({"levels": None}, "levels"),
        ({"levels": {"https://courts.example/*": "HIGH"}}, "levels"),
        ({"approvers": 0}, "approvers"),
        ({"approvers": 11}, "approvers"),
        ({"approvers": True}, "approvers"),
        ({"approvers": 2.0}, "approvers"),
        ({"classify": "HIGH"}, "classify"),
    ],
    ids=str,
)
def test_what_is_no_risk_is_named(terms, names):
    with pytest.raises(ConfigError, match=r"policy\.risk") as caught:
        Risk(**terms)
    assert f"policy.risk.{names}" in str(caught.value)


def test_levels_that_change_after_they_were_given_change_nothing():
    levels = {"wipe": "CRITICAL"}
    risk = Risk(levels=levels)
    levels["wipe"] = "LOW"
    assert risk.levels["wipe"] == "CRITICAL"
    with pytest.raises(TypeError):
        risk.levels["wipe"] = "LOW"


@pytest.mark.parametrize(
    "timeout", [0, -1, float("inf"), float("nan"), 1.5, "300", True, None, 604_801, 10**30], ids=str
)
def test_a_wait_is_a_number_of_seconds(timeout):
    with pytest.raises(ConfigError, match=r"policy\.approvals\.timeout_s"):
        Approvals(timeout_s=timeout)


@pytest.mark.parametrize("above", [0.5, "-$1", "NaN", "inf", True, ["$1"]], ids=str)
def test_a_sum_is_a_sum(above):
    with pytest.raises(ConfigError, match=r"policy\.approvals\.above"):
        Approvals(above=above)


def test_by_default_a_person_has_five_minutes():
    assert Policy().approvals == Approvals(above=None, timeout_s=300)
    assert (Approvals(timeout_s=1).timeout_s, Approvals(timeout_s=604_800).timeout_s) == (1, 604_800)


class AskedClass:
    def ask(self, _request):
        return Answer(True, ("me",))


@pytest.mark.parametrize(
    "approver",
    [
        "",
        "tty",
        "Queue",
        0,
        False,
        True,
        [],
        (),
        [None],
        ["queue", "tty"],
        [[]],
        {"queue"},
        AskedClass,
    ],
    ids=lambda given: re.sub(r" at 0x\w+", "", re.sub(r"<.*\.(\w+).*>", r"\1", repr(given))),
)
def test_who_cannot_be_asked_is_said_before_a_ledger_is_opened(tmp_path, approver):
    with pytest.raises(ConfigError, match="approver"):
        Guard(ledger=f"sqlite:///{tmp_path / 'books.db'}", approver=approver)
    assert list(tmp_path.iterdir()) == []


def test_nobody_is_nobody():
    assert as_approver(None) is None


BAD_FILES = [
    ("[policy]\nrules = []", "empty list"),
    ("[[policy.rules]]\nname = 'r'", "action"),
    ("[[policy.rules]]\nname = 'r'\naction = 'block'", "action"),
    ("[[policy.rules]]\nname = 'r'\naction = 'deny'\nabove = 0.5", "$5.00"),
    ("[[policy.rules]]\nname = 'r'\naction = 'narrow'\nceiling = 1", "$5.00"),
    ("[[policy.rules]]\nname = 'r'\naction = 'narrow'\noutput_limt = 5", "did you mean output_limit?"),
    ("[[policy.rules]]\nname = 'r'\naction = 'narrow'", "narrow"),
    ("[policy]\nrules = 'deny'", "rules"),
    ("[policy.approvals]\ntimeout_s = 0", "timeout_s"),
    ("[policy.approvals]\ntimeout_s = inf", "timeout_s"),
    ("[policy.approvals]\nabove = 0.5", "$5.00"),
    ("[policy]\napprovals = false", "approvals"),
    ("[policy]\nrisk = true", "risk"),
    ("[policy.risk]\nclassify = 'mine'", "classify"),
    ("[policy.risk.levels]\nwipe = 'BAD'", "risk.levels"),
    ("[policy.risk]\naprovers = 2", "did you mean approvers?"),
    ("[policy]\npayee_change = 'block'", "payee_change"),
    ("approver = 'callback'", "approver"),
]


@pytest.mark.parametrize(("text", "says"), BAD_FILES, ids=[text.replace("\n", " ") for text, _ in BAD_FILES])
def test_a_mistake_in_the_file_is_named(tmp_path, text, says):
    file = tmp_path / "x402guard.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file).policy.build()
    assert says in str(caught.value)


def test_the_file_says_what_the_model_says(tmp_path):
    file = tmp_path / "x402guard.toml"
    file.write_text(
        f"""
approver = "queue"
[policy]
payee_change = "refuse"
[policy.risk]
levels = {{ "wipe_*" = "CRITICAL" }}
approvers = 2
[policy.approvals]
above = "$0.50"
timeout_s = 60
[[policy.rules]]
name = "big"
action = "ask"
match = "GET courts.example/*"
kinds = ["payment"]
above = "$0.10"
payees = ["{PAYEE}"]
approvers = 2
[[policy.rules]]
name = "short"
action = "narrow"
ceiling = "$0.05"
output_limit = 500
remove = ["user"]
"""
    )
    settings = load_settings(file)
    assert settings.approver == "queue"
    assert settings.policy.build() == Policy(
        payee_change="refuse",
        risk=Risk(levels={"wipe_*": "CRITICAL"}, approvers=2),
        approvals=Approvals(above="$0.50", timeout_s=60),
        rules=[
            Rule(
                name="big",
                action="ask",
                match="GET courts.example/*",
                kinds={"payment"},
                above="$0.10",
                payees={PAYEE},
                approvers=2,
            ),
            Rule(name="short", action="narrow", ceiling="$0.05", output_limit=500, remove=["user"]),
        ],
    )
    file.write_text("[policy]\nrisk = false")
    assert load_settings(file).policy.build().risk is None
