"""Frames of zstd, followed by their headers alone: whole ones, and each place at which they can be torn."""

import gzip
import random
import tracemalloc
import zlib

import pytest

from x402guard.http.frames import frames_of


def is_whole(raw, step=4096, encoding="zstd"):
    frames = frames_of(encoding, ValueError)
    for at in range(0, len(raw), step):
        frames.follow(raw[at : at + step])
    try:
        frames.end()
    except ValueError:
        return False
    return True


def some_frames():
    """Yield bodies of several frames, with the places between them."""
    package, draws = pytest.importorskip("zstandard", reason="it makes the frames"), random.Random(7)
    for _ in range(40):
        parts = []
        for _ in range(draws.randint(1, 3)):
            size = draws.choice([0, 1, 10, 300, 5_000, 200_000])
            body = draws.randbytes(size) if draws.random() < 0.5 else b"a" * size
            packer = package.ZstdCompressor(
                level=draws.choice([1, 3, 9]),
                write_checksum=draws.random() < 0.5,
                write_content_size=draws.random() < 0.5,
            )
            parts.append(packer.compress(body))
        if draws.random() < 0.3:
            parts.append(b"\x5a\x2a\x4d\x18" + (9).to_bytes(4, "little") + bytes(9))  # a frame that readers skip
        yield b"".join(parts), {sum(map(len, parts[:count])) for count in range(len(parts) + 1)}


def test_a_body_is_whole_between_its_frames_and_nowhere_else():
    draws = random.Random(7)
    for raw, ends in some_frames():
        places = range(len(raw) + 1) if len(raw) < 400 else [*ends, *(draws.randrange(len(raw)) for _ in range(60))]
        for cut in places:
            assert is_whole(raw[:cut]) == (cut in ends), (len(raw), cut)
        for step in (1, 3, 100) if len(raw) < 6_000 else (999,):
            assert is_whole(raw, step)


@pytest.mark.parametrize(
    "raw", [b"no frame at all", b"\x28\xb5\x2f\xfd\x20\x01\x07\x00\x00", b"\x28\xb5\x2f\xfd\x20\x01\x07\x00\x00x"]
)
def test_what_is_damaged_is_left_to_the_library(raw):
    assert is_whole(raw)


@pytest.mark.parametrize(
    ("encoding", "followed"),
    [("zstd", True), ("gzip, ZSTD ", True), ("", False), ("gzip", True), ("br, deflate", True), ("gzip, br", False)],
)
def test_the_outermost_encoding_is_followed(encoding, followed):
    assert (frames_of(encoding, ValueError) is not None) == followed


def raw_deflate(body):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "no header": ("deflate", raw_deflate),
}


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("kind", PACKED)
def test_what_is_deflated_is_whole_at_its_end_alone(kind, step):
    encoding, pack = PACKED[kind]
    step = max(step, 2) if kind == "no header" else step  # httpx, too, looks at the first piece alone for a header
    draws = random.Random(7)
    for size in (0, 1, 300, 4_000):
        raw = pack(draws.randbytes(size // 2) + b"a" * (size - size // 2))
        for cut in range(1, len(raw), 1 if len(raw) < 99 else 37):
            assert not is_whole(raw[:cut], step, encoding), cut
        assert is_whole(raw, step, encoding)
        assert is_whole(raw + b"what comes after it", step, encoding)
    assert is_whole(b"", step, encoding)  # the answer to a HEAD has no body
    assert is_whole(b"\xffnothing that was ever packed", step, encoding)  # the library says that itself


def test_a_body_that_grows_a_thousandfold_is_followed_in_little_memory():
    raw = gzip.compress(bytes(100_000_000))
    frames = frames_of("gzip", ValueError)
    tracemalloc.start()
    frames.follow(raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    frames.end()
    assert most < 1_000_000
