"""A campaign: the parent that predicts, runs one process run after another, and writes down what they measure.

The parent never imports a candidate, and loads no torch on a CPU. Each process run has a worker for the reference
(eager, the controls, the judge) and one for each candidate; the parent hands them their turns, so that one measures
at a time and blocks are interleaved as if all arms shared a process. It holds the run's secret seed and tells each
worker only the numbers of its next input, when its arms are built.

Several campaigns of one parent share a fork server (`rooflane.eval.campaign.forkserver`), whose start of a few
seconds is paid once: a corpus of tiny candidates costs two to three seconds each.
"""

from __future__ import annotations

import datetime
import random
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from time import monotonic

from rooflane.dispatch import Profile, RuleError
from rooflane.eval.campaign.build_ahead import end_builds, start_host_build, start_kernels, wait_for_builds
from rooflane.eval.campaign.confinement import Sandboxes, scratch_folder
from rooflane.eval.campaign.device import Telemetry, campaign_lock, device_key, lock_path
from rooflane.eval.campaign.forkserver import fork_server
from rooflane.eval.campaign.package_files import PackageFiles, advice, finding
from rooflane.eval.campaign.planning import (
    Pending,
    compiles,
    left_out,
    oversize_seconds,
    profile_for,
    share_of_first,
    skip_reasons,
)
from rooflane.eval.campaign.requests import requests_of
from rooflane.eval.campaign.session import ProcessContext
from rooflane.eval.campaign.shape_work import ShapeWork
from rooflane.eval.campaign.team import ReferenceLost, Spent, Team, overhead_share
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import resolve_device
from rooflane.eval.record.records import ANCHOR, EAGER, NOOP, ArmId, Record, RulesUsed, RunMeta
from rooflane.eval.record.settings import Settings, ShapeTodo, derive_seed, make_settings
from rooflane.eval.report.table import number
from rooflane.eval.report.table import times as ratio_text
from rooflane.eval.stats.run import Run, create_run, open_run
from rooflane.eval.worker.candidates import load_rule_table
from rooflane.eval.worker.outside import standing
from rooflane.eval.worker.protocol import Hello
from rooflane.families import get_family
from rooflane.families.runtime.host import host_build_pending
from rooflane.shapes import Problem, Shape, from_dict

# Of a limited run, the share of the time the first process may take: it compiles, the others find its caches.
FIRST_SHARE = 0.6
NUMBER = re.compile(r"\b\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?\b")
GAP = "\0"  # stands for a number where reasons are compared
# Imported before the first candidate, which could change their files.
REPORT_MODULES = ("rooflane.eval.report.report", "rooflane.eval.report.page")
# The compiler's own modules take seconds to import; where they are sure to be needed the fork server has them ready.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Event:
    """Something a progress display may show."""

    kind: str  # "run", "stage", "row", "shape", "skipped" or "note"
    process: int
    processes: int
    shape: str
    arm: str
    stage: str
    done: int
    total: int
    text: str
    elapsed_s: float
    left_s: float | None  # estimated from the rows measured so far; None before the first
    shapes: int  # that this process runs, those skipped in advance left out


