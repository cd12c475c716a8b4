"""Reads an answer while it is passed on: the caller gets each chunk unchanged, and the meter keeps the stated usage."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec.json
from msgspec import Struct

from x402guard.llm.events import event_reader, is_usage_only
from x402guard.llm.outages import is_error_event
from x402guard.strict_json import NotReadable, read_object
from x402guard.vendors import frames
from x402guard.vendors.routes import Flavour

MAX_ANSWER_BYTES: Final = 67_108_864
"""The largest answer, in bytes, that is read whole. A larger one costs its ceiling."""

MAX_EVENT_BYTES: Final = 16_777_216
"""The largest event of a stream, in bytes, that is read."""

_SMALL_BYTES: Final = 65_536
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_EVENT_ENDS: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_OF_A_STREAM: Final = (b":", b"event:", b"id:", b"retry:", b"data")
_DECODED: Final = msgspec.json.Decoder().decode


class AnswerRead(Struct, frozen=True):
    """The result of reading an answer's body.

    Attributes:
        body: the decoded part that states the usage, or None if nothing could be read.
        final: True if the provider has stated everything that it bills.
        why: the reason if *final* is False, for the ledger.
        text: the text of the answer, if it was kept for a local count.
    """

    body: Mapping[str, Any] | None
    final: bool
    why: str = ""
    text: str = ""


class AnswerReader:
    """Reads one answer. Pure: bytes in, bytes out, and an ``AnswerRead`` at the end.

    Args:
        flavour: the shape of the answer.
        content_type, encoding: the answer's headers.
        hides_usage: do not pass on the usage chunk at a stream's end, because only the library asked for it.
        keeps_text: keep the text of a stream, for a local count if the provider states no usage.
        choices: the answers that were asked for; a stream states its usage once each of them has ended.

    Attributes:
        over: True once the provider has ended the stream. A caller may stop reading here without closing it.
    """

    def __init__(
        self,
        flavour: Flavour,
        content_type: str,
        encoding: str,
        *,
        hides_usage: bool,
        keeps_text: bool,
        choices: int = 1,
    ) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        self._frames = kind == frames.CONTENT_TYPE
        self._events = kind == "text/event-stream" or self._frames
        self._reader = event_reader(flavour, choices)
        window = _WINDOWS.get(encoding.strip().lower())
        self._unpacker = None if window is None else zlib.decompressobj(window)
        self._plain = encoding.strip().lower() in ("", "identity")
        self._problem = "" if self._plain or self._unpacker else f"an answer with encoding {encoding[:40]} is not read"
        self._hides = hides_usage and self._events and self._plain and not self._frames
        self._keeps_text = keeps_text
        self._pending = bytearray()
        self._scanned = 0
        self._data = False
        self._size = 0
        self._texts: list[str] = []
        self._done = False
        self._seen = self._failed_first = False
        self.over = False

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk and return the bytes to pass on: all, except a usage chunk that the caller did not request."""
        if self._problem:
            return chunk if not self._hides else self._flush(chunk)
        plain = chunk if self._unpacker is None else self._unpack(chunk)
        if plain is None:
            return chunk
        if self._frames:
            self._pending += plain
            self._read_frames()
            return chunk
        if not self._events:
            self._pending += plain
            self._size += len(plain)
            if self._size > MAX_ANSWER_BYTES:
                self._give_up(f"an answer of more than {MAX_ANSWER_BYTES} bytes is not read")
            return chunk
        kept = [raw for raw in self._complete_events(plain) if not self._read_event(raw) or not self._hides]
        if len(self._pending) > MAX_EVENT_BYTES:
            held, why = bytes(self._pending), f"an event of more than {MAX_EVENT_BYTES} bytes is not read"
            self._give_up(why)
            kept.append(held)
        return b"".join(kept) if self._hides else chunk

    @property
    def is_small(self) -> bool:
        """True if the remaining bytes are few enough to be parsed on the event loop."""
        return len(self._pending) + self._size <= _SMALL_BYTES

    def rest(self) -> bytes:
        """Return, at the end of the body, the bytes held back of an incomplete event."""
        if not self._events or self._frames or not self._pending:
            return b""
        rest = bytes(self._pending)
        self._pending.clear()
        hidden = self._read_event(rest)
        return rest if self._hides and not hidden else b""

    def answer(self, *, ended: bool) -> AnswerRead:
        """Return the result. *ended*: the body was read to its end, and not cut off or abandoned."""
        if self._problem:
            return AnswerRead(None, final=False, why=self._problem)
        text = "".join(self._texts)
        if self._events:
            if ended or self._done:
                self._reader.end(done=self._done)
            final = self._reader.final
            why = (
                ""
                if final
                else "the stream ended without its usage"
                if ended
                else "the stream was cut off or abandoned"
            )
            return AnswerRead(self._reader.body(), final=final, why=why, text=text if ended or self._done else "")
        if not ended:
            return AnswerRead(None, final=False, why="the answer was cut off or abandoned")
        try:
            return AnswerRead(self._whole(), final=True)
        except NotReadable as error:
            return AnswerRead(None, final=False, why=f"the answer cannot be read: {error}")

    def nothing(self, *, ended: bool) -> str:
        """Return why nothing was generated: the answer, or the first event of the stream, is an error. Else ""."""
        if self._problem or not ended:
            return ""
        if self._events:
            return "an error as the first event of the stream" if self._failed_first else ""
        try:
            is_outage = is_error_event(read_object(bytes(self._pending))) if self._size <= _SMALL_BYTES else False
        except NotReadable:
            return ""
        return "an error with status 200" if is_outage else ""

    def whole(self, *, ended: bool) -> Mapping[str, Any] | None:
        """Return a small answer that is no stream, once it has *ended*; None for any other."""
        if self._problem or self._events or not ended or self._size > _SMALL_BYTES:
            return None
        try:
            return read_object(bytes(self._pending))
        except NotReadable:
            return None

    def _whole(self) -> dict[str, Any]:
        body = bytes(self._pending)
        if body.lstrip()[:1] != b"[":
            return read_object(body)
        # Gemini streams one JSON array if no server-sent events were requested.
        events = read_object(b'{"events":' + body + b"}")["events"]
        for event in events:
            if isinstance(event, dict):
                self._reader.take(event)
        self._reader.end(done=False)
        if not self._reader.final:
            raise NotReadable("the array ended without its usage")
        return self._reader.body()

    def _flush(self, chunk: bytes) -> bytes:
        held = bytes(self._pending) + chunk
        self._pending.clear()
        return held

    def _give_up(self, why: str) -> None:
        self._problem = why
        self._pending.clear()

    def _unpack(self, chunk: bytes) -> bytes | None:
        if self._unpacker is None:
            return chunk
        if self._unpacker.eof:
            return b""  # zlib would keep all later bytes, and copy them for each chunk
        try:
            plain = self._unpacker.decompress(chunk, MAX_ANSWER_BYTES)
        except zlib.error:
            self._give_up("the answer cannot be decompressed")
            return None
        if self._unpacker.unconsumed_tail:
            self._give_up(f"an answer of more than {MAX_ANSWER_BYTES} decompressed bytes is not read")
            return None
        return plain

    def _complete_events(self, plain: bytes) -> list[bytes]:
        """Return each event that ends in *plain*; what follows the last one waits for the next chunk."""
        events: list[bytes] = []
        source: bytes | bytearray = plain
        if self._pending:
            self._pending += plain
            source = self._pending
        start, at = 0, self._scanned
        self._data = self._data or source.find(b"data:", max(0, at - 2)) >= 0
        if not self._data:
            # Skips events without data in one step: a kilobyte can decompress to a million of them.
            end = source.rfind(b"\n\n", at) + 2
            if end > 1:
                events.append(bytes(source[:end]))
                start = at = end
        while (match := _EVENT_ENDS.search(source, at)) is not None:
            ends = match.end()
            if ends == len(source) and source[-1:] == b"\r" and match[0] != b"\r\r":
                break  # the next chunk may begin with the line feed of this carriage return
            events.append(bytes(source[start:ends]))
            start = at = ends
        if source is not self._pending:
            self._pending += source[start:]
        elif start:
            del self._pending[:start]
        if start:
            self._data = self._data and b"data:" in self._pending
        self._scanned = max(0, len(self._pending) - 3)  # the end of an event may be split over two chunks
        return events

    def _read_event(self, raw: bytes) -> bool:
        """Process one event. Returns True for a usage chunk."""
        lines = raw.splitlines()
        data = b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])
        if not data:
            if any(line and not line.startswith(_OF_A_STREAM) for line in lines):
                self._see()
            return False
        if data.strip() == b"[DONE]":
            self._done = self.over = True
            return False
        content = self._content(data)
        if content is not None:
            if not self._seen or self._failed_first:
                self._note(content)
            if self._keeps_text:
                self._keep_text(content)
            return False
        try:
            event = read_object(data)
        except NotReadable:
            self._see()
            return False  # a stream without readable usage costs its ceiling
        if not self._take(event):
            return False
        if self._keeps_text:
            self._keep_text(event)
        return is_usage_only(event)

    def _read_frames(self) -> None:
        try:
            for payload in frames.take_frames(self._pending):
                event = frames.event_in(payload)
                if event is not None:
                    self._take(event)
        except ValueError as error:
            self._give_up(f"the stream cannot be read: {error}")

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Read one event. Returns False if it cannot be read: then the whole answer cannot."""
        if not self._seen or self._failed_first:
            self._note(event)
        try:
            self._reader.take(event)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            self._give_up(f"an event of the stream cannot be read: {error}")
            return False
        self.over = self.over or self._reader.over
        return True

    def _see(self) -> None:
        """Note what cannot be read: it may be content."""
        self._failed_first, self._seen = False, True

    def _note(self, event: Mapping[str, Any]) -> None:
        """Note whether this event is an error too; those before it are, or there are none."""
        self._failed_first = is_error_event(event)
        self._seen = True

    def _content(self, data: bytes) -> Mapping[str, Any] | None:
        """Return an event that is content alone; None for one that has to be read strictly, as it may state a usage."""
        try:
            event = _DECODED(data)
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) and self._reader.passes(event) else None

    def _keep_text(self, event: Mapping[str, Any]) -> None:
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            parts = choice.get("delta") or choice.get("text") if isinstance(choice, dict) else None
            texts = [parts] if isinstance(parts, str) else _texts_of(parts) if isinstance(parts, dict) else ()
            for text in texts:
                self._size += len(text)
                self._texts.append(text)
        if self._size > MAX_ANSWER_BYTES:
            self._give_up(f"more than {MAX_ANSWER_BYTES} characters are not counted locally")
            self._texts.clear()


def _texts_of(delta: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text in a chunk's delta: content, refusal and the arguments of tool calls."""
    pending: list[Any] = list(delta.values())
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
