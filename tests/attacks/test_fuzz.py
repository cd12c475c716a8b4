"""Any bytes as headers, base64, JSON, events, RPC answers: read, or a typed error; in bounded time and memory."""

import gzip
import json
import subprocess
import sys
import time
import tracemalloc
from datetime import timedelta
from decimal import Decimal
from importlib.util import find_spec

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from tests.support import fuzz_entries, processes
from tests.support.broken_offers import bomb
from tests.support.examples import examples
from tests.support.fuzz_entries import METHODS, PURE, SEEDS, TRUE, node, read_chain
from tests.support.llm_provider import SYNC, Answer, Provider, ask, metered, sse
from tests.support.merchant import Shop, accept, client, make_guard, required
from tests.support.processes import ROOT
from x402guard.chain.reader import RpcChainReader
from x402guard.ledger.findings import Unreadable

MOST_S = 2.0
MOST_BYTES = 192_000_000
pytestmark = pytest.mark.long
MEGABYTE = 2**20

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.from_regex(r"\A0x[0-9a-f]*\Z"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
as_json = values.map(lambda value: json.dumps(value).encode())
some_bytes = st.binary(max_size=400) | as_json | st.sampled_from(SEEDS)
bounded = settings(
    max_examples=examples(150),
    derandomize=True,
    deadline=timedelta(seconds=MOST_S),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def world():
    with node() as running:
        yield running


@pytest.mark.parametrize("entry", PURE)
@bounded
@given(raw=st.builds(bytes.__add__, st.binary(max_size=2), some_bytes) | some_bytes)
@example(raw=b"")
def test_any_bytes_are_read_or_a_protocol_error(entry, raw):
    PURE[entry](raw)


fields = st.fixed_dictionaries({}, optional={
    "choices": values, "usage": values, "type": st.sampled_from(["message_start", "message_delta", "response.completed"]),
    "message": values, "response": values, "usageMetadata": values, "candidates": values, "delta": values, "model": values,
})  # fmt: skip


@bounded
@given(st.binary(min_size=2, max_size=2), st.lists(fields, max_size=6), st.binary(max_size=40))
def test_any_events_are_read_along(head, events, rest):
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    PURE["events"](head + raw + rest)


@settings(bounded, max_examples=examples(80))
@given(st.lists(fields | st.just("[DONE]"), max_size=5), st.binary(max_size=30))
def test_any_stream_of_an_llm_is_a_bill_and_handed_on_as_it_came(events, rest):
    pieces = [*sse(*events), rest]
    with metered() as session:
        answer = Answer.stream(*pieces)
        _, chunks = SYNC.post(
            session, Provider(session, answer), ask(stream=True, stream_options={"include_usage": True})
        )
        assert b"".join(chunks) == b"".join(pieces)
        assert session.held == 0
        assert session.spent >= 0
        assert [e["event"] for e in session.report().to_dict()["events"]].count("authorize") == 1


@settings(bounded, max_examples=examples(60))
@given(raw=st.binary(max_size=1).flatmap(lambda first: some_bytes.map(lambda rest: first + rest)))
def test_any_bytes_of_a_node_are_a_finding(world, raw):
    fuzz_entries.rpc(world, raw)


@settings(bounded, max_examples=examples(60))
@given(method=st.sampled_from(METHODS), value=values)
def test_any_result_of_a_node_is_a_finding(world, method, value):
    world.answers = {method: json.dumps({"jsonrpc": "2.0", "id": 1, "result": value}).encode()}
    read_chain(world)


@settings(bounded, max_examples=examples(60))
@given(
    method=st.sampled_from(METHODS[2:5]),
    field=st.sampled_from(["hash", "number", "timestamp", "to", "input", "status", "blockNumber", "logs"]),
    value=values,
)
def test_any_field_of_a_nodes_answer_is_a_finding(world, method, field, value):
    result = {**TRUE[method], field: value}
    world.answers = {method: json.dumps({"jsonrpc": "2.0", "id": 1, "result": result}).encode()}
    read_chain(world)


# -- sizes -----------------------------------------------------------------------------------------------------------------


def result(text):
    return b'{"jsonrpc":"2.0","id":1,"result":' + text + b"}"


NESTED = {
    "lists": 'result(b"[" * 100_000 + b"]" * 100_000)',
    "never closed": """b'{"result":' + b'{"a":' * 400_000""",
    "what a parser takes": 'result(b"[" * 900 + b"]" * 900)',
    "errors": """b'{"error":' + b"[" * 900 + b"]" * 900 + b'}'""",
}
DEEP = """
import sys
from tests.attacks.test_fuzz import node, read_chain, result
sys.setrecursionlimit(int(sys.argv[1]))
with node() as world:
    world.answers = {sys.argv[2]: eval(sys.argv[3])}
    print([type(found).__name__ for found in read_chain(world)])
"""


@pytest.mark.parametrize("method", ["*", "eth_getBlockByNumber"])
@pytest.mark.parametrize("limit", [1_000, 200_000], ids=["usual", "raised"])
@pytest.mark.parametrize("name", NESTED)
def test_a_nested_answer_of_a_node_does_not_end_the_process(name, limit, method):
    """Others raise the limit of recursion (py-evm does), and json's parser then goes down with the interpreter."""
    done = processes.run(DEEP, limit, method, NESTED[name])
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[:300]}"
    assert "Unreadable" in done.stdout


HUGE = {
    "a number of a million digits": lambda: result(b"9" * 1_000_000),
    "a hex number of a million digits": lambda: result(b'"0x' + b"f" * 1_000_000 + b'"'),
    "8 MB of hex": lambda: result(b'"0x' + b"00" * 4_000_000 + b'"'),
    "8 MB of text": lambda: result(b'"' + b"x" * 8_000_000 + b'"'),
    "8 MB of nothing": lambda: b" " * 8_000_000,
    "100,000 keys": lambda: result(b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}"),
    "not UTF-8": lambda: result(b'"\xff\xfe"'),
}


def measured(act):
    """Seconds of computing and bytes at most, for one thing done twice: traced memory makes everything slow."""
    begun = time.process_time()
    act()
    took = time.process_time() - begun
    tracemalloc.start()
    try:
        act()
        return took, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["eth_chainId", "eth_call", "eth_getBlockByNumber"])
