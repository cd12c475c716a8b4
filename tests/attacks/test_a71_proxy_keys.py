"""A71: the proxy is not its owner's account: where the key of an LLM provider goes along, and what an answer takes along."""

import json

import httpx
import pytest

from tests.integration.test_proxy_refusals import OWNED
from tests.support import proxy as support
from tests.support.merchant import KEY, client, make_guard
from tests.support.proxy import Proxied, asked
from tests.support.slow_server import HEAD
from x402guard import ConfigError, Metering, Owner, Unpriced
from x402guard.llm import Endpoint

pytestmark = pytest.mark.chain
shop = support.shop

ACCOUNT = [
    ("GET", "files"), ("GET", "files/f1/content"), ("DELETE", "files/f1"), ("DELETE", "models/ft:x"), ("GET", "chat/completions"),
    ("GET", "organization/admin_api_keys"), ("POST", "organization/invites"), ("GET", "batches"), ("POST", "files"),
    ("POST", "files%00/moderations"), ("POST", "files%3Fa=/moderations"), ("POST", "organization/invites/moderations"),
    ("POST", "responses/r1/cancel"), ("GET", "files%00"), ("DELETE", "responses/r"), ("PUT", "x"), ("OPTIONS", "files"), ("GET", "models/x/y"), ("DELETE", "chat/completions"),
]  # fmt: skip


@pytest.fixture
def owning(tmp_path, shop):
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
        "X402GUARD_PROXY__PATHS": '["GET /openai/files*", "DELETE /openai/batches/*"]',
    }
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        yield proxy


def test_a71_the_owners_key_goes_along_with_priced_calls_models_and_what_is_listed_alone(owning, shop, tmp_path):
    for path in ("/v1/models", "/v1/files", "/v1/files/f1/content"):
        shop.answers[path] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
        assert asked(owning, f"openai{path.removeprefix('/v1')}").text == "ok"
        assert shop.asked[-1].header("authorization") == "Bearer sk-owner"
    count = len(shop.asked)
    for method, path in (*ACCOUNT, ("DELETE", "batches/b1")):
        if (method, path) in (("GET", "files"), ("GET", "files/f1/content")):
            continue
        answer = asked(owning, f"openai/{path}", method=method)
        assert answer.status_code == 402, (method, path)
        assert answer.json()["rule"] == "proxy_paths"
        assert f"{method} /openai/{path}" in answer.json()["detail"]
    assert len(shop.asked) == count, "nothing was sent"
    with Owner(tmp_path / "x402guard.db", read_only=True) as owner:
        refusals = owner.report("proxy").to_dict()["refusals"]
        assert sum(row["count"] for row in refusals if row["rule"] == "proxy_paths") == len(ACCOUNT) - 1


def test_a71_a_callers_own_key_goes_where_it_likes(owning, shop):
    shop.answers["/v1/organization/admin_api_keys"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    answer = asked(owning, "openai/organization/admin_api_keys", headers={"Authorization": "Bearer sk-mine"})
    assert (answer.text, shop.asked[-1].header("authorization")) == ("ok", "Bearer sk-mine")


def test_a71_an_endpoint_of_the_settings_gets_a_key_only_by_its_name(tmp_path, shop):
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": "openai"}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    shop.answers["/v1/models"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        assert asked(proxy, "openai/models").text == "ok"
    assert shop.asked[-1].header("authorization") is None
    for wrong in ("sk-the-key-itself", 5, "two words"):
        with pytest.raises(ConfigError, match="write the name of a variable") as caught:
            Metering(endpoints={"https://llm.example/v1": Endpoint("openai", key=wrong)})
        assert "sk-the" not in str(caught.value)


def test_a71_what_an_answer_says_of_its_whole_origin_is_not_handed_on(owning, shop):
    lines = b"alt-svc: h3=:443\r\nrefresh: 0; url=/x\r\nlink: </x>; rel=preload\r\nset-cookie: a=b\r\nx-kept: 1\r\n"
    shop.answers["/sold"] = lambda line: line.send(HEAD + lines + b"content-length: 2\r\n\r\nok")
    answer = asked(owning, f"{shop.url}/sold")
    assert (answer.text, answer.headers["x-kept"]) == ("ok", "1")
    assert not {"alt-svc", "refresh", "link", "set-cookie"} & set(answer.headers)


@pytest.mark.parametrize("paths", ['["files"]', '["get /openai/x"]', '["GET openai/x"]', "5"])
def test_a71_a_list_that_names_no_path_is_an_error(tmp_path, monkeypatch, paths):
    from x402guard.guard.settings import load_settings

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_PROXY__PATHS", paths)
    with pytest.raises(ConfigError, match=r"proxy\.paths"):
        load_settings()


@pytest.mark.parametrize(
    "name", ["X-HTTP-Method-Override", "x-http-method", "X-Method-Override", "X_HTTP_Method_Override"]
)
def test_a71_a_header_that_names_another_method_is_refused_on_a_metered_host(name):
    """``GET /v1/models`` with it is ``DELETE /v1/models`` to some servers."""
    seen = []

    def provider(request):
        seen.append(request)
        return httpx.Response(200, json={})

    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, provider) as http:
        with pytest.raises(Unpriced, match="a header that names another method"):
            http.get("https://api.openai.com/v1/models", headers={name: "DELETE"})
        assert seen == []
        assert http.get("https://courts.example/x", headers={name: "DELETE"}).status_code == 200
        assert http.get("https://api.openai.com/v1/models").status_code == 200
