"""The kinds of charts: latency, use of the tolerance and error against fp64 by shape, the roofline, the regime map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER
from rooflane.eval.report.page.drawing import (
    FONT,
    LIGHT,
    MARGIN,
    Chart,
    Series,
    boxes_of,
    draw_mark,
    is_free,
    legend,
    log_axes,
    log_limits,
    looks,
    new_axes,
    new_figure,
    place_labels,
    save_chart,
    shorten,
    text_width,
    write_text,
)
from rooflane.eval.report.page.source import ARM_TITLES, PageData
from rooflane.eval.report.table import number, times
from rooflane.eval.stats.figures import FAILED, Cell, ShapeRow
from rooflane.eval.stats.summary import REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 860, 360
ROW = 24  # pixels for a shape; a narrow chart has its name in a line of its own
# Each arm differs from the others by marker or filling, not by colour alone.
FIXED_STYLES = {
    EAGER: ("o", "ink", True),
    REFERENCE: ("+", "ink", False),
    "identity": ("|", "muted", False),
    "sdpa": ("^", "s2", True),
    "compiled": ("s", "s1", True),
    "compiled_reduce_overhead": ("v", "s3", True),
}
CANDIDATE_STYLES = (("D", "s0"), ("s", "s4"), ("^", "s3"), ("v", "s2"), ("o", "s1"), ("h", "s5"))
STATUS_WORDS = {"incorrect": "wrong", "oom": "no memory"}
BORDERLINE = 1.3  # host and device time within this factor: the predicted regime is called borderline
REGIME_MARKERS = {"launch": "^", "bandwidth": "s", "compute": "D"}
HOST_LIMIT, DEVICE_LIMIT = "host is the limit", "device is the limit"


@dataclass(frozen=True)
class Mark:
    """A value of one arm, its title, and the range over the processes where there is one."""

    series: Series
    value: float
    title: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One shape of a chart by shape: its marks, and the word at its right end."""

    shape: ShapeRow
    marks: list[Mark]
    word: str
    good: bool

    @property
    def name(self) -> str:
        """The shape's id with its dimensions."""
        return f"{self.shape.shape.id}: {self.shape.shape.label()}"


def series_of(data: PageData) -> dict[str, Series]:
    """Return how each arm of a run is drawn; a seventh candidate looks like the first, and its title tells."""
    styles = {name: CANDIDATE_STYLES[place % len(CANDIDATE_STYLES)] for place, name in enumerate(data.meta.candidates)}
    return {
        name: Series(name, *styles[name])
        if name in styles
        else Series(ARM_TITLES.get(name, name), *FIXED_STYLES.get(name, ("x", "muted", False)))
        for name in data.arms
    }


def latency(data: PageData, width: float, titled: bool = False) -> Chart | None:
    """Draw event time of every arm on every shape; None when nothing was timed."""
    series, rows = series_of(data), []
    order = [*(name for name in series if name not in data.meta.candidates), *reversed(data.meta.candidates)]
    for row in data.summary.rows:
        cells = [row.cells[name] for name in order if name in row.cells]  # the first candidate is drawn on top
        rows.append(Row(row, [_time(series[cell.arm], cell) for cell in cells if cell.event_ms], *_outcome(data, row)))
    return _by_shape(
        data, width, titled, rows, list(series.values()), "Latency by shape", "event time, ms (logarithmic)",
        "Event time in milliseconds on a logarithmic axis: a row for each shape, a mark for each arm. Lines span the "
        "processes. The word at the right is a single candidate's speedup or status. The results table has the "
        "figures.",
    )  # fmt: skip


def tolerance(data: PageData, width: float, titled: bool = False) -> Chart | None:
    """Draw the share of the tolerance each candidate uses, plain and ragged; None when none was checked."""
    series, rows = series_of(data), []
    for row in data.summary.rows:
        marks, worst = [], []
        for cell in data.candidates(row):
            plain = series[cell.arm]
            ragged = replace(plain, label=f"{plain.label}, ragged masks", open=True)
            for entry, use in ((plain, cell.use), (ragged, data.ragged.get((row.shape.id, cell.arm)))):
                marks += _ratio_mark(entry, use, f"{entry.label}, shape {row.shape.id}", "the tolerance")
                worst += [] if use is None else [use]
        word = "not finite" if worst and not math.isfinite(max(worst)) else number(max(worst, default=None))
        rows.append(Row(row, marks, *((word, max(worst) <= 1) if worst else _outcome(data, row))))
    return _by_shape(
        data, width, titled, rows, None, "Use of the tolerance by shape", "worst error / tolerance (logarithmic)",
        "The worst error against the baseline in units of the tolerance, on a logarithmic axis. Above 1 fails.",
        ("1: fails beyond", "bad"),
    )  # fmt: skip