def evaluate(
    shapes: Sequence[Shape | Problem],
    candidates: str | Sequence[str] | None = None,
    *,
    runs_dir: str | Path = "runs",
    on_event: Callable[[Event], None] | None = None,
    command: str = "",
    **settings: object,
) -> Run:
    """Predict, verify and time candidates against eager and the controls on every shape; return the run.

    `settings` are the fields of `Settings`. A candidate, one or several, is `dispatched`, which stands where none is
    named, a family (`family:key=value`), or a file (`path.py[:name]`). In place of shapes it takes problems
    (`rooflane.shapes.load_problems`); a candidate is then `optimize`, which stands where none is named, `half`,
    `compile`, a file or a folder. Everything is written to a new folder under `runs_dir` as it is measured. Raises
    `EvaluationError` before anything runs when the request cannot be run; Ctrl-C ends the worker and returns the run
    with `interrupted` set.
    """
    started = monotonic()
    wanted = make_settings(**settings)
    if not shapes:
        raise EvaluationError("no shape was given; name a shape file with at least one line")
    requests = requests_of(shapes)
    candidates = requests.default_candidates if candidates is None else candidates
    candidates = [candidates] if isinstance(candidates, str) else candidates
    if not candidates or len(set(candidates)) != len(candidates):
        raise EvaluationError("name at least one candidate, and each only once")
    parsed = [requests.parse(text) for text in candidates]
    for name in wanted.controls or ():
        if name not in requests.controls:
            raise EvaluationError(f"no control is called {name!r} here; there are: {', '.join(requests.controls)}")
    # It imports torch while this process does, where that is what tells the device.
    fork_server()
    device = resolve_device(wanted.device)
    if device == "cuda":
        start_host_build(parsed)
    given, wanted = wanted.controls, wanted.on_device(device)
    controls = requests.default_controls(wanted) if given is None else given
    profile = profile_for(wanted, device)
    try:
        rules = load_rule_table(wanted.rules)
    except RuleError as error:
        raise EvaluationError(str(error)) from None
    hello = Hello(device, profile.model_dump(mode="json"), rules.text(), describe=False)
    shapes = requests.describe(shapes, hello, wanted.arm_timeout_s)
    now = datetime.datetime.now(datetime.UTC)
    meta = RunMeta(
        id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        started_at=now.isoformat(timespec="seconds"),
        command=command,
        rooflane_version=version("rooflane"),
        settings=wanted.model_dump(mode="json"),
        device=device,
        seed=None,
        shapes=[shape.as_dict() for shape in shapes],
        candidates=list(candidates),
        controls=list(controls),
        extra_arms=[*(str(ArmId(name, "copy")) for name in candidates), NOOP, ANCHOR],
        profile=profile.model_dump(mode="json"),
        price_per_hour=profile.usd_per_hour or None,
        predictions=[requests.predict(shape, profile, parsed, rules) for shape in shapes],
        rules=RulesUsed(source=rules.title(), digest=rules.digest(), text=rules.text()),
        left_out=left_out(wanted, device, controls, requests.controls),
    )
    meta = meta.model_copy(update={"not_run": skip_reasons(meta, wanted)})
    with campaign_lock(device_key(device), meta.id):
        run = create_run(Path(runs_dir), meta)
        if device == "cuda":
            start_kernels(meta)
        try:
            return Campaign(run, on_event, started).run_all()
        finally:
            end_builds()


def resume(folder: str | Path, *, on_event: Callable[[Event], None] | None = None) -> Run:
    """Go on with a run: rows that are there stay and are not measured again; the missing ones are added."""
    run = open_run(folder)
    resolve_device(run.meta.device)
    with campaign_lock(device_key(run.meta.device), run.meta.id):
        run.resume()
        return Campaign(run, on_event).run_all()


