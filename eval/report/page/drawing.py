"""What every chart shares: colours, logarithmic axes, a legend, free places for labels, and SVG and PNG output.

A figure has 72 pixels an inch, so a point is a pixel. It is drawn in the light colours; SVG output replaces each
colour by a CSS variable with that colour as its fallback.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rooflane.eval.report.escape import plain
from rooflane.eval.report.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox, Transform

# Colours after Okabe and Ito. All light colours differ, because SVG output finds a colour's name by its value.
LIGHT = {
    "paper": "#ffffff", "ink": "#1b1b1f", "muted": "#5c5f66", "rule": "#d0d3d9", "band": "#f1f3f6", "good": "#006b4f",
    "bad": "#b03a00", "s0": "#0072b2", "s1": "#c04f00", "s2": "#007a5a", "s3": "#a8457d", "s4": "#806000",
    "s5": "#2b6f9e",
}  # fmt: skip
DARK = {
    "paper": "#16181c", "ink": "#eceef2", "muted": "#a9adb6", "rule": "#3b3f47", "band": "#21242a", "good": "#4fd1a5",
    "bad": "#ff9a5c", "s0": "#62b8ec", "s1": "#ff9a5c", "s2": "#3ccb9d", "s3": "#e79cc6", "s4": "#f0e442",
    "s5": "#9fd0f5",
}  # fmt: skip
VARIABLES = {value: f"var(--{name}, {value})" for name, value in LIGHT.items()}
PIXELS = 72  # an inch
FONT = 12.0
MARGIN = 12
# Where a label is tried: pixels from its point, and directions in 24ths of a turn, the right side first.
RINGS = (9, 13, 18, 26, 36, 48, 62, 78, 96, 118, 142)
TURNS = (0, 12, 1, 23, 11, 13, 2, 22, 10, 14, 3, 21, 9, 15, 4, 20, 8, 16, 6, 18, 5, 7, 17, 19)
SVG = "{http://www.w3.org/2000/svg}"
FONTS = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
TITLE = "title: "  # the start of a gid that becomes the mark's <title>
LOOKS = {
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "text.usetex": False,
    "text.parse_math": False,  # a $ in a name starts no formula
    "svg.fonttype": "none",
    "svg.hashsalt": "rooflane",
    "path.simplify": False,
}


@dataclass(frozen=True)
class Series:
    """How an arm is drawn: its label, its matplotlib marker, its colour's name, and whether the mark is open."""

    label: str
    marker: str
    colour: str
    open: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn figure with its title and a description in words."""

    figure: Figure
    title: str
    description: str


@contextmanager
def looks() -> Iterator[None]:
    """Draw or save within this context: fonts and SVG settings depend on nothing the user has set."""
    from matplotlib import rc_context

    with rc_context(LOOKS):
        yield


def scheme_css(selector: str) -> str:
    """Return the colours as CSS variables: light everywhere, dark on a screen that asks for it."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in scheme.items()) for scheme in (LIGHT, DARK))
    dark_rule = f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    return f"{selector} {{ {light} }}\n{dark_rule}\n"


def new_figure(width: float, height: float = 400) -> Figure:
    """Return an empty figure of a size in pixels, with a canvas that measures texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / PIXELS, height / PIXELS), dpi=PIXELS, facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure, height: float, left: float, top: float, right: float, bottom: float) -> Axes:
    """Set the figure's height and return frameless axes between four edges, in pixels from the top left."""
    width = figure.get_figwidth() * PIXELS
    figure.set_figheight(height / PIXELS)
    axes = figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))
    axes.set(facecolor="none")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(color=LIGHT["rule"], labelcolor=LIGHT["muted"], labelsize=FONT)
    return axes


def write_text(figure: Figure, x: float, y: float, text: str, colour: str = "ink", **options) -> None:
    """Write a text with its baseline `y` pixels below the figure's top, whatever height the figure gets."""
    figure.text(0, 1, plain(text), color=LIGHT[colour], transform=_from_top(figure, x, y), **options)


def _from_top(figure: Figure, x: float, y: float) -> Transform:
    """Return the transform that puts (0, 1) at `x` and `y` pixels from the figure's top left."""
    from matplotlib.transforms import ScaledTranslation

    return figure.transFigure + ScaledTranslation(x / PIXELS, -y / PIXELS, figure.dpi_scale_trans)


