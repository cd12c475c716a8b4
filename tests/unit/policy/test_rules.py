"""The owner's own rules as data: what each holds for, and that of all that hold the strictest decides."""

import itertools

import pytest

from tests.support.merchant import OTHER_PAYEE, PAYEE
from x402guard import Approvals, Narrow, Policy, Risk, Rule
from x402guard.kernel.rows import HoldKind
from x402guard.money import dollars_to_nanos
from x402guard.policy.judge import judge
from x402guard.policy.rules import judge_rules
from x402guard.policy.steps import whole_routes
from x402guard.policy.verdicts import NO_VERDICT, UNKNOWN_PAYEE, Subject, Verdict, strictest


def payment(amount="$0.10", where="GET courts.example/opinion/42", payee=PAYEE):
    return Subject(HoldKind.PAYMENT, (where,), dollars_to_nanos(amount), payee.lower())


def call(amount="$0.10", model="gpt-4o"):
    return Subject(HoldKind.LLM, ("POST api.openai.com/v1/chat/completions", model), dollars_to_nanos(amount))


def tool(name="delete_user", amount="$0.10"):
    return Subject(HoldKind.TOOL, (name,), dollars_to_nanos(amount))


def deny(**terms):
    return Rule(name="no", action="deny", **terms)


def url(host, path):
    return payment(where=whole_routes("get", host, path)[0])


HOLDS = {
    "all of it": (deny(), payment()),
    "a tool": (deny(match="delete_*"), tool()),
    "a tool in other letters": (deny(match="DELETE_*"), tool("Delete_User")),
    "a tool, whoever serves it": (deny(match="delete_user"), tool("crm.delete_user")),
    "a place": (deny(match="GET courts.example/*"), payment()),
    "a place in other letters": (deny(match="get Courts.Example/opinion/*"), payment()),
    "any method": (deny(match="* courts.example/opinion/42"), payment()),
    "a model": (deny(match="gpt-4o*"), call()),
    "a model's place": (deny(match="POST api.openai.com/*"), call()),
    "a kind": (deny(kinds={"llm"}), call()),
    "one of its kinds": (deny(kinds=["tool", "payment"]), payment()),
    "above": (deny(above="$0.10"), payment("$0.100000001")),
    "above nothing": (deny(above="$0"), payment("$0.000000001")),
    "a payee": (deny(payees=[PAYEE]), payment()),
    "a payee in other letters": (deny(payees={PAYEE.upper().replace("0X", "0x")}), payment()),
    "all that it says": (
        deny(match="GET */*", kinds={"payment"}, above="$0.05", payees={PAYEE, OTHER_PAYEE}),
        payment(),
    ),
    "a folder, written with its slash": (deny(match="GET courts.example/admin/"), url("courts.example", "/admin/")),
    "a path, as it was copied": (deny(match="GET courts.example//a/./b"), url("courts.example", "//a/./b")),
    "an escaped path": (deny(match="GET courts.example/%61dmin"), url("courts.example", "/admin")),
    "an address in brackets": (deny(match="GET [::1]:8402/*"), url("[::1]:8402", "/x")),
    "a name in brackets": (deny(match="rm[all]"), tool("rm[all]")),
    "the end of a long path": (deny(match="GET *.example/*/delete"), url("courts.example", f"/{'a' * 300}/delete")),
    "a pattern with blanks around": (deny(match=" delete_* "), tool()),
    "a payee that is not known": (deny(payees=[PAYEE]), payment(payee=UNKNOWN_PAYEE)),
}
PASSES = {
    "another tool": (deny(match="delete_*"), tool("undelete_user")),
    "another method": (deny(match="POST courts.example/*"), payment()),
    "another host": (deny(match="GET courts.example/*"), payment(where="GET courts.example.evil/x")),
    "another kind": (deny(kinds={"payment"}), tool()),
    "exactly that": (deny(above="$0.10"), payment("$0.10")),
    "another payee": (deny(payees=[OTHER_PAYEE]), payment()),
    "nobody is paid": (deny(payees=[PAYEE]), tool()),
    "a payee that is not known, to be allowed": (
        Rule(name="yes", action="allow", payees=[PAYEE]),
        payment(payee=UNKNOWN_PAYEE),
    ),
    "a paid tool whose arguments are sent already": (
        Rule(name="no", action="narrow", match="serp", remove=["bcc"], above="$0.01"),
        Subject(HoldKind.PAYMENT, ("* serp.example/serp",), dollars_to_nanos("$0.10"), PAYEE, tool="serp"),
    ),
    "one thing that it says is not so": (deny(match="GET */*", kinds={"payment"}, above="$0.50"), payment()),
}


@pytest.mark.parametrize("case", HOLDS)
def test_a_rule_holds_for(case):
    rule, subject = HOLDS[case]
    verdict = judge_rules([rule], subject)
    assert (verdict.action, verdict.rule) == ("deny", "no")
    assert subject.names[0] in verdict.reason


