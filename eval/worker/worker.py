"""A worker: one fresh process that holds some arms, does what the parent asks, and decides nothing.

The reference's worker holds eager, the controls and the judge; every candidate has a worker of its own, with its copy
beside it. It has no seed before the call that needs it, and no output of the baseline before its own is judged.
`python -m rooflane.eval.worker.worker FD...` starts one where processes cannot be forked; the parent does that, never a
user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from rooflane.baseline import reference_numerics
from rooflane.dispatch import Profile, parse_rules
from rooflane.eval.check.cases import Called
from rooflane.eval.check.outputs import SharedBytes
from rooflane.eval.check.tamper import ProcessState
from rooflane.eval.record.environment import describe_environment, gpu_uuid
from rooflane.eval.record.records import EAGER_ARM
from rooflane.eval.sandbox.confine import explain
from rooflane.eval.stats.host_pace import loop_ns
from rooflane.eval.worker import oversize, protocol
from rooflane.eval.worker.arms import Arm, first_call, free_memory
from rooflane.eval.worker.clock import make_clock
from rooflane.eval.worker.cpu_pinning import FastCore
from rooflane.eval.worker.judge import Judge
from rooflane.eval.worker.outside import Outside
from rooflane.eval.worker.process import Channel, add_working_folder, end_with_parent
from rooflane.eval.worker.subject import FIRST_INPUT, Subject, answer_to
from rooflane.eval.worker.windows import CacheStates, Windows
from rooflane.eval.worker.workload import workload_of

RUN_RULES = "the rules of the run"


class Worker:
    """Answers requests until the parent is gone."""

    def __init__(self, buffers: list[SharedBytes]) -> None:
        self.buffers = buffers
        self._own: protocol.Handlers = {
            protocol.Hello: self.hello,
            protocol.BeginShape: self.begin_shape,
            protocol.DescribeProblem: self.describe_problem,
            protocol.EndShape: self.end_shape,
            protocol.CheckDevice: self.check_device,
            protocol.BusyWait: self.busy_wait,
        }
        self._handlers = dict(self._own)
        self.subject: Subject | None = None
        self.state: ProcessState | None = None
        self.busy = False
        self._core = FastCore()
        self._outside: Outside | None = None
        self._windows: Windows | None = None

    def handle(self, request: protocol.Request) -> protocol.Message | Called:
        """Answer a request; whatever raises, the harness included, becomes a `Failed` or `Wrong` answer."""
        answer = answer_to(lambda asked: self._handlers[type(asked)](asked), request)
        # Not behind `Go`: the parent's wall clock stands round that, and `Finish` follows it at once.
        if self.state and not isinstance(request, protocol.Go):
            self.state.leftovers.look()
        return answer

    def hello(self, request: protocol.Hello) -> protocol.Greeting:
        """Set this process up for a device."""
        self.device = torch.device(request.device)
        self.profile = Profile.model_validate(request.profile)
        self.rules = parse_rules(request.rules, RUN_RULES)
        self._standing = request.standing
        self.clock = make_clock(self.device)
        reference_numerics(self.device)
        if self.device.type == "cuda":
            torch.cuda.init()
        # Once a worker, before its first candidate is imported.
        self.state = ProcessState()
        uuid = gpu_uuid() if self.device.type == "cuda" else None
        return protocol.Greeting(describe_environment(request.device) if request.describe else {}, uuid)

    def describe_problem(self, request: protocol.DescribeProblem) -> protocol.Described:
        """Run a problem file once, to learn what its module takes, returns and costs."""
        from rooflane.eval.worker.problem_description import describe_problem

        return describe_problem(request.problem, self.device, self.clock)

    def begin_shape(self, request: protocol.BeginShape) -> protocol.Begun:
        """Begin a shape: draw its weights, with no arm built on them yet."""
        self._end_shape()
        oversize.cap_memory(self.device, request.memory_cap_bytes)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        template = workload_of(request.shape, self.device).model(request.seed)
        self.subject = Subject(
            request.shape, self.device, self.profile, self.rules, template, self.buffers[0], self.state
        )
        windows = self._windows = Windows(self.subject, self.clock, self._host_pace_ns)
        self._handlers |= {
            **self.subject.handlers(),
            **windows.handlers(),
            **oversize.BigCall(self.subject, self.clock).handlers(),
            protocol.TimeStates: CacheStates(windows).states,
            protocol.HoldReference: self.hold_reference,
        }
        return protocol.Begun(windows.capacity())

    def hold_reference(self, request: protocol.HoldReference) -> protocol.Held:
        """Make the shape's model the reference: the eager arm, and the judge over it."""
        subject = self.subject
        model = subject.template
        big = oversize.BigJudge(model, subject.shape, self.device, self.clock, self.buffers)
        self._handlers |= Judge(model, subject.shape, self.device, self.buffers).handlers()
        self._handlers[protocol.CompareElement] = big.compare_element
        subject.adopt(Arm(EAGER_ARM, forward=model, weights=model))
        seconds = first_call(model, subject.workload, FIRST_INPUT) if request.call else None
        if self._outside is None and request.call:
            # Behind the first call, which starts torch's threads, and before any candidate of this process is built.
            self._outside = Outside(self._standing)
        self._windows.outside = self._seen_outside
        return protocol.Held(seconds)

    def _seen_outside(self) -> list[str]:
        """Return what other processes did to this one since it was asked last."""
        if self._outside is None:
            return []
        return self._outside.found(self._core.chosen)

    def end_shape(self, request: protocol.EndShape) -> protocol.Done:
        """Release everything that belongs to a shape."""
        self._end_shape()
        return protocol.Done()

    def _end_shape(self) -> None:
        self._handlers = dict(self._own)
        self._set_busy_wait(False)
        if self.subject:
            # The windows hold the subject, and with it every arm's memory.
            self.subject = self._windows = None
            free_memory(self.device)

    def busy_wait(self, request: protocol.BusyWait) -> protocol.Done:
        """Start or stop waiting for requests without sleeping, on the fastest of some cores.

        A thread that slept between its windows came back on a slow core in half of them (H200; briefs/host.md).
        """
        self._set_busy_wait(request.on, request.cores)
        return protocol.Done()

    def _set_busy_wait(self, on: bool, cores: Sequence[int] = ()) -> None:
        self.busy = on
        self._core.hold(cores)

    def _host_pace_ns(self) -> int:
        return self._core.pace_ns() if self.busy else loop_ns()

    def check_device(self, request: protocol.CheckDevice) -> protocol.DeviceState:
        """Return whether the GPU's context still works; an earlier failure may have broken it for good."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception:
            return protocol.DeviceState(ok=False)
        return protocol.DeviceState(ok=True)


def run(channel: int, lifeline: int, buffers: list[int], *, confined: bool = False) -> int:
    """Answer the requests on one descriptor until it closes; end with the parent's end of the other.

    `confined` tells that this process is in the sandbox, which the reason of a refused action then names.
    """
    end_with_parent(lifeline)
    peer = Channel(channel)
    worker = Worker([SharedBytes(descriptor) for descriptor in buffers])
    while (message := peer.receive(busy=worker.busy)) is not None:
        number, request = message
        answer = worker.handle(request)
        if protocol.is_failure(answer):
            # What was printed before belongs to it, and Python holds a pipe's text back. Candidates may replace stdout.
            with suppress(Exception):
                sys.stdout.flush()
            answer = replace(answer, reason=explain(answer.reason, confined=confined))
        peer.answer(number, answer)
    return 0


def main() -> None:
    """Run over the descriptors named on the command line: channel, lifeline, output, buffers."""
    channel, lifeline, output, *buffers = map(int, sys.argv[1:])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    add_working_folder()
    for descriptor in (channel, lifeline, *buffers):
        os.set_inheritable(descriptor, False)
    code = run(channel, lifeline, buffers)
    # Compiler pools and CUDA contexts may hang in their destructors; everything is out already.
    os._exit(code)


if __name__ == "__main__":
    main()
