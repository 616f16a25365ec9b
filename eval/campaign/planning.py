"""What a run is going to do, decided before anything runs: profile, predictions, and what is left out and why."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rooflane.dispatch import Profile, ProfileError, classify, load_profile
from rooflane.dispatch.units import size
from rooflane.eval.campaign.team import ReferenceLost
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import (
    ANCHOR,
    COMPILED_PREFIX,
    EAGER,
    EAGER_ARM,
    INFEASIBLE,
    NOOP,
    Key,
    Prediction,
    Record,
    RunMeta,
    parse_arm,
)
from rooflane.eval.record.settings import Settings, ShapeTodo
from rooflane.eval.worker.candidates import Candidate, plan_candidate
from rooflane.families import get_family
from rooflane.shapes import Shape, from_dict

# Of a limited run, the share calls may take beside imports and compilation, and the calls an arm makes at the least:
# the first one, one accuracy trial (two), two estimates, one warm-up, four rounds, two checks of what was timed.
CALL_SHARE = 0.6
LEAST_CALLS = 12
# What a call may take over its prediction: a roofline knows no caches, and CPU calls took 1.3 to 3.7 times theirs.
CALL_SLACK = 2
PROBES = (NOOP, ANCHOR)
# On a shape too large for eager a candidate makes one verified call and at least two timed ones in each process; the
# time of two more is for its build, its inputs and the parts of its outputs that are compared.
OVERSIZE_CALLS = 5
# Of the reference's budget, what a process needs that compares a single element.
ONE_ELEMENT = 0.25
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def profile_for(settings: Settings, device: str) -> Profile:
    """Return the profile a run predicts with, its memory lowered to a cap."""
    try:
        profile = load_profile(settings.profile, device)
    except ProfileError as error:
        raise EvaluationError(str(error)) from None
    if profile.kind != device:
        raise EvaluationError(
            f"profile {profile.name} describes a {profile.kind} device, the run is on {device}; pass a matching "
            "--profile, or leave it to auto"
        )
    cap = settings.memory_cap_bytes
    if cap and cap < profile.memory_bytes:
        profile = profile.with_figure("memory", cap / 1e9, "assumed", "the run's memory cap")
    return profile


def predict(shape: Shape, profile: Profile, candidates: Sequence[Candidate], rules: object) -> Prediction:
    """Return what is expected of a shape, written down before any of it runs."""
    plans = {}
    for candidate in candidates:
        plan = plan_candidate(candidate, shape, profile, rules)
        plans[candidate.text] = {
            "family": plan.family,
            "rule": plan.rule,
            "options": plan.options,
            "contract": plan.contract,
            "predicted_s": plan.predicted_s,
            "peak_bytes": plan.peak_bytes,
            "unsupported": plan.unsupported,
        }
    return Prediction(shape=shape.id, classification=classify(shape, profile).as_dict(), candidates=plans)


def infeasible(meta: RunMeta, shape: Shape) -> bool:
    """Return whether a shape's eager forward was predicted not to fit."""
    return meta.prediction(shape.id).classification["regime"] == INFEASIBLE


def compiles(meta: RunMeta, process: int) -> bool:
    """Return whether a process is sure to need torch's compiler: for a control, or for the family of a candidate."""
    controls = process < meta.settings["compile_processes"] and any(
        name.startswith(COMPILED_PREFIX) for name in meta.controls
    )
    plans = [plan for prediction in meta.predictions for plan in prediction.candidates.values()]
    return controls or any(plan["family"] and get_family(plan["family"]).compiles for plan in plans)


def skip_reasons(meta: RunMeta, settings: Settings) -> dict[str, str]:
    """Return the shapes that are not run although eager fits, each with the reason.

    The prediction, the settings and the size of the machine's memory decide, before anything runs: the set does not
    depend on what else the machine does. Under a time budget the quickest shapes are taken first, until their least
    calls would fill the share of it that calls may take.
    """
    shapes = {shape.id: shape for shape in meta.shape_list()}
    found = {shape.id: _skip_reason(meta, settings, shape) for shape in shapes.values()}
    reasons = {name: reason for name, reason in found.items() if reason}
    if settings.time_budget_s is None:
        return reasons
    seconds = {name: meta.prediction(name).classification["predicted_s"] for name in shapes}
    room = settings.time_budget_s * CALL_SHARE
    for name in sorted(seconds, key=seconds.get):
        if name in reasons or infeasible(meta, shapes[name]):
            continue
        # The no-op and the anchor take no call of the shape.
        arms = sum(len(set(meta.planned(process, name)) - set(PROBES)) for process in range(settings.processes))
        room -= arms * LEAST_CALLS * CALL_SLACK * seconds[name]
        if room < 0:
            reasons[name] = (
                f"eager is predicted to take {seconds[name]:.2g} s a call, and the run's time budget of "
                f"{settings.time_budget_s:g} s is filled by quicker shapes"
            )
    return reasons


