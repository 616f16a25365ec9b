"""Where the wall time of a run goes: what it is well spent on, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

WORK = ("warm-up", "measurement", "verification")


class Spent:
    """Seconds by what they were spent on, from a moment on; parts never overlap.

    `before` is the account of a run's earlier part, which an interruption ended.
    """

    def __init__(self, started: float | None = None, before: Mapping[str, float] | None = None) -> None:
        self._started = monotonic() if started is None else started
        self._before = before or {}
        self._seconds: dict[str, float] = {}
        self._at: str | None = None

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the seconds of a block; inside another block they count as the outer one's."""
        if self._at is not None:
            yield
            return
        self._at, before = what, monotonic()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + monotonic() - before
            self._at = None

    def account(self) -> dict[str, float]:
        """Return the seconds so far; what belongs to no block stands as "other"."""
        other = max(0.0, monotonic() - self._started - sum(self._seconds.values()))
        whole = Counter(self._before)
        whole.update(self._seconds | {"other": other})
        return {what: round(seconds, 3) for what, seconds in whole.items()}


def overhead_share(account: dict[str, float]) -> float:
    """Return the share of an account that was neither warm-up, measurement nor verification."""
    return 1 - sum(account.get(what, 0.0) for what in WORK) / max(1e-9, sum(account.values()))
