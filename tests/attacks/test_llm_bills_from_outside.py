"""What a reviewer from outside has tried, so that an LLM call costs less in the ledger than on its bill."""

from contextlib import suppress

import httpx
import pytest

from tests.support.merchant import client, make_guard
from x402guard import ConfigError, Metering, ModelPrice, PaymentRefused, Policy, Unpriced
from x402guard.errors import X402GuardError
from x402guard.stores import open_store

OPENAI = "https://api.openai.com/v1"
CLAUDE = "https://api.anthropic.com/v1/messages"
COHERE = "https://api.cohere.com/v2/chat"
MISTRAL = "https://api.mistral.ai/v1/audio/transcriptions"
WORDS = "hi " * 12_000
SAID = [{"role": "user", "content": WORDS}]
STANDARD = {"service_tier": "default"}
ENDED = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
FORM = {"content-type": "multipart/form-data; boundary=BBBB"}
SOUND = ('Content-Disposition: form-data; name="file"; filename="a.mp3"', b"\x00" * 100_000)
LINES = {"content-type": "text/event-stream"}


def asked(model, **more):
    return {"model": model, "messages": SAID, "max_tokens": 1_000, **more}


class Books:
    """Calls one mocked vendor in a session of its own, and reads what the ledger holds and books for it."""

    def __init__(self, answer, *, headers=None, policy=None, **metering):
        self.answer, self.headers, self.metering = answer, headers or {}, metering
        self.more = {} if policy is None else {"policy": policy}
        self.held = self.spent = self.still = 0

    def post(self, url, body=None, *, content=None, headers=None, poll=""):
        with (
            make_guard(metering=Metering(**self.metering), on_notice=lambda _: None, **self.more) as guard,
            guard.session("s", budget="$90000.00") as session,
        ):

            def vendor(request):
                self.held = self.held or int(session.held * 10**9)
                answer = self.answer(request) if callable(self.answer) else self.answer
                return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

            http = client(session, vendor)
            sent = {"content": content} if content is not None else {"json": body}
            http.post(url, headers=headers, follow_redirects=True, **sent)
            if poll:
                http.get(poll)
            self.spent, self.still = int(session.spent * 10**9), int(session.held * 10**9)
        return self


def form(*fields):
    """A form of these fields, each its headers and its value."""
    parts = [f"--BBBB\r\n{head}\r\n\r\n".encode() + value + b"\r\n" for head, value in fields]
    return b"".join(parts) + b"--BBBB--\r\n"


def named(name, value):
    return f"Content-Disposition: form-data; {name}", value.encode()


def events(*listed):
    return b"".join(b"data: " + each + b"\n\n" for each in listed)


@pytest.mark.parametrize(
    ("host", "more"),
    [
        ("api.openai.com", {}),
        ("eu.api.openai.com", {}),
        ("api.openai.com", {"service_tier": "priority"}),
        ("api.openai.com", {"prompt_cache_options": {"ttl": "12h"}}),
    ],
)
def test_a_background_response_costs_what_the_same_call_costs_that_waits(host, more):
    said = {"model": "gpt-6.1-sol", "input": WORDS, "max_output_tokens": 2_000, **more}
    used = {"input_tokens": 9_000, "output_tokens": 200, "total_tokens": 9_200}
    used["input_tokens_details"] = {"cache_write_tokens": 9_000}
    done = {"id": "resp_1", "status": "completed", "output": [], "model": "gpt-6.1-sol", "usage": used}
    queued = {**done, "status": "queued", "usage": None}
    url = f"https://{host}/v1/responses"
    direct = Books(done, price_context=STANDARD).post(url, said)
    behind = Books(lambda request: queued if request.method == "POST" else done, price_context=STANDARD)
    behind.post(url, {**said, "background": True}, poll=f"{url}/resp_1")
    assert (behind.held, behind.spent, behind.still) == (direct.held, direct.spent, 0)
    assert direct.spent > 0


