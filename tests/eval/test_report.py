"""Reports from stored rows: the same bytes each time, nothing dropped, brackets taken as text."""

import io
import json

import pytest
from rich.console import Console

from rooflane.eval import (
    EvaluationError,
    open_run,
    render_json,
    render_markdown,
    render_readme_table,
    render_terminal,
    update_between_markers,
)
from rooflane.eval.summary import summarise


def terminal(summary):
    """Return what the terminal shows."""
    console = Console(file=io.StringIO(), width=240)
    render_terminal(summary, console)
    return console.file.getvalue()


def test_the_same_records_give_the_same_bytes(stored_run):
    first = render_markdown(stored_run.summary())
    assert render_markdown(open_run(stored_run.folder).summary()) == first
    assert terminal(stored_run.summary()) == terminal(open_run(stored_run.folder).summary())


@pytest.mark.parametrize("render", [render_markdown, render_readme_table, terminal])
def test_speedup_interval_null_and_controls_stand_in_one_row(stored_run, render):
    text = render(stored_run.summary())
    (row,) = [line for line in text.splitlines() if "2x8x16 h2 f16 l1 causal" in line]
    assert "2x [2, 2]" in row
    assert "1.25x" in row
    assert row.index("2x [2, 2]") < row.index("1x") < row.index("1.25x")
    text = " ".join(text.split())
    assert "geometric mean 2x [2, 2] over 2 of 2 shapes, floor 0.00% (provisional)" in text
    assert "by process 2x, 2x, 2x, 2x, 2x, 2x; null 1x [1, 1]" in text


def test_failures_and_skips_are_listed_with_their_reasons(make_meta, full_rows, make_record, stored_run):
    meta = stored_run.meta
    rows = [row for row in stored_run.records() if row.key != (1, "a", "mine")]
    shape = meta.shape_list()[0]
    rows.append(make_record(shape, 1, "mine", None, status="error", reason="IndexError: [/oops] | x"))
    rows = [row for row in rows if row.key != (0, "b", "sdpa")]
    rows.append(make_record(meta.shape_list()[1], 0, "sdpa", None, status="skipped", reason="no time"))
    summary = summarise(meta, rows)
    for text in (terminal(summary), render_markdown(summary)):
        assert "[/oops]" in text
        assert "no time" in text
        assert "no geometric mean" in text
    assert r"\| x" in render_markdown(summary)


def test_json_holds_every_shape(stored_run):
    data = json.loads(render_json(stored_run.summary()))
    assert [row["shape"]["id"] for row in data["shapes"]] == ["a", "b"]
    assert data["headlines"][0]["geomean"]["centre"] == pytest.approx(2.0)


def test_markers_are_filled_once_and_left_alone_when_nothing_changed(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("top\n<!-- table:begin -->\nold\n<!-- table:end -->\nbottom\n")
    assert update_between_markers(path, "table", "| new |")
    assert path.read_text() == "top\n<!-- table:begin -->\n| new |\n<!-- table:end -->\nbottom\n"
    assert not update_between_markers(path, "table", "| new |\n")


@pytest.mark.parametrize(
    "text", ["nothing", "<!-- t:begin -->", "<!-- t:end --><!-- t:begin -->", "<!-- t:begin -->" * 2 + "<!-- t:end -->"]
)
def test_missing_or_doubled_markers_are_refused(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(EvaluationError, match="<!-- t:begin -->"):
        update_between_markers(path, "t", "x")
    assert path.read_text() == text
