"""What is not text: taken out of a request, and counted by what it measures or held for at an allowance."""

import base64
import json
import struct
import zlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from x402guard import Metering
from x402guard.ledger.authorize import Refusal
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.request import read_call
from x402guard.vendors.media import Media, audio_tokens, image_size, image_tokens, media_kind
from x402guard.vendors.prices import PricedModel
from x402guard.vendors.routes import find_endpoint, find_route

# Files of each format, small and whole.


def png(width, height):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(b"".join(b"\0" + bytes(width) for _ in range(height)))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif(width, height, version=b"89a"):
    return b"GIF" + version + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + b"\x3b"


def segment(marker, data):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def jpeg(width, height, *before, frame=0xC0):
    jfif = segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
    size = segment(frame, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
    tables = segment(0xDB, b"\0" + bytes(64)), segment(0xC4, b"\0" + bytes(16))
    return (
        b"\xff\xd8"
        + jfif
        + b"".join(before)
        + b"".join(tables)
        + size
        + segment(0xDA, b"\1\1\0\0\x3f\0")
        + b"\0\xff\xd9"
    )


def riff(name, data):
    chunk = name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def webp_lossy(width, height):
    return riff(b"VP8 ", b"\x30\1\0\x9d\x01\x2a" + struct.pack("<HH", width | 0x4000, height) + bytes(8))


def webp_lossless(width, height):
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", width - 1 | (height - 1) << 14) + bytes(5))


def webp_extended(width, height):
    return riff(b"VP8X", b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"))


FORMATS = {
    "png": png,
    "gif89a": gif,
    "gif87a": lambda w, h: gif(w, h, b"87a"),
    "jpeg": jpeg,
    "progressive jpeg": lambda w, h: jpeg(w, h, frame=0xC2),
    "jpeg with a preview": lambda w, h: jpeg(w, h, segment(0xE1, b"Exif\0\0" + jpeg(16, 16))),
    "jpeg with a long profile": lambda w, h: jpeg(w, h, *[segment(0xE2, bytes(65_000))] * 5),
    "jpeg with filled markers": lambda w, h: jpeg(w, h, b"\xff\xff\xff"),
    "webp lossy": webp_lossy,
    "webp lossless": webp_lossless,
    "webp extended": webp_extended,
}


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (37, 2_051)])
@pytest.mark.parametrize("name", FORMATS)
def test_dimensions_are_read_from_a_pictures_first_bytes(name, size):
    assert image_size(FORMATS[name](*size)) == size


@pytest.mark.parametrize("name", FORMATS)
def test_dimensions_are_read_through_any_base64(name):
    plain = base64.b64encode(FORMATS[name](640, 480)).decode()
    wrapped = "\r\n".join(plain[at : at + 76] for at in range(0, len(plain), 76))
    url_safe = plain.replace("+", "-").replace("/", "_")
    for encoded in (plain, wrapped, url_safe, plain.rstrip("="), url_safe.rstrip("=")):
        part = Media.of("f", "image/x", encoded, "low")
        assert (part.kind, part.width, part.height, part.detail) == ("image", 640, 480, "low")
    assert abs(Media.of("f", "image/x", plain).size - len(FORMATS[name](640, 480))) < 3


def test_a_preview_so_large_that_the_picture_lies_beyond_it_leaves_the_size_unread():
    assert (
        Media.of("f", "image/jpeg", base64.b64encode(jpeg(9, 9, *[segment(0xE2, bytes(65_000))] * 9)).decode()).width
        is None
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"BM\0\0", b"\x89PNG\r\n\x1a\n", b"GIF89a\1\0", b"\xff\xd8", b"\xff\xd8\xff\xe0\0\0", b"RIFF\0\0\0\0WEBP"],
)
def test_what_does_not_say_its_size_has_none(data):
    assert image_size(data) is None


@given(
    start=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"RIFF....WEBPVP8X"]),
    rest=st.binary(max_size=60),
)
def test_no_bytes_break_the_reading_and_no_size_is_zero(start, rest):
    size = image_size(start + rest)
    assert size is None or min(size) > 0
    Media.of("f", "image/png", rest.decode("latin-1"))