@pytest.mark.parametrize(
    ("tool", "ran", "more"),
    [
        (
            {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "64g"}},
            {"type": "code_interpreter_call", "id": "c", "status": "completed"},
            {},
        ),
        (
            {"type": "image_generation", "model": "gpt-image-1"},
            {"type": "image_generation_call", "id": "i", "status": "completed"},
            {"tool_usage": {"image_gen": {"input_tokens": 60, "output_tokens": 7_024, "total_tokens": 7_084}}},
        ),
    ],
)
def test_the_tools_of_a_background_response_cost_what_they_cost_in_one_that_waits(tool, ran, more):
    allowances = {"code_execution": "$0.03", "image_generation": "$0.01"}
    said = {"model": "gpt-6-sol", "input": WORDS, "max_output_tokens": 2_000, "tools": [tool]}
    used = {"input_tokens": 9_000, "output_tokens": 200, "total_tokens": 9_200}
    done = {"id": "resp_1", "status": "completed", "output": [ran], "model": "gpt-6-sol", "usage": used, **more}
    queued = {**done, "status": "queued", "usage": None, "output": [], "tool_usage": None}
    direct = Books(done, allowances=allowances).post(f"{OPENAI}/responses", said)
    behind = Books(lambda request: queued if request.method == "POST" else done, allowances=allowances)
    behind.post(f"{OPENAI}/responses", {**said, "background": True}, poll=f"{OPENAI}/responses/resp_1")
    assert (behind.spent, behind.still) == (direct.spent, 0)


@pytest.mark.parametrize("differs", [{"id": "resp_2"}, {"status": "searching"}, {"status": None}])
def test_an_answer_to_a_poll_that_is_of_another_response_or_has_not_ended_frees_nothing(differs):
    done = {"id": "resp_1", "status": "completed", "output": [], "model": "gpt-6-sol"}
    used = {"usage": {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11}}
    books = Books(lambda request: {**done, **({"status": "queued"} if request.method == "POST" else used | differs)})
    said = {"model": "gpt-6-sol", "input": WORDS, "max_output_tokens": 2_000, "background": True}
    books.post(f"{OPENAI}/responses", said, poll=f"{OPENAI}/responses/resp_1")
    assert (books.spent, books.still) == (0, books.held)


@pytest.mark.parametrize(
    ("url", "model", "response"),
    [
        (COHERE, "command-a-03-2025", httpx.Response(500, json={"message": {"content": [{"type": "text", "text": "x"}]}})),
        (COHERE, "command-a-03-2025", httpx.Response(500, json={"message": {"words": "of the model"}})),
        (COHERE, "command-a-03-2025", httpx.Response(429, json={"message": {"content": [{"type": "text", "text": "x"}]}})),
        (f"{OPENAI}/chat/completions", "gpt-4o", httpx.Response(400, content=events(b'{"choices":[1]}'), headers=LINES)),
        (f"{OPENAI}/chat/completions", "gpt-4o", httpx.Response(500, json={"error": {"usage": {"total_tokens": 9_000}}})),
    ],
)  # fmt: skip
def test_an_error_that_may_have_been_billed_is_booked_at_its_ceiling(url, model, response):
    books = Books(response).post(url, asked(model))
    assert (books.spent, books.still) == (books.held, 0)
    assert books.held > 0


@pytest.mark.parametrize(
    "after", [b"words of the model", b'{"choices":[],"usage":{"completion_tokens":9,"completion_tokens":9}}', b"[1]"]
)
def test_what_cannot_be_read_after_an_error_in_a_stream_counts_as_content(after):
    content = events(b'{"error":{"message":"late"}}', after, b"[DONE]")
    books = Books(httpx.Response(200, content=content, headers=LINES))
    books.post(f"{OPENAI}/chat/completions", asked("gpt-4o", stream=True))
    assert books.spent == books.held > 0


@pytest.mark.parametrize(
    "listed",
    [
        [b'{"error":{"message":"late"},"choices":[{"index":0,"delta":{"content":"hi"}}]}'],
        [b'{"choices":[{"index":0,"delta":{"content":"hi"}}]}', b'{"error":{"message":"late"}}'],
    ],
    ids=["in it", "before it"],
)
def test_content_beside_an_error_of_a_stream_costs_the_ceiling(listed):
    books = Books(httpx.Response(200, content=events(*listed, b"[DONE]"), headers=LINES))
    books.post(f"{OPENAI}/chat/completions", asked("gpt-4o", stream=True))
    assert books.spent == books.held > 0


def test_lines_that_are_no_event_after_an_error_count_as_content():
    content = events(b'{"error":{"message":"late"}}') + b"words of the model\n\n" + events(b"[DONE]")
    books = Books(httpx.Response(200, content=content, headers=LINES))
    books.post(f"{OPENAI}/chat/completions", asked("gpt-4o", stream=True))
    assert books.spent == books.held > 0


