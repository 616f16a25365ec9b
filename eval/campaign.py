"""A campaign: the parent that predicts, starts one fresh process after another, and writes down what they measure.

The parent never imports a candidate; it holds no timer and no result but the rows it was handed.
"""

from __future__ import annotations

import datetime
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from rooflane.dispatch import Profile, ProfileError, RuleError, classify, load_profile
from rooflane.eval.candidates import Candidate, load_rule_table, parse_candidate, plan_candidate
from rooflane.eval.environment import available_memory_bytes, resolve_device
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.launch import Crash, run_worker
from rooflane.eval.records import EAGER, INFEASIBLE, Key, Prediction, Record, RulesUsed, RunMeta
from rooflane.eval.run import Run, create_run, open_run
from rooflane.eval.settings import Job, Settings, ShapeTodo, derive_seed, make_settings
from rooflane.eval.tables import size
from rooflane.shapes import Shape

# Those that need no compiler first: should the time run short, the dear ones are what is left out.
CONTROL_NAMES = ("identity", "sdpa", "compiled", "compiled_reduce_overhead")
# Of a limited run, the share of the time the first process may take: it compiles, the others find its caches.
FIRST_SHARE = 0.6
# Of a limited run, the share calls may take beside imports and compilation, and the calls an arm makes at the least:
# the first one, one accuracy trial (two), one estimate, one warm-up, four rounds.
CALL_SHARE = 0.6
LEAST_CALLS = 9
# What a call may take over its prediction: a roofline knows no caches, and CPU calls took 1.3 to 3.7 times theirs.
CALL_SLACK = 2


@dataclass(frozen=True)
class Event:
    """Something a progress display may show."""

    kind: str  # "run", "stage", "row" or "note"
    process: int
    processes: int
    shape: str
    arm: str
    stage: str
    done: int
    total: int
    text: str


def evaluate(
    shapes: Sequence[Shape],
    candidates: str | Sequence[str] = ("dispatched",),
    *,
    runs_dir: str | Path = "runs",
    on_event: Callable[[Event], None] | None = None,
    command: str = "",
    **settings: object,
) -> Run:
    """Predict, verify and time candidates against eager and the controls on every shape; return the run.

    `settings` are the fields of `Settings`. A candidate, one or several, is `dispatched`, a family
    (`family:key=value`), or a file (`path.py[:name]`). Everything is written to a new folder under `runs_dir` as it
    is measured. Raises `EvaluationError` before anything runs when the request cannot be run; Ctrl-C ends the worker
    and returns the run with `interrupted` set.
    """
    wanted = make_settings(**settings)
    candidates = [candidates] if isinstance(candidates, str) else candidates
    if not shapes:
        raise EvaluationError("no shape was given; name a shape file with at least one line")
    if not candidates or len(set(candidates)) != len(candidates):
        raise EvaluationError("name at least one candidate, and each only once")
    parsed = [parse_candidate(text) for text in candidates]
    controls = CONTROL_NAMES if wanted.controls is None else wanted.controls
    for name in controls:
        if name not in CONTROL_NAMES:
            raise EvaluationError(f"no control is called {name!r}; there are: {', '.join(CONTROL_NAMES)}")
    device = resolve_device(wanted.device)
    wanted = wanted.on_device(device)
    profile = _profile_for(wanted, device)
    try:
        rules = load_rule_table(wanted.rules)
    except RuleError as error:
        raise EvaluationError(str(error)) from None
    now = datetime.datetime.now(datetime.UTC)
    meta = RunMeta(
        id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        started_at=now.isoformat(timespec="seconds"),
        command=command,
        rooflane_version=version("rooflane"),
        settings=wanted.model_dump(mode="json"),
        device=device,
        seed=wanted.seed if wanted.seed is not None else secrets.randbits(48),
        shapes=[shape.as_dict() for shape in shapes],
        candidates=list(candidates),
        controls=list(controls),
        profile=profile.model_dump(mode="json"),
        price_per_hour=profile.usd_per_hour or None,
        predictions=[_predict(shape, profile, parsed, rules) for shape in shapes],
        rules=RulesUsed(source=rules.title(), digest=rules.digest(), text=rules.text()),
    )
    run = create_run(Path(runs_dir), meta)
    return Campaign(run, on_event).run_all()


def resume(folder: str | Path, *, on_event: Callable[[Event], None] | None = None) -> Run:
    """Go on with a run: rows that are there stay and are not measured again; the missing ones are added."""
    return Campaign(open_run(folder), on_event).run_all()


