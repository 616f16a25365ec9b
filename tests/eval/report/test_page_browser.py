"""The report page in headless Chromium: sorting, nothing fetched, no console error, narrow, wide, light, dark, print.

One browser and one page for each record serve all checks; a check changes the page's size, scheme or medium.
Screenshots lie in the test's folder; ROOFLANE_SCREENSHOTS=DIR keeps them.
"""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from rooflane.eval import open_run
from rooflane.eval.report.page import read_page, write_page
from rooflane.eval.report.page.drawing import DARK, LIGHT

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
UNFOLD = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
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


@pytest.fixture(scope="module")
def visited(browser, pages):
    """Return the open page of each record, a page of the first without scripts, and what was logged and fetched."""
    logged, fetched, opened = [], [], {}

    def open_page(name, **settings):
        page = browser.new_context(viewport={"width": 1280, "height": 900}, **settings).new_page()
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((pages / f"{name}.html").as_uri())
        return page

    opened = {name: open_page(name) for name in RECORDS}
    opened["no script"] = open_page(RECORDS[0], java_script_enabled=False)
    return opened, logged, fetched


@pytest.fixture
def visit(visited, pages):
    """Return a function that shows a record's page as it was loaded; nothing may be fetched or logged."""
    opened, logged, fetched = visited

    def show(name=RECORDS[0], width=1280, scheme="light"):
        page = opened[name]
        page.emulate_media(media="screen", color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto((pages / f"{RECORDS[0] if name == 'no script' else name}.html").as_uri())
        return page

    yield show
    assert logged == []
    own = {(pages / f"{name}.html").as_uri() for name in RECORDS} | {"data:,"}
    assert [url for url in fetched if url.split("#")[0] not in own] == []
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
    page.get_by_role("button", name="candidate").first.click()
    times = [float(text) for text in column(page, "candidate")]
    assert times == sorted(times) and times[0] < 0.1 < 1 < times[-1], "0.04 stands before 0.16 and 1.2"
    page.get_by_role("button", name="family").first.click()
    families = column(page, "family")
    assert families == sorted(families)


def test_the_price_follows_the_field_and_cells_without_a_figure_stay_last(visit):
    page, price = visit(), "$ per 1e9 tokens"
    page.evaluate(UNFOLD)
    before = column(page, price, "#price")
    page.locator("#price-hour").fill("7")
    after = column(page, price, "#price")
    assert [float(b) for b in after] == pytest.approx([2 * float(a) for a in before], rel=0.01)
    page.locator("#price-hour").fill("")
    assert set(column(page, price, "#price")) == {"-"}
    page.locator("#price-hour").fill("3.5")
    assert column(page, price, "#price") == before, "the page and its script write figures alike"
    page.locator("#price").get_by_role("button", name="tokens/s").click()
    tokens = [float(text.replace(",", "")) for text in column(page, "tokens/s", "#price")]
    assert tokens == sorted(tokens)
    page.eval_on_selector(
        "#price tbody td[data-tokens]", "cell => { delete cell.dataset.key; cell.textContent = '-'; }"
    )
    button = page.locator("#price").get_by_role("button", name=price)
    for _ in range(2):
        button.click()
        prices = column(page, price, "#price")
        assert prices[-1] == "-" and prices.count("-") == 1


@pytest.mark.parametrize("name", RECORDS)
def test_it_fits_folded_and_unfolded_in_light_and_dark(visit, kept, name):
    for width, scheme, paper in ((1280, "light", LIGHT["paper"]), (390, "dark", DARK["paper"])):
        page = visit(name, width, scheme)
        height = page.evaluate("document.documentElement.scrollHeight")
        # A candidate's own table, headline and row in a chart come first for each of several candidates.
        assert height <= (2500 if width == 1280 else 4200), "the page is short until it is unfolded"
        assert page.eval_on_selector_all("figure", "all => all.filter(f => f.checkVisibility()).length") == 2
        path = kept / f"{name}-{width}-{scheme}.png"
        page.screenshot(path=path, full_page=True)
        with Image.open(path) as shot:
            assert shot.size == (width, height)
            assert "#{:02x}{:02x}{:02x}".format(*shot.convert("RGB").getpixel((1, 1))) == paper
        page.evaluate(UNFOLD)
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out sideways"
        assert page.evaluate(MEETING) == []
        assert page.evaluate(SMALLEST) >= 10
        shown = page.eval_on_selector_all("svg", "all => all.filter(s => s.getBoundingClientRect().width).length")
        assert shown == page.locator("figure").count(), "each chart once"
        # A chart's colours follow the scheme through the page's variables.
        tick = page.eval_on_selector("svg text", "text => getComputedStyle(text).fill")
        wanted = (DARK if scheme == "dark" else LIGHT)["muted"]
        assert tick == f"rgb({int(wanted[1:3], 16)}, {int(wanted[3:5], 16)}, {int(wanted[5:], 16)})"


def test_a_link_to_a_folded_section_unfolds_it(visit):
    page = visit()
    assert not page.locator("#clocks").is_visible()
    page.locator("nav").get_by_role("link", name="Clocks").click()
    assert page.locator("#clocks").is_visible()


def test_without_script_everything_is_there_but_the_controls(visit):
    page = visit("no script")
    assert page.locator("table").count() > 5
    assert page.locator("button").count() == 0
    assert page.locator("svg.wide").first.is_visible()
    assert not page.locator("#clocks").is_visible()
    page.locator("summary", has_text="Clocks").click()
    assert page.locator("#clocks").is_visible()
    page.locator("summary", has_text="Price").click()
    assert page.locator("#price").is_visible() and not page.locator("#price-control").is_visible()


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


@pytest.mark.parametrize("name", [*RECORDS, "no script"])
def test_print_shows_every_section_cuts_no_table_and_is_light(visit, kept, name):
    # A4 within 12 mm margins is 703 pixels wide.
    page = visit(name, 703, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    boxes = (
        "all => all.map(e => [e.id, e.getBoundingClientRect().height, e.getBoundingClientRect().right - innerWidth])"
    )
    sizes = page.eval_on_selector_all("table", boxes)
    assert [found for found in sizes if found[1] < 10 or found[2] > 1] == [], "a table is folded or cut"
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("svg.wide").first.is_visible()
    margin = dict.fromkeys(("top", "bottom", "left", "right"), "12mm")
    made = page.pdf(path=kept / f"{name}.pdf", format="A4", print_background=True, margin=margin)
    assert made.startswith(b"%PDF")
