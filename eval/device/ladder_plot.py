"""Draw a timed ladder under its roofs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooflane.eval.device.ladder import COPY, LADDERS, SIZE_NAMES
from rooflane.eval.report.escape import plain
from rooflane.eval.report.page.drawing import (
    LIGHT,
    MARGIN,
    TITLE,
    Chart,
    log_axes,
    log_limits,
    looks,
    new_axes,
    new_figure,
    save_chart,
    shorten,
    write_text,
)
from rooflane.eval.report.table import number

WIDTH, ROW = 900, 24
TOP, LEFT, RIGHT = 92, 190, 70
T = 1e12


def plot_ladder(report: Mapping[str, Any], path: Path) -> None:
    """Write a report of `time_ladder` as an SVG or PNG file: a mark for each arm, a line for each roof.

    Raises `EvaluationError` when the file cannot be written.
    """
    with looks():
        chart = _draw(report)
    save_chart(chart, path)


def _draw(report: Mapping[str, Any]) -> Chart:
    ladder, arms = report["ladder"], report["arms"]
    sizes = " x ".join(f"{name} {size}" for name, size in zip(SIZE_NAMES[ladder], report["sizes"], strict=True))
    unit = LADDERS[ladder][0].UNIT
    modes = {rung.mode for rung in LADDERS[ladder] if rung.name in arms}
    roofs = {mode: rate / T for mode, rate in report["roofs"].items() if mode in modes}
    if COPY in arms:
        roofs["copy"] = arms[COPY].rate / T
    bottom = TOP + ROW * len(arms)
    figure = new_figure(WIDTH)
    axes = new_axes(figure, bottom + 40, LEFT, TOP, WIDTH - RIGHT, bottom)
    title = f"The {ladder} ladder, {sizes}, on {report['device']}"
    write_text(figure, MARGIN, 24, shorten(title, WIDTH * 0.85, 14), fontsize=14, fontweight="bold")
    write_text(figure, MARGIN, 46, f"{unit}; round: a rung; diamond: the library or a copy; dashed: a roof", "muted")
    log_axes(axes, log_limits([arm.rate / T for arm in arms.values()] + list(roofs.values())))
    rungs = {rung.name for rung in LADDERS[ladder]}
    for place, (name, arm) in enumerate(arms.items()):
        rate, colour = arm.rate / T, LIGHT["s0" if name in rungs else "s1"]
        axes.axhline(place, color=LIGHT["rule"], linewidth=1)
        axes.plot([rate], [place], "o" if name in rungs else "D", markersize=9, color=colour,
                  gid=TITLE + plain(f"{name}: {number(rate)} {unit}"))  # fmt: skip
        axes.annotate(
            number(rate), (1, place), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", color=LIGHT["ink"], fontsize=11,
        )  # fmt: skip
    axes.set_yticks(range(len(arms)), [shorten(plain(name), LEFT - 20, 11) for name in arms], fontsize=11)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    # Modes of one rate share a line, and its label ends at it: labels of two lines then seldom meet.
    for level, rate in enumerate(sorted(set(roofs.values()))):
        names = ", ".join(name for name, own in roofs.items() if own == rate)
        axes.axvline(rate, color=LIGHT["ink"], linestyle=(0, (4, 3)))
        axes.annotate(
            f"{names} {number(rate)}", (rate, 1), (3, 4 + 12 * (level % 2)), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right", color=LIGHT["ink"], fontsize=11,
        )  # fmt: skip
    return Chart(figure, title, "A mark for each rung and each call of the library; a line for each roof.")
