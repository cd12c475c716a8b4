"""A real Prometheus scrapes ``x402guard serve``, and every query of the Grafana dashboard gets an answer from it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.integration.test_serve import Served
from tests.support.merchant import make_guard
from tests.support.scenes import busy

PROMETHEUS = shutil.which("prometheus")
REQUIRED = bool(os.environ.get("REQUIRE_PROMETHEUS"))
WHY = "no Prometheus on this machine: apt-get install prometheus"
DASHBOARD = Path(__file__).parents[2] / "docs/grafana/x402guard.json"


def queries():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_grafanas_own_models_know_every_key_of_the_dashboard():
    written = json.loads(DASHBOARD.read_text())
    known = json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))
    for panel, read in zip(written["panels"], known["panels"], strict=True):
        assert {name: read[name] for name in panel} == panel
    assert {name: known[name] for name in written if not name.startswith("__")} == {
        name: value for name, value in {**written, "panels": known["panels"]}.items() if not name.startswith("__")
    }


def test_the_panels_of_the_dashboard_do_not_overlap():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    if PROMETHEUS is None:
        if REQUIRED:
            raise AssertionError(WHY)
        pytest.skip(WHY)
    folder = tmp_path_factory.mktemp("prometheus")
    with make_guard(f"sqlite:///{folder / 'spend.db'}") as guard:
        busy(guard)
        with Served(folder) as served:
            target = served.url.removeprefix("http://").rstrip("/")
            settings = folder / "prometheus.yml"
            settings.write_text(
                "global: {scrape_interval: 1s}\n"
                f'scrape_configs: [{{job_name: x402guard, static_configs: [{{targets: ["{target}"]}}]}}]\n'
            )
            at = f"127.0.0.1:{free_port()}"
            command = [PROMETHEUS, f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}",
                       f"--web.listen-address={at}", "--log.level=error"]  # fmt: skip
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                try:
                    wait_for(f"http://{at}", "count(x402guard_sessions) and rate(x402guard_refusals_total[5m])")
                    yield f"http://{at}"
                finally:
                    process.send_signal(signal.SIGTERM)


def asked(url, query):
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def wait_for(url, query):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if asked(url, query.partition(" and ")[0]) and asked(url, query.partition(" and ")[2]):
                return
        except (httpx.HTTPError, ValueError):  # it does not listen yet, or reads its own log and answers 503
            pass
        time.sleep(0.2)
    raise AssertionError("Prometheus has read nothing within 60 s")


@pytest.mark.long
@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_prometheus_answers_every_query_of_the_dashboard(prometheus, title, query):
    found = asked(prometheus, query)
    if title == "Wallet: left":
        assert found == [] or float(found[0]["value"][1]) >= 0  # no wallet limit, no metric
    else:
        assert found, title


@pytest.mark.long
def test_prometheus_has_the_figures_of_the_ledger(prometheus):
    [row] = asked(prometheus, 'x402guard_spent_dollars{customer="Kestrel"}')
    assert row["value"][1] == "0.2"
    assert asked(prometheus, "scrape_samples_scraped")[0]["value"][1] != "0"
