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
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape


def terminal(summary, width=240, details=True):
    """Return what the terminal shows."""
    console = Console(file=io.StringIO(), width=width)
    render_terminal(summary, console, details)
    return console.file.getvalue()


def test_the_same_records_give_the_same_bytes(stored_run):
    first = render_markdown(stored_run.summary())
    assert render_markdown(open_run(stored_run.folder).summary()) == first
    assert terminal(stored_run.summary()) == terminal(open_run(stored_run.folder).summary())


def test_speedup_interval_null_and_controls_stand_in_one_row(stored_run):
    summary = stored_run.summary()
    for render in (render_markdown, render_readme_table, terminal):
        text = render(summary)
        row = next(line for line in text.splitlines() if "2x8x16 h2 f16 l1 causal" in line)
        assert row.index("2.00x [2.00, 2.00]") < row.index("1.000x") < row.index("1.250x")
        text = " ".join(text.split())
        assert "mine: 2.00x faster than eager [2.00, 2.00], FASTER, on 2 of 2 shapes (null 1.000x)" in text
        if render is not terminal:
            said = "he interval lies above the floor of 0.00% (provisional); "
            assert f"{said}null 1.000x [1.000, 1.000]" in text
            assert "by process 2.00x, 2.00x, 2.00x, 2.00x, 2.00x, 2.00x; sign-flip p 0.031" in text


def test_a_run_ends_with_one_table_and_the_headline_within_30_lines(make_meta, full_rows, make_record):
    """Ten of 14 shapes are skipped, for two reasons that differ in a number alone within each."""
    shapes = [Shape(str(index), 2, 8, 16, 2, 16, 1) for index in range(1, 15)]
    meta = make_meta(shapes, quick=True, processes=3)
    rows = []
    for row in full_rows(meta, {"mine": 2.0}):
        at = int(row.shape_id)
        if at > 4:
            reason = f"eager is predicted to take {at}.5 s a call" if at < 9 else "the time budget of 390 s is spent"
            row = make_record(Shape(**row.shape), row.process, row.arm, None, status="skipped", reason=reason)
        rows.append(row)
    summary = summarise(meta, rows)
    assert summary.not_run == tuple(map(str, range(5, 15)))
    assert summary.state == "every checked output correct on 4 of 14 shapes; 10 not run"
    text = terminal(summary, 160, details=False)
    assert len(text.splitlines()) <= 30 and text.count("speedup over eager") == 1
    assert text.splitlines()[-1] == (
        "mine: 2.00x faster than eager [2.00, 2.00], FASTER, on 4 of 14 shapes (null 1.000x)"
    )
    for report in (text, render_markdown(summary)):
        report = report.lower()
        assert "not run: shapes 5, 6, 7, 8: eager is predicted to take 5.5 to 8.5 s a call" in report
        assert "not run: shapes 9, 10, 11, 12, 13, 14: the time budget of 390 s is spent" in report
        assert "complete" not in report
    # All 14 in one table are as many lines as there can be.
    whole = summarise(meta, full_rows(meta, {"mine": 2.0}))
    assert len(terminal(whole, 160, details=False).splitlines()) <= 30
    assert whole.state == "complete, every checked output correct"


def test_a_shape_that_a_busy_process_left_out_is_named_with_its_reason(make_meta, full_rows, make_record):
    """Two eager calls far over the limit end a shape in one process, though another process timed it."""
    shapes = [Shape(name, 2, 8, 16, 2, 16, 1) for name in "abc"]
    meta = make_meta(shapes, quick=True, processes=3)
    slow = "predicted within the limit, but each of two eager calls took at least 9.1 s, over 5 s"
    rows = [
        make_record(shapes[1], 2, row.arm, None, status="skipped", reason=slow) if row.key[:2] == (2, "b") else row
        for row in full_rows(meta, {"mine": 2.0})
    ]
    summary = summarise(meta, rows)
    for report in (terminal(summary, 160, details=False), render_markdown(summary)):
        assert f"not run in every process: shape b: {slow}" in " ".join(report.replace("Not", "not").split())
    assert "1 timed in some processes only" in " ".join(report.split())
    assert "not run in every process" not in render_markdown(summarise(meta, full_rows(meta, {"mine": 2.0})))


def test_brackets_in_names_and_reasons_are_text(make_meta, full_rows, make_record):
    name = "[yellow]note[/].py"
    meta = make_meta([Shape("[b]", 2, 8, 16, 2, 16, 1)], candidates=(name,), controls=("identity",))
    rows = [row.model_copy(update={"reason": "[/oops] :boom:"}) for row in full_rows(meta, {name: 2.0})]
    rows[-1] = rows[-1].model_copy(update={"status": "incorrect"})
    for width in (80, 240):
        for details in (False, True):
            text = terminal(summarise(meta, rows), width, details)
            assert f"{name}: event time in ms" in text and "\n[b]" in text
    assert "[/oops] :boom:" in text


def test_failures_and_skips_are_listed_with_their_reasons(make_meta, full_rows, make_record, stored_run):
    meta = stored_run.meta
    rows = [row for row in stored_run.records() if row.key != (1, "a", "mine")]
    shape = meta.shape_list()[0]
    rows.append(make_record(shape, 1, "mine", None, status="error", reason="IndexError: [/oops] | x"))
    rows = [row for row in rows if row.key != (0, "b", "sdpa")]
    rows.append(make_record(meta.shape_list()[1], 0, "sdpa", None, status="skipped", reason="no time"))
    summary = summarise(meta, rows)
    for text in (terminal(summary), render_markdown(summary)):
        assert "[/oops]" in text or r"\[/oops\]" in text
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


