"""Bodies pass chunk by chunk, untouched and at once, also behind a payment."""

import anyio
import httpx
import pytest

from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt, required


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Ten chunks, and a record of how far it was read and whether it was closed."""

    def __init__(self):
        self.read = 0
        self.closed = False

    def __iter__(self):
        for number in range(10):
            self.read += 1
            yield b"%d" % number

    async def __aiter__(self):
        for chunk in self:
            yield chunk

    def close(self):
        self.closed = True

    async def aclose(self):
        self.closed = True


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        yield session


def paid_stream(chunks):
    return Shop(
        paid=lambda request, shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=chunks)
    )


def test_a_paid_stream_is_handed_on_as_it_comes(session):
    chunks = Chunks()
    with client(session, paid_stream(chunks)) as http, http.stream("GET", URL) as response:
        assert chunks.read == 0
        parts = response.iter_raw()
        assert (next(parts), chunks.read) == (b"0", 1)
        assert b"".join(parts) == b"123456789"
    assert chunks.closed


def test_a_paid_stream_is_handed_on_as_it_comes_async(session):
    chunks = Chunks()

    async def main():
        async with async_client(session, paid_stream(chunks)) as http, http.stream("GET", URL) as response:
            assert chunks.read == 0
            parts = response.aiter_raw()
            assert (await anext(parts), chunks.read) == (b"0", 1)
        assert chunks.closed

    anyio.run(main)


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_402_that_is_no_offer_still_streams_from_its_beginning(session, kind):
    chunks = Chunks()
    answer = httpx.Response(402, headers={"content-type": kind}, stream=chunks)
    with client(session, Shop(lambda request: answer)) as http:
        assert http.get(URL).content == b"0123456789"
    assert chunks.closed


def test_the_first_402_is_closed_before_the_payment_goes_out(session):
    first = Chunks()

    def terms(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required())}, stream=first)

    def paid(request, shop):
        assert first.closed, "two responses open at once can starve a connection pool"
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})

    with client(session, Shop(terms, paid=paid)) as http:
        assert http.get(URL).status_code == 200