def test_an_error_alone_in_a_stream_costs_nothing():
    content = events(b'{"error":{"message":"overloaded"}}', b"[DONE]")
    books = Books(httpx.Response(200, content=content, headers=LINES))
    books.post(f"{OPENAI}/chat/completions", asked("gpt-4o", stream=True))
    assert (books.spent, books.still) == (0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        (named('name="model"', "gpt-4o-mini-transcribe"), named('name="model"', "gpt-4o-transcribe"), SOUND),
        (SOUND,),
        (named('name="model"', "x" * 301), SOUND),
    ],
    ids=["two models", "no model", "a long name"],
)
def test_a_form_names_one_model(fields):
    with pytest.raises((PaymentRefused, Unpriced), match="model"):
        Books({"text": "x"}).post(f"{OPENAI}/audio/transcriptions", content=form(*fields), headers=FORM)


@pytest.mark.parametrize(
    "name",
    ['name="file_url"', 'name="file_url"; x=y', 'NAME="file_url"', "name='file_url'", "name*=utf-8''file_url",
     'name ="file_url"', 'name="FILE_URL"', 'name="file_url"\r\nX: y'],
)  # fmt: skip
def test_a_form_that_links_to_a_sound_is_refused_however_the_field_is_spelt(name):
    linked = form(named('name="model"', "voxtral-mini-latest"), named(name, "https://files.example/ten-hours.mp3"))
    with pytest.raises(X402GuardError):
        Books({"text": "x"}).post(MISTRAL, content=linked, headers=FORM)


@pytest.mark.parametrize(
    "before",
    [
        named('name="prompt"', 'say name="model"\r\n\r\ngpt-4o-mini-transcribe\r\nok'),
        (SOUND[0], b"\x00name=model\n\ngpt-4o-mini-transcribe\n" + SOUND[1]),
        named('name="x"; filename=name="model"', "gpt-4o-mini-transcribe"),
    ],
    ids=["in a field", "in the sound", "in a file's name"],
)
def test_what_only_looks_like_a_field_names_no_model(before):
    used = {"type": "tokens", "input_tokens": 9_000, "output_tokens": 9_000}
    used["input_token_details"] = {"audio_tokens": 9_000, "text_tokens": 0}
    answer, url = {"text": "x", "usage": used}, f"{OPENAI}/audio/transcriptions"
    plain = form(named('name="model"', "gpt-4o-transcribe"), SOUND)
    right = Books(answer).post(url, content=plain, headers=FORM).spent
    decoyed = form(before, named('name="model"', "gpt-4o-transcribe"))
    with suppress(X402GuardError):  # refused if servers do not read it alike
        assert Books(answer).post(url, content=decoyed, headers=FORM).spent == right > 0


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data; boundary=inner", "multipart/form-data; boundary=BBBB; boundary=inner", "multipart/form-data",
     "multipart/mixed; boundary=BBBB", "text/plain", "multipart/form-data; boundary*=utf-8''inner", "x\udc80",
     "multipart/form-data; boundary=BBBB, multipart/form-data; boundary=inner"],
)  # fmt: skip
def test_a_form_is_read_with_the_boundary_of_its_content_type_or_not_at_all(content_type):
    hidden = b'--inner\r\nContent-Disposition: form-data; name="model"\r\n\r\ngpt-4o-transcribe\r\n--inner--'
    fields = [named('name="model"', "gpt-4o-mini-transcribe"), ('Content-Disposition: form-data; name="p"', hidden)]
    headers = {"content-type": content_type.encode("utf-8", "surrogateescape")}
    with pytest.raises((X402GuardError, UnicodeError)):
        Books({"text": "x"}).post(f"{OPENAI}/audio/transcriptions", content=form(*fields, SOUND), headers=headers)


def test_a_field_that_says_two_names_is_read_by_nobody_alike():
    two = named('name="prompt"\r\nContent-Disposition: form-data; name="file_url"', "https://files.example/long.mp3")
    with pytest.raises(X402GuardError, match="no form that every server reads alike"):
        Books({}).post(MISTRAL, content=form(named('name="model"', "voxtral-mini-latest"), two), headers=FORM)


