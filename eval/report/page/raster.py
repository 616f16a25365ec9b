"""Paint a scene as PNG. No date and no version is written; the pixels depend on matplotlib's own font alone."""

from __future__ import annotations

from pathlib import Path

from rooflane.eval.report.page.palette import LIGHT
from rooflane.eval.report.page.scene import Box, Item, Line, Scene, Text
from rooflane.eval.report.page.svg import FORMS, STROKES, clean

POINTS_PER_PIXEL = 0.75
DPI = 192


def write_png(scene: Scene, path: Path) -> None:
    """Write the scene in its light colours, two pixels for each of its own."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = {"font.family": "DejaVu Sans", "text.usetex": False, "text.parse_math": False}
    with rc_context(looks):
        figure = Figure(figsize=(scene.width / 96, scene.height / 96), dpi=DPI, facecolor=LIGHT["paper"])
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        for order, item in enumerate(scene.items):
            _paint(axes, item, order)
        FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _paint(axes, item: Item, order: int) -> None:
    from matplotlib.patches import Circle, Polygon, Rectangle

    colour = LIGHT[item.role]
    if isinstance(item, Line):
        dash = (0, (4, 3)) if item.dashed else "solid"
        width = item.width * POINTS_PER_PIXEL
        axes.plot((item.x1, item.x2), (item.y1, item.y2), color=colour, linewidth=width, linestyle=dash, zorder=order)
    elif isinstance(item, Box):
        axes.add_patch(Rectangle((item.x, item.y), item.width, item.height, color=colour, linewidth=0, zorder=order))
    elif isinstance(item, Text):
        axes.text(
            item.x,
            item.y,
            clean(item.text),
            color=colour,
            fontsize=item.size * POINTS_PER_PIXEL,
            fontweight="bold" if item.bold else "normal",
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[item.anchor],
            verticalalignment="baseline",
            zorder=order,
        )
    elif item.form in STROKES:
        for a, b, c, d in STROKES[item.form]:
            across = (item.x + a * item.size, item.x + c * item.size)
            down = (item.y + b * item.size, item.y + d * item.size)
            axes.plot(across, down, color=colour, linewidth=1.5, zorder=order)
    else:
        fill = {"facecolor": LIGHT["paper"] if item.open else colour, "edgecolor": colour, "linewidth": 1.2}
        if item.form in FORMS:
            corners = [(item.x + a * item.size, item.y + b * item.size) for a, b in FORMS[item.form]]
            axes.add_patch(Polygon(corners, closed=True, zorder=order, **fill))
        else:
            axes.add_patch(Circle((item.x, item.y), item.size, zorder=order, **fill))
