"""The report page from stored rows: valid HTML, the tables' own figures, records' texts as text, the same bytes."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from base64 import b64encode
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rooflane.eval import EvaluationError, cli, open_run
from rooflane.eval.record.records import Verification
from rooflane.eval.report import tables
from rooflane.eval.report.escape import plain
from rooflane.eval.report.page import read_page, render_page, write_page
from rooflane.eval.report.page.html import integrity_table, sort_key
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
VOID = {"meta", "link", "input", "img", "br", "hr"}
HOSTILE = '</script><script>alert("1")</script>\'&\x1b[31m.py'
RECORDS = ["h200-published", "h200-lanes", "h200-half", "h200-bf16", "h200-cap30"]


class Page(HTMLParser):
    """A parsed page: its elements, its tables as texts, and whether every element was closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.tables, self.faults = [], [], {}, []
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is never closed" for tag in self.stack]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if len(dict(attributes)) != len(attributes):
            self.faults.append(f"{tag} repeats an attribute")
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.caption, self.rows = "", []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes nothing")
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data):
        if "caption" in self.stack:
            self.caption += data
        elif self.stack and {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def hostile_run(tmp_path, make_meta, full_rows, make_record):
    """A run whose shape ids, candidate names, reasons and command are markup."""
    shapes = [
        Shape('"><b>x', 2, 8, 16, 2, 16, 1),
        Shape("b", 1, 16, 16, 2, 16, 1),
        Shape("huge", 32, 10**5, 1024, 16, 1024, 2),
    ]
    meta = make_meta(shapes, candidates=(HOSTILE, "fine"))
    meta = meta.model_copy(update={"command": "rooflane eval '<i>' &amp;"})
    rows = [row for row in full_rows(meta, {HOSTILE: 2.0, "fine": 3.0}) if row.shape_id != "huge"]
    bad = make_record(shapes[1], 1, HOSTILE, None, status="error", reason="</td></table><img src=x onerror=alert(1)>")
    rows = [bad if row.key == bad.key else row for row in rows]
    for process in range(3):
        for arm in ("eager", HOSTILE, "fine"):
            rows.append(make_record(shapes[2], process, arm, None, status="infeasible", reason="41 TB & more"))
    run = create_run(tmp_path / "runs", meta)
    run.append(rows)
    return run


def page_of(run, folder):
    return render_page(read_page(run), folder)


@cache
def record(name):
    """Return a committed run and its page, made once."""
    run = open_run(ROOT / "briefs" / "records" / name)
    return run, page_of(run, ROOT)


@pytest.fixture(params=[*RECORDS, "hostile"])
def run_and_page(request, tmp_path):
    if request.param != "hostile":
        return record(request.param)
    run = request.getfixturevalue("hostile_run")
    return run, page_of(run, tmp_path)


def test_the_html_is_balanced_labelled_and_fetches_nothing(run_and_page):
    page = Page(run_and_page[1])
    assert page.faults == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = [a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a]
    assert {name for names in named for name in names.split()} <= set(ids)
    assert {a["href"][1:] for a in page.all("a") if a["href"].startswith("#")} <= set(ids)
    assert {a["id"] for a in page.all("input")} <= {a["for"] for a in page.all("label")}
    assert all(a["scope"] in ("col", "row") for a in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) == len(page.tables)
    assert page.all("html") == [{"lang": "en"}]
    assert [len(page.all(tag)) for tag in ("h1", "main", "header", "footer", "script", "style")] == [1] * 6
    addresses = [a[key] for _, a in page.elements for key in ("href", "src", "data", "action", "poster") if key in a]
    assert [address for address in addresses if not address.startswith(("#", "data:,", "./", "../"))] == []
    assert not any(name.startswith("on") or name == "style" for _, a in page.elements for name in a)
    for svg in page.all("svg"):
        assert svg["role"] == "img" and len(svg["aria-labelledby"].split()) == 2


def test_the_policy_allows_this_style_and_script_and_nothing_else(run_and_page):
    _, text = run_and_page
    (policy,) = [a["content"] for a in Page(text).all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"@import|url\(", text)


def test_tables_hold_the_figures_of_the_report(run_and_page):
    run, text = run_and_page
    shown = Page(text).tables
    wanted = tables.all_tables(run.summary())
    assert wanted
    for table in wanted:
        head, *rows = [[cell.strip() for cell in row] for row in shown[plain(table.title)]]
        assert [name or "note" for name in table.columns] == head
        assert [[plain(cell) for cell in row] for row in table.rows] == rows


def test_the_headline_stands_with_interval_verdict_and_null():
    run, text = record("h200-published")
    text = unescape(text)
    (headline,) = run.summary().headlines
    mean = headline.geomean
    assert f"<strong>{mean.centre:.3g}x</strong> [{mean.low:.3g}, {mean.high:.3g}], 95 %" in text
    verdict = "no verdict" if headline.verdict == "none" else headline.verdict.upper()
    assert f"<strong>{verdict}</strong>: {headline.why}" in text
    ((line, details),) = tables.headline_lines(run.summary())
    assert f"In full: {line.removeprefix('dispatched: ')}; {details}." in text
    assert f"null {tables.interval(headline.null)}" in details
    assert tables.environment_line(run.summary()) in text


def test_regimes_are_confronted_shape_by_shape():
    shown = Page(record("h200-published")[1]).tables["Regimes: predicted against measured"]
    assert shown == [
        ["predicted", "measured launch", "measured bandwidth", "not measured"],
        ["launch", "10 ✓: 1, 2, 3, 4, 5, 7, 9, 10, 11, 12", "-", "-"],
        ["bandwidth", "-", "3 ✓: 6, 8, 13", "-"],
        ["infeasible", "-", "-", "1: 14"],
    ]


def test_a_wrong_regime_is_marked(tmp_path, make_meta, make_record):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)], processes=1, controls=())
    predicted = meta.predictions[0].classification["regime"]
    event = 1_000_000 if predicted == "launch" else 3_000_000  # launch is measured above 1.3 times the device time
    run = create_run(tmp_path, meta)
    shape = meta.shape_list()[0]
    run.append([make_record(shape, 0, arm, (event, event), device_ns=[1_000_000] * 3) for arm in ("eager", "mine")])
    (said, *cells) = Page(page_of(run, tmp_path)).tables["Regimes: predicted against measured"][1]
    assert said == predicted
    assert "1 ✗: a" in cells