def test_a_sound_without_a_bit_to_say_is_held_by_the_length_that_it_states():
    seconds, rate = 7_200, 16_000
    told = (rate << 44 | 15 << 36 | seconds * rate).to_bytes(8)
    flac = b"fLaC\x80\x00\x00\x22" + b"\x10\x00" * 2 + bytes(6) + told + bytes(16)
    sent = form(named('name="model"', "whisper-1"), (SOUND[0], flac))
    books = Books({"text": "x"}).post(f"{OPENAI}/audio/transcriptions", content=sent, headers=FORM)
    assert books.spent == books.held == seconds * 100_000


def test_a_total_beyond_the_parts_of_a_transcription_is_billed():
    used = {"input_tokens": 9_000, "output_tokens": 9_000, "total_tokens": 90_000}
    sent = form(named('name="model"', "gpt-4o-transcribe"), SOUND)
    spent = [
        Books({"text": "x", "usage": each}).post(f"{OPENAI}/audio/transcriptions", content=sent, headers=FORM).spent
        for each in (used, {**used, "output_tokens": 81_000})
    ]
    assert spent[0] == spent[1] > 0


@pytest.mark.parametrize("units", [1_000_000, 10**20, 10**300])
def test_a_vast_count_of_a_listed_price_is_disputed_in_every_ledger(ledger_url, units):
    answer = {"results": [], "meta": {"billed_units": {"search_units": units}}}
    with make_guard(open_store(ledger_url)) as guard, guard.session("s", budget="$9000.00") as session:
        http = client(session, lambda _: httpx.Response(200, json=answer))
        http.post("https://api.cohere.com/v2/rerank", json={"model": "rerank-v3.5", "query": "q", "documents": ["a"]})
        assert (session.spent, session.held) == (2, 0)  # dollars: a thousand times the hold
        assert "disputed" in str(session.report().to_dict()["events"])


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({"duration": 36_000.5}, 36_001),
        ({"duration": "36000.5"}, 36_001),
        ({"usage": {"type": "duration", "seconds": "36000"}}, 36_000),
        ({"duration": 36_000.5, "usage": {"type": "duration", "seconds": 1}}, 36_001),
    ],
)
def test_the_longest_of_the_stated_lengths_is_billed(said, seconds):
    content = form(named('name="model"', "whisper-1"), SOUND)
    books = Books({"text": "x", **said}).post(f"{OPENAI}/audio/transcriptions", content=content, headers=FORM)
    assert books.spent >= (seconds - 1) * 100_000  # $0.006 a minute


@pytest.mark.parametrize("count", [9_000.0, "9000"])
def test_a_count_that_is_no_whole_number_is_read_or_costs_the_ceiling(count):
    used = {"prompt_tokens": count, "completion_tokens": 900}
    books = Books({**ENDED, "usage": used}, price_context=STANDARD)
    books.post(f"{OPENAI}/chat/completions", asked("gpt-4o"))
    assert books.spent >= 9_000 * 2_500 + 900 * 10_000


def test_a_last_count_of_nothing_frees_no_stated_tokens():
    start = b'{"type":"message_start","message":{"model":"claude-sonnet-5","usage":{"input_tokens":9000,"output_tokens":1}}}'
    ends = [
        b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":9000,"output_tokens":900}}',
        b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":0,"output_tokens":0}}',
    ]
    spent = []
    for listed in ([start, ends[0]], [start, *ends]):
        content = events(*listed, b'{"type":"message_stop"}')
        books = Books(httpx.Response(200, content=content, headers=LINES))
        spent.append(books.post(CLAUDE, asked("claude-sonnet-5", stream=True)).spent)
    assert spent[0] == spent[1] > 0


def test_a_usage_that_falls_in_a_chat_stream_is_not_the_last_one():
    full = b'{"choices":[],"usage":{"prompt_tokens":9000,"completion_tokens":900}}'
    none = b'{"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}'
    spent = []
    for listed in ([full], [full, none]):
        books = Books(httpx.Response(200, content=events(*listed, b"[DONE]"), headers=LINES), price_context=STANDARD)
        spent.append(books.post(f"{OPENAI}/chat/completions", asked("gpt-4o", stream=True)).spent)
    assert spent[0] == spent[1] > 0


