"""Shadow mode: what a rule refuses in an enforcing guard passes here, and the report says by which rule and for how much."""

import logging
import time
from decimal import Decimal
from itertools import permutations

import httpx
import pytest

from tests.support.llm_provider import SYNC, Provider, ask, metered
from tests.support.merchant import OTHER_PAYEE, URL, Shop, accept, b64, client, make_guard, required
from x402guard import (
    Approvals,
    Breaker,
    BudgetExhausted,
    ConfigError,
    GuardedTransport,
    Loop,
    LoopDetected,
    Owner,
    Policy,
    PolicyDenied,
    Risk,
    Rule,
    SessionClosed,
    SessionTripped,
    Spike,
    Velocity,
    X402GuardError,
)

CALM = {"breaker": None, "loop": None}


def pay(session, shop, number=0, host="courts.example"):
    return client(session, shop).get(f"https://{host}/opinion/{number}")


def pays(times=1, amount=10_000, **terms):
    def go(session):
        shop = Shop(lambda request: required(accept(amount, **terms), url=str(request.url)))
        for number in range(times):
            assert pay(session, shop, number).status_code == 200

    return go


def pays_again(session):
    shop = Shop()
    for _ in range(2):
        pay(session, shop)


def pays_another(session):
    payees = iter([accept(), accept(payTo=OTHER_PAYEE)])
    shop = Shop(lambda request: required(next(payees), url=str(request.url)))
    for number in range(2):
        pay(session, shop, number)


def pays_elsewhere(session):
    payees = iter([accept(), accept(payTo=OTHER_PAYEE)])
    shop = Shop(lambda request: required(next(payees), url=str(request.url)))
    for number in range(2):
        pay(session, shop, host=f"shop-{number}.example")


def pays_look_alike(session):
    shop = Shop(lambda request: required(url=str(request.url)))
    pay(session, shop, host="weather.example")
    pay(session, shop, host="vveather.example")


def redirected(session):
    def terms(request):
        if request.url.host == "courts.example":
            return httpx.Response(302, headers={"location": "https://other.example/x"})
        return required(url=str(request.url))

    client(session, Shop(terms), follow_redirects=True).get(URL)


def charges(times=1, amount="$0.01", tool="serp", **arguments):
    def go(session):
        for _ in range(times):
            session.charge(tool, amount, arguments=arguments or None)

    return go


def spikes(session):
    charges()(session)
    charges(amount="$0.10", q="dear")(session)


def uses_free(session):
    session.tool(cost="$0.00", name="send_email")(lambda: "sent")()


def reports_states(session):
    for _ in range(4):
        session.step(state="the same")


def finishes(session):
    assert session.finish("done", confidence=0.1)


def narrowed(session):
    assert session.tool(cost="$0.05", name="serp")(lambda to: to)("kept") == "kept"


ROWS = [
    ("networks", Policy(networks=["eip155:8453"], **CALM), pays(), {"unsafe_no_chain": True}),
    ("hosts", Policy(hosts=["other.example"], **CALM), pays(), {}),
    ("payees", Policy(payees=[OTHER_PAYEE], **CALM), pays(), {}),
    ("assets", Policy(assets=["EURC"], **CALM), pays(), {}),
    ("schemes", Policy(schemes=["upto"], **CALM), pays(), {}),
    ("per_payment_cap", Policy(per_payment_cap="$0.001", **CALM), pays(), {}),
    ("redirect", Policy(**CALM), redirected, {}),
    (
        "resource_mismatch",
        Policy(resource_mismatch="refuse", **CALM),
        lambda s: pay(s, Shop(), host="another.example"),
        {},
    ),
    ("payee_change", Policy(payee_change="refuse", **CALM), pays_another, {}),
    ("look_alike_host", Policy(**CALM), pays_look_alike, {}),
    ("repeat", Policy(repeat="refuse", **CALM), pays_again, {}),
    ("no", Policy(rules=[Rule(name="no", action="deny")], **CALM), pays(), {}),
    ("no", Policy(rules=[Rule(name="no", action="deny")], **CALM), charges(), {}),
    ("no", Policy(rules=[Rule(name="no", action="narrow", ceiling="$0.01")], **CALM), narrowed, {}),
    ("no", Policy(rules=[Rule(name="no", action="narrow", remove=["to"])], **CALM), narrowed, {}),
    ("needs_review", Policy(approvals=Approvals(above="$0.001"), **CALM), pays(), {}),
    ("needs_review", Policy(risk=Risk(), **CALM), uses_free, {}),
    ("approval", Policy(approvals=Approvals(above="$0.001"), **CALM), pays(), {"approver": lambda _: False}),
    ("loop_detected", Policy(loop=Loop(calls=2), breaker=None), charges(3, q="same"), {}),
    ("loop_detected", Policy(loop=Loop(calls=2), breaker=None), reports_states, {}),
    ("spend_spike", Policy(spike=Spike(action="trip", window=2, min_step="$0.01"), **CALM), spikes, {}),
    ("new_payees_per_day", Policy(velocity=Velocity(new_payees_per_day=1), **CALM), pays_elsewhere, {}),
    ("needs_review", Policy(min_confidence=0.5, **CALM), finishes, {}),
]


