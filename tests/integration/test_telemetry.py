"""Traces and metrics arrive at a collector in a process of its own; one that is dead, hangs or fails is felt by no payment."""

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.chain import MockChain
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import URL, Shop, client, make_guard
from tests.support.otlp_collector import attributes, collector
from x402guard import BudgetExhausted, ConfigError, GuardedTransport, SessionTripped
from x402guard.ledger.findings import Settled
from x402guard.telemetry import otel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/telemetry.md"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def no_setting_of_this_machine(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER", ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "research-agent")


def spend(guard):
    """One payment, one LLM call, two tools, a refusal and a stop."""
    shop = Shop()
    provider = httpx.MockTransport(lambda _: httpx.Response(200, json=completion()))
    with guard.budget("Kestrel", "$5.00").session("run", budget="$1.00", id="run-1") as session:
        assert client(session, shop).get(f"{URL}?key=veiled").status_code == 200
        with httpx.Client(transport=GuardedTransport(session, provider)) as http:
            assert http.post(CHAT, json=ask()).status_code == 200
        session.charge("serp", "$0.04")
        with session.hold("render", up_to="$0.10") as hold:
            hold.capture("$0.03")
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$9.00")
        session.trip("enough")
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.01")


def test_spans_and_metrics_of_each_kind_of_call_arrive(monkeypatch):
    with collector() as collected:
        monkeypatch.setenv(ENDPOINT, collected.url)
        with make_guard(telemetry=True) as guard:
            spend(guard)
        spans, metrics = collected.spans(), collected.metrics()
    by_name = {span["name"]: span for span in spans}
    assert sorted(span["name"] for span in spans) == [
        "chat gpt-4o", "execute_tool render", "execute_tool serp", "x402 payment",
        "x402guard refused", "x402guard refused", "x402guard tripped",
    ]  # fmt: skip

    paid = by_name["x402 payment"]
    shown = attributes(paid)
    assert paid["kind"] == "SPAN_KIND_CLIENT"
    assert [event["name"] for event in paid["events"]] == ["sign", "send", "note", "capture"]
    times = [int(paid["startTimeUnixNano"]), *(int(event["timeUnixNano"]) for event in paid["events"])]
    assert all(later - earlier > -1_000_000 for earlier, later in pairwise(times))  # the ledger's are in whole ms
    assert shown["x402guard.amount_nanos"] == 10_000_000
    assert (shown["x402guard.session.name"], shown["x402guard.customer"]) == ("run", "Kestrel")
    assert (shown["x402.scheme"], shown["x402guard.evidence"]) == ("exact", "claimed")
    assert shown["url.path"] == httpx.URL(URL).path
    assert "veiled" not in str(spans)

    chat = attributes(by_name["chat gpt-4o"])
    assert chat["gen_ai.operation.name"] == "chat"
    assert (chat["gen_ai.provider.name"], chat["gen_ai.request.model"]) == ("openai", "gpt-4o")
    assert (chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (20, 5)
    assert (chat["server.address"], chat["x402guard.amount_nanos"]) == ("api.openai.com", 100_000)
    assert attributes(by_name["execute_tool render"])["x402guard.held_nanos"] == 100_000_000
    assert attributes(by_name["execute_tool render"])["x402guard.amount_nanos"] == 30_000_000
    refused = by_name["x402guard refused"]
    assert refused["status"]["code"] == "STATUS_CODE_ERROR"

    amounts = metrics["x402guard.call.amount"]["histogram"]["dataPoints"]
    assert sum(point["sum"] for point in amounts) == pytest.approx(0.0801)
    assert sum(int(point["count"]) for point in amounts) == 4
    ids = {attributes(example)["x402guard.hold.id"] for point in amounts for example in point["exemplars"]}
    assert shown["x402guard.hold.id"] in ids
    assert all("x402guard.hold.id" not in attributes(point) for point in amounts)
    traces = {example["traceId"] for point in amounts for example in point["exemplars"]}
    assert paid["traceId"] in traces
    tokens = metrics["gen_ai.client.token.usage"]["histogram"]["dataPoints"]
    assert {attributes(point)["gen_ai.token.type"]: point["sum"] for point in tokens} == {"input": 20, "output": 5}
    refusals = metrics["x402guard.refused"]["sum"]["dataPoints"]
    assert {attributes(point)["x402guard.rule"]: int(point["asInt"]) for point in refusals} == {
        "budget": 1,
        "session_tripped": 1,
    }
    assert metrics["x402guard.trips"]["sum"]["dataPoints"][0]["asInt"] == "1"


@pytest.mark.parametrize("way", ["dead", "hangs", "fails"])
def test_a_collector_in_trouble_is_felt_by_no_payment_and_no_end(way, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    monkeypatch.setattr(otel, "CLOSING_S", 1.0)
    with collector(way) as collected:
        monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9" if way == "dead" else collected.url)
        with contextlib.closing(make_guard(telemetry=True)) as guard:
            with guard.session("run", budget="$1.00") as session:
                shop, begun = Shop(), time.perf_counter()
                with client(session, shop) as http:
                    for number in range(20):
                        assert http.get(f"{URL}/{number}").status_code == 200
                took_s = time.perf_counter() - begun
            begun = time.perf_counter()
        assert time.perf_counter() - begun < 4
        assert took_s < 5
        assert len(shop.payments) == 20


_PARENTS = """
import asyncio, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.merchant import URL, Shop, async_client, client, make_guard

kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("agent")


async def agent(session, number):
    with tracer.start_as_current_span(f"agent {number}"):
        async with async_client(session, Shop()) as http:
            await http.get(f"{URL}/{number}")


async def agents(session):
    await asyncio.gather(*(agent(session, number) for number in range(8)))


with make_guard(sys.argv[1], telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
    with tracer.start_as_current_span("blocking"), client(session, Shop()) as http:
        http.get(f"{URL}/blocking")
    asyncio.run(agents(session))
spans = kept.get_finished_spans()
names = {span.context.span_id: span.name for span in spans}
paid = [span for span in spans if span.name == "x402 payment"]
print(sorted((span.attributes["url.path"].rpartition("/")[2], names[span.parent.span_id]) for span in paid))
"""


@pytest.mark.parametrize("ledger", ["memory://", "file"])
def test_a_payment_belongs_to_the_span_of_its_caller_and_the_programs_own_provider_is_used(ledger, tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}" if ledger == "file" else ledger
    done = processes.run(_PARENTS, url)
    expected = sorted([("blocking", "blocking"), *((str(number), f"agent {number}") for number in range(8))])
    assert (done.returncode, done.stdout.strip()) == (0, str(expected)), done.stderr


def test_what_the_chain_shows_later_stands_below_the_payment(monkeypatch):
    chain = MockChain(lambda hold: Settled(10_000, hold.claim.transaction, 0, final=True))
    with collector() as collected:
        monkeypatch.setenv(ENDPOINT, collected.url)
        with make_guard(telemetry=True, chains=chain, background_checks=False) as guard:
            with guard.session("run", budget="$1.00") as session, client(session, Shop()) as http:
                http.get(URL)
                guard.reconcile()
        spans = collected.spans()
    [paid] = [span for span in spans if span["name"] == "x402 payment"]
    [later] = [span for span in spans if span.get("parentSpanId") == paid["spanId"]]
    assert (later["name"], later["traceId"]) == ("x402guard correct", paid["traceId"])
    assert attributes(later)["x402guard.evidence"] == "chain"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "x402guard exports http/protobuf"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "x402guard exports http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "x402guard exports otlp, or none of it"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "x402guard exports otlp, or none of it"),
    ],
)
def test_another_protocol_is_refused_by_name(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"telemetry: {name} is '{value}', and {words}"):
        make_guard(telemetry=True)


