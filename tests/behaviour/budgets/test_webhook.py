"""Notices are posted by a thread of their own: signed, tried again, and felt by no payment."""

import hashlib
import hmac
import json
import logging
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.support import processes
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Notice, Policy, Webhook
from x402guard.flow import background
from x402guard.guard import notices as telling
from x402guard.guard.notices import NoticeSender

SECRET = "a secret of the test only"


class Receiver:
    """A real server on loopback. ``answers`` are given in turn, the last again and again: a status, or a function."""

    def __init__(self, *answers):
        self.answers, self.got, self.lock, self.arrived = (
            list(answers or [200]),
            [],
            threading.Lock(),
            threading.Condition(),
        )

    def __enter__(self):
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with receiver.arrived:
                    receiver.got.append((self.path, dict(self.headers.items()), body))
                    answer = receiver.answers[min(len(receiver.got), len(receiver.answers)) - 1]
                    receiver.arrived.notify_all()
                answer(self) if callable(answer) else self.say(answer)

            def say(self, status, **headers):
                self.send_response(status)
                for name, value in {"content-length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/hook"

    def wait_for(self, count, seconds=20):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.got) >= count, seconds), f"{len(self.got)} of {count} came"
        return self.got

    @property
    def bodies(self):
        return [json.loads(body) for _, _, body in self.got]

    @property
    def percents(self):
        return [body["facts"]["percent"] for body in self.bodies]


@contextmanager
def webhooked(receiver, ledger="memory://", pauses_s=(0.01,) * 4, **more):
    """A guard that posts to the receiver, and tries again after next to no pause."""
    with make_guard(ledger, webhook=Webhook(url=receiver.url, secret=SECRET), **more) as guard:
        guard._notifier._pauses_s = pauses_s
        yield guard


def spend(guard, *cents, name="run"):
    session = guard.session(name, budget="$1.00")  # it stays open: its end would be one more notice
    for amount in cents:
        session.charge("serp", f"$0.{amount:02d}")


def verified(headers, body, secret=SECRET):
    """What a receiver does, by RFC 2104 and the words of the documentation alone."""
    fields = dict(part.split("=", 1) for part in headers["x402guard-signature"].split(","))
    assert abs(int(fields["t"]) - time.time()) < 60
    expected = hmac.new(secret.encode(), fields["t"].encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected, fields["v1"])


def test_each_part_is_posted_once_in_order_and_signed(ledger_url):
    with Receiver() as receiver:
        with webhooked(receiver, ledger_url) as guard:
            spend(guard, 50, 10, 20, 15, name="für Ünïcode „7“")
        assert receiver.percents == [50, 80, 90]
        first = receiver.bodies[0]
        assert (first["kind"], first["severity"], first["amount"], first["limit"]) == (
            "soft_limit",
            "warning",
            "0.50",
            "1.00",
        )
        assert first["facts"]["name"] == "für Ünïcode „7“"
        assert set(first) == {"kind", "severity", "message", "session", "amount", "limit", "rule", "time", "facts"}
        assert "over 50 %" in first["message"]
        for path, headers, body in receiver.got:
            assert (path, headers["content-type"]) == ("/hook", "application/json")
            assert verified(headers, body)
            assert not verified(headers, body + b" ")
            assert not verified(headers, body, "another secret of the test")
        assert len({headers["x402guard-delivery"] for _, headers, _ in receiver.got}) == 3


def test_a_500_is_tried_again_until_it_is_taken_as_the_same_delivery():
    with Receiver(500, 503, 200) as receiver:
        with webhooked(receiver) as guard:
            spend(guard, 60, 25)
        posted = [(headers["x402guard-delivery"], body) for _, headers, body in receiver.got]
        assert len(posted) == 4
        assert posted[0] == posted[1] == posted[2] != posted[3]
        assert all(verified(headers, body) for _, headers, body in receiver.got)
        assert receiver.percents == [50, 50, 50, 80]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 599])
def test_what_passes_is_waited_for(status, caplog):
    with Receiver(status, 204) as receiver, webhooked(receiver) as guard:
        spend(guard, 60)
        receiver.wait_for(2)
    assert len(receiver.got) == 2
    assert "could not be delivered" not in caplog.text


@pytest.mark.parametrize("status", [400, 401, 404, 410, 302])
def test_what_is_refused_is_not_sent_again_and_the_log_says_so(status, caplog):
    with Receiver(status) as receiver:
        with webhooked(receiver) as guard:
            spend(guard, 60, 25)
        assert receiver.percents == [50, 80]
    problems = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert problems == [f"webhook: a notice could not be delivered: status {status}"] * 2


def test_a_redirect_is_not_followed():
    with Receiver() as elsewhere:
        with (
            Receiver(lambda handler: handler.say(307, location=elsewhere.url)) as receiver,
            webhooked(receiver) as guard,
        ):
            spend(guard, 60)
        assert (len(receiver.got), elsewhere.got) == (1, [])


def test_one_delivery_is_tried_five_times_at_most(caplog):
    with Receiver(500) as receiver:
        with webhooked(receiver, pauses_s=tuple(0.001 for _ in telling._PAUSES_S)) as guard:
            spend(guard, 60)
        assert len(receiver.got) == 5
    assert "webhook: a notice could not be delivered: status 500" in caplog.text


