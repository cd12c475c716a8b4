"""What is no tool, no amount, no word and no argument: named at once, and in no book. Arguments are told apart, and kept nowhere."""

import asyncio
import inspect
import time
from decimal import Decimal

import pytest

from tests.behaviour.tools.test_forms import uses
from tests.support.ledger import Clock
from tests.support.tool_forms import (
    CEILING,
    BrokenError,
    Form,
    awaited,
    check,
    check_untouched,
    events,
    every_block,
    every_decorated,
    owner,
    plain,
    said,
)
from x402guard import ConfigError, Guard
from x402guard.stores import open_store
from x402guard.tools.arguments import fingerprint, plain_arguments


def fingerprint_of(arguments):
    return fingerprint(plain_arguments(arguments))


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request, tmp_path):
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def session(ledger):
    store = open_store(ledger, clock_ms=Clock())
    with Guard(ledger=store) as guard, guard.session("research", budget="$1.00") as session:
        yield session
    store.close()


def nested(depth):
    """Mappings and lists in turn, *depth* of them, the outermost a mapping."""
    value = 1
    for level in range(depth, 0, -1):
        value = {"deeper": value} if level % 2 else [value]
    return value


ITSELF = {}
ITSELF["self"] = ITSELF
AMOUNTS = [
    (0.01, TypeError, r'money is never a float; write it as text, "\$0\.01"'),
    (float("nan"), TypeError, "money is never a float"),
    (float("inf"), TypeError, "money is never a float"),
    (True, TypeError, "money is never a bool"),
    (b"$1", TypeError, "money is never a bytes"),
    (["$1"], TypeError, "money is never a list"),
    ("-$0.01", ValueError, "is not a dollar amount"),
    ("$-0.01", ValueError, "is not a dollar amount"),
    (-1, ValueError, "is not a dollar amount"),
    (Decimal("-0.01"), ValueError, "is not a dollar amount"),
    (Decimal("NaN"), ValueError, "is not a dollar amount"),
    (Decimal("Infinity"), ValueError, "is not a dollar amount"),
    ("", ValueError, "is not a dollar amount"),
    ("a cent", ValueError, "is not a dollar amount"),
    ("1,50", ValueError, "is not a dollar amount"),
    ("١", ValueError, "is not a dollar amount"),
    ("$0.0000000001", ValueError, "at most nine decimals"),
    (Decimal("0.0000000001"), ValueError, "at most nine decimals"),
    ("$1000000000.000000001", ValueError, "more than a billion dollars"),
    (10**9 + 1, ValueError, "more than a billion dollars"),
]
NAMES = ["", None, 5, b"serp", "s" * 201, "a\nb", "a\x00b", "\x1b[31m", "\udc80", ["serp"]]
LIFETIMES = [0, -1, 1.5, "900", None, True, 31 * 86_400 + 1, float("inf")]
ARGUMENTS = [
    ("q=Roe", "a str is not a mapping"),
    ([("q", "Roe")], "a list is not a mapping"),
    (5, "an? int is not a mapping"),
    (nested(65), "nested deeper than 64 levels"),
    (ITSELF, "nested deeper than 64 levels"),
    ({"ids": list(range(10_001))}, "more than 10,000 values"),
    ({str(number): number for number in range(10_001)}, "more than 10,000 values"),
    ({"n": int("9" * 4_000) ** 2}, "arguments: "),
    ({int("9" * 4_000) ** 2: "n"}, "arguments: "),
]
each_amount = pytest.mark.parametrize(("amount", "error", "says"), AMOUNTS, ids=lambda value: repr(value)[:20])
each_name = pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
each_lifetime = pytest.mark.parametrize("lifetime", LIFETIMES, ids=repr)


def charging(session, *args, **more):
    """The three that take a tool's name and an amount, awaited and not; none gets as far as the ledger."""
    amount = more.pop("amount", "$0.01")
    return [
        ("cost", lambda: session.charge(*args, amount, **more)),
        ("cost", lambda: asyncio.run(session.acharge(*args, amount, **more))),
        ("up_to", lambda: session.hold(*args, up_to=amount, **more)),
    ]


