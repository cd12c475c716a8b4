"""The owner's rules on the wire, on LLM calls and on tools; and that what is narrowed is what is held, sent, signed."""

from decimal import Decimal

import pytest

from tests.support.llm_provider import GEMINI, SYNC, Answer, Provider, ask, both_modes, every_way, metered
from tests.support.merchant import OTHER_PAYEE, PAYEE, URL, Shop, accept, client, make_guard, required
from x402guard import (
    Approvals,
    BudgetExhausted,
    Loop,
    LoopDetected,
    Policy,
    PolicyDenied,
    Rule,
)

RESPONSES = "https://api.openai.com/v1/responses"
MESSAGES = "https://api.anthropic.com/v1/messages"
FIXED = "https://api.openai.com/v1/images"
HI = [{"role": "user", "content": "hi"}]


def deny(**terms):
    return Rule(name="no", action="deny", **terms)


def narrow(**terms):
    return Rule(name="less", action="narrow", **terms)


def policy(*rules, **more):
    return Policy(rules=rules, breaker=None, **more)


def held(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "authorize"]


def refusals(session):
    return [(row["rule"], row["count"]) for row in session.report().to_dict()["refusals"]]


def unspent(session):
    assert (session.spent, session.held, held(session)) == (0, 0, [])


# ---- over the wire ----


@pytest.mark.parametrize(
    "rule",
    [
        deny(),
        deny(match="GET courts.example/*"),
        deny(kinds=["payment"]),
        deny(above="$0.009"),
        deny(payees=[PAYEE.lower()]),
        Rule(name="no", action="narrow", ceiling="$0.009999999"),
    ],
    ids=["all", "place", "kind", "above", "payee", "narrow"],
)
def test_a_payment_is_refused_by_its_rule_and_nothing_is_signed(ledger_url, rule):
    shop = Shop()
    with make_guard(ledger_url, policy=policy(rule)) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied, match="'no'") as caught:
            client(session, shop).get(URL)
        assert (caught.value.rule, caught.value.requested) == ("no", Decimal("0.01"))
        assert shop.payments == []
        unspent(session)
        assert refusals(session) == [("no", 1)]


@pytest.mark.parametrize(
    "rule",
    [
        deny(match="POST */*"),
        deny(kinds=["llm", "tool"]),
        deny(above="$0.01"),
        deny(payees=[OTHER_PAYEE]),
        narrow(ceiling="$0.01"),
        narrow(output_limit=1, remove=["amount"]),
        Rule(name="a", action="allow"),
    ],
    ids=["method", "kinds", "above", "payee", "ceiling", "remove", "allow"],
)
def test_what_no_rule_holds_for_is_paid_as_it_was_offered(ledger_url, rule):
    shop = Shop()
    with make_guard(ledger_url, policy=policy(rule)) as guard, guard.session("s", budget="$1") as session:
        assert client(session, shop).get(URL).status_code == 200
        assert [amount for _, amount, _ in shop.payments] == [10_000]


def test_an_offer_that_a_rule_denies_leaves_the_others(ledger_url):
    shop = Shop(terms=required(accept(5_000, payTo=OTHER_PAYEE), accept(10_000)))
    with make_guard(ledger_url, policy=policy(deny(payees=[OTHER_PAYEE]))) as guard:
        with guard.session("s", budget="$1") as session:
            client(session, shop).get(URL)
            assert [payee.lower() for _, _, payee in shop.payments] == [PAYEE.lower()]


def test_the_strictest_of_several_is_in_the_refusal_and_the_report(ledger_url):
    rules = [Rule(name="ask", action="ask"), Rule(name="allow", action="allow"), deny()]
    with make_guard(ledger_url, policy=policy(*rules), approver=lambda _: True) as guard:
        with guard.session("s", budget="$1") as session:
            for use in (lambda: client(session, Shop()).get(URL), lambda: session.charge("serp", "$0.01")):
                with pytest.raises(PolicyDenied) as caught:
                    use()
                assert caught.value.rule == "no"
            assert refusals(session) == [("no", 2)]


# ---- on LLM calls ----


@every_way
@pytest.mark.parametrize("match", ["POST api.openai.com/*", "gpt-4*", "*"])
def test_an_llm_call_is_refused_unsent(way, match):
    with metered(guard={"policy": policy(deny(match=match, kinds=["llm"]))}) as session:
        provider = Provider(session)
        with pytest.raises(PolicyDenied) as caught:
            way.post(session, provider)
        assert (caught.value.rule, provider.requests) == ("no", [])
        unspent(session)


