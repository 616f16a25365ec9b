"""Score hygiene: nothing that failed, is missing or cannot be true may leave the mean or lift it."""

import math

import pytest

from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.record.records import COPY_PREFIX, Verification
from rooflane.eval.stats.estimator import pair_arms
from rooflane.eval.stats.rounds import rounds_of
from rooflane.eval.stats.summary import campaign_nulls, summarise
from rooflane.shapes import Shape

A = Shape("a", 2, 8, 16, 2, 16, 1)
B = Shape("b", 1, 16, 16, 2, 16, 1)
COPY = COPY_PREFIX + "mine"
HUGE = Shape("huge", 32, 100000, 1024, 16, 1024, 2)


@pytest.fixture
def meta(make_meta):
    return make_meta([A, B])


def replaced(rows, make_record, shape, process, arm, **changes):
    """Return the rows with one exchanged."""
    new = make_record(shape, process, arm, **changes)
    return [new if row.key == new.key else row for row in rows]


def test_the_mean_is_geometric_over_shapes_and_paired_by_process(meta, make_record):
    rows = []
    for process in range(6):
        for shape, factor in ((A, 2.0), (B, 8.0)):
            eager = 1000 * (process + 1)
            rows.append(make_record(shape, process, "eager", (eager * 100, eager * 100)))
            rows.append(make_record(shape, process, "mine", (round(eager * 100 / factor),) * 2))
            rows += [make_record(shape, process, name, (eager * 100,) * 2) for name in ("identity", "sdpa")]
    (headline,) = summarise(meta, rows).headlines
    # Eager differs threefold between processes; pairing removes that from the interval.
    assert headline.geomean.centre == pytest.approx(4.0)
    assert headline.geomean.high / headline.geomean.low == pytest.approx(1.0)
    assert headline.per_process == pytest.approx((4.0,) * 6)
    assert headline.null.centre == pytest.approx(1.0)
    assert headline.verdict == "faster"


@pytest.mark.parametrize("status", ["incorrect", "error", "oom", "unsupported", "skipped"])
def test_a_shape_that_fails_in_one_process_takes_the_mean_away(meta, full_rows, make_record, status):
    rows = full_rows(meta, {"mine": 2.0})
    rows = replaced(rows, make_record, B, 1, "mine", times=None, status=status, reason="because")
    summary = summarise(meta, rows)
    (headline,) = summary.headlines
    assert headline.geomean is None
    assert (headline.passed, headline.shapes) == (1, 2)
    assert summary.row("b").cells["mine"].status == status


@pytest.mark.parametrize("bad", [0, -1])
def test_an_impossible_time_never_raises_the_mean(meta, full_rows, make_record, bad):
    rows = replaced(full_rows(meta, {"mine": 2.0}), make_record, A, 0, "mine", times=(bad, 10))
    summary = summarise(meta, rows)
    assert summary.headlines[0].geomean is None
    assert summary.row("a").cells["mine"].status == "error"
    assert summary.exit_code() is ExitCode.INCOMPLETE


def test_a_missing_row_takes_the_mean_away_and_is_counted(meta, full_rows):
    rows = [row for row in full_rows(meta, {"mine": 2.0}) if row.key != (2, "a", "mine")]
    summary = summarise(meta, rows)
    assert summary.headlines[0].geomean is None
    assert summary.missing == 1
    assert summary.exit_code() is ExitCode.INCOMPLETE
    assert summary.problems()[-1] == "1 planned row is missing; `rooflane eval --resume` measures them"


def test_a_shape_eager_did_not_run_everywhere_is_outside_the_mean_for_every_arm(meta, full_rows, make_record):
    rows = full_rows(meta, {"mine": 2.0})
    for arm in ("eager", "mine", "identity", "sdpa"):
        rows = replaced(rows, make_record, B, 2, arm, times=None, status="skipped", reason="time")
    (headline,) = summarise(meta, rows).headlines
    assert (headline.shapes, headline.geomean.centre) == (1, pytest.approx(2.0))


