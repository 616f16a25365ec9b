"""Examine the rungs of a ladder without a GPU; check and time them on one, interleaved with the library's calls.

Times are device times (`Clock.spans`): a spin kernel holds the stream while the host submits a call. Each round times
every arm, and every second round in reversed order, so that a drift of the machine cancels within a pair of rounds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import median
from typing import Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.stats.estimator import paired_log_ratio, t_interval
from rooflane.eval.stats.mean import Interval
from rooflane.families.ladder import gemm, reduce
from rooflane.families.ladder.rungs import EPSILON, Rung
from rooflane.families.resources.kernel_case import SM90
from rooflane.families.resources.machine_code import instructions
from rooflane.families.resources.resource_gate import Resources, code_key, load_record, measure, nvrtc_version

LADDERS: Mapping[str, Sequence[Rung]] = {"gemm": gemm.RUNGS, "reduce": reduce.RUNGS}
SIZE_NAMES = {"gemm": ("M", "N", "K"), "reduce": ("ROWS", "COLUMNS")}
DEFAULT_SIZES = {"gemm": (4096, 4096, 4096), "reduce": (1 << 16, 1 << 10)}
FORBIDDEN = ("LDL", "STL")  # local memory: an array that did not fit the registers
# FLOPs of an SM a cycle, compute capability 9.0: 128 multiply-adds in fp32; the tensor cores' dense rates.
SM90_FLOPS = {"fp32": 256, "TF32": 2048, "fp16": 4096, "bf16": 4096, "FP8": 8192}
ROUNDS = 10
ROUND_S = 0.06  # of one arm in one round
MOST_CALLS = 40
COPY = "copy"
LIBRARY = "library "  # starts the names of its calls


@dataclass(frozen=True)
class Examined:
    """What the compiler makes of a rung: its resources, and what is wrong with them. `note` says what was not read."""

    resources: Resources | None
    faults: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Timed:
    """An arm on the device: its rate in SI units with the range over rounds, and how many times faster than others.

    `shares` are ratios to the library's calls and to the copy, with their intervals over pairs of rounds. `roof` is the
    share of the device's own rate, None where the mode's is not known.
    """

    rate: float
    low: float
    high: float
    shares: Mapping[str, Interval]
    roof: float | None
    error: float
    passed: bool
    why: str = ""


def find_rungs(ladder: str, names: Sequence[str] = ()) -> list[Rung]:
    """Return the rungs of a ladder, all or those named; raises `EvaluationError` for a name that there is not."""
    rungs = {rung.name: rung for rung in LADDERS[ladder]}
    if unknown := [name for name in names if name not in rungs]:
        raise EvaluationError(f"--rung {', '.join(unknown)}: name rungs of the {ladder} ladder: {', '.join(rungs)}")
    return [rungs[name] for name in names or rungs]


def read_sizes(ladder: str, text: str | None) -> tuple[int, ...]:
    """Return the sizes that a text states, the ladder's own without one; raises `EvaluationError` for other texts."""
    if text is None:
        return DEFAULT_SIZES[ladder]
    names = SIZE_NAMES[ladder]
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if len(sizes) != len(names) or min(sizes) < 1:
        raise EvaluationError(f"--size {text}: give {','.join(names)}, each a whole number of at least 1")
    return sizes


