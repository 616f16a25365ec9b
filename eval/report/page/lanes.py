"""Charts with a lane for each shape and one logarithmic axis: latency, use of tolerance, error against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooflane.eval.report.page.palette import Series
from rooflane.eval.report.page.scale import LogScale, log_scale
from rooflane.eval.report.page.scene import Box, Line, Marker, Scene, Text, shorten, text_width

WIDE, NARROW = 860, 360
MARGIN = 12
LANE = 24
TICKS_APART = 10
# Below this width a lane's name stands above it instead of beside it.
NAMES_BESIDE = 600


@dataclass(frozen=True)
class Mark:
    """A series' value in a lane, with the range it was seen in."""

    series: Series
    value: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Lane:
    """One row: a name, its marks, and a word at the right end."""

    name: str
    marks: tuple[Mark, ...]
    word: str = ""
    good: bool = True


@dataclass(frozen=True)
class Limit:
    """A line across all lanes at a value."""

    value: float
    label: str
    role: str = "bad"


def lane_chart(
    scene: Scene, lanes: Sequence[Lane], series: Sequence[Series], axis: str, limit: Limit | None = None, top: float = 0
) -> Scene:
    """Fill a scene with lanes, a legend above and the axis below; sets the scene's height."""
    beside = scene.width >= NAMES_BESIDE
    names = max((text_width(lane.name) for lane in lanes), default=0) + 14 if beside else 0
    names = min(names, scene.width * 0.34)
    words = max((text_width(lane.word, bold=True) for lane in lanes), default=0) + 14
    left, right = MARGIN + names, scene.width - MARGIN - words
    values = [value for lane in lanes for mark in lane.marks for value in (mark.low, mark.high)]
    scale = log_scale(values + ([limit.value] if limit else []), left + 8, right - 8)

    y = legend(scene, series, top + 8)
    if limit:
        _limit_label(scene, scale, limit, y + 12)
        y += 18
    height, inner = (LANE, 0) if beside else (LANE + 16, 17)
    bottom = y + height * len(lanes)
    _ticks(scene, scale, bottom, axis)
    for index, lane in enumerate(lanes):
        if index % 2 == 0:
            scene.add(Box(MARGIN, y, scene.width - 2 * MARGIN, height))
        for value, _ in scale.ticks(TICKS_APART):
            scene.add(Line(scale(value), y + inner, scale(value), y + height))
        if limit:
            x = scale(limit.value)
            scene.add(Line(x, y + inner, x, y + height, limit.role, 1.5, dashed=True))
        _draw_lane(scene, lane, scale, y, height, names if beside else 0.0)
        y += height
    scene.height = bottom + 44
    return scene


def legend(scene: Scene, series: Sequence[Series], y: float) -> float:
    """Write forms and names in as many lines as they need; return where the last ends."""
    x, line = float(MARGIN), 20
    y += 12
    for entry in series:
        label = shorten(entry.label, scene.width - 2 * MARGIN - 20)
        width = 18 + text_width(label) + 14
        if x > MARGIN and x + width - 14 > scene.width - MARGIN:
            x, y = float(MARGIN), y + line
        scene.add(Marker(x + 7, y - 4, entry.form, entry.role, open=entry.open, title=entry.label))
        scene.add(Text(x + 18, y, label))
        x += width
    return y + 10


def heading(scene: Scene, text: str) -> float:
    """Write a title above the picture, for files that stand alone; return where it ends."""
    scene.add(Text(MARGIN, 24, shorten(text, (scene.width - 2 * MARGIN) / 1.1, 14), size=14, bold=True))
    return 32.0


def _limit_label(scene: Scene, scale: LogScale, limit: Limit, y: float) -> None:
    """Name the limit above its line, within the picture."""
    half = text_width(limit.label) / 2
    x = min(max(scale(limit.value), MARGIN + half), scene.width - MARGIN - half)
    scene.add(Text(x, y, limit.label, "middle", limit.role))


def _ticks(scene: Scene, scale: LogScale, bottom: float, axis: str) -> None:
    """Write the ticks' labels and the axis' name below the lanes."""
    for value, label in scale.ticks(TICKS_APART):
        x = scale(value)
        scene.add(Line(x, bottom, x, bottom + 4), Text(x, bottom + 17, label, "middle", "muted"))
    middle, half = (scale.start + scale.end) / 2, text_width(axis) / 2
    middle = min(max(middle, MARGIN + half), scene.width - MARGIN - half)
    scene.add(Text(middle, bottom + 35, axis, "middle", "muted"))


def _draw_lane(scene: Scene, lane: Lane, scale: LogScale, y: float, height: float, names: float) -> None:
    """Draw one lane's name, marks and word."""
    middle = y + height - LANE / 2
    if names:
        scene.add(Text(MARGIN + 6, middle + 4, shorten(lane.name, names - 12)))
    else:
        scene.add(Text(MARGIN + 6, y + 14, shorten(lane.name, scene.width - 2 * MARGIN - 12)))
    for mark in lane.marks:
        start, end = scale(mark.low), scale(mark.high)
        if end - start > 1:
            scene.add(Line(start, middle, end, middle, mark.series.role, 1.5))
    for mark in reversed(lane.marks):
        series = mark.series
        scene.add(Marker(scale(mark.value), middle, series.form, series.role, open=series.open, title=mark.title))
    if lane.word:
        x = scene.width - MARGIN - 6
        scene.add(Text(x, middle + 4, lane.word, "end", "ink" if lane.good else "bad", bold=True))
