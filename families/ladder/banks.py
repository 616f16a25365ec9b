"""How often shared memory must answer a warp's access: 32 banks of four bytes, one word of each in a pass. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BANKS = 32
LANES = 32


def passes(words: Sequence[int], width: int) -> int:
    """Return the passes of an access of `width` words a lane, from the first word of each of the 32 lanes.

    An access of 2 or 4 words a lane is answered half or a quarter of a warp at a time. Lanes that read the same word
    share it. The merging of such parts, which some patterns get, is not counted. Raises `ValueError` where the width
    is not 1, 2 or 4, or a lane's address not a multiple of it: the hardware has no such access.
    """
    if width not in (1, 2, 4) or len(words) != LANES or any(word % width for word in words):
        raise ValueError(f"{len(words)} lanes of {width} words at {list(words)}: no access of shared memory")
    together = LANES // width
    total = 0
    for first in range(0, LANES, together):
        met: dict[int, set[int]] = {}
        for word in words[first : first + together]:
            for each in range(word, word + width):
                met.setdefault(each % BANKS, set()).add(each)
        total += max(map(len, met.values()))
    return total


@dataclass(frozen=True)
class Access:
    """An access of a kernel: what it is, the first word of each lane, the words a lane. Any warp and step will do."""

    what: str
    word: Callable[[int], int]
    width: int = 1

    @property
    def repeats(self) -> float:
        """The passes over those of an access without conflicts."""
        return passes([self.word(lane) for lane in range(LANES)], self.width) / self.width
