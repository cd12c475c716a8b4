"""What the owner's patterns name, and that a pattern which names nothing is an error."""

import pytest

from tests.support.merchant import URL, Shop, client, make_guard, receipt, required
from x402guard import ConfigError, Loop, LoopDetected, Policy, PolicyDenied, Risk, Rule, X402GuardError
from x402guard.kernel.rows import HoldKind
from x402guard.policy.verdicts import Subject

URL_OF_BANK = "https://bank.example/v1/refund"

NO_PATTERNS = [
    "https://courts.example/*",
    "GET courts.example*",
    "GET courts.example",
    "courts.example/opinion",
    "GET courts.example/opinion?page=0",
    "GET courts.example:443/opinion",
    "GET  courts.example/opinion",
    "courts.example:8443",
    "127.0.0.1",
    "127.0.0.1:8080",
    "localhost:8000",
    "[::1]:8402",
    "[::1]",
    "10.0.0.*",
    "169.254.*",
    "bank.example.",
    "*.bank.example.",
    "bank.*.",
    "bank.*:8443",
    "G*T! a.example/*",
    "*" * 501,
    "",
    7,
]


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_a_pattern_that_can_match_nothing_is_an_error(pattern):
    with pytest.raises(ConfigError, match=r"policy\.max_calls"):
        Policy(max_calls={pattern: 1})
    with pytest.raises(ConfigError, match=r"policy\.loop\.own"):
        Loop(own={pattern: 1})
    with pytest.raises(ConfigError, match=r"policy\.risk\.levels"):
        Risk(levels={pattern: "LOW"})


@pytest.mark.parametrize(
    "pattern", ["GET courts.example/Opinion/1", " get courts.example/opinion/1", "GET courts.example/x/../opinion/1"]
)
def test_a_route_counts_in_any_spelling_and_on_any_port(pattern):
    policy = Policy(max_calls={pattern: 1}, loop=None)
    for port in ("", ":8443"):
        place = f"https://courts.example{port}/opinion/1"
        with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
            assert client(session, Shop(required(url=place))).get(place).status_code == 200
            with pytest.raises(PolicyDenied, match=r"policy.max_calls"):
                client(session, Shop(required(url=f"{place}?page=2"))).get(f"{place}?page=2")


def test_a_tool_counts_in_any_spelling():
    with (
        make_guard(policy=Policy(max_calls={"search_web": 1})) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        session.charge("searchWeb", "$0.01")
        with pytest.raises(PolicyDenied, match=r"policy.max_calls"):
            session.charge("crm.search-web", "$0.01")


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("max_calls", lambda named: Policy(max_calls=dict.fromkeys(named, 1))),
        ("loop.own", lambda named: Loop(own=dict.fromkeys(named, 1))),
        ("risk.levels", lambda named: Risk(levels=dict.fromkeys(named, "LOW"))),
    ],
)
def test_two_spellings_of_one_pattern_are_an_error(setting, make):
    with pytest.raises(ConfigError, match=rf"policy\.{setting}: 'GET a.example/x' is there twice, in two spellings"):
        make(["GET a.example/x", "get A.example/x"])


