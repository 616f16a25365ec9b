"""A worker: one fresh process that holds some arms, does what the parent asks, and decides nothing.

The reference's worker holds eager, the controls and the judge; every candidate has a worker of its own, with its copy
beside it, and neither a seed it has not been told nor, before its outputs are judged, the baseline's answers.
`python -m rooflane.eval.worker.worker FD...` starts one where processes cannot be forked; the parent does that, never a
user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from rooflane.baseline import build_baseline, reference_numerics
from rooflane.dispatch import Profile, parse_rules
from rooflane.eval.check.outputs import SharedBytes
from rooflane.eval.record.environment import describe_environment, gpu_uuid
from rooflane.eval.record.records import EAGER
from rooflane.eval.stats.host_pace import loop_ns
from rooflane.eval.worker import oversize
from rooflane.eval.worker.arms import Arm, first_call, free_memory
from rooflane.eval.worker.cache_states import CacheStates
from rooflane.eval.worker.channel import Channel, end_with_parent, tells_failure
from rooflane.eval.worker.clock import make_clock
from rooflane.eval.worker.cpu_pinning import CalmCore
from rooflane.eval.worker.failures import is_oom, told
from rooflane.eval.worker.interpreter import add_working_folder
from rooflane.eval.worker.judge import Judge
from rooflane.eval.worker.subject import FIRST_INPUT, Subject
from rooflane.eval.worker.windows import Windows
from rooflane.shapes import Shape

RUN_RULES = "the rules of the run"
SUBJECT_OPS = (
    "build", "call", "repeat", "signature", "weights_digest", "load", "settle", "inspect", "drop",
)  # fmt: skip
WINDOW_OPS = ("estimate", "prepare", "go", "finish", "ship", "release")
JUDGE_OPS = ("compare", "stress", "stress_names", "marks", "kept")
BIG_OPS = ("big_call", "big_ship", "big_time")
BIG_JUDGE_OPS = ("big_compare",)


class Worker:
    """Answers requests until the parent is gone."""

    def __init__(self, buffers: list[SharedBytes]) -> None:
        self.buffers = buffers
        self.ops: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self.hello,
            "shape": self.shape,
            "reference": self.reference,
            "end_shape": self.end_shape,
            "device_ok": self.device_ok,
            "stay_awake": self.stay_awake,
        }
        self._own = frozenset(self.ops)
        self.subject: Subject | None = None
        self.awake = False
        self._core = CalmCore()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; what the harness itself raises is reported as such."""
        op = request["op"]
        values = {name: value for name, value in request.items() if name not in ("op", "nonce")}
        try:
            return self.ops[op](**values)
        except Exception as error:
            status = "oom" if is_oom(error) else "error"
            return {"failed": status, "reason": told(error)}

    def hello(self, device: str, profile: dict[str, Any], rules: str, describe: bool) -> dict[str, Any]:
        """Set this process up for a device; `rules` is the run's own table as TOML."""
        self.device = torch.device(device)
        self.profile = Profile.model_validate(profile)
        self.rules = parse_rules(rules, RUN_RULES)
        self.clock = make_clock(self.device)
        reference_numerics(self.device)
        if self.device.type == "cuda":
            torch.cuda.init()
        uuid = gpu_uuid() if self.device.type == "cuda" else None
        return {"environment": describe_environment(device) if describe else {}, "uuid": uuid}

    def shape(self, shape: dict[str, Any], seed: int, memory_cap_bytes: int | None) -> dict[str, Any]:
        """Begin a shape: draw its weights, with no arm built on them yet."""
        self.end_shape()
        oversize.cap_memory(self.device, memory_cap_bytes)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        shape = Shape(**shape)
        template = build_baseline(shape, self.device, seed)
        subject = Subject(shape, self.device, self.profile, self.rules, template, self.buffers[0])
        windows, big = Windows(subject, self.clock, self._host_pace_ns), oversize.BigCall(subject, self.clock)
        self.subject = subject
        self.ops |= {name: getattr(subject, name) for name in SUBJECT_OPS}
        self.ops |= {name: getattr(windows, name) for name in WINDOW_OPS}
        self.ops |= {"states": CacheStates(windows).states}
        self.ops |= {name: getattr(big, name) for name in BIG_OPS}
        return {"capacity": windows.capacity()}

    def reference(self, call: bool) -> dict[str, Any]:
        """Make the shape's model the reference: the eager arm, and the judge over it."""
        subject = self.subject
        model = subject.template
        judge = Judge(model, subject.shape, self.device, self.buffers)
        big = oversize.BigJudge(model, subject.shape, self.device, self.clock, self.buffers)
        self.ops |= {name: getattr(judge, name) for name in JUDGE_OPS}
        self.ops |= {name: getattr(big, name) for name in BIG_JUDGE_OPS}
        eager = Arm(EAGER, "baseline", forward=model, weights=model)
        subject.adopt(eager)
        if not call:
            return {}
        return {"setup_s": first_call(model, subject.shape, self.device, FIRST_INPUT)}

    def end_shape(self) -> dict[str, Any]:
        """Let go of everything that belongs to a shape."""
        for name in list(self.ops):
            if name not in self._own:
                del self.ops[name]
        self.stay_awake(False)
        if self.subject:
            self.subject = None
            free_memory(self.device)
        return {}

    def stay_awake(self, on: bool, cores: Sequence[int] = ()) -> dict[str, Any]:
        """Wait for requests without sleeping, on the calmest of some cores, or no longer.

        A thread that slept between its windows came back on a slow core in half of them (H200; briefs/host.md).
        """
        self.awake = on
        self._core.hold(cores)
        return {}

    def _host_pace_ns(self) -> int:
        return self._core.pace_ns() if self.awake else loop_ns()

    def device_ok(self) -> dict[str, Any]:
        """Tell whether the GPU's context still works; an earlier failure may have broken it for good."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception:
            return {"ok": False}
        return {"ok": True}


def run(channel: int, lifeline: int, buffers: list[int]) -> int:
    """Answer the requests on one descriptor until it closes; end with the parent's end of the other."""
    end_with_parent(lifeline)
    peer = Channel(channel)
    worker = Worker([SharedBytes(descriptor) for descriptor in buffers])
    while (request := peer.receive(awake=worker.awake)) is not None:
        answer = worker.answer(request)
        if tells_failure(answer):
            # What was printed before belongs to it, and Python holds a pipe's text back. Candidates may replace stdout.
            with suppress(Exception):
                sys.stdout.flush()
        peer.answer(request, answer)
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
