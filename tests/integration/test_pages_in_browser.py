"""Pages in a real browser: on a phone, a tablet and a desk, light and dark, by keyboard alone, and on paper."""

import pytest

from tests.support.browser import CLIPPED, LOW_CONTRAST, browser, needs_browser
from tests.support.delegations import world
from tests.support.scenes import SCRIPT, busy
from x402guard import Owner

pytestmark = [pytest.mark.long, needs_browser]

SIZES = [375, 768, 1280]


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    url = f"sqlite:///{folder / 'spend.db'}"
    with world(url) as books:
        busy(books.guard(), books.forward)
        books.forward(86_400)
        busy_again = books.guard().budget("شركة النور", "$5.00", per="month", tz="Asia/Kolkata")
        with busy_again.session("later", budget="$2.00", id="later") as session:
            session.charge("serp", "$0.75")
            session.trip("<b>it looks wrong</b>")
    with Owner(url, read_only=True) as owner:
        for name in ("wallet", "brief-4471", "later", "audit-1"):
            (folder / f"{name}.html").write_text(owner.report(name).to_html())
    return folder


def opened(chromium, path, width, scheme="light", **more):
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme, **more)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{path}")
    assert said == []
    assert asked == [f"file://{path}"]
    return page


@pytest.mark.parametrize("name", ["wallet", "brief-4471", "later", "audit-1"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_a_report_is_readable(chromium, pages, width, scheme, name):
    page = opened(chromium, pages / f"{name}.html", width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(LOW_CONTRAST) == []
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate("document.querySelectorAll('[style]').length") == 0
    page.close()


def test_what_is_text_stays_text(chromium, pages):
    page = opened(chromium, pages / "brief-4471.html", 1280)
    assert page.locator("bdi", has_text=SCRIPT).first.is_visible()
    assert page.locator("img, iframe").count() == 0
    assert page.locator("script").count() == 1
    page.close()


def test_the_keyboard_alone_reaches_everything(chromium, pages):
    page = opened(chromium, pages / "brief-4471.html", 1280)
    wanted = page.evaluate("[...document.querySelectorAll('a, button, input, select')].filter((e) => !e.hidden).length")
    reached = set()
    for _ in range(wanted):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [[...document.querySelectorAll('*')].indexOf(e), s.outlineStyle !== 'none'].join(); })()"
            )
        )
    assert len(reached) == wanted
    assert all(each.endswith("true") for each in reached), "the focus is not seen"
    page.close()


def test_filters_and_the_colour_button_work_and_are_not_there_without_a_script(chromium, pages):
    page = opened(chromium, pages / "brief-4471.html", 1280)
    rows = page.locator("[data-k]:visible")
    everything = rows.count()
    page.locator("#kind").select_option("refusal")
    assert 0 < rows.count() < everything
    page.locator("#kind").select_option("")
    page.locator("#find").fill("scans.example")
    assert (rows.count(), page.locator("#shown").text_content()) == (1, f"1 of {everything} lines")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.close()
    plain = opened(chromium, pages / "brief-4471.html", 1280, java_script_enabled=False)
    assert plain.locator("button:visible, input:visible, select:visible").count() == 0
    assert plain.locator("[data-k]:visible").count() == everything
    plain.close()


def test_paper_is_light_and_has_no_controls(chromium, pages):
    page = opened(chromium, pages / "brief-4471.html", 1280, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("button:visible, input:visible").count() == 0
    assert page.evaluate(LOW_CONTRAST) == []
    page.close()
