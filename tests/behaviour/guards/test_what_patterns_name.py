"""What the owner's patterns name, and that a pattern which names nothing is an error."""

import pytest

from tests.support.merchant import URL, Shop, client, make_guard, required
from x402guard import ConfigError, Loop, LoopDetected, Policy, PolicyDenied, Risk, Rule

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


@pytest.mark.parametrize("match", ["courts.example", "*.example", "api.courts.example"])
def test_a_rule_about_payments_that_names_a_host_is_an_error(match):
    with pytest.raises(ConfigError, match=r"looks like a host; write '\* .*/\*'"):
        Rule(name="none", action="deny", match=match, kinds=["payment"])
    assert Rule(name="tool", action="deny", match=match).match == match
