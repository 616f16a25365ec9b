"""Read the figures that the script prints, and explain its exit status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

Outcome = Literal[
    "passed",  # exit 0: accurate and timed
    "failed",  # exit 2: a trial outside the tolerance
    "usage",  # exit 2: the script's argparse refused the flags
    "oom",  # exit 1: memory ran out, in the baseline or in the candidate
    "error",  # exit 1: any other exception; or a signal
    "timeout",  # ended by the time limit
    "unsupported",  # no family can serve the shape, so nothing was run
    "unreadable",  # the script ended well, its figures cannot be read or contradict each other
]
_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")
_NUMBER = r"(?:nan|-?inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_TRIAL = re.compile(
    rf"trial (\d+)/(\d+): (PASS|FAIL) \| max_abs=({_NUMBER}) \| max_rel=({_NUMBER}) \| failed=(\d+)/(\d+)"
)
_SUMMARY = re.compile(rf"summary: (PASS|FAIL) \| max_abs=({_NUMBER}) \| max_rel=({_NUMBER}) \| failed=(\d+)/(\d+)")
_SIDE = re.compile(
    rf"(baseline |optimized): median=({_NUMBER}) ms \| mean=({_NUMBER}) ms \| p90=({_NUMBER}) ms \| "
    rf"min=({_NUMBER}) ms \| throughput=({_NUMBER}) token/s"
)
_SPEEDUP = re.compile(rf"speedup  : ({_NUMBER})x based on median latency")
_CONFIGURATION = re.compile(
    r"TransformerConfig\(batch_size=(\d+), seq_len=(\d+), d_model=(\d+), num_heads=(\d+), ffn_dim=(\d+), "
    r"num_layers=(\d+), causal=(True|False)\)"
)
_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_USAGE = re.compile(r"^usage: .*?^\S+: error: (.*)$", re.MULTILINE | re.DOTALL)
_EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception)\b")
REASON_CHARACTERS = 300
CANDIDATE_SIDE = "the candidate"
# Half of the last printed digit, and a little for the rounding of a rounded figure.
HALF_MS, HALF_RATE, HALF_SPEEDUP, SLACK = 0.5e-4, 0.5e-2, 0.5e-3, 1e-9


class UnreadableError(ValueError):
    """Printed figures are missing, doubled or contradict each other; the text names the line."""


class Accuracy(BaseModel):
    """The accuracy section: the verdict, the worst errors of the trials, and the counts."""

    model_config = _CONFIG

    passed: bool
    trials: int
    max_abs: float
    max_rel: float
    failed: int
    total: int


class Side(BaseModel):
    """One side's printed latencies in milliseconds, and its padded tokens a second."""

    model_config = _CONFIG

    median_ms: float
    mean_ms: float
    p90_ms: float
    min_ms: float
    tokens_per_s: float


class Figures(BaseModel):
    """What one run of the script printed; the timing is None where it was skipped."""

    model_config = _CONFIG

    accuracy: Accuracy
    baseline: Side | None = None
    optimized: Side | None = None
    speedup: float | None = None


def parse_output(text: str, tokens: int, sizes: tuple[int | bool, ...] = ()) -> Figures:
    """Return the figures of one run over `tokens` tokens a call; `sizes` are the seven the configuration must name.

    Raises `UnreadableError` when a line is missing or doubled, or when the figures contradict each other: a speedup
    that is not the quotient of the medians, a rate that is not tokens over the median, counts that do not add up.
    """
    printed = _one(_CONFIGURATION, text, "the configuration")
    if printed is None:
        raise UnreadableError("the line of the configuration is missing")
    named = (*map(int, printed[:6]), printed[6] == "True")
    if sizes and named != tuple(sizes):
        raise UnreadableError(f"the script ran {named}, not the sizes asked for {tuple(sizes)}")
    accuracy = _accuracy(text)
    sides = {
        name.strip(): Side(**dict(zip(Side.model_fields, map(float, values), strict=True)))
        for name, *values in _SIDE.findall(text)
    }
    speedup = _one(_SPEEDUP, text, "the speedup")
    if len(_SIDE.findall(text)) not in (0, 2) or len(sides) not in (0, 2) or bool(sides) != (speedup is not None):
        raise UnreadableError("the three lines of the performance section (baseline, optimized, speedup) are not whole")
    if not sides:
        if accuracy.passed:
            raise UnreadableError("the accuracy passed, and there is no performance section")
        return Figures(accuracy=accuracy)
    figures = Figures(accuracy=accuracy, speedup=float(speedup[0]), **sides)
    _check_timing(figures, tokens)
    return figures