@each_amount
def test_an_amount_that_is_none_is_named_with_how_to_write_it(session, amount, error, says):
    decorating = [
        ("cost", lambda: session.tool(cost=amount)(said)),
        ("up_to", lambda: session.tool(cost=said, up_to=amount)(said)),
    ]
    for argument, use in charging(session, "serp", amount=amount) + decorating:
        with pytest.raises(error, match=f"^{argument}: .*{says}"):
            use()
    check_untouched(session)
    with session.hold("serp", up_to=CEILING) as hold:
        with pytest.raises(error, match=f"^amount: .*{says}"):
            hold.capture(amount)
        hold.void()
    check(session, "0", calls=0)


@each_name
def test_a_name_that_no_report_can_print_is_refused(session, name):
    decorating = [] if name is None else [("tool", lambda: session.tool(cost="$0.01", name=name)(said))]
    for _, use in charging(session, name) + decorating:
        with pytest.raises(ConfigError, match=r"^tool: .* is not a name for a tool"):
            use()
    check_untouched(session)


def test_a_name_of_200_characters_is_a_name(session):
    session.charge("é" * 200, "$0.01")
    check(session, "0.01", "estimate", tool="é" * 200)


@each_lifetime
def test_a_lifetime_that_is_none_is_refused(session, lifetime):
    for use in (
        lambda: session.hold("serp", up_to="$0.01", lifetime_s=lifetime),
        lambda: session.tool(cost="$0.01", lifetime_s=lifetime)(said),
        lambda: session.tool(cost=said, up_to="$0.01", lifetime_s=lifetime)(said),
    ):
        with pytest.raises(ConfigError, match=r"^lifetime_s: .* is not a whole number of seconds from 1 to"):
            use()
    check_untouched(session)


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=[f"arguments{n}" for n in range(len(ARGUMENTS))])
def test_arguments_that_cannot_be_told_apart_are_refused_and_soon(session, arguments, says):
    began = time.monotonic()
    for _, use in charging(session, "serp", arguments=arguments):
        with pytest.raises(ConfigError, match=f"^arguments: .*{says.removeprefix('arguments: ')}"):
            use()
    assert time.monotonic() - began < 1  # milliseconds; an endless walk takes for ever
    check_untouched(session)


def test_a_tool_may_be_given_what_is_too_large_to_tell_its_calls_apart(session):
    tool = session.tool(cost="$0.01", name="serp")(plain(len))
    assert tool(what=list(range(20_000))) == 20_000
    assert [event.get("arguments") for event in events(session, "authorize")] == [None]
    check(session, "0.01", "estimate")


def generator():
    yield 1


async def async_generator():
    yield 1


TERMS = [
    ({}, "cost: "),
    ({"cost": None}, "cost: "),
    ({"cost": said}, "up_to: .*ceiling"),
    ({"cost": "$0.01", "up_to": "$0.05"}, "up_to: .*its own ceiling"),
    ({"up_to": "$0.05"}, "cost: "),
    ({"mode": "raw", "up_to": "$0.05", "render": str}, "up_to: "),
    ({"cost": "$0.01", "mode": "raw"}, "mode: it needs render"),
    ({"cost": "$0.01", "render": str}, "mode: it needs render"),
    ({"mode": "everything", "render": str}, "mode: 'everything' is none of raw, table, summary, handle_only"),
    ({"mode": ["raw"], "render": str}, "mode: .* is none of"),
    ({"mode": "raw", "render": "text"}, "render: 'text' is not a function"),
    *[({"mode": "raw", "render": str, "max_tokens": most}, "max_tokens: ") for most in (0, -1, True, 1.5, "9", None)],
    ({"cost": "$0.01", "price": "$0.01"}, "price: tool\\(\\) takes cost, up_to, mode"),
]