def truth(data: PageData, width: float, titled: bool = False) -> Chart | None:
    """Draw each candidate's error against fp64 in units of eager's own, by input; None when none was tried.

    One candidate has a marker for each input. Several candidates have their own markers; titles name the input.
    """
    series, rows = series_of(data), []
    for row in data.summary.rows:
        marks, passed = [], []
        for cell in data.candidates(row):
            for place, check in enumerate(data.truth.get((row.shape.id, cell.arm), {}).values()):
                entry = series[cell.arm]
                if len(data.meta.candidates) == 1:
                    entry = Series(check.name, *CANDIDATE_STYLES[place % len(CANDIDATE_STYLES)])
                passed.append(check.passed)
                title = f"{cell.arm}, shape {row.shape.id}, {check.name}"
                marks += _ratio_mark(entry, check.max_ratio, title, "eager's own error")
        word = "not tried" if not passed else "" if all(passed) else "fails"
        rows.append(Row(row, marks, word, all(passed)))
    return _by_shape(
        data, width, titled, rows, None, "Error against fp64 by shape", "worst error / eager's own (logarithmic)",
        "The worst error against float64 divided by the eager baseline's own, on a logarithmic axis, a mark for each "
        "stress input. Below 1 is closer to float64 than eager.",
        ("1: as eager", "muted"),
    )  # fmt: skip


def regimes(data: PageData, width: float, titled: bool = False) -> Chart | None:
    """Draw host time against device time of eager, predicted and measured; None when every shape is infeasible."""
    rows = [row for row in data.summary.rows if row.regime in REGIME_MARKERS and not row.profiled]
    places: dict[str, list[tuple[float, float, Series]]] = {}
    for row in rows:
        predicted = Series(f"{row.regime}, predicted", REGIME_MARKERS[row.regime], "muted", True)
        cost, eager = data.predicted(row), row.eager
        places[row.shape.id] = [(cost["launch_s"] * 1e3, cost["device_s"] * 1e3, predicted)]
        if row.measured_regime and eager.host_ms and eager.device_ms:
            right = row.measured_regime == row.regime
            words, colour = ("measured as predicted", "s0") if right else ("measured, not predicted", "bad")
            measured = Series(f"{row.measured_regime}, {words}", REGIME_MARKERS[row.measured_regime], colour)
            places[row.shape.id].append((eager.host_ms.centre, eager.device_ms.centre, measured))
    if not rows:
        return None
    figure = new_figure(width)
    top = _heading(figure, data, "Regime map") if titled else 8
    points = sorted((point for found in places.values() for point in found), key=lambda point: not point[2].open)
    top = legend(figure, dict.fromkeys(series for _, _, series in points), top)
    axes = _plane(figure, top, "host: dispatch of one eager forward, ms", "device, ms")
    across, up = log_limits([host for host, _, _ in points]), log_limits([device for _, device, _ in points])
    log_axes(axes, across, up)
    for factor in (1.0, BORDERLINE, 1 / BORDERLINE):
        colour, line = ("ink", "-") if factor == 1 else ("muted", (0, (4, 3)))
        low, high = max(across[0], up[0] / factor), min(across[1], up[1] / factor)
        if low < high:
            axes.plot((low, high), (low * factor, high * factor), color=LIGHT[colour], linewidth=1.2, linestyle=line)
    for name, found in places.items():
        if len(found) > 1:
            axes.plot(*zip(*(place[:2] for place in found), strict=True), color=LIGHT["muted"], linewidth=0.8)
        for host, device, series in found:
            title = f"shape {name}, {series.label}: host {number(host)}, device {number(device)} ms"
            draw_mark(axes, host, device, series, title)
    label_regions(axes)
    place_labels(axes, [(*found[-1][:2], shorten(name, 90)) for name, found in places.items()])
    return Chart(
        figure, "Regime map",
        "The host's dispatch time of one eager forward against its device time, both logarithmic. Below the diagonal "
        "the host is the limit (launch), above it the device. An open mark is the prediction, a filled one the "
        "measurement. A line joins the two. The prediction table has the figures.",
    )  # fmt: skip