def test_a_receiver_that_hangs_is_felt_by_no_payment():
    let_go = threading.Event()

    def hangs(handler):
        let_go.wait(30)
        handler.say(200)

    shop = Shop()
    with Receiver(hangs) as receiver:
        try:
            with webhooked(receiver) as guard:
                session = guard.session("run", budget="$0.10")
                http = client(session, shop)
                for number in range(5):
                    http.get(f"{URL}/{number}")
                session.charge("serp", "$0.05")
                receiver.wait_for(1)  # it hangs now, and all goes on
                spend(guard, 60, 25, 10, name="other")
                began = time.monotonic()
            closing = time.monotonic() - began
        finally:
            let_go.set()
    assert len(shop.payments) == 5
    assert closing < 8, "closing waits a few seconds at most"


def test_a_receiver_that_is_not_there_is_felt_by_no_payment(caplog):
    with Receiver() as receiver:
        pass  # its port is free again
    with webhooked(receiver) as guard:
        spend(guard, 60, 25, 10)
    assert "could not be delivered: ConnectError" in caplog.text


@pytest.mark.parametrize(
    "breaks",
    [
        lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx"),
        lambda handler: handler.wfile.write(b"not HTTP at all\r\n\r\n"),
        lambda handler: handler.wfile.write(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nxyz"
        ),
        lambda handler: handler.wfile.write(b"HTTP/1.1 307 Go\r\nlocation: http://[\r\ncontent-length: 0\r\n\r\n"),
    ],
)
def test_what_a_broken_receiver_says_stops_no_later_delivery(breaks):
    with Receiver(breaks, 200) as receiver:
        with webhooked(receiver, pauses_s=(0.01,)) as guard:
            spend(guard, 60, 25)
        assert set(receiver.percents) == {50, 80}


@pytest.mark.parametrize("head", [True, False], ids=["its body", "its head"])
def test_an_answer_that_never_ends_holds_up_no_later_notice(head, monkeypatch):
    monkeypatch.setattr(telling, "_WAIT_S", 0.3)
    stop = threading.Event()

    def never_ends(handler):
        if head:
            handler.say(200, **{"content-length": "1000000000"})
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        for _ in range(1_000):
            if stop.wait(0.02):
                return
            handler.wfile.write(b"x")
            handler.wfile.flush()

    with Receiver(never_ends, 200) as receiver:
        try:
            with webhooked(receiver) as guard:
                spend(guard, 60, 25)
                receiver.wait_for(2, 3)
        finally:
            stop.set()


def test_the_function_and_the_webhook_are_both_told_and_neither_stops_the_other():
    told = []

    def fails(notice):
        told.append(notice.facts["percent"])
        raise ValueError("no")

    with Receiver(400) as receiver:
        with webhooked(receiver, on_notice=fails) as guard:
            spend(guard, 60, 25)
        assert told == receiver.percents == [50, 80]


def test_an_open_breaker_is_told_in_the_same_ways():
    told = []
    shop = Shop(paid=lambda _request, _shop: httpx.Response(500))
    with Receiver() as receiver:
        with webhooked(receiver, on_notice=told.append, policy=Policy(loop=None)) as guard:
            with guard.session("run", budget="$5.00") as session:
                for number in range(3):
                    client(session, shop).get(f"{URL}/{number}")
            guard.close()
        assert {body["kind"] for body in receiver.bodies} == {notice.kind for notice in told}
        assert {notice.kind for notice in told} == {"breaker_open", "session_ended"}
        assert all(verified(headers, body) for _, headers, body in receiver.got)


def test_more_than_can_wait_are_in_the_log_alone(caplog, monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 100)
    let_go = threading.Event()

    def hangs(handler):
        let_go.wait(30)
        handler.say(200)

    with Receiver(hangs) as receiver:
        sender = NoticeSender(None, Webhook(url=receiver.url, secret=SECRET), pauses_s=())
        sender.notify([Notice("first", "info", "m")])
        receiver.wait_for(1)
        sender.notify([Notice("many", "info", "m", facts={"n": n}) for n in range(background.MOST_WAITING + 5)])
        let_go.set()
        receiver.wait_for(1 + background.MOST_WAITING, 60)
        sender.close()
    told = [record.message for record in caplog.records if "dropped" in record.message]  # once a minute, and at the end
    assert told == ["webhook: 100 wait already; 1 dropped", "webhook: 4 more dropped"]


def test_closing_delivers_what_waits_and_closing_twice_is_fine():
    with Receiver() as receiver:
        sender = NoticeSender(None, Webhook(url=receiver.url, secret=SECRET))
        sender.notify([Notice("n", "info", "m", facts={"n": n}) for n in range(50)])
        sender.close()
        assert [body["facts"]["n"] for body in receiver.bodies] == list(range(50))
        sender.close()


def test_a_secret_is_shown_by_nothing():
    webhook = Webhook(url="https://example.com/x", secret=SECRET)
    assert SECRET not in repr(webhook)
    with pytest.raises(TypeError, match="secret"):
        webhook.__reduce__()


UNCLOSED = """
import sys, time
from x402guard import Guard, Webhook

def told(notice):
    time.sleep(0.3)
    print(notice.kind, flush=True)

guard = Guard(ledger="memory://", on_notice=told, webhook=Webhook(url=sys.argv[1], secret=sys.argv[2]))
session = guard.session("s", budget="$1.00")
session.trip("it looks wrong")
"""


@pytest.mark.parametrize("hangs_s", [0, 0.5, 60])
def test_a_process_that_ends_without_closing_its_guard_tells_why_and_ends(hangs_s):
    def slow(handler):
        time.sleep(hangs_s)
        handler.say(204)

    with Receiver(slow) as receiver:
        began = time.monotonic()
        with processes.start(UNCLOSED, receiver.url, SECRET) as agent:
            out, _ = agent.communicate()
        assert time.monotonic() - began < 15
        assert [json.loads(body)["kind"] for _, _, body in receiver.got] == ["tripped"]
        assert out == "tripped\n"
