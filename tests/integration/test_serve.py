"""The live page over real HTTP: who looks can change nothing, who has the owner's token can, and no other site can."""

import contextlib
import json
import re
import signal
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import processes
from tests.support.browser import CLIPPED, LOW_CONTRAST, browser, needs_browser
from tests.support.command_line import typed
from tests.support.merchant import make_guard
from tests.support.scenes import SCRIPT, busy
from x402guard import Owner, SessionTripped
from x402guard.views.page import policy_of


class Served:
    """``x402guard serve`` as a process of its own."""

    def __init__(self, folder, *options, **environment):
        self.process = processes.start(
            "x402guard",
            "serve",
            "--ledger",
            "spend.db",
            "--port",
            "0",
            *options,
            module=True,
            cwd=folder,
            env=environment,
        )
        self.said, self.is_ending = "", False
        while "Ctrl-C ends it." not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line
        self.url = re.search(r"http://[^ ]+/", self.said)[0]
        self.owner = (re.search(r"owner's token (\S+)", self.said) or [None, ""])[1]

    def __enter__(self):
        return self

    def end(self):
        """Press Ctrl-C once: a second one would meet an interpreter that is ending already."""
        if not self.is_ending:
            self.is_ending = True
            self.process.send_signal(signal.SIGINT)

    def __exit__(self, *_):
        self.end()
        said, errors = self.process.communicate(timeout=20)
        assert "Traceback" not in (said or "") + (errors or "")
        assert self.process.returncode in (0, -signal.SIGINT)

    @property
    def bearer(self):
        return {"authorization": f"Bearer {self.owner}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with make_guard(f"sqlite:///{folder / 'spend.db'}") as guard:
        busy(guard)
        yield folder, guard


@pytest.fixture(scope="module")
def served(folder):
    with Served(folder[0], "--owner") as server:
        yield server


def events(server, most=1, **more):
    with httpx.stream("GET", server.url + "events", timeout=20, **more) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        found = []
        for line in stream.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == most:
                return found


def test_the_page_and_its_events_are_of_the_ledger(served, folder):
    answer = httpx.get(served.url)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy == f"{policy_of(answer.text)}; frame-ancestors 'none'"
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert SCRIPT not in answer.text.replace("</script></body>", "")
    with Owner(folder[0] / "spend.db", read_only=True) as owner:
        spent = owner.live().spent
    [first] = events(served)
    assert set(first["sections"]) == {
        "now", "asks", "sessions", "latches", "customers", "out", "lines", "pick-customer", "pick-agent",
    }  # fmt: skip
    assert f"${spent / 10**9:.5f}".rstrip("0") in first["sections"]["now"]


def test_what_happens_arrives(served, folder):
    with httpx.stream("GET", served.url + "events", timeout=20) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        next(lines)
        with folder[1].session("seen at once", budget="$1.00") as session:
            session.charge("serp", "$0.07")
            news = next(lines)
    assert "seen at once" in json.loads(news[6:])["sections"]["sessions"]


def test_prometheus_reads_the_sums(served, folder):
    with Owner(folder[0] / "spend.db", read_only=True) as owner:
        view = owner.live()
    until, found = time.monotonic() + 10, {}
    while found.get(("x402guard_wallet_spent_dollars",)) != view.spent / 10**9 and time.monotonic() < until:
        answer = httpx.get(served.url + "metrics")  # at most a second old
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name, *sample.labels.values()] = sample.value
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found["x402guard_wallet_spent_dollars",] == view.spent / 10**9
    assert found["x402guard_wallet_held_dollars",] == view.out / 10**9
    assert found["x402guard_spent_dollars", "Kestrel"] == 0.2
    assert found["x402guard_left_dollars", "Kestrel"] == 2.8
    assert found["x402guard_sessions", "stopped"] == view.counts()["stopped"]
    assert found["x402guard_refusals_total", "budget"] == dict(view.refused)["budget"] == 4
    assert httpx.get(served.url + "metrics", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["answer", "stop"])
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer " + "x" * 32}, {"authorization": "Basic eDp5"}, {"authorization": ""}]
)
def test_who_only_looks_can_change_nothing(served, path, headers):
    form = {"session": "wallet", "reason": "no", "ask": "1", "answer": "allow"}
    here = {"origin": served.url.rstrip("/"), "cookie": f"x402guard={served.owner}"}
    assert httpx.post(served.url + path, data=form, headers=here | headers).status_code == 403
    assert httpx.get(served.url + path, headers=headers).status_code == 405


