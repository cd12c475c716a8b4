"""What a connection's error says of a request, and what it does not: HTTP/2, proxies, bodies that never end.

A server of HTTP/2 reads a request, refuses its stream, and is gone: the pool dials again, and that error says too much.

The error is that of a connection, but the request has left: the payment may be taken, and the call may be billed.
"""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import anyio
import httpx
import httpx2
import pytest

from tests.support.http_server import needs_http2
from tests.support.merchant import accept, b64, make_guard, receipt, recover_payment, required
from x402guard import AsyncGuardedTransport, CallTimeout, GuardedTransport, Policy, SettlementUncertain
from x402guard import httpx2 as guarded2
from x402guard.llm import Metering, ModelPrice
from x402guard.policy.timeouts import Timeouts

pytestmark = needs_http2
KINDS = {
    ("httpx", "sync"): (httpx.Client, httpx.HTTPTransport, GuardedTransport),
    ("httpx", "async"): (httpx.AsyncClient, httpx.AsyncHTTPTransport, AsyncGuardedTransport),
    ("httpx2", "sync"): (httpx2.Client, httpx2.HTTPTransport, guarded2.GuardedTransport),
    ("httpx2", "async"): (httpx2.AsyncClient, httpx2.AsyncHTTPTransport, guarded2.AsyncGuardedTransport),
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 100}


class Thief:
    """Takes one request that it wants, says that it has not seen it, and hangs up for good."""

    def __init__(self, listener):
        self.listener, self.wanted, self.taken = listener, {}, []
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve(self):
        while not self.taken:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # the test is over
            with connection:
                self._talk(connection)

    def _talk(self, connection):
        import h2.config
        import h2.connection
        import h2.events

        peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        peer.initiate_connection()
        connection.sendall(peer.data_to_send())
        while data := connection.recv(65_536):
            for event in peer.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    self._hear(peer, event)
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id in self.wanted:
                    self.taken.append(self.wanted[event.stream_id])
                    peer.close_connection(last_stream_id=event.stream_id - 2)
            if self.taken:
                self.listener.close()  # before the answer: the pool dials at once
            connection.sendall(peer.data_to_send())
            if self.taken:
                return

    def _hear(self, peer, event):
        heads = dict(event.headers)
        wanted = heads.get("payment-signature") or (heads[":path"].startswith("/v1") and "a call")
        if wanted:
            self.wanted[event.stream_id] = wanted
            return
        if heads[":path"] == "/free":
            peer.send_headers(event.stream_id, [(":status", "204")], end_stream=True)
            return
        offer = b64(required(accept(10_000), url=f"{self.url}{heads[':path']}"))
        lines = [(":status", "402"), ("payment-required", offer), ("content-length", "0")]
        peer.send_headers(event.stream_id, lines, end_stream=True)


@contextmanager
def thief():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Thief(listener)
        thread = threading.Thread(target=found.serve, daemon=True)
        thread.start()
        yield found
        listener.close()
        thread.join(5)


def send(kind, session, url, *, http2=True, method="GET", first=None, **more):
    """Send a request by one client, after a free one to *first*: the stream that is refused is not its connection's first."""
    client, inner, guarded = KINDS[kind]
    transport = guarded(session, inner(http1=not http2, http2=http2))
    if kind[1] == "sync":
        with client(transport=transport) as http:
            if first:
                http.get(first)
            return http.request(method, url, **more)

    async def go():
        async with client(transport=transport) as http:
            if first:
                await http.get(first)
            return await http.request(method, url, **more)

    return anyio.run(go)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_payment_that_a_server_has_read_and_refused_is_uncertain(kind):
    with thief() as seller, make_guard() as guard, guard.session("s", budget="$0.03") as session:
        with pytest.raises(SettlementUncertain) as caught:
            send(kind, session, f"{seller.url}/x")
        assert caught.value.money_may_have_moved
        assert str(session.held) == "0.01"
        [payment] = seller.taken
        assert f"{recover_payment(payment)[1]:064x}".endswith(caught.value.hold_id[-8:])


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_an_llm_call_that_a_server_has_read_and_refused_counts_its_ceiling(kind):
    with thief() as model:
        metering = Metering(endpoints={f"{model.url}/v1": "openai"}, models={"m": ModelPrice(input="1", output="10")})
        with make_guard(metering=metering) as guard, guard.session("s", budget="$1") as session:
            with pytest.raises((httpx.ConnectError, httpx2.ConnectError)):
                url = f"{model.url}/v1/chat/completions"
                send(kind, session, url, method="POST", first=f"{model.url}/free", json=CHAT)
            assert model.taken
            assert session.spent + session.held > 0


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_payment_for_which_there_is_no_connection_costs_nothing(kind):
    """The seller is gone once it has made its offer. The caller's own trace hears of both requests."""
    seen = []
    with leaving() as url, make_guard() as guard, guard.session("s", budget="$0.03") as session:
        with pytest.raises((httpx.ConnectError, httpx2.ConnectError)):
            send(kind, session, url, http2=False, extensions={"trace": trace_of(kind, seen)})
        assert session.spent + session.held == 0
        assert not guard.context.in_flight
        assert [event for event in seen if event.endswith("connect_tcp.failed")]


