"""A real browser, headless: Debian's Chromium, driven by Playwright."""

import os
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = bool(os.environ.get("REQUIRE_CHROMIUM"))
WHY = "no Chromium on this machine: apt-get install chromium"

needs_browser = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason=WHY)

QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def browser():
    from playwright.sync_api import sync_playwright  # half a second

    if CHROMIUM is None:
        raise AssertionError(WHY)
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        try:
            yield chromium
        finally:
            chromium.close()


LOW_CONTRAST = """() => {
  const parse = (text) => {
    const found = text.match(/[\\d.]+/g);
    return found === null ? [0, 0, 0, 0] : [...found.slice(0, 3).map(Number), found.length > 3 ? Number(found[3]) : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((value, n) => value * top[3] + below[n] * (1 - top[3]));
  const light = (color) => {
    const parts = color.map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !box.width || !box.height || style.visibility === "hidden") continue;
    if (["SCRIPT", "STYLE", "TITLE", "title", "OPTION"].includes(element.tagName)) continue;
    const below = behind(element);
    const ink = over(parse(element.closest("svg") ? style.fill : style.color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([walker.currentNode.data.trim().slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return found;
}"""
"""Every text on the page whose contrast, as WCAG counts it, is below 4.5."""

CLIPPED = """() => {
  const wide = document.documentElement.clientWidth, found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || style.visibility === "hidden" || element.closest("thead, .skip, title, select")) continue;
    range.selectNodeContents(walker.currentNode);
    for (const box of range.getClientRects()) {
      if (!box.width || !box.height) continue;
      if (box.left < -0.5 || box.right > wide + 0.5) found.push(walker.currentNode.data.trim().slice(0, 40));
    }
    for (let at = element; at && at !== document.body; at = at.parentElement) {
      const hides = getComputedStyle(at).overflowX;
      if ((hides === "hidden" || hides === "clip") && at.scrollWidth > at.clientWidth + 1) found.push(at.tagName);
    }
  }
  return found;
}"""
"""Every text that lies beyond the page's edge, or is cut by an element around it."""
