"""A merchant on a loopback socket that speaks HTTP/1.1 or HTTP/2 (with prior knowledge), and hangs up when it is told to."""

import importlib.util
import socketserver
import threading
from contextlib import contextmanager

import h11
import httpx
import pytest

HAS_HTTP2 = importlib.util.find_spec("h2") is not None
needs_http2 = pytest.mark.skipif(not HAS_HTTP2, reason="h2 is not installed: pip install 'httpx[http2]'")
WIRES = ["HTTP/1.1", pytest.param("HTTP/2", marks=needs_http2)]
_CHUNK = 65_536


class HangUpError(Exception):
    """Raised by a shop to end the connection without an answer."""


def _answer(shop, method, target, headers) -> tuple[int, list, bytes]:
    """The shop's status, header lines and body."""
    response = shop(httpx.Request(method, f"http://127.0.0.1{target}", headers=headers))
    lines = [(name.lower(), value) for name, value in response.headers.raw if name.lower() != b"transfer-encoding"]
    return response.status_code, lines, response.content


class _Http1(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        peer = h11.Connection(h11.SERVER)
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(self.request.recv(_CHUNK))
            elif isinstance(event, h11.Request):
                asked = event
            elif isinstance(event, h11.EndOfMessage):
                asking = (asked.method.decode(), asked.target.decode(), list(asked.headers))
                status, lines, body = _answer(self.server.shop, *asking)
                sent = peer.send(h11.Response(status_code=status, headers=lines)) + (peer.send(h11.Data(body)) or b"")
                self.request.sendall(sent + peer.send(h11.EndOfMessage()))
                peer.start_next_cycle()
            elif not isinstance(event, h11.Data):
                return


class _Http2(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        import h2.config
        import h2.connection
        import h2.events

        peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        peer.initiate_connection()
        self.request.sendall(peer.data_to_send())
        asked = {}
        while data := self.request.recv(_CHUNK):
            for event in peer.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    asked[event.stream_id] = event.headers
                elif isinstance(event, h2.events.StreamEnded):
                    lines = [(bytes(name), bytes(value)) for name, value in asked.pop(event.stream_id)]
                    first = dict(lines)
                    plain = [(name, value) for name, value in lines if not name.startswith(b":")]
                    asking = (first[b":method"].decode(), first[b":path"].decode(), plain)
                    status, told, body = _answer(self.server.shop, *asking)
                    peer.send_headers(event.stream_id, [(b":status", str(status).encode()), *told])
                    peer.send_data(event.stream_id, body, end_stream=True)
            self.request.sendall(peer.data_to_send())


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True

    def handle_error(self, request, client_address) -> None:
        """A shop that hangs up has said what it wanted; anything else is told by the test's own thread."""


@contextmanager
def serving(shop, wire):
    """Serve *shop*, a function from request to response; yields its URL."""
    server = _Server(("127.0.0.1", 0), _Http1 if wire == "HTTP/1.1" else _Http2)
    server.shop = shop
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
