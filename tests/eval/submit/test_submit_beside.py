"""A submission beside a run of our own: what agrees, what differs, and when nothing can be said."""

from __future__ import annotations

import json
import math

import pytest

from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.stats.run import create_run
from rooflane.eval.submit.beside import compare_with_run, pair_of
from rooflane.eval.submit.parse import parse_output
from rooflane.eval.submit.records import SubmitMeta, SubmitRow, create_submission
from rooflane.eval.submit.report import beside_table, remarks, render_json, summarise_submission
from rooflane.shapes import Shape

SHAPE = Shape("a", 2, 8, 16, 2, 16, 1, True)
TEXT = """=== Configuration ===
TransformerConfig(batch_size=2, seq_len=8, d_model=16, num_heads=2, ffn_dim=16, num_layers=1, causal=True)
trial 01/1: PASS | max_abs=0 | max_rel=0 | failed=0/256
summary: PASS | max_abs=0 | max_rel=0 | failed=0/256
baseline : median={base:.4f} ms | mean=1 ms | p90=9 ms | min=0 ms | throughput={base_rate:.2f} token/s
optimized: median={mine:.4f} ms | mean=1 ms | p90=9 ms | min=0 ms | throughput={mine_rate:.2f} token/s
speedup  : {speedup:.3f}x based on median latency
"""


def printed(base: float, mine: float) -> str:
    rates = {"base_rate": 16000 / base, "mine_rate": 16000 / mine}
    return TEXT.format(base=base, mine=mine, speedup=base / mine, **rates)


@pytest.fixture
def make_submission(tmp_path):
    """Return a function that stores a submission of one shape: one (baseline, optimized) in ms a process."""

    def make(times, candidate="mine", device="cpu"):
        meta = SubmitMeta(
            id="s-submit", started_at="", command="", rooflane_version="0", commit=None, organiser="o.py", sha256="",
            known="", candidate=candidate, candidate_sha256="", device=device, profile="cpu", arguments=[],
            processes=len(times), time_limit_s=1, shapes=[SHAPE.as_dict()], plans={"a": {"family": "f"}}, infeasible={},
        )  # fmt: skip
        submission = create_submission(tmp_path, meta)
        for process, (base, mine) in enumerate(times):
            text = printed(base, mine)
            submission.append(
                SubmitRow(
                    submission=meta.id,
                    process=process,
                    shape="a",
                    outcome="passed",
                    exit_status=0,
                    arguments=[],
                    figures=parse_output(text, SHAPE.tokens),
                    stdout=text,
                    stderr="",
                    wall_s=1,
                    measured_at="",
                )  # fmt: skip
            )
        return submission

    return make


@pytest.fixture
def make_run(tmp_path, make_meta, make_record):
    """Return a function that stores a run of the same shape under another name: (eager, mine) in ms a process."""

    def make(times, candidates=("mine",), inputs="fixed"):
        shape = Shape("other-id", 2, 8, 16, 2, 16, 1, True)
        meta = make_meta([shape], processes=len(times) or 3, candidates=candidates)
        meta = meta.model_copy(update={"settings": meta.settings | {"inputs": inputs}})
        run = create_run(tmp_path / "runs", meta)
        for process, (eager, mine) in enumerate(times):
            for arm, value in (("eager", eager), (candidates[0], mine)):
                run.append([make_record(shape, process, arm, (round(value * 1e6),) * 2)])
        return run

    return make


NEAR = [(0.80, 0.400), (0.82, 0.404), (0.81, 0.396)]


def test_equal_latencies_agree_and_other_ones_do_not(make_submission, make_run):
    run = make_run(NEAR)
    (row,) = compare_with_run(make_submission([(0.81, 0.398), (0.80, 0.402)]), run).rows
    assert row.pairs["optimized"].agrees and row.pairs["baseline"].agrees and row.pairs["speedup"].agrees
    assert row.pairs["optimized"].ratio == pytest.approx(1.0, abs=0.01)


def test_a_latency_a_tenth_higher_is_seen(make_submission, make_run):
    submission = make_submission([(0.81, 0.440), (0.80, 0.444), (0.82, 0.442)])
    beside = compare_with_run(submission, make_run(NEAR))
    assert beside.rows[0].pairs["optimized"].agrees is False and beside.rows[0].pairs["baseline"].agrees is True
    lines = list(remarks(summarise_submission(submission), beside))
    assert "the candidate's latency agrees within its spread on 0 of 1 shapes" in lines
    _, ((_, *cells),) = beside_table(beside)
    assert cells[3] == "no" and cells[7] == "yes"


