"""The report page in headless Chromium: sorting, nothing fetched, no console error, narrow, wide, light, dark, print.

Screenshots lie in the test's folder; ROOFLANE_SCREENSHOTS=DIR keeps them.
"""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from rooflane.eval import open_run
from rooflane.eval.report.page import read_page, write_page
from rooflane.eval.report.page.palette import DARK, LIGHT

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium"),
]
# Off: what a browser asks of the network for itself. The sandbox cannot start as root.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
RECORDS = ("h200-published", "h200-lanes")
WIDTHS = (390, 1280)
SPEED = "#results-0"
# The visible texts of every chart whose boxes meet, by the browser's own measure.
MEETING = """() => [...document.querySelectorAll("svg")].flatMap(svg => {
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const frame = svg.getBoundingClientRect();
  if (!frame.width) return [];
  const out = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1).map(([t]) => "out: " + t);
  return out.concat(boxes.flatMap(([t, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
    .map(([u]) => `${t} / ${u}`)));
})"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg text")]
  .filter(text => text.getBoundingClientRect().width)
  .map(text => parseFloat(getComputedStyle(text).fontSize)
    * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width))"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def pages(root, tmp_path_factory):
    """Return the page of each record as a file."""
    folder = tmp_path_factory.mktemp("pages")
    for name in RECORDS:
        write_page(read_page(open_run(root / "briefs" / "records" / name)), folder / f"{name}.html")
    return folder


@pytest.fixture
def kept(tmp_path):
    """Return the folder for pictures."""
    folder = Path(os.environ.get("ROOFLANE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser, pages):
    """Return a function that opens a record's page; afterwards nothing may have been fetched or complained of."""
    contexts, said, fetched = [], [], []

    def open_page(name=RECORDS[0], width=1280, **settings):
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((pages / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    opened = {(pages / f"{name}.html").as_uri() for name in RECORDS} | {"data:,"}
    assert [url for url in fetched if url.split("#")[0] not in opened] == []
    assert fetched, "the page itself was seen"


def column(page, name, table=SPEED):
    """Return the texts of a column, top to bottom."""
    heads = [head.inner_text().split(" ▲")[0].split(" ▼")[0] for head in page.query_selector_all(f"{table} thead th")]
    place = heads.index(name) + 1
    return page.eval_on_selector_all(
        f"{table} tbody tr > :nth-child({place})", "cells => cells.map(c => c.textContent)"
    )


def order(page, table=SPEED):
    """Return each header's aria-sort where it has one."""
    return page.eval_on_selector_all(
        f"{table} thead th[aria-sort]", "heads => heads.map(h => [h.textContent, h.getAttribute('aria-sort')])"
    )


def test_a_column_sorts_by_its_numbers_by_click_and_by_keyboard(visit):
    page = visit()
    shapes = column(page, "id")
    assert shapes == [str(number) for number in range(1, 14)]
    button = page.get_by_role("button", name="speedup [95%]").first
    ways = (button.click, lambda: page.keyboard.press("Enter"), lambda: page.keyboard.press("Space"))
    button.focus()
    for act, direction in zip(ways, ("ascending", "descending", "ascending"), strict=True):
        act()
        ratios = [float(text.split("x")[0]) for text in column(page, "speedup [95%]")]
        assert ratios == sorted(ratios, reverse=direction == "descending")
        assert {ratios[0], ratios[-1]} == {2.89, 50.5}
        assert order(page) == [["speedup [95%]", direction]]
        assert column(page, "id")[ratios.index(2.89)] == "8", "whole rows move"
    page.get_by_role("button", name="id", exact=True).first.click()
    assert column(page, "id") == shapes, "2 stands before 10"
    assert order(page) == [["id", "ascending"]]


def test_fractions_and_powers_sort_as_numbers_and_words_as_words(visit):
    page = visit()
    page.get_by_role("button", name="candidate").first.click()
    times = [float(text) for text in column(page, "candidate")]
    assert times == sorted(times) and times[:2] == [0.0396, 0.0494], "0.0396 stands before 0.160"
    page.get_by_role("button", name="family").first.click()
    families = column(page, "family")
    assert families == sorted(families)
    page.locator("#price").get_by_role("button", name="tokens/s").click()
    tokens = [float(text.replace(",", "")) for text in column(page, "tokens/s", "#price")]
    assert tokens == sorted(tokens)


def test_cells_without_a_figure_stay_last(visit):
    page = visit()
    page.locator("#price-hour").fill("")
    assert set(column(page, "$ per 1e9 tokens", "#price")) == {"-"}
    page.locator("#price-hour").fill("3.5")
    page.eval_on_selector(
        "#price tbody td[data-tokens]", "cell => { delete cell.dataset.key; cell.textContent = '-'; }"
    )
    button = page.locator("#price").get_by_role("button", name="$ per 1e9 tokens")
    for _ in range(2):
        button.click()
        prices = column(page, "$ per 1e9 tokens", "#price")
        assert prices[-1] == "-" and prices.count("-") == 1


def test_the_price_follows_the_field(visit):
    page = visit()
    before = column(page, "$ per 1e9 tokens", "#price")
    page.locator("#price-hour").fill("7")
    after = column(page, "$ per 1e9 tokens", "#price")
    assert [float(b) for b in after] == pytest.approx([2 * float(a) for a in before], rel=0.01)
    page.locator("#price-hour").fill("3.5")
    assert column(page, "$ per 1e9 tokens", "#price") == before, "the page and its script write figures alike"


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_no_text_meets_another(visit, name, width):
    page = visit(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out sideways"
    assert page.evaluate(MEETING) == []
    assert page.evaluate(SMALLEST) >= 10
    shown = page.eval_on_selector_all("svg", "all => all.filter(s => s.getBoundingClientRect().width).length")
    assert shown == page.locator("figure").count(), "each chart once"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("scheme", "paper"), [("light", LIGHT["paper"]), ("dark", DARK["paper"])])
def test_screenshots_have_the_paper_of_their_scheme(visit, kept, width, scheme, paper):
    page = visit(width=width, color_scheme=scheme)
    path = kept / f"{RECORDS[0]}-{width}-{scheme}.png"
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as shot:
        assert shot.width == width and shot.height > 5000
        assert "#{:02x}{:02x}{:02x}".format(*shot.convert("RGB").getpixel((1, 1))) == paper


def test_without_script_everything_is_there_but_the_controls(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("table").count() > 5
    assert page.locator("button").count() == 0
    assert not page.locator("#price-control").is_visible()
    assert page.locator("svg.wide").first.is_visible()


def test_the_keyboard_reaches_the_skip_link_and_the_tables(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0, "seen when focused"
    outline = "(e => getComputedStyle(e).outlineStyle + getComputedStyle(e).outlineWidth)(document.activeElement)"
    assert page.evaluate(outline) == "solid3px"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"


@pytest.mark.parametrize("name", RECORDS)
def test_print_cuts_no_table_and_is_light(visit, kept, name):
    # A4 within 12 mm margins is 703 pixels wide.
    page = visit(name, 703, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    cut = "all => all.filter(t => t.getBoundingClientRect().right > innerWidth + 1).map(t => t.id)"
    assert page.eval_on_selector_all("table", cut) == []
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("svg.wide").first.is_visible()
    margin = dict.fromkeys(("top", "bottom", "left", "right"), "12mm")
    made = page.pdf(path=kept / f"{name}.pdf", format="A4", print_background=True, margin=margin)
    assert made.startswith(b"%PDF")
