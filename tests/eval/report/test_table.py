"""Figures as text, and tables that fit a terminal: checked on made tables, and on every record there is."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from rooflane.eval import compare, render_comparison, render_terminal
from rooflane.eval.report.report import comparison_table
from rooflane.eval.report.table import (
    Table,
    grouped,
    interval,
    number,
    ratio_columns,
    terminal_lines,
    time_columns,
    times,
)
from rooflane.eval.report.tables import all_tables
from rooflane.eval.stats.estimator import Interval


@pytest.fixture
def summaries(recorded_runs):
    """The summary of every run on record."""
    return [run.summary() for run in recorded_runs.values()]


def value_of(text):
    """Return the number that a cell prints."""
    return float(re.match(r"[\d.,e+-]+", text).group().replace(",", ""))


def agree(base, arm, ratio):
    """Tell whether two printed times divide to the printed ratio."""
    decimals = len(ratio.split("x")[0].partition(".")[2])
    return abs(round(value_of(base) / value_of(arm), decimals) - value_of(ratio)) < 1e-9


def test_ratios_near_1_keep_three_decimals():
    texts = {1.0: "1.000", 1.0042: "1.004", 0.9958: "0.996", 1.9994: "1.999", 1.9996: "2.00", 0.1: "0.100"}
    texts |= {0.0123: "0.0123", 2.5: "2.50", 45.93: "45.9", 127.6: "128", 99.97: "100", 2450.0: "2,450"}
    assert {value: times(value) for value in texts} == texts
    assert interval(Interval(1.004, 1.001, 1.007, 8)) == "1.004x [1.001, 1.007]"
    assert interval(Interval(1.004, None, None, 1)) == "1.004x"
    # A bound that is not 1 does not print as 1; one that is 1 up to rounding does.
    assert interval(Interval(1.0006, 1.0002, 1.001, 8)) == "1.0006x [1.0002, 1.0010]"
    assert interval(Interval(1.0, 1.0 - 1e-12, 1.0 + 1e-12, 8)) == "1.000x [1.000, 1.000]"


def test_times_have_the_digits_their_ratio_needs():
    assert ratio_columns(2.18, 0.0539, Interval(2.18 / 0.0539, None, None, 1)) == ("2.180", "0.05390")
    # 1.00449 prints as 1.004; four digits of each time would divide to 1.005.
    base, arm = 1.0045, 1.00001
    assert round(1.005 / 1.0, 3) == 1.005
    texts = ratio_columns(base, arm, Interval(base / arm, None, None, 1))
    assert agree(*texts, times(base / arm)) and max(map(len, texts)) <= 8
    assert number(85077.4, 4) == "85,077"


def test_every_printed_speedup_is_the_quotient_of_the_times_beside_it(summaries):
    checked = 0
    for summary in summaries:
        for row in summary.rows:
            for cell in row.cells.values():
                if cell.base_ms is None:
                    continue
                assert cell.base_ms / cell.event_ms.centre == pytest.approx(cell.speedup.centre, rel=1e-9)
                assert agree(*time_columns(cell), interval(cell.speedup)), (summary.meta.id, row.shape.id, cell.arm)
                checked += 1
        for table in all_tables(summary):
            if "speedup over eager" in table.title:
                eager = table.columns.index("eager")
                rows = [line[eager : eager + 3] for line in table.rows if line[eager + 2][0].isdigit()]
                assert all(agree(*line) for line in rows)
    assert checked > 250


def test_compare_prints_the_times_that_eval_prints(recorded_runs):
    """One arm beside eager in one run, by pairs, and beside itself in another run, by Welch."""
    run, other = recorded_runs["h200-campaign-3"], recorded_runs["h200-campaign-2"]
    summary = run.summary()
    columns = {row.shape.id: time_columns(row.cells["dispatched"]) for row in summary.rows if row.eager.event_ms}
    found = compare("dispatched", "eager", run=run)
    for line in comparison_table(found).rows:
        assert (line[3], line[2]) == columns[line[0]] and agree(line[3], line[2], line[4])
    for pair in compare("dispatched", str(other.folder), run=run).pairs:
        assert pair.a_ms == pytest.approx(summary.row(pair.shape).cells["dispatched"].event_ms.centre, rel=1e-9)
        assert pair.b_ms / pair.a_ms == pytest.approx(pair.ratio.centre, rel=1e-9)


def test_compare_gives_each_row_a_word_and_each_row_without_a_verdict_its_reason(recorded_runs):
    for b in ("eager", "compiled"):
        found = compare("dispatched", b, run=recorded_runs["h200-campaign-3"])
        words = {line[1] for line in comparison_table(found).rows}
        assert words <= {"FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE", "no verdict"}
        for width in (80, 100, 120):
            console = Console(file=io.StringIO(), width=width)
            render_comparison(found, console)
            lines = console.file.getvalue().splitlines()
            assert max(map(cell_len, lines)) <= width
            if "no verdict" in words:
                assert any(line.startswith("no verdict on shape") for line in lines)
                assert "this run has 3 processes, fewer than 6" in " ".join(" ".join(lines).split())


def test_no_table_of_any_record_splits_a_cell_at_any_width(summaries):
    for summary in summaries:
        for width in (80, 100, 120):
            for table in all_tables(summary):
                lines = terminal_lines(table, width)
                assert max(map(cell_len, lines)) <= width, (summary.meta.id, table.title)
                if table.prose:
                    text = " ".join(" ".join(lines).split())
                    assert all(" ".join(row[-1].split()) in text for row in table.rows)
                    continue
                _, _, dropped = " ".join(lines).partition("not shown at this width: ")
                for name in filter(None, dropped.split(", ")):
                    table = table.without(name)
                for row in table.rows:
                    # A cell stands whole in one line that starts with its row's first cell, or in the next ones.
                    start = re.compile(rf"(id |rank )?{re.escape(row[0])}(\s|$)")
                    at = next(index for index, line in enumerate(lines) if start.match(line))
                    block = lines[at : at + 12]
                    assert all(any(cell in line for line in block) for cell in row), (table.title, row)
            for details in (False, True):
                console = Console(file=io.StringIO(), width=width)
                render_terminal(summary, console, details)
                assert max(map(cell_len, console.file.getvalue().splitlines())) <= width


def test_a_narrow_terminal_drops_columns_then_stacks_rows():
    table = Table(
        "title", ("id", "long name", "figure"), (("1", "a" * 20, "3.50x [3.40, 3.60]"),), 2, optional=("long name",)
    )
    assert terminal_lines(table, 60)[1].split() == ["id", "long", "name", "figure"]
    narrow = terminal_lines(table, 30)
    assert (
        narrow[3] == "1   3.50x [3.40, 3.60]" and narrow[-1] == "not shown at this width: long" or "name" in narrow[-1]
    )
    stacked = terminal_lines(Table("title", ("id", "first", "second"), (("1", "a" * 12, "b" * 12),), 3), 24)
    assert stacked == ["title", "id 1  first aaaaaaaaaaaa", "  second bbbbbbbbbbbb"]
    # A cell wider than the terminal is wrapped between words, further in than the start of a cell.
    long = Table("", ("id", "because"), (("1", "one SM holds a whole sequence"),), 2)
    assert terminal_lines(long, 24) == ["id 1", "  because one SM holds a", "    whole sequence"]


def test_rows_of_one_reason_stand_together_with_their_numbers_as_a_range():
    rows = [("1", "takes 0.5 s a call"), ("2", "takes 1,500 s a call"), ("3", "no time")]
    assert grouped(rows) == (("1, 2", "takes 0.5 to 1,500 s a call"), ("3", "no time"))
