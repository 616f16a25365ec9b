"""Dispatch regret: what a rule table's choice costs against the best family measured, without the winner's curse.

The fastest of several equal families looks faster than it is, by the noise that made it the fastest. So the best is
chosen for each process on the other processes alone, and judged on the one it was not chosen on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rooflane.dispatch import Profile, RouteError, RuleTable, route
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER, Record
from rooflane.eval.stats.estimator import Interval, pair_arms, t_interval
from rooflane.eval.stats.rounds import Rounds, rounds_of
from rooflane.eval.stats.run import Run

LEAST_PROCESSES = 2
Logs = dict[str, dict[int, float]]  # by arm and process: log of its speedup over eager


@dataclass(frozen=True)
class ShapeRegret:
    """One shape: the arm the table chooses, the best one, and how many times longer the choice takes.

    `apparent` is the same ratio with the best chosen on the very figures it is judged by; `best` is the arm chosen
    in most processes.
    """

    shape: str
    rule: str
    choice: str
    best: str
    regret: Interval
    apparent: float


@dataclass(frozen=True)
class Regret:
    """A table against an oracle over the shapes of a run; ratios are times, above 1 the table loses.

    `table` is the choice over the oracle; `best_single` the best one family for all shapes, chosen as the oracle is,
    over the oracle, and `single_over_table` that family over the table. `left_out` holds the reason for each shape that
    is not counted.
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
    """Return what the table's choices cost on the shapes of a run of several families.

    A shape counts when the family and options the table chooses are an arm of the run, with a right output and a time
    in every process, beside at least one other. Raises `EvaluationError` for a run of one process or without such a
    shape.
    """
    processes = list(range(run.meta.settings["processes"]))
    if len(processes) < LEAST_PROCESSES:
        raise EvaluationError(
            f"{run.folder}: has one process, and the best family must be judged on another than it was chosen on; "
            "measure again with --processes 2 or more"
        )
    records = run.records()
    # Every process must judge the choice, so no block is dropped here.
    rounds = rounds_of(records)
    rows: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        rows.setdefault((record.shape_id, record.arm), {})[record.process] = record
    profile = Profile.model_validate(run.meta.profile)
    counted: list[tuple[ShapeRegret, Logs, list[float], list[float]]] = []
    left_out: dict[str, str] = {}
    for shape in run.meta.shape_list():
        logs = _usable_logs(run, shape.id, rows, rounds, processes)
        try:
            chosen = route(shape, profile, table)
        except RouteError as error:
            left_out[shape.id] = str(error)
            continue
        wanted = (chosen.family, chosen.options)
        arms = {
            arm: (rows[shape.id, arm][processes[0]].family, rows[shape.id, arm][processes[0]].options) for arm in logs
        }
        choice = next((arm for arm, built in arms.items() if built == wanted), None)
        if choice is None or len(set(map(str, arms.values()))) < 2:
            left_out[shape.id] = _why_not(chosen.family, chosen.rule.name, choice, list(logs))
            continue
        oracle = {process: _best(logs, [other for other in processes if other != process]) for process in processes}
        lost = [logs[oracle[process]][process] - logs[choice][process] for process in processes]
        apparent = logs[_best(logs, processes)]
        seeming = [apparent[process] - logs[choice][process] for process in processes]
        picks = list(oracle.values())
        row = ShapeRegret(
            shape=shape.id,
            rule=chosen.rule.name,
            choice=choice,
            best=max(dict.fromkeys(picks), key=picks.count),
            regret=t_interval(lost),
            apparent=math.exp(fmean(seeming)),
        )
        counted.append((row, logs, lost, seeming))
    if not counted:
        reasons: dict[str, list[str]] = {}
        for shape, reason in left_out.items():
            reasons.setdefault(reason, []).append(shape)
        why = "; ".join(f"shape {', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise EvaluationError(
            f"{run.folder}: no shape can be judged ({why}); measure the families beside each other, as in "
            "rooflane eval FILE --candidate FAMILY --candidate FAMILY"
        )
    return _over_shapes(run, table, counted, left_out, processes)


def _why_not(family: str, rule: str, choice: str | None, measured: Sequence[str]) -> str:
    """Return why a shape has no regret."""
    have = ", ".join(measured) or "none"
    if choice is None:
        return (
            f"{family}, which rule {rule} chooses, was not measured with a right output in every process (those are: "
            f"{have})"
        )
    if len(measured) > 1:
        return f"every arm measured there runs {family} ({have})"
    return f"a second family was not measured with a right output in every process (there is: {have})"


def _over_shapes(
    run: Run,
    table: RuleTable,
    counted: Sequence[tuple[ShapeRegret, Logs, list[float], list[float]]],
    left_out: dict[str, str],
    processes: Sequence[int],
) -> Regret:
    """Return the means over the shapes, each with its interval over the processes."""
    lost = [fmean(shape[2][index] for shape in counted) for index in range(len(processes))]
    everywhere = [arm for arm in counted[0][1] if all(arm in logs for _, logs, _, _ in counted)]
    # One family for all: its mean log-speedup over the shapes, a process each.
    means = {arm: {p: fmean(logs[arm][p] for _, logs, _, _ in counted) for p in processes} for arm in everywhere}
    choice = {p: fmean(logs[row.choice][p] for row, logs, _, _ in counted) for p in processes}
    oracle = [choice[process] + lost[index] for index, process in enumerate(processes)]
    singles = {
        arm: t_interval([oracle[index] - values[process] for index, process in enumerate(processes)])
        for arm, values in means.items()
    }
    best = {p: means[_best(means, [other for other in processes if other != p])][p] for p in processes if means}
    return Regret(
        run=run.meta.id,
        rules=table.title(),
        shapes=tuple(row for row, _, _, _ in counted),
        left_out=left_out,
        table=t_interval(lost),
        apparent=math.exp(fmean(fmean(seeming) for _, _, _, seeming in counted)),
        singles=singles,
        best_single=t_interval([oracle[i] - best[p] for i, p in enumerate(processes)]) if best else None,
        single_over_table=t_interval([choice[p] - best[p] for p in processes]) if best else None,
    )


def _usable_logs(
    run: Run,
    shape: str,
    rows: dict[tuple[str, str], dict[int, Record]],
    rounds: Rounds,
    processes: Sequence[int],
) -> Logs:
    """Return the log-speedups of the family arms that were right and timed in every process."""
    logs = {}
    for arm in run.meta.candidates:
        found = rows.get((shape, arm), {})
        right = all(process in found and found[process].status == "ok" for process in processes)
        if right and found[processes[0]].family:
            ratios = pair_arms(rounds, shape, EAGER, arm).logs
            if all(process in ratios for process in processes):
                logs[arm] = ratios
    return logs


def _best(logs: Logs, processes: Sequence[int]) -> str:
    """Return the arm that is fastest over the processes named."""
    return max(logs, key=lambda arm: fmean(logs[arm][process] for process in processes))