@pytest.mark.parametrize("own", ["GET courts.example/*", "* courts.example/opinion/*", "get COURTS.example/op*"])
def test_a_pattern_gives_all_that_it_matches_a_number_of_their_own(own):
    with (
        make_guard(policy=Policy(loop=Loop(calls=1, own={own: 2}))) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        shop = client(session, Shop())
        assert [shop.get(f"{URL}/1").status_code for _ in range(2)] == [200, 200]
        with pytest.raises(LoopDetected):
            shop.get(f"{URL}/1")


def test_two_jobs_that_are_polled_in_turn_have_their_tools_number():
    """Each is polled as often as its tool may be; a cycle of two is no narrower limit."""
    policy = Policy(loop=Loop(calls=3, own={"poll_*": 8}))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for turn in range(16):
            session.charge("poll_status", "$0.001", arguments={"job": turn % 2})
        with pytest.raises(LoopDetected, match=r"policy\.loop"):
            session.charge("poll_status", "$0.001", arguments={"job": 0})


def at_most(policy, urls):
    """How many payments to these URLs a policy lets pass, before it refuses one."""
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for number, url in enumerate(urls):
            try:
                assert client(session, Shop(required(url=url))).get(url).status_code == 200
            except X402GuardError:
                return number
        return len(urls)


HOST = "https://api.courts.example:8443/opinion"


@pytest.mark.parametrize(
    "name",
    ["api.courts.example", "API.courts.example", "*.courts.example", "*.example", "*courts.example", "api.*.example"],
)
@pytest.mark.parametrize("kinds", [["payment"], ["payment", "llm"], ["payment", "llm", "tool"]])
def test_a_name_with_dots_is_also_that_of_a_host(name, kinds):
    urls = [f"{HOST}/{number}" for number in range(3)]
    assert at_most(Policy(max_calls={name: 2}), urls) == 2
    assert at_most(Policy(loop=Loop(own={name: 1})), [HOST, HOST]) == 1
    deny = Rule(name="none", action="deny", match=name, kinds=kinds)
    assert at_most(Policy(rules=[deny]), urls) == 0
    assert at_most(Policy(rules=[deny]), ["https://courts.test/api.courts.example/1"]) == 1
    with make_guard(policy=Policy(max_calls={name: 1})) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(2):
            session.charge("search", "$0.01")


@pytest.mark.parametrize("name", ["opinion", "courts", "example_opinion", "search*", "*opinion", "courts*", "*"])
def test_a_tools_name_names_no_url_but_the_one_for_all_does(name):
    """Each URL ends in some word: a number for a tool of that name would be its number as well."""
    urls = ["https://courts.example/opinion"] * 12
    most = 2 if name == "*" else 10
    assert at_most(Policy(max_calls={name: 2}), urls) == most
    if name != "*":
        assert at_most(Policy(loop=Loop(own={name: None}), breaker=None), urls) == 10


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("* *.courts.example/*", "https://evil.example/a.courts.example/opinion"),
        ("GET *.courts.example/free/*", "https://evil.example/a.courts.example/free/opinion"),
        ("* courts.example/*", "https://evil.example/a%20courts.example/opinion"),
        ("GET *courts.example/*", "https://evil.example/%2f..%2fcourts.example/opinion"),
        ("*.courts.example", "https://evil.example/a.courts.example/opinion"),
        ("*courts.example", "https://evil.example/courts.example/opinion"),
    ],
)
def test_a_path_does_not_pass_for_the_host_that_a_pattern_names(pattern, url):
    assert at_most(Policy(loop=Loop(calls=1, own={pattern: None}), breaker=None), [url] * 3) == 1


def test_a_tool_with_a_blank_in_its_name_is_no_route():
    with make_guard(policy=Policy(max_calls={"* search/*": 1})) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(3):
            session.charge("web search", "$0.01", arguments={"n": number})


@pytest.mark.parametrize(("name", "calls"), [("gpt-4o*", 2), ("gpt-4o-mini", 2), ("mini", 10), ("4o_mini", 10)])
def test_a_use_that_is_recorded_goes_by_its_models_name(name, calls):
    told = ("openai", "gpt-4o-mini", {"input_tokens": 1, "output_tokens": 1})
    policy = Policy(loop=Loop(own={name: 2}))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(calls):
            session.record_usage(*told, messages=["go on"])
        with pytest.raises(LoopDetected):
            session.record_usage(*told, messages=["go on"])


@pytest.mark.parametrize("match", ["* */admin/*", "GET */refund", "* */v1/*", "GET *", "* *", "G* *", "* */*"])
def test_a_route_of_all_hosts_is_about_any_path_that_ends_so(match):
    deny = Policy(rules=[Rule(name="none", action="deny", match=match)])
    urls = ["https://bank.example/v1/admin/1", "https://bank.example/v1/refund"]
    assert [at_most(deny, [url]) for url in urls].count(0) == (1 if match in ("* */admin/*", "GET */refund") else 2)


@pytest.mark.parametrize(
    ("match", "denied"), [("Delete *", True), ("* *", True), ("delete *", True), ("Search *", False)]
)
def test_a_pattern_of_a_word_and_a_star_names_tools_with_blanks(match, denied):
    policy = Policy(rules=[Rule(name="none", action="deny", match=match)], risk=None)
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        if denied:
            with pytest.raises(PolicyDenied):
                session.charge("Delete file", "$0.01")
        else:
            session.charge("Delete file", "$0.01")


@pytest.mark.parametrize("match", ["bücher.example", "*.bücher.example", "bücher.*"])
def test_a_rule_about_payments_that_names_none_is_an_error(match):
    with pytest.raises(ConfigError, match="names no payment; write a host such as"):
        Rule(name="none", action="deny", match=match, kinds=["payment"])
    assert Rule(name="tool", action="deny", match=match).match == match


@pytest.mark.parametrize("kinds", [{}, {"kinds": ["payment"]}])
@pytest.mark.parametrize("match", ["bank.*", "bank.example*", "bank.ex*", "*.bank.*", "*bank.*", "api.*.example"])
def test_a_pattern_of_one_word_with_a_star_at_its_end_names_hosts(match, kinds):
    """``bank.*`` denied the tools of a server, and let each payment to the bank pass without a word."""
    deny = Policy(rules=[Rule(name="none", action="deny", match=match, **kinds)])
    url = URL_OF_BANK.replace("bank", "api.bank") if match in ("*.bank.*", "api.*.example") else URL_OF_BANK
    assert at_most(deny, [url]) == 0
    assert at_most(deny, ["https://courts.example/opinion"]) == 1


