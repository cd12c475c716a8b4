"""Redirects through the proxy: a client follows them as requests of its own, and they stay hops of one call."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support import proxy
from tests.support.proxy import KEY, Proxied, asked, books, connected, curl
from tests.support.proxy_hops import BROKEN, broken_download, redirect
from tests.support.slow_server import CHUNKED, HEAD, Trickler, once_paid
from x402guard.web.hops import PREFIX, Hop, Hops

OWNED = {"provider": "openai", "key": "OPENAI_API_KEY"}
pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


@pytest.fixture
def following(proxied):
    """A client that follows redirects, as curl -L, fetch and Go's do."""
    with httpx.Client(follow_redirects=True, trust_env=False, headers=proxied.header, timeout=30) as http:
        yield lambda url, **more: http.get(f"{proxied.url}{url}", **more)


def test_a_paid_download_that_breaks_behind_its_redirect_is_paid_once(shop, following, tmp_path):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    shop.answers["/download"] = lambda line: line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n") or False
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            following(f"{shop.url}/buy")
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    assert following(f"{shop.url}/buy").status_code == 200
    assert (len(shop.nonces), len(set(shop.nonces))) == (3, 1)
    assert books(tmp_path) == {"proxy": ("0.01", "0.00")}


def test_a_download_that_came_whole_is_bought_anew(shop, following):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    assert [following(f"{shop.url}/buy").text for _ in range(2)] == ["sold", "sold"]
    assert len(set(shop.nonces)) == 2


def test_one_call_pays_at_one_hop(shop, following, tmp_path):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/again", paid=True)))
    assert following(f"{shop.url}/buy").status_code == 200
    assert (len(shop.nonces), len(set(shop.nonces))) == (2, 1), "the next hop asks for money, and has the same payment"
    assert books(tmp_path) == {"proxy": ("0.01", "0.00")}


@pytest.mark.parametrize("hops", [["{other}/1"], ["{other}/1", "/2"], ["/1", "{other}/2", "/3"]], ids=len)
def test_no_host_is_paid_that_a_redirect_has_led_to(shop, following, hops):
    with Trickler() as other:
        places = ["/start", *(hop.removeprefix("{other}") for hop in hops)]
        for place, hop in zip(places, hops, strict=False):
            answer = redirect(hop.format(other=other.url))
            shop.answers[place] = other.answers[place] = lambda line, answer=answer: line.send(answer)
        refused = following(f"{shop.url}/start")
        assert (refused.status_code, refused.json()["rule"]) == (402, "redirect")
        assert (shop.nonces, other.nonces) == ([], [])


SECRETS = {"authorization": "Bearer of-the-shop", "cookie": "sid=1", "x-api-key": "of-the-shop"}


