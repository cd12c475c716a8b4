"""The transport inside the guarded one: entered and left with it, and given the whole body each time."""

import httpx

from tests.support.merchant import (
    Shop,
    client,
    make_guard,
)
from x402guard import (
    GuardedTransport,
)


def test_an_inner_transport_is_entered_and_left():
    seen = []

    class Inner(httpx.MockTransport):
        def __enter__(self):
            seen.append("entered")
            return self

        def __exit__(self, *args):
            seen.append("left")

    with make_guard() as guard:
        session = guard.session("s", budget="$1")
        with httpx.Client(transport=GuardedTransport(session, Inner(Shop()))):
            pass
    assert seen == ["entered", "left"]


def test_a_large_multipart_body_is_sent_whole_again_after_a_redirect():
    sizes = []

    def answer(request):
        sizes.append(len(request.read()))
        return (
            httpx.Response(307, headers={"location": "/there"}) if request.url.path == "/here" else httpx.Response(200)
        )

    with make_guard(max_body_bytes=1000) as guard:
        session = guard.session("s", budget="$1")
        http = client(session, answer, follow_redirects=True)
        assert http.post("https://a.example/here", files={"f": b"x" * 200_000}).status_code == 200
    assert sizes[0] == sizes[1] > 200_000