def ids(row):
    return row if isinstance(row, str) else ""


@pytest.mark.parametrize(("rule", "policy", "act", "more"), ROWS, ids=ids)
def test_what_a_rule_refuses_passes_in_shadow_mode_and_is_reported(ledger_url, rule, policy, act, more):
    with make_guard(policy=policy, **more) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(X402GuardError) as refused:
            act(session)
        assert refused.value.rule == rule
        assert session.report().to_dict()["shadow"] is None
    with make_guard(ledger_url, policy=policy, mode="shadow", **more) as guard:
        with guard.session("s", budget="$1.00") as session:
            act(session)
        report = session.report()
        rows = {row["rule"]: row for row in report.to_dict()["shadow"]["by_rule"]}
        assert refused.value.rule in rows
        assert report.to_dict()["refusals"] == []
        assert f"× {refused.value.rule}, $" in report.to_text()


def shadow(ledger="memory://", policy=None, **more):
    return make_guard(ledger, policy=policy or Policy(**CALM), mode="shadow", **more)


def test_the_report_ends_with_what_the_rules_would_have_refused():
    rules = [Rule(name="no_search", action="deny", match="serp"), Rule(name="ask", action="ask", above="$0.05")]
    with shadow(policy=Policy(rules=rules, per_payment_cap="$0.005", **CALM)) as guard:
        with guard.session("s", budget="$1.00") as session:
            charges(2, "$0.02")(session)
            charges(1, "$0.06", tool="maps")(session)
            charges(1, "$0.01", tool="maps")(session)
            pay(session, Shop())
        report = session.report()
    assert report.to_dict()["shadow"]["calls"] == 4
    said = [" ".join(f"{remark.name} {remark.words}".split()) for remark in report.view.remarks]
    last = said[said.index("shadow with these rules 4 calls, $0.11, would have been refused:") + 1 :]
    assert last[0].startswith("2 × no_search, $0.04, the last: ")
    assert last[1].startswith("1 × needs_review, $0.06: ")
    assert last[2].startswith("1 × per_payment_cap, $0.01: $0.01 is above policy.per_payment_cap")
    assert last[2] in " ".join(report.to_text().split())


def test_a_budget_refuses_as_ever_and_counts_no_call_of_the_shadow():
    with shadow(policy=Policy(rules=[Rule(name="no", action="deny")], wait_for_budget_s=0, **CALM)) as guard:
        with guard.session("s", budget="$0.03") as session:
            charges(3)(session)
            with pytest.raises(BudgetExhausted):
                charges()(session)
            assert (session.spent, session.report().to_dict()["shadow"]["calls"]) == (Decimal("0.03"), 3)
            assert [row["rule"] for row in session.report().to_dict()["refusals"]] == ["budget"]


def test_what_is_no_rule_refuses_as_ever(tmp_path):
    stop = tmp_path / "stop"
    with shadow(kill_file=stop) as guard:
        with guard.session("s", budget="$1.00") as session:
            session.trip("the owner says so")
            with pytest.raises(SessionTripped):
                charges()(session)
        with pytest.raises(SessionClosed):
            charges()(session)
        with guard.session("quoted", budget="$1.00") as session, pytest.raises(PolicyDenied, match="price_above_quote"):
            client(session, Shop()).get(URL, extensions={"max_price": "$0.001"})
        with guard.session("stopped", budget="$1.00") as session:
            stop.touch()
            with pytest.raises(SessionTripped):
                charges()(session)


def test_no_approver_is_asked():
    asked = []
    policy = Policy(approvals=Approvals(above="$0.001"), min_confidence=0.9, **CALM)
    with shadow(policy=policy, approver=asked.append) as guard, guard.session("s", budget="$1.00") as session:
        pays()(session)
        charges()(session)
        finishes(session)
    assert asked == []
    assert [row["rule"] for row in session.report().to_dict()["shadow"]["by_rule"]] == ["approval", "min_confidence"]


