"""Broken and hostile 402s, by name. Each is a function of nothing, so that a response is new every time."""

import base64
import functools
import gzip
import json
import zlib

import httpx

from tests.support.merchant import OTHER_PAYEE, accept, b64, permit2, required, required_v1
from tests.support.refusals import Chunks, raw_header

GOOD = b64(required())
V1 = json.dumps(required_v1()).encode()
V2 = json.dumps(required()).encode()
JSON = ("content-type", "application/json")


def headers(*lines, body=b"{}"):
    return lambda: httpx.Response(402, headers=[JSON, *lines], content=body)


def offer(text):
    return lambda: raw_header(text)


def body(*pieces, **more):
    lines = [JSON, *((name.replace("_", "-"), value) for name, value in more.items())]
    return lambda: httpx.Response(402, headers=lines, stream=Chunks(*pieces))


def put(terms, old, new):
    """The JSON of *terms* with a piece of its text exchanged."""
    text = json.dumps(terms)
    assert old in text
    return text.replace(old, new, 1)


def many(count, **changes):
    return json.dumps(required(*[accept(1 + n, **changes) for n in range(count)]))


@functools.cache
def bomb(layers, size=64_000_000):
    """White space and an opening brace, squeezed as often as asked; a few hundred bytes on the wire."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = b"".join(squeeze.compress(b" " * 1_000_000) for _ in range(size // 1_000_000)) + squeeze.flush()
    for _ in range(layers - 1):
        data = gzip.compress(data, 9)
    return data


def bombed(layers):
    encoding = ", ".join(["gzip"] * layers)
    return lambda: body(bomb(layers), content_encoding=encoding)()


HEADER_ATTACKS = {
    "header twice, different": headers(("PAYMENT-REQUIRED", GOOD), ("payment-required", b64(required(permit2(1))))),
    "header merged": headers(("PAYMENT-REQUIRED", f"{GOOD}, {GOOD}")),
    "header merged, no space": headers(("PAYMENT-REQUIRED", f"{GOOD},{GOOD}")),
    "header joined after padding": headers(("PAYMENT-REQUIRED", f"{b64([1])}{GOOD}")),
    "header empty": headers(("PAYMENT-REQUIRED", "")),
    "header is plain JSON": headers(("PAYMENT-REQUIRED", "{}")),
    "header url-safe base64": headers(("PAYMENT-REQUIRED", base64.urlsafe_b64encode(V2 + b"\xfb\xff").decode())),
    "header not ASCII": lambda: httpx.Response(402, headers=[(b"PAYMENT-REQUIRED", "ÄÖÜß".encode())]),
    "header huge": headers(("PAYMENT-REQUIRED", "A" * 5_000_000)),
    "header huge and valid": offer(json.dumps({**required(), "pad": "x" * 100_000})),
    "header of version 3": offer(put(required(), '"x402Version": 2', '"x402Version": 3')),
    "header of version true": offer(put(required(), '"x402Version": 2', '"x402Version": true')),
}
JSON_ATTACKS = {
    "not JSON": offer("{"),
    "a list": offer(json.dumps([required()])),
    "a number": offer("402"),
    "null": offer("null"),
    "two documents": offer(V2 + V2),
    "UTF-16": offer(json.dumps(required()).encode("utf-16")),
    "bad UTF-8": offer(V2.replace(b"USDC", b"US\xff\xfe")),
    "surrogate in raw bytes": offer(V2.replace(b"USDC", b"\xed\xa0\x80")),
    "lone surrogate": offer(put(required(), '"USDC"', '"\\ud800"')),
    "key twice, equal": offer(put(required(), '"payTo"', f'"payTo": "{OTHER_PAYEE}", "payTo"')),
    "key twice, escaped": offer(put(required(), '"payTo"', f'"pay\\u0054o": "{OTHER_PAYEE}", "payTo"')),
    "key twice at the top": offer(put(required(), '"accepts"', '"accepts": [], "accepts"')),
    "NaN": offer(put(required(), '"maxTimeoutSeconds": 60', '"maxTimeoutSeconds": NaN')),
    "NaN in passing": offer(put(required(), '"version": "2"', '"version": "2", "x": NaN')),
    "Infinity in passing": offer(put(required(), '"version": "2"', '"version": "2", "x": -Infinity')),
    "a number beyond doubles": offer(put(required(), '"version": "2"', '"version": "2", "x": 1e400')),
    "a number beyond doubles in the resource": offer(put(required(), '"description": ""', '"description": -1e999')),
    "a number beyond doubles in an extension": offer(put(required(extensions={"x": {"y": 7}}), '"y": 7', '"y": 1e400')),
    "a number of 5,000 digits": offer(put(required(), '"version": "2"', f'"version": "2", "x": {"9" * 5_000}')),
    "deep lists": offer('{"x402Version": 2, "accepts": ' + "[" * 20_000 + "]" * 20_000 + "}"),
    "deep objects": offer('{"x402Version": 2, "accepts": ' + '{"a":' * 6_000 + "1" + "}" * 6_000 + "}"),
    "deep and never closed": offer("[" * 45_000),
    "deep behind a string": offer('{"a": "\\"", "b": ' + "[" * 40_000),
    "just too deep": offer(put(required(), '"version": "2"', '"version": "2", "x": ' + "[" * 129 + "]" * 129)),
    "no accepts": offer(put(required(), '"accepts"', '"acceptz"')),
    "accepts empty": offer(json.dumps({**required(), "accepts": []})),
    "accepts of text": offer(json.dumps({**required(), "accepts": ["exact"]})),
    "accepts an object": offer(json.dumps({**required(), "accepts": accept()})),
    "257 accepts": offer(json.dumps({**required(), "accepts": [{}] * 257})),
    "thousands of accepts": offer(json.dumps({**required(), "accepts": [{}] * 9_000})),
    "64 accepts, all broken": offer(json.dumps(required(*[accept(9)] * 64)).replace('"payTo"', '"payFor"')),
    "extra a text": offer(json.dumps(required(accept(extra="x")))),
    "scheme a number": offer(json.dumps(required(accept(scheme=7)))),
    "network a list": offer(json.dumps(required(accept(network=["eip155:84532"])))),
    "snake case alone": offer(put(required(), '"payTo"', '"pay_to"')),
    "timeout in snake case": offer(put(required(), '"maxTimeoutSeconds"', '"max_timeout_s"')),
    "version by another name": offer(put(required(), '"x402Version"', '"version"')),
}
BODY_ATTACKS = {
    "body of v2 terms alone": headers(body=V2),
    "body v1, other amount": headers(("PAYMENT-REQUIRED", GOOD), body=V1.replace(b'"10000"', b'"20000"')),
    "body v1, other payee": headers(("PAYMENT-REQUIRED", GOOD), body=V1.replace(b"0x209693Bc", b"0x119693Bc")),
    "body v2, other asset": headers(("PAYMENT-REQUIRED", GOOD), body=V2.replace(b"CF7e", b"CF7f")),
    "body v2, other network": headers(("PAYMENT-REQUIRED", GOOD), body=V2.replace(b":84532", b":8453")),
    "body with a key twice": headers(body=V1.replace(b'"payTo"', b'"payTo": "x", "payTo"')),
    "body with NaN": headers(body=V1.replace(b"60", b"NaN")),
    "body with 1e400": headers(body=V1.replace(b'"version": "2"', b'"version": "2", "x": 1e400')),
    "body deep": headers(body=b'{"x402Version": 1, "accepts": ' + b"[" * 100_000),
    "body with thousands of accepts": headers(body=b'{"x402Version": 1, "accepts": [' + b"{}," * 60_000 + b"{}]}"),
    "body too large": headers(body=V1 + b" " * 300_000),
    "body endless": lambda: httpx.Response(402, headers=[JSON], stream=Chunks(*[b" " * 65_536] * 64)),
    "body of amounts by the v2 name": headers(body=V1.replace(b"maxAmountRequired", b"amount")),
    "body a gzip bomb": bombed(1),
    "body a gzip bomb in a gzip bomb": bombed(2),
    "body a gzip bomb, three deep": bombed(3),
    "body gzip, cut short": body(gzip.compress(V1)[:-20], content_encoding="gzip"),
    "body labelled gzip and plain": body(V1, content_encoding="gzip"),
    "body labelled deflate and plain": body(V1, content_encoding="deflate"),
    "body in single bytes": body(*[b" "] * 30_000, b"{}"),
}
CORPUS = {**HEADER_ATTACKS, **JSON_ATTACKS, **BODY_ATTACKS}
