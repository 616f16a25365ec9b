"""Measure optimize(nn.TransformerEncoder) beside PyTorch's own ways to run one.

`python -m rooflane.eval.dropin --help` lists the options. Arms: the encoder as it is in evaluation mode (its fast
path), with the fast path off (SDPA), and torch.compile of both, in the default mode and with CUDA graphs. Each fresh
process verifies every output and times the arms interleaved in mirrored order on inputs no arm has seen; one JSON line
a shape and process is all that is kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import config_of, generate_random_case, reference_numerics, torch_dtype
from rooflane.dispatch import optimize
from rooflane.eval.arms import free_memory
from rooflane.eval.blocks import Round, choose_counts, time_blocks
from rooflane.eval.dropin_table import OURS, OWN, render_dropin_table
from rooflane.eval.environment import describe_environment, resolve_device
from rooflane.eval.failures import one_line
from rooflane.eval.gate import GateResult, check_gate
from rooflane.eval.interpreter import module_command
from rooflane.eval.outputs import poison
from rooflane.eval.timing import Clock, estimate_ns, make_clock
from rooflane.shapes import Shape, load_shapes

Forward = Callable[[Tensor, Tensor | None], Tensor]
Case = tuple[Tensor, Tensor]

SEED = 20261129
ROUNDS = 4
WARMUPS, REPEATS = 20, 100
POOL_BYTES = 4 << 30
PADDING = 0.3
# Shapes on which the other kinds of module are verified too: one a resident kernel takes, one for half GEMMs.
VARIANT_SHAPES = ("1", "8")


def build_encoder(shape: Shape, device: torch.device, *, final_norm: bool = True) -> nn.TransformerEncoder:
    """Return an encoder of the shape's sizes in evaluation mode, its layers initialised one by one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [_layer(shape) for _ in range(shape.num_layers)]
    norm = nn.LayerNorm(shape.d_model) if final_norm else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the default enable_nested_tensor=True says it does nothing for norm_first
        encoder = nn.TransformerEncoder(layers[0], shape.num_layers, norm)
    encoder.layers = nn.ModuleList(layers)
    return encoder.to(device, torch_dtype(shape.dtype)).eval()


def _layer(shape: Shape) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        shape.d_model, shape.num_heads, shape.ffn_dim, activation="gelu", batch_first=True, norm_first=True
    )


def without_fast_path(encoder: nn.TransformerEncoder) -> nn.TransformerEncoder:
    """Return a copy whose layers never take PyTorch's fast path.

    NOTE: not by the global switch: torch.compile puts no guard on it and would hand one arm the other's graph.
    """
    twin = copy.deepcopy(encoder)
    for layer in twin.layers:
        layer.activation_relu_or_gelu = 0
    return twin


def own_forward(encoder: nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype | None = None) -> Forward:
    """Return PyTorch's forward of a call without padding; the mask comes with the hint that it is causal."""
    mask = None
    if shape.causal:
        dtype = dtype or torch_dtype(shape.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len, device=device, dtype=dtype)
    return lambda x, _=None: encoder(x, mask, is_causal=shape.causal)


def build_own(name: str, encoder: nn.TransformerEncoder, shape: Shape, device: torch.device) -> Forward:
    """Build one of PyTorch's arms by its name, on the encoder's weights."""
    base, _, mode = name.partition("+")
    module = encoder if base == "fast path" else without_fast_path(encoder)
    if mode:
        options = {"mode": "reduce-overhead"} if mode == "graphs" else {}
        module = torch.compile(module, dynamic=False, **options)
    return own_forward(module, shape, device)


def ours_forward(module: nn.Module, shape: Shape) -> Forward:
    """Return the dispatched encoder's forward of a call without padding."""
    return lambda x, _=None: module(x, is_causal=shape.causal)


def verify_shape(encoder: nn.Module, module: nn.Module, shape: Shape, device: torch.device) -> dict[str, GateResult]:
    """Gate the dispatched encoder against PyTorch's outputs as configured, in full float32, in float64, and padded."""
    config, dtype = config_of(shape), torch_dtype(shape.dtype)
    ours = ours_forward(module, shape)
    slow = without_fast_path(encoder)
    gates = {}
    with torch.inference_mode():
        x, _ = generate_random_case(config, device, dtype, SEED + 1)
        poison(x)
        out = ours(x)
        gates["fast path"] = check_gate(out, own_forward(encoder, shape, device)(x))
        gates["fast path off"] = check_gate(out, own_forward(slow, shape, device)(x))
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        gates["full float32"] = check_gate(out, own_forward(slow, shape, device)(x))
        torch.set_float32_matmul_precision(precision)
        rows = slice(0, min(shape.batch_size, 64))
        wide = own_forward(slow.double(), shape, device, torch.float64)
        gates["float64"] = check_gate(out[rows].double(), wide(x[rows].double()))
        x, valid = generate_random_case(config, device, dtype, SEED + 2, PADDING)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len, device=device).isinf()
        call = {"mask": mask if shape.causal else None, "is_causal": shape.causal, "src_key_padding_mask": ~valid}
        gates[f"padding {PADDING:g}"] = check_gate(module(x, **call)[valid], encoder(x, **call)[valid])
    return gates


def verify_variants(shape: Shape, device: torch.device) -> dict[str, GateResult]:
    """Gate the modules that are not timed: no final norm, a single layer, calls that are not causal."""
    gates = {}
    full = Shape(**(shape.as_dict() | {"causal": False}))
    single = Shape(**(shape.as_dict() | {"num_layers": 1}))
    cases = {
        "no final norm": (build_encoder(shape, device, final_norm=False), shape),
        "a single layer": (build_encoder(single, device).layers[0], single),
        "not causal": (build_encoder(full, device), full),
    }
    for name, (module, of) in cases.items():
        fast = optimize(module, of, on_unseen="error")
        x, valid = generate_random_case(config_of(of), device, torch_dtype(of.dtype), SEED + 3, PADDING)
        padded = {"src_key_padding_mask": ~valid, "is_causal": of.causal}
        mask = nn.Transformer.generate_square_subsequent_mask(of.seq_len, device=device).isinf() if of.causal else None
        with torch.inference_mode():
            gates[name] = check_gate(fast(x, mask, **padded)[valid], module(x, mask, **padded)[valid])
    return gates


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
            found[name] = {"skipped": f"{type(error).__name__}: {one_line(error)}"}
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
        found.setdefault(name, {})["skipped"] = f"{type(error).__name__}: {one_line(error)}"
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
            line = {"shape": shape.as_dict(), "error": f"{type(error).__name__}: {one_line(error)}"}
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
    parser = argparse.ArgumentParser(prog="python -m rooflane.eval.dropin", description=__doc__.splitlines()[0])
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
            command = module_command("rooflane.eval.dropin", *given, "--process", str(process))
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
