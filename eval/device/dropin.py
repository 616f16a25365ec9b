"""Measure optimize(nn.TransformerEncoder) beside PyTorch's own ways to run one.

`python -m rooflane.eval.device.dropin --help` lists the options. Arms: the encoder as it is in evaluation mode (its
fast path), with the fast path off (SDPA), and torch.compile of both, in the default mode and with CUDA graphs. Each
fresh process verifies every output and times the arms interleaved in mirrored order on inputs no arm has seen; one
JSON line a shape and process is all that is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from rooflane.baseline import config_of, generate_random_case, reference_numerics, torch_dtype
from rooflane.dispatch import optimize
from rooflane.eval.campaign.blocks import Round, choose_counts, time_blocks
from rooflane.eval.device.dropin_arms import (
    SEED,
    Forward,
    build_encoder,
    build_own,
    ours_forward,
    verify_shape,
    verify_variants,
)
from rooflane.eval.device.dropin_table import OURS, OWN, render_dropin_table
from rooflane.eval.record.environment import describe_environment, resolve_device
from rooflane.eval.worker.arms import free_memory
from rooflane.eval.worker.clock import Clock, estimate_ns, make_clock
from rooflane.eval.worker.failures import told
from rooflane.eval.worker.interpreter import module_command
from rooflane.shapes import Shape, load_shapes

Case = tuple[Tensor, Tensor]

ROUNDS = 4
WARMUPS, REPEATS = 20, 100
POOL_BYTES = 4 << 30
# Shapes on which the other kinds of module are verified too: one a resident kernel takes, one for half GEMMs.
VARIANT_SHAPES = ("1", "8")


def measure_shape(
    shape: Shape, device: torch.device, own: Sequence[str], *, budget_s: float, deadline: float
) -> dict[str, Any]:
    """Verify and time one shape; return what a JSON line holds. Arms not built before `deadline` are left out."""
    encoder = build_encoder(shape, device)
    module = optimize(encoder, shape, on_unseen="error")
    gates = verify_shape(encoder, module, shape, device)
    if shape.id in VARIANT_SHAPES:
        gates |= verify_variants(shape, device)
    case = generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), SEED + 4)
    arms: dict[str, Forward] = {OURS: ours_forward(module, shape)}
    found: dict[str, dict[str, Any]] = {}
    for name in own:
        if "+" in name and monotonic() > deadline:
            found[name] = {"skipped": "the time budget was spent"}
            continue
        before = perf_counter()
        try:
            forward = build_own(name, encoder, shape, device)
            with torch.inference_mode():
                for _ in range(2):  # reduce-overhead captures at the second call
                    forward(*case)
        except Exception as error:  # an arm that PyTorch cannot compile is a row, not our failure
            found[name] = {"skipped": told(error)}
            continue
        arms[name] = forward
        found[name] = {"setup_s": perf_counter() - before}
    clock = make_clock(device)
    with torch.inference_mode():
        counts = {
            name: choose_counts(
                estimate_ns(forward, case, clock), warmups=WARMUPS, repeats=REPEATS, rounds=ROUNDS, budget_s=budget_s
            )
            for name, forward in arms.items()
        }

    def draw(index: int) -> tuple[Tensor, Tensor]:
        return generate_random_case(config_of(shape), device, torch_dtype(shape.dtype), SEED + 100 + index)

    size = case[0].numel() * case[0].element_size()
    capacity = int(min(REPEATS, max(2, POOL_BYTES // size)))
    lanes = {name: FreshLane(forward, draw, clock, counts[name].warmups, capacity) for name, forward in arms.items()}
    with torch.inference_mode():
        samples, failures = time_blocks(lanes, counts, rounds=ROUNDS, order_seed=SEED)
    for name, sample in samples.items():
        found.setdefault(name, {})["event_ns"] = [part.event_ns for part in sample.rounds]
    for name, error in failures.items():
        found.setdefault(name, {})["skipped"] = told(error)
    return {
        "shape": shape.as_dict(),
        "family": module.route.family,
        "gates": {name: gate.model_dump(mode="json") for name, gate in gates.items()},
        "arms": found,
    }


class FreshLane:
    """Times one arm in this process, every call on an input it has not met."""

    def __init__(
        self, forward: Forward, draw: Callable[[int], Case], clock: Clock, warmups: int, capacity: int
    ) -> None:
        self._forward, self._draw, self._clock = forward, draw, clock
        self._warmups, self._capacity = warmups, capacity
        self._drawn = 0

    def measure(self, round_index: int, calls: int) -> Round:
        """Return one round's event nanoseconds; the first round is preceded by the warm-up calls."""
        if round_index == 0:
            for x, mask in self._cases(min(self._warmups, self._capacity)):
                self._forward(x, mask)
        events: list[int] = []
        while len(events) < calls:
            read = self._clock.window(self._forward, self._cases(min(self._capacity, calls - len(events))))
            events += read()[0]
        return Round(events)

    def _cases(self, count: int) -> list[Case]:
        with torch.inference_mode(False), torch.no_grad():
            cases = [self._draw(self._drawn + index) for index in range(count)]
        self._drawn += count
        self._clock.synchronize()
        return cases


def measure_process(
    shapes: Sequence[Shape], device: torch.device, process: int, arms: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield one line a shape. Each shape's compiled arms may end at its equal share of `seconds`."""
    reference_numerics(device)
    environment = describe_environment(device.type)
    start = monotonic()
    for index, shape in enumerate(shapes):
        deadline = start + seconds * (index + 1) / len(shapes)
        try:
            line = measure_shape(shape, device, arms, budget_s=0.25, deadline=deadline)
        except Exception as error:  # one shape's failure is its row; the others go on
            line = {"shape": shape.as_dict(), "error": told(error)}
        yield {"process": process, "environment": environment} | line
        free_memory(device)


def _said(line: dict[str, Any]) -> str:
    """Return a line's news: the error, or the gates and the arms that were timed."""
    if "error" in line:
        return line["error"]
    failing = [name for name, gate in line["gates"].items() if not gate["passed"]]
    timed = sum("event_ns" in arm for arm in line["arms"].values())
    return f"{f'fails the gate: {failing}' if failing else 'passes the gate'}, {timed} arms timed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in fresh processes, append to the file given, print the table."""
    parser = argparse.ArgumentParser(prog="python -m rooflane.eval.device.dropin", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="shapes/published.csv", help="a shape file")
    parser.add_argument("--ids", default="1,2,3,4,5,6,7,8,9,10,11,12,13", help="shapes of the file, by id")
    parser.add_argument("--out", type=Path, default=Path("dropin.jsonl"), help="file the JSON lines are appended to")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--processes", type=int, default=1, help="fresh processes, one after the other")
    parser.add_argument("--seconds", type=float, default=150.0, help="a process compiles no further arm after this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.process is None:
        given = list(sys.argv[1:] if arguments is None else arguments)
        for process in range(options.processes):
            command = module_command("rooflane.eval.device.dropin", *given, "--process", str(process))
            done = subprocess.run(command, check=False)
            if done.returncode:
                return done.returncode
        print(render_dropin_table(options.out))
        return 0
    wanted = options.ids.split(",")
    shapes = [shape for shape in load_shapes(options.shapes) if shape.id in wanted]
    arms = [name for name in OWN if not (options.no_compile and "+" in name)]
    device = torch.device(resolve_device(options.device))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for line in measure_process(shapes, device, options.process, arms, options.seconds):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"process {options.process} shape {line['shape']['id']}: {_said(line)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