def explain_end(returncode: int, out: str, err: str, candidate_files: tuple[str, ...]) -> tuple[Outcome, str]:
    """Return the outcome of an exit status and its output, and the reason in one line.

    Status 2 with a failed summary is an accuracy failure, with argparse's usage on standard error a usage error. An
    exception whose traceback passes through one of `candidate_files` is the candidate's, any other the script's own.
    """
    if returncode < 0:
        killed = " (SIGKILL: the system may have run out of memory)" if returncode == -9 else ""
        return "error", f"ended by signal {-returncode}{killed}"
    if returncode == 0:
        return "passed", ""
    if returncode == 2 and re.search(r"^summary: FAIL", out, re.MULTILINE):
        return "failed", ""
    if returncode == 2 and (usage := _USAGE.search(err)):
        return "usage", f"the script refused its flags: {usage[1].strip()}"
    raised = _raised(err)
    ours = any(name in err for name in candidate_files)
    side = CANDIDATE_SIDE if ours else "the script"
    if returncode == 1 and _MEMORY.search(raised):
        first = "" if ours else " (its baseline runs first)"
        return "oom", f"{side}{first} ran out of memory: {raised}"
    return "error", f"{side} raised {raised}" if raised else f"exit status {returncode}, nothing on standard error"


def _accuracy(text: str) -> Accuracy:
    summary = _one(_SUMMARY, text, "the accuracy summary")
    if summary is None:
        raise UnreadableError("the line `summary: ...` of the accuracy check is missing")
    trials = _TRIAL.findall(text)
    planned = {int(trial[1]) for trial in trials}
    if planned != {len(trials)} or [int(trial[0]) for trial in trials] != list(range(1, len(trials) + 1)):
        raise UnreadableError(f"{len(trials)} accuracy trials are printed, not each of them once")
    failed, total = (sum(int(trial[place]) for trial in trials) for place in (5, 6))
    passed = all(trial[2] == "PASS" and trial[5] == "0" for trial in trials)
    if (summary[0] == "PASS") != passed or (int(summary[3]), int(summary[4])) != (failed, total):
        raise UnreadableError("the accuracy summary does not follow from its trials")
    return Accuracy(
        passed=passed,
        trials=len(trials),
        # From the trials: the summary's maxima drop a NaN.
        max_abs=largest(float(trial[3]) for trial in trials),
        max_rel=largest(float(trial[4]) for trial in trials),
        failed=failed,
        total=total,
    )


def _check_timing(figures: Figures, tokens: int) -> None:
    """Raise `UnreadableError` when medians, rates and speedup contradict each other by more than their rounding."""
    for name, side in (("baseline", figures.baseline), ("optimized", figures.optimized)):
        least, most = side.median_ms - HALF_MS, side.median_ms + HALF_MS
        rate = side.tokens_per_s
        low = tokens * 1000 / most * (1 - SLACK) - HALF_RATE
        high = tokens * 1000 / least * (1 + SLACK) + HALF_RATE if least > 0 else float("inf")
        if not side.median_ms >= 0 or not low <= rate <= high:
            raise UnreadableError(f"{name}: {rate} tokens/s is not {tokens} tokens in {side.median_ms} ms")
        if not side.min_ms <= side.median_ms <= side.p90_ms:
            raise UnreadableError(f"{name}: minimum, median and p90 are not in order")
    base, mine = figures.baseline.median_ms, figures.optimized.median_ms
    low = (base - HALF_MS) / (mine + HALF_MS) - HALF_SPEEDUP - SLACK
    high = (base + HALF_MS) / (mine - HALF_MS) + HALF_SPEEDUP + SLACK if mine > HALF_MS else float("inf")
    if not low <= figures.speedup <= high:
        raise UnreadableError(f"the speedup {figures.speedup} is not the baseline's {base} ms over {mine} ms")


def _one(pattern: re.Pattern[str], text: str, what: str) -> tuple[str, ...] | None:
    """Return the groups of the only match, None without one; raises `UnreadableError` on several."""
    found = list(pattern.finditer(text))
    if len(found) > 1:
        raise UnreadableError(f"{what} is printed {len(found)} times: something else printed it too")
    return found[0].groups() if found else None


def largest(values: Iterable[float]) -> float:
    """Return the maximum of at least one value, NaN if one is among them."""
    values = list(values)
    return next((value for value in values if value != value), max(values))


def _raised(text: str) -> str:
    """Return the line of the last exception, else the last line with text, cut to `REASON_CHARACTERS`."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    return (raised or lines or [""])[-1].strip()[:REASON_CHARACTERS]