def iterations(*rounds, model="claude-sonnet-5"):
    used = {"input_tokens": 1_000, "output_tokens": 100, "iterations": list(rounds)}
    return {**MESSAGE, "model": model, "usage": used}


def test_what_an_answer_totals_beyond_its_rounds_is_billed_though_it_also_has_a_compaction():
    compaction = {"type": "compaction", "input_tokens": 5_000, "output_tokens": 500}
    own = {"type": "message", "input_tokens": 400, "output_tokens": 60}
    books = Books(iterations(compaction, own)).post(CLAUDE, asked("claude-sonnet-5"))  # totals: 1,000 and 100
    assert books.spent == 6_000 * 2_000 + 600 * 10_000


def test_pictures_whose_counts_have_another_form_are_told_and_booked():
    tool = {"type": "image_generation", "model": "gpt-image-2"}
    ran = {"type": "image_generation_call", "id": "i", "status": "completed"}
    used = {"input_tokens": 9_000, "output_tokens": 200, "total_tokens": 9_200}
    done = {"id": "r", "status": "completed", "output": [ran], "model": "gpt-6-sol", "usage": used}
    said = {"model": "gpt-6-sol", "input": WORDS, "max_output_tokens": 2_000, "tools": [tool]}
    spent = []
    for stated in ({}, {"tool_usage": {"image_gen": [{"output_tokens": 7_024}]}}):
        books = Books({**done, **stated}, allowances={"image_generation": "$0.01"})
        spent.append(books.post(f"{OPENAI}/responses", said).spent)
    assert spent[0] < spent[1]


@pytest.mark.parametrize("tiers", [("priority", "default"), ("default", "priority")])
def test_of_two_stated_tiers_the_dearer_one_is_billed(tiers):
    used = {"prompt_tokens": 9_000, "completion_tokens": 900}
    spent = []
    for first, second in (tiers, ("priority", "priority")):
        answer = {**ENDED, "model": "gpt-5.5", "service_tier": first, "usage": {**used, "service_tier": second}}
        spent.append(Books(answer).post(f"{OPENAI}/chat/completions", asked("gpt-5.5")).spent)
    assert spent[0] == spent[1] > 0


def test_a_round_that_is_no_object_makes_the_answer_unreadable():
    own = {"type": "message", "input_tokens": 400, "output_tokens": 60}
    books = Books(iterations("a round of 9,000 tokens", own)).post(CLAUDE, asked("claude-sonnet-5"))
    assert books.spent == books.held > 0


def test_a_cache_of_an_adviser_that_lasts_an_hour_is_billed_as_one():
    spent = []
    for lifetime in ("5m", "1h"):
        caching = {"type": "ephemeral", "ttl": lifetime}
        tool = {"type": "advisor_20260301", "name": "advisor", "model": "claude-opus-5", "caching": caching}
        adviser = {"type": "advisor_message", "model": "claude-opus-5", "input_tokens": 10, "output_tokens": 10}
        answer = iterations({**adviser, "cache_creation_input_tokens": 9_000})
        books = Books(answer, allowances={"provider_tool": "$0.10"})
        spent.append(books.post(CLAUDE, asked("claude-sonnet-5", tools=[tool])).spent)
    assert spent[1] - spent[0] >= 9_000 * (10_000 - 6_250)


def test_a_fast_request_in_a_batch_has_no_price():
    part = {"custom_id": "1", "params": {**asked("claude-opus-5"), "speed": "fast"}}
    with pytest.raises(Unpriced, match=r"requests\[0\]\.speed: its price in a batch is unknown"):
        Books({}).post("https://api.anthropic.com/v1/messages/batches", {"requests": [part]})


def test_an_adviser_that_is_not_named_is_the_one_that_was_asked():
    tool = {"type": "advisor_20260301", "name": "advisor", "model": "claude-opus-5", "max_uses": 1}
    adviser = {"type": "advisor_message", "model": None, "input_tokens": 9_000, "output_tokens": 9_000}
    own = {"type": "message", "model": "claude-sonnet-5", "input_tokens": 1_000, "output_tokens": 100}
    spent = []
    for model in (None, "claude-opus-5"):
        books = Books(iterations(own, {**adviser, "model": model}), allowances={"provider_tool": "$0.10"})
        spent.append(books.post(CLAUDE, asked("claude-sonnet-5", tools=[tool])).spent)
    assert spent[0] >= spent[1] > 0