def test_disturbed_blocks_and_processes_without_a_clean_one_are_left_out(make_submission, make_run, make_record):
    """Process 0 lost its first block to throttling, process 1 both; process 2 stood still."""
    submission = make_submission([(0.8, 0.4), (0.8, 0.4)])
    run = make_run([])
    spoilt, calm = {"throttle": ["HwThermalSlowdown"]}, {"throttle": []}
    shape = run.meta.shape_list()[0]
    for process, blocks in enumerate([(spoilt, calm), (spoilt, spoilt), (calm, calm)]):
        slow = [2 if state is spoilt else 1 for state in blocks for _ in range(2)]
        for arm, ns in (("eager", 800_000), ("mine", 400_000 + process)):
            times = [ns * factor for factor in slow]
            run.append([make_record(shape, process, arm, times, telemetry={"blocks": list(blocks)})])
    beside = compare_with_run(submission, run)
    pairs = beside.rows[0].pairs
    # The median of 0.400000 and 0.400002; with the throttled calls it were 0.6 and more.
    assert pairs["optimized"].ours == pytest.approx(0.400001, rel=1e-9) and pairs["baseline"].ours == 0.8
    assert "ours: 3 of 6 blocks dropped for every arm (3 by throttling)" in beside.notes


def test_rounds_of_the_scripts_own_kind_are_what_it_is_held_against(make_submission, make_run, make_record):
    """They stand outside the blocks, so a throttled block takes nothing from them; eager's are those beside them."""
    run = make_run([])
    shape = run.meta.shape_list()[0]
    states = {"blocks": [{"throttle": []}, {"throttle": ["HwThermalSlowdown"]}]}
    for process in range(2):
        run.append([make_record(shape, process, "eager", (900_000,) * 4, telemetry=states)])
        record = make_record(shape, process, "mine", (500_000,) * 4, telemetry=states)
        rounds = {"bare_ns": [[400_000 + process] * 3] * 4, "bare_eager_ns": [[800_000] * 3] * 4}
        run.append([record.model_copy(update={"timing": record.timing.model_copy(update=rounds)})])
    beside = compare_with_run(make_submission([(0.8, 0.4), (0.8, 0.4)]), run)
    pairs = beside.rows[0].pairs
    assert pairs["optimized"].ours == pytest.approx(0.4000005, rel=1e-9) and pairs["baseline"].ours == 0.8
    assert beside.notes == (), "nothing of these rounds is dropped"


def test_what_is_compared_by_windows_is_said(make_submission, make_run):
    notes = " ".join(compare_with_run(make_submission([(0.8, 0.4)]), make_run(NEAR)).notes)
    assert "ours on every shape: windows with a look at each output" in notes


def test_a_run_without_a_clean_block_is_compared_as_it_is(make_submission, make_run, make_record):
    run = make_run([])
    for arm, ns in (("eager", 800_000), ("mine", 400_000)):
        blocks = {"blocks": [{"other_processes": 1}]}
        run.append([make_record(run.meta.shape_list()[0], 0, arm, (ns, ns), telemetry=blocks)])
    beside = compare_with_run(make_submission([(0.8, 0.4)]), run)
    assert beside.rows[0].pairs["optimized"].ratio == pytest.approx(1) and "nothing is left" in beside.notes[1]


def test_one_process_is_judged_by_the_others_spread():
    # Standard deviation 1% in the log: with t(2) = 4.303 one more lies within 4.303 * 1% * sqrt(4/3).
    many = [math.exp(value) for value in (-0.01, 0.0, 0.01)]
    half = 4.302653 * 0.01 * math.sqrt(4 / 3)
    pair = pair_of([1.04], many)
    assert pair.low == pytest.approx(1.04 * math.exp(-half), rel=1e-5) and pair.agrees
    assert not pair_of([1.06], many).agrees
    assert pair_of(many, [1.04]).agrees and not pair_of(many, [1.06]).agrees


def test_what_print_rounds_away_is_no_difference():
    """Printed to 0.1 us, 52.1 us may be 52.05 to 52.15: ours at 52.14 is no other latency, at 52.3 it is."""
    theirs = [0.0521, 0.0521, 0.0521]
    assert pair_of(theirs, [0.05213, 0.05214, 0.05215], 5e-5).agrees
    assert not pair_of(theirs, [0.05213, 0.05214, 0.05215]).agrees
    assert not pair_of(theirs, [0.05229, 0.05230, 0.05231], 5e-5).agrees


