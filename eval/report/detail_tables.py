"""The tables below the headline: verdicts, clocks, costs, predictions, findings and what did not run."""

from __future__ import annotations

import math
from collections import Counter

from rooflane.dispatch.units import size
from rooflane.eval.record.records import COPY_PREFIX, TILE
from rooflane.eval.report.table import NONE, Table, grouped, interval, number, percent, price, ratio, spread, times
from rooflane.eval.stats.figures import COLUMNS, JUDGED_KINDS, LAUNCH_SHARE, NULL, AccuracyLine, ShapeRow, Summary


def verdict_table(summary: Summary, candidate: str) -> Table:
    """Return each shape's verdict with what it rests on: both intervals, corrected p, floor and both nulls."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        if cell.estimate is None:
            continue
        nulls = [row.cells.get(name) for name in (NULL, COPY_PREFIX + candidate)]
        rows.append(
            (
                row.shape.id,
                cell.verdict.upper() if cell.verdict != "none" else NONE,
                interval(cell.estimate.interval),
                interval(cell.estimate.holm_interval),
                number(cell.estimate.holm_p),
                f"{cell.floor.share()}{'~' if cell.floor.provisional else ''}" if cell.floor else NONE,
                *(interval(null.speedup if null else None) for null in nulls),
            )
        )
    return Table(
        title=f"{candidate}: verdict by shape",
        columns=("id", "verdict", "speedup [95%]", "at Holm's level", "Holm p", "floor", "eager null", "its own null"),
        rows=tuple(rows),
        left=2,
        note="a shape is faster or slower when its interval clears the floor and Holm's correction over the shapes "
        "holds; ~ a floor from this run's own nulls; a null is an arm timed against its own copy",
    )


def clock_table(summary: Summary, candidate: str) -> Table:
    """Return the candidate's four clocks, the launch share they show, and its counts."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        if row.eager.event_ms is None or cell.event_ms is None:
            continue
        rows.append(
            (
                row.shape.id,
                cell.rule or NONE,
                spread(cell.event_ms),
                number(cell.device_ms and cell.device_ms.centre),
                number(cell.idle_ms and cell.idle_ms.centre),
                number(cell.host_ms and cell.host_ms.centre),
                percent(cell.launch_share),
                number(cell.hidden_ms) if cell.hidden_ms else NONE,
                spread(row.eager.event_ms),
                number(cell.use),
                cell.counts + ("*" if cell.shrunk else ""),
                row.eager.counts + ("*" if row.eager.shrunk else ""),
                str(cell.processes),
            )
        )
    return Table(
        title=f"{candidate}: four clocks in ms (range over processes)",
        columns=(
            "id", "rule", "event", "device", "idle start", "host", "launch share", "hidden", "eager event", "use",
            "calls", "eager calls", "processes",
        ),
        rows=tuple(rows),
        left=2,
        note="event: geometric mean over processes, the others: median; "
        "launch share: of the event time, what the device was not busy, in the processes that read both clocks, "
        "not from the times shown; hidden: event time that neither device nor host accounts for, beyond eager's own; "
        "use: worst error in units of the tolerance, above 1 fails; calls: rounds x repeats, * shrunk to the time "
        "budget",
    )  # fmt: skip


