"""A paid answer that is thrown away after the transport has returned it: the same request presents that payment again."""

import gc
import gzip
import logging
import zlib

import anyio
import httpx
import pytest

from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt
from tests.support.refusals import Chunks
from x402guard.flow import surroundings
from x402guard.http.answer_end import AnswerEnding
from x402guard.http.deadline import Watch
from x402guard.x402 import flow

GOODS = b"the goods " * 20
MODES = ["sync", "async"]


def zstd(body):
    """One frame of zstd: its size in one byte, no checksum, one block that is not compressed."""
    block = (1 | len(body) << 3).to_bytes(3, "little") + body
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(body)]) + block


def selling(*bodies, length=False, encoding=None):
    """A shop that sells these bodies, one after the other."""
    left = list(bodies)

    def paid(_request, _shop):
        body = left.pop(0) if len(left) > 1 else left[0]
        headers = {"PAYMENT-RESPONSE": b64(receipt())} | ({"content-encoding": encoding} if encoding else {})
        return httpx.Response(
            200,
            headers=headers | ({"content-length": str(len(body))} if length else {}),
            stream=Chunks(body[:7], body[7:]),
        )

    return Shop(paid=paid)


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        yield session


class Gets:
    """A client, blocking or not, whose answers are read as a whole."""

    def __init__(self, mode, session, shop):
        self._mode, self._session, self._shop = mode, session, shop

    def get(self, times=1):
        """Return what each request has brought: its body, or its error."""
        if self._mode == "sync":
            with client(self._session, self._shop) as http:
                return [self._caught(lambda: http.get(URL).content) for _ in range(times)]

        async def main():
            async with async_client(self._session, self._shop) as http:
                found = []
                for _ in range(times):
                    try:
                        found.append((await http.get(URL)).content)
                    except BaseException as error:
                        found.append(type(error))
                return found

        return anyio.run(main)

    @staticmethod
    def _caught(call):
        try:
            return call()
        except BaseException as error:
            return type(error)


class TimeIsUpError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("length", [True, False], ids=["short", "of unknown length"])
@pytest.mark.parametrize("mode", MODES)
def test_by_a_signal_in_the_client(mode, length, session, monkeypatch):
    shop, pending = selling(GOODS, length=length), [True]

    class Interrupts(logging.Filter):
        def filter(self, record):
            if shop.payments and pending:
                pending.clear()
                raise TimeIsUpError
            return True

    log, interrupts = logging.getLogger("httpx"), Interrupts()
    monkeypatch.setattr(log, "level", logging.INFO)
    log._cache.clear()
    log.addFilter(interrupts)
    gc.disable()
    try:
        assert Gets(mode, session, shop).get(2) == [TimeIsUpError, GOODS]
    finally:
        gc.enable()
        log.removeFilter(interrupts)
        log._cache.clear()
    assert (len(shop.payments), len(shop.nonces)) == (2, 1)


@pytest.mark.parametrize("mode", MODES)
def test_by_a_signal_after_the_whole_body_was_read(mode, session, monkeypatch):
    shop, written, pending = selling(GOODS), [], [True]
    write, awrite, end = AnswerEnding.write, AnswerEnding.awrite, Watch.end

    def noted(self, how):
        write(self, how)
        written.append(how)

    async def noted_async(self, how):
        await awrite(self, how)
        written.append(how)

    def ends(self):
        end(self)
        if written and pending:
            pending.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerEnding, *(("write", noted) if mode == "sync" else ("awrite", noted_async)))
    monkeypatch.setattr(Watch, "end", ends)
    assert Gets(mode, session, shop).get(2) == [KeyboardInterrupt, GOODS]
    assert (len(shop.payments), len(shop.nonces)) == (2, 1)


@pytest.mark.parametrize("length", [True, False], ids=["short", "of unknown length"])
@pytest.mark.parametrize("encoding", ["zstd", "gzip", "deflate"])
@pytest.mark.parametrize("mode", MODES)
def test_by_the_client_for_a_torn_frame(mode, encoding, length, session):
    pytest.importorskip("zstandard", reason="httpx decodes zstd with it")
    packed = {"zstd": zstd, "gzip": gzip.compress, "deflate": zlib.compress}[encoding](GOODS)
    shop = selling(packed[:-6], packed, length=length, encoding=encoding)
    assert Gets(mode, session, shop).get(2) == [httpx.DecodingError, GOODS]
    assert (len(shop.payments), len(shop.nonces)) == (2, 1)


def test_a_whole_one_is_bought_again(session):
    shop = selling(GOODS)
    assert Gets("sync", session, shop).get(2) == [GOODS, GOODS]
    assert len(shop.nonces) == 2


@pytest.mark.parametrize("seconds", [10**10, 10**400])
def test_a_seller_names_no_wait_that_the_system_cannot_count(session, seconds):
    waits = session.context.policy.timeouts
    policy = type(session.context.policy)(timeouts=type(waits)(payment_s=None))
    request = type("Request", (), {"read_s": 5.0})()
    context = type("Context", (), {"policy": policy})()
    assert flow._wait_of(context, request, seconds) == (366 * 86_400, "the offer's maxTimeoutSeconds")


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_that_was_read_for_long_and_dropped_half_read_is_presented_again(mode, session, monkeypatch):
    """By then it is among the oldest objects of the process, and refers to itself."""
    shop = selling(GOODS)

    def dropped():
        http = client(session, shop)
        answer = http.send(http.build_request("GET", URL), stream=True)
        next(answer.iter_raw())
        for _ in range(3):
            gc.collect()
        answer.me = answer

    async def dropped_async():
        http = async_client(session, shop)
        answer = await http.send(http.build_request("GET", URL), stream=True)
        await anext(answer.aiter_raw())
        for _ in range(3):
            gc.collect()
        answer.me = answer

    monkeypatch.setattr(surroundings, "_AGAIN_S", [0.0])
    gc.disable()
    try:
        dropped() if mode == "sync" else anyio.run(dropped_async)
        assert Gets(mode, session, shop).get() == [GOODS]
    finally:
        gc.enable()
    assert len(shop.nonces) == 1
