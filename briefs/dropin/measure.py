"""Measure optimize(nn.TransformerEncoder) beside PyTorch's own ways to run one, and print the table of the brief.

Arms: the encoder in evaluation mode (its fast path), with the fast path off (SDPA), and torch.compile of both, in the
default mode and with CUDA graphs. Each fresh process verifies every output and times the arms interleaved, in mirrored
order, on inputs that no arm has seen. One JSON line a shape and process is kept.

`python briefs/dropin/measure.py` measures, `--table FILE` prints the table of a record, and `--table FILE --page PAGE`
writes it between the markers of a page.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.baseline import config_of, generate_random_case, reference_numerics, torch_dtype
from rooflane.dispatch import optimize
from rooflane.eval.campaign.blocks import Round, choose_counts, time_blocks
from rooflane.eval.check.gate import GateResult, check_gate
from rooflane.eval.check.outputs import poison
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import describe_environment, resolve_device
from rooflane.eval.report.report import markdown_table as markdown
from rooflane.eval.report.report import update_between_markers
from rooflane.eval.report.tables import NONE, Table, interval, number
from rooflane.eval.stats.estimator import paired_log_ratio, t_interval
from rooflane.eval.stats.rounds import median_ns
from rooflane.eval.worker.arms import free_memory
from rooflane.eval.worker.clock import Clock, estimate_ns, make_clock
from rooflane.shapes import Shape, load_shapes

Case = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor | None], Tensor]
Line = dict[str, Any]

SHAPES = Path(__file__).parents[2] / "shapes" / "published.csv"
SEED = 20261129
PADDING = 0.3
ROUNDS = 4
WARMUPS, REPEATS = 20, 100
POOL_BYTES = 4 << 30
# Shapes on which the other kinds of module are verified too: one for a resident kernel, one for half-precision GEMMs.
VARIANT_SHAPES = ("1", "8")
OURS = "rooflane"
# PyTorch's own ways to run an encoder; "+" marks those that torch.compile makes.
OWN = {
    "fast path": "fast path",
    "fast path off": "SDPA",
    "fast path+compile": "compiled",
    "fast path+graphs": "compiled RO",
    "fast path off+compile": "SDPA compiled",
    "fast path off+graphs": "SDPA compiled RO",
}


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
    slow = copy.deepcopy(encoder)
    for layer in slow.layers:
        layer.activation_relu_or_gelu = 0
    return slow


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
            found[name] = {"skipped": _reason(error)}
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
    timed = {name: TimedArm(forward, draw, clock, counts[name].warmups, capacity) for name, forward in arms.items()}
    with torch.inference_mode():
        samples, failures = time_blocks(timed, counts, rounds=ROUNDS, order_seed=SEED)
    for name, sample in samples.items():
        found.setdefault(name, {})["event_ns"] = [part.event_ns for part in sample.rounds]
    for name, error in failures.items():
        found.setdefault(name, {})["skipped"] = _reason(error)
    return {
        "shape": shape.as_dict(),
        "family": module.route.family,
        "gates": {name: gate.model_dump(mode="json") for name, gate in gates.items()},
        "arms": found,
    }


class TimedArm:
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


def _reason(error: Exception) -> str:
    """Return an exception's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


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
        except Exception as error:  # one shape's failure is its row; the others continue
            line = {"shape": shape.as_dict(), "error": _reason(error)}
        yield {"process": process, "environment": environment} | line
        free_memory(device)


def _news(line: dict[str, Any]) -> str:
    """Return a line's news: the error, or the gates and the arms that were timed."""
    if "error" in line:
        return line["error"]
    failing = [name for name, gate in line["gates"].items() if not gate["passed"]]
    timed = sum("event_ns" in arm for arm in line["arms"].values())
    return f"{f'fails the gate: {failing}' if failing else 'passes the gate'}, {timed} arms timed"


def load_dropin(path: str | Path) -> dict[str, list[Line]]:
    """Return the lines of each shape, one a process; raises `EvaluationError` when there are none or one repeats."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be read as JSON lines of the drop-in measurement ({error})") from None
    shapes: dict[str, list[Line]] = {}
    for line in lines:
        rows = shapes.setdefault(line["shape"]["id"], [])
        if any(row["process"] == line["process"] for row in rows):
            raise EvaluationError(f"{path}: shape {line['shape']['id']} has two lines of process {line['process']}")
        rows.append(line)
    if not shapes:
        raise EvaluationError(f"{path}: holds no line; run python briefs/dropin/measure.py first")
    return shapes


def render_dropin_table(path: str | Path) -> str:
    """Return the table in Markdown, the geometric means and the conditions under it."""
    shapes = load_dropin(path)
    whole = {key: lines for key, lines in shapes.items() if not any("error" in line for line in lines)}
    failures = [
        f"- shape {row['shape']['id']} failed: {row['error']}" for row in sum(shapes.values(), []) if "error" in row
    ]
    own = [name for name in OWN if any(_timed(row, name) for rows in whole.values() for row in rows)]
    columns = ("id", "shape", "family", *(OWN[name] for name in own), OURS, "over fast path", "over the fastest", "use")
    rows = tuple(_row(lines, own) for lines in whole.values())
    note = (
        "event time in ms, the median over the processes that timed the arm; SDPA: fast path off; RO: with CUDA "
        "graphs, whose next call overwrites the output; use: the largest share of the tolerance, above 1 fails"
    )
    environment = next(iter(shapes.values()))[0]["environment"]
    table = Table("", columns, rows, 3, note)
    lines = "\n".join([*_headlines(whole, own, list(shapes)), *failures])
    return "\n\n".join([markdown(table), lines, _conditions(environment, shapes)])


def _row(lines: list[Line], own: list[str]) -> tuple[str, ...]:
    """Return one shape's cells."""
    times = {name: _median_ms(lines, name) for name in (*own, OURS)}
    others = [name for name in own if times[name] is not None]
    fastest = min(others, key=lambda name: times[name])
    shape = Shape(**lines[0]["shape"])
    worst = max(_use(gate) for line in lines for gate in line["gates"].values())
    return (
        shape.id,
        shape.label(),
        lines[0]["family"],
        *(NONE if times[name] is None else number(times[name]) for name in own),
        number(times[OURS]),
        interval(t_interval(_logs(lines, "fast path"))),
        f"{interval(t_interval(_logs(lines, fastest)))} ({OWN[fastest]})",
        f"{number(worst)}{'' if worst <= 1 else ' !'}",
    )


