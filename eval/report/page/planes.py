"""Charts with two logarithmic axes: what they share, and the regime map."""

from __future__ import annotations

from rooflane.eval.report.page.lanes import MARGIN, heading, legend
from rooflane.eval.report.page.palette import Series
from rooflane.eval.report.page.scale import LogScale, log_scale
from rooflane.eval.report.page.scene import (
    Line,
    Marker,
    Scene,
    Text,
    place_first_free,
    place_labels,
    shorten,
    text_width,
)
from rooflane.eval.report.page.source import PageData, ShapePlace, number

LEFT = 62  # room for the vertical axis' labels
LABEL = 90  # the widest a shape's name may be in a plane
BORDERLINE = 1.3
FORMS = {"launch": "triangle", "bandwidth": "square", "compute": "diamond"}


def regimes(data: PageData, width: float, titled: bool = False) -> Scene | None:
    """Draw predicted and measured host time against device time of eager: the larger one is the regime's.

    None when every shape is infeasible.
    """
    shapes = [shape for shape in data.shapes if shape.regime in FORMS]
    if not shapes:
        return None
    scene = Scene(
        width,
        0,
        "Regime map",
        "The host's dispatch time of one eager forward against its device time, both logarithmic. Below the diagonal "
        "the host is the limit (launch), above it the device. An open mark is the prediction, a filled one the "
        "measurement; a line joins the two. The prediction table has the figures.",
    )
    top = legend(scene, _legend(shapes), heading(scene, f"Regime map, {data.device}") if titled else 0.0)
    left, right, head, foot = frame_below(scene, top)
    known = [shape for shape in shapes if shape.measured_regime and shape.measured_host_ms and shape.measured_device_ms]
    across = log_scale([s.dispatch_ms for s in shapes] + [s.measured_host_ms for s in known], left, right)
    up = log_scale([s.device_ms for s in shapes] + [s.measured_device_ms for s in known], foot, head)
    draw_axes(scene, across, up, 1.0, "host: dispatch of one eager forward, ms", "device, ms")
    for factor in (1.0, BORDERLINE, 1 / BORDERLINE):
        _diagonal(scene, across, up, factor)
    places = {}
    for shape in shapes:
        x, y = across(shape.dispatch_ms), up(shape.device_ms)
        places[shape.id] = x, y
        said = f"shape {shape.id} predicted {shape.regime}: host {number(shape.dispatch_ms)}, "
        marks = [_mark(x, y, _series(shape, measured=False), said + f"device {number(shape.device_ms)} ms")]
        if shape in known:
            x2, y2 = across(shape.measured_host_ms), up(shape.measured_device_ms)
            scene.add(Line(x, y, x2, y2, "muted", 0.8))
            said = f"shape {shape.id} measured {shape.measured_regime}: host {number(shape.measured_host_ms)}, "
            marks.append(
                _mark(x2, y2, _series(shape, measured=True), said + f"device {number(shape.measured_device_ms)} ms")
            )
            places[shape.id] = x2, y2
        scene.add(*marks)
    corners = ((left + 6, "start"), (right - 6, "end"))
    place_first_free(scene, [Text(x, head + 14, "device is the limit", to, "muted") for x, to in corners])
    place_first_free(scene, [Text(x, foot - 8, "host is the limit", to, "muted") for x, to in reversed(corners)])
    labels = [(x, y, shorten(name, LABEL)) for name, (x, y) in places.items()]
    place_labels(scene, labels, (left, head, right, foot))
    return scene


def frame_below(scene: Scene, top: float) -> tuple[float, float, float, float]:
    """Set the scene's height and return left, right, top and bottom of its plane."""
    left, right = LEFT, scene.width - MARGIN - 4
    top += 24
    bottom = top + max(300.0, min((right - left) * 0.85, 430.0))
    scene.height = bottom + 46
    return left, right, top, bottom


def draw_axes(scene: Scene, across: LogScale, up: LogScale, unit: float, x_name: str, y_name: str) -> None:
    """Draw the grid, its labels and the axes' names; `unit` divides the vertical values."""
    for value, label in across.ticks(apart=12):
        x = across(value)
        scene.add(Line(x, up.end, x, up.start + 4), Text(x, up.start + 17, label, "middle", "muted"))
    scaled = LogScale(up.low / unit, up.high / unit, up.start, up.end)
    for value, label in scaled.ticks(apart=22):
        y = scaled(value)
        scene.add(Line(across.start - 4, y, across.end, y), Text(across.start - 8, y + 4, label, "end", "muted"))
    half = text_width(x_name) / 2
    middle = min(max((across.start + across.end) / 2, MARGIN + half), scene.width - MARGIN - half)
    scene.add(Text(middle, up.start + 36, x_name, "middle", "muted"))
    scene.add(Text(MARGIN, up.end - 12, y_name, role="muted"))


def _legend(shapes: list[ShapePlace]) -> list[Series]:
    """Return one entry for each kind of mark that is drawn."""
    found = {}
    for measured in (False, True):
        for shape in shapes:
            if not measured or shape.measured_regime in FORMS:
                entry = _series(shape, measured)
                found[entry.label] = entry
    return list(found.values())


def _series(shape: ShapePlace, measured: bool) -> Series:
    """Return how a shape's prediction or measurement is drawn; a wrong prediction shows in the measurement."""
    regime = shape.measured_regime if measured else shape.regime
    if not measured:
        return Series(regime, f"{regime}, predicted", FORMS[regime], "muted", True)
    if regime != shape.regime:
        return Series(regime, f"{regime}, measured, not predicted", FORMS[regime], "bad")
    return Series(regime, f"{regime}, measured as predicted", FORMS[regime], "s0")


def _mark(x: float, y: float, series: Series, title: str) -> Marker:
    return Marker(x, y, series.form, series.role, 5.0, series.open, title)


def _diagonal(scene: Scene, across: LogScale, up: LogScale, factor: float) -> None:
    """Draw where device time is `factor` times host time, within the frame; dashed at the borders."""
    low, high = max(across.low, up.low / factor), min(across.high, up.high / factor)
    if low < high:
        role, dashed = ("ink", False) if factor == 1 else ("muted", True)
        scene.add(Line(across(low), up(low * factor), across(high), up(high * factor), role, 1.2, dashed))
