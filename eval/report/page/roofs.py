"""The roofline of a run: every shape's predicted and measured place under the device's roofs."""

from __future__ import annotations

from rooflane.eval.report.page.charts import series_of
from rooflane.eval.report.page.lanes import heading, legend
from rooflane.eval.report.page.palette import Series
from rooflane.eval.report.page.planes import LABEL, draw_axes, frame_below
from rooflane.eval.report.page.scale import LogScale, log_scale
from rooflane.eval.report.page.scene import Line, Marker, Scene, place_labels, shorten
from rooflane.eval.report.page.source import EAGER, PageData, ShapePlace, number

Mark = tuple[Series, float, str]


def roofline(data: PageData, width: float, titled: bool = False) -> Scene | None:
    """Draw each shape's predicted and measured place; None when the run has no shape with any work.

    Across: FLOPs a byte of the unfused baseline, which every arm of a shape shares. Up: the baseline's FLOPs over an
    arm's time, so a candidate that moves fewer bytes or skips masked work can stand above the roof.
    """
    shapes = [shape for shape in data.shapes if shape.flops > 0 and shape.bytes > 0]
    if not shapes:
        return None
    scene = Scene(
        width,
        0,
        "Roofline by shape",
        "The baseline's FLOPs over an arm's time, against FLOPs a byte of the unfused baseline, both logarithmic, "
        "under the device's copy and matrix rates. A line joins a shape's places. The prediction table has the times.",
    )
    marks = {shape.id: _marks(data, shape) for shape in shapes}
    shown = {series.label: series for row in marks.values() for series, _, _ in row}
    top = legend(scene, list(shown.values()), heading(scene, f"Roofline by shape, {data.device}") if titled else 0.0)
    left, right, head, foot = frame_below(scene, top)
    ridges = [peak / data.bandwidth for peak in data.peaks.values()]
    across = log_scale([shape.flops / shape.bytes for shape in shapes] + [ridge * 3 for ridge in ridges], left, right)
    rates = [rate for row in marks.values() for _, rate, _ in row]
    up = log_scale([*rates, max(data.peaks.values()) * 2, data.bandwidth * across.low * 1.5], foot, head)
    scale, prefix = _unit(max(data.peaks.values()))
    draw_axes(scene, across, up, scale, "FLOPs a byte, unfused baseline", f"{prefix}FLOP/s")
    roof_labels = _draw_roofs(data, scene, across, up, scale, prefix)
    labels = []
    for shape in shapes:
        x = across(shape.flops / shape.bytes)
        heights = [up(rate) for _, rate, _ in marks[shape.id]]
        scene.add(Line(x, max(heights), x, min(heights), "muted", 0.8))
        labels.append((x, min(heights), shorten(shape.id, LABEL)))
    for shape in shapes:
        x = across(shape.flops / shape.bytes)
        for series, rate, title in marks[shape.id]:
            scene.add(Marker(x, up(rate), series.form, series.role, 4.5, series.open, title))
    place_labels(scene, [*roof_labels, *labels], (left, head, right, foot))
    return scene


def _marks(data: PageData, shape: ShapePlace) -> list[Mark]:
    """Return how, at which FLOP/s and with which title each place of a shape is drawn; the best one last."""
    styles = series_of(data)
    marks = [_mark(shape, Series("", "eager predicted", "cross", "muted"), shape.predicted_ms)]
    for name in (EAGER, *data.candidates):
        arm = shape.arms.get(name)
        if arm is None:
            continue
        style = styles[name]
        if name != EAGER and arm.predicted_ms:
            predicted = Series(name, f"{style.label} predicted", style.form, style.role, True)
            marks.append(_mark(shape, predicted, arm.predicted_ms))
        if arm.event:
            marks.append(_mark(shape, style, arm.event.centre))
    return marks


def _mark(shape: ShapePlace, series: Series, time_ms: float) -> Mark:
    rate = shape.flops / (time_ms / 1e3)
    scale, prefix = _unit(rate)
    title = f"shape {shape.id}, {series.label}: {number(time_ms)} ms, {number(rate / scale)} {prefix}FLOP/s"
    return series, rate, title


def _unit(rate: float) -> tuple[float, str]:
    """Return the scale and prefix that keep a CPU's figures from being all zeros."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


def _draw_roofs(
    data: PageData, scene: Scene, across: LogScale, up: LogScale, scale: float, prefix: str
) -> list[tuple[float, float, str]]:
    """Draw the copy roof and each dtype's matrix roof; return their labels, to be placed when everything stands."""
    bandwidth, labels = data.bandwidth, []
    start = max(across.low, up.low / bandwidth)
    end = min(max(data.peaks.values()) / bandwidth, across.high)
    x1, y1, x2, y2 = across(start), up(bandwidth * start), across(end), up(bandwidth * end)
    scene.add(Line(x1, y1, x2, y2, "ink", 1.5))
    rate = f"{number(bandwidth / 1e12)} TB/s" if bandwidth >= 1e12 else f"{number(bandwidth / 1e9)} GB/s"
    labels.append(((3 * x1 + x2) / 4, (3 * y1 + y2) / 4, f"copy {rate}"))
    own = {shape.dtype for shape in data.shapes}
    for dtype, peak in sorted(data.peaks.items(), key=lambda entry: (-entry[1], entry[0])):
        ridge = min(max(peak / bandwidth, across.low), across.high)
        scene.add(Line(across(ridge), up(peak), across.end, up(peak), "ink", 1.5, dashed=dtype not in own))
        labels.append(((across(ridge) + across.end) / 2, up(peak), f"{number(peak / scale)} {prefix}FLOP/s {dtype}"))
    return labels
