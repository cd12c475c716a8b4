"""A person is asked before anything is held, for every kind of step, by one or several; then all checks run again."""

import threading
from decimal import Decimal

import pytest

from tests.support.llm_provider import SYNC, Provider, ask, metered
from tests.support.merchant import OTHER_PAYEE, PAYEE, URL, Shop, accept, client, make_guard, required
from x402guard import (
    Answer,
    Approvals,
    BudgetExhausted,
    NeedsReview,
    PaymentRefused,
    Policy,
    Rule,
    SessionClosed,
    SessionTripped,
)

ALWAYS = Policy(rules=[Rule(name="ask", action="ask")], breaker=None)


def asks(people=1, **more):
    return Policy(rules=[Rule(name="ask", action="ask", approvers=people)], breaker=None, **more)


def pays(session):
    return client(session, Shop()).get(URL)


def thinks(session):
    return SYNC.post(session, Provider(session))


def charges(session):
    return session.charge("serp", "$0.01", arguments={"q": "Roe"})


def holds(session):
    with session.hold("serp", up_to="$0.01") as job:
        job.capture("$0.01")


def decorated(session):
    return session.tool(cost="$0.01", name="serp")(lambda: "found")()


def free(session):
    shown = {"mode": "raw", "render": lambda result, _mode: result}
    return session.tool(name="serp", **shown)(lambda: "found")()


STEPS = [pays, thinks, charges, holds, decorated, free]
every_step = pytest.mark.parametrize("step", STEPS)


def said(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "approval"]


def authorized(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "authorize"]


@every_step
@pytest.mark.parametrize("allow", [True, False])
def test_nothing_is_held_while_a_person_thinks_and_then_it_is_as_they_say(ledger_url, step, allow):
    seen = []

    def person(request):
        seen.append((request, session.held, session.spent, authorized(session)))
        return allow

    with metered(ledger_url, guard={"policy": ALWAYS, "approver": person}) as session:
        if allow:
            step(session)
            assert [event["rule"] for event in authorized(session)] == ([] if step is free else ["ask"])
        else:
            with pytest.raises(PaymentRefused) as caught:
                step(session)
            assert (caught.value.rule, caught.value.session) == ("approval", session.id)
            assert (session.spent, session.held, authorized(session)) == (0, 0, [])
        [(request, *books)] = seen
        assert books == [0, 0, []]
        assert (request.session, request.rule, request.approvers, request.timeout_s) == (session.id, "ask", 1, 300)
        [event] = said(session)
        assert (event["allowed"], event["what"], event["rule"]) == (allow, request.what, "ask")