@pytest.mark.parametrize(
    ("mime", "kind"),
    [("image/png", "image"), ("IMAGE/JPEG", "image"), ("audio/wav", "audio"), ("video/mp4", "video"),
     ("application/pdf", "document"), ("text/plain", "document"), ("", "document"), ("imagex/png", "document")],
)  # fmt: skip
def test_a_mime_type_says_what_a_part_is(mime, kind):
    assert media_kind(mime) == kind


# Tokens of a picture.


def picture(width, height, detail=""):
    return Media("image", "f", 1, width, height, detail)


PUBLISHED = [
    # OpenAI, "Images and vision", calculating costs.
    ("openai", "gpt-4o", (1024, 1024, "high"), 765),
    ("openai", "gpt-4o", (2048, 4096, "high"), 1_105),
    ("openai", "gpt-4o", (4096, 2048, ""), 1_105),
    ("openai", "gpt-4o", (4096, 8192, "low"), 85),
    ("openai", "gpt-4o-2024-11-20", (1024, 1024, "auto"), 765),
    ("azure", "gpt-4o", (1024, 1024, "high"), 765),
    ("openai", "gpt-4.1", (1024, 1024, "high"), 85 + 4 * 170),
    ("openai", "gpt-4o-mini", (1024, 1024, "high"), 2_833 + 4 * 5_667),
    ("openai", "gpt-4o-mini", (1024, 1024, "low"), 2_833),
    ("openai", "gpt-5", (1024, 1024, "high"), 70 + 4 * 140),
    ("openai", "o1", (1024, 1024, "high"), 75 + 4 * 150),
    ("openai", "gpt-4.1-mini", (1024, 1024, ""), 1_659),  # 1,024 patches x 1.62
    ("openai", "gpt-5-mini", (1024, 1024, ""), 1_659),
    ("openai", "gpt-4.1-nano", (1024, 1024, ""), 2_520),  # 1,024 x 2.46
    ("openai", "o4-mini", (1024, 1024, ""), 1_762),  # 1,024 x 1.72
    ("openai", "o4-mini", (33, 31, ""), 4),  # 2 patches, 3.44
    # Anthropic, "Vision", evaluate image size.
    ("anthropic", "claude-sonnet-4-5", (1000, 1000, ""), 1_334),
    ("anthropic", "claude-sonnet-4-5", (1092, 1092, ""), 1_590),
    # Google, "Image understanding", token calculation.
    ("google", "gemini-2.5-flash", (384, 384, ""), 258),
    ("google", "gemini-2.5-flash", (1, 1, ""), 258),
    ("google", "gemini-2.5-flash", (960, 540, ""), 6 * 258),
]  # fmt: skip


@pytest.mark.parametrize(("provider", "model", "size", "tokens"), PUBLISHED)
def test_a_picture_counts_what_its_provider_publishes(provider, model, size, tokens):
    assert image_tokens(provider, model, picture(*size)) == tokens


AT_LEAST = [
    ("openai", "gpt-4.1-mini", (1800, 2400, ""), 2_353),  # scaled to 1,452 patches, x 1.62
    ("openai", "gpt-4.5-preview", (64, 64, "high"), 85 + 170),
    ("openai", "chatgpt-4o-latest", (64, 64, "high"), 85 + 170),
    ("anthropic", "claude-sonnet-4-5", (200, 200, ""), 54),
    ("anthropic", "claude-opus-4-7", (1920, 1080, ""), 2_765),
    ("google", "gemini-3-pro-preview", (100, 100, ""), 1_120),  # media_resolution_high
    ("mistral", "pixtral-large-latest", (1024, 1024, ""), 64 * 64 + 64),  # 16 x 16, and the end of each row
    ("openrouter", "openai/gpt-4o", (64, 64, "high"), 85 + 170),
    ("openrouter", "openai/gpt-4o-mini", (1024, 1024, "high"), 2_833 + 4 * 5_667),
    ("openrouter", "google/gemini-2.5-flash", (100, 100, ""), 258),
    ("openrouter", "anthropic/claude-sonnet-4.5", (1000, 1000, ""), 1_334),
]


@pytest.mark.parametrize(("provider", "model", "size", "tokens"), AT_LEAST)
def test_a_picture_counts_at_least_what_it_is_billed_at(provider, model, size, tokens):
    assert image_tokens(provider, model, picture(*size)) >= tokens


