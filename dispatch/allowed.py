"""Sets of values a condition allows: spans of numbers and lists of words, held against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

INFINITY = math.inf


@dataclass(frozen=True)
class Span:
    """Numbers between two bounds, without the holes; whole numbers only when `whole`.

    A bound is (value, nudge): `low` (5, 0) is >= 5 and (5, 1) is > 5, `high` (5, 0) is <= 5 and (5, -1) is < 5, so
    that bounds compare as tuples.
    """

    low: tuple[float, int] = (-INFINITY, 0)
    high: tuple[float, int] = (INFINITY, 0)
    holes: frozenset[float] = frozenset()
    whole: bool = False

    def contains(self, value: float) -> bool:
        """Return whether a number is allowed."""
        return self.low <= (value, 0) <= self.high and value not in self.holes

    def narrowed(self, op: str, value: float) -> Span:
        """Return the part of the span for which the comparison holds too."""
        if op == "ne":
            return self._tight(holes=self.holes | {value})
        low, high = self.low, self.high
        if op in ("gt", "ge", "eq"):
            low = max(low, (value, int(op == "gt")))
        if op in ("lt", "le", "eq"):
            high = min(high, (value, -int(op == "lt")))
        return self._tight(low=low, high=high)

    def _tight(self, **changes: Any) -> Span:
        """Return the span with bounds of whole numbers moved onto the nearest allowed one."""
        span = replace(self, **changes)
        if not self.whole:
            return span
        (low, above), (high, below) = span.low, span.high
        if math.isfinite(low):
            low = math.floor(low) + 1 if above else math.ceil(low)
        if math.isfinite(high):
            high = math.ceil(high) - 1 if below else math.floor(high)
        while low <= high and low in span.holes:
            low += 1
        while low <= high and high in span.holes:
            high -= 1
        holes = frozenset(hole for hole in span.holes if low < hole < high and hole == int(hole))
        return replace(span, low=(low, 0), high=(high, 0), holes=holes)

    @property
    def empty(self) -> bool:
        """Whether no number is allowed."""
        return self.low > self.high or (self.low == self.high and self.low[0] in self.holes)

    def covers(self, other: Span) -> bool:
        """Return whether every number `other` allows is allowed here."""
        if other.empty:
            return True
        inside = self.low <= other.low and other.high <= self.high
        return inside and not any(other.contains(hole) for hole in self.holes)

    def common(self, other: Span) -> Span:
        """Return the numbers both allow."""
        span = replace(self, whole=self.whole or other.whole)
        return span._tight(
            low=max(self.low, other.low), high=min(self.high, other.high), holes=self.holes | other.holes
        )

    def without(self, other: Span) -> list[Span]:
        """Return the spans of what is allowed here and not in `other`."""
        (low, above), (high, below) = other.low, other.high
        everything = replace(self, low=(-INFINITY, 0), high=(INFINITY, 0), holes=frozenset())
        parts = [self.narrowed("eq", hole) for hole in other.holes if other.low <= (hole, 0) <= other.high]
        if low > -INFINITY:
            parts.append(self.common(replace(everything, high=(low, above - 1))))
        if high < INFINITY:
            parts.append(self.common(replace(everything, low=(high, below + 1))))
        return [part for part in parts if not part.empty]

    def __str__(self) -> str:
        (low, above), (high, below) = self.low, self.high
        if low == high:
            return f"= {low:g}"
        parts = [f"{'>' if above else '>='} {low:g}"] if low > -INFINITY else []
        parts += [f"{'<' if below else '<='} {high:g}"] if high < INFINITY else []
        parts += [f"!= {hole:g}" for hole in sorted(self.holes)]
        return " and ".join(parts) or "any"


@dataclass(frozen=True)
class Allowed:
    """The values a condition allows: spans of numbers, or words listed or (when `inverted`) excluded."""

    spans: tuple[Span, ...] = ()
    words: frozenset[Any] = frozenset()
    inverted: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether the field may have that value."""
        if self.spans:
            return any(span.contains(value) for span in self.spans)
        return (value in self.words) != self.inverted

    @property
    def empty(self) -> bool:
        """Whether no value is allowed."""
        if self.spans:
            return all(span.empty for span in self.spans)
        return not self.words and not self.inverted

    def covers(self, other: Allowed) -> bool:
        """Return whether every value `other` allows is allowed here.

        Spans are compared one by one: two adjoining spans of a list are not seen to hold a third across their border.
        """
        if self.spans:
            return all(any(mine.covers(theirs) for mine in self.spans) for theirs in other.spans)
        if self.inverted:
            return self.words <= other.words if other.inverted else not self.words & other.words
        return not other.inverted and other.words <= self.words

    def common(self, other: Allowed) -> Allowed:
        """Return the values both allow."""
        if self.spans:
            found = [mine.common(theirs) for mine in self.spans for theirs in other.spans]
            return Allowed(spans=tuple(span for span in found if not span.empty) or NOTHING)
        if self.inverted and other.inverted:
            return Allowed(words=self.words | other.words, inverted=True)
        if self.inverted or other.inverted:
            listed, excluded = (other, self) if self.inverted else (self, other)
            return Allowed(words=listed.words - excluded.words)
        return Allowed(words=self.words & other.words)

    def without(self, other: Allowed) -> Allowed:
        """Return the values allowed here and not in `other`."""
        if self.spans:
            left = list(self.spans)
            for theirs in other.spans:
                left = [part for mine in left for part in mine.without(theirs)]
            return Allowed(spans=tuple(left) or NOTHING)
        return self.common(Allowed(words=other.words, inverted=not other.inverted))

    def __str__(self) -> str:
        if self.spans:
            return " or ".join(map(str, self.spans))
        words = " or ".join(sorted(str(word).lower() if isinstance(word, bool) else str(word) for word in self.words))
        return f"{'none of' if self.inverted else '='} {words}"


NOTHING = (Span((0, 1), (0, -1)),)
