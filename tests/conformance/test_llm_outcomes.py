"""How a call ends decides what it costs: nothing, what was used, or its ceiling. Over every transport, on every ledger."""

import gzip
import json
import socket
import threading
import zlib
from contextlib import closing, contextmanager, suppress

import pytest

from tests.support.llm_provider import (
    CHAT,
    ERROR,
    GEMINI,
    SYNC,
    USED,
    Answer,
    Provider,
    ask,
    both_modes,
    chunk,
    completion,
    every_way,
    metered,
    sse,
)

VOID, CEILING, USAGE = "void", "ceiling", "usage"


@pytest.fixture
def session():
    with metered() as session:
        yield session


# -- by status -----------------------------------------------------------------------------------------------------------

STATUSES = [
    *((status, completion(), USAGE) for status in (200, 201)),
    *((status, b"", VOID) for status in (301, 304, 307, 308)),
    *((status, b"", CEILING) for status in (302, 303)),  # a client gets the answer by a GET then
    *((status, ERROR, VOID) for status in (400, 401, 403, 404, 409, 413, 422, 429)),
    *((status, b"", VOID) for status in (400, 429)),
    *((status, body, CEILING) for status in (408, 499) for body in (ERROR, b"")),
    *((status, ERROR, VOID) for status in (500, 502, 503, 504, 529)),
    *((status, b"", CEILING) for status in (500, 503, 529)),
    (502, b"<html><h1>502 Bad Gateway</h1></html>", VOID),
    (520, b"error code: 520", VOID),
    (503, b"upstream connect error or disconnect/reset before headers. reset reason: overflow", VOID),
    (504, b"<html><h1>504 Gateway Time-out</h1></html>", CEILING),
    (524, b"error code: 524", CEILING),
    (500, b'data: {"choices": []}', CEILING),
    (500, {**ERROR, "choices": completion()["choices"]}, CEILING),
    (500, {**ERROR, "usage": USED}, CEILING),
    (500, completion(), CEILING),
    (500, {"error": None}, CEILING),
    (500, b'{"error": {"message": "cut', CEILING),
    (500, {"error": {"message": "x" * 300_000}}, CEILING),  # more than is looked at
]


@pytest.mark.one_in(3)
@every_way
@pytest.mark.parametrize(("status", "content", "outcome"), STATUSES, ids=lambda value: str(value)[:40])
def test_a_status_and_its_body_decide_what_a_call_costs(way, session, status, content, outcome):
    provider = Provider(session, Answer.of(content, status))
    response, chunks = way.post(session, provider)
    assert provider.outcome == outcome
    assert (response.status_code, b"".join(chunks)) == (status, provider.answers[0].pieces[0])


@both_modes
@pytest.mark.parametrize(
    ("answer", "outcome"), [(Answer.of(), USAGE), (Answer.of(ERROR, 503), VOID), ("ReadError", CEILING)]
)
def test_every_ledger_books_the_same(way, ledger_url, answer, outcome):
    with metered(ledger_url) as session:
        provider = Provider(session, answer)
        with suppress(way.library.ReadError):
            way.post(session, provider)
        assert provider.outcome == outcome


@every_way
@pytest.mark.parametrize(("content", "outcome"), [(ERROR, VOID), (b"", CEILING), (b"<html>", VOID)])
def test_an_error_that_nobody_reads_is_judged_by_its_body_all_the_same(way, session, content, outcome):
    provider = Provider(session, Answer.of(content, 503))
    way.post(session, provider, take=0)
    assert provider.outcome == outcome
    assert provider.answers[0].closed