@pytest.mark.parametrize("name", HUGE)
def test_a_huge_answer_of_a_node_is_a_finding_in_bounded_time_and_memory(world, name, method):
    world.answers = {method: HUGE[name]()}
    took, peak = measured(lambda: read_chain(world))
    assert took < 2 * MOST_S
    assert peak < MOST_BYTES


@pytest.mark.parametrize("layers", [1, 2])
def test_a_packed_bomb_of_a_node_takes_no_memory(world, layers):
    packed = bomb(layers)
    encoding = ", ".join(["gzip"] * layers)
    world.answers = {"*": Response(packed, media_type="application/json", headers={"content-encoding": encoding})}
    took, peak = measured(lambda: read_chain(world))
    assert took < 2 * MOST_S
    assert peak < 16 * MEGABYTE


@pytest.mark.parametrize("field", ["timestamp", "number"])
@pytest.mark.parametrize("digits", [16, 5_000])
def test_an_absurd_block_of_a_node_is_no_error_of_a_sweep(world, field, digits):
    """What no clock can show is an answer that makes no sense: nothing expires by it."""
    block = {**TRUE["eth_getBlockByNumber"], field: "0x" + "f" * digits}
    world.answers = {
        "eth_getBlockByNumber": result(json.dumps(block).encode()),
        "eth_call": result(b'"0x' + b"0" * 64 + b'"'),
    }
    reader = RpcChainReader({"eip155:84532": world.url})
    try:
        with make_guard(chains=reader, flight_s=1) as guard, guard.session("s", budget="$1.00") as session:
            world.answers["eth_call"] = result(b'"0x' + b"f" * 64 + b'"')  # a rich account with an allowance
            client(session, Shop(terms=required(accept()), paid=lambda *_: httpx.Response(500))).get(
                "https://a.example/"
            )
            world.answers["eth_call"] = result(b'"0x' + b"0" * 64 + b'"')
            guard.sweep()
            assert session.held + session.spent == Decimal("0.01")
            assert session.report().to_json()
    finally:
        reader.close()


LARGE = {
    "required_header": b"A" * 8_000_000,
    "required_json": b'{"x402Version":2,"accepts":' + b"[" * 1_000_000,
    "receipt_header": b"A" * 8_000_000,
    "receipt_json": b'{"success":true,"transaction":"' + b"x" * 4_000_000 + b'"}',
    "body_402": b'{"x402Version":1,"accepts":' + b'{"a":' * 1_000_000,
    "events": b"\0\0" + b"data: {\n" * 200_000,
    "whole_answer": b'\0\x08{"usage":' + b"[" * 2_000_000,
    "packed_answer": b"\0\0" + gzip.compress(b"\n" * 3_000_000),
}


@pytest.mark.parametrize("entry", LARGE)
def test_megabytes_at_every_entry_take_bounded_time_and_memory(entry):
    took, peak = measured(lambda: PURE[entry](LARGE[entry]))
    assert took < MOST_S
    assert peak < MOST_BYTES


def test_every_entry_has_its_bomb():
    assert set(LARGE) == set(PURE)


# -- atheris ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "runs"), [("any", 20_000), ("rpc", 200)])
@pytest.mark.skipif(
    find_spec("atheris") is None, reason="atheris does not import: pip install 'x402guard[fuzz]' on Linux"
)
def test_guided_bytes_are_read_or_a_protocol_error(entry, runs):
    command = [sys.executable, "-m", "tests.support.fuzz_harness", entry, str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3_000:]
    assert f"Done {runs}" in done.stdout + done.stderr


def test_an_unreadable_node_is_said_to_be_so(world):
    world.answers = {"*": b""}
    assert {type(found) for found in read_chain(world)} == {Unreadable}