def test_metrics_can_be_left_out(monkeypatch):
    with collector() as collected:
        monkeypatch.setenv(ENDPOINT, collected.url)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
            session.charge("serp", "$0.04")
        assert [span["name"] for span in collected.spans()] == ["execute_tool serp"]
        assert collected.metrics() == {}


BLOCKS = re.findall(r"## (\w+)\n(?:(?!## ).)*?```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("vendor", "block"), BLOCKS, ids=[vendor for vendor, _ in BLOCKS])
def test_what_the_page_says_for_each_vendor_works_in_a_shell(vendor, block, tmp_path):
    keys = {
        "LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-" + "x" * 60, "LANGSMITH_API_KEY": "lsv2-1",
        "GRAFANA_INSTANCE": "12345", "GRAFANA_TOKEN": "glc_" + "y" * 80,
    }  # fmt: skip
    script = tmp_path / "agent.py"
    script.write_text(
        "from x402guard import Guard\n"
        "from x402guard.guard.settings import Settings\n"
        "with Guard(**Settings(ledger='memory://').guard_arguments()) as guard, guard.session('run', budget='$1.00') as session:\n"
        "    session.charge('serp', '$0.04')\n"
    )
    with collector() as collected:
        there = re.sub(r"(OTEL_EXPORTER_OTLP_ENDPOINT)=\S+", rf"\1={collected.url}", block)
        command = ["sh", "-euc", f"{there}\nexec {sys.executable} -W error {script}"]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **keys}
        done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        [span] = collected.spans()
        sent, metrics = collected.headers()[0], collected.metrics()
    assert span["name"] == "execute_tool serp"
    basic = {
        "Langfuse": ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"),
        "Grafana": ("GRAFANA_INSTANCE", "GRAFANA_TOKEN"),
    }
    if vendor in basic:
        assert (
            sent["authorization"]
            == "Basic " + b64encode(":".join(keys[each] for each in basic[vendor]).encode()).decode()
        )
    if vendor == "LangSmith":
        assert (sent["x-api-key"], sent["langsmith-project"]) == ("lsv2-1", "research-agent")
    assert bool(metrics) == (vendor in ("Datadog", "Grafana"))


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_PROTOCOL": ""},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
        },
    ],
)
def test_what_opentelemetry_allows_is_no_mistake(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(otel, "CLOSING_S", 0.2)
    with collector() as collected:
        monkeypatch.setenv(ENDPOINT, collected.url)
        make_guard(telemetry=True).close()


def test_a_setting_that_opentelemetry_cannot_use_is_told(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    with pytest.raises(ConfigError, match="telemetry: OpenTelemetry cannot use its environment"):
        make_guard(telemetry=True)


KEPT = """
import gc, os, sys, threading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.chain import MockChain
from tests.support.merchant import URL, Shop, client, make_guard, receipt, required
from x402guard.ledger.evidence import Settled
kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)

def shown():
    for span in kept.get_finished_spans():
        print(span.name, span.status.status_code.name, span.status.description, sorted(span.attributes.items()))
"""


def kept(script):
    done = processes.run(KEPT + script)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout


def test_what_sellers_write_and_what_looks_like_a_key_is_in_no_span():
    said = kept(
        """
with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
    session.pay(required()).settled(receipt(transaction="IGNORE ALL PREVIOUS <script>"))
    session.trip("because api_key=sk-1234567890abcdef1234567890 said so")
shown()
"""
    )
    assert "x402 payment" in said
    assert "IGNORE" not in said
    assert "sk-1234567890" not in said
    assert "api_key=[redacted]" in said


def test_a_payment_in_doubt_is_told_at_once_and_its_span_ends_with_the_guard():
    said = kept(
        """
with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
    session.pay(required()).failed()
    session.pay(required(url=URL + "/open"))
shown()
"""
    )
    assert said.count("x402guard in_doubt ERROR") == 1
    assert said.count("x402 payment ERROR this process has seen no end of it: it may still be taken") == 2
    assert said.count("('x402guard.outcome', 'held')") == 2


@pytest.mark.parametrize("how", ["hangs", "raises as it ends", "raises as it starts"])
def test_the_programs_own_processor_holds_up_no_end_and_raises_nothing(how):
    done = processes.run(
        KEPT
        + f"""
import time
from opentelemetry.sdk.trace import SpanProcessor
from x402guard.telemetry import otel
otel.CLOSING_S = 1.0
how = {how!r}
class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        if how == "raises as it starts":
            raise RuntimeError("broken")
    def on_end(self, span):
        if how == "hangs":
            time.sleep(60)
        if how == "raises as it ends":
            raise RuntimeError("broken")
trace.get_tracer_provider().add_span_processor(Broken())
with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
    print(client(session, Shop()).get(URL).status_code)
    session.pay(required(url=URL + "/open"))
    began = time.monotonic()
print(time.monotonic() - began < 5)
sys.stdout.flush()
os._exit(0)
"""
    )
    assert done.stdout.split() == ["200", "True"], done.stderr


def test_a_doubt_that_the_chain_has_settled_is_no_error():
    said = kept(
        """
chain = MockChain(Settled(10_000, "0x" + "ab" * 32, 0, final=True))
with make_guard(telemetry=True, chains=chain) as guard, guard.session("run", budget="$1.00") as session:
    session.pay(required()).failed()
    guard.reconcile()
shown()
"""
    )
    assert "x402 payment UNSET" in said
    assert "('x402.transaction', '0x" + "ab" * 32 + "')" in said


def test_a_scope_belongs_to_its_session():
    said = kept(
        """
with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00", id="run-1") as session:
    with session.scope("$0.50"):
        session.charge("serp", "$0.04")
shown()
"""
    )
    assert "('x402guard.session.id', 'run-1'), ('x402guard.session.name', 'run')" in said


def test_a_thread_that_cannot_start_is_felt_by_no_payment():
    said = kept(
        """
start = threading.Thread.start
def refused(thread):
    if "telemetry" in thread.name:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refused
with make_guard(telemetry=True) as guard, guard.session("run", budget="$1.00") as session:
    print(session.charge("serp", "$0.04").amount, client(session, Shop()).get(URL).status_code)
store = guard.shell.store
print(store._closed)
"""
    )
    assert said.split() == ["0.04", "200", "True"]


def test_guards_of_a_process_share_one_and_one_that_is_not_closed_sends_at_the_end(monkeypatch):
    script = (
        "from x402guard import Guard\n"
        "guards = [Guard(ledger='memory://', telemetry=True) for _ in range(2)]\n"
        "for number, guard in enumerate(guards, 1):\n"
        "    with guard.session('run', budget='$1.00') as session:\n"
        "        for _ in range(number): session.charge('serp', '$0.01')\n"
    )
    with collector() as collected:
        done = processes.run(script, env={**os.environ, ENDPOINT: collected.url})
        assert done.returncode == 0, done.stderr
        spans, metrics = collected.spans(), collected.metrics()
    assert len(spans) == 3
    [point] = metrics["x402guard.call.amount"]["histogram"]["dataPoints"]
    assert int(point["count"]) == 3


def test_a_forked_child_sends_nothing_of_its_parents():
    said = kept(
        """
guard = make_guard(telemetry=True)
with guard.session("run", budget="$1.00") as session:
    session.charge("serp", "$0.04")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        guard.shell.observer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
guard.close()
shown()
"""
    )
    assert said.count("execute_tool serp") == 1


def test_flags_are_true_or_false():
    with pytest.raises(ConfigError, match="telemetry"):
        make_guard(telemetry="otlp")


def test_without_opentelemetry_it_says_what_to_install():
    script = "import sys\nsys.modules['opentelemetry.sdk'] = None\nfrom x402guard import Guard\nGuard(ledger='memory://', telemetry=True)"
    done = processes.run(script)
    assert "ConfigError: telemetry: it needs OpenTelemetry: pip install 'x402guard[telemetry]'" in done.stderr
