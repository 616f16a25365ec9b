"""The estimator: from round medians to log-ratios by process, and from those to intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from rooflane.eval.stats.mean import CONFIDENCE, Interval, Mean, contributions, difference, mean_of, mean_over_shapes
from rooflane.eval.stats.rounds import Contamination, Rounds, TimesError, median_ns

# Every sign pattern is tried up to this many processes; beyond, as many drawn ones stand for them all.
EXACT_FLIPS = 14


def paired_log_ratio(base: Sequence[Sequence[int]], arm: Sequence[Sequence[int]]) -> float:
    """Return the log of how many times faster `arm` is than `base`, from the nanoseconds `[round][call]` of each.

    Raises `TimesError` on an odd or unequal number of rounds and on impossible times.
    """
    first, second = block_means([median_ns(part) for part in base], [median_ns(part) for part in arm])
    return first - second


def block_means(
    base: Sequence[float], arm: Sequence[float], dropped: frozenset[int] | set[int] = frozenset()
) -> tuple[float, float] | None:
    """Return the mean log of each arm over the same blocks, from one median a round; None when no block is left.

    Rounds 2i and 2i + 1 are the mirrored halves of block i, the second in reversed order, so a linear drift of the
    machine cancels within a block. A dropped block loses both halves of both arms. The difference of the two means is
    the log-ratio of the arms; the exponentials of the means are the times that a report prints beside it. Raises
    `TimesError` on rounds that cannot be paired.
    """
    if len(base) != len(arm) or len(base) % 2 or not base:
        raise TimesError(f"{len(base)} and {len(arm)} rounds cannot be paired; both need the same even number")
    kept = [index for index in range(len(base)) if index // 2 not in dropped]
    if not kept:
        return None
    # Lists: fmean of a generator takes three times as long.
    return fmean([math.log(base[index]) for index in kept]), fmean([math.log(arm[index]) for index in kept])


def t_interval(logs: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return exp of the mean of log-ratios with its Student t interval; the unit of replication is a process."""
    return mean_of(logs).interval(confidence)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p-values: what is at most 0.05 holds at 5% for the whole family of tests."""
    adjusted, floor = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = floor
    return {name: adjusted[name] for name in p_values}


def sign_flip_p(logs: Sequence[float]) -> float | None:
    """Return the two-sided sign-flip permutation p of log-ratios symmetric about zero; at least 2 / 2^count.

    It assumes no normal distribution, so it is the check on the t interval. None with fewer than two processes.
    """
    if len(logs) < 2:
        return None
    import numpy as np

    means = np.abs(_flips(len(logs)) @ np.asarray(logs))
    # Rounding must not tell a pattern from its own mirror image.
    return float(np.mean(means >= abs(sum(logs)) * (1 - 1e-12)))


@cache
def _flips(count: int) -> Any:
    """Return the sign patterns of `count` processes, one a row."""
    import numpy as np

    if count <= EXACT_FLIPS:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(count).integers(0, 2, (2**EXACT_FLIPS, count))
        bits[0] = 1
    return 2.0 * bits - 1


CLEAN = Contamination()


@dataclass(frozen=True)
class ShapeEstimate:
    """One shape: its mean, the interval at 95%, the one at Holm's level of this shape, and both p-values."""

    mean: Mean
    interval: Interval
    holm_interval: Interval
    p: float | None
    holm_p: float | None


@dataclass(frozen=True)
class Estimate:
    """How many times faster one arm is than another: by shape, and over all shapes as a geometric mean.

    `logs` are natural logarithms by shape and process. `mean` is theirs over the shapes, and `geomean` its exponential
    with the interval at 95%. Both are None when a shape was not timed in some process, or has no clean block at all.
    `lost` are the processes without a clean block of some shape, each with those shapes. `per_process` has the means
    of the other processes.
    """

    logs: Mapping[str, Mapping[int, float]]
    shapes: Mapping[str, ShapeEstimate]
    per_process: Mapping[int, float]
    mean: Mean | None
    sign_flip_p: float | None
    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def geomean(self) -> Interval | None:
        """The geometric mean with its interval at 95%."""
        return self.mean and self.mean.interval()


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

    A shape without a clean block in a process counts there with its other processes: the machine decided that, not
    the arm. With a process in which an arm was not timed, no mean exists.
    """
    logs: dict[str, dict[int, float]] = {}
    lost: dict[int, tuple[str, ...]] = {}
    for shape in shapes:
        pair = pair_arms(rounds, shape, base, arm, contamination)
        logs[shape] = pair.logs
        lost |= {process: (*lost.get(process, ()), shape) for process in pair.disturbed}
    return combine(logs, list(processes), dict(sorted(lost.items())))


def combine(
    logs: Mapping[str, Mapping[int, float]],
    processes: Sequence[int],
    lost: Mapping[int, tuple[str, ...]] | None = None,
) -> Estimate:
    """Return the estimate over given log-ratios; every process needs one on every shape that is not `lost` there."""
    lost = lost or {}
    missed = [
        (shape, process)
        for shape, found in logs.items()
        for process in processes
        if process not in found and shape not in lost.get(process, ())
    ]
    per_process = {
        process: fmean([found[process] for found in logs.values()])
        for process in processes
        if logs and all(process in found for found in logs.values())
    }
    whole = bool(logs) and not missed and all(logs.values())
    return Estimate(
        logs=logs,
        shapes=by_shape({shape: list(found.values()) for shape, found in logs.items() if found}),
        per_process=per_process,
        mean=mean_over_shapes(logs) if whole else None,
        sign_flip_p=sign_flip_p(contributions(logs)) if whole else None,
        lost=lost,
    )


def by_shape(logs: Mapping[str, Sequence[float]]) -> dict[str, ShapeEstimate]:
    """Return each shape's interval with Holm's correction over all of them."""
    return _corrected({shape: mean_of(values) for shape, values in logs.items()})


def welch_by_shape(logs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, ShapeEstimate]:
    """Return each shape's interval of exp(mean of the first - mean of the second), by Welch, with Holm's correction."""
    return _corrected({shape: difference(mean_of(a), mean_of(b)) for shape, (a, b) in logs.items()})


def _corrected(means: Mapping[str, Mean]) -> dict[str, ShapeEstimate]:
    """Return the estimates of a family of shapes from their means."""
    tested = {shape: mean.p for shape, mean in means.items() if mean.p is not None}
    adjusted, levels = holm(tested), holm_levels(tested)
    return {
        shape: ShapeEstimate(
            mean=mean,
            interval=mean.interval(),
            holm_interval=mean.interval(levels.get(shape, CONFIDENCE)),
            p=mean.p,
            holm_p=adjusted.get(shape),
        )
        for shape, mean in means.items()
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
