"""The worker: one fresh process that measures its share of a run. Started by the parent, never by hand.

`python -m rooflane.eval.worker FD` reads a `Job` as one JSON line from standard input and writes to descriptor FD.
"""

from __future__ import annotations

import datetime
import os
import sys
from time import monotonic
from typing import Any

import torch

from rooflane.baseline import (
    CONTROLS,
    BaselineTransformer,
    build_baseline,
    config_of,
    generate_random_case,
    reference_numerics,
    torch_dtype,
)
from rooflane.dispatch import Profile, parse_rules
from rooflane.eval.arms import Arm, build_arm, first_call, free_memory
from rooflane.eval.candidates import load_rule_table
from rooflane.eval.channel import RESTART_STATUS, Channel, end_with_parent
from rooflane.eval.environment import available_memory_bytes, describe_environment, gpu_telemetry
from rooflane.eval.oversize import OversizePlan, cap_memory, measure_oversize
from rooflane.eval.records import EAGER, Record
from rooflane.eval.settings import Job, ShapeTodo, derive_seed
from rooflane.eval.timing import Case, InputPool, choose_counts, estimate_ns, make_clock, time_arms
from rooflane.eval.verify import one_line, verify
from rooflane.shapes import Shape

# Inputs alive for timing: enough for 100 calls of 4 MB, and never more than a tenth of what is free.
POOL_BYTES = {"cpu": 1 << 29, "cuda": 4 << 30}
POOL_FREE_SHARE = 10
# A first call this many times over the limit stops a shape whose prediction was too kind.
PREDICTION_SLACK = 3
LEAST_BUDGET_S = 0.05
RUN_RULES = "the rules of the run"
# Of the time left for a shape, what one arm's verification may start new checks in.
VERIFY_SHARE = 0.3


class DeviceLost(Exception):
    """The GPU's context is broken; nothing more can run in this process."""


class Worker:
    """Measures the shapes of one job and hands over rows as they are finished."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self.job = job
        self.settings = job.settings
        self.channel = channel
        self.device = torch.device(job.device)
        self.profile = Profile.model_validate(job.profile)
        # The table the run was predicted with, whatever has become of its file since.
        self.rules = load_rule_table(self.settings.rules) if job.rules is None else parse_rules(job.rules, RUN_RULES)
        self.clock = make_clock(self.device)
        self.deadline = monotonic() + job.deadline_s if job.deadline_s is not None else float("inf")
        reference_numerics(self.device)
        self.environment = describe_environment(job.device)
        # Seconds each control's set-up took at the shape before, to leave out what the time left cannot hold.
        self.setup_s: dict[str, float] = {}

    def run(self) -> None:
        """Measure every shape of the job, in the job's order."""
        for index, todo in enumerate(self.job.todo):
            shape = Shape(**todo.shape)
            left = len(self.job.todo) - index
            share = (self.deadline - monotonic()) / left
            ShapeWork(self, shape, todo, monotonic() + share).run()
            free_memory(self.device)