def test_no_other_site_can_reach_the_page(served):
    """A name of another site that was turned to this machine; the token itself is in no cookie, so none sends it."""
    assert "set-cookie" not in httpx.get(served.url, headers=served.bearer).headers
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        for path in ("", "events", "metrics"):
            answer = httpx.get(served.url + path, headers={"host": host})
            assert (answer.status_code, "$" in answer.text) in ((403, False), (400, False))
        rebound = {**served.bearer, "host": host, "origin": f"http://{host}"}
        assert httpx.post(served.url + "stop", data={"session": "wallet"}, headers=rebound).status_code in (400, 403)
    for host in ("localhost", "LOCALHOST:1", "[::1]", "127.0.0.1:8402"):
        assert httpx.get(served.url, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("token", ["x" * 32, "\xfc" * 20, "Bearer", "a b"])
def test_a_wrong_token_lets_nothing(served, token):
    headers = {"authorization": f"Bearer {token}".encode("latin-1")}
    answer = httpx.get(served.url + "events", headers=headers)
    assert (answer.status_code, "This is not a token of this server" in answer.text) == (403, True)
    assert httpx.get(served.url + "metrics", headers=headers).status_code == 403
    assert "Kestrel" not in httpx.get(served.url, headers=headers).text


def test_the_owner_stops_a_session_and_is_told_what_is_wrong(served, folder):
    with folder[1].session("to stop", budget="$1.00") as session:
        session.charge("serp", "$0.01")  # another process sees it from its first hold on
        form = {"session": session.id, "reason": "<b>enough</b>"}
        assert httpx.post(served.url + "stop", data=form, headers=served.bearer).text == "stopped"
        with pytest.raises(SessionTripped, match="<b>enough</b>"):
            session.charge("serp", "$0.01")
    for path, form, status, words in (
        ("stop", {"session": "nowhere"}, 409, "there is no session"),
        ("answer", {"ask": "nothing", "answer": "allow"}, 409, "no question has the id"),
        ("answer", {"ask": "nothing", "answer": "Allow"}, 409, "it is neither allow nor deny"),
        ("stop", {"session": "x", "reason": "y" * 5_000}, 413, "too large"),
    ):
        answer = httpx.post(served.url + path, data=form, headers=served.bearer)
        assert (answer.status_code, words in answer.text) == (status, True)


def test_beyond_this_machine_a_token_is_needed_to_look(folder):
    with Served(folder[0], "--host", "0.0.0.0") as server:  # noqa: S104 - a test, which ends it
        at = f"http://127.0.0.1:{server.url.rstrip('/').rpartition(':')[2]}/"
        assert socket.gethostname() in server.said
        empty = httpx.get(at)
        assert (empty.status_code, "Sign in" in empty.text, "Kestrel" in empty.text) == (200, True, False)
        assert httpx.get(at + "events").status_code == 403
        token = re.search(r"sign in there with the token (\S+)", server.said)[1]
        assert httpx.get(at, headers={"authorization": f"Bearer {token}"}).status_code == 200
        form = {"session": "wallet"}
        assert httpx.post(at + "stop", data=form, headers={"authorization": f"Bearer {token}"}).status_code == 403


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", "70000"), "65535"),
        (
            ("--host", "no.such.host.invalid", "--ledger", "spend.db"),
            "--host: no.such.host.invalid is no address of this machine",
        ),
        (("--ledger", "nowhere.db"), "nowhere.db"),
        (("--host", "a..b", "--ledger", "spend.db"), "--host: a..b is no address of this machine"),
    ],
)
def test_a_mistake_is_told_in_one_line(folder, options, words):
    done = typed("serve", *options, cwd=folder[0])
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_of_another_site_gets_nothing(served):
    script = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    for path in ("", "events", "metrics"):
        assert httpx.get(served.url + path, headers=script).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}  # as from a chat or a mail
    assert httpx.get(served.url, headers=link).status_code == 200


@pytest.mark.long
def test_silent_connections_keep_no_one_out_for_long(folder):
    with Served(folder[0]) as server, contextlib.ExitStack() as opened:
        at = ("127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2]))
        for _ in range(205):
            opened.enter_context(socket.create_connection(at))
        until = time.monotonic() + 15
        while httpx.get(server.url).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.5)


def test_a_port_that_is_taken_is_told(served, folder):
    port = served.url.rstrip("/").rpartition(":")[2]
    done = typed("serve", "--ledger", "spend.db", "--port", port, cwd=folder[0])
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened at" in done.stderr


# -- in a browser -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1280])
def test_the_live_page_is_readable(served, folder, width, scheme):
    with folder[1].session("open now", budget="$1.00") as session, browser() as chromium:
        session.charge("serp", "$0.10")
        page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(served.url)
        page.locator("#link", has_text="UTC").wait_for(timeout=10_000)
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate("document.querySelectorAll('[style]').length") == 0


@pytest.mark.long
@needs_browser
def test_a_stop_that_fails_is_not_shown_as_done(folder):
    with Served(folder[0], "--owner") as server, browser() as chromium:
        page = chromium.new_page()
        page.goto(server.url)
        page.evaluate("token => sessionStorage.setItem('x402guard', token)", server.owner)
        page.reload()
        page.get_by_text("signed in as owner").wait_for()
        page.route("**/stop", lambda route: route.fulfill(status=403, body="Only the owner's token may do this."))
        page.locator("#stop").click()
        page.locator("#really").click()
        page.get_by_text("Not stopped: Only the owner's token may do this.").wait_for()
        assert page.locator("#stopping").is_visible()
        page.route("**/stop", lambda route: route.abort())
        page.locator("#really").click()
        page.get_by_text("may have done it or not").wait_for()


@pytest.mark.long
@needs_browser
def test_old_figures_are_told(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard, guard.session("run", budget="$1.00"):
        with browser() as chromium, Served(tmp_path) as server:
            page = chromium.new_page()
            page.goto(server.url)
            page.locator("#link", has_text="UTC").wait_for()
            server.end()
            page.get_by_text("These figures are old.").wait_for()


@pytest.mark.long
@needs_browser
def test_the_owner_signs_in_searches_and_stops_by_keyboard(served, folder):
    with folder[1].session("by keyboard", budget="$1.00") as session, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(served.url)
        page.locator("#signing").focus()
        page.keyboard.press("Enter")
        page.keyboard.type(served.owner)
        page.keyboard.press("Enter")
        page.get_by_text("signed in as owner").wait_for()
        assert page.context.cookies() == []
        page.locator("#filters input").focus()
        page.keyboard.type("by keyboard")
        page.locator("#sessions", has_text="1 of ").wait_for()
        page.locator(f'[data-key="stop {session.id}"]').focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "keep"
        page.locator("#reason").focus()
        page.keyboard.type("seen enough")
        page.locator("#really").focus()
        page.keyboard.press("Enter")
        page.locator("#sessions", has_text="■ stopped").wait_for()
        with pytest.raises(SessionTripped, match="seen enough"):
            session.charge("serp", "$0.01")