def test_an_infeasible_shape_is_outside_the_mean_and_compared_with_the_reference(make_meta, full_rows, make_record):
    meta = make_meta([A, HUGE], processes=2)
    assert meta.prediction("huge").classification["regime"] == "infeasible"
    rows = [row for row in full_rows(meta, {"mine": 2.0}) if row.shape_id == "a"]
    for process, elements in ((0, 32), (1, 1)):
        rows.append(make_record(HUGE, process, "eager", None, status="infeasible", reason="41 TB"))
        rows.append(make_record(HUGE, process, "mine", (9_000_000, 9_000_000)))
        reference = make_record(HUGE, process, "chunked_reference", (3_000_000,), kind="reference")
        timing = reference.timing.model_copy(update={"event_ns": [[3_000_000] * elements], "elements_total": 32})
        rows.append(reference.model_copy(update={"timing": timing}))
    summary = summarise(meta, rows)
    cells = summary.row("huge").cells
    assert cells["chunked_reference"].event_ms.centre == pytest.approx(96.0)
    assert cells["mine"].speedup.centre == pytest.approx(96 / 9)
    assert summary.headlines[0].shapes == 1
    assert summary.exit_code() is ExitCode.COMPLETE


def test_tokens_and_price_follow_the_valid_tokens(make_meta, make_record):
    shape = Shape("t", 1, 1000, 16, 2, 16, 1)
    meta = make_meta([shape], processes=1, controls=())
    rows = [make_record(shape, 0, arm, (1_000_000, 1_000_000)) for arm in ("eager", "mine")]
    cell = summarise(meta, rows).row("t").cells["mine"]
    # 1,000 tokens in 1 ms at 3 $/h: 10^6 tokens/s, 0.8333 $ per 10^9.
    assert cell.tokens_per_s == pytest.approx(1e6)
    assert cell.price_per_1e9_tokens == pytest.approx(3e9 / 3.6e9)


@pytest.mark.parametrize(
    ("event", "device", "regime"), [(2_000_000, 1_000_000, "launch"), (1_200_000, 1_000_000, None)]
)
def test_the_measured_regime_compares_event_and_device_time(meta, make_record, event, device, regime):
    rows = [make_record(A, 0, "eager", (event, event), device_ns=[device] * 3)]
    measured = summarise(meta, rows).row("a").measured_regime
    assert measured == regime or (regime is None and measured in ("compute", "bandwidth"))
    assert summarise(meta, [make_record(A, 0, "eager")]).row("a").measured_regime is None


def test_verdicts_need_processes_a_null_and_clearance(make_meta, full_rows, make_record):
    meta = make_meta([A])
    assert summarise(meta, full_rows(meta, {"mine": 0.5})).headlines[0].verdict == "slower"
    assert summarise(meta, full_rows(meta, {})).headlines[0].verdict == "equivalent"
    quick = make_meta([A], quick=True)
    headline = summarise(quick, full_rows(quick, {})).headlines[0]
    assert (headline.verdict, headline.geomean.low is not None) == ("none", True)
    assert summarise(quick, full_rows(quick, {"mine": 2.0})).headlines[0].verdict == "faster"
    bare = make_meta([A], controls=())
    assert summarise(bare, full_rows(bare, {"mine": 2.0})).headlines[0].verdict == "inconclusive"
    # A null that swings by 30% hides a gain of 20% however tight its own interval is.
    rows = full_rows(meta, {"mine": 1.2})
    for process, time in enumerate((700_000, 1_000_000, 1_300_000) * 2):
        rows = replaced(rows, make_record, A, process, "identity", times=(time, time))
    assert summarise(meta, rows).headlines[0].verdict == "inconclusive"


