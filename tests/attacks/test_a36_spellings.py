"""Row 36: a payment of another client in JSON, in all the ways in which it can be written."""

import json

import pytest

from tests.attacks.test_a36_a38_foreign_payments import PAID, a2a, rpc, send, takes_anything
from tests.support.merchant import make_guard
from x402guard import Policy, PolicyDenied

PLAIN = json.dumps(rpc(PAID))
SPELLED = {
    "arguments nested deeply": PLAIN.replace('"arguments": {}', '"arguments": ' + "[" * 100 + "]" * 100),
    "a lone surrogate": PLAIN.replace('"search"', r'"\ud800"'),
    "NaN": PLAIN.replace('"arguments": {}', '"arguments": {"x": NaN}'),
    "a key twice, first": PLAIN[:-1] + ', "params": {}}',
    "a key twice, last": '{"params": {}, ' + PLAIN[1:],
    "over HTTP+JSON": json.dumps(a2a(PAID)["params"]),
    "a slash as PHP writes it, beside what is no UTF-8": PLAIN.replace("x402/payment", r"x402\/payment")
    .replace('"search"', '"s\xff"')
    .encode("latin-1"),
    "a slash as PHP writes it, beside an integer of 5,000 digits": PLAIN.replace(
        "x402/payment", r"x402\/payment"
    ).replace('"arguments": {}', '"arguments": {"n": ' + "1" * 5_000 + "}"),
    "behind a megabyte": json.dumps([{"jsonrpc": "2.0", "pad": "x" * 1_000_000}, rpc(PAID)]),
    "an escaped key": PLAIN.replace("x402/payment", r"\u0078402\u002fpayment"),
    "behind a thousand others": json.dumps([{"jsonrpc": "2.0"}] * 1500 + [rpc(PAID)]),
    "a byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "UTF-16": PLAIN.encode("utf-16"),
    "UTF-32": PLAIN.encode("utf-32"),
    "UTF-32 without a mark": PLAIN.encode("utf-32-be"),
    "UTF-16 with an escaped key": PLAIN.replace("x402/payment", r"\u0058402/payment").encode("utf-16"),
    "keys in other letters": PLAIN.replace('"params"', '"Param\u017f"').replace('"_meta"', '"_META"'),
    "a member in other letters": PLAIN.replace("x402/payment", "X402/Payment"),
    "unreadable, in other letters": PLAIN.replace("x402/payment", "X402/PAYMENT") + "[" * 100_000,
    "unreadable": PLAIN[:-1] + ', "more": ' + "[" * 100_000,
}


@pytest.mark.parametrize("how", SPELLED)
def test_a36_a_payment_in_json_is_seen_however_it_is_spelled(how):
    seen = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="another client"):
            send("sync", session, takes_anything(seen), method="POST", content=SPELLED[how])
        assert seen == []


def test_a36_what_stands_behind_many_small_payments_is_not_booked_as_nothing():
    """In a large body as many as sixteen are read: with one more, what it may take is unknown, and nothing is sent."""
    seen, pad = [], {"pad": "x" * 300_000}
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        for count, is_sent in ((16, True), (17, False)):
            body = json.dumps([pad, *[rpc(PAID)] * count])
            if is_sent:
                send("sync", session, takes_anything(seen), method="POST", content=body)
            else:
                with pytest.raises(PolicyDenied):
                    send("sync", session, takes_anything(seen), method="POST", content=body)
    assert len(seen) == 1
