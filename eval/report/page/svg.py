"""Write a scene as SVG: inside a page, or as a file of its own. The same scene gives the same bytes."""

from __future__ import annotations

import math
from html import escape

from rooflane.eval.report.page.palette import mark_css, scheme_css
from rooflane.eval.report.page.scene import FONT_SIZE, Box, Item, Line, Marker, Scene, Text

# Corners of each form on a circle of radius one; a form not listed is a circle.
FORMS: dict[str, tuple[tuple[float, float], ...]] = {
    "diamond": ((0, -1.15), (1.15, 0), (0, 1.15), (-1.15, 0)),
    "square": ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    "triangle": ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    "down": ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
    "hexagon": tuple((math.cos(turn * math.pi / 3), math.sin(turn * math.pi / 3)) for turn in range(6)),
}
# Forms that are strokes only.
STROKES: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "bar": ((0, -1.3, 0, 1.3),),
    "plus": ((0, -1.1, 0, 1.1), (-1.1, 0, 1.1, 0)),
    "cross": ((-0.9, -0.9, 0.9, 0.9), (-0.9, 0.9, 0.9, -0.9)),
}


def inline_svg(scene: Scene, name: str, classes: str) -> str:
    """Return the scene for a page, whose style sheet colours it; `name` makes its ids unique there."""
    return (
        f'<svg class="{classes}" viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" role="img" '
        f'font-size="{_n(FONT_SIZE)}" aria-labelledby="{name}-title {name}-desc">\n'
        f"{_words(scene, name)}{_body(scene)}</svg>"
    )


def svg_file(scene: Scene) -> str:
    """Return the scene as a whole SVG document that follows the viewer's light or dark scheme."""
    style = scheme_css("svg") + mark_css("svg")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(scene.width)}" height="{_n(scene.height)}" '
        f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" role="img" '
        f'font-size="{_n(FONT_SIZE)}" aria-labelledby="plot-title plot-desc">\n'
        f"{_words(scene, 'plot')}<style>\n{style}</style>\n"
        f'<rect class="f-paper" width="100%" height="100%"/>\n{_body(scene)}</svg>\n'
    )


def clean(text: str) -> str:
    """Return a text without the control characters that neither XML nor HTML may hold."""
    return "".join(c if c >= " " and not "\x7f" <= c <= "\x9f" else "\ufffd" for c in text)


def _words(scene: Scene, name: str) -> str:
    title, description = escape(clean(scene.title)), escape(clean(scene.description))
    return f'<title id="{name}-title">{title}</title>\n<desc id="{name}-desc">{description}</desc>\n'


def _body(scene: Scene) -> str:
    return "".join(_item(item) + "\n" for item in scene.items)


def _item(item: Item) -> str:
    if isinstance(item, Line):
        dash = ' stroke-dasharray="4 3"' if item.dashed else ""
        return (
            f'<line class="l-{item.role}" x1="{_n(item.x1)}" y1="{_n(item.y1)}" x2="{_n(item.x2)}" '
            f'y2="{_n(item.y2)}" stroke-width="{_n(item.width)}"{dash}/>'
        )
    if isinstance(item, Box):
        place = f'x="{_n(item.x)}" y="{_n(item.y)}" width="{_n(item.width)}" height="{_n(item.height)}"'
        return f'<rect class="f-{item.role}" {place}/>'
    if isinstance(item, Text):
        looks = f' font-size="{_n(item.size)}"' if item.size != FONT_SIZE else ""
        looks += ' font-weight="bold"' if item.bold else ""
        anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
        place = f'x="{_n(item.x)}" y="{_n(item.y)}"'
        return f'<text class="f-{item.role}" {place}{anchor}{looks}>{escape(clean(item.text))}</text>'
    return _marker(item)


def _marker(item: Marker) -> str:
    title = f"<title>{escape(clean(item.title))}</title>" if item.title else ""
    if item.form in STROKES:
        path = "".join(
            f"M{_n(item.x + a * item.size)} {_n(item.y + b * item.size)}"
            f"L{_n(item.x + c * item.size)} {_n(item.y + d * item.size)}"
            for a, b, c, d in STROKES[item.form]
        )
        return f'<path class="l-{item.role}" fill="none" stroke-width="2" d="{path}">{title}</path>'
    fill = "paper" if item.open else item.role
    looks = f'class="f-{fill} l-{item.role}" stroke-width="1.6"'
    if item.form in FORMS:
        points = " ".join(f"{_n(item.x + a * item.size)},{_n(item.y + b * item.size)}" for a, b in FORMS[item.form])
        return f'<polygon {looks} points="{points}">{title}</polygon>'
    return f'<circle {looks} cx="{_n(item.x)}" cy="{_n(item.y)}" r="{_n(item.size)}">{title}</circle>'


def _n(value: float) -> str:
    """Return a coordinate with one decimal at most."""
    return f"{round(value, 1) + 0.0:g}"