@pytest.mark.parametrize("hops", [["{other}/end"], ["{other}/1", "/end"]], ids=["one hop", "a second one within"])
def test_what_is_meant_for_one_host_goes_to_no_other_one(shop, following, hops):
    with Trickler() as other:
        shop.answers["/start"] = lambda line: line.send(redirect(hops[0].format(other=other.url)))
        other.answers["/1"] = lambda line: line.send(redirect("/end"))
        other.answers["/end"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
        assert following(f"{shop.url}/start", headers=SECRETS).text == "ok"
        assert {name: shop.asked[-1].header(name) for name in SECRETS} == SECRETS
        assert {other.asked[-1].header(name) for name in SECRETS} == {None}
        assert following(f"{other.url}/end", headers=SECRETS).text == "ok"
        assert {name: other.asked[-1].header(name) for name in SECRETS} == SECRETS, "one of its own is no hop"


def test_curl_that_follows_takes_no_credentials_along(shop, proxied):
    with Trickler() as other:
        shop.answers["/start"] = lambda line: line.send(redirect(f"{other.url}/end"))
        other.answers["/end"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
        token = ("-H", f"X402guard-Session: {proxied.token}", "-H", "authorization: Bearer of-the-shop")
        curl("-L", *token, f"{proxied.url}{shop.url}/start")
        assert other.asked[-1].header("authorization") is None


def test_a_redirect_below_the_endpoint_of_its_owner_keeps_the_key(tmp_path, shop):
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
        "X402GUARD_PROXY__PATHS": '["GET /openai/models/", "GET /openai/out"]',
    }
    shop.answers["/v1/models/"] = lambda line: line.send(redirect("/v1/models"))
    shop.answers["/v1/models"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    shop.answers["/v1/out"] = lambda line: line.send(redirect("/v1/..%2fadmin"))
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        assert where(asked(proxy, "openai/models/")) == "/openai/models"
        assert asked(proxy, "openai/models/", follow_redirects=True).text == "ok"
        assert shop.asked[-1].header("authorization") == "Bearer sk-owner"
        assert where(asked(proxy, "openai/out")) == f"/{shop.url}/v1/..%2fadmin"


def test_a_hop_is_known_to_its_caller_for_ten_minutes_however_often_it_is_asked_for():
    now = [time.monotonic()]
    hops, hop = Hops(lambda: now[0]), Hop(None, crosses=False)
    path = f"{PREFIX}{hops.name('a', hop)}/https://shop.example/x"
    assert [hops.find("a", path) for _ in range(2)] == [(hop, "/https://shop.example/x")] * 2
    unknown = Hop(None, crosses=True)
    assert hops.find("b", path) == (unknown, "/https://shop.example/x"), "another caller's is none of its own"
    for odd in (PREFIX, f"{PREFIX}none", f"{PREFIX}/x"):
        assert hops.find("a", odd)[0] == unknown
    assert hops.find("a", "/https://shop.example/x") == (None, "/https://shop.example/x")
    for _ in range(1_000):
        hops.name("b", hop)
    assert hops.find("a", path)[0] == hop, "each caller has a thousand"
    now[0] += 601
    assert hops.find("a", path)[0] == unknown
    for _ in range(1_000):
        hops.name("a", hop)
    assert len(hops._known["a"]) == 1_000


def where(answer):
    """The place to which an answer of the proxy leads, without the name of its hop."""
    return re.fullmatch(f"({PREFIX}[0-9a-f]{{16}})?(/.*)", answer.headers["location"])[2]


def test_callers_of_one_session_keep_their_hops_apart(shop, proxied, tmp_path):
    """Both have bought before either follows; one download comes whole, and the other one breaks."""
    for number in (1, 2):
        shop.answers[f"/buy/{number}"] = once_paid(
            lambda line, number=number: line.send(redirect(f"/download?of={number}", paid=True))
        )
    shop.answers["/download?of=1"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    shop.answers["/download?of=2"] = lambda line: line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n") or False
    first, second = (asked(proxied, f"{shop.url}/buy/{number}").headers["location"] for number in (1, 2))
    assert asked(proxied, first.removeprefix("/")).text == "sold"
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, second.removeprefix("/"))
    assert [asked(proxied, f"{shop.url}/buy/{number}").status_code for number in (2, 1)] == [302, 302]
    assert (len(shop.nonces), len(set(shop.nonces))) == (4, 3), "2 presents its payment, and 1 is bought anew"


def test_a_second_caller_for_the_same_waits_while_the_first_follows_its_redirect(shop, proxied):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    hop = asked(proxied, f"{shop.url}/buy").headers["location"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(asked, proxied, f"{shop.url}/buy", follow_redirects=True)
        time.sleep(0.5)
        assert not other.done()
        assert asked(proxied, hop.removeprefix("/")).text == "sold"
        assert other.result(20).text == "sold"
    assert len(set(shop.nonces)) == 2


def test_a_caller_whose_connection_broke_with_the_redirect_asks_again_at_once(shop, proxied):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    caller = connected(proxied)
    caller.sendall(
        f"GET /{shop.url}/buy HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\n\r\n".encode()
    )
    give_up = time.monotonic() + 20
    while not shop.nonces:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    time.sleep(0.2)
    caller.close()  # with its answer unread
    time.sleep(0.1)
    began = time.monotonic()
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert (len(set(shop.nonces)), time.monotonic() - began < 5) == (1, True)


def test_a_hop_that_is_asked_for_again_pays_no_second_time_and_may_still_deliver(shop, following, proxied, tmp_path):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    assert asked(proxied, hop).status_code == 200  # the shop asks for money there as well, and has it
    shop.answers["/download"] = lambda line: line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n") or False
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, hop)
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    assert asked(proxied, hop).text == "sold"
    shop.answers["/download"] = lambda line: line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n") or False
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, hop)  # once more, by a reader who has it
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 2, "what was delivered in the end is bought anew"
    assert books(tmp_path) == {"proxy": ("0.02", "0.00")}


def test_a_hop_that_is_not_known_any_more_is_paid_nothing(shop, proxied):
    answer = asked(proxied, f"_hop/0123456789abcdef/{shop.url}/page", headers=SECRETS)
    assert (answer.status_code, answer.json()["rule"], shop.nonces) == (402, "redirect", [])
    assert {shop.asked[-1].header(name) for name in SECRETS} == {None}


@pytest.mark.parametrize("place", ["/%2e%2e/%2e%2e/openai/models", "/a/.%2E/b", "{shop}/x/%2e/y"])
def test_a_redirect_with_dots_in_escapes_is_left_out(shop, proxied, place):
    """Some clients resolve them, and some do not: they would lead out of the path that the proxy has named."""
    shop.answers["/start"] = lambda line: line.send(redirect(place.format(shop=shop.url)))
    assert "location" not in asked(proxied, f"{shop.url}/start").headers


def test_a_strangers_redirect_changes_nothing_of_what_a_caller_asks_for_itself(tmp_path, shop):
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    shop.answers["/v1/models"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    with Trickler() as stranger, Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        stranger.answers["/evil"] = lambda line: line.send(redirect(f"{shop.url}/v1/models"))
        assert where(asked(proxy, f"{stranger.url}/evil")) == f"/{shop.url}/v1/models"
        assert asked(proxy, "openai/models", headers={"authorization": "Bearer of-the-caller"}).text == "ok"
        assert shop.asked[-1].header("authorization") == "Bearer of-the-caller"
        assert asked(proxy, f"{stranger.url}/evil", headers=SECRETS, follow_redirects=True).text == "ok"
        assert shop.asked[-1].header("authorization") is None, "the owner's key is not for a stranger's redirect"


@pytest.mark.parametrize("beside", ["SHA256SUMS", "download?part=2", "./"])
def test_a_page_beside_the_place_of_a_redirect_is_a_request_of_its_own(shop, proxied, beside):
    """A client joins what the page says to the URL that it sees, which has the name of the hop."""
    seen = httpx.URL(f"{proxied.url}{broken_download(shop, proxied)}")
    page = str(httpx.URL("/files/download").join(beside))
    shop.answers[page] = lambda line: line.send(HEAD + b"content-length: 3\r\n\r\nabc")
    with httpx.Client(trust_env=False, headers=proxied.header, timeout=30) as http:
        assert http.get(seen.join(beside)).text == "abc"
        assert asked(proxied, f"{shop.url}/buy").status_code == 302
        assert len(set(shop.nonces)) == 1, "what was paid for has not come with it"
        shop.answers[page] = once_paid(lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold"))
        assert http.get(seen.join(beside)).text == "sold", "it may cost money, as any page of this host"
    assert len(set(shop.nonces)) == 2


def test_a_page_beside_the_place_that_another_host_has_named_is_paid_nothing(shop, following):
    with Trickler() as other:
        shop.answers["/start"] = lambda line: line.send(redirect(f"{other.url}/list/1"))
        other.answers["/list/1"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nfree")
        seen = following(f"{shop.url}/start").url
        refused = following(str(seen.join("2")).partition(str(seen.netloc, "ascii") + "/")[2], headers=SECRETS)
        assert (refused.status_code, refused.json()["rule"]) == (402, "redirect")
        assert {other.asked[-1].header(name) for name in SECRETS} == {None}
        assert (shop.nonces, other.nonces) == ([], [])


@pytest.mark.parametrize(
    "written", ["/files/a%20b?c=%27d%27&e=f", "/files/a b?c='d'&e=f", "/files/%61%20b?c='d'&e=%66#top"]
)
def test_a_hop_is_known_however_a_client_escapes_its_place(shop, proxied, written):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/files/a%20b?c='d'&e=f", paid=True)))
    hop = asked(proxied, f"{shop.url}/buy").headers["location"]
    assert asked(proxied, hop.removeprefix("/").partition("/files")[0] + written).status_code == 200
    assert (len(shop.nonces), len(set(shop.nonces))) == (2, 1)


@pytest.mark.parametrize("place", ["/files/%2e/x", "ftp://a.example/x", "http://[bad/", "https:/a.example", "mailto:a"])
def test_what_is_paid_for_behind_a_place_that_is_left_out_has_not_come(shop, proxied, place):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect(place, paid=True)))
    answers = [asked(proxied, f"{shop.url}/buy") for _ in range(2)]
    assert [(each.status_code, "location" in each.headers) for each in answers] == [(302, False)] * 2
    assert len(set(shop.nonces)) == 1


@pytest.mark.parametrize("how", ["head", "part"])
def test_the_head_of_what_was_paid_for_or_a_part_of_it_is_not_all_of_it(shop, proxied, how):
    hop = broken_download(shop, proxied)
    whole = HEAD + b"content-length: 8\r\n\r\nall of i"
    part = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/8\r\ncontent-length: 4\r\n\r\nall "
    if how == "head":
        shop.answers["/files/download"] = lambda line: line.send(HEAD + b"content-length: 8\r\n\r\n")
        assert asked(proxied, hop, method="HEAD").status_code == 200
    else:
        shop.answers["/files/download"] = lambda line: line.send(part)
        assert asked(proxied, hop, headers={"range": "bytes=0-3"}).text == "all "
    shop.answers["/files/download"] = lambda line: line.send(BROKEN) or False
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, hop)
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    assert len(set(shop.nonces)) == 1
    shop.answers["/files/download"] = lambda line: line.send(whole)
    assert asked(proxied, hop).text == "all of i"
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 2, "bought anew, once all of it has come"


@pytest.mark.parametrize("status", [300, 305, 399])
def test_a_status_that_some_clients_follow_is_paid_at_one_hop(shop, proxied, status):
    named = redirect("/again", paid=True).replace(b"302 Found", f"{status} See".encode())
    shop.answers["/buy"] = once_paid(lambda line: line.send(named))
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    assert asked(proxied, hop).status_code == 200
    assert (len(shop.nonces), len(set(shop.nonces))) == (2, 1)


@pytest.mark.parametrize("place", ["/b\\{n}", "/x?y=\\{n}", "/files\\a\\{n}"])
def test_a_place_is_handed_out_without_a_backslash(shop, proxied, place):
    """Browsers and fetch read it as a slash, so the hop would be another one for them: each could pay."""
    for n in range(3):
        answer = once_paid(lambda line, n=n: line.send(redirect(place.format(n=n + 1), paid=True)))
        shop.answers[place.format(n=n)] = shop.answers[place.format(n=n).replace("\\", "%5C")] = answer
    where = asked(proxied, shop.url + place.format(n=0)).headers["location"]
    assert "\\" not in where
    asked(proxied, where.removeprefix("/").replace("%5C", "/"))  # as a client that reads it so asks for it
    asked(proxied, where.removeprefix("/"))
    assert len(set(shop.nonces)) == 1


@pytest.mark.parametrize("paid", [True, False], ids=["paid", "free"])
def test_no_backslash_leads_out_of_the_name_of_a_hop(shop, proxied, paid):
    with Trickler() as evil:
        place = "/x\\..\\..\\..\\..\\..\\" + evil.url.replace("//", "\\\\") + "\\sell"
        answer = redirect(place, paid=paid)
        shop.answers["/start"] = once_paid(lambda line: line.send(answer)) if paid else lambda line: line.send(answer)
        assert "location" not in asked(proxied, f"{shop.url}/start").headers
        assert evil.asked == []


def test_below_the_name_of_a_hop_another_host_is_paid_nothing(shop, proxied):
    with Trickler() as other:
        hop = broken_download(shop, proxied)
        name = hop.partition("http://")[0]
        refused = asked(proxied, f"{name}{other.url}/sell", headers=SECRETS)
        assert (refused.status_code, refused.json()["rule"], other.nonces) == (402, "one_payment_per_request", [])
        assert {other.asked[-1].header(each) for each in SECRETS} == {None}


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "POST"])
def test_an_answer_to_another_method_is_not_what_was_paid_for(shop, proxied, method):
    hop = broken_download(shop, proxied)
    shop.answers["/files/download"] = lambda line: line.send(HEAD + b"content-length: 0\r\n\r\n")
    assert asked(proxied, hop, method=method).status_code == 200
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 1