def legend(figure: Figure, series: Iterable[Series], top: float) -> float:
    """Draw the legend in as many columns as fit; return where it ends, in pixels from the top."""
    from matplotlib.lines import Line2D

    room = figure.get_figwidth() * PIXELS - 2 * MARGIN
    place = _from_top(figure, MARGIN, top)
    handles = [Line2D([], [], label=shorten(entry.label, room - 40), **mark_style(entry)) for entry in series]
    for columns in range(len(handles), 0, -1):
        shown = figure.legend(
            handles=handles, ncols=columns, loc="upper left", bbox_to_anchor=(0, 1), bbox_transform=place,
            frameon=False, borderpad=0, borderaxespad=0, handlelength=1, handletextpad=0.4, columnspacing=1.2,
            labelcolor=LIGHT["ink"],
        )  # fmt: skip
        extent = shown.get_window_extent(figure.canvas.get_renderer())
        if extent.width <= room or columns == 1:
            break
        shown.remove()
    return top + extent.height


def mark_style(series: Series, size: float = 9.0) -> dict[str, object]:
    """Return a mark's options for `Axes.plot`; an open mark shows what lies below it."""
    colour = LIGHT[series.colour]
    stroke = series.marker in "|+x"
    return {
        "linestyle": "none",
        "marker": series.marker,
        # The null's bar stands out above and below eager's circle, which it nearly always meets.
        "markersize": size * 1.8 if series.marker == "|" else size,
        "markerfacecolor": "none" if series.open else colour,
        # A filled mark has an edge in the paper's colour, which keeps overlapping marks apart.
        "markeredgecolor": colour if series.open or stroke else LIGHT["paper"],
        "markeredgewidth": 2.0 if stroke else 1.5 if series.open else 0.8,
    }


def draw_mark(axes: Axes, x: float, y: float, series: Series, title: str, size: float = 9.0) -> None:
    """Draw one mark; an SVG viewer shows its title under the pointer."""
    axes.plot([x], [y], gid=TITLE + plain(title), zorder=3, clip_on=False, **mark_style(series, size))


def log_limits(values: Iterable[float], room: float = 1.25) -> tuple[float, float]:
    """Return limits that hold the finite positive values with some room, at least a factor of four apart."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(known) / room, max(known) * room
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return low, high


def log_axes(axes: Axes, across: tuple[float, float], up: tuple[float, float] | None = None) -> None:
    """Make axes logarithmic, with round ticks in one notation on every axis."""
    box = axes.get_window_extent()
    ticks = {"x": log_ticks(*across, box.width / 62)} | ({"y": log_ticks(*up, box.height / 30)} if up else {})
    values = [value for found in ticks.values() for value in found]
    plain = min(values) >= 1e-4 and max(values) < 1e6
    for name, limits in (("x", across), ("y", up)):
        if limits:
            axis: Axis = getattr(axes, f"{name}axis")
            getattr(axes, f"set_{name}scale")("log")
            getattr(axes, f"set_{name}lim")(*limits)
            labels = [f"{value:,.10g}" if plain else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
                      for value in ticks[name]]  # fmt: skip
            axis.set_ticks(ticks[name], labels)
            axis.set_ticks([], minor=True)
            axis.grid(True, color=LIGHT["rule"], linewidth=1)


def log_ticks(low: float, high: float, most: float) -> list[float]:
    """Return at most `most` round values between two limits, and at least two where there are any."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if 2 <= len(found) <= most:
            return found
    every = math.ceil(len(found) / most) if found else 1
    return found[::every] or [low, high]