def label_regions(axes: Axes) -> None:
    """Name both regions of the regime map where the whole text lies in its region and covers nothing."""
    frame, taken, to_data = axes.get_window_extent(), boxes_of(axes), axes.transData.inverted()
    left, right = (0.01, "left"), (0.99, "right")
    for text, above, heights, sides in (
        (DEVICE_LIMIT, True, range(95, 0, -5), (left, right)),
        (HOST_LIMIT, False, range(3, 98, 5), (right, left)),
    ):
        for height, (side, align) in itertools.product(heights, sides):
            label = axes.text(
                side, height / 100, text, transform=axes.transAxes, ha=align, color=LIGHT["muted"], va="baseline"
            )
            box = label.get_window_extent()
            in_region = all((device > host) == above for host, device in to_data.transform(box.corners()))
            if in_region and is_free(box, frame, taken):
                break
            label.remove()


def roofline(data: PageData, width: float, titled: bool = False) -> Chart | None:
    """Draw each shape's predicted and measured place; None when no shape has any work.

    Across: FLOPs a byte of the unfused baseline, the same for every arm of a shape. Up: the baseline's FLOPs over an
    arm's time. A candidate that moves fewer bytes or skips masked work can stand above the roof.
    """
    marks = {row.shape.id: (work["flops"] / work["bytes"], _roof_marks(data, row, work["flops"]))
             for row in data.summary.rows
             if (work := data.predicted(row))["flops"] > 0 and work["bytes"] > 0}  # fmt: skip
    if not marks:
        return None
    figure = new_figure(width)
    top = _heading(figure, data, "Roofline by shape") if titled else 8
    entries = dict.fromkeys(mark.series for _, row in marks.values() for mark in row)
    scale, prefix = unit(max(rate for _, rate in data.peaks.values()))
    axes = _plane(figure, legend(figure, entries, top), "FLOPs a byte, unfused baseline", f"{prefix}FLOP/s")
    places = [(x, mark.value) for x, row in marks.values() for mark in row]
    dtypes = {shape.dtype for shape in data.meta.shape_list()}
    labels = draw_roofs(axes, places, data.peaks, data.profile.copy_bytes_per_s, dtypes)
    for name, (x, row) in marks.items():
        heights = [mark.value / scale for mark in row]
        axes.plot((x, x), (min(heights), max(heights)), color=LIGHT["muted"], linewidth=0.8)
        labels.append((x, max(heights), shorten(name, 90)))
        for mark, height in zip(row, heights, strict=True):
            draw_mark(axes, x, height, mark.series, mark.title, 8.0)
    place_labels(axes, labels)
    return Chart(
        figure, "Roofline by shape",
        "The baseline's FLOPs over an arm's time, against FLOPs a byte of the unfused baseline, both logarithmic, "
        "under the device's copy and matrix rates. A line joins a shape's places. The prediction table has the times.",
    )  # fmt: skip


def draw_roofs(
    axes: Axes, places: Sequence[tuple[float, float]], peaks: dict[str, tuple[str, float]], bandwidth: float,
    solid: set[str],
) -> list[tuple[float, float, str]]:  # fmt: skip
    """Scale axes for points (FLOPs a byte, FLOP/s) and draw the copy roof and each matrix roof.

    `peaks` maps a dtype to (rate's name, FLOP/s); roofs of dtypes outside `solid` are dashed. Returns the roofs'
    labels for `place_labels`.
    """
    top = max(rate for _, rate in peaks.values())
    scale, prefix = unit(top)
    sides = [rate / bandwidth * side for _, rate in peaks.values() for side in (0.5, 3)]
    across = log_limits([x for x, _ in places] + sides)
    up = log_limits([y for _, y in places] + [top * 2, bandwidth * across[0] * 1.5])
    log_axes(axes, across, (up[0] / scale, up[1] / scale))
    start, end = max(across[0], up[0] / bandwidth), min(top / bandwidth, across[1])
    ink = {"color": LIGHT["ink"], "linewidth": 1.5}
    axes.plot((start, end), (start * bandwidth / scale, end * bandwidth / scale), **ink)
    middle = start**0.75 * end**0.25
    copy_scale, copy_prefix = unit(bandwidth)
    labels = [(middle, middle * bandwidth / scale, f"copy {number(bandwidth / copy_scale)} {copy_prefix}B/s")]
    for dtype, (name, peak) in sorted(peaks.items(), key=lambda entry: (-entry[1][1], entry[0])):
        ridge = min(max(peak / bandwidth, across[0]), across[1])
        axes.plot((ridge, across[1]), (peak / scale,) * 2, linestyle="-" if dtype in solid else (0, (4, 3)), **ink)
        labels.append((math.sqrt(ridge * across[1]), peak / scale, f"{number(peak / scale)} {prefix}FLOP/s {name}"))
    return labels


