"""A collector as a process of its own: it takes OTLP over HTTP in protobuf, as any collector does, and shows what it has.

``python -m tests.support.otlp_collector`` prints its port. ``GET /received`` answers with the spans and metrics as JSON.
With ``hangs`` it accepts every connection and answers none; with ``fails`` it answers 503.
"""

import gzip
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import processes

KINDS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    way, received = "", {path: [] for path in KINDS} | {"headers": []}

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.way == "hangs":
            threading.Event().wait(60)
        if self.way == "fails" or self.path not in KINDS:
            return self.say(503 if self.way else 404, b"")
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        self.received["headers"].append({name.lower(): value for name, value in self.headers.items()})
        message = KINDS[self.path]()
        message.ParseFromString(body)
        self.received[self.path].append(MessageToDict(message))
        return self.say(200, b"")

    def do_GET(self):
        self.say(200, json.dumps(self.received).encode())

    def say(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Collected:
    """What a collector has received."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def _all(self, path, outer, inner, name):
        received = httpx.get(f"{self.url}/received").json()[path]
        return [
            one for each in received for resource in each[outer] for scope in resource[inner] for one in scope[name]
        ]

    def headers(self):
        """Those of each request, with lower names."""
        return httpx.get(f"{self.url}/received").json()["headers"]

    def spans(self):
        return self._all("/v1/traces", "resourceSpans", "scopeSpans", "spans")

    def metrics(self):
        """The last state of each metric, by its name."""
        return {each["name"]: each for each in self._all("/v1/metrics", "resourceMetrics", "scopeMetrics", "metrics")}


@contextmanager
def collector(way=""):
    process = processes.start("tests.support.otlp_collector", way, module=True)
    try:
        yield Collected(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def attributes(row):
    """The attributes of a span, an event or a point as a dict."""
    found = {}
    for each in row.get("attributes", row.get("filteredAttributes", ())):
        [(kind, value)] = each["value"].items()
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


if __name__ == "__main__":
    Collector.way = sys.argv[1]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    print(server.server_address[1], flush=True)
    server.serve_forever()
