"""Places that an owner writes, and those that a request goes to."""

import fnmatch
import itertools
import time

import pytest

from x402guard import ConfigError
from x402guard.policy.patterns import allows_name, check_pattern, matches_route, matches_word


@pytest.mark.parametrize(
    ("pattern", "route", "holds"),
    [
        ("POST bank.example/*", "POST bank.example/pay", True),
        ("POST bank.example/*", "POST bank.example:8443/pay", True),
        ("POST bank.example:8443/*", "POST bank.example/pay", False),
        ("POST bank.example:8443/*", "POST bank.example:8443/pay", True),
        ("GET [::1]/*", "GET [::1]/pay", True),
        ("GET [::1]/*", "GET [::1]:81/pay", True),
        ("* bank.example/pay", "DELETE bank.example/pay", True),
        ("POST *", "POST any.example/where", True),
        ("GET a.example/Admin/*", "GET a.example/admin/x", True),
        ("GET a.example/%7Euser", "GET a.example/~user", True),
        ("GET a.example/x.y", "GET a.example/xzy", False),
        ("GET a.example/@user/*", "GET a.example/@user/x", True),
        ("GET a.example:8080/*", "GET a.example:8080/x", True),
        ("GET a.example:4430/*", "GET a.example:4430/x", True),
        ("GET *:8443/*", "GET a.example:8443/x", True),
        ("GET xn--bcher-kva.example/*", "GET xn--bcher-kva.example/x", True),
        ("GET a.example/bücher", "GET a.example/bücher", True),
        ("GET a.example/a[1]", "GET a.example/a1", False),
        ("delete_*", "GET a.example/delete_x", False),
    ],
)
def test_places(pattern, route, holds):
    assert matches_route(check_pattern("match", pattern), route) is holds


def test_a_model_with_a_slash_is_no_place():
    assert matches_word(check_pattern("match", "openai/gpt-*"), "openai/GPT-4o")


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        " ",
        "https://a.example/x",
        "a.example/*",
        "POST a.example",
        5,
        "x" * 501,
        "GET a.example:443/*",
        "GET a.example:80/x",
        "GET [::1]:443/x",
        "GET bücher.example/*",
        "GET a.example/x?q=1",
        "GET a.example/x#top",
        "GET a.example?q=1/x",
        "GET user@a.example/*",
        "GET  a.example/*",
        "GET a.example /*",
        "GET a.example\\x/*",
    ],
)
def test_what_could_never_match_is_an_error(pattern):
    with pytest.raises(ConfigError, match="match: "):
        check_pattern("match", pattern)


@pytest.mark.parametrize(
    ("allowed", "tool", "means"),
    [
        ("search_*", "search_users", True),
        ("search_*", "searchUsers", True),
        ("search_*", "search", True),
        ("search_*", "crm/search_users", True),
        ("search_*", "mcp__crm__search_users", True),
        ("search_*", "search/delete_user", False),
        ("search_*", "search.transfer_usdc", False),
        ("search_*", "search:wipe", False),
        ("search_*", "mcp__search__wipe", False),
        ("search_*", "search/delete_*", False),
        ("search_*", "search_x.*", False),
        ("*", "search/delete_user", True),
        ("search/*", "search/delete_user", True),
        ("search.*", "search/delete_user", True),
        ("crm/search_*", "crm/search_users", True),
        ("web_search", "web.search", True),
        ("web_search", "webSearch", True),
        ("search", "crm/search", True),
        ("search", "search/delete", False),
        ("crm/*", "crm/read", True),
        ("crm/*", "crm.read.v2", True),
        ("crm/*", "mcp__crm__read", True),
        ("crm/*", "CRM/Read", True),
        ("crm/*", "evil/crm/read", False),
        ("crm/*", "crm_evil/read", False),
        ("crm/*", "crm", False),
        ("crm/*", "crm_search", True),
        ("crm/read", "crm-read", True),
        ("fs.read", "fs_read", True),
        ("crm/read", "evil_crm_read", False),
        ("mcp.weather.com/*", "mcp.weather.com/steal", True),
        ("mcp.weather.com/*", "mcp.weather.com.evil.io/steal", False),
        ("*.weather.com/*", "mcp.weather.com/read", True),
        ("crm/read", "evil/crm/read", False),
        ("crm/read", "evil__crm/read", False),
        ("crm/read", "crm/read", True),
        ("*/read", "crm/read", True),
        ("mcp/read", "mcp/read", True),
    ],
)
def test_what_an_allowed_name_means(allowed, tool, means):
    assert allows_name(allowed, tool) is means


def test_a_star_is_any_text_wherever_it_stands():
    texts = ["".join(each) for size in range(6) for each in itertools.product("ab", repeat=size)]
    patterns = ["".join(each) for size in range(5) for each in itertools.product("ab*", repeat=size)]
    for pattern in patterns:
        means = [text for text in texts if matches_word(pattern, text)]
        assert means == [text for text in texts if fnmatch.fnmatchcase(text, pattern)], pattern


@pytest.mark.parametrize(
    "pattern", ["*" * 60 + "z", "*a" * 60 + "*z", "a*" * 40 + "z", "*ab" * 40 + "z*"], ids=range(4)
)
def test_many_stars_take_no_time(pattern):
    """A model may name the tools of a task that it delegates: they are compared while the ledger is locked."""
    began = time.process_time()
    assert not matches_word(pattern, "ab" * 100)
    assert not allows_name(pattern, "ab_" * 100)
    assert time.process_time() - began < 1