@pytest.mark.parametrize("case", PASSES)
def test_a_rule_says_nothing_where(case):
    rule, subject = PASSES[case]
    assert judge_rules([rule], subject) == NO_VERDICT


ACTIONS = {
    "allow": Rule(name="allow", action="allow"),
    "narrow": Rule(name="narrow", action="narrow", ceiling="$0.01"),
    "ask": Rule(name="ask", action="ask"),
    "deny": Rule(name="deny", action="deny"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(ACTIONS)), ids="-".join)
def test_the_strictest_decides_in_whatever_order_they_stand(order):
    for most in range(1, 5):
        rules = [ACTIONS[name] for name in order[:most]]
        strict = max(order[:most], key=list(ACTIONS).index)
        verdict = judge_rules(rules, payment())
        assert (verdict.action, verdict.rule) == (strict, "" if strict == "allow" else strict)  # it decides nothing
        assert (verdict.narrow is not None) is ("narrow" in order[:most])


@pytest.mark.parametrize("order", list(itertools.permutations((1, 3, 2))))
def test_of_two_that_ask_the_one_that_wants_more_people_decides(order):
    rules = [Rule(name=f"ask-{number}", action="ask", approvers=number) for number in order]
    verdict = judge_rules(rules, payment())
    assert (verdict.action, verdict.rule, verdict.approvers) == ("ask", "ask-3", 3)


def test_a_rule_that_denies_wins_over_one_that_asks_many():
    rules = [Rule(name="ask", action="ask", approvers=10), ACTIONS["deny"]]
    assert judge_rules(rules, payment()).rule == "deny"


def test_of_two_that_narrow_the_lower_of_each_limit_holds_and_what_either_removes_is_gone():
    rules = [
        Rule(name="a", action="narrow", ceiling="$0.05", remove=["user"]),
        Rule(name="b", action="narrow", output_limit=100),
        Rule(name="c", action="narrow", ceiling="$0.020000001", output_limit=200, remove={"seed"}),
    ]
    for order in itertools.permutations(rules):
        verdict = judge_rules(order, call())
        assert verdict.narrow == Narrow(ceiling="$0.020000001", output_limit=100, remove=frozenset({"user", "seed"}))
        assert verdict.narrow.most == dollars_to_nanos("$0.020000001")
        assert verdict.narrowed_by == order[0].name


def test_allow_loosens_neither_risk_nor_sum():
    policy = Policy(rules=[ACTIONS["allow"]], approvals=Approvals(above="$0.05"))
    assert judge(policy, tool("drop_table")).rule == "risk"
    assert judge(policy, tool("delete_user", "$0")).rule == "risk"
    assert judge(policy, tool("get_page")).rule == "approval"
    assert judge(policy, tool("get_page", "$0.05")).action == "allow"


def test_rules_risk_and_sum_together_the_strictest_decides():
    asks = Rule(name="two-people", action="ask", match="delete_*", approvers=2)
    policy = Policy(rules=[asks], approvals=Approvals(above="$0.05"))
    verdict = judge(policy, tool())
    assert (verdict.action, verdict.rule, verdict.approvers, verdict.level) == ("ask", "two-people", 2, "HIGH")
    policy = Policy(rules=[asks], risk=Risk(levels={"delete_*": "CRITICAL"}, approvers=3))
    assert (judge(policy, tool()).rule, judge(policy, tool()).approvers) == ("risk", 3)
    policy = Policy(rules=[asks], risk=Risk(levels={"delete_*": "CRITICAL"}))
    assert judge(policy, tool()).action == "deny"


def test_what_two_verdicts_come_to_is_the_same_both_ways():
    narrow = Narrow(output_limit=5)
    made = [
        Verdict("narrow", "n", "", 0, narrow, "n"),
        Verdict("ask", "a", "", 2),
        Verdict("deny", "d"),
        Verdict(level="HIGH"),
    ]
    for one, other in itertools.permutations(made, 2):
        both, reverse = strictest(one, other), strictest(other, one)
        assert both == reverse
        assert both.approvers == max(one.approvers, other.approvers)
        assert both.narrow == (narrow if narrow in (one.narrow, other.narrow) else None)


def test_a_refusal_says_which_rule_what_and_above_what():
    reason = judge_rules([deny(match="GET courts.example/*", above="$0.05")], payment()).reason
    assert reason == "rule 'no' denies GET courts.example/opinion/42 above $0.05"


def test_a_thousand_rules_are_judged_and_the_last_counts():
    rules = [Rule(name=str(number), action="allow", match=f"tool-{number}") for number in range(1_000)]
    assert judge(Policy(rules=[*rules, deny(match="delete_*")]), tool()).rule == "no"
