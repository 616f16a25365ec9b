"""One arm on one shape: its times, its speedup, its price, from the rows of every process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from rooflane.eval.record.records import ANCHOR, COPY_PREFIX, EAGER, NOOP, RunMeta, Timing
from rooflane.eval.stats.estimator import Estimate, Interval, t_interval
from rooflane.eval.stats.evidence import Measured
from rooflane.eval.stats.figures import JUDGED_KINDS, NULL, REFERENCE, Cell, Spread
from rooflane.eval.stats.price import break_even_calls, price_interval, price_per_1e9, throughput
from rooflane.eval.stats.rounds import dividend, hidden_ns, launch_share
from rooflane.eval.stats.verdict import Floors, Verdict, judge

# One failure among eight processes is a failure of the arm.
SEVERITY = ("ok", "skipped", "infeasible", "unsupported", "oom", "error", "incorrect")


def make_cell(measured: Measured, shape: str, name: str) -> Cell:
    """Return one arm's figures on one shape; `judged` adds what depends on all shapes."""
    meta, records = measured.meta, measured.rows(shape, name)
    if not records:
        return Cell(name, _kind(meta, name), "skipped", "not measured yet; rooflane eval --resume measures it")
    rows = [records[process] for process in sorted(records)]
    worst = max(rows, key=lambda row: SEVERITY.index(row.status))
    checks = [row.verification for row in rows if row.verification]
    timed = [row.timing for row in rows if row.timing]
    times, base, speedup = _against(measured, shape, name)
    planned = next((row for row in rows if row.family), rows[0])
    status, reason = worst.status, worst.reason
    if (
        status == "ok"
        and timed
        and not measured.rounds.of(shape, name).keys() >= {row.process for row in rows if row.timing}
    ):
        status, reason = "error", "a call was timed at zero or less, which no real call takes"
    cell = Cell(
        arm=name,
        kind=worst.kind,
        status=status,
        reason=reason,
        processes=len(timed),
        event_ms=_event_spread(times),
        base_ms=base,
        host_ms=spread(median(sum(timing.host_ns, [])) for timing in timed if any(timing.host_ns)),
        device_ms=spread(median(timing.device_ns) for timing in timed if timing.device_ns),
        idle_ms=spread(median(timing.idle_ns) for timing in timed if timing.idle_ns),
        cold_ms=spread(median(timing.cold_ns) for timing in timed if timing.cold_ns),
        rotating_ms=spread(median(timing.rotating_ns) for timing in timed if timing.rotating_ns),
        harness_ms=spread(median(timing.harness_ns) for timing in timed if timing.harness_ns),
        speedup=speedup,
        launch_share=launch_share(timed),
        use=max((check.gate.use for check in checks if check.gate), default=None),
        setup_s=max((row.setup_s for row in rows if row.setup_s is not None), default=None),
        counts=_counts(timed),
        shrunk=any(timing.shrunk for timing in timed),
        family=planned.family,
        rule=planned.rule,
        options=planned.options,
        contract=planned.contract,
        contract_class=_worst_class(check.contract_class for check in checks),
        integrity=distinct(text for row in rows for text in row.integrity),
        findings=distinct(finding for check in checks for finding in check.contract),
        notes=distinct(note for check in checks for note in check.notes),
        missed=distinct(line for check in checks for line in check.missed),
        predicted_ms=planned.predicted_s * 1e3 if planned.predicted_s is not None else None,
        predicted_peak_bytes=planned.predicted_peak_bytes,
        measured_peak_bytes=max((row.measured_peak_bytes or 0 for row in rows), default=0) or None,
    )
    return _priced(cell, meta, times, timed)


