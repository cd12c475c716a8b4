"""The built pages of the docs in a real browser: no table runs off its page at the width of a small desk."""

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.browser import browser, needs_browser

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, needs_browser]

TOO_WIDE = """Array.from(document.querySelectorAll('.md-typeset table:not([class])')).map(table => {
  const box = table.closest('.md-typeset__scrollwrap') || table.parentElement;
  return [table.scrollWidth, box.clientWidth] }).filter(([table, box]) => table > box + 2)"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_no_table_runs_off_its_page(site):
    folder, url = site
    found = {}
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        for file in sorted(folder.rglob("*.html")):
            name = str(file.relative_to(folder))
            page.goto(f"{url}/{name}")
            page.wait_for_function("document.fonts.status === 'loaded'")
            if wide := page.evaluate(TOO_WIDE):
                found[name] = wide
    assert found == {}