def test_a_person_is_shown_what_it_is_about(ledger_url):
    shown = {}
    with metered(ledger_url, guard={"policy": ALWAYS, "approver": lambda r: not shown.update({r.kind: r})}) as session:
        for step in (pays, thinks, charges):
            step(session)
    assert list(shown) == ["payment", "llm", "tool"]
    paid, thought, used = shown.values()
    assert (paid.what, paid.amount, paid.payee, paid.network) == (
        "GET courts.example/opinion/42",
        Decimal("0.01"),
        PAYEE.lower() if paid.payee.islower() else PAYEE,
        "eip155:84532",
    )
    assert thought.what == "POST api.openai.com/v1/chat/completions"
    assert thought.amount > Decimal("0.001")
    assert (used.what, used.amount, used.payee, used.arguments) == ("serp", Decimal("0.01"), "", {"q": "Roe"})
    assert len({paid.id, thought.id, used.id}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        False,
        None,
        1,
        "yes",
        "True",
        [True],
        Answer.no("no"),
        Answer(True),
        Answer(True, ("",)),
        Answer(True, (" ",)),
        Answer("yes", ("me",)),
        Answer(1, ("me",)),
        Answer(False, ("me",)),
        (True, "me"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("several", [False, True])
def test_only_a_yes_is_a_yes(answer, several):
    approver = [lambda _: answer] if several else lambda _: answer
    with make_guard(policy=ALWAYS, approver=approver) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PaymentRefused) as caught:
            charges(session)
        assert caught.value.rule == "approval"
        assert session.spent == 0


@pytest.mark.parametrize("error", [RuntimeError("secret"), TimeoutError(), KeyError("x"), SystemExit(1)], ids=repr)
def test_an_approver_that_fails_has_allowed_nothing(ledger_url, error):
    def person(_request):
        raise error

    with make_guard(ledger_url, policy=ALWAYS, approver=person) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises((PaymentRefused, SystemExit)) as caught:
            charges(session)
        assert "secret" not in str(caught.value)
        assert (session.spent, session.held) == (0, 0)


def test_silence_is_a_no(ledger_url):
    gone = threading.Event()
    policy = asks(approvals=Approvals(timeout_s=1))
    with make_guard(ledger_url, policy=policy, approver=lambda _: gone.wait(30)) as guard:
        with guard.session("s", budget="$1") as session:
            with pytest.raises(PaymentRefused, match="in time"):
                charges(session)
            gone.set()  # a yes that comes too late is none
            assert (session.spent, session.held) == (0, 0)
            assert [event["allowed"] for event in said(session)] == [False]


# ---- several people ----


def saying(allowed, name):
    return lambda _request: Answer(allowed, (name,))


YES = {name: saying(True, name) for name in ("ann", "bob", "eve", "Ann", " ANN ")}
NO = {"dan": saying(False, "dan")}
PEOPLE = YES | NO


@pytest.mark.parametrize(
    ("people", "wanted", "allowed"),
    [
        (["ann"], 1, True),
        (["ann", "bob"], 2, True),
        (["ann", "ann", "bob"], 2, True),
        (["ann", "bob", "eve"], 3, True),
        (["ann"], 2, False),
        (["ann", "ann"], 2, False),
        (["ann", "Ann"], 2, False),
        (["ann", " ANN "], 2, False),
        (["ann", "bob"], 3, False),
        (["dan", "ann", "bob"], 2, False),
        (["ann", "dan", "bob"], 2, False),
        (["dan"], 1, False),
    ],
)
def test_so_many_different_people_have_to_say_yes(ledger_url, people, wanted, allowed):
    approver = [PEOPLE[name] for name in people]
    with make_guard(ledger_url, policy=asks(wanted), approver=approver) as guard:
        with guard.session("s", budget="$1") as session:
            if allowed:
                charges(session)
                assert set(said(session)[0]["by"]) == set(people)
            else:
                with pytest.raises(PaymentRefused, match="approval"):
                    charges(session)
                assert session.spent == 0


@pytest.mark.parametrize(
    "answer",
    [True, Answer(True, ("ann",)), Answer(True, ("ann", "Ann ")), Answer(True, "ann"), Answer(True, ("ann", None))],
    ids=repr,
)
def test_one_person_is_not_two_however_it_is_said(answer):
    with make_guard(policy=asks(2), approver=lambda _: answer) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PaymentRefused, match="2 different approvers"):
            charges(session)
        assert session.spent == 0


def test_nobody_is_asked_who_is_not_needed_any_more():
    asked = []
    approvers = [lambda _, n=n: not asked.append(n) and Answer(True, (n,)) for n in ("ann", "bob", "eve")]
    with make_guard(policy=asks(2), approver=approvers) as guard, guard.session("s", budget="$1") as session:
        charges(session)
    assert asked == ["ann", "bob"]


# ---- what is not even asked ----


@pytest.mark.parametrize("step", [pays, thinks, charges, holds])
def test_what_does_not_fit_is_not_asked_about(ledger_url, step):
    asked = []
    with metered(ledger_url, budget="$0.0001", guard={"policy": ALWAYS, "approver": asked.append}) as session:
        with pytest.raises(BudgetExhausted):
            step(session)
        assert asked == []


def test_up_to_the_sum_nobody_is_asked(ledger_url):
    asked = []
    policy = Policy(approvals=Approvals(above="$0.50"), per_payment_cap="$2")
    with make_guard(ledger_url, policy=policy, approver=lambda r: not asked.append(r.amount)) as guard:
        with guard.session("s", budget="$5") as session:
            for amount in ("$0.50", "$0.500000001"):
                session.charge("film", amount)
            for units in (500_000, 500_001):
                client(session, Shop(required(accept(units)))).get(f"{URL}/{units}")
    assert asked == [Decimal("0.500000001"), Decimal("0.500001")]


def test_without_anybody_to_ask_it_is_denied_and_says_what_to_do():
    with make_guard(policy=ALWAYS) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(NeedsReview, match="approver=") as caught:
            charges(session)
        assert caught.value.rule == "needs_review"


# ---- a yes is for one call ----