@contextmanager
def leaving():
    """Yield the URL of a seller that makes one offer over HTTP/1.1, and is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        offer = b64(required(accept(10_000), url=url))
        head = f"HTTP/1.1 402 Pay\r\npayment-required: {offer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

        def answers():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                listener.close()
                connection.sendall(head.encode())

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        yield url
        thread.join(5)


def trace_of(kind, seen):
    """Return a caller's own trace."""
    if kind[1] == "sync":
        return lambda event, _info: seen.append(event)

    async def note(event, _info):
        seen.append(event)

    return note


@contextmanager
def stalling():
    """Yield the URL of a seller that sends one piece of what was paid for, and pings from then on."""
    import h2.config
    import h2.connection
    import h2.events

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        offer = b64(required(accept(10_000), url=url))

        def talk(connection):
            peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
            peer.initiate_connection()
            connection.sendall(peer.data_to_send())
            while data := connection.recv(65_536):
                for event in peer.receive_data(data):
                    if not isinstance(event, h2.events.RequestReceived):
                        continue
                    if "payment-signature" not in dict(event.headers):
                        heads = [(":status", "402"), ("payment-required", offer), ("content-length", "0")]
                        peer.send_headers(event.stream_id, heads, end_stream=True)
                        continue
                    peer.send_headers(event.stream_id, [(":status", "200"), ("payment-response", b64(receipt()))])
                    peer.send_data(event.stream_id, b"part")
                    for number in range(200):
                        connection.sendall(peer.data_to_send())
                        if over.wait(0.05):
                            return
                        peer.ping(number.to_bytes(8, "big"))
                connection.sendall(peer.data_to_send())

        def serve():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield url
        over.set()
        thread.join(5)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_body_of_which_only_pings_come_ends_at_its_deadline(kind):
    """Each frame begins the client's own time limit anew."""
    policy = Policy(timeouts=Timeouts(payment_s=1))
    with stalling() as url, make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
        began_s = time.monotonic()
        with pytest.raises(CallTimeout):
            send(kind, session, url)
        assert time.monotonic() - began_s < 5
        assert str(session.spent) == "0.01"


@contextmanager
def refusing_proxy(status):
    """Yield the URL of a proxy that opens no tunnel, or hangs up, and the CONNECTs that it has seen."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(65_536).split(b" ")[0])
                    if status:
                        connection.sendall(f"HTTP/1.1 {status} No\r\ncontent-length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("status", [402, 407, 502, None])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_an_llm_call_for_which_a_proxy_opens_no_tunnel_costs_nothing(kind, status):
    client, inner, guarded = KINDS[kind]
    with refusing_proxy(status) as (proxy, seen), make_guard() as guard, guard.session("s", budget="$1") as session:
        transport = guarded(session, inner(proxy=proxy))

        def post():
            with client(transport=transport) as http:
                http.post("https://api.openai.com/v1/chat/completions", json={**CHAT, "model": "gpt-4o"})

        async def post_async():
            async with client(transport=transport) as http:
                await http.post("https://api.openai.com/v1/chat/completions", json={**CHAT, "model": "gpt-4o"})

        with pytest.raises((httpx.TransportError, httpx2.TransportError)):
            post() if kind[1] == "sync" else anyio.run(post_async)
        assert seen == [b"CONNECT"]
        assert session.spent + session.held == 0
