"""From records to figures: everything a report shows is computed here, from raw nanoseconds, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rooflane.eval.record.nulls import NullResult, machine_of, software_of
from rooflane.eval.record.records import COPY_PREFIX, EAGER, MEASURED, Record, RunMeta
from rooflane.eval.stats.cells import judged, make_cell
from rooflane.eval.stats.evidence import Assessment, Evidence, Measured, copy_of
from rooflane.eval.stats.figures import (
    LAUNCH_SHARE,
    REFERENCE,
    TRUSTED_KINDS,
    Cell,
    ShapeRow,
    Summary,
    accuracy_lines,
    missed_text,
)
from rooflane.eval.stats.headline import make_headline, rank
from rooflane.eval.stats.host_pace import host_pace
from rooflane.eval.stats.rounds import clock_tick_ns
from rooflane.eval.stats.verdict import Verdict
from rooflane.shapes import Shape


def summarise(meta: RunMeta, records: Iterable[Record], stored: Sequence[NullResult] = ()) -> Summary:
    """Compute every figure of a run from its page, its rows and the nulls stored before it; pure and deterministic."""
    records = list(records)
    campaign = Evidence.of(meta, records)
    measured = campaign.measured
    rows = [_shape_row(measured, shape) for shape in meta.shape_list()]
    headlines = []
    for candidate in meta.candidates:
        assessed = campaign.assess(candidate, stored)
        rows = [_judged(measured, row, candidate, assessed) for row in rows]
        headlines.append(make_headline(measured, candidate, rows, campaign.counted, assessed, _fact(rows, candidate)))
    return Summary(
        meta=meta,
        rows=tuple(rows),
        headlines=tuple(headlines),
        environment=campaign.environment,
        missing=missing_rows(measured),
        ranking=rank(measured, rows),
        contamination=measured.contamination,
        accuracy=tuple(accuracy_lines(records)),
        tick_ns=clock_tick_ns(record.timing for record in records if record.timing),
        host=host_pace(records),
    )


def campaign_nulls(meta: RunMeta, records: Iterable[Record], process_s: float | None = None) -> list[NullResult]:
    """Return a campaign's nulls as they are stored: eager and each candidate against its copy.

    Only a clean campaign has any: complete, with every planned copy timed on every shape, without evidence of
    manipulation, and not disturbed too much. What a null says does not matter, or the floor would be too low.
    """
    records = list(records)
    campaign = Evidence.of(meta, records)
    planned = {arm for shape in meta.shape_list() for arm in meta.planned(0, shape.id)}
    arms = [arm for arm in (EAGER, *meta.candidates) if copy_of(arm) in planned]
    nulls = campaign.nulls(*arms)
    clean = not campaign.measured.contamination.too_much and not missing_rows(campaign.measured)
    clean = clean and not any(record.integrity for record in records if record.kind in TRUSTED_KINDS)
    if not clean or any(arm not in nulls or nulls[arm].mean is None for arm in arms):
        return []
    labels = campaign.labels()
    results = []
    for arm, null in nulls.items():
        error = null.mean.error
        results.append(
            NullResult(
                machine=machine_of(campaign.environment),
                software=software_of(campaign.environment),
                processes=len(campaign.processes),
                run=meta.id,
                arm=arm,
                measured_at=meta.started_at,
                log=null.mean.log,
                # The spread over processes that gives this error without a lost cell.
                sd=None if error is None else error * math.sqrt(len(campaign.processes)),
                shapes={labels[name]: fmean(found.values()) for name, found in null.logs.items()},
                process_s=process_s,
            )
        )
    return results


def missing_rows(measured: Measured) -> int:
    """Return how many planned rows were not written."""
    return sum(
        process not in measured.rows(shape.id, arm)
        for shape in measured.meta.shape_list()
        for process in range(measured.meta.settings["processes"])
        for arm in measured.meta.planned(process, shape.id)
    )


def _shape_row(measured: Measured, shape: Shape) -> ShapeRow:
    classification = measured.meta.prediction(shape.id).classification
    names = [*measured.meta.planned(0, shape.id)]
    if measured.rows(shape.id, REFERENCE):
        names.append(REFERENCE)
    cells = {name: make_cell(measured, shape.id, name) for name in names}
    return ShapeRow(
        shape=shape,
        regime=classification["regime"],
        borderline=classification["borderline"],
        predicted_ms=classification["predicted_s"] * 1e3,
        predicted_peak_bytes=classification["peak_bytes"],
        measured_regime=_measured_regime(cells[EAGER], classification),
        cells=cells,
        profiled=classification.get("basis") == MEASURED,
    )


def _judged(measured: Measured, row: ShapeRow, candidate: str, assessed: Assessment) -> ShapeRow:
    """Return a row with a candidate's cell judged."""
    cell = judged(row.cells[candidate], measured, row.shape.id, assessed)
    return replace(row, cells=row.cells | {candidate: cell})


def _fact(rows: Sequence[ShapeRow], candidate: str) -> tuple[str, str] | None:
    """Return the verdict that comes before the times: manipulation, a wrong output, a contract, a check not run."""
    involved = (candidate, EAGER, COPY_PREFIX + candidate)
    cells = [(row.shape.id, row.cells[candidate]) for row in rows]
    tampered = [
        (row.shape.id, text)
        for row in rows
        for arm in involved
        if arm in row.cells
        for text in row.cells[arm].integrity
    ]
    wrong = [(shape, cell.reason) for shape, cell in cells if cell.status == "incorrect"]
    grey = [(shape, cell.contract_reason) for shape, cell in cells if cell.depends_on_contract and cell.event_ms]
    missed = [(shape, line) for shape, cell in cells for line in cell.missed]
    unchecked = [(shape, missed_text([line for _, line in missed])) for shape, _ in missed]
    found = (
        (Verdict.INTEGRITY, tampered),
        (Verdict.INCORRECT, wrong),
        (Verdict.CONTRACT, grey),
        (Verdict.NONE, unchecked),
    )
    for verdict, texts in found:
        if texts:
            where = ", ".join(dict.fromkeys(shape for shape, _ in texts))
            return verdict, f"{texts[0][1] or 'no reason was given'} (shape {where})"
    return None


def _measured_regime(eager: Cell, classification: dict[str, Any]) -> str | None:
    """Return the regime the clocks show, None where no device clock ran (a CPU, or nothing timed).

    Launch when a call lasts over 1.3 times what the device needs, in the processes that read both clocks. Otherwise
    the device is the limit; no clock tells which side of it, so the larger share of the ledger does.
    """
    if eager.launch_share is None:
        return None
    if eager.launch_share > 1 - 1 / LAUNCH_SHARE:
        return "launch"
    return "compute" if classification["compute_s"] >= classification["bandwidth_s"] else "bandwidth"