ERRORS = {
    "openai": (CHAT, ask(), ERROR),
    "anthropic": (
        "https://api.anthropic.com/v1/messages",
        ask(model="claude-sonnet-4-5", max_tokens=100, max_completion_tokens=None),
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
    ),
    "google": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
        {"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}},
    ),
    "google, streamed": (
        f"{GEMINI}:streamGenerateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}},
        [{"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}}],
    ),
    "mistral": (
        "https://api.mistral.ai/v1/chat/completions",
        ask(model="mistral-small-latest", max_tokens=100, max_completion_tokens=None),
        {
            "object": "error",
            "message": "Service unavailable.",
            "type": "unreachable_backend",
            "param": None,
            "code": "1100",
        },
    ),
    "cohere": (
        "https://api.cohere.com/v2/chat",
        ask(model="command-r-08-2024", max_tokens=100, max_completion_tokens=None),
        {"message": "internal server error, this has been reported to our developers.", "id": "1"},
    ),
}


@pytest.mark.parametrize(("url", "body", "error"), ERRORS.values(), ids=ERRORS)
def test_each_providers_own_error_costs_nothing(url, body, error):
    with metered() as session:
        provider = Provider(session, Answer.of(error if isinstance(error, dict) else json.dumps(error), 503))
        SYNC.post(session, provider, body, url=url)
        assert provider.outcome == VOID


@every_way
@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"content-encoding": "gzip, gzip"}, gzip.compress(gzip.compress(json.dumps(ERROR).encode()))),
        ({"content-encoding": "gzip"}, gzip.compress(json.dumps(ERROR).encode() + b" " * 5_000_000)),
        ({"content-encoding": "gzip"}, b"no gzip at all"),
        ({"content-encoding": "br"}, b"\x0b\x02\x80{}\x03"),
    ],
    ids=["two layers", "a bomb", "broken", "unknown"],
)
def test_an_error_that_cannot_be_unpacked_costs_the_ceiling_and_is_handed_over(way, session, headers, content):
    provider = Provider(session, Answer.of(content, 503, headers=headers))
    response, chunks = way.post(session, provider)
    assert provider.outcome == CEILING
    assert (response.status_code, b"".join(chunks)) == (503, content)


@every_way
def test_an_errors_body_that_breaks_off_breaks_off_for_the_caller_too(way, session):
    provider = Provider(session, Answer(503, [b'{"error": '], breaks="ReadError"))
    with pytest.raises(way.library.ReadError):
        way.post(session, provider)
    assert provider.outcome == CEILING


# -- no answer -------------------------------------------------------------------------------------------------------------

LOST = [
    "ReadTimeout",
    "ReadError",
    "RemoteProtocolError",
    "WriteError",
    "WriteTimeout",
    "ConnectError",
    OSError("reset"),
]


@every_way
@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_answer_costs_the_ceiling_and_raises_what_the_library_raises(way, session, error):
    """A transport of the caller's own may say "ConnectError" of anything: only the stock ones are believed."""
    provider = Provider(session, error)
    expected = getattr(way.library, error) if isinstance(error, str) else OSError
    with pytest.raises(expected) as caught:
        way.post(session, provider)
    assert type(caught.value) is expected
    assert provider.outcome == CEILING