def sizes_for(rung: Rung, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of one rung: a sum takes all elements as one row."""
    return (1, math.prod(sizes)) if getattr(rung, "task", "") == "sum" else sizes


def measured_before(ladder: str) -> dict[str, Any]:
    """Return the report of the run that is kept with the package, empty before there is one."""
    path = files("rooflane.families.ladder") / f"measured_{ladder}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def examine(rung: Rung) -> Examined:
    """Compile a rung and compare registers, spills, occupancy and instructions with what it states."""
    version = nvrtc_version()
    if version is None:
        return Examined(None, note="not compiled: NVRTC is not installed (pip install 'rooflane[hopper]')")
    from rooflane.families.runtime.cuda_kernel import compile_cubin

    case = rung.case()
    try:
        recorded = load_record(version).get(case.key, {})
    except LookupError:
        recorded = {}
    found = Resources(**recorded) if recorded.get("code") == code_key(case) else measure(case)
    faults = []
    if found.registers > rung.registers:
        faults.append(f"{found.registers} registers, more than {rung.registers}")
    if found.spill_bytes:
        faults.append(f"{found.spill_bytes} bytes spilled")
    if found.blocks_per_sm < rung.blocks:
        faults.append(f"{found.blocks_per_sm} blocks an SM, fewer than {rung.blocks}")
    try:
        code = instructions(compile_cubin(case.source, f"sm_{SM90.number}a"))
    except LookupError as error:
        return Examined(found, tuple(faults), f"instructions not read: {error}")
    faults += [f"no {name}" for name in rung.expected if not any(one.startswith(name) for one in code)]
    faults += [f"{name} in the code" for name in FORBIDDEN if any(one.startswith(name) for one in code)]
    return Examined(found, tuple(faults))


def time_ladder(rungs: Sequence[Rung], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Check and time rungs and the library on the current GPU; return the device, its roofs and a `Timed` for each arm.

    A rung that refuses the sizes is left out, with its reason under `refused`.
    """
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    precision = torch.get_float32_matmul_precision()
    refused = {rung.name: rung.refuse(*sizes_for(rung, sizes)) for rung in rungs}
    taken = [rung for rung in rungs if not refused[rung.name]]
    groups: dict[str, list[Rung]] = {}
    for rung in taken:
        groups.setdefault(getattr(rung, "task", ""), []).append(rung)
    roofs = device_roofs(device)
    arms: dict[str, Timed] = {}
    try:
        for group in groups.values():
            arms |= _time_group(group, sizes_for(group[0], sizes), device, roofs)
    finally:
        torch.set_float32_matmul_precision(precision)
    return {
        "ladder": rungs[0].LADDER,
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "sizes": list(sizes),
        "roofs": roofs,
        "refused": {name: reason for name, reason in refused.items() if reason},
        "arms": arms,
    }


def as_plain(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of `time_ladder` as plain values."""
    plain = {name: asdict(arm) for name, arm in report["arms"].items()}
    for arm in plain.values():
        arm["error"] = arm["error"] if math.isfinite(arm["error"]) else None  # JSON has no infinity
    return {**report, "arms": plain}


def device_roofs(device: Any) -> dict[str, float]:
    """Return the FLOPs a second of each mode on an H100 or H200 at its highest clock."""
    import torch
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    status, kilohertz = driver.cuDeviceGetAttribute(attribute, device.index)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return {} if int(status) else {mode: flops * units * kilohertz * 1e3 for mode, flops in SM90_FLOPS.items()}


def _time_group(
    group: Sequence[Rung], sizes: tuple[int, ...], device: Any, roofs: Mapping[str, float]
) -> dict[str, Timed]:
    """Check and time rungs that compute one thing, and the library's calls for it."""
    import torch

    from rooflane.families.ladder.launch import bind, normwise_error

    first = group[0]
    drawn = first.draw(device, *sizes)
    truth = first.truth(drawn)
    library = _library(first, drawn)
    calls: dict[str, Callable[[], Any]] = dict(library)
    errors = {name: normwise_error(call(), truth) if name != COPY else 0.0 for name, call in library.items()}
    for rung in group:
        own = rung.draw(device, *sizes)
        out = torch.empty(rung.output_shape(*sizes), dtype=getattr(torch, rung.result), device=device)
        # NaN bytes: an element that is not written is found.
        out.view(torch.uint8).fill_(0xFF)
        calls[rung.name] = bind(rung, rung.prepare(own), out)
        calls[rung.name]()
        errors[rung.name] = normwise_error(rung.value(out), rung.truth(own))
    times = interleaved(calls)
    by_name = {rung.name: rung for rung in group}
    work = {name: by_name.get(name, first).work(*sizes) for name in calls} | {COPY: 2.0 * drawn[0].nbytes}
    found = {}
    for name, (rates, shares) in compare_arms(times, work, list(library)).items():
        rung, error = by_name.get(name), errors[name]
        roof = roofs.get(rung.mode if rung else name.removeprefix(LIBRARY))
        bound = rung.bound if rung else math.inf
        why = "" if error <= bound else f"its error is {error:.2g}, above {bound:.2g}"
        share = median(rates) / roof if roof else None
        found[name] = Timed(median(rates), min(rates), max(rates), shares, share, error, not why, why)
    return found


def compare_arms(
    times: Mapping[str, Sequence[Sequence[int]]], work: Mapping[str, float], others: Sequence[str]
) -> dict[str, tuple[list[float], dict[str, Interval]]]:
    """Return each arm's work a second, round by round, and its ratio to that of `others`.

    `times` are nanoseconds [round][call]. A ratio's interval is over pairs of mirrored rounds.
    """
    found = {}
    for name, rounds in times.items():
        shares = {}
        for other in others:
            pairs = [slice(start, start + 2) for start in range(0, len(rounds), 2)]
            more = math.log(work[name] / work[other])
            shares[other] = t_interval([paired_log_ratio(times[other][pair], rounds[pair]) + more for pair in pairs])
        found[name] = [work[name] / median(part) * 1e9 for part in rounds], shares
    return found


def interleaved(calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[list[int]]]:
    """Return the nanoseconds of each arm's calls [round][call].

    A pair of rounds goes through the arms in an order of its own, forwards and backwards: the clock that one arm leaves
    at the power limit does not always meet the same next one.
    """
    from rooflane.eval.worker.clock import estimate_ns, make_clock

    clock = make_clock("cuda")
    counts = {
        name: max(1, min(MOST_CALLS, round(ROUND_S * 1e9 / estimate_ns(call, (), clock))))
        for name, call in calls.items()
    }
    times: dict[str, list[list[int]]] = {name: [] for name in calls}
    order, draw = list(calls), random.Random(0)
    for number in range(ROUNDS):
        if number % 2:
            order.reverse()
        else:
            draw.shuffle(order)
        for name in order:
            times[name].append(clock.spans(calls[name], [()] * counts[name], 0))
    return times


def _library(rung: Rung, drawn: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Return the library's calls for what a rung computes, by name; a reduction's also a copy of its input."""
    import torch
    from torch.nn.functional import layer_norm, rms_norm

    if rung.LADDER == "gemm":
        return _library_products(*drawn[:2])
    x = drawn[0]
    copy = torch.empty_like(x)
    call = {
        "sum": lambda: x.sum(1),
        "softmax": lambda: x.softmax(1),
        "layernorm": lambda: layer_norm(x, x.shape[1:], eps=EPSILON),
        "rmsnorm": lambda: rms_norm(x, x.shape[1:], eps=EPSILON),
        "argmax": lambda: x.argmax(1),
    }[rung.task]
    return {LIBRARY + rung.task: call, COPY: lambda: copy.copy_(x)}


def _library_products(a: Any, b: Any) -> dict[str, Callable[[], Any]]:
    """Return cuBLAS's product in fp32, in TF32 and in fp16."""
    import torch

    def product(left: Any, right: Any, precision: str) -> Callable[[], Any]:
        out = left.new_empty(left.shape[0], right.shape[0])

        def call() -> Any:
            torch.set_float32_matmul_precision(precision)
            return torch.mm(left, right.T, out=out)

        return call

    return {
        LIBRARY + "fp32": product(a, b, "highest"),
        LIBRARY + "TF32": product(a, b, "high"),
        LIBRARY + "fp16": product(a.half(), b.half(), "highest"),
    }
