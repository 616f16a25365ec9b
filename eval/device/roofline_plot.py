"""Draw a profiled forward under its device's roofline."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rooflane.eval.device.operations import ForwardProfile, Operation
from rooflane.eval.report.escape import plain
from rooflane.eval.report.page.charts import draw_roofs, unit
from rooflane.eval.report.page.drawing import (
    LIGHT,
    MARGIN,
    TITLE,
    Chart,
    looks,
    new_axes,
    new_figure,
    place_labels,
    save_chart,
    shorten,
    write_text,
)
from rooflane.eval.report.page.source import matrix_rates
from rooflane.eval.report.table import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 1080, 470
TOP, BOTTOM = 84, HEIGHT - 46
LISTED = 8  # bars of operations without matrix products
LABEL_WIDTH = 24  # characters of a line


def plot_roofline(forward: ForwardProfile, path: str | Path) -> None:
    """Write the roofline plot of `forward` to an SVG or PNG file; raises `EvaluationError` for a bad place.

    Left: matrix products, FLOPs a byte against achieved arithmetic. A mark's area is the operation's share of the
    time. Right: the longest operations without matrix products, by achieved bandwidth.
    """
    with looks():
        chart = _draw(forward)
    save_chart(chart, Path(path))


def _draw(forward: ForwardProfile) -> Chart:
    shape = forward.shape
    title = f"{forward.arm} forward, shape {shape.id} ({shape.label()}) on {forward.profile.title}"
    figure = new_figure(WIDTH)
    roof = new_axes(figure, HEIGHT, 62, TOP, 520, BOTTOM)
    traffic = new_axes(figure, HEIGHT, 770, TOP, WIDTH - 24, BOTTOM)
    write_text(figure, MARGIN, 24, shorten(title, WIDTH * 0.85, 14), fontsize=14, fontweight="bold")
    points = [operation for operation in forward.operations if operation.intensity]
    known = [operation for operation in forward.operations if not operation.flops and operation.bytes_per_s]
    longest = sorted(known, key=lambda operation: operation.seconds, reverse=True)[:LISTED]
    _draw_products(roof, points, forward)
    _draw_traffic(traffic, longest, forward)
    prefixes = unit(forward.profile.matmul_flops(shape.dtype))[1], unit(forward.profile.copy_bytes_per_s)[1]
    left = "matrix products" if points else "no operation reports its FLOPs"
    right = f"the longest {len(longest)} of {len(known)} others" if longest else "no operation reports its bytes"
    write_text(figure, MARGIN, TOP - 34, left)
    write_text(figure, 560, TOP - 34, right)
    write_text(figure, MARGIN, TOP - 12, f"achieved {prefixes[0]}FLOP/s", "muted")
    write_text(figure, 291, HEIGHT - 10, "FLOPs a byte", "muted", ha="center")
    write_text(figure, 913, HEIGHT - 10, f"achieved {prefixes[1]}B/s", "muted", ha="center")
    return Chart(
        figure, title, "Left: matrix products under the device's roofs. Right: bandwidth of the longest others."
    )


def _draw_products(axes: Axes, points: list[Operation], forward: ForwardProfile) -> None:
    """Draw the roofs and the matrix products; products at nearly one place share a label."""
    dtype = forward.shape.dtype
    rates = matrix_rates(forward.profile, {dtype}, forward.device)
    places = [(point.intensity, point.flops_per_s) for point in points]
    labels = draw_roofs(axes, places, {dtype: rates[dtype]}, forward.profile.copy_bytes_per_s, {dtype})
    scale = unit(rates[dtype][1])[0]
    groups: list[tuple[list[str], float, float]] = []
    for point in sorted(points, key=lambda point: (point.intensity, point.flops_per_s, point.name)):
        across, up = point.intensity, point.flops_per_s / scale
        title = f"{point.name}: {number(up)} {unit(rates[dtype][1])[1]}FLOP/s, {number(across)} FLOPs a byte"
        size = (30 + 600 * point.seconds / forward.busy_s) ** 0.5
        axes.plot([across], [up], "o", markersize=size, color=LIGHT["s0"], alpha=0.7, gid=TITLE + plain(title))
        near = next((group for group in groups if 0.8 < across / group[1] < 1.25 and 0.6 < up / group[2] < 1.6), None)
        if near:
            near[0].append(point.name)
        else:
            groups.append(([point.name], across, up))
    place_labels(
        axes, labels + [(across, up, textwrap.fill(", ".join(names), LABEL_WIDTH)) for names, across, up in groups]
    )


def _draw_traffic(axes: Axes, rows: list[Operation], forward: ForwardProfile) -> None:
    limit = forward.profile.copy_bytes_per_s
    scale, prefix = unit(limit)
    for place, row in enumerate(rows):
        title = f"{row.name}: {number(row.bytes_per_s / scale)} {prefix}B/s"
        axes.barh([place], [row.bytes_per_s / scale], color=LIGHT["s1"], gid=TITLE + plain(title))
    names = [shorten(f"{row.name}, {row.seconds / forward.busy_s:.0%} of the time", 200, 11) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=11, color=LIGHT["ink"])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.axvline(limit / scale, color=LIGHT["ink"], linestyle=(0, (4, 3)))
    axes.set_xlim(0, max([limit, *(row.bytes_per_s for row in rows)]) * 1.15 / scale)
    axes.grid(True, axis="x", color=LIGHT["rule"])
    axes.annotate(
        f"copy {number(limit / scale)} {prefix}B/s", (limit / scale, 1), (0, 5), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", color=LIGHT["ink"], fontsize=11,
    )  # fmt: skip