def _skip_reason(meta: RunMeta, settings: Settings, shape: Shape) -> str | None:
    """Return why a shape that fits is not run on this device, None when it is."""
    classification = meta.prediction(shape.id).classification
    predicted, limit = classification["predicted_s"], settings.max_call_s
    if predicted > limit:
        return f"eager is predicted to take {predicted:.1f} s a call, over the limit of {limit:g} s"
    if meta.device == "cpu" and (have := machine_memory_bytes()) < classification["peak_bytes"]:
        return f"eager needs {size(classification['peak_bytes'])} at its peak, the machine has {size(have)}"
    return None


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or its container's limit: what is free changes from minute to minute."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or no limit in it
        return min(total, int(MEMORY_LIMIT.read_text()))
    return total


def oversize_seconds(meta: RunMeta, settings: Settings, shape: Shape, process: int) -> float:
    """Return the seconds that a shape which eager cannot run needs in a process: its calls and its reference."""
    skipped = skipped_candidates(meta, settings, shape)
    plans = {name: plan for name, plan in meta.prediction(shape.id).candidates.items() if name not in skipped}
    calls = sum(OVERSIZE_CALLS * CALL_SLACK * (plan["predicted_s"] or 0.0) for plan in plans.values())
    return calls + len(plans) * settings.reference_budget_s * (ONE_ELEMENT if process else 1.0)


def share_of_first(left_s: float, reserved: Sequence[float | None]) -> float:
    """Return the seconds for the first of the shapes to come, out of `left_s` for all of them.

    `reserved` has the need of each shape that eager cannot run, known in advance, and None for each of the others.
    Those share equally what is left beside the needs, so that the last one finds its time.
    """
    first, others = reserved[0], sum(seconds or 0.0 for seconds in reserved[1:])
    if first is not None:
        return max(first, left_s - others) if all(item is not None for item in reserved) else first
    return max(0.0, left_s - others) / sum(item is None for item in reserved)


def left_out(settings: Settings, device: str, controls: Sequence[str], all_controls: Sequence[str]) -> str:
    """Return what a quick run on a GPU leaves out to end in time, in one line; empty for every other run."""
    missing = [name for name in all_controls if name not in controls]
    if not settings.quick or device != "cuda" or not missing:
        return ""
    return (
        f"left out of this quick run: {', '.join(missing)} (--control NAME brings one back, where the time allows); an "
        f"arm is timed for at most {settings.budget_s:g} s a shape, and a shape too large for eager has its reference "
        f"compared for at most {settings.reference_budget_s:g} s"
    )


def skipped_candidates(meta: RunMeta, settings: Settings, shape: Shape) -> dict[str, tuple[str, str]]:
    """Return the candidates of an infeasible shape that do not fit either or take too long: status and reason."""
    limit = settings.max_call_s
    skipped = {}
    for name, plan in meta.prediction(shape.id).candidates.items():
        if plan["unsupported"]:
            skipped[name] = ("infeasible", plan["unsupported"])
        elif (plan["predicted_s"] or 0) > limit:
            reason = f"predicted to take {plan['predicted_s']:,.0f} s a call, over the limit of {limit:g} s"
            skipped[name] = ("skipped", reason)
    return skipped