class Campaign:
    """A run's rows and the workers that bring them in."""

    def __init__(self, run: Run, on_event: Callable[[Event], None] | None = None, started: float | None = None) -> None:
        self.run = run
        self.meta = run.meta
        self.settings = Settings(**self.meta.settings)
        # Drawn again when a run goes on, and on disk only when nothing is left to measure: a candidate could read it.
        self.seed = secrets.randbits(63) if self.settings.seed is None else self.settings.seed
        self.on_event = on_event or (lambda event: None)
        self.pending = Pending(self.meta, self.settings, run.records())
        self.run.watch()
        for module in REPORT_MODULES:
            import_module(module)
        self.package = PackageFiles()
        self.started = monotonic() if started is None else started
        # What a killed part took is not known any more: then there is no account.
        known = self.meta.spent_s or not self.pending.rows
        self.spent = Spent(self.started, self.meta.spent_s) if known else None
        # What workers inherit, before any candidate can change it.
        server = fork_server()
        self.standing = standing(server.pid if server else 0)
        # Nobody is confined before the run has a scratch folder.
        self.sandboxes = Sandboxes({}, Path(), (), wanted=False)
        self.at = ""
        self.done_before = self.pending.done
        self.skipped = 0  # rows of this part that needed no worker
        self.running = 0  # shapes that the process runs
        self.teams = 0
        self.apart_s = 0.0  # seconds whose pace says nothing of other rows: starts, and shapes too large for eager

    def run_all(self) -> Run:
        """Run every process in turn; on Ctrl-C keep what was measured and say so in the run."""
        try:
            self._tell("run", text=f"run {self.run.folder}")
            if self.meta.left_out:
                self._tell("note", text=self.meta.left_out)
            if self.meta.seed is None and self.meta.spent_s:
                self.run.update(spent_s={})  # it would be taken for the whole were this part killed
            with scratch_folder() as scratch:
                with self.spent.on("start-up") if self.spent else nullcontext():
                    self._sandbox(scratch)
                for process in range(self.settings.processes):
                    self._run_process(process)
                    if self._package_changed(process):
                        break
            self.run.written.check()
            if self.meta.seed is None and self.pending.done == len(self.pending.planned):
                account = self.spent.account() if self.spent else {}
                share = round(overhead_share(account), 4) if account else None
                self.run.update(seed=self.seed, spent_s=account, overhead_share=share)
        except KeyboardInterrupt:
            self.run.interrupted = True
            self.run.written.check()
            if self.spent and self.run.meta.seed is None:
                self.run.update(spent_s=self.spent.account())
        if not self.run.interrupted and (said := self.run.finish()):
            self._tell("note", text=said)
        return self.run

    def _sandbox(self, scratch: Path) -> None:
        """Prepare the candidates' sandboxes; tell at once where there is none or it holds less than it should."""
        hidden = (self.run.folder, lock_path(device_key(self.meta.device)))
        parse = requests_of(self.meta.shape_list()).parse
        files = {name: path for name in self.meta.candidates if (path := parse(name).path)}
        self.sandboxes = Sandboxes(files, scratch, hidden, wanted=self.settings.sandbox)
        line = self.sandboxes.line
        if line != self.run.meta.sandbox:
            self.run.update(sandbox=line)
        if line and not line.startswith("on:"):
            self._tell("note", text=f"sandbox {line}")

    def _run_process(self, process: int) -> None:
        """Bring one process's rows to completion, with as many teams of workers as it takes."""
        skipped = self.pending.skipped_in_advance(process)
        self.skipped += len(skipped)
        self._add(skipped)
        if process == 0:
            self._tell_skipped(skipped)
        order = list(self.pending.shapes.values())
        if self.settings.time_budget_s is None:
            random.Random(derive_seed(self.seed, process, "shape order")).shuffle(order)
        else:
            # Where time may run out, it is to run out on the same shapes in every process.
            # Of shapes that are alike, the smallest is ready first, and the user sees a row.
            order.sort(key=lambda shape: (self.meta.prediction(shape.id).classification["predicted_s"], shape.tokens))
        self.running = len(self.pending.todo(process, order))
        while todo := self.pending.todo(process, order):
            before = len(self.pending.rows)
            self.at = ""
            try:
                self._run_team(process, todo)
            except ReferenceLost as lost:
                self._add(self.pending.losses(process, lost, todo, self.at))
            if len(self.pending.rows) == before:
                # Nothing came of it, not even a name: more workers would meet the same end.
                lost = ReferenceLost("the workers ended without a row", None)
                self._add(self.pending.losses(process, lost, todo, ""))

    def _package_changed(self, process: int) -> bool:
        """Note in a process's rows of candidates that rooflane's own files are others now than before the run."""
        names = self.package.changes()
        if names:
            line, wanted = finding(names), {*self.meta.candidates}
            rows = [row for row in self.pending.rows.values() if row.process == process and row.arm in wanted]
            self._add([row.model_copy(update={"integrity": [*row.integrity, line]}) for row in rows])
            self._tell("note", process, text=advice(names))
        return bool(names)

    def _run_team(self, process: int, todo: tuple[ShapeTodo, ...]) -> None:
        """Measure what is to do with one team of workers."""
        # The table the run was predicted with, whatever has become of its file since.
        rules = self.meta.rules.text if self.meta.rules else load_rule_table(self.settings.rules).text()
        hello = Hello(self.meta.device, self.meta.profile, rules, describe=False, standing=self.standing)
        deadline = self._deadline(process)
        if self.meta.device == "cuda" and self._uses_families() and host_build_pending():
            self._tell("note", process, text="compiling the C++ call path once, about half a minute")
        team = Team(
            self.meta.candidates,
            hello,
            self.settings.arm_timeout_s,
            self.spent,
            lambda text: self._tell("note", process, self.at, text=text),
            self.sandboxes.confine,
        )
        try:
            self.teams += 1
            with team.spending("start-up"), self._apart():
                if compiles(self.meta, process) and (server := fork_server()):
                    server.preload(COMPILER_MODULES)
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
                on_stage=lambda shape, doing: self._tell(
                    "stage", process, shape, str(doing.arm), doing.what, text=f"{doing.what} {doing.arm}"
                ),
                on_rows=self._add,
                telemetry=lambda: telemetry.read(team.count()),
                deadline=deadline,
                before_arms=self._await_builds,
            )
            needs = [self._reserved(process, item) for item in todo]
            for index, item in enumerate(todo):
                self.at = item.shape["id"]
                share = share_of_first(deadline - monotonic(), needs[index:])
                # A planned shape runs, with its fewest calls, when the budget is spent too: which shapes a run has must
                # not depend on what else the machine did.
                with self._apart() if item.oversize else nullcontext():
                    ShapeWork(context, from_dict(item.shape), item, monotonic() + share).run()
                self._tell("shape", process, self.at, text=self._figures(process, self.at))
        finally:
            team.close()

    def _reserved(self, process: int, item: ShapeTodo) -> float | None:
        """Return the seconds to keep for a shape that eager cannot run, None for another."""
        return oversize_seconds(self.meta, self.settings, Shape(**item.shape), process) if item.oversize else None

    def _uses_families(self) -> bool:
        """Return whether a candidate is built from a family whose calls go through the C++ call path."""
        plans = [plan for prediction in self.meta.predictions for plan in prediction.candidates.values()]
        return any(plan["family"] and not get_family(plan["family"]).compiles for plan in plans)

    def _deadline(self, process: int) -> float:
        """Return when a process must have ended, by `time.monotonic()`."""
        limit = self.settings.time_budget_s
        if limit is None:
            return float("inf")
        left = max(0.0, limit - (monotonic() - self.started))
        later = self.settings.processes - process - 1
        return monotonic() + left * (FIRST_SHARE if process == 0 and later else 1 / (later + 1))

    def _add(self, records: Sequence[Record]) -> None:
        """Write rows to the disk, then count them."""
        if records:
            self.run.append(records)
        for record in records:
            self.pending.add(record)
            text = f"{record.status}: {record.reason}" if record.reason else record.status
            self._tell("row", record.process, record.shape_id, record.arm, text=text)

    def _tell(self, kind: str, process: int = 0, shape: str = "", arm: str = "", stage: str = "", *, text: str) -> None:
        """Send an event to the caller's display."""
        done, total = self.pending.done, len(self.pending.planned)
        elapsed, left = monotonic() - self.started, self._left(process)
        where = (process, self.settings.processes, shape, arm, stage)
        self.on_event(Event(kind, *where, done, total, text, elapsed, left, self.running))

    def _left(self, process: int) -> float | None:
        """Return the seconds that the rows to come will take, at the pace of the rows measured in this part.

        Starts and shapes too large for eager set no pace: each process to come has as many seconds of them. A run with
        a time budget has no more left than that; planned shapes run with their fewest calls when it is spent.
        """
        measured = self.pending.done - self.done_before - self.skipped
        if measured <= 0:
            return None
        # The later processes skip as many rows as each process did so far.
        to_skip = self.skipped / (process + 1) * (self.settings.processes - process - 1)
        to_measure = max(0.0, len(self.pending.planned) - self.pending.done - to_skip)
        elapsed = monotonic() - self.started
        starts = self.apart_s / max(1, self.teams) * (self.settings.processes - process - 1)
        left = (elapsed - self.apart_s) / measured * to_measure + starts
        limit = self.settings.time_budget_s
        return left if limit is None else min(left, max(0.0, limit - elapsed))

    def _await_builds(self) -> None:
        with self._apart():
            wait_for_builds()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Count the seconds of a block apart from the pace of rows."""
        before = monotonic()
        try:
            yield
        finally:
            self.apart_s += monotonic() - before

    def _tell_skipped(self, records: Sequence[Record]) -> None:
        """Name the shapes that no arm runs, a line for each kind of reason with the range of its numbers."""
        kinds: dict[str, dict[str, list[str]]] = {}
        for shape in self.pending.shapes:
            rows = [record for record in records if record.shape_id == shape]
            if rows and len(rows) == len(self.meta.planned(0, shape)):
                kinds.setdefault(NUMBER.sub(GAP, rows[0].reason), {})[shape] = NUMBER.findall(rows[0].reason)
        for text, shapes in kinds.items():
            columns = [
                sorted(set(column), key=lambda text: float(text.replace(",", "")))
                for column in zip(*shapes.values(), strict=True)
            ]
            ranges = [" to ".join(dict.fromkeys((column[0], column[-1]))) for column in columns]
            word = "shape" if len(shapes) == 1 else "shapes"
            reason = "".join(chain(*zip_longest(text.split(GAP), ranges, fillvalue="")))
            self._tell("skipped", text=f"not run on this device: {word} {', '.join(shapes)} ({reason})")

    def _figures(self, process: int, shape: str) -> str:
        """Return each candidate's time on a shape in one process, or what became of it, and eager's."""
        times, words = {}, []
        for arm in (EAGER, *self.meta.candidates):
            row = self.pending.rows.get((process, shape, arm))
            if row and row.timing and any(row.timing.event_ns):
                times[arm] = median(ns for calls in row.timing.event_ns for ns in calls) / 1e6
            if arm == EAGER or row is None:
                continue
            word = f"{number(times[arm])} ms" if arm in times else row.status
            if row.status != "ok":
                word = f"{row.status}: {row.reason}" if row.reason else row.status
            words.append(f"{arm} {word}")
        if EAGER in times:
            words.append(f"{EAGER} {number(times[EAGER])} ms")
        if len(self.meta.candidates) == 1 and len(times) == 2:
            words.append(f"{ratio_text(times[EAGER] / times[self.meta.candidates[0]])}x")
        return ", ".join(words)