def unit(rate: float) -> tuple[float, str]:
    """Return the scale and prefix that keep a CPU's figures from being all zeros."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


PLOT_KINDS: dict[str, Callable[..., Chart | None]] = {
    "latency": latency,
    "roofline": roofline,
    "regimes": regimes,
    "tolerance": tolerance,
    "fp64": truth,
}
SUFFIXES = (".svg", ".png")


def draw(kind: str, data: PageData, width: float = WIDE, titled: bool = False) -> Chart | None:
    """Draw one kind of chart; `titled` adds a heading and the run's id, for files that stand alone."""
    with looks():
        return PLOT_KINDS[kind](data, width, titled)


def plot_kind(path: Path) -> str:
    """Return the kind of chart that a file's name asks for: its stem, or what follows the stem's last dash.

    Raises `EvaluationError` for another name or ending.
    """
    kind = path.stem.rpartition("-")[2]
    if kind not in PLOT_KINDS or path.suffix not in SUFFIXES:
        raise EvaluationError(
            f"{path}: a plot's file is named after its kind and ends in {' or '.join(SUFFIXES)}, as in latency.svg or "
            f"h200-roofline.png; the kinds are {', '.join(PLOT_KINDS)}"
        )
    return kind


def write_plot(data: PageData, path: Path) -> None:
    """Draw a run's chart into an SVG or PNG file; the same records give the same bytes."""
    chart = draw(plot_kind(path), data, titled=True)
    if chart is None:
        raise EvaluationError(f"{path}: run {data.meta.id} measured nothing that a {plot_kind(path)} plot shows")
    save_chart(chart, path)


def _heading(figure: Figure, data: PageData, title: str) -> float:
    room = figure.get_figwidth() * 72 - 2 * MARGIN
    write_text(figure, MARGIN, 24, shorten(f"{title}, {data.device}", room / 1.1, 14), fontsize=14, fontweight="bold")
    started = data.meta.started_at[:10]
    write_text(figure, MARGIN, 42, shorten(f"run {data.meta.id}, {started}", room, 11), "muted", fontsize=11)
    return 54.0


def _by_shape(
    data: PageData, width: float, titled: bool, rows: list[Row], series: list[Series] | None, title: str, axis: str,
    description: str, limit: tuple[str, str] | None = None,
) -> Chart | None:  # fmt: skip
    """Draw a row for each shape on one logarithmic axis; None without any mark.

    `series` gives the order of the legend, `limit` names and colours a line at 1.
    """
    drawn = dict.fromkeys(mark.series for row in rows for mark in row.marks)
    shown = [entry for entry in series or drawn if entry in drawn]
    if not shown:
        return None
    figure = new_figure(width)
    top = legend(figure, shown, _heading(figure, data, title) if titled else 8) + (26 if limit else 8)
    beside = width >= 600
    names = min(max(text_width(row.name) for row in rows) + 14, width * 0.34) if beside else 0
    words = max(text_width(row.word, weight="bold") for row in rows) + 14
    height = ROW if beside else ROW + 16
    bottom = top + height * len(rows)
    axes = new_axes(figure, bottom + 46, MARGIN + names + 8, top, width - MARGIN - words - 8, bottom)
    values = [value for row in rows for mark in row.marks for value in (mark.value, mark.low, mark.high) if value]
    log_axes(axes, log_limits(values + ([1.0] if limit else [])))
    axes.set(ylim=(bottom, top), yticks=[])
    for index, row in enumerate(rows):
        _draw_row(figure, axes, row, top + index * height, height, names or width - 2 * MARGIN, index % 2 == 0)
    half = text_width(axis) / 2
    middle = min(max((MARGIN + names + width - MARGIN - words) / 2, MARGIN + half), width - MARGIN - half)
    write_text(figure, middle, bottom + 36, axis, "muted", ha="center")
    if limit:
        text, colour = limit
        axes.axvline(1.0, color=LIGHT[colour], linewidth=1.5, linestyle=(0, (4, 3)), zorder=1.5)
        x = axes.transData.transform((1.0, top))[0]
        half = text_width(text) / 2
        write_text(figure, min(max(x, MARGIN + half), width - MARGIN - half), top - 6, text, colour, ha="center")
    return Chart(figure, title, description)