def test_fp64_errors_are_the_records():
    run, text = record("h200-published")
    head, *rows = Page(text).tables["Worst error against fp64, in units of eager's own error"]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 14)]
    checks = [
        check
        for row in run.records()
        if row.shape_id == "6" and row.arm == "dispatched" and row.verification
        for check in row.verification.truth
        if check.name == "q_proj x 8"
    ]
    worst = max(checks, key=lambda check: check.gate.max_abs / check.eager_max_abs)
    ratio = worst.gate.max_abs / worst.eager_max_abs
    assert rows[5][head.index("q_proj x 8")] == f"{ratio:.3g}" + ("" if worst.gate.passed else "~")


def test_prices_follow_the_records_price():
    run, text = record("h200-published")
    for tokens, shown in re.findall(r'data-tokens="([\d.e+]+)">([^<]*)<', text):
        assert shown == tables.number(run.meta.price_per_hour * 1e9 / (3600 * float(tokens)))
    cells = {row[2] for row in Page(text).tables["Price of 1e9 tokens"][1:]}
    assert cells == {"eager", "dispatched"}


def test_what_failed_or_was_left_out_stands_with_its_reason(hostile_run, tmp_path):
    shown = Page(page_of(hostile_run, tmp_path)).tables
    (failure,) = shown["Failures"][1:]
    assert failure[0] == "b" and failure[3] == "</td></table><img src=x onerror=alert(1)>"
    left_out = shown["Not run"][1:]
    assert {row[2] for row in left_out} == {"infeasible"}
    assert {row[3] for row in left_out} == {"41 TB & more"}


def test_findings_are_shown(tmp_path, make_meta, full_rows, make_record):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)])
    finding = Verification(status="ok", contract=["the next call overwrites the output"])
    grey = make_record(meta.shape_list()[0], 0, "mine", (500_000, 500_000), verification=finding)
    run = create_run(tmp_path, meta)
    run.append([grey if row.key == grey.key else row for row in full_rows(meta, {"mine": 2.0})])
    text = page_of(run, tmp_path)
    assert ["a", "mine", "the next call overwrites the output"] in Page(text).tables["Findings"]
    assert "breaks a promise" in text