def test_exit_codes(make_meta, full_rows, make_record):
    meta = make_meta([A])
    good = full_rows(meta, {"mine": 2.0})
    slow = summarise(meta, full_rows(meta, {"mine": 0.5}))
    assert summarise(meta, good).exit_code("faster") is ExitCode.COMPLETE
    assert slow.exit_code() is ExitCode.COMPLETE
    assert slow.exit_code("faster") is ExitCode.SLOWER
    assert summarise(meta, full_rows(meta, {})).exit_code("faster") is ExitCode.EQUIVALENT
    assert summarise(meta, full_rows(meta, {})).exit_code("equivalent") is ExitCode.COMPLETE
    assert slow.exit_code("equivalent") is ExitCode.SLOWER
    wrong = replaced(good, make_record, A, 1, "mine", times=None, status="incorrect", reason="bad")
    assert summarise(meta, wrong).exit_code("faster") is ExitCode.INCORRECT
    broken = replaced(good, make_record, A, 1, "mine", times=None, status="error", reason="raised")
    assert summarise(meta, broken).exit_code() is ExitCode.INCOMPLETE
    finding = Verification(status="ok", contract=["the next call overwrites the output"])
    grey = summarise(meta, replaced(good, make_record, A, 0, "mine", times=(5, 5), verification=finding))
    assert grey.exit_code() is ExitCode.CONTRACT
    assert grey.exit_code(accept_contract=True) is ExitCode.COMPLETE


def test_a_control_that_fails_is_shown_and_fails_nothing(meta, full_rows, make_record):
    rows = replaced(full_rows(meta, {"mine": 2.0}), make_record, A, 0, "sdpa", times=(9, 9), status="incorrect")
    summary = summarise(meta, rows)
    assert summary.row("a").cells["sdpa"].status == "incorrect"
    assert summary.problems() == []
    assert summary.exit_code() is ExitCode.COMPLETE


def test_no_number_of_the_summary_is_nan(meta, full_rows):
    text = str(summarise(meta, full_rows(meta, {"mine": 2.0})).as_dict())
    assert "nan" not in text.lower().replace("tenant", "")
    assert math.isfinite(summarise(meta, full_rows(meta, {"mine": 2.0})).headlines[0].geomean.centre)


def test_rows_timed_beside_each_other_have_a_log_ratio_a_process(make_record):
    rows = [make_record(A, process, "eager", (4000, 4000)) for process in range(3)]
    rows += [make_record(A, 0, "mine", (1000, 4000)), make_record(A, 1, "mine", (0, 1000))]
    rows.append(make_record(A, 2, "mine", None))
    pair = pair_arms(rounds_of(rows), "a", "eager", "mine")
    # Two rounds, 4x and 1x: their geometric mean is 2x; a time of zero and a missing one have no ratio.
    assert pair.logs == {0: pytest.approx(math.log(2))}
    assert (math.exp(pair.base[0]), math.exp(pair.arm[0])) == (pytest.approx(4000), pytest.approx(2000))


@pytest.mark.parametrize(
    ("processes", "quick", "verdict"), [(6, False, "contaminated"), (3, False, "none"), (6, True, "none")]
)
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_disturbed_machine_has_its_own_verdict_and_exit_code(make_meta, full_rows, processes, quick, verdict, blocks):
    meta = make_meta([A, B], processes=processes, quick=quick)
    busy, calm = ({"sm_mhz": 1980, "throttle": [], "other_processes": count} for count in (1, 0))
    rows = []
    for row in full_rows(meta, {"mine": 2.0}):
        # One block of four rounds' two is a half, well over a fifth; or every block there is.
        event = row.timing.event_ns * 2 if blocks == 1 else row.timing.event_ns
        telemetry = {"blocks": [busy, calm] if blocks == 1 else [busy]}
        timing = row.timing.model_copy(update={"event_ns": event})
        rows.append(row.model_copy(update={"timing": timing, "telemetry": telemetry}))
    summary = summarise(meta, rows)
    (headline,) = summary.headlines
    assert headline.verdict == verdict
    assert summary.exit_code() is (ExitCode.CONTAMINATED if verdict == "contaminated" else ExitCode.COMPLETE)
    assert summary.contamination.too_much
    assert all(row.cells["mine"].verdict == "none" for row in summary.rows)


def busy(rows, where):
    """Return rows with a neighbour on the device in the only block of some shapes and processes."""
    state = {"blocks": [{"sm_mhz": 1980, "throttle": [], "other_processes": 1}]}
    return [
        row.model_copy(update={"telemetry": state}) if (row.shape_id, row.process) in where else row for row in rows
    ]


