"""A picture as a list of lines, boxes, markers and texts: drawn once, then written as SVG or painted as PNG.

Places are pixels from the top left. Colours are named by role, so one scene serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FONT_SIZE = 12.0
# Widths of DejaVu Sans, the widest of the common sans-serif fonts, in em; what is not listed counts as a full em.
_WIDTHS = {
    character: width
    for width, characters in (
        (0.35, " 'IJijl,./:;\\|"),
        (0.45, "()-[]ft!r"),
        (0.6, '"*_`?cszFLkvxy'),
        (0.66, "$0123456789EPSTYabdeghnopqu{}"),
        (0.75, "ABCKRVXZNU"),
        (0.85, "&DGHOQ#+<=>^w~"),
    )
    for character in characters
}


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    role: str = "rule"
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    role: str = "band"


@dataclass(frozen=True)
class Marker:
    """A point: its form says the series as well as its colour; open means filled with the paper."""

    x: float
    y: float
    form: str
    role: str
    size: float = 5.0
    open: bool = False
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text on its baseline; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    role: str = "ink"
    size: float = FONT_SIZE
    bold: bool = False

    def bounds(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom, none smaller than any common font needs."""
        width = text_width(self.text, self.size, self.bold)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.25 * self.size


Item = Line | Box | Marker | Text


@dataclass
class Scene:
    """A picture with its size, what it is called and what it says in words."""

    width: float
    height: float
    title: str
    description: str
    items: list[Item] = field(default_factory=list)

    def add(self, *items: Item) -> None:
        """Put items on top of what is there."""
        self.items += items

    def texts(self) -> list[Text]:
        """Return the texts."""
        return [item for item in self.items if isinstance(item, Text)]

    def obstacles(self) -> Iterator[tuple[float, float, float, float]]:
        """Yield the bounds of everything a label must not cover; of a line, of short pieces."""
        for item in self.items:
            if isinstance(item, Line) and item.role != "rule":
                length = math.dist((item.x1, item.y1), (item.x2, item.y2))
                for step in range(int(length / 4) + 1):
                    x = item.x1 + (item.x2 - item.x1) * step * 4 / max(length, 4)
                    y = item.y1 + (item.y2 - item.y1) * step * 4 / max(length, 4)
                    yield x - 1, y - 1, x + 1, y + 1
            if isinstance(item, Text):
                yield item.bounds()
            elif isinstance(item, Marker):
                yield item.x - item.size, item.y - item.size, item.x + item.size, item.y + item.size


def text_width(text: str, size: float = FONT_SIZE, bold: bool = False) -> float:
    """Return how wide a text is at most, in pixels."""
    return size * sum(_WIDTHS.get(character, 1.0) for character in text) * (1.1 if bold else 1.0)


def shorten(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Return a text cut to a width, an ellipsis at its end when something is missing."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tell whether two bounds share any area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def place_labels(scene: Scene, labels: Sequence[tuple[float, float, str]], inside: Sequence[float]) -> None:
    """Write each label beside its point, clear of all texts, markers and lines, within the edges `inside`.

    Places are tried on rings that grow outward; one that is not next to its point gets a thin line to it. A label
    that finds no place is left out: its marker still carries the title.
    """
    size = FONT_SIZE - 1
    taken = list(scene.obstacles())
    for x, y, text in labels:
        half = text_width(text, size) / 2
        for distance, angle in _rings():
            across = x + (distance + half) * math.cos(angle)
            up = y + distance * math.sin(angle) + 0.3 * size
            label = Text(across, up, text, "middle", size=size)
            bounds = label.bounds()
            within = inside[0] <= bounds[0] and inside[1] <= bounds[1] and bounds[2] <= inside[2]
            if within and bounds[3] <= inside[3] and not any(overlap(bounds, other) for other in taken):
                if distance > 16:
                    near = (min(max(x, bounds[0]), bounds[2]), min(max(y, bounds[1]), bounds[3]))
                    scene.add(Line(x, y, *near, "muted", 0.7))
                scene.add(label)
                taken.append(bounds)
                break


def place_first_free(scene: Scene, places: Sequence[Text]) -> None:
    """Write a text at the first of its places that covers nothing; leave it out when none is free."""
    taken = list(scene.obstacles())
    free = [text for text in places if not any(overlap(text.bounds(), other) for other in taken)]
    scene.add(*free[:1])


def _rings() -> Iterator[tuple[float, float]]:
    """Yield distances and angles, nearest first; right and left before above and below."""
    for distance in (9, 13, 18, 26, 36, 48, 62, 78, 96, 118, 142):
        for turn in (0, 12, 1, 23, 11, 13, 2, 22, 10, 14, 3, 21, 9, 15, 4, 20, 8, 16, 6, 18, 5, 7, 17, 19):
            yield distance, turn * math.pi / 12