BODIES = {
    "chat": (
        "https://api.openai.com/v1/chat/completions",
        ask(user="me", n=2),
        lambda sent: sent["max_completion_tokens"],
    ),
    "chat, both fields": (
        "https://api.openai.com/v1/chat/completions",
        ask(user="me", max_tokens=90),
        lambda sent: max(sent["max_completion_tokens"], sent["max_tokens"]),
    ),
    "chat without a limit": (
        "https://api.openai.com/v1/chat/completions",
        ask(user="me", max_completion_tokens=None),
        lambda sent: sent["max_completion_tokens"],
    ),
    "messages": (
        MESSAGES,
        {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": HI, "user": "me"},
        lambda sent: sent["max_tokens"],
    ),
    "gemini": (
        f"{GEMINI}:generateContent",
        {
            "contents": [{"parts": [{"text": "hi"}]}],
            "generationConfig": {"maxOutputTokens": 100, "topK": 3},
            "user": "me",
        },
        lambda sent: sent["generationConfig"]["maxOutputTokens"],
    ),
    "gemini without a limit": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "user": "me"},
        lambda sent: sent["generationConfig"]["maxOutputTokens"],
    ),
    "responses": (
        RESPONSES,
        {"model": "gpt-4o", "input": "hi", "max_output_tokens": 100, "user": "me"},
        lambda sent: sent["max_output_tokens"],
    ),
    "deepseek": (
        "https://api.deepseek.com/chat/completions",
        {"model": "deepseek-chat", "messages": HI, "max_completion_tokens": 7, "max_tokens": 100, "user": "me"},
        lambda sent: sent["max_tokens"],
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_an_output_limit_and_a_field_removed_are_what_is_sent_and_held(ledger_url, body):
    url, asked, limit_of = BODIES[body]
    rule = narrow(output_limit=40, remove=["user"], kinds=["llm"])
    with metered(ledger_url, guard={"policy": policy(rule)}) as session:
        provider = Provider(session, Answer.of({}))
        SYNC.post(session, provider, dict(asked), url=url)
        [sent] = provider.bodies
        [authorized] = held(session)
        assert limit_of(sent) == 40
        assert "user" not in sent
        kept = {name: value for name, value in sent.items() if name in asked and type(value) is not int}
        assert set(asked) - {"user"} <= set(sent)
        assert all(asked[name] == value for name, value in kept.items() if name != "generationConfig")
        assert authorized["ceiling"]["output_tokens"] == 40
        assert provider.held == [Decimal(authorized["amount"])]
        assert int(provider.requests[0].headers["content-length"]) == len(provider.requests[0].content)
        assert authorized["narrowed_by"] == "less"


@both_modes
@pytest.mark.parametrize(
    "rule", [{"output_limit": 500}, {"remove": ["seed"]}, {"ceiling": "$1"}], ids=lambda r: "-".join(r)
)
def test_what_is_small_enough_goes_out_byte_for_byte(way, rule):
    raw = b'{ "model":"gpt-4o","messages":[{"role":"user","content":"hi"}],\n "max_completion_tokens":100}'
    with metered(guard={"policy": policy(narrow(**rule))}) as session:
        provider = Provider(session)
        way.post(session, provider, raw)
        assert [request.content for request in provider.requests] == [raw]


@pytest.mark.parametrize("asked", [2_000, None])
def test_a_ceiling_of_dollars_lowers_the_output_limit_until_it_fits(ledger_url, asked):
    with metered(ledger_url, guard={"policy": policy(narrow(ceiling="$0.015"))}) as session:
        provider = Provider(session)
        SYNC.post(session, provider, ask(max_completion_tokens=asked))
        [amount], [sent] = provider.held, provider.bodies
        assert Decimal("0.0149") < amount <= Decimal("0.015")
        assert sent["max_completion_tokens"] == held(session)[0]["ceiling"]["output_tokens"]
        assert 1_024 <= sent["max_completion_tokens"] < 1_500  # at ten dollars a million


def test_a_ceiling_lowers_a_small_limit_too():
    with metered(guard={"policy": policy(narrow(ceiling="$0.0095"))}) as session:
        provider = Provider(session)
        SYNC.post(session, provider, ask(max_completion_tokens=1_000))
        assert 900 <= provider.bodies[0]["max_completion_tokens"] < 950


def test_a_ceiling_that_pays_for_next_to_nothing_refuses_unsent(ledger_url):
    with metered(ledger_url, guard={"policy": policy(narrow(ceiling="$0.000001"))}) as session:
        provider = Provider(session)
        with pytest.raises(PolicyDenied) as caught:
            SYNC.post(session, provider)
        assert (caught.value.rule, caught.value.available) == ("less", Decimal("0.000001"))
        assert provider.requests == []
        unspent(session)


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
def test_a_limit_that_one_rule_removes_and_another_sets_is_set(field):
    rules = narrow(output_limit=40), Rule(name="gone", action="narrow", remove=[field])
    with metered(guard={"policy": policy(*rules)}) as session:
        provider = Provider(session)
        SYNC.post(session, provider, ask(**{"max_completion_tokens": None, field: 100}))
        assert provider.bodies[0]["max_completion_tokens"] == 40
        assert held(session)[0]["ceiling"]["output_tokens"] == 40


@pytest.mark.parametrize("rule", [narrow(ceiling="$0.03"), deny(above="$0.03")], ids=["narrow", "deny"])
def test_a_fixed_price_is_a_price_and_is_refused(ledger_url, rule):
    with metered(ledger_url, fixed_prices={FIXED: "$0.04"}, guard={"policy": policy(rule)}) as session:
        provider = Provider(session, Answer.of({}))
        with pytest.raises(PolicyDenied) as caught:
            SYNC.post(session, provider, {"prompt": "a cat"}, url=FIXED)
        assert (caught.value.rule, provider.requests) == (rule.name, [])


def test_a_field_is_removed_from_a_call_of_a_fixed_price_too():
    with metered(fixed_prices={FIXED: "$0.04"}, guard={"policy": policy(narrow(remove=["user"]))}) as session:
        provider = Provider(session, Answer.of({}))
        SYNC.post(session, provider, {"prompt": "a cat", "user": "me"}, url=FIXED)
        assert provider.bodies == [{"prompt": "a cat"}]


def test_what_was_narrowed_because_it_cost_too_much_is_in_the_journal(ledger_url):
    rule = narrow(output_limit=40, above="$0.0008")
    with metered(ledger_url, guard={"policy": policy(rule)}) as session:
        SYNC.post(session, Provider(session))
        assert held(session)[0]["narrowed_by"] == "less"
    with make_guard(ledger_url, policy=policy(narrow(ceiling="$0.10", above="$0.50"))) as guard:
        with guard.session("t", budget="$5") as session, session.hold("render", up_to="$1") as job:
            job.void()
        assert held(session)[0]["narrowed_by"] == "less"


def test_two_calls_that_a_rule_makes_the_same_are_no_loop():
    with metered(guard={"policy": policy(narrow(remove=["user"]), loop=Loop(calls=3))}) as session:
        provider = Provider(session)
        for number in range(5):
            SYNC.post(session, provider, ask(user=str(number)))
        with pytest.raises(LoopDetected):
            for _ in range(5):
                SYNC.post(session, provider, ask(user="me"))


# ---- on tools ----


def test_a_tool_is_refused_in_every_form_and_never_runs(ledger_url):
    ran = []
    with (
        make_guard(ledger_url, policy=policy(deny(match="wipe*"))) as guard,
        guard.session("s", budget="$1") as session,
    ):

        @session.tool(cost="$0.01")
        def wipe(disk):
            ran.append(disk)

        @session.tool(cost="$0")
        def wipe_free(disk):
            ran.append(disk)

        @session.tool(mode="raw", render=lambda result, _mode: str(result))
        def wipe_shown(disk):
            ran.append(disk)

        forms = [
            lambda: wipe(1),
            lambda: wipe_free(1),
            lambda: wipe_shown(1),
            lambda: session.charge("wipe", "$0"),
            lambda: session.hold("wipe", up_to="$0.01").__enter__(),
        ]
        for form in forms:
            with pytest.raises(PolicyDenied) as caught:
                form()
            assert caught.value.rule == "no"
        assert ran == []
        unspent(session)


def test_a_hold_is_lowered_and_a_fixed_cost_is_refused(ledger_url):
    with make_guard(ledger_url, policy=policy(narrow(ceiling="$0.10"))) as guard:
        with guard.session("s", budget="$0.10") as session:
            with session.hold("render", up_to="$2.00") as job:
                assert (job.amount, session.held) == (Decimal("0.10"), Decimal("0.10"))
                job.capture("$0.01")
            with pytest.raises(PolicyDenied) as caught:
                session.charge("film", "$0.11")
            assert (caught.value.rule, caught.value.available) == ("less", Decimal("0.10"))
            with pytest.raises(BudgetExhausted):
                session.charge("film", "$0.10")


@pytest.mark.parametrize("strict", [{"approvals": Approvals(above="$0.50")}, {"deny": "$0.50"}], ids=["sum", "rule"])
def test_what_is_narrowed_is_what_is_checked(ledger_url, strict):
    rules = [narrow(ceiling="$0.10")] + ([deny(above=strict["deny"])] if "deny" in strict else [])
    more = {"approvals": strict["approvals"]} if "approvals" in strict else {}
    with make_guard(ledger_url, policy=policy(*rules, **more)) as guard, guard.session("s", budget="$5") as session:
        with session.hold("render", up_to="$2.00") as job:
            assert job.amount == Decimal("0.10")
            job.void()


def test_a_result_is_cut_to_the_output_limit(ledger_url):
    with make_guard(ledger_url, policy=policy(narrow(output_limit=5))) as guard:
        with guard.session("s", budget="$1") as session:
            read = session.tool(cost="$0", mode="raw", render=lambda result, _mode: result, name="read")(
                lambda: "word " * 900
            )
            assert 0 < len(read()) < 60