def test_the_word_that_nothing_has_changed_is_not_what_was_paid_for(shop, proxied):
    hop = broken_download(shop, proxied)
    shop.answers["/files/download"] = lambda line: line.send(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    assert asked(proxied, hop, headers={"if-none-match": '"a"'}).status_code == 304
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 1


def test_a_part_that_is_all_of_it_is_the_delivery(shop, proxied):
    hop = broken_download(shop, proxied)
    whole = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-7/8\r\ncontent-length: 8\r\n\r\nall of i"
    shop.answers["/files/download"] = lambda line: line.send(whole)
    assert asked(proxied, hop, headers={"range": "bytes=0-"}).text == "all of i"
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 2, "it has come, so it is bought anew"


def test_a_post_whose_result_is_fetched_by_get_has_come_with_it(shop, proxied):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/result", paid=True)))
    shop.answers["/result"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    for _ in range(2):
        hop = asked(proxied, f"{shop.url}/buy", method="POST").headers["location"].removeprefix("/")
        assert asked(proxied, hop).text == "sold"
    assert len(set(shop.nonces)) == 2


@pytest.mark.parametrize("how", ["head", "part"])
def test_an_answer_is_judged_by_its_own_request_also_beside_another_one(shop, proxied, how):
    """Two requests for one hop are the same call: the head comes while the whole is still under way, and breaks."""
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/files/download", paid=True)))
    asked_for, goes_on = threading.Event(), threading.Event()

    def goods(line):
        if line.asked.header("x-whole") is not None:
            asked_for.set()
            goes_on.wait(20)
            line.send(BROKEN)
            return False
        asked_for.wait(20)
        part = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/8\r\ncontent-length: 4\r\n\r\nall "
        line.send(HEAD + b"content-length: 8\r\n\r\n" if how == "head" else part)
        return None

    shop.answers["/files/download"] = goods
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    given = {"method": "HEAD"} if how == "head" else {"headers": {"range": "bytes=0-3"}}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asked, proxied, hop, **given)
        whole = pool.submit(asked, proxied, hop, headers={"x-whole": "1"})
        assert first.result(20).status_code in (200, 206)
        goes_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            whole.result(20)
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 1
