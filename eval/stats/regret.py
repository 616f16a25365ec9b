"""Dispatch regret: how much slower a rule table's choice is than the best family measured.

Noise makes one of several equal families look fastest, and its time too short (the winner's curse). So the best family
of a process is chosen on the other processes, and its time is taken from that process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rooflane.dispatch import Profile, RouteError, RuleTable, route
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.estimator import Interval, pair_arms, t_interval
from rooflane.eval.stats.evidence import Evidence, Measured
from rooflane.eval.stats.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame, Series

LEAST_PROCESSES = 2


@dataclass(frozen=True)
class ShapeRegret:
    """One shape: the arm the table chooses, the best one, and how many times longer the choice takes.

    `apparent` is the same ratio with the best arm chosen on the figures that judge it. `best` is the arm chosen in
    most processes.
    """

    shape: str
    rule: str
    choice: str
    best: str
    regret: Interval
    apparent: float


@dataclass(frozen=True)
class Regret:
    """A table compared with an oracle over the shapes of a run. Each ratio is a time over another; above 1 is slower.

    `table` is the table's choice over the oracle. `best_single` is the best one family for all shapes over the oracle;
    it is chosen as the oracle is. `single_over_table` is that family over the table. `left_out` holds the reason for
    each shape that is not counted.
    """

    run: str
    rules: str
    shapes: tuple[ShapeRegret, ...]
    left_out: dict[str, str]
    table: Interval
    apparent: float
    singles: dict[str, Interval]
    best_single: Interval | None
    single_over_table: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def regret(run: Run, table: RuleTable) -> Regret:
    """Return how much slower the table's choices are than the best family, on the shapes of a run.

    A shape counts when the family and options the table chooses are an arm of the run, with a right output and a time
    in every process, beside at least one other. Raises `EvaluationError` for a run of one process or without such a
    shape.
    """
    processes = run.meta.settings["processes"]
    if processes < LEAST_PROCESSES:
        raise EvaluationError(
            f"{run.folder}: has one process, and the best family must be judged on another than it was chosen on; "
            "measure again with --processes 2 or more"
        )
    measured = Evidence.of(run.meta, run.records()).measured
    profile = Profile.model_validate(run.meta.profile)
    shapes: list[ShapeRegret] = []
    frames: list[DataFrame] = []
    chosen_logs, lost, seeming = [], [], []
    left_out: dict[str, str] = {}
    for shape in run.meta.shape_list():
        logs = _logs(measured, shape.id)
        try:
            chosen = route(shape, profile, table)
        except RouteError as error:
            left_out[shape.id] = str(error)
            continue
        first = {arm: measured.rows(shape.id, arm)[0] for arm in logs}
        built = {arm: (row.family, row.options) for arm, row in first.items()}
        choice = next((arm for arm, found in built.items() if found == (chosen.family, chosen.options)), None)
        if choice is None or len(set(map(str, built.values()))) < 2:
            left_out[shape.id] = _why_not(chosen.family, chosen.rule.name, choice, list(logs))
            continue
        best = _best_of_others(logs)
        frames.append(logs)
        chosen_logs.append(logs[choice])
        lost.append(_picked(logs, best) - logs[choice])
        seeming.append(logs[logs.mean().idxmax()] - logs[choice])
        shapes.append(
            ShapeRegret(
                shape=shape.id,
                rule=chosen.rule.name,
                choice=choice,
                best=Counter(best).most_common(1)[0][0],
                regret=_interval(lost[-1]),
                apparent=math.exp(seeming[-1].mean()),
            )
        )
    if not shapes:
        reasons = {why: ", ".join(name for name in left_out if left_out[name] == why) for why in left_out.values()}
        why = "; ".join(f"shape {names}: {reason}" for reason, names in reasons.items())
        raise EvaluationError(
            f"{run.folder}: no shape can be judged ({why}); measure the families beside each other, as in "
            "rooflane eval FILE --candidate FAMILY --candidate FAMILY"
        )
    count = len(shapes)
    choices, losses = sum(chosen_logs) / count, sum(lost) / count
    oracle = choices + losses
    # One family for all shapes: only an arm that every shape has is a column of the sum.
    means = (sum(frames) / count).dropna(axis=1)
    single = None if means.empty else _picked(means, _best_of_others(means))
    return Regret(
        run=run.meta.id,
        rules=table.title(),
        shapes=tuple(shapes),
        left_out=left_out,
        table=_interval(losses),
        apparent=math.exp((sum(seeming) / count).mean()),
        singles={arm: _interval(oracle - logs) for arm, logs in means.items()},
        best_single=None if single is None else _interval(oracle - single),
        single_over_table=None if single is None else _interval(choices - single),
    )


def _logs(measured: Measured, shape: str) -> DataFrame:
    """Return log-speedups over eager, one row a process: of the family arms right and timed in every process.

    Every process must judge the choice, so no block is dropped.
    """
    import pandas

    meta = measured.meta
    processes = range(meta.settings["processes"])
    found = {}
    for arm in meta.candidates:
        rows = measured.rows(shape, arm)
        if all(process in rows and rows[process].status == "ok" for process in processes) and rows[0].family:
            ratios = pair_arms(measured.rounds, shape, EAGER, arm).logs
            if ratios.keys() >= set(processes):
                found[arm] = ratios
    return pandas.DataFrame(found, index=processes, dtype=float)


def _best_of_others(logs: DataFrame) -> Series:
    """Return for each process the arm that is fastest over the other processes."""
    return (logs.sum() - logs).idxmax(axis=1)


def _picked(logs: DataFrame, arms: Series) -> Series:
    return logs.stack().loc[list(arms.items())].droplevel(1)


def _interval(logs: Series) -> Interval:
    return t_interval(logs.tolist())


def _why_not(family: str, rule: str, choice: str | None, measured: Sequence[str]) -> str:
    have = ", ".join(measured) or "none"
    if choice is None:
        return (
            f"{family}, which rule {rule} chooses, was not measured with a right output in every process (those are: "
            f"{have})"
        )
    if len(measured) > 1:
        return f"every arm measured there runs {family} ({have})"
    return f"a second family was not measured with a right output in every process (there is: {have})"