class Campaign:
    """The rows a run wants, those it has, and the workers that close the gap."""

    def __init__(self, run: Run, on_event: Callable[[Event], None] | None) -> None:
        self.run = run
        self.meta = run.meta
        self.settings = Settings(**self.meta.settings)
        self.on_event = on_event or (lambda event: None)
        self.shapes = {shape.id: shape for shape in self.meta.shape_list()}
        self.rows: dict[Key, Record] = {record.key: record for record in run.records()}
        self.planned: set[Key] = {
            (process, shape_id, arm)
            for process in range(self.settings.processes)
            for shape_id in self.shapes
            for arm in self.meta.planned(process, shape_id)
        }
        self.skips = self._skip_reasons()
        self.started = monotonic()

    def run_all(self) -> Run:
        """Run every process in turn; on Ctrl-C keep what was measured and say so in the run."""
        try:
            self._tell("run", text=f"run {self.run.folder}")
            for process in range(self.settings.processes):
                self._run_process(process)
        except KeyboardInterrupt:
            self.run.interrupted = True
        return self.run

    def _run_process(self, process: int) -> None:
        """Bring one process's rows to completion, with as many workers as it takes."""
        self._write_foregone(process)
        order = list(self.shapes.values())
        random.Random(derive_seed(self.meta.seed, process, "shape order")).shuffle(order)
        while todo := self._todo(process, order):
            before = len(self.rows)
            try:
                run_worker(self._job(process, todo), self.settings.arm_timeout_s, self._on_stage(process), self._add)
            except Crash as crash:
                self._write_crash(process, crash, todo)
            if len(self.rows) == before:
                # Nothing came of it, not even a name: more workers would meet the same end.
                self._write_crash(process, Crash("the worker ended without a row", "", ""), todo)

    def _todo(self, process: int, order: Sequence[Shape]) -> tuple[ShapeTodo, ...]:
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
                oversize = self._infeasible(shape) or (eager is not None and eager.status == "oom")
                if eager is not None and not oversize:
                    continue
                todo.append(ShapeTodo(shape=shape.as_dict(), arms=tuple(missing), oversize=oversize))
        return tuple(todo)

    def _job(self, process: int, todo: tuple[ShapeTodo, ...]) -> Job:
        """Return the job of one worker."""
        deadline = None
        limit = self.settings.time_budget_s
        if limit is not None:
            left = max(0.0, limit - (monotonic() - self.started))
            later = self.settings.processes - process - 1
            deadline = left * (FIRST_SHARE if process == 0 and later else 1 / (later + 1))
        return Job(
            run=self.meta.id,
            process=process,
            seed=self.meta.seed,
            device=self.meta.device,
            settings=self.settings,
            profile=self.meta.profile,
            candidates=tuple(self.meta.candidates),
            rules=self.meta.rules and self.meta.rules.text,
            todo=todo,
            deadline_s=deadline,
        )

    def _write_foregone(self, process: int) -> None:
        """Write the rows that need no worker: eager where it cannot fit, and what is predicted too slow or too big."""
        records = []
        for shape in self.shapes.values():
            classification = self.meta.prediction(shape.id).classification
            foregone = {}
            if self._infeasible(shape):
                need, have = classification["peak_bytes"], classification["memory_bytes"]
                reason = f"eager needs {size(need)} at its peak, the device has {size(have)}"
                foregone[EAGER] = ("infeasible", reason)
                foregone |= self._foregone_candidates(shape)
            elif self.skips[shape.id]:
                foregone = dict.fromkeys(self.meta.planned(process, shape.id), ("skipped", self.skips[shape.id]))
            else:
                # What the first process had no time to set up, the others would not pair with.
                planned = self.meta.planned(process, shape.id) if process else ()
                first = {arm: self.rows.get((0, shape.id, arm)) for arm in planned if arm in self.meta.controls}
                skipped = {arm: row for arm, row in first.items() if row and row.status == "skipped"}
                foregone = {arm: ("skipped", row.reason) for arm, row in skipped.items()}
            records += [
                self._bare_record(process, shape, arm, status, reason)
                for arm, (status, reason) in foregone.items()
                if (process, shape.id, arm) not in self.rows
            ]
        if records:
            self._add(records)

    def _write_crash(self, process: int, crash: Crash, todo: tuple[ShapeTodo, ...]) -> None:
        """Write the error rows a dead worker costs: the arm at hand; all that was left if it died without a name."""
        lost = [(item, arm) for item in todo for arm in item.arms if item.shape["id"] == crash.shape]
        if crash.arm != EAGER:
            lost = [(item, arm) for item, arm in lost if arm == crash.arm]
        lost = lost or [(item, arm) for item in todo for arm in item.arms]
        self._add(
            [
                self._bare_record(process, Shape(**item.shape), arm, "error", str(crash))
                for item, arm in lost
                if (process, item.shape["id"], arm) not in self.rows
            ]
        )

    def _bare_record(self, process: int, shape: Shape, arm: str, status: str, reason: str) -> Record:
        """Return a row that carries a reason and no measurement."""
        kind = "baseline" if arm == EAGER else "control" if arm in self.meta.controls else "candidate"
        plan = self.meta.prediction(shape.id).candidates.get(arm, {})
        return Record(
            run=self.meta.id,
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            kind=kind,
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

    def _infeasible(self, shape: Shape) -> bool:
        """Tell whether a shape's eager forward was predicted not to fit."""
        return self.meta.prediction(shape.id).classification["regime"] == INFEASIBLE

    def _skip_reasons(self) -> dict[str, str | None]:
        """Return for each shape why it is not run although it fits, None where it is.

        Under a time budget the quickest shapes are taken first, until their least calls would fill the share of it
        that calls may take; what is then left out is decided by the prediction alone, before anything runs.
        """
        reasons = {shape.id: self._skip_reason(shape) for shape in self.shapes.values()}
        if self.settings.time_budget_s is None:
            return reasons
        seconds = {name: self.meta.prediction(name).classification["predicted_s"] for name in self.shapes}
        room = self.settings.time_budget_s * CALL_SHARE
        for name in sorted(seconds, key=seconds.get):
            if reasons[name] or self._infeasible(self.shapes[name]):
                continue
            arms = sum(key[1] == name for key in self.planned)
            room -= arms * LEAST_CALLS * CALL_SLACK * seconds[name]
            if room < 0:
                reasons[name] = (
                    f"eager is predicted to take {seconds[name]:.2g} s a call, and the run's time budget of "
                    f"{self.settings.time_budget_s:g} s is filled by quicker shapes"
                )
        return reasons

    def _skip_reason(self, shape: Shape) -> str | None:
        """Return why a shape that fits is not run on this device, None when it is."""
        classification = self.meta.prediction(shape.id).classification
        predicted, limit = classification["predicted_s"], self.settings.max_call_s
        if predicted > limit:
            return f"eager is predicted to take {predicted:.1f} s a call, over the limit of {limit:g} s"
        if self.meta.device == "cpu" and (free := available_memory_bytes()) < classification["peak_bytes"]:
            return f"eager needs {size(classification['peak_bytes'])} at its peak, {size(free)} of memory are free"
        return None

    def _foregone_candidates(self, shape: Shape) -> dict[str, tuple[str, str]]:
        """Return the candidates of an infeasible shape that do not fit either or take too long: status and reason."""
        limit = self.settings.max_call_s
        foregone = {}
        for name, plan in self.meta.prediction(shape.id).candidates.items():
            if plan["unsupported"]:
                foregone[name] = ("infeasible", plan["unsupported"])
            elif (plan["predicted_s"] or 0) > limit:
                reason = f"predicted to take {plan['predicted_s']:,.0f} s a call, over the limit of {limit:g} s"
                foregone[name] = ("skipped", reason)
        return foregone

    def _add(self, records: Sequence[Record]) -> None:
        """Write rows to the disk, then count them."""
        self.run.append(records)
        for record in records:
            self.rows[record.key] = record
            text = f"{record.status}: {record.reason}" if record.reason else record.status
            self._tell("row", record.process, record.shape_id, record.arm, text=text)

    def _on_stage(self, process: int) -> Callable[[str, str, str], None]:
        """Return the listener of one worker's stages."""
        return lambda shape, arm, stage: self._tell("stage", process, shape, arm, stage, text=f"{stage} {arm}")

    def _tell(self, kind: str, process: int = 0, shape: str = "", arm: str = "", stage: str = "", *, text: str) -> None:
        """Send an event to the caller's display."""
        done = sum(key in self.planned for key in self.rows)
        total = len(self.planned)
        self.on_event(Event(kind, process, self.settings.processes, shape, arm, stage, done, total, text))


def _profile_for(settings: Settings, device: str) -> Profile:
    """Return the profile a run predicts with, its memory lowered to a cap."""
    name = "cpu" if settings.profile == "auto" and device == "cpu" else settings.profile
    try:
        profile = load_profile(name)
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


def _predict(shape: Shape, profile: Profile, candidates: Sequence[Candidate], rules: object) -> Prediction:
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