def test_verdicts_states_clocks_and_costs_have_their_tables(make_meta, full_rows):
    shapes = [Shape("a", 2, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)]
    seconds = {"set-up": 12.4, "start-up": 8.6, "measurement": 79.0, "other": 0.0}
    account = {"overhead_share": 0.21, "spent_s": seconds}
    meta = make_meta(shapes, controls=("identity",)).model_copy(update=account)
    rows = []
    for row in full_rows(meta, {"mine": 2.0}):
        if row.process == 0:
            ns = row.timing.event_ns[0][0]
            states = {"harness_ns": [ns], "idle_ns": [ns + 9000], "cold_ns": [3 * ns], "rotating_ns": [2 * ns]}
            states |= {"device_ns": [ns // 2], "host_ns": [[ns // 4]]}
            row = row.model_copy(update={"timing": row.timing.model_copy(update=states), "setup_s": 2.0})
        rows.append(row)
    text = render_markdown(summarise(meta, rows))
    assert "| a | FASTER | 2.00x [2.00, 2.00] | 2.00x [2.00, 2.00] |" in text
    # event 0.5, device half of it and host a quarter; idle start 9 us more.
    clocks = next(line for line in text.splitlines() if line.startswith("| a |") and "50.0%" in line)
    assert " 0.250 | 0.509 | 0.125 | 50.0% |" in clocks
    states = next(line for line in text.splitlines() if line.startswith("| a | 0.512 | 0.500 | 1.50 | 1.00 |"))
    assert "| 1.000x |" in states
    # 2 s of set-up against half a millisecond a call: about 4,000 calls.
    assert "| a | 2.00 | 3,9" in text
    said = "nor verification (of 100 s: measurement 79 s, set-up 12 s, start-up 9 s, other 0 s)."
    assert f"21.0% of the run's time was neither warm-up, measurement {said}" in text
    assert "the organiser's loop" in text and "caches overwritten before each call" in text


@pytest.mark.parametrize(
    ("tick_ns", "said"),
    [(1, "0.00% of the shortest call (shape a)."), (20_000, "1.18% of the shortest call (shape a), too coarse")],
)
def test_the_clocks_tick_is_held_against_the_shortest_call(make_meta, full_rows, tick_ns, said):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)], processes=1)
    rows = []
    for row in full_rows(meta, {"mine": 2.0}):
        times = [row.timing.event_ns[0][0] + tick_ns * step for step in range(121)]
        timing = row.timing.model_copy(update={"clock": "cuda-events", "event_ns": [times, times]})
        rows.append(row.model_copy(update={"timing": timing}))
    assert f"ticks every {tick_ns / 1e3:g} us: {said}" in render_markdown(summarise(meta, rows))


def test_one_process_is_one_process(make_meta, full_rows):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)], processes=1)
    text = render_markdown(summarise(meta, full_rows(meta, {"mine": 2.0})))
    assert "1 process," in text and "1 processes" not in text and "on 1 of 1 shape (" in text
    assert "mine: 2.00x the speed of eager, no verdict, on 1 of 1 shape" in text, "no interval shows that it is faster"


def test_dropped_blocks_are_counted_with_their_reason(make_meta, full_rows):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)])
    rows = full_rows(meta, {"mine": 2.0})
    busy = {"blocks": [{"sm_mhz": 1980, "throttle": [], "other_processes": 1}]}
    rows = [row.model_copy(update={"telemetry": busy}) if row.process == 4 else row for row in rows]
    text = render_markdown(summarise(meta, rows))
    assert "1 of 6 blocks dropped for every arm (1 by another process)." in text.replace("- 1 of", "1 of")
    # That process had no other block, so the mean is over five of the six that were planned.
    said = "by process with every shape 2.00x, 2.00x, 2.00x, 2.00x, 2.00x; process 4 has no clean block of shape a;"
    assert said in text


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (0.5, "mine: 0.500x the speed of eager [0.500, 0.500], SLOWER, on 1 of 1 shape (null 1.000x)"),
        (1.0, "mine: 1.000x the speed of eager [1.000, 1.000], EQUIVALENT, on 1 of 1 shape (null 1.000x)"),
        (2.0, "mine: 2.00x faster than eager [2.00, 2.00], FASTER, on 1 of 1 shape (null 1.000x)"),
    ],
)
def test_the_headline_is_one_line_to_repeat(make_meta, full_rows, speed, said):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)])
    assert terminal(summarise(meta, full_rows(meta, {"mine": speed})), 200, details=False).splitlines()[-1] == said


def test_a_condition_that_lasted_stands_with_its_row(make_meta, full_rows):
    meta = make_meta([Shape(name, 2, 8, 16, 2, 16, 1) for name in "ab"])
    capped = {"blocks": [{"sm_mhz": 1700, "throttle": ["SwPowerCap"], "other_processes": 0}]}
    rows = full_rows(meta, {"mine": 2.0})
    rows = [row.model_copy(update={"telemetry": capped}) if row.shape_id == "a" else row for row in rows]
    text = render_markdown(summarise(meta, rows))
    assert "2.00x [2.00, 2.00]* |" in text and "2.00x [2.00, 2.00] |" in text
    assert "* shape a: at the board's power limit throughout, in 6 of 6 processes" in text
    assert "blocks dropped" not in text and "FASTER, on 2 of 2 shapes" in text


@pytest.mark.parametrize(
    "line", ["on: seccomp refused each", "on in part: seccomp; it does not keep", "off: --no-sandbox was given"]
)
def test_the_report_has_one_line_on_the_sandbox(stored_run, line):
    assert "andbox" not in render_markdown(stored_run.summary()), "nor has a run of before there was one"
    stored_run.update(sandbox=line)
    assert f"- Sandbox {line}." in render_markdown(stored_run.summary())