class Pending:
    """The rows of one run by process, shape and arm."""

    def __init__(self, meta: RunMeta, settings: Settings, records: Sequence[Record]) -> None:
        self.meta = meta
        self.settings = settings
        self.shapes = {shape.id: shape for shape in meta.shape_list()}
        self.rows: dict[Key, Record] = {}
        self.planned: set[Key] = {
            (process, shape_id, arm)
            for process in range(settings.processes)
            for shape_id in self.shapes
            for arm in meta.planned(process, shape_id)
        }
        self.not_run = skip_reasons(meta, settings) if meta.not_run is None else meta.not_run
        # Shape and candidate whose worker hung.
        self.silent: set[tuple[str, str]] = set()
        for record in records:
            self.add(record)

    @property
    def done(self) -> int:
        """The number of planned rows that are there."""
        return sum(key in self.planned for key in self.rows)

    def add(self, record: Record) -> None:
        """Count a row as there."""
        self.rows[record.key] = record
        if record.silent:
            self.silent.add((record.shape_id, parse_arm(record.arm, self.meta.candidates).name))

    def todo(self, process: int, order: Sequence[Shape]) -> tuple[ShapeTodo, ...]:
        """Return what is missing of a process, shape by shape."""
        todo = []
        for shape in order:
            eager = self.rows.get((process, shape.id, EAGER))
            missing = []
            for arm in self.meta.planned(process, shape.id):
                row = self.rows.get((process, shape.id, arm))
                # A timed row without eager's beside it was torn off by an interruption: pairs are measured together.
                if row is None or (row.timing is not None and eager is None):
                    missing.append(arm)
            if missing:
                left = eager is not None and eager.status == "oom" and shape.has_elements
                oversize = infeasible(self.meta, shape) or left
                if eager is not None and not oversize:
                    continue
                todo.append(ShapeTodo(shape=shape.as_dict(), arms=tuple(missing), oversize=oversize))
        return tuple(todo)

    def skipped_in_advance(self, process: int) -> list[Record]:
        """Return the rows that need no worker: eager where it cannot fit, and what is predicted too slow or too big."""
        records = []
        for shape in self.shapes.values():
            classification = self.meta.prediction(shape.id).classification
            skipped = {}
            if infeasible(self.meta, shape):
                need, have = classification["peak_bytes"], classification["memory_bytes"]
                reason = f"eager needs {size(need)} at its peak, the device has {size(have)}"
                skipped[EAGER] = ("infeasible", reason)
                skipped |= skipped_candidates(self.meta, self.settings, shape)
            elif reason := self.not_run.get(shape.id):
                skipped = dict.fromkeys(self.meta.planned(process, shape.id), ("skipped", reason))
            else:
                skipped = self._settled(process, shape)
            records += [
                self._bare_record(process, shape, arm, status, reason)
                for arm, (status, reason) in skipped.items()
                if (process, shape.id, arm) not in self.rows
            ]
        return records

    def _settled(self, process: int, shape: Shape) -> dict[str, tuple[str, str]]:
        """Return the arms whose row an earlier process has settled: status and reason."""
        if not process:
            return {}
        planned = self.meta.planned(process, shape.id)
        first = {arm: self.rows.get((0, shape.id, arm)) for arm in planned}
        eager = first[EAGER]
        if eager and eager.status == "skipped":
            return dict.fromkeys(planned, ("skipped", eager.reason))
        # What the first process had no time to set up, the others would not pair with.
        skipped = {arm: row for arm, row in first.items() if arm in self.meta.controls and row}
        found = {arm: ("skipped", row.reason) for arm, row in skipped.items() if row.status == "skipped"}
        if all(first[arm] and first[arm].timing is None for arm in self.meta.candidates):
            reason = "no candidate was timed on this shape in the first process, so there is nothing to compare"
            context = [arm for arm in planned if arm in (*self.meta.controls, NOOP, ANCHOR)]
            found |= dict.fromkeys(context, ("skipped", reason))
        hung = [arm for arm in self.meta.candidates if (shape.id, arm) in self.silent]
        return found | dict.fromkeys(hung, ("error", "not asked again: it gave no answer in an earlier process"))

    def losses(self, process: int, lost: ReferenceLost, todo: Sequence[ShapeTodo], at: str) -> list[Record]:
        """Return the error rows a lost reference costs, `at` being the current shape.

        They are those of the arm it was lost with; all that were left if it died without a name.
        """
        missing = [(item, arm) for item in todo for arm in item.arms if item.shape["id"] == at]
        if lost.arm != EAGER_ARM:
            missing = [(item, arm) for item, arm in missing if arm == str(lost.arm)]
        missing = missing or [(item, arm) for item in todo for arm in item.arms]
        return [
            self._bare_record(process, from_dict(item.shape), arm, "error", str(lost))
            for item, arm in missing
            if (process, item.shape["id"], arm) not in self.rows
        ]

    def _bare_record(self, process: int, shape: Shape, arm: str, status: str, reason: str) -> Record:
        """Return a row that carries a reason and no measurement."""
        which = parse_arm(arm, self.meta.candidates)
        plan = self.meta.prediction(shape.id).candidates.get(which.name, {})
        return Record(
            run=self.meta.id,
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            kind=which.kind,
            status=status,
            reason=reason,
            family=plan.get("family", ""),
            rule=plan.get("rule", ""),
            options=plan.get("options", {}),
            contract=plan.get("contract", ""),
            predicted_s=plan.get("predicted_s"),
            predicted_peak_bytes=plan.get("peak_bytes"),
            measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