def _headlines(shapes: dict[str, list[Line]], own: list[str], all_shapes: list[str]) -> list[str]:
    """Return the geometric mean over each arm, and of how many shapes ours was faster than every arm each time."""
    lines = []
    for name in own:
        rows = {key: rows for key, rows in shapes.items() if all(_timed(row, name) for row in rows)}
        processes = min((len(group) for group in rows.values()), default=0)
        if processes:
            logs = [fmean(_logs(group, name)[index] for group in rows.values()) for index in range(processes)]
            lines.append(f"- over {OWN[name]}: {interval(t_interval(logs))} over {_count(len(rows))}")
    ahead = [key for key, rows in shapes.items() if all(_ahead(row, own) for row in rows)]
    passed = [key for key, rows in shapes.items() if all(_passed(row) for row in rows)]
    lines.append(f"- faster than every arm timed in every process: {_share(ahead, all_shapes)}")
    lines.append(f"- passes the gate in every check: {_share(passed, all_shapes)}")
    return lines


def _share(those: list[str], all_shapes: list[str]) -> str:
    rest = [key for key in all_shapes if key not in those]
    return f"{len(those)} of {_count(len(all_shapes))}" + (f" (not {', '.join(rest)})" if rest else "")


def _count(shapes: int) -> str:
    return f"{shapes} shape{'' if shapes == 1 else 's'}"


def _conditions(environment: dict[str, Any], shapes: dict[str, list[Line]]) -> str:
    """Return the hardware, versions and counts on one line."""
    counts = sorted({len(rows) for rows in shapes.values()})
    facts = [
        environment.get("gpu") or environment["cpu"],
        *([f"driver {environment['driver']}"] if environment.get("driver") else []),
        *(f"{name} {environment[name]}" for name in ("torch", "triton", "python") if environment.get(name)),
        f"commit {(environment['commit'] or 'unknown')[:12]}",
        f"{'-'.join(map(str, counts))} {'process' if counts == [1] else 'processes'}",
        "4 mirrored rounds, fresh inputs",
    ]
    return "; ".join(facts) + "."


def _timed(line: Line, name: str) -> bool:
    return bool(line["arms"].get(name, {}).get("event_ns"))


def _line_ms(line: Line, name: str) -> float:
    return median_ns([sample for part in line["arms"][name]["event_ns"] for sample in part]) / 1e6


def _median_ms(lines: list[Line], name: str) -> float | None:
    """Return the median over processes of an arm's median, None where no process timed it."""
    found = [_line_ms(line, name) for line in lines if _timed(line, name)]
    return median(found) if found else None


def _logs(lines: list[Line], name: str) -> list[float]:
    """Return log(time of an arm / ours) of each process that timed the arm."""
    arms = [line["arms"] for line in lines if _timed(line, name)]
    return [paired_log_ratio(found[name]["event_ns"], found[OURS]["event_ns"]) for found in arms]


def _ahead(line: Line, own: list[str]) -> bool:
    return all(_line_ms(line, OURS) < _line_ms(line, name) for name in own if _timed(line, name))


def _passed(line: Line) -> bool:
    return all(gate["passed"] and _use(gate) <= 1 for gate in line["gates"].values())


def _use(gate: dict[str, Any]) -> float:
    """Return the use of tolerance; what is not a number in JSON was infinite."""
    use = gate["use"]
    return use if isinstance(use, (int, float)) else math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in fresh processes, append to the file given, print the table; or only write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help="a shape file")
    parser.add_argument("--ids", default="1,2,3,4,5,6,7,8,9,10,11,12,13", help="shapes of the file, by id")
    parser.add_argument("--out", type=Path, default=Path("dropin.jsonl"), help="file the JSON lines are appended to")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--processes", type=int, default=1, help="fresh processes, one after the other")
    parser.add_argument("--seconds", type=float, default=150.0, help="a process compiles no further arm after this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing; print the table of this record")
    parser.add_argument("--page", type=Path, help="with --table: write it between the markers of this page")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.table:
        return _write_table(options.table, options.page)
    if options.process is None:
        given = list(sys.argv[1:] if arguments is None else arguments)
        for process in range(options.processes):
            done = subprocess.run([sys.executable, __file__, *given, "--process", str(process)], check=False)
            if done.returncode:
                return done.returncode
        return _write_table(options.out, None)
    wanted = options.ids.split(",")
    shapes = [shape for shape in load_shapes(options.shapes) if shape.id in wanted]
    arms = [name for name in OWN if not (options.no_compile and "+" in name)]
    device = torch.device(resolve_device(options.device))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for line in measure_process(shapes, device, options.process, arms, options.seconds):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"process {options.process} shape {line['shape']['id']}: {_news(line)}", flush=True)
    return 0


def _write_table(record: Path, page: Path | None) -> int:
    text = render_dropin_table(record)
    if page is None:
        print(text)
    else:
        changed = update_between_markers(page, "dropin", text)
        print(f"{page}: {'written' if changed else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
