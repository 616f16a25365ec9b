"""The estimator: from round medians to log-ratios by process, and from those to intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rooflane.eval.stats.contamination import Contamination
from rooflane.eval.stats.intervals import (
    CONFIDENCE,
    Interval,
    TimesError,
    block_means,
    holm,
    sign_flip_p,
    t_interval,
    t_p_value,
    welch_interval,
    welch_p_value,
)
from rooflane.eval.stats.rounds import Rounds

CLEAN = Contamination()


@dataclass(frozen=True)
class ShapeEstimate:
    """One shape: the interval at 95%, the one at Holm's level of this shape, and both p-values."""

    interval: Interval
    holm_interval: Interval
    p: float | None
    holm_p: float | None


@dataclass(frozen=True)
class Estimate:
    """How many times faster one arm is than another: by shape, and over all shapes as a geometric mean.

    `logs` are natural logarithms by shape and process. `per_process` has the processes in which every shape has one.
    The mean is None when a shape was not timed in some process. `excused` are the processes left out of the mean, each
    with the shapes without a clean block.
    """

    logs: Mapping[str, Mapping[int, float]]
    shapes: Mapping[str, ShapeEstimate]
    per_process: Mapping[int, float]
    geomean: Interval | None
    sign_flip_p: float | None
    excused: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Paired:
    """Two arms on one shape: the mean log-nanoseconds of each by process, over the same clean blocks.

    `disturbed` are the processes that timed both arms and have no clean block.
    """

    base: Mapping[int, float] = field(default_factory=dict)
    arm: Mapping[int, float] = field(default_factory=dict)
    disturbed: frozenset[int] = frozenset()

    @property
    def logs(self) -> dict[int, float]:
        """The log-ratio by process, positive where `arm` is faster."""
        return {process: self.base[process] - self.arm[process] for process in self.base}


def pair_arms(rounds: Rounds, shape: str, base: str, arm: str, contamination: Contamination = CLEAN) -> Paired:
    """Pair two arms on a shape, process by process and block by block."""
    means: tuple[dict[int, float], dict[int, float]] = {}, {}
    disturbed = set()
    first, second = rounds.of(shape, base), rounds.of(shape, arm)
    for process in sorted(first.keys() & second.keys()):
        medians = [first[process], second[process]]
        gaps = {index // 2 for values in medians for index, value in enumerate(values) if value is None}
        try:
            found = block_means(*medians, dropped=contamination.at(shape, process) | gaps)
        except TimesError:
            continue
        if found is None:
            disturbed.add(process)
        else:
            means[0][process], means[1][process] = found
    return Paired(*means, frozenset(disturbed))


def estimate(
    rounds: Rounds,
    shapes: Sequence[str],
    base: str,
    arm: str,
    processes: Iterable[int],
    contamination: Contamination = CLEAN,
) -> Estimate:
    """Estimate how many times faster `arm` is than `base` on each shape and in the geometric mean.

    A process without a clean block of some shape is left out of the mean: the machine decided that, not the arm. With
    a process in which an arm was not timed, no mean exists.
    """
    logs: dict[str, dict[int, float]] = {}
    excused: dict[int, tuple[str, ...]] = {}
    for shape in shapes:
        pair = pair_arms(rounds, shape, base, arm, contamination)
        logs[shape] = pair.logs
        excused |= {process: (*excused.get(process, ()), shape) for process in pair.disturbed}
    found = combine(logs, [process for process in processes if process not in excused])
    return replace(found, excused=dict(sorted(excused.items())))


def combine(logs: Mapping[str, Mapping[int, float]], processes: Sequence[int]) -> Estimate:
    """Return the estimate over given log-ratios; `processes` are those that need one on every shape."""
    per_process = {
        process: fmean(found[process] for found in logs.values())
        for process in processes
        if logs and all(process in found for found in logs.values())
    }
    whole = bool(per_process) and len(per_process) == len(processes)
    values = list(per_process.values())
    return Estimate(
        logs=logs,
        shapes=by_shape({shape: list(found.values()) for shape, found in logs.items() if found}),
        per_process=per_process,
        geomean=t_interval(values) if whole else None,
        sign_flip_p=sign_flip_p(values) if whole else None,
    )


def by_shape(logs: Mapping[str, Sequence[float]]) -> dict[str, ShapeEstimate]:
    """Return each shape's interval with Holm's correction over all of them."""
    return _corrected(
        {shape: t_p_value(values) for shape, values in logs.items()},
        lambda shape, level: t_interval(logs[shape], level),
    )


def welch_by_shape(logs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, ShapeEstimate]:
    """Return each shape's interval of exp(mean of the first - mean of the second), by Welch, with Holm's correction."""
    return _corrected(
        {shape: welch_p_value(*sides) for shape, sides in logs.items()},
        lambda shape, level: welch_interval(*logs[shape], level),
    )


def _corrected(
    p_values: Mapping[str, float | None], interval: Callable[[str, float], Interval]
) -> dict[str, ShapeEstimate]:
    """Return the estimates of a family of shapes, given their p-values and what makes an interval at a level."""
    tested = {shape: p for shape, p in p_values.items() if p is not None}
    adjusted, levels = holm(tested), holm_levels(tested)
    return {
        shape: ShapeEstimate(
            interval=interval(shape, CONFIDENCE),
            holm_interval=interval(shape, levels.get(shape, CONFIDENCE)),
            p=p,
            holm_p=adjusted.get(shape),
        )
        for shape, p in p_values.items()
    }


def holm_levels(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the confidence at which Holm's procedure tests each member of a family.

    The k-th smallest p of m is tested at 1 - 0.05 / (m - k + 1) until the first that fails; from there on none is
    better founded than the one that failed, so the rest keep its level.
    """
    levels: dict[str, float] = {}
    left, failed = len(p_values), False
    for name in sorted(p_values, key=p_values.__getitem__):
        levels[name] = 1 - (1 - CONFIDENCE) / left
        failed = failed or p_values[name] > (1 - CONFIDENCE) / left
        left -= not failed
    return levels


def half_width(interval: Interval | None) -> float | None:
    """Return an interval's half-width as a natural logarithm; None without an interval."""
    if interval is None or interval.low is None:
        return None
    return math.log(interval.high / interval.low) / 2