@given(width=st.integers(1, 9_000), height=st.integers(1, 9_000))
def test_a_larger_picture_never_counts_less_and_none_counts_nothing(width, height):
    for provider, model in [
        ("openai", "gpt-4o"),
        ("openai", "gpt-5-mini"),
        ("anthropic", "claude-opus-4-7"),
        ("mistral", "x"),
    ]:
        count = image_tokens(provider, model, picture(width, height))
        assert 0 < count <= image_tokens(provider, model, picture(2 * width, 2 * height))
        assert count == image_tokens(provider, model, picture(height, width))


def test_a_picture_without_a_size_has_no_count():
    assert image_tokens("openai", "gpt-4o", Media("image", "f", 10)) is None


# Requests.

PATHS = {
    "chat": ("api.openai.com", "/v1/chat/completions"),
    "responses": ("api.openai.com", "/v1/responses"),
    "messages": ("api.anthropic.com", "/v1/messages"),
    "gemini": ("generativelanguage.googleapis.com", "/v1beta/models/gemini-2.5-pro:generateContent"),
    "mistral": ("api.mistral.ai", "/v1/chat/completions"),
    "cohere": ("api.cohere.com", "/v2/chat"),
    "cohere_embed": ("api.cohere.com", "/v2/embed"),
}
PIXELS = base64.b64encode(png(640, 480)).decode()
DATA_URL = f"data:image/png;base64,{PIXELS}"


def read(place, body):
    host, path = PATHS[place]
    return read_call(
        find_route(find_endpoint(host, path, ()), path), json.dumps({"model": "some-model", **body}).encode()
    )


class OneDollar:
    """A dollar a million tokens, in or out; two where they are sound."""

    def __init__(self, *sound):
        self.units = frozenset({"input_tokens", "output_tokens", *sound})

    def find(self, provider, model, at_unix):
        return PricedModel(provider, model, at_unix, "test", "1", None, self.units)

    def cost(self, priced, usage, context):
        return (
            Decimal(sum(usage.get(unit, 0) for unit in ("input_tokens", "output_tokens", "input_audio_tokens"))) / 10**6
        )


class Letters:
    def count(self, text, *, provider, model):
        return len(text)


def ceiling(place, body, book=None, **allowances):
    return find_ceiling(read(place, body), Metering(allowances=allowances), book or OneDollar(), Letters(), 0)


def user(place, part):
    """A request of one part."""
    if place == "gemini":
        return {"contents": [{"parts": [part]}], "generationConfig": {"maxOutputTokens": 5}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 5}


def inline(place, mime, data):
    """A part with data in it, as each provider takes it."""
    encoded = base64.b64encode(data).decode()
    if place == "gemini":
        return {"inlineData": {"mimeType": mime, "data": encoded}}
    kind = "image" if mime.startswith("image/") else "document"
    if place == "messages":
        return {"type": kind, "source": {"type": "base64", "media_type": mime, "data": encoded}}
    if mime.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    if kind == "document":
        return {"type": "file", "file": {"file_data": f"data:{mime};base64,{encoded}"}}
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{encoded}"}}


def test_a_large_picture_costs_its_pixels_and_not_its_bytes():
    heavy = jpeg(1024, 1024) + bytes(1_300_000)
    without = ceiling("chat", user("chat", {"type": "text", "text": ""}))
    assert (
        ceiling("chat", user("chat", inline("chat", "image/jpeg", heavy))).input_tokens - without.input_tokens < 6_000
    )


@pytest.mark.parametrize("place", ["chat", "messages", "gemini"])
@pytest.mark.parametrize(
    ("mime", "data", "kind"),
    [
        ("image/svg+xml", b"<svg/>", "image_url"),
        ("image/png", b"\x89PNG\r\n\x1a\n", "image_url"),
        ("application/pdf", b"%PDF-1.7", "document"),
        ("text/plain", b"long", "document"),
    ],
)
def test_what_cannot_be_measured_is_refused_unless_it_has_an_allowance(place, mime, data, kind):
    body = user(place, inline(place, mime, data))
    refusal = ceiling(place, body)
    assert isinstance(refusal, Refusal)
    assert refusal.rule == "unbounded_input"
    assert f'Metering(allowances={{"{kind}": ' in refusal.reason
    assert refusal.reason.startswith(read(place, body).media[0].field)
    allowed = ceiling(place, body, **{kind: "$0.25"})
    assert allowed.fixed == Decimal("0.25") + Decimal(allowed.input_tokens) / 10**6