def test_lost_blocks_cost_processes_of_a_shape_and_not_the_verdict(make_meta, full_rows):
    meta = make_meta([A, B, Shape("c", 1, 16, 16, 2, 16, 1)])
    # In four of six processes some shape has no clean block; each shape keeps four or five.
    rows = busy(full_rows(meta, {"mine": 2.0}), {("a", 0), ("b", 1), ("c", 2)})
    (headline,) = summarise(meta, rows).headlines
    assert (headline.verdict, headline.geomean.count) == ("faster", 6)
    assert headline.lost == {0: ("a",), 1: ("b",), 2: ("c",)} and len(headline.per_process) == 3


@pytest.mark.parametrize(
    ("speed", "verdict", "status"), [(30.0, "faster", 0), (1 / 30, "slower", 0), (1.5, "contaminated", 40)]
)
def test_contamination_explains_no_factor_of_thirty(make_meta, full_rows, speed, verdict, status):
    meta = make_meta([A, B])
    rows = busy(full_rows(meta, {"mine": speed}), {("a", process) for process in range(4)})
    summary = summarise(meta, rows)
    assert summary.contamination.too_much
    (headline,) = summary.headlines
    assert (headline.verdict, summary.exit_code()) == (verdict, status)
    assert "4 of 12 blocks dropped" in headline.why


@pytest.mark.parametrize("kept", [0, 1])
def test_a_shape_with_too_few_clean_processes_is_named(make_meta, full_rows, kept):
    meta = make_meta([A, B, *(Shape(name, 1, 16, 16, 2, 16, 1) for name in "cdefgh")])
    rows = busy(full_rows(meta, {"mine": 2.0}), {("a", process) for process in range(kept, 6)})
    (headline,) = summarise(meta, rows).headlines
    assert (headline.verdict, headline.why) == ("none", "fewer than 2 processes have a clean block of shape a")


def test_a_shape_timed_in_some_processes_only_holds_the_rest_to_the_strict_level(meta, full_rows, make_record):
    rows = full_rows(meta, {"mine": 2.0})
    for arm in ("eager", "mine", "identity", "sdpa"):
        rows = replaced(rows, make_record, B, 2, arm, times=None, status="skipped", reason="time")
    (headline,) = summarise(meta, rows).headlines
    assert (headline.verdict, headline.partial) == ("faster", 1)
    assert "even the interval at 99.9%" in headline.why and "1 more were timed in some processes only" in headline.why
    assert summarise(meta, [row for row in rows if row.process == 0]).headlines[0].verdict == "none"


def with_copies(rows):
    """Return rows and the same times for a copy of the candidate."""
    return rows + [row.model_copy(update={"arm": COPY, "kind": "copy"}) for row in rows if row.arm == "mine"]


def test_only_a_clean_campaign_leaves_nulls(make_meta, full_rows):
    meta = make_meta([A, B]).model_copy(update={"extra_arms": [COPY]})
    clean = with_copies(full_rows(meta, {"mine": 2.0}))
    assert [null.arm for null in campaign_nulls(meta, clean)] == ["eager", "mine"]
    tampered = [
        row.model_copy(update={"integrity": ["a replaced clock"]}) if row.key == (3, "b", "mine") else row
        for row in clean
    ]
    unfinished = [row for row in clean if row.process < 5]
    untimed = [
        row.model_copy(update={"timing": None, "status": "error"}) if row.key == (1, "a", COPY) else row
        for row in clean
    ]
    disturbed = busy(clean, {("a", process) for process in range(3)})
    for rows in (tampered, unfinished, untimed, disturbed):
        assert campaign_nulls(meta, rows) == []
    # A block that was lost is no reason, and the null is the mean over what is left.
    (eager, mine) = campaign_nulls(meta, busy(clean, {("a", 0)}))
    assert eager.log == pytest.approx(0, abs=1e-9) and set(eager.shapes) == {A.label(), B.label()}
