"""Printed figures and exit statuses: what is read, what is refused, what an end means."""

from __future__ import annotations

import math

import pytest

from rooflane.eval.submit.parse import UnreadableError, explain_end, parse_output

SIZES = (2, 8, 16, 2, 16, 1, True)
TOKENS = 16
FAILED_TRIAL = (
    "trial 02/2: FAIL | max_abs=nan | max_rel=3e+09 | failed=3/256\n"
    "  worst_index=(0, 1, 2), baseline=0.5, optimized=nan\n"
    "  failed output feature dims=[0, 1, 2]"
)


@pytest.fixture
def printed(root) -> str:
    """What a run of the stand-in prints."""
    return (root / "tests" / "standin" / "output.txt").read_text()


def without(text: str, start: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(start))


def test_every_printed_figure_is_read(printed):
    figures = parse_output(printed, TOKENS, SIZES)
    assert figures.accuracy.model_dump() == {
        "passed": True, "trials": 2, "max_abs": 4.76837e-07, "max_rel": 0.000126, "failed": 0, "total": 512,
    }  # fmt: skip
    assert figures.optimized.model_dump() == {
        "median_ms": 0.4, "mean_ms": 0.41, "p90_ms": 0.5, "min_ms": 0.3, "tokens_per_s": 40000.0,
    }  # fmt: skip
    assert (figures.baseline.median_ms, figures.speedup) == (0.8, 2.0)


@pytest.fixture
def failing(printed) -> str:
    """The same run, its second trial outside the tolerance and not finite, the timing skipped."""
    lines = printed.splitlines()
    lines[7] = FAILED_TRIAL
    lines[8] = "summary: FAIL | max_abs=4.76837e-07 | max_rel=3e+09 | failed=3/512"
    return "\n".join(lines[:9]) + "\n\nskipped\npass --benchmark-on-failure\n"


def test_a_failure_without_timing_is_read_and_its_nan_is_not_dropped(failing):
    figures = parse_output(failing, TOKENS, SIZES)
    assert figures.baseline is None and figures.speedup is None
    assert (figures.accuracy.passed, figures.accuracy.failed, figures.accuracy.total) == (False, 3, 512)
    # The script's summary line loses the NaN; its trial line has it.
    assert math.isnan(figures.accuracy.max_abs)


def test_a_failure_timed_all_the_same_is_read(printed, failing):
    forced = failing + printed[printed.index("=== Performance") :]
    figures = parse_output(forced, TOKENS, SIZES)
    assert not figures.accuracy.passed and figures.speedup == 2.0


def test_a_half_precision_warning_in_front_changes_nothing(printed):
    assert parse_output("[warning] float16 on CPU\n" + printed, TOKENS, SIZES).speedup == 2.0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_layers=1", "num_layers=2", "not the sizes asked for"),
        ("TransformerConfig", "Config", "configuration is missing"),
        ("summary: PASS", "all good", "summary: ...` of the accuracy check is missing"),
        ("trial 02/2", "trial 03/2", "not each of them once"),
        ("summary: PASS", "summary: FAIL", "does not follow"),
        ("failed=0/512", "failed=0/511", "does not follow"),
        ("failed=0/512", "failed=1/512", "does not follow"),
        ("speedup  : 2.000x", "speedup  : 2.010x", "is not the baseline's"),
        ("throughput=40000.00", "throughput=41000.00", "is not 16 tokens in"),
        ("throughput=40000.00", "throughput=nan", "is not 16 tokens in"),
        ("p90=0.5000", "p90=0.3500", "not in order"),
        ("optimized: median", "optimised: median", "not whole"),
    ],
)
def test_figures_that_are_missing_or_contradict_each_other_are_refused(printed, old, new, words):
    assert old in printed
    with pytest.raises(UnreadableError, match=words.replace("...", r"\.\.\.")):
        parse_output(printed.replace(old, new), TOKENS, SIZES)


DOUBLES = ["summary: PASS | max_abs=0 | max_rel=0 | failed=0/512\n", "speedup  : 9.000x based on median latency\n"]


@pytest.mark.parametrize("line", DOUBLES)
def test_a_figure_printed_twice_is_refused_whatever_its_value(printed, line):
    with pytest.raises(UnreadableError, match="printed 2 times"):
        parse_output(line + printed, TOKENS, SIZES)


def test_a_performance_section_must_follow_a_pass(printed):
    with pytest.raises(UnreadableError, match="no performance section"):
        parse_output(printed[: printed.index("=== Performance")], TOKENS, SIZES)


def test_rounding_to_four_decimals_is_no_contradiction(printed):
    # 0.03956 ms prints as 0.0396; the rate and the speedup come from the unrounded median.
    text = printed.replace("median=0.4000", "median=0.0396").replace("min=0.3000", "min=0.0390")
    text = text.replace("throughput=40000.00", f"throughput={16000 / 0.03956:.2f}")
    text = text.replace("speedup  : 2.000x", f"speedup  : {0.8 / 0.03956:.3f}x")
    assert parse_output(text, TOKENS, SIZES).optimized.median_ms == 0.0396


USAGE = "usage: benchmark.py [-h]\n                    [--x X]\nbenchmark.py: error: unrecognized arguments: --nope\n"
TRACE = 'Traceback (most recent call last):\n  File "{}", line 1, in forward\n    scores\n'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 19073.49 GiB.\n"
CPU = "RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: Error code 12\n"


@pytest.mark.parametrize(
    ("status", "out", "err", "outcome", "words"),
    [
        (0, "", "", "passed", ""),
        (2, "summary: FAIL | x", "", "failed", ""),
        (2, "", USAGE, "usage", "unrecognized arguments: --nope"),
        (2, "", "", "error", "exit status 2"),
        (1, "", TRACE.format("organiser.py") + CUDA, "oom", "its baseline runs first"),
        (1, "", TRACE.format("mine.py") + CUDA, "oom", "the candidate ran out of memory"),
        (1, "", TRACE.format("organiser.py") + CPU + "\nmore words of the allocator\n", "oom", "can't allocate"),
        (1, "", TRACE.format("organiser.py") + "MemoryError\n", "oom", "MemoryError"),
        (
            1,
            "",
            TRACE.format("organiser.py") + "ValueError: layers must be > 0\n",
            "error",
            "the script raised Value",
        ),
        (1, "", TRACE.format("mine.py") + "KeyError: 'x'\n", "error", "the candidate raised KeyError"),
        (-9, "", "", "error", "SIGKILL"),
        (-11, "", "", "error", "signal 11"),
        (3, "", "", "error", "exit status 3"),
    ],
)
def test_status_and_text_decide_the_outcome(status, out, err, outcome, words):
    found, reason = explain_end(status, out, err, ("mine.py",))
    assert found == outcome and words in reason