@every_step
def test_each_call_is_asked_about_anew(step):
    asked = []
    with metered(guard={"policy": ALWAYS, "approver": lambda r: not asked.append(r.id)}) as session:
        step(session)
        step(session)
        assert len(asked) == 2


def test_another_price_payee_url_or_argument_is_another_question():
    asked = []
    with make_guard(policy=ALWAYS, approver=lambda r: not asked.append(r.id)) as guard:
        with guard.session("s", budget="$1") as session:
            for terms in (accept(10_000), accept(10_001), accept(10_000, payTo=OTHER_PAYEE)):
                client(session, Shop(required(terms))).get(URL)
            for url in (f"{URL}?page=2", f"{URL}/2"):
                client(session, Shop()).get(url)
            client(session, Shop()).post(URL, content=b"x")
            client(session, Shop()).post(URL, content=b"y")
            for arguments in ({"q": 1}, {"q": 2}, {"p": 1}, None):
                session.charge("serp", "$0.01", arguments=arguments)
            session.charge("serp", "$0.02", arguments={"q": 1})
        with guard.session("t", budget="$1") as other:
            other.charge("serp", "$0.01", arguments={"q": 1})
    assert len(set(asked)) == len(asked) == 13


def test_the_same_question_has_the_same_id_after_a_restart(tmp_path):
    asked = []
    for _ in range(2):
        with make_guard(
            f"sqlite:///{tmp_path / 'b.db'}", policy=ALWAYS, approver=lambda r: not asked.append(r.id)
        ) as guard:
            with guard.session("s", budget="$1", id="run") as session:
                charges(session)
    assert asked[0] == asked[1]
    assert len(asked) == 2


def test_what_is_signed_is_what_was_shown(ledger_url):
    shop, shown = Shop(terms=required(accept(20_000), accept(10_000, payTo=OTHER_PAYEE))), []

    def person(request):
        shown.append((int(request.amount * 1_000_000), request.payee.lower()))
        shop.terms = required(accept(900_000))
        return True

    with make_guard(ledger_url, policy=ALWAYS, approver=person) as guard, guard.session("s", budget="$1") as session:
        client(session, shop).get(URL)
        assert (
            [(amount, payee.lower()) for _, amount, payee in shop.payments] == shown == [(10_000, OTHER_PAYEE.lower())]
        )


def test_a_call_that_would_cost_more_than_was_shown_is_asked_about_again(ledger_url):
    """A limit is chosen by what is left; while a person thinks, somebody else may give something back."""
    shown = []
    with metered(ledger_url, budget="$0.40", guard={"policy": asks_llm(), "approver": lambda r: person(r)}) as session:
        big = session.hold("render", up_to="$0.30")
        big.__enter__()

        def person(request):
            shown.append(request.amount)
            if len(shown) == 1:
                big.void()
                big.__exit__(None, None, None)
            return True

        provider = Provider(session)
        SYNC.post(session, provider, ask(max_completion_tokens=None))
        assert provider.held[0] <= shown[-1], "more is held than anybody has allowed"


def asks_llm():
    return Policy(rules=[Rule(name="ask", action="ask", kinds=["llm"])], breaker=None)


# ---- the rules run again ----


def spends(session):
    session.record_usage("openai", "gpt-4o", {"input_tokens": 398_000})  # $0.995


def trips(session):
    session.trip("enough")


def closes(session):
    session.close()


@pytest.mark.parametrize("step", [pays, thinks, charges, holds, decorated])
@pytest.mark.parametrize(
    ("meanwhile", "error"), [(spends, BudgetExhausted), (trips, SessionTripped), (closes, SessionClosed)]
)
def test_what_happened_while_a_person_thought_counts(ledger_url, step, meanwhile, error):
    shop = Shop()
    approver = {"policy": ALWAYS, "approver": lambda _: meanwhile(session) is None or True}
    with metered(ledger_url, budget="$0.996", guard=approver) as session:
        with pytest.raises(error):
            step(session) if step is not pays else client(session, shop).get(URL)
        assert (shop.payments, session.held) == ([], 0)
        assert session.spent == (Decimal("0.995") if meanwhile is spends else 0)


def test_a_rule_that_holds_by_now_holds_after_the_yes():
    def person(_request):
        if not seen:
            seen.append(1)
            charges(session)
        return True

    seen, policy = [], asks(max_steps=1)
    with make_guard(policy=policy, approver=person) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PaymentRefused, match="max_steps"):
            charges(session)
        assert session.spent == Decimal("0.01")