class ShapeWork:
    """One shape in one process: build, verify, time, hand over."""

    def __init__(self, worker: Worker, shape: Shape, todo: ShapeTodo, deadline: float) -> None:
        self.worker = worker
        self.shape = shape
        self.todo = todo
        self.deadline = deadline
        self.device = worker.device
        self.settings = worker.settings
        self.telemetry: dict[str, Any] = {"before": gpu_telemetry() if self.device.type == "cuda" else None}

    def seed(self, purpose: str) -> int:
        """Return this shape's seed for a purpose in this process."""
        return derive_seed(self.worker.job.seed, self.worker.job.process, self.shape.id, purpose)

    def run(self) -> None:
        """Measure the arms that are still to do and hand over their rows, eager's last."""
        if monotonic() > self.worker.deadline:
            self.skip_all("the run's time budget was spent before its turn")
            return
        self.stage(EAGER, "build")
        cap_memory(self.device, self.settings.memory_cap_bytes)
        reference = build_baseline(self.shape, self.device, self.seed("weights"))
        eager = Arm(EAGER, "baseline", forward=reference, weights=reference)
        if self.todo.oversize:
            self.run_oversize(reference)
            return
        try:
            eager.setup_s = first_call(reference, self.shape, self.device, self.seed("first call"))
        except Exception as error:  # most likely memory: the prediction was too kind
            eager.fail(error, "the first call of the eager forward")
            self.emit(eager)
            self.run_oversize(reference)
            return
        limit = self.settings.max_call_s * PREDICTION_SLACK
        if eager.setup_s > limit:
            self.skip_all(f"the first eager call took {eager.setup_s:.1f} s, over {limit:g} s")
            return
        self.compare_arms(eager)

    def compare_arms(self, eager: Arm) -> None:
        """Build and verify every arm, then time those whose outputs stand, interleaved with eager."""
        arms = [eager]
        for name in self.todo.arms:
            if name != EAGER:
                arm = self.prepare(name, eager.weights)
                if arm.forward is None:
                    self.emit(arm)
                    self.check_device()
                else:
                    arms.append(arm)
        self.time(arms)
        # Eager's row comes last: its presence says that the rows it is paired with are complete.
        self.emit(*arms[1:], eager)

    def prepare(self, name: str, reference: BaselineTransformer) -> Arm:
        """Build one arm and verify it; an arm that is not to be timed comes back without a forward."""
        worker = self.worker
        self.stage(name, "build")
        expected = worker.setup_s.get(name, 0.0)
        is_candidate = name in worker.job.candidates
        runs = is_candidate or CONTROLS[name].supports(self.device.type) is None
        if runs and not is_candidate and monotonic() + expected > self.deadline:
            reason = "the run's time budget was spent on the arms before it"
            if expected:
                reason = f"the run's time budget leaves no room for its set-up of about {expected:.0f} s"
            return Arm(name, "control", status="skipped", reason=reason)
        started = monotonic()
        arm = build_arm(name, reference, self.shape, self.device, worker.profile, worker.rules, self.seed("weights"))
        worker.setup_s[name] = monotonic() - started
        if arm.forward is None:
            return arm
        self.stage(name, "verify")
        arm.verification = verify(
            arm.forward,
            arm.weights,
            reference,
            self.shape,
            self.device,
            seed=self.seed(f"verify {name}"),
            trials=self.settings.trials,
            # Ragged masks, stress and contract depend on the code and not on the process: the first one does them.
            level="full" if is_candidate and worker.job.process == 0 else "trials",
            # The checks of one arm must leave time for the others' and for the timing.
            deadline=monotonic() + (self.deadline - monotonic()) * VERIFY_SHARE,
        )
        arm.status, arm.reason = arm.verification.status, arm.verification.reason
        # A control that fails the gate is what users would get: it is timed and flagged. A candidate is not.
        if arm.status != "ok" and (is_candidate or arm.status != "incorrect"):
            arm.drop()
        return arm

    def time(self, arms: list[Arm]) -> None:
        """Time the arms against each other and note the result in each."""
        self.stage(EAGER, "time")
        share = (self.deadline - monotonic()) / len(arms)
        budget = max(LEAST_BUDGET_S, min(self.settings.budget_s, share))
        forwards, counts = {}, {}
        case = self.draw(0)
        by_name = {arm.name: arm for arm in arms}
        for arm in arms:
            self.stage(arm.name, "time")
            try:
                with torch.inference_mode():
                    call_ns = estimate_ns(arm.forward, case, self.worker.clock)
            except Exception as error:  # it passed verification, but may still run out of memory here
                self.fail_timing(arm, error)
                continue
            counts[arm.name] = choose_counts(
                call_ns,
                warmups=self.settings.warmups,
                repeats=self.settings.repeats,
                rounds=self.settings.rounds,
                budget_s=budget,
            )
            forwards[arm.name] = arm.forward
        if EAGER not in forwards:
            for name in forwards:
                by_name[name].status, by_name[name].reason = "skipped", "eager could not be timed beside it"
            return
        pool = InputPool(
            self.draw,
            self.pool_capacity(case, max(count.repeats for count in counts.values())),
            fixed=self.settings.inputs == "fixed",
        )
        timings, failures = time_arms(
            forwards,
            counts,
            pool,
            self.worker.clock,
            rounds=self.settings.rounds,
            order_seed=self.seed("order"),
            inputs=self.settings.inputs,
            on_arm=lambda name: self.stage(name, "time"),
        )
        for name, timing in timings.items():
            by_name[name].timing = timing
        for name, error in failures.items():
            self.fail_timing(by_name[name], error)

    def fail_timing(self, arm: Arm, error: Exception) -> None:
        """Note that an arm raised while it was timed; a broken GPU ends the process once the row is out."""
        arm.fail(error, "timing it")
        try:
            self.check_device()
        except DeviceLost:
            self.emit(arm)
            raise

    def run_oversize(self, reference: BaselineTransformer) -> None:
        """Measure each candidate alone against the chunked reference: two would not fit beside each other."""
        rows: list[Arm] = []
        for name in self.todo.arms:
            if name not in self.worker.job.candidates:
                continue
            self.stage(name, "build")
            # No first call here: the verifying call is the first, so that its peak memory is a whole call's.
            arm = build_arm(
                name,
                reference,
                self.shape,
                self.device,
                self.worker.profile,
                self.worker.rules,
                self.seed("weights"),
                call=False,
            )
            if arm.forward is not None:
                plan = OversizePlan(
                    every_element=self.worker.job.process == 0,
                    reference_budget_s=self.settings.reference_budget_s,
                    budget_s=self.settings.budget_s,
                    seed=self.seed("oversize"),
                    memory_cap_bytes=self.settings.memory_cap_bytes,
                )
                try:
                    rows.append(
                        measure_oversize(
                            arm,
                            reference,
                            self.shape,
                            self.device,
                            self.worker.clock,
                            plan,
                            lambda stage, name=name: self.stage(name, stage),
                        )
                    )
                except Exception as error:
                    arm.fail(error, "its call on the whole shape")
                finally:
                    cap_memory(self.device, None)
            arm.drop()
            self.emit(arm)
            free_memory(self.device)
            self.check_device()
        # One reference row a process, whichever candidate it was made with.
        self.emit(*rows[:1])

    def draw(self, index: int) -> Case:
        """Return the timing input of a running number."""
        return generate_random_case(
            config_of(self.shape),
            self.device,
            torch_dtype(self.shape.dtype),
            self.seed("timing") + index,
            self.shape.padding_ratio,
        )

    def pool_capacity(self, case: Case, wanted: int) -> int:
        """Return how many inputs may be alive at once."""
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else available_memory_bytes()
        budget = min(POOL_BYTES[self.device.type], free // POOL_FREE_SHARE)
        return max(1, min(wanted, budget // (case[0].numel() * case[0].element_size())))

    def check_device(self) -> None:
        """Raise `DeviceLost` when an earlier failure broke the GPU's context, which every later call would inherit."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLost(one_line(error)) from error

    def skip_all(self, reason: str) -> None:
        """Hand over a skipped row for every arm."""
        kinds = {EAGER: "baseline"} | dict.fromkeys(self.worker.job.candidates, "candidate")
        arms = [Arm(name, kinds.get(name, "control"), status="skipped", reason=reason) for name in self.todo.arms]
        self.emit(*arms)

    def stage(self, arm: str, stage: str) -> None:
        """Say what is at hand."""
        self.worker.channel.stage(self.shape.id, arm, stage)

    def emit(self, *arms: Arm) -> None:
        """Hand over rows."""
        job = self.worker.job
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        telemetry = {}
        if self.device.type == "cuda":
            telemetry = self.telemetry | {"after": gpu_telemetry()}
        self.worker.channel.rows(
            Record(
                run=job.run,
                process=job.process,
                shape=self.shape.as_dict(),
                arm=arm.name,
                kind=arm.kind,
                status=arm.status,
                reason=arm.reason,
                family=arm.plan.family,
                rule=arm.plan.rule,
                options=arm.plan.options,
                contract=arm.plan.contract,
                verification=arm.verification,
                timing=arm.timing,
                setup_s=arm.setup_s,
                predicted_s=arm.plan.predicted_s,
                predicted_peak_bytes=arm.plan.peak_bytes,
                measured_peak_bytes=arm.measured_peak_bytes,
                seeds={purpose: self.seed(purpose) for purpose in ("weights", "timing", "order", f"verify {arm.name}")},
                telemetry=telemetry,
                environment=self.worker.environment,
                measured_at=now,
            )
            for arm in arms
        )


def main() -> None:
    """Run the job on standard input."""
    channel = Channel(int(sys.argv[1]))
    job = Job.model_validate_json(sys.stdin.readline())
    end_with_parent(sys.stdin.fileno())
    try:
        Worker(job, channel).run()
    except DeviceLost:
        sys.exit(RESTART_STATUS)
    channel.done()
    # Compiler pools and CUDA contexts may hang in their destructors; every row is out already.
    os._exit(0)


if __name__ == "__main__":
    main()
