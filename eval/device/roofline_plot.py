"""Draw a profiled forward under its device's roofline."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rooflane.eval.device.operations import ForwardProfile, Operation

# Okabe and Ito's palette, told apart with any colour vision.
POINT_COLOUR, BAR_COLOUR, ROOF_COLOUR = "#0072B2", "#D55E00", "#444444"
LABELLED = 8
LABEL_WIDTH = 16
TITLE_PAD = 18  # points; room for a label between the axes and their title


def plot_roofline(forward: ForwardProfile, path: str | Path) -> None:
    """Write the roofline plot of `forward` to an SVG or PNG file.

    Left: matrix products, FLOPs a byte against achieved arithmetic; a marker's area is the operation's share of the
    time. Right: the longest operations without matrix products, which have no place on that plane, by bandwidth.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Names of arms and shapes are text: a $ in one starts no formula. The salt makes the SVG's ids repeatable.
    with matplotlib.rc_context({"text.parse_math": False, "svg.hashsalt": "rooflane"}):
        figure = Figure(figsize=(12, 5.4), layout="constrained")
        roof, traffic = figure.subplots(1, 2)
        _draw_roof(roof, forward)
        _draw_traffic(traffic, forward)
        shape = forward.shape
        figure.suptitle(f"{forward.arm} forward, shape {shape.id} ({shape.label()}) on {forward.profile.title}")
        undated = {"Date": None} if Path(path).suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=undated)


def _area(operation: Operation, forward: ForwardProfile) -> float:
    return 30 + 600 * operation.seconds / forward.busy_s


def _unit(rate: float) -> tuple[float, str]:
    """Return the scale and prefix that keep a CPU's figures from being all zeros."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


def _draw_roof(axes, forward: ForwardProfile) -> None:
    """Draw the two roofs and the matrix products under them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    peak, bandwidth = forward.profile.matmul_flops(forward.shape.dtype), forward.profile.copy_bytes_per_s
    scale, prefix = _unit(peak)
    traffic_scale, traffic_prefix = _unit(bandwidth)
    points = [operation for operation in forward.operations if operation.intensity]
    ridge = peak / bandwidth
    left = min([ridge, *(point.intensity for point in points)]) / 3
    right = max([ridge, *(point.intensity for point in points)]) * 3
    rates = [left * bandwidth, peak, *(point.flops_per_s for point in points)]
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(rates) / scale / 3, max(rates) / scale * 2))

    axes.plot([left, ridge, right], [left * bandwidth / scale, peak / scale, peak / scale], color=ROOF_COLOUR)
    near = {"textcoords": "offset points", "fontsize": 9, "color": ROOF_COLOUR}
    axes.annotate(f"{peak / scale:.3g} {prefix}FLOP/s", (right, peak / scale), xytext=(-4, 4), ha="right", **near)
    foot = (left, left * bandwidth / scale)
    axes.annotate(f"{bandwidth / traffic_scale:.3g} {traffic_prefix}B/s", foot, xytext=(4, -10), **near)
    for point in points:
        place = (point.intensity, point.flops_per_s / scale)
        axes.scatter(*place, s=_area(point, forward), color=POINT_COLOUR, alpha=0.7)
    _label(axes, [(point.name, point.intensity, point.flops_per_s / scale, _area(point, forward)) for point in points])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel(f"achieved {prefix}FLOP/s")
    axes.set_title("matrix products" if points else "no operation tells its FLOPs", fontsize=10, pad=TITLE_PAD)
    axes.grid(True, which="major", linewidth=0.4)


def _label(axes, points: list[tuple[str, float, float, float]]) -> None:
    """Write the names below the points (name, place, marker area); near points share one label below the lowest."""
    groups: list[tuple[list[str], float, float, float]] = []
    for name, across, up, area in sorted(points, key=lambda point: (point[1], point[2], point[0])):
        near = next((group for group in groups if 0.8 < across / group[1] < 1.25 and up / group[2] < 1.6), None)
        if near:
            near[0].append(name)
        else:
            groups.append(([name], across, up, area))
    for names, across, up, area in groups:
        text = textwrap.fill(", ".join(names), LABEL_WIDTH)
        below = (0, -4 - area**0.5 / 2)
        axes.annotate(text, (across, up), xytext=below, textcoords="offset points", ha="center", va="top", fontsize=8)


def _draw_traffic(axes, forward: ForwardProfile) -> None:
    """Draw the longest other operations as bars of achieved bandwidth against the copy rate."""
    known = [operation for operation in forward.operations if not operation.flops and operation.bytes_per_s]
    rows = sorted(known, key=lambda operation: operation.seconds, reverse=True)[:LABELLED]
    limit = forward.profile.copy_bytes_per_s
    scale, prefix = _unit(limit)
    names = [f"{row.name}, {row.seconds / forward.busy_s:.0%} of the time" for row in rows]
    axes.barh(names, [row.bytes_per_s / scale for row in rows], color=BAR_COLOUR, alpha=0.8)
    axes.invert_yaxis()
    axes.axvline(limit / scale, color=ROOF_COLOUR, linestyle="--")
    # Above the axes: among the bars every place can be a bar's.
    label = {"textcoords": "offset points", "xytext": (0, 3), "ha": "center", "fontsize": 9, "color": ROOF_COLOUR}
    axes.annotate(
        f"copy {limit / scale:.3g} {prefix}B/s", (limit / scale, 1), xycoords=("data", "axes fraction"), **label
    )
    axes.set_xlabel(f"achieved {prefix}B/s")
    axes.set_title(
        f"the longest {len(rows)} of {len(known)} others" if rows else "nor their bytes", fontsize=10, pad=TITLE_PAD
    )
    axes.tick_params(axis="y", labelsize=8)