def test_the_own_model_under_a_name_with_a_date_is_billed_once_and_at_its_own_price():
    spent = []
    for name in ("claude-sonnet-4-5", "claude-sonnet-4-5-20250929"):
        own = {"type": "message", "model": name, "input_tokens": 1_000, "output_tokens": 100}
        books = Books(iterations(own, model=name)).post(CLAUDE, asked("claude-sonnet-4-5"))
        spent.append(books.spent)
    assert spent[0] == spent[1] == 1_000 * 3_000 + 100 * 15_000


def test_cached_input_above_a_threshold_costs_its_input_unless_it_has_a_price():
    price = ModelPrice(input="2", output="10", above={200_000: {"input": "20"}})
    used = {"prompt_tokens": 300_000, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 300_000}}
    books = Books({**ENDED, "model": "own", "usage": used}, models={"own": price}, price_context=STANDARD)
    books.post(f"{OPENAI}/chat/completions", {**asked("own"), "messages": [{"role": "user", "content": WORDS * 26}]})
    assert books.spent == 6_000_000_000


@pytest.mark.parametrize("name", ["Priority", "priority"])
def test_the_name_of_a_tier_is_the_same_in_capitals(name):
    price = ModelPrice(input="1", output="1", tiers={name: "10"})
    used = {"prompt_tokens": 9_000, "completion_tokens": 900}
    books = Books({**ENDED, "model": "own", "service_tier": "priority", "usage": used}, models={"own": price})
    assert books.post(f"{OPENAI}/chat/completions", asked("own")).spent == 9_900 * 10_000


def test_a_unit_without_a_price_for_shorter_requests_is_refused():
    with pytest.raises(ConfigError, match="name it in units too"):
        ModelPrice(input="2", output="10", above={200_000: {"input_audio_tokens": "200"}})


def test_the_refusal_of_a_like_names_the_setting():
    books = Books({}, models={"own": ModelPrice(like="gpt-6-sool")})
    with pytest.raises(Unpriced, match=r"metering\.models says that 'own' costs as much as 'gpt-6-sool'"):
        books.post(f"{OPENAI}/chat/completions", asked("own"))


@pytest.mark.parametrize(
    "place",
    [
        "https://llm.example/pay-now-please/v1/chat/completions",
        f"{OPENAI}/pay-now-please",
        "https://generativelanguage.googleapis.com/v1beta/models/pay-now-please:generateContent",
    ],
)
def test_the_path_that_a_redirect_has_named_is_not_told(place):
    books = Books(httpx.Response(307, headers={"location": place}), policy=Policy.careful())
    with pytest.raises(PaymentRefused) as refused:
        books.post("https://shop.example/x", {"model": "m", "messages": [1], "contents": [1]})
    assert "pay-now-please" not in str(refused.value)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_api_that_shares_a_path_but_names_no_model_is_not_stopped(path):
    books = Books({"ok": True}, policy=Policy.careful())
    assert books.post(f"https://sms.example{path}", {"to": "bob", "input": "hi", "message": "hi"}).spent == 0


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08packed", b"model=m&prompt=x"])
def test_a_body_that_cannot_be_read_may_speak_to_a_model(content):
    with pytest.raises(PaymentRefused, match="unknown_llm_hosts"):
        Books({}, policy=Policy.careful()).post("https://llm.example/v1/chat/completions", content=content)


@pytest.mark.parametrize(
    "changes",
    [
        lambda n: {"messages": [{"role": "user", "content": f"document {n}"}, {"role": "user", "content": "Classify it."}]},
        lambda n: {"messages": [{"role": "system", "content": f"You are {n}."}, {"role": "user", "content": "Go on."}]},
        lambda n: {"messages": SAID, "seed": n},
    ],
    ids=["documents", "instructions", "seeds"],
)  # fmt: skip
def test_calls_that_end_alike_but_ask_for_something_else_are_no_loop(changes):
    with make_guard(policy=Policy(velocity=None)) as guard, guard.session("s", budget="$500.00") as session:
        used = {"prompt_tokens": 9, "completion_tokens": 9}
        http = client(session, lambda _: httpx.Response(200, json={**ENDED, "usage": used}))
        for n in range(40):
            http.post(f"{OPENAI}/chat/completions", json=asked("gpt-4o") | changes(n))