def test_what_would_trip_the_run_is_an_event_and_trips_nothing():
    policy = Policy(loop=Loop(failures=2), breaker=None)
    with shadow(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        shop = Shop(lambda request: required(url=str(request.url)), paid=lambda *_: httpx.Response(500))
        for number in range(3):
            assert pay(session, shop, number).status_code == 500
        assert session.report().to_dict()["state"] == "open"
        events = [event["rule"] for event in session.report().to_dict()["events"] if event["event"] == "would_trip"]
    assert events == ["loop_detected", "loop_detected"]


def test_an_offer_that_the_rules_allow_is_paid_before_a_cheaper_one_that_they_refuse():
    shop = Shop(required(accept(5_000, payTo=OTHER_PAYEE), accept(10_000)))
    policy = Policy(payees=[accept()["payTo"]], **CALM)
    with shadow(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        client(session, shop).get(URL)
        assert [payee for _, _, payee in shop.payments] == [accept()["payTo"]]
        assert session.report().to_dict()["shadow"] is None


def test_an_llm_call_is_sent_as_it_is_though_a_rule_would_deny_or_narrow_it():
    rules = [
        Rule(name="no", action="deny"),
        Rule(name="less", action="narrow", output_limit=16, remove=["temperature"]),
    ]
    with metered(guard={"policy": Policy(rules=rules, **CALM), "mode": "shadow"}) as session:
        provider = Provider(session)
        sent = ask(temperature=0.5, max_tokens=100)
        answer, _ = SYNC.post(session, provider, sent)
        assert answer.status_code == 200
        assert provider.bodies[0]["max_tokens"] == 100
        assert provider.bodies[0]["temperature"] == 0.5
        (row,) = session.report().to_dict()["shadow"]["by_rule"]
    assert (row["rule"], row["calls"], Decimal(row["amount"])) == ("no", 1, session.spent)


def test_a_call_that_waits_for_no_place_at_a_host():
    with shadow(policy=Policy(**CALM)) as guard, guard.session("s", budget="$1.00") as session:
        with_tool = session.tool(cost="$0.01", name="slow")
        depth = []

        @with_tool
        def nested():
            depth.append(1)
            return nested() if len(depth) < 30 else "done"  # the bulkhead has 8 places: an enforcing guard would hang

        assert nested() == "done"


def test_a_payment_of_another_client_is_booked_and_reported_where_its_amount_can_be_read():
    signed = {"from": OTHER_PAYEE, "to": OTHER_PAYEE, "value": "250000", "validAfter": "0", "validBefore": "9999999999"}
    paid = {"x402Version": 2, "accepted": accept(1), "payload": {"authorization": {**signed, "nonce": "0x1"}}}
    with shadow() as guard, guard.session("s", budget="$1.00") as session:
        answers = httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(lambda _: httpx.Response(200))))
        assert answers.get(URL, headers={"PAYMENT-SIGNATURE": b64(paid)}).status_code == 200
        assert session.spent == Decimal("0.25")
        with pytest.raises(PolicyDenied, match="foreign_payment"):
            answers.get(URL, headers={"PAYMENT-SIGNATURE": "a cheque"})
        (row,) = session.report().to_dict()["shadow"]["by_rule"]
    assert (row["rule"], row["calls"]) == ("foreign_payment", 1)


def test_a_guard_in_shadow_mode_says_so_in_the_log(caplog):
    with caplog.at_level(logging.WARNING), shadow():
        assert "mode is 'shadow'" in caplog.text


@pytest.mark.parametrize("mode", ["Shadow", "", None, True, 1, "off"])
def test_another_mode_is_refused_with_the_fix(mode):
    with pytest.raises(ConfigError, match=r"mode: .* is neither 'enforce' nor 'shadow'"):
        make_guard(mode=mode)


@pytest.mark.parametrize("order", sorted(permutations(("shadow", "enforcing", "reset"))), ids="-".join)
def test_a_shadow_guard_beside_an_enforcing_one_and_the_owner_in_every_order(tmp_path, order):
    """What one guard trips is tripped for both until the owner resets it; what the other would trip is an event."""
    ledger, looping = tmp_path / "spend.db", Policy(loop=Loop(calls=1, latch_after=1), breaker=None)
    with (
        make_guard(f"sqlite:///{ledger}", policy=looping) as strict,
        shadow(f"sqlite:///{ledger}", looping) as watching,
    ):
        guards = {"shadow": watching, "enforcing": strict}
        sessions = {name: guard.session("s", budget="$1.00", id="run") for name, guard in guards.items()}
        tripped = False
        for actor in order:
            if actor == "reset":
                with Owner(ledger) as owner:
                    if tripped:
                        owner.reset("run")
                        time.sleep(0.002)  # what is called within the millisecond of a reset does not count
                tripped = False
                continue
            again = charges(2, q="same")
            if tripped or actor == "enforcing":
                with pytest.raises(SessionTripped if tripped else LoopDetected):
                    again(sessions[actor])
                tripped = True
            else:
                again(sessions[actor])
        report = sessions["shadow"].report().to_dict()
    assert report["state"] == ("tripped" if tripped else "open")
    passed = (
        order.index("shadow") < order.index("enforcing")
        or "reset" in order[order.index("enforcing") : order.index("shadow")]
    )
    assert (report["shadow"] is not None) == passed


def test_a_payment_that_is_presented_again_past_an_open_breaker_is_reported():
    policy = Policy(breaker=Breaker(failures=1, rest_s=20), loop=None)
    with shadow(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        shop = Shop(paid=httpx.ReadError("reset"))
        with pytest.raises(X402GuardError):
            client(session, shop).get(URL)
        shop.paid = None
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 1
        (row,) = session.report().to_dict()["shadow"]["by_rule"]
    assert (row["rule"], row["calls"], row["amount"]) == ("breaker_open", 1, "0.01")


def test_a_policys_objection_comes_before_the_quote_of_a_request():
    with (
        make_guard(policy=Policy(hosts=["other.example"], **CALM)) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        with pytest.raises(PolicyDenied) as caught:
            client(session, Shop()).get(URL, extensions={"max_price": "$0.001"})
    assert caught.value.rule == "hosts"
