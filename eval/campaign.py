"""A campaign: the parent that predicts, runs one process run after another, and writes down what they measure.

The parent never imports a candidate, and loads no torch on a CPU. Each process run has a worker for the reference
(eager, the controls, the judge) and one for each candidate; the parent hands them their turns, so that one measures
at a time and blocks are interleaved as if all arms shared a process. It holds the run's secret seed and tells each
worker only the numbers of its next input, when its arms are built.

Several campaigns of one parent share a fork server (`rooflane.eval.forkserver`), whose start of a few seconds is
paid once: a corpus of tiny candidates costs two to three seconds each.
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

from rooflane.dispatch import Profile, RuleError
from rooflane.eval.candidates import load_rule_table, parse_candidate
from rooflane.eval.environment import ROOT, resolve_device
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.forkserver import fork_server
from rooflane.eval.gpu_lock import campaign_lock, device_key
from rooflane.eval.integrity import harness_digests
from rooflane.eval.planning import foregone_candidates, infeasible, predict, profile_for, skip_reasons
from rooflane.eval.records import ANCHOR, COMPILED_PREFIX, COPY_PREFIX, EAGER, NOOP, Key, Record, RulesUsed, RunMeta
from rooflane.eval.reveal import keep_seed, recall_seed, reveal, seed_hash
from rooflane.eval.run import Run, create_run, open_run
from rooflane.eval.settings import Settings, ShapeTodo, derive_seed, make_settings
from rooflane.eval.shape_work import ProcessContext, ShapeWork, arm_kind
from rooflane.eval.tables import size
from rooflane.eval.team import ReferenceLost, Team
from rooflane.eval.telemetry import Telemetry
from rooflane.shapes import Shape

# Those that need no compiler first: should the time run short, the dear ones are what is left out.
CONTROL_NAMES = ("identity", "sdpa", "compiled", "compiled_reduce_overhead")
# Of a limited run, the share of the time the first process may take: it compiles, the others find its caches.
FIRST_SHARE = 0.6
# What a run's time is well spent on; the rest is overhead.
WORK = ("warm-up", "measurement", "verification")
# The compiler's own modules take seconds to import; where they are sure to be needed the fork server has them ready.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")
COMPILING_FAMILIES = ("graph_compile",)


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
    profile = profile_for(wanted, device)
    try:
        rules = load_rule_table(wanted.rules)
    except RuleError as error:
        raise EvaluationError(str(error)) from None
    now = datetime.datetime.now(datetime.UTC)
    seed = wanted.seed if wanted.seed is not None else secrets.randbits(63)
    meta = RunMeta(
        id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        started_at=now.isoformat(timespec="seconds"),
        command=command,
        rooflane_version=version("rooflane"),
        # A seed among the settings would show what the hash below hides.
        settings=wanted.model_dump(mode="json") | {"seed": None},
        device=device,
        seed=None,
        seed_hash=seed_hash(seed),
        shapes=[shape.as_dict() for shape in shapes],
        candidates=list(candidates),
        controls=list(controls),
        extra_arms=[*(f"{COPY_PREFIX}{name}" for name in candidates), NOOP, ANCHOR],
        profile=profile.model_dump(mode="json"),
        price_per_hour=profile.usd_per_hour or None,
        predictions=[predict(shape, profile, parsed, rules) for shape in shapes],
        rules=RulesUsed(source=rules.title(), digest=rules.digest(), text=rules.text()),
    )
    with campaign_lock(device_key(device), meta.id):
        run = create_run(Path(runs_dir), meta)
        keep_seed(run.folder, seed)
        return Campaign(run, on_event).run_all()


def resume(folder: str | Path, *, on_event: Callable[[Event], None] | None = None) -> Run:
    """Go on with a run: rows that are there stay and are not measured again; the missing ones are added."""
    run = open_run(folder)
    with campaign_lock(device_key(run.meta.device), run.meta.id):
        run.resume()
        return Campaign(run, on_event).run_all()


class Campaign:
    """The rows a run wants, those it has, and the workers that close the gap."""

    def __init__(self, run: Run, on_event: Callable[[Event], None] | None) -> None:
        self.run = run
        self.meta = run.meta
        self.settings = Settings(**self.meta.settings)
        self.seed = recall_seed(run.folder, self.meta)
        self.on_event = on_event or (lambda event: None)
        self.shapes = {shape.id: shape for shape in self.meta.shape_list()}
        self.rows: dict[Key, Record] = {record.key: record for record in run.records()}
        self.planned: set[Key] = {
            (process, shape_id, arm)
            for process in range(self.settings.processes)
            for shape_id in self.shapes
            for arm in self.meta.planned(process, shape_id)
        }
        self.skips = skip_reasons(self.meta, self.settings, tuple(self.planned))
        self.files = harness_digests(ROOT)
        self.started = monotonic()
        self.working_s = 0.0
        self.at = ""

    def run_all(self) -> Run:
        """Run every process in turn; on Ctrl-C keep what was measured and say so in the run."""
        try:
            self._tell("run", text=f"run {self.run.folder}")
            for process in range(self.settings.processes):
                self._run_process(process)
            if self.meta.seed is None and self.planned <= self.rows.keys():
                self.run.meta = reveal(self.run.folder, self.meta, self.seed, self._overhead_share())
        except KeyboardInterrupt:
            self.run.interrupted = True
        if not self.run.interrupted and (said := self.run.finish()):
            self._tell("note", text=said)
        return self.run

    def _run_process(self, process: int) -> None:
        """Bring one process's rows to completion, with as many teams of workers as it takes."""
        self._write_foregone(process)
        order = list(self.shapes.values())
        random.Random(derive_seed(self.seed, process, "shape order")).shuffle(order)
        while todo := self._todo(process, order):
            before = len(self.rows)
            self.at = ""
            try:
                self._run_team(process, todo)
            except ReferenceLost as lost:
                self._write_loss(process, lost, todo)
            if len(self.rows) == before:
                # Nothing came of it, not even a name: more workers would meet the same end.
                self.at = ""
                self._write_loss(process, ReferenceLost("the workers ended without a row", ""), todo)

    def _run_team(self, process: int, todo: tuple[ShapeTodo, ...]) -> None:
        """Measure what is to do with one team of workers."""
        self._preload(process)
        # The table the run was predicted with, whatever has become of its file since.
        rules = self.meta.rules.text if self.meta.rules else load_rule_table(self.settings.rules).text()
        hello = {"device": self.meta.device, "profile": self.meta.profile, "rules": rules}
        team = Team(self.meta.candidates, hello, self.settings.arm_timeout_s)
        deadline = self._deadline(process)
        try:
            team.start()
            telemetry = Telemetry(team.uuid)
            context = ProcessContext(
                run=self.meta.id,
                process=process,
                seed=self.seed,
                device=self.meta.device,
                settings=self.settings,
                profile=Profile.model_validate(self.meta.profile),
                candidates=tuple(self.meta.candidates),
                team=team,
                files=self.files,
                on_stage=lambda shape, arm, stage: self._tell(
                    "stage", process, shape, arm, stage, text=f"{stage} {arm}"
                ),
                on_rows=self._add,
                telemetry=lambda: telemetry.read(team.count()),
            )
            for index, item in enumerate(todo):
                self.at = item.shape["id"]
                share = (deadline - monotonic()) / (len(todo) - index)
                work = ShapeWork(context, Shape(**item.shape), item, monotonic() + share)
                if monotonic() > deadline:
                    work.skip_all("the run's time budget was spent before its turn")
                else:
                    work.run()
        finally:
            team.close()
            self.working_s += sum(team.spent.get(what, 0.0) for what in WORK)

    def _preload(self, process: int) -> None:
        """Have the fork server import the compiler where a planned arm is sure to need it."""
        plans = [plan for prediction in self.meta.predictions for plan in prediction.candidates.values()]
        compiles = any(name.startswith(COMPILED_PREFIX) for name in self.meta.controls)
        compiles = compiles and process < self.settings.compile_processes
        if compiles or any(plan["family"] in COMPILING_FAMILIES for plan in plans):
            server = fork_server()
            if server:
                server.preload(COMPILER_MODULES)

    def _deadline(self, process: int) -> float:
        """Return when a process must have ended, by `time.monotonic()`."""
        limit = self.settings.time_budget_s
        if limit is None:
            return float("inf")
        left = max(0.0, limit - (monotonic() - self.started))
        later = self.settings.processes - process - 1
        return monotonic() + left * (FIRST_SHARE if process == 0 and later else 1 / (later + 1))

    def _overhead_share(self) -> float:
        """Return the share of this run's time that was neither warm-up, measurement nor verification."""
        return round(1 - self.working_s / max(1e-9, monotonic() - self.started), 4)

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
                oversize = infeasible(self.meta, shape) or (eager is not None and eager.status == "oom")
                if eager is not None and not oversize:
                    continue
                todo.append(ShapeTodo(shape=shape.as_dict(), arms=tuple(missing), oversize=oversize))
        return tuple(todo)

    def _write_foregone(self, process: int) -> None:
        """Write the rows that need no worker: eager where it cannot fit, and what is predicted too slow or too big."""
        records = []
        for shape in self.shapes.values():
            classification = self.meta.prediction(shape.id).classification
            foregone = {}
            if infeasible(self.meta, shape):
                need, have = classification["peak_bytes"], classification["memory_bytes"]
                reason = f"eager needs {size(need)} at its peak, the device has {size(have)}"
                foregone[EAGER] = ("infeasible", reason)
                foregone |= foregone_candidates(self.meta, self.settings, shape)
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

    def _write_loss(self, process: int, lost: ReferenceLost, todo: tuple[ShapeTodo, ...]) -> None:
        """Write the error rows a lost reference costs: the arm at hand; all that was left if it died without a name."""
        missing = [(item, arm) for item in todo for arm in item.arms if item.shape["id"] == self.at]
        if lost.arm != EAGER:
            missing = [(item, arm) for item, arm in missing if arm == lost.arm]
        missing = missing or [(item, arm) for item in todo for arm in item.arms]
        self._add(
            [
                self._bare_record(process, Shape(**item.shape), arm, "error", str(lost))
                for item, arm in missing
                if (process, item.shape["id"], arm) not in self.rows
            ]
        )

    def _bare_record(self, process: int, shape: Shape, arm: str, status: str, reason: str) -> Record:
        """Return a row that carries a reason and no measurement."""
        plan = self.meta.prediction(shape.id).candidates.get(arm.removeprefix(COPY_PREFIX), {})
        return Record(
            run=self.meta.id,
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            kind=arm_kind(arm, self.meta.candidates),
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

    def _add(self, records: Sequence[Record]) -> None:
        """Write rows to the disk, then count them."""
        self.run.append(records)
        for record in records:
            self.rows[record.key] = record
            text = f"{record.status}: {record.reason}" if record.reason else record.status
            self._tell("row", record.process, record.shape_id, record.arm, text=text)

    def _tell(self, kind: str, process: int = 0, shape: str = "", arm: str = "", stage: str = "", *, text: str) -> None:
        """Send an event to the caller's display."""
        done = sum(key in self.planned for key in self.rows)
        total = len(self.planned)
        self.on_event(Event(kind, process, self.settings.processes, shape, arm, stage, done, total, text))