def test_evidence_of_manipulation_stands_with_its_arm(stored_run, tmp_path, make_meta, full_rows):
    assert integrity_table(read_page(stored_run)).rows == ()
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)])
    run = create_run(tmp_path, meta)
    found = ["the clock was <replaced>"]
    run.append(
        [row.model_copy(update={"integrity": found * (row.arm == "mine")}) for row in full_rows(meta, {"mine": 2.0})]
    )
    assert Page(page_of(run, tmp_path)).tables["Integrity"][1:] == [["a", "mine", "the clock was <replaced>"]]


def test_texts_of_the_records_stay_text(hostile_run, tmp_path):
    text = page_of(hostile_run, tmp_path)
    page = Page(text)
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("b") and not page.all("i")
    assert "\x1b" not in text
    assert "&lt;/script&gt;&lt;script&gt;" in text
    assert any(row[0] == '"><b>x' for rows in page.tables.values() for row in rows)


def test_the_same_records_give_the_same_bytes_in_another_process(hostile_run, tmp_path):
    command = [sys.executable, "-m", "rooflane.eval", "report", str(hostile_run.folder), "--html", "page.html"]
    # A fixed seed of Python's string hashes, unlike this process's, is another order of every set.
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "page.html").read_text() == page_of(hostile_run, tmp_path)


def test_links_lead_from_the_page_to_the_records_and_digests_match(stored_run, tmp_path):
    folder = tmp_path / "a b" / "out"
    folder.mkdir(parents=True)
    write_page(read_page(stored_run), folder / "page.html")
    text = (folder / "page.html").read_text()
    links = [a["href"] for a in Page(text).all("a") if not a["href"].startswith("#")]
    assert links == [f"../../runs/{stored_run.meta.id}/{name}" for name in ("records.jsonl", "run.json")]
    for link in links:
        assert hashlib.sha256((folder / link).read_bytes()).hexdigest() in text
    write_page(read_page(stored_run), stored_run.folder / "page.html")
    assert 'href="./records.jsonl"' in (stored_run.folder / "page.html").read_text()


def test_a_run_without_rows_still_has_a_page(tmp_path, make_meta):
    run = create_run(tmp_path, make_meta([Shape("a", 2, 8, 16, 2, 16, 1)]))
    page = Page(page_of(run, tmp_path))
    assert page.faults == []
    assert "Failures" not in page.tables, "what was not measured yet has not failed"
    assert page.tables["Not run"][1][2:] == ["skipped", "not measured yet; rooflane eval --resume measures it"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("34.5x [30.3, 39.3]", 34.5),
        ("3,155 (3,115-3,169)", 3155.0),
        ("1.01e+06", 1.01e6),
        ("41.1 TB", 41.1e12),
        ("29 GB", 29e9),
        ("0.0729", 0.0729),
        ("-", None),
        ("error", None),
        ("", None),
    ],
)
def test_sort_keys_are_the_number_a_cell_begins_with(text, key):
    assert sort_key(text) == key


def test_the_command_writes_the_page_and_keeps_json_pure(stored_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(stored_run.folder), "--html", str(tmp_path / "page.html"), "--json"])
    assert end.value.code in (0, None)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    out, err = capsys.readouterr()
    assert json.loads(out)["run"] == stored_run.meta.id
    assert "page written to" in err


def test_the_command_of_the_readme_writes_the_page(tmp_path, monkeypatch):
    section = (ROOT / "README.md").read_text().partition("\n## Read the report\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"```\n(rooflane .*)\n```", section)
    (tmp_path / "briefs").symlink_to(ROOT / "briefs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(command)[1:])
    assert end.value.code in (0, None)
    assert Page((tmp_path / "page.html").read_text()).faults == []


def test_a_place_that_cannot_be_written_is_one_paragraph(stored_run, tmp_path):
    with pytest.raises(EvaluationError, match="cannot be written"):
        write_page(read_page(stored_run), tmp_path / "missing" / "page.html")
