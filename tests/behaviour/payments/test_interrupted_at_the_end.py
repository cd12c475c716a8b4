"""Ctrl-C between the end of a payment and its caller: the answer is lost, and the same request presents that payment."""

import anyio
import httpx
import pytest

from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt
from tests.support.refusals import Chunks
from x402guard import Policy
from x402guard.http import answer_end, guarded
from x402guard.x402 import flow

GOODS = b"the goods"
PLACES = {
    "the receipt is made": (flow, "receipt_of"),
    "the response is made": (guarded.Guarded, "_finish"),
    "what records its end is made": (guarded, "AnswerEnding"),
    "its body is watched": (guarded.weakref, "finalize"),
    "its end is written": (answer_end.AnswerEnding, "write"),
    "its end is written, awaited": (answer_end.AnswerEnding, "awrite"),
}
CASES = [
    (place, mode)
    for place, (_, name) in PLACES.items()
    for mode in ("sync", "async")
    if name not in ("write", "awrite") or (name == "awrite") is (mode == "async")
]


def sells(length):
    def paid(_request, _shop):
        headers = {"PAYMENT-RESPONSE": b64(receipt())} | ({"content-length": str(len(GOODS))} if length else {})
        return httpx.Response(200, headers=headers, stream=Chunks(b"the ", b"goods"))

    return Shop(paid=paid)


def get(mode, session, shop):
    if mode == "sync":
        with client(session, shop) as http:
            return http.get(URL).content

    async def main():
        async with async_client(session, shop) as http:
            return (await http.get(URL)).content

    return anyio.run(main)


@pytest.mark.parametrize("follows", ["the same process", "the next process"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("length", [True, False], ids=["short", "of unknown length"])
@pytest.mark.parametrize(("place", "mode"), CASES)
def test_the_same_payment_is_presented_again(place, mode, length, moment, follows, tmp_path, monkeypatch):
    (where, name), shop, ledger = PLACES[place], sells(length), f"sqlite:///{tmp_path}/l.db"
    usual, pending = getattr(where, name), [True]

    def interrupted(*args, **named):
        if pending and moment == "before":
            pending.clear()
            raise KeyboardInterrupt
        result = usual(*args, **named)
        if pending:
            pending.clear()
            if name == "awrite":
                result.close()
            raise KeyboardInterrupt
        return result

    def opened():
        return make_guard(ledger, policy=Policy(breaker=None, loop=None))

    with opened() as guard:
        session = guard.session("s", budget="$1.00", id="run")
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                get(mode, session, shop)
        assert not pending
        assert not guard.context.in_flight
        if follows == "the same process":
            assert get(mode, session, shop) == GOODS
        session.close()
    if follows == "the next process":
        with opened() as guard, guard.session("s", budget="$1.00", id="run") as session:
            assert get(mode, session, shop) == GOODS
    assert (len(shop.payments), len(shop.nonces)) == (2, 1)