def test_blocks_at_the_power_limit_stay(make_submission, make_run, make_record):
    """The script works on through the limit and tells nothing of it: leaving ours out would compare unlike states."""
    run = make_run([])
    states = {"blocks": [{"throttle": ["SwPowerCap"]}, {"throttle": ["SwPowerCap", "HwThermalSlowdown"]}]}
    for process in range(2):
        for arm, ns in (("eager", 800_000), ("mine", 400_000)):
            times = (ns, ns, 9 * ns, 9 * ns)
            run.append([make_record(run.meta.shape_list()[0], process, arm, times, telemetry=states)])
    beside = compare_with_run(make_submission([(0.8, 0.4), (0.8, 0.4)]), run)
    assert beside.rows[0].pairs["optimized"].ours == 0.4
    assert "ours: 2 of 4 blocks dropped for every arm (2 by throttling)" in beside.notes


def test_two_single_processes_have_no_spread_to_judge_by(make_submission, make_run):
    submission = make_submission([(0.8, 0.4)])
    beside = compare_with_run(submission, make_run([(0.8, 0.4)]))
    assert beside.rows[0].pairs["optimized"].agrees is None
    assert any("no spread to judge by" in line for line in remarks(summarise_submission(submission), beside))


def test_what_differs_between_the_two_is_said(make_submission, make_run):
    beside = compare_with_run(make_submission([(0.8, 0.4)], "ours.py", "cuda"), make_run(NEAR, inputs="fresh"))
    text = " ".join(beside.notes)
    assert beside.arm == "mine"
    assert "the run's candidate is mine" in text and "--inputs fixed" in text and "made on cpu" in text


def test_a_run_without_the_candidate_is_refused(make_submission, make_run):
    submission, run = make_submission([(0.8, 0.4)]), make_run(NEAR, candidates=("x.py", "y.py"))
    with pytest.raises(EvaluationError, match="none of them 'mine'"):
        compare_with_run(submission, run)
    assert compare_with_run(submission, run, "x.py").rows[0].pairs["optimized"].agrees
    with pytest.raises(EvaluationError, match="none of them 'z.py'"):
        compare_with_run(submission, run, "z.py")


def test_a_shape_the_run_did_not_time_is_said(make_submission, make_run, tmp_path, make_meta):
    run = create_run(tmp_path / "empty", make_meta([Shape("z", 9, 8, 16, 2, 16, 1)]))
    (row,) = compare_with_run(make_submission([(0.8, 0.4)]), run).rows
    assert row.pairs == {} and "no timed rows" in row.reason


def test_a_latency_of_zero_is_not_compared(make_submission, make_run):
    submission = make_submission([(0.8, 0.4)])
    row = submission.rows()[0]
    figures = row.figures.model_copy(update={"optimized": row.figures.optimized.model_copy(update={"median_ms": 0.0})})
    submission.append(row.model_copy(update={"figures": figures}))
    (found,) = compare_with_run(submission, make_run(NEAR)).rows
    assert "too short for its four decimals" in found.reason


def test_an_error_that_is_not_finite_survives_the_records_and_json(make_submission):
    submission = make_submission([(0.8, 0.4)])
    row = submission.rows()[0]
    accuracy = row.figures.accuracy.model_copy(update={"max_abs": math.nan, "passed": False})
    submission.append(
        row.model_copy(update={"outcome": "failed", "figures": row.figures.model_copy(update={"accuracy": accuracy})})
    )
    summary = summarise_submission(submission)
    assert math.isnan(summary.rows[0].max_abs) and summary.exit_code() == ExitCode.INCORRECT
    document = json.loads(render_json(summary, None), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert document["shapes"][0]["max_abs"] == "nan"


def test_a_missing_process_takes_the_mean_away(make_submission):
    submission = make_submission(NEAR)
    whole = summarise_submission(submission)
    assert whole.geomean.count == 3 and whole.exit_code() == ExitCode.COMPLETE
    submission.meta = submission.meta.model_copy(update={"processes": 4})
    torn = summarise_submission(submission)
    assert torn.geomean is None and torn.missing == 1 and torn.exit_code() == ExitCode.INCOMPLETE