@pytest.mark.parametrize(("terms", "says"), TERMS, ids=lambda value: repr(value)[:30])
def test_terms_that_contradict_each_other_are_named_when_they_are_written_down(session, terms, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        session.tool(**terms)
    check_untouched(session)


GENERATORS = {
    "generator": generator,
    "async generator": async_generator,
    "object": owner(__call__=lambda self: (yield)),
    "static": staticmethod(generator),
}


@pytest.mark.parametrize("what", GENERATORS.values(), ids=GENERATORS)
def test_what_goes_on_after_its_call_is_no_tool(session, what):
    with pytest.raises(ConfigError, match="generator"):
        session.tool(cost="$0.01", name="serp")(what)
    check_untouched(session)


def test_what_is_no_function_is_no_tool_and_a_bare_decorator_is_told_how_to_be_written(session):
    with pytest.raises(ConfigError, match=r"@session.tool\(cost=\"\$0.01\"\)"):

        @session.tool
        def serp(query):
            return query

    for nothing in (None, "serp", 5, classmethod(said)):
        with pytest.raises(ConfigError, match=r"tool: .* is not a function"):
            session.tool(cost="$0.01")(nothing)
    check_untouched(session)


# -- what goes wrong in a tool that is decorated ---------------------------------------------------------------------------


def failing_cost(result):
    raise BrokenError("no price in the answer")


@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
@pytest.mark.parametrize(
    ("cost", "error", "says"),
    [
        (failing_cost, BrokenError, "no price"),
        (lambda result: 0.01, TypeError, r"cost: .*\$0\.01"),
        (lambda result: "$-0.01", ValueError, "cost: "),
        (lambda result: Decimal("NaN"), ValueError, "cost: "),
    ],
)
def test_a_cost_that_cannot_be_told_is_the_ceiling_and_the_error_is_raised(session, backend, cost, error, says):
    form, ran = Form("function", backend), []
    tool = form.decorate(session.tool(cost=cost, up_to=CEILING, name="serp"), ran.append)
    with pytest.raises(error, match=says):
        form.call(tool, what="Roe")
    assert ran == ["Roe"]
    check(session, "0.05", "assumed")


def test_a_cost_of_none_says_nothing_so_the_ceiling_counts_and_the_result_is_returned(session):
    tool = session.tool(cost=lambda result: None, up_to=CEILING, name="serp")(plain(said))
    assert tool(what="Roe") == "Roe"
    check(session, "0.05", "assumed")


def test_a_plain_function_that_returns_something_to_await_is_told_to_be_async(session):
    async def fetch(what):
        raise AssertionError("it was never awaited")

    tool = session.tool(cost="$0.05", name="serp")(lambda what: fetch(what))
    with pytest.raises(TypeError, match="async def"):
        tool("Roe")
    check(session, "0.05", "assumed")


@pytest.mark.parametrize("body", [plain(said), awaited(said)], ids=["plain", "async"])
def test_a_tool_above_staticmethod_is_the_function_under_it(session, body):
    engine = type(owner(serp=session.tool(cost="$0.01", name="serp")(staticmethod(body))))
    result = engine.serp(what="Roe")
    assert (asyncio.run(result) if inspect.iscoroutine(result) else result) == "Roe"
    check(session, "0.01", "estimate")


@every_decorated
def test_arguments_that_do_not_fit_are_no_call(session, form):
    tool = form.decorate(session.tool(cost="$0.01", name="serp"), said)
    for arguments in ({}, {"query": "Roe"}, {"what": "Roe", "court": 9}):
        with pytest.raises(TypeError):
            form.call(tool, **arguments)
    check_untouched(session)


@pytest.mark.parametrize("again", ["capture", "void"])
@pytest.mark.parametrize("first", ["capture", "void"])
def test_the_end_is_said_once(session, first, again):
    def word(hold, name):
        hold.capture("$0.02") if name == "capture" else hold.void()

    with session.hold("serp", up_to=CEILING) as hold:
        word(hold, first)
        with pytest.raises(ConfigError, match="reported already"):
            word(hold, again)
    check(session, "0.02" if first == "capture" else "0", "estimate", calls=int(first == "capture"))


@every_block
def test_the_end_is_said_in_the_block_which_is_entered_once(session, block):
    hold = session.hold("serp", up_to=CEILING)
    for word in (lambda: hold.capture("$0.01"), hold.void, lambda: hold.__exit__(None, None, None)):
        with pytest.raises(ConfigError, match="hold: "):
            word()
    check_untouched(session)
    assert (hold.receipt, hold.amount) == (None, Decimal("0.05"))
    block.run(hold, lambda hold: None)
    for word in (lambda: hold.capture("$0.01"), hold.void, lambda: block.run(hold, lambda hold: None)):
        with pytest.raises(ConfigError, match="hold: "):
            word()
    check(session, "0.05", "assumed")


def test_a_word_that_is_no_amount_says_nothing_and_may_be_mended(session):
    with session.hold("serp", up_to=CEILING) as hold:
        with pytest.raises(TypeError, match=r"amount: .*\$0\.01"):
            hold.capture(0.01)
        hold.capture("$0.01")
    check(session, "0.01", "estimate")


def test_a_block_of_another_guard_in_context_is_a_mistake_and_none_of_the_two_pays(session):
    ran = []
    with Guard(ledger="memory://") as other_guard, other_guard.session("other", budget="$1.00") as other:
        for use in uses(session, ran):
            with pytest.raises(ConfigError, match="the block in context belongs to 'other'"):
                use()
        check_untouched(other)
    assert ran == []
    check_untouched(session)


def test_a_reason_that_no_file_takes_voids_all_the_same(session):
    """What a server answers may hold halves of characters; the books are to be in order whatever it says."""
    with session.hold("serp", up_to=CEILING) as hold:
        hold.void("refused: \udc80")
    check(session, "0", calls=0)


# -- arguments are told apart, and kept nowhere ----------------------------------------------------------------------------


def test_the_order_of_keys_does_not_matter_and_every_value_does():
    base = {"q": "Roe", "page": 1, "deep": {"a": [1, 2], "b": None}}
    assert fingerprint_of(base) == fingerprint_of({"deep": {"b": None, "a": (1, 2)}, "page": 1, "q": "Roe"})
    others = [
        {**base, "q": "roe"},
        {**base, "page": 2},
        {**base, "page": "1"},
        {**base, "page": True},
        {**base, "deep": {"a": [2, 1], "b": None}},
        {**base, "deep": {"a": [1, 2], "b": 0}},
        {**base, "more": None},
        {"q": "Roe", "page": 1},
        {"query": "Roe", "page": 1, "deep": base["deep"]},
        {},
    ]
    prints = [fingerprint_of(arguments) for arguments in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert all(len(bytes.fromhex(text)) == 32 for text in prints)
    assert fingerprint_of(None) == ""


def test_what_json_cannot_say_counts_by_its_type_and_halves_of_characters_are_text():
    assert fingerprint_of({"f": BrokenError("a")}) == fingerprint_of({"f": BrokenError("b")})
    assert fingerprint_of({"f": BrokenError("a")}) != fingerprint_of({"f": b"a"})
    assert fingerprint_of({"q": "\udc80"}) != fingerprint_of({"q": "\udc81"})
    assert fingerprint_of(nested(64)) != fingerprint_of(nested(63))


def test_a_call_is_the_same_however_its_arguments_are_written(session):
    @session.tool(cost="$0.01")
    def serp(query, page=1):
        return query

    serp("Roe"), serp("Roe", 1), serp(page=1, query="Roe"), serp("Roe", 2)
    first, *rest = [event["arguments"] for event in events(session, "authorize")]
    assert [text == first for text in rest] == [True, True, False]


def test_no_value_of_an_argument_stands_in_the_file_or_the_report(tmp_path):
    secret = "correct-horse-battery-staple"
    arguments = {"key": secret, "deep": [{"also": secret + "2"}], secret + "3": 1}

    async def fetch(url, *, token):
        return url + token

    with Guard(ledger=f"sqlite:///{tmp_path / 'ledger.db'}") as guard:
        with guard.session("research", budget="$1.00") as session:
            session.charge("serp", "$0.01", arguments=arguments)
            with session.hold("render", up_to="$0.05", arguments=arguments):
                pass
            asyncio.run(session.tool(cost="$0.01")(fetch)(secret, token=secret))
            report = session.report()
        assert all(secret not in text and "serp" in text for text in (report.to_json(), report.to_text()))
        prints = [event["arguments"] for event in report.to_dict()["events"] if event["event"] == "authorize"]
        assert prints[0] == prints[1] == fingerprint_of(arguments) != prints[2]
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}  # while it is open: its log too
    files["closed"] = (tmp_path / "ledger.db").read_bytes()
    assert len(files) >= 4
    assert not [name for name, data in files.items() if secret.encode() in data]
    assert fingerprint_of(arguments).encode() in files["closed"]