def state_table(summary: Summary, candidate: str) -> Table:
    """Return the states that were timed beside the headline's, and the harness dividend."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        states, eager = ((side.harness_ms, side.cold_ms, side.rotating_ms) for side in (cell, row.eager))
        if cell.event_ms is None or not any(states):
            continue
        rows.append(
            (
                row.shape.id,
                number(cell.event_ms.centre),
                *(number(state and state.centre) for state in (*states, *eager)),
                f"{times(cell.dividend)}x" if cell.dividend else NONE,
                cell.contract_class or NONE,
            )
        )
    return Table(
        title=f"{candidate}: states in ms, and what the organiser's loop adds",
        columns=(
            "id", "warm", "fixed input", "cold", "rotating", "eager fixed", "eager cold", "eager rotating",
            "dividend", "contract",
        ),
        rows=tuple(rows),
        left=1,
        note="warm: back to back with a fresh input each call, the headline's state; fixed input: one input object "
        "again and again, the organiser's loop; cold: caches overwritten before each call; rotating: inputs of five "
        "times the cache; dividend: speedup on the fixed input over speedup on fresh ones, both of the processes that "
        "timed both ways",
    )  # fmt: skip


def cost_table(summary: Summary, candidate: str) -> Table:
    """Return set-up, when it has paid for itself, throughput and price."""
    rows = []
    for row in summary.rows:
        cell = row.cells[candidate]
        if row.eager.event_ms is None or cell.tokens_per_s is None:
            continue
        rows.append(
            (
                row.shape.id,
                number(cell.setup_s),
                _calls(cell.break_even_calls),
                number(cell.tokens_per_s),
                price(cell.price),
            )
        )
    return Table(
        title=f"{candidate}: set-up and price",
        columns=("id", "set-up s", "paid back after calls", "tokens/s", "$/1e9 tok [95%]"),
        rows=tuple(rows),
        left=1,
        note="paid back: never, unless proven faster; tokens: valid ones only, the geometric mean "
        "over processes, at full use of the paid time",
    )


def rows_of_problems(summary: Summary) -> list[ShapeRow]:
    """Return the rows whose regime was measured before the campaign, because no ledger counts their work."""
    return [row for row in summary.rows if row.profiled]


def profile_table(summary: Summary) -> Table:
    """Return the measured profile of each problem, from which its regime is."""
    rows = []
    for row in rows_of_problems(summary):
        found = summary.meta.prediction(row.shape.id).classification
        rows.append(
            (
                row.shape.id,
                row.regime + ("~" if row.borderline else ""),
                number(row.predicted_ms),
                number(found["device_s"] * 1e3),
                number(found["compute_s"] * 1e3),
                number(found["bandwidth_s"] * 1e3),
                f"{found['flops']:.3g}",
                size(found["bytes"]),
            )
        )
    return Table(
        title="Regimes of problems: measured, not predicted",
        columns=("id", "regime", "call ms", "device ms", "arithmetic ms", "memory ms", "FLOPs", "bytes"),
        rows=tuple(rows),
        left=2,
        note=f"one run of eager before the campaign; launch when a call lasts over {LAUNCH_SHARE:g} times its device "
        "time, else the larger of two lower bounds: the FLOPs that torch counts at the matrix rate, and the bytes of "
        "inputs, weights and outputs at the copy rate; intermediate results are not counted; ~ borderline",
    )


def prediction_table(summary: Summary) -> Table:
    """Return what was predicted beside what was measured, and where the prediction was wrong."""
    rows = []
    hits: Counter[tuple[str, str]] = Counter()
    for row in summary.rows:
        if row.eager.event_ms is None or row.profiled:
            continue
        measured = row.measured_regime
        if measured:
            hits[row.regime, measured] += 1
        cell = row.cells[summary.meta.candidates[0]]
        rows.append(
            (
                row.shape.id,
                row.regime + ("~" if row.borderline else ""),
                measured or NONE,
                NONE if measured is None else "as predicted" if measured == row.regime else "wrong",
                number(row.predicted_ms),
                number(row.eager.event_ms.centre),
                ratio(row.eager.event_ms.centre, row.predicted_ms),
                number(cell.predicted_ms),
                number(cell.event_ms.centre if cell.event_ms else None),
                ratio(cell.event_ms.centre if cell.event_ms else None, cell.predicted_ms),
            )
        )
    counts = ", ".join(f"{count} {regime} measured as {found}" for (regime, found), count in sorted(hits.items()))
    return Table(
        title="Prediction against measurement (ms)",
        columns=(
            "id", "predicted", "measured", "", "eager predicted", "eager measured", "ratio",
            "candidate predicted", "candidate measured", "ratio",
        ),
        rows=tuple(rows),
        left=4,
        note=(
            f"regimes: {counts}; launch is measured when a call lasts over {LAUNCH_SHARE:g} times its device time, "
            "the split of the rest is the ledger's"
            if counts
            else "regimes are not measured: this device has no clock of its own"
        ),
    )  # fmt: skip


def accuracy_table(summary: Summary, candidate: str) -> Table:
    """Return each shape's hardest input: the candidate's error against float64 beside eager's own."""
    hardest: dict[str, AccuracyLine] = {}
    for line in summary.accuracy:
        if line.arm == candidate and line.use >= (hardest[line.shape].use if line.shape in hardest else 0):
            hardest[line.shape] = line
    rows = [(row.shape.id, *hardest[row.shape.id].cells()) for row in summary.rows if row.shape.id in hardest]
    return Table(
        title=f"{candidate}: error against float64 on the hardest input",
        columns=("id", *COLUMNS),
        rows=tuple(rows),
        left=2,
        note=f"use: of what the check allows, above 1 fails; headroom: how often the error could grow; errors in units "
        f"of eager's own; worst tile: block of {TILE} tokens, block of {TILE} columns",
    )


def finding_table(summary: Summary) -> Table:
    """Return what a reader must know about arms that did run: broken promises, notes, controls that fail."""
    rows = []
    for row in summary.rows:
        for cell in row.cells.values():
            texts = list(cell.findings)
            if cell.contract and cell.event_ms:
                texts.append(f"declared: {cell.contract}")
            texts += cell.notes
            texts += [f"not run: {line}" for line in cell.missed]
            if cell.hidden_ms:
                texts.append(f"neither device clock nor host clock sees {number(cell.hidden_ms)} ms of a call")
            if cell.kind not in JUDGED_KINDS and cell.status not in ("ok", "skipped", "unsupported"):
                texts.append(f"{cell.status}: {cell.reason}")
            rows += [(row.shape.id, cell.arm, text) for text in texts]
    return Table("Findings", ("shape", "arm", "finding"), grouped(rows), 3, prose=True)


def _calls(value: float | None) -> str:
    return NONE if value is None else "never" if math.isinf(value) else f"{value:,.0f}"