@every_way
def test_ctrl_c_while_a_call_is_out_costs_the_ceiling(way, session):
    provider = Provider(session, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        way.post(session, provider)
    assert provider.outcome == CEILING


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@every_way
def test_a_call_that_never_got_a_connection_costs_nothing(way):
    url = f"http://127.0.0.1:{free_port()}/v1"
    with metered(endpoints={url: "openai"}) as session:
        with pytest.raises(way.library.ConnectError):
            way.post(session, url=f"{url}/chat/completions")
        assert Provider(session).outcome == VOID


@contextmanager
def raw_server(answer):
    """Answers every connection with these bytes, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    asked = b""
                    while not asked.endswith(b"}"):
                        asked += connection.recv(65_536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@every_way
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        HEAD + b"content-length: 500\r\n\r\n" + json.dumps(completion()).encode(),
        HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"usa\r\n',
        b"nothing of HTTP\r\n\r\n",
    ],
    ids=["none", "half a head", "short of its length", "chunks without an end", "garbage"],
)  # fmt: skip
def test_a_connection_that_is_cut_costs_the_ceiling(way, answer):
    with raw_server(answer) as url, metered(endpoints={url: "openai"}) as session:
        with pytest.raises(way.library.RemoteProtocolError):
            way.post(session, url=f"{url}/chat/completions")
        assert Provider(session).outcome == CEILING


# -- an answer that is not read to its end, or cannot be read ----------------------------------------------------------------

STREAM = sse(chunk("Y"), chunk("es"), chunk(finish="stop"), chunk(usage=USED, choices=[]), "[DONE]")
WHOLE = json.dumps(completion()).encode()


@every_way
@pytest.mark.parametrize("answer", [Answer.stream(*STREAM[:2]), Answer.of(WHOLE[:40])], ids=["stream", "whole"])
@pytest.mark.parametrize("error", ["ReadError", "RemoteProtocolError", "ReadTimeout"])
def test_an_answer_that_breaks_off_costs_the_ceiling_and_raises(way, session, answer, error):
    provider = Provider(session, Answer(200, answer.pieces, answer.headers, breaks=error))
    with pytest.raises(getattr(way.library, error)):
        way.post(session, provider, ask(stream=True))
    assert provider.outcome == CEILING


@every_way
@pytest.mark.parametrize(
    ("answer", "taken", "outcome"),
    [
        (Answer.stream(*STREAM), 0, CEILING),
        (Answer.stream(*STREAM), 1, CEILING),
        (Answer.stream(*STREAM[:3]), None, CEILING),
        (Answer.stream(*STREAM[:3], breaks="ReadError"), 3, CEILING),
        (Answer.stream(*STREAM), 4, USAGE),  # all but [DONE]: it had said what it bills
        (Answer.stream(*STREAM[:4], breaks="ReadError"), 4, USAGE),
        (Answer(200, [WHOLE[:40], WHOLE[40:]], {"content-type": "application/json"}), 1, CEILING),
    ],
    ids=["unread", "one chunk", "no usage", "closed before a cut", "all but the end", "cut at the end", "half"],
)  # fmt: skip
def test_a_stream_that_is_left_costs_its_ceiling_unless_it_had_said_all(way, session, answer, taken, outcome):
    answer = Answer(200, answer.pieces, answer.headers, answer.breaks)
    provider = Provider(session, answer)
    way.post(session, provider, ask(stream=True, stream_options={"include_usage": True}), take=taken)
    assert provider.outcome == outcome
    assert answer.closed


UNREADABLE = {
    "empty": b"",
    "html": b"<html>welcome to the captive portal</html>",
    "half": WHOLE[:-1],
    "two": WHOLE + WHOLE,
    "twice": WHOLE[:-1] + b', "usage": {"prompt_tokens": 0, "completion_tokens": 0}}',
    "NaN": WHOLE.replace(b"20", b"NaN"),
    "text": b'"usage"',
    "array": b"[]",
    "not utf-8": b"\xff\xfe\x00" + WHOLE,
}


@pytest.mark.one_in(3)
@every_way
@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_body_that_cannot_be_read_costs_the_ceiling_and_is_handed_over(way, body, kind):
    with metered() as session:
        provider = Provider(session, Answer.of(body, headers={"content-type": kind}))
        assert b"".join(way.post(session, provider)[1]) == body
        assert provider.outcome == CEILING


def deflated(body):
    return zlib.compress(body)


@every_way
@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (gzip.compress, "x-gzip"), (deflated, "deflate")])
@pytest.mark.parametrize(("kind", "body"), [("application/json", WHOLE), ("text/event-stream", b"".join(STREAM))])
def test_an_answer_that_is_packed_although_nobody_asked_is_read_all_the_same(way, pack, name, kind, body):
    packed = pack(body)
    with metered() as session:
        answer = Answer(200, [packed[:30], packed[30:]], {"content-type": kind, "content-encoding": name})
        provider = Provider(session, answer)
        _, chunks = way.post(session, provider, ask(stream=True))
        assert [request.headers["accept-encoding"] for request in provider.requests] == ["identity"]
        assert (provider.outcome, b"".join(chunks)) == (USAGE, packed)


@every_way
@pytest.mark.parametrize("name", ["br", "zstd", "gzip, gzip", "gzip"])
def test_an_answer_that_does_not_unpack_costs_the_ceiling(way, name):
    with metered() as session:
        provider = Provider(session, Answer.of(WHOLE, headers={"content-encoding": name}))
        assert b"".join(way.post(session, provider)[1]) == WHOLE
        assert provider.outcome == CEILING
