"""The charts made of lanes, and the series every chart shares."""

from __future__ import annotations

import math

from rooflane.eval.report.page import palette
from rooflane.eval.report.page.lanes import Lane, Limit, Mark, heading, lane_chart
from rooflane.eval.report.page.palette import Series
from rooflane.eval.report.page.scene import Scene
from rooflane.eval.report.page.source import CONTROL_TITLES, EAGER, REFERENCE, ArmPlace, PageData, ShapePlace, number

SAID = {
    "incorrect": "wrong",
    "error": "error",
    "oom": "no memory",
    "unsupported": "unsupported",
    "infeasible": "infeasible",
    "skipped": "skipped",
}

FAILED = ("incorrect", "error", "oom")


def series_of(data: PageData) -> dict[str, Series]:
    """Return each arm's form and colour; candidates past the sixth start over, told apart by their titles."""
    found = {}
    for name in data.arms:
        if name == EAGER:
            style = palette.EAGER_STYLE
        elif name == REFERENCE:
            style = palette.REFERENCE_STYLE
        elif name in data.candidates:
            style = palette.CANDIDATE_STYLES[data.candidates.index(name) % len(palette.CANDIDATE_STYLES)]
        else:
            style = palette.CONTROL_STYLES.get(name, palette.OTHER_CONTROL)
        label = name if name in data.candidates else CONTROL_TITLES.get(name, name)
        found[name] = Series(name, label, *style)
    return found


def latency(data: PageData, width: float, titled: bool = False) -> Scene | None:
    """Draw event time of every arm on every shape; None when nothing was timed."""
    series = series_of(data)
    # What comes first is drawn on top.
    order = [*data.candidates, *(name for name in series if name not in data.candidates)]
    lanes = []
    for shape in data.shapes:
        arms = [shape.arms[name] for name in order if name in shape.arms]
        marks = tuple(_time(series[arm.arm], arm) for arm in arms if arm.event)
        lanes.append(Lane(shape.name, marks, *_outcome(data, shape)))
    timed = {mark.series.arm for lane in lanes for mark in lane.marks}
    shown = [entry for name, entry in series.items() if name in timed]
    if not shown:
        return None
    word = "; at the right the candidate's speedup, or what became of it" if len(data.candidates) == 1 else ""
    scene = Scene(
        width,
        0,
        "Latency by shape",
        f"Event time in milliseconds on a logarithmic axis, a lane for each shape, a mark for each arm; "
        f"bars span the processes{word}. The results table has the figures.",
    )
    top = heading(scene, f"Latency by shape, {data.device}") if titled else 0.0
    return lane_chart(scene, lanes, shown, "event time, ms (logarithmic)", top=top)


def tolerance(data: PageData, width: float, titled: bool = False) -> Scene | None:
    """Draw how much of the tolerance each candidate uses, on plain and ragged inputs; None when none was checked."""
    series = series_of(data)
    lanes, shown = [], {}
    for shape in data.shapes:
        marks = []
        for arm in _candidates(data, shape):
            plain = series[arm.arm]
            masks = Series(plain.arm, f"{plain.label}, ragged masks", plain.form, plain.role, open=True)
            for entry, use in ((plain, arm.use), (masks, arm.ragged_use)):
                if use is not None and math.isfinite(use) and use > 0:
                    shown[entry.label] = entry
                    title = f"{entry.label}, shape {shape.id}: {number(use)} of the tolerance"
                    marks.append(Mark(entry, use, use, use, title))
        lanes.append(Lane(shape.name, tuple(marks), *_worst_use(data, shape)))
    if not shown:
        return None
    scene = Scene(
        width,
        0,
        "Use of the tolerance by shape",
        "The worst error against the baseline in units of the tolerance, on a logarithmic axis; above 1 fails.",
    )
    top = heading(scene, f"Use of the tolerance, {data.device}") if titled else 0.0
    axis = "worst error / tolerance (logarithmic)"
    return lane_chart(scene, lanes, list(shown.values()), axis, Limit(1.0, "1: fails beyond"), top)


def truth(data: PageData, width: float, titled: bool = False) -> Scene | None:
    """Draw each candidate's error against fp64 in units of eager's own, by stress input; None when none was tried.

    One candidate has a form for each input; several have their own forms, and the marks' titles name the input.
    """
    series = series_of(data)
    lanes, shown = [], {}
    for shape in data.shapes:
        marks, failed, tried = [], False, False
        for arm in _candidates(data, shape):
            for place, check in enumerate(arm.truth):
                tried, failed = True, failed or not check.passed
                entry = series[arm.arm]
                if len(data.candidates) == 1:
                    form, role, is_open = palette.CANDIDATE_STYLES[place % len(palette.CANDIDATE_STYLES)]
                    entry = Series(arm.arm, check.name, form, role, is_open)
                if math.isfinite(check.ratio) and check.ratio > 0:
                    shown[entry.label] = entry
                    title = f"{arm.arm}, shape {shape.id}, {check.name}: {number(check.ratio)} of eager's own error"
                    marks.append(Mark(entry, check.ratio, check.ratio, check.ratio, title))
        lanes.append(Lane(shape.name, tuple(marks), "fails" if failed else "" if tried else "not tried", not failed))
    if not shown:
        return None
    scene = Scene(
        width,
        0,
        "Error against fp64 by shape",
        "The worst error against float64 divided by the eager baseline's own, on a logarithmic axis, one mark for "
        "each stress input; below 1 is closer to float64 than eager.",
    )
    top = heading(scene, f"Error against fp64, {data.device}") if titled else 0.0
    axis = "worst error / eager's own (logarithmic)"
    return lane_chart(scene, lanes, list(shown.values()), axis, Limit(1.0, "1: as eager", "muted"), top)


def _candidates(data: PageData, shape: ShapePlace) -> list[ArmPlace]:
    return [shape.arms[name] for name in data.candidates if name in shape.arms]


def _time(series: Series, arm: ArmPlace) -> Mark:
    event = arm.event
    title = f"{series.label}: {number(event.centre)} ms ({number(event.low)}-{number(event.high)})"
    if arm.status != "ok":
        title += f", {SAID.get(arm.status, arm.status)}"
    return Mark(series, event.centre, event.low, event.high, title)


def _outcome(data: PageData, shape: ShapePlace) -> tuple[str, bool]:
    """Return the word at a lane's end: one candidate's speedup or status; of several, how many failed."""
    arms = _candidates(data, shape)
    failed = [arm for arm in arms if arm.status in FAILED]
    if failed:
        return SAID[failed[0].status] if len(arms) == 1 else f"{len(failed)} of {len(arms)} fail", False
    if len(arms) == 1:
        return arms[0].speedup or SAID.get(arms[0].status, ""), True
    statuses = {arm.status for arm in arms}
    return (SAID.get(statuses.pop(), "") if len(statuses) == 1 else ""), True


def _worst_use(data: PageData, shape: ShapePlace) -> tuple[str, bool]:
    """Return the largest use of tolerance of a shape, or what became of it."""
    arms = _candidates(data, shape)
    uses = [use for arm in arms for use in (arm.use, arm.ragged_use) if use is not None]
    if uses:
        worst = max(uses)
        return (number(worst) if math.isfinite(worst) else "not finite"), worst <= 1
    return _outcome(data, shape)