def test_each_part_has_its_own_allowance():
    part = inline("messages", "application/pdf", b"%PDF-1.7")
    body = {"messages": [{"role": "user", "content": [part, part, part]}], "max_tokens": 5}
    assert ceiling("messages", body, document="$0.10").fixed > Decimal("0.3")


def test_sound_counts_by_its_bytes_at_the_price_of_sound():
    body = user("chat", inline("chat", "audio/wav", bytes(60_000)))
    with_price = ceiling("chat", body, OneDollar("input_audio_tokens"))
    silent = ceiling("chat", user("chat", inline("chat", "audio/wav", b"")), OneDollar("input_audio_tokens"))
    assert with_price.input_tokens - silent.input_tokens == 3_000 == audio_tokens(Media("audio", "f", 60_000))
    assert with_price.fixed - silent.fixed == 2 * Decimal(3_000) / 10**6
    assert ceiling("chat", body).rule == "unbounded_input", "nobody says what its sound costs"
    assert ceiling("chat", body, audio="$0.05").fixed > Decimal("0.05")
    gemini = user("gemini", inline("gemini", "audio/wav", bytes(60_000)))
    assert ceiling("gemini", gemini).input_tokens >= 3_000, "Google bills it as text where it has no price of its own"


MEDIA = [
    ("chat", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}]}]},
     "image messages[0].content[0].image_url.url 640x480 low"),
    ("chat", {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": PIXELS, "format": "wav"}}]}]},
     "audio messages[0].content[0].input_audio.data"),
    ("chat", {"messages": [{"content": [{"type": "file", "file": {"filename": "a", "file_data": "data:application/pdf;base64,AAAA"}}]}]},
     "document messages[0].content[0].file.file_data"),
    ("responses", {"input": [{"content": [{"type": "input_image", "image_url": DATA_URL, "detail": "high"}]}]},
     "image input[0].content[0].image_url 640x480 high"),
    ("responses", {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": DATA_URL}}]},
     "image input[0].output.image_url 640x480"),
    ("responses", {"input": [{"content": [{"type": "input_file", "file_data": "JVBERi0="}]}]},
     "document input[0].content[0].file_data"),
    ("messages", {"messages": [{"content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}]}]},
     "image messages[0].content[0].source.data 640x480"),
    ("messages", {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image", "source":
     {"type": "base64", "media_type": "image/png", "data": PIXELS}}]}]}]},
     "image messages[0].content[0].content[0].source.data 640x480"),
    ("messages", {"messages": [{"content": [{"type": "document", "source": {"type": "base64", "media_type": "application/pdf",
     "data": "JVBERi0="}}]}]}, "document messages[0].content[0].source.data"),
    ("gemini", {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": PIXELS}}]}]},
     "image contents[0].parts[0].inlineData.data 640x480"),
    ("gemini", {"contents": [{"parts": [{"inline_data": {"mime_type": "video/mp4", "data": "AAAA"}}]}]},
     "video contents[0].parts[0].inline_data.data"),
    ("mistral", {"messages": [{"content": [{"type": "image_url", "image_url": DATA_URL}]}]},
     "image messages[0].content[0].image_url 640x480"),
    ("mistral", {"messages": [{"content": [{"type": "document_url", "document_url": "data:application/pdf;base64,AAAA"}]}]},
     "document messages[0].content[0].document_url"),
    ("cohere", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": DATA_URL}}]}]},
     "image messages[0].content[0].image_url.url 640x480"),
    ("cohere_embed", {"images": [DATA_URL]}, "image images[0] 640x480"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "body", "shown"), MEDIA, ids=[f"{place}: {shown}" for place, _, shown in MEDIA])
def test_media_are_taken_out_and_measured(place, body, shown):
    call = read(place, body)
    [part] = call.media
    size = f" {part.width}x{part.height}" if part.width else ""
    assert f"{part.kind} {part.field}{size} {part.detail}".strip() == shown
    assert call.unbounded == ()
    assert not [text for text in call.texts if len(text) > 40], "what is measured is not counted as text too"