def _draw_row(figure: Figure, axes: Axes, row: Row, y: float, height: float, names: float, banded: bool) -> None:
    """Draw one shape's band, name, marks and word; the axes' vertical unit is a pixel from the figure's top."""
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import blended_transform_factory

    width, middle = figure.get_figwidth() * 72, y + height - ROW / 2
    if banded:
        band = Rectangle(
            (MARGIN / width, y), 1 - 2 * MARGIN / width, height, color=LIGHT["band"], linewidth=0, clip_on=False,
            transform=blended_transform_factory(figure.transFigure, axes.transData), zorder=0,
        )  # fmt: skip
        axes.add_patch(band)
    write_text(figure, MARGIN + 6, middle + 4 if height == ROW else y + 14, shorten(row.name, names - 12))
    for mark in row.marks:
        if mark.low and mark.high / mark.low > 1.01:
            axes.plot((mark.low, mark.high), (middle, middle), color=LIGHT[mark.series.colour], linewidth=1.5)
        draw_mark(axes, mark.value, middle, mark.series, mark.title)
    colour = "ink" if row.good else "bad"
    write_text(figure, width - MARGIN - 6, middle + 4, row.word, colour, ha="right", fontweight="bold")


def _plane(figure: Figure, top: float, across: str, up: str) -> Axes:
    width = figure.get_figwidth() * 72
    left, right, top = 62, width - MARGIN - 4, top + 34
    bottom = top + min(right - left, 340.0)
    axes = new_axes(figure, bottom + 46, left, top, right, bottom)
    write_text(figure, MARGIN, top - 12, up, "muted", fontsize=FONT)
    write_text(figure, (left + right) / 2, bottom + 36, across, "muted", ha="center")
    return axes


def _time(series: Series, cell: Cell) -> Mark:
    event = cell.event_ms
    title = f"{series.label}: {number(event.centre)} ms ({number(event.low)}-{number(event.high)})"
    if cell.status != "ok":
        title += f", {STATUS_WORDS.get(cell.status, cell.status)}"
    return Mark(series, event.centre, title, event.low, event.high)


def _ratio_mark(series: Series, value: float | None, what: str, of: str) -> list[Mark]:
    if value is None or not math.isfinite(value) or value <= 0:
        return []
    return [Mark(series, value, f"{what}: {number(value)} of {of}")]


def _outcome(data: PageData, row: ShapeRow) -> tuple[str, bool]:
    """Return the word at a row's end: one candidate's speedup or status; of several, how many failed."""
    cells = data.candidates(row)
    failed = [cell for cell in cells if cell.status in FAILED]
    status = "" if cells[0].status == "ok" else STATUS_WORDS.get(cells[0].status, cells[0].status)
    if len(cells) == 1:
        speedup = cells[0].speedup
        return f"{times(speedup.centre)}x" if speedup and not failed else status, not failed
    if failed:
        return f"{len(failed)} of {len(cells)} fail", False
    return status if len({cell.status for cell in cells}) == 1 else "", True


def _roof_marks(data: PageData, row: ShapeRow, flops: float) -> list[Mark]:
    """Return the predicted and measured FLOP/s of eager and each candidate on a shape; the best one last."""
    styles = series_of(data)
    found = [] if row.profiled else [(Series("eager predicted", "x", "muted"), row.predicted_ms)]
    for cell in (row.eager, *data.candidates(row)):
        style = styles[cell.arm]
        if cell.arm != EAGER and cell.predicted_ms:
            found.append((replace(style, label=f"{style.label} predicted", open=True), cell.predicted_ms))
        if cell.event_ms:
            found.append((style, cell.event_ms.centre))
    marks = []
    for series, time_ms in found:
        rate = flops / (time_ms / 1e3)
        scale, prefix = unit(rate)
        title = f"shape {row.shape.id}, {series.label}: {number(time_ms)} ms, {number(rate / scale)} {prefix}FLOP/s"
        marks.append(Mark(series, rate, title))
    return marks