def judged(cell: Cell, measured: Measured, shape: str, found: Estimate, floors: Floors, claims: bool) -> Cell:
    """Return a candidate's cell with what depends on all shapes: Holm's correction, floor and verdict.

    `claims` is false for a campaign that may claim no verdict.
    """
    one = found.shapes.get(shape)
    if one is None:
        return cell
    base, arm = measured.rows(shape, EAGER), measured.rows(shape, cell.arm)
    floor = floors.shapes.get(shape)
    verdict, why = Verdict.NONE, ""
    if claims and cell.status == "ok" and not cell.integrity:
        judgement = judge(one.interval, floor, holm_p=one.holm_p)
        verdict, why = judgement.verdict, judgement.why
    nulls = [row.timing for name in (EAGER, NULL) for row in measured.rows(shape, name).values() if row.timing]
    hidden = hidden_ns([row.timing for row in arm.values() if row.timing], nulls)
    calls = None
    if verdict != Verdict.NONE and cell.setup_s is not None and cell.event_ms and cell.base_ms:
        faster = verdict == Verdict.FASTER
        calls = break_even_calls(cell.setup_s, cell.base_ms / 1e3, cell.event_ms.centre / 1e3, faster=faster)
    return replace(
        cell,
        speedup=one.interval,
        estimate=one,
        floor=floor,
        verdict=verdict,
        why=why,
        dividend=dividend(base, arm, found.logs[shape]),
        hidden_ms=None if hidden is None else hidden / 1e6,
        break_even_calls=calls,
    )


def spread(values: Iterable[float]) -> Spread | None:
    """Return nanoseconds, one value per process, as a spread in milliseconds round their median."""
    found = sorted(values)
    return Spread(median(found) / 1e6, found[0] / 1e6, found[-1] / 1e6) if found else None


def _event_spread(times: Mapping[int, float]) -> Spread | None:
    found = spread(times.values())
    return found and replace(found, centre=_geometric_mean(times.values()) / 1e6)


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts without repeats, in order."""
    return tuple(dict.fromkeys(texts))


def _priced(cell: Cell, meta: RunMeta, times: Mapping[int, float], timed: Sequence[Timing]) -> Cell:
    if cell.status != "ok" or cell.event_ms is None or cell.kind not in JUDGED_KINDS:
        return cell
    valid = fmean(timing.valid_tokens for timing in timed)
    if valid <= 0:
        return cell
    rate = throughput({process: value / 1e9 for process, value in times.items()}, valid)
    tokens = rate.centre
    if not meta.price_per_hour:
        return replace(cell, tokens_per_s=tokens)
    return replace(
        cell,
        tokens_per_s=tokens,
        price_per_1e9_tokens=price_per_1e9(meta.price_per_hour, tokens),
        price=price_interval(meta.price_per_hour, rate),
    )


def _kind(meta: RunMeta, name: str) -> str:
    fixed = {EAGER: "baseline", REFERENCE: "reference", NOOP: "noop", ANCHOR: "anchor"}
    if name in fixed:
        return fixed[name]
    if name in meta.controls:
        return "control"
    return "copy" if name.startswith(COPY_PREFIX) else "candidate"


def _against(measured: Measured, shape: str, name: str) -> tuple[dict[int, float], float | None, Interval | None]:
    """Return an arm's nanoseconds by process, what it is compared with in ms, and its speedup over that.

    All three come from the same processes and blocks, so the second over the first is the third. An arm is compared
    with eager, and with the chunked reference where eager has no time. Of a copy, the candidate is compared with it:
    its own null.
    """
    own = measured.times(shape, name)
    if name in (EAGER, REFERENCE, NOOP, ANCHOR):
        return own, None, None
    if name.startswith(COPY_PREFIX):
        logs = measured.pair(shape, name, name.removeprefix(COPY_PREFIX)).logs
        return own, None, t_interval(list(logs.values())) if logs else None
    if measured.rounds.of(shape, EAGER) or not measured.rounds.of(shape, REFERENCE):
        pair = measured.pair(shape, EAGER, name)
        sides = [{process: math.exp(log) for process, log in side.items()} for side in (pair.base, pair.arm)]
    else:
        totals = measured.times(shape, REFERENCE)
        sides = [{process: side[process] for process in own if process in totals} for side in (totals, own)]
    base, arm = sides
    if not arm:
        return own, None, None
    return arm, _geometric_mean(base.values()) / 1e6, t_interval([math.log(base[p] / arm[p]) for p in base])


def _counts(timed: Sequence[Timing]) -> str:
    """Return calls as `rounds x repeats`, the smallest repeats of any process."""
    if not timed:
        return ""
    return f"{sum(map(bool, timed[0].event_ns))}x{min(timing.repeats for timing in timed)}"


def _worst_class(classes: Iterable[Any]) -> str:
    """Return the worst contract class found, empty where none was tried."""
    order = ("pure", "contract-dependent", "incorrect")
    return max((found for found in classes if found), key=order.index, default="")