@cache
def text_width(text: str, size: float = FONT, weight: str = "normal") -> float:
    """Return a text's width in pixels, in DejaVu Sans: the widest of the common sans-serif fonts."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return RendererAgg(1, 1, PIXELS).get_text_width_height_descent(plain(text), font, False)[0]


def shorten(text: str, width: float, size: float = FONT) -> str:
    """Return a text cut to a width, an ellipsis at its end where something is missing."""
    text = plain(text)
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def boxes_of(axes: Axes) -> list[Bbox]:
    """Return the places that a label must not cover: marks, straight lines in short pieces, and texts."""
    import numpy
    from matplotlib.transforms import Bbox

    found = [text.get_window_extent() for text in axes.texts]
    for line in axes.lines:
        points = axes.transData.transform(line.get_xydata())
        half = 2.0 if line.get_marker() in ("None", "", None) else line.get_markersize() / 2 + 1
        pieces = int(math.dist(points[0], points[-1]) / 4) + 1
        for x, y in numpy.linspace(points[0], points[-1], pieces + 1):
            found.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    return found


def is_free(box: Bbox, frame: Bbox, taken: Iterable[Bbox]) -> bool:
    """Tell whether a box lies within a frame and meets nothing."""
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    return inside and not any(box.overlaps(other) for other in taken)


def place_labels(axes: Axes, labels: Sequence[tuple[float, float, str]], size: float = FONT - 1) -> None:
    """Write each label (x, y, text) near its point where it covers nothing.

    Places are tried on growing rings. A label beyond the first rings gets a thin line to its point. A label that
    finds no place is left out: its mark still has a title.
    """
    frame, taken = axes.get_window_extent(), boxes_of(axes)
    for x, y, text in labels:
        label = axes.annotate(
            text, (x, y), (0, 0), textcoords="offset points", fontsize=size, color=LIGHT["ink"], ha="center",
            va="center_baseline",
        )  # fmt: skip
        home = label.get_window_extent()
        for distance, turn in itertools.product(RINGS, TURNS):
            dx = (distance + home.width / 2) * math.cos(turn * math.pi / 12)
            dy = distance * math.sin(turn * math.pi / 12)
            if is_free(box := home.translated(dx, dy), frame, taken):
                break
        else:
            label.remove()
            continue
        label.set_position((dx, dy))
        taken.append(box)
        if distance > 16:
            near = (min(max(0, dx - home.width / 2), dx + home.width / 2), dy - math.copysign(home.height / 2, dy))
            arrow = {"arrowstyle": "-", "color": LIGHT["muted"], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x, y), near, textcoords="offset points", arrowprops=arrow)


def save_chart(chart: Chart, path: Path) -> None:
    """Write a chart as SVG or PNG, by the path's ending; the same chart gives the same bytes.

    Raises `EvaluationError` when the file cannot be written.
    """
    if path.suffix == ".svg":
        write_file(path, f'<?xml version="1.0" encoding="UTF-8"?>\n{svg_text(chart)}\n')
        return
    raw = io.BytesIO()
    with looks():
        chart.figure.savefig(raw, format="png", dpi=2 * PIXELS, metadata={"Software": None})
    write_file(path, raw.getvalue())


def svg_text(chart: Chart, name: str = "plot", css_class: str = "") -> str:
    """Return a chart as an SVG element with text as text and no inline style, which the page's policy forbids.

    With a `css_class` it is part of a page, whose style sheet has the colours; without, it is a file of its own.
    """
    raw = io.BytesIO()
    with looks():
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        chart.figure.savefig(raw, format="svg", dpi=PIXELS, metadata=nothing)
    drawn = ElementTree.fromstring(raw.getvalue())
    shared = {element.get("id"): element for element in drawn.iter() if element.get("id")}
    width, height = (_round(value) for value in drawn.get("viewBox").split()[2:])
    root = ElementTree.Element(f"{SVG}svg", {
        "viewBox": f"0 0 {width} {height}", "role": "img", "font-family": FONTS, "stroke-linejoin": "round",
        "aria-labelledby": f"{name}-title {name}-desc",
    })  # fmt: skip
    root.attrib |= {"class": css_class} if css_class else {"width": width, "height": height}
    for tag, text in (("title", chart.title), ("desc", chart.description)):
        ElementTree.SubElement(root, f"{SVG}{tag}", {"id": f"{name}-{tag}"}).text = plain(text)
    if not css_class:
        ElementTree.SubElement(root, f"{SVG}style").text = scheme_css("svg")
    for child in drawn:
        _copy(child, root, shared)
    ElementTree.register_namespace("", SVG[1:-1])
    return ElementTree.tostring(root, encoding="unicode")


def _copy(element: ElementTree.Element, parent: ElementTree.Element, shared: dict[str, ElementTree.Element]) -> None:
    """Copy an element: styles become attributes, colours variables, ids titles; shared shapes are written out."""
    if element.tag in (f"{SVG}defs", f"{SVG}metadata"):
        return
    style, place = element.get("style", ""), {}
    if element.tag == f"{SVG}use":
        place = {"transform": f"translate({_round(element.get('x', '0'))} {_round(element.get('y', '0'))})"}
        element = shared[element.get("{http://www.w3.org/1999/xlink}href")[1:]]
        style = f"{element.get('style', '')}; {style}"
    values = dict(part.strip().split(": ", 1) for part in style.split(";") if ": " in part)
    if font := values.pop("font", None):
        values["font-size"] = re.search(r"([\d.]+)px", font).group(1)
        values |= {"font-weight": "bold"} if font.startswith(("bold", "700")) else {}
    values = {key: VARIABLES.get(value.lower(), value) for key, value in values.items() if key != "font-family"}
    names = ("d", "x", "y", "transform", "text-anchor")
    values |= {key: _round(element.get(key)) for key in names if element.get(key)} | place
    copy = ElementTree.SubElement(parent, element.tag, values)
    if (title := element.get("id") or "").startswith(TITLE):
        ElementTree.SubElement(copy, f"{SVG}title").text = title.removeprefix(TITLE)
    copy.text = (element.text or "").strip() or None
    for child in element:
        _copy(child, copy, shared)


def _round(text: str) -> str:
    """Return a text with every number rounded to a tenth, less what a drawing shows."""
    return re.sub(r"-?\d+\.\d+(?:e-?\d+)?", lambda found: f"{round(float(found.group()), 1) + 0.0:g}", text.strip())