@pytest.mark.parametrize("pattern", ["anthropic.claude-*:0", "us.anthropic.claude-*-v1:0", "amazon.nova-*-v1:0"])
def test_a_pattern_of_models_of_a_cloud_is_one(pattern):
    assert Rule(name="no", action="deny", match=pattern, kinds=["llm"]).match == pattern
    assert Loop(own={pattern: 1}).own == {pattern: 1}


@pytest.mark.parametrize(("tool", "denied"), [("crm/search_users", True), ("crm/read_users", False)])
def test_the_payment_for_a_tool_is_named_by_a_pattern_with_a_star(tool, denied):
    rule = Rule(name="no", action="deny", match="crm.search_*", kinds=["payment"])
    assert rule.holds_for(Subject(HoldKind.PAYMENT, ("PAY crm/x",), 1, tool=tool)) is denied


def test_a_tool_that_is_named_like_a_route_keeps_the_level_of_its_words():
    """An MCP server names its tools."""
    risk = Risk(levels={"bank.*": "LOW"})
    with make_guard(policy=Policy(risk=risk)) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(X402GuardError):
            session.charge("x bank.evil/delete_all", "$0.01")
        session.charge("bank.delete_all", "$0.01")


@pytest.mark.parametrize(
    ("own", "calls"),
    [
        ({"search.*": None}, 3),
        ({"*.*": None}, 3),
        ({"search.*": 9}, 3),
        ({"search.*": 2}, 2),
        ({"search.*": None, "GET search.evil.example/x": 2}, 2),
        ({"search.evil.example": None}, 6),
        ({"* search.*/*": None}, 6),
        ({"search.*": 3, "GET search.evil.example/x": 1}, 1),
        ({"*.*": 3, "search.evil.example": 2, "*.evil.example": 1}, 2),
        ({"search.*": 1, "GET search.evil.example/x": 2}, 1),
        ({"search.*": 2, "GET search.evil.example/x": None}, 2),
    ],
)
def test_an_exception_for_tools_frees_no_host_of_a_seller(own, calls):
    """A seller names its host as it likes: ``search.evil.example``."""
    policy = Policy(loop=Loop(calls=3, own=own), breaker=None)
    assert at_most(policy, ["https://search.evil.example/x"] * 6) == calls


@pytest.mark.parametrize("match", ["gpt-4.*", "crm.delete_*", "v1.2*"])
def test_a_pattern_of_tools_or_models_names_no_host(match):
    deny = Policy(rules=[Rule(name="none", action="deny", match=match)])
    assert at_most(deny, [URL_OF_BANK]) == 1


@pytest.mark.parametrize("own", ["forecast", "weather/forecast", "weather/*"])
def test_the_payment_for_a_tool_repeats_as_the_tool_may(own):
    with make_guard(policy=Policy(loop=Loop(own={own: None}))) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(15):
            payment = session.pay(required(), place="mcp://weather/forecast")
            payment.settled(receipt(transaction=f"0x{number:064x}"))
        with pytest.raises(LoopDetected):
            for number in range(15, 30):
                payment = session.pay(required(), place="https://evil.example/forecast")
                payment.settled(receipt(transaction=f"0x{number:064x}"))


@pytest.mark.parametrize("pattern", ["*.exe", "*.json", "*setup.exe"])
def test_a_pattern_of_one_word_is_about_the_end_of_a_path_as_well(pattern):
    """It may be a host's name, and is no less strict for that."""
    rule, place = (
        Rule(name="no", action="deny", match=pattern),
        f"https://files.example/tools/setup.{pattern[-4:].strip('.')}",
    )
    with make_guard(policy=Policy(rules=[rule])) as guard, guard.session("s", budget="$5.00") as session:
        with pytest.raises(PolicyDenied):
            client(session, Shop(required(url=place))).get(place)


def test_a_route_is_compared_in_full_and_not_as_it_is_shown():
    """It is shown with 200 characters, and what is cut off may be what another route is about."""
    begun = "https://courts.example/"
    cut = begun + "a" * (200 - len("GET courts.example/") - len("/free")) + "/free"
    place = f"{cut}/paid"
    with (
        make_guard(policy=Policy(loop=Loop(own={"GET courts.example/*/free": None}), breaker=None)) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        for _ in range(20):
            assert client(session, Shop(required(url=cut))).get(cut).status_code == 200
        with pytest.raises(LoopDetected):
            for _ in range(20):
                client(session, Shop(required(url=place))).get(place)
