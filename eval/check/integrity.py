"""Times that cannot be: cross-checks of one clock with another, and with what the hardware could do at best.

Each function returns lines of evidence; an empty list is the ordinary case. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooflane.dispatch import Profile
    from rooflane.shapes import Shape

# Of the wall time of a window, what neither its events nor the harness's own cost may leave unexplained.
HIDDEN_SHARE = 0.4
HIDDEN_NS_LEAST = 20_000
# How far under a floor a median must lie: a profile's figures are measured to a few percent, assumed ones are not.
FLOOR_MARGIN = {"measured": 2.0, "datasheet": 2.0, "assumed": 5.0}
# The empty call starts on an idle device, a short call may start behind the one before: 12 us against 1.3 (H200).
NOOP_SHARE = 0.2


@dataclass(frozen=True)
class WindowWall:
    """One window as the parent saw it: its wall nanoseconds, the calls in it, and the sum of its event times."""

    wall_ns: int
    calls: int
    timed_calls: int
    event_ns: int

    @property
    def hidden_ns(self) -> float:
        """What a call took beside its event time, leading calls counted like timed ones."""
        return self.wall_ns / self.calls - self.event_ns / self.timed_calls


def hidden_time(windows: Sequence[WindowWall], null: Sequence[WindowWall]) -> list[str]:
    """Return whether an arm's event times leave out time that its windows took and the null's do not.

    The smallest of the arm's windows is compared with the null's largest. A busy machine lengthens some windows of
    both; a clock that lies shortens the events of all its own.
    """
    if len(windows) < 2 or not null:
        return []
    best = min(windows, key=lambda window: window.hidden_ns / window.wall_ns * window.calls)
    usual = max(0.0, *(window.hidden_ns for window in null))
    hidden = best.hidden_ns - usual
    if hidden <= max(HIDDEN_NS_LEAST, HIDDEN_SHARE * best.wall_ns / best.calls):
        return []
    return [
        f"its clock shows {best.event_ns / best.timed_calls / 1e3:.1f} us a call, the parent's wall clock "
        f"{best.wall_ns / best.calls / 1e3:.1f} us, of which the null explains {usual / 1e3:.1f} us"
    ]


def impossible_times(samples: Sequence[int], noop: Sequence[int], floor_ns: float, basis: str) -> list[str]:
    """Return whether times are below what doing nothing takes, or below what the hardware's best rates allow."""
    if not samples:
        return []
    if min(samples) <= 0:
        return [f"a call was timed at {min(samples)} ns, which no real call takes"]
    found = median(samples)
    lines = []
    if noop and found < NOOP_SHARE * median(noop):
        lines.append(f"a call takes {found / 1e3:.2f} us, the harness alone {median(noop) / 1e3:.2f} us")
    if found * FLOOR_MARGIN[basis] < floor_ns:
        lines.append(f"a call takes {found / 1e3:.2f} us; at the device's best rates ({basis}) {floor_ns / 1e3:.2f} us")
    return lines


def physical_floor_ns(shape: Shape, profile: Profile, valid_tokens: float) -> tuple[float, str]:
    """Return the nanoseconds no forward can beat on a device, and how well its rates are known.

    The larger of two: input and output moved once at the copy rate, as far as they overflow the cache, and the
    multiply-adds of the six projections of every valid token at the fastest matrix rate of any type. Attention is
    left out: how much of it must be computed depends on masks. The shipped CPU profile describes some other host and
    sets no floor.
    """
    if profile.kind == "cpu" and profile.name == "cpu":
        return 0.0, "assumed"
    width, ffn = shape.d_model, shape.ffn_dim
    flops = 2 * shape.num_layers * valid_tokens * (4 * width * width + 2 * width * ffn)
    moved = 2 * valid_tokens * width * (4 if shape.dtype == "float32" else 2)
    rates = [profile.matmul_float32, profile.matmul_float16, profile.matmul_bfloat16]
    marks = [figure.mark for figure in (*rates, profile.copy_rate)]
    seconds = max(
        flops / max(figure.si for figure in rates),
        max(0.0, moved - profile.cache_bytes) / profile.copy_bytes_per_s,
    )
    return seconds * 1e9, max(marks, key=list(FLOOR_MARGIN).index)
