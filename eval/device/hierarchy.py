"""Run the probes of the memory hierarchy on an H100 or H200, or compile and examine them elsewhere.

A kernel times itself: latencies and rates of a multiprocessor come from its cycle counter, rates of the whole device
from its nanosecond timer, first block's start to last block's end. Neither holds the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

import torch

from rooflane.dispatch import Profile
from rooflane.dispatch.profile import Figure
from rooflane.eval.device.ladder import FORBIDDEN
from rooflane.eval.device.probe import rounded
from rooflane.eval.report.table import NONE, number
from rooflane.families.ladder.hierarchy.probes import CYCLES, L1, PROBES, Order, Probe, Run
from rooflane.families.resources.kernel_case import SM90
from rooflane.families.resources.machine_code import instructions
from rooflane.families.resources.resource_gate import nvrtc_version

READINGS = 3
FLUSH_BYTES = 256 << 20  # twice the largest L2 and more


@dataclass(frozen=True)
class Reading:
    """What a launch measured: the median block's cycles, the nanoseconds of all, the blocks, single steps' cycles."""

    cycles: float
    nanoseconds: float
    blocks: int
    samples: tuple[int, ...] = ()


def measure_hierarchy(profile: Profile) -> Profile:
    """Return the profile with the figures of the hierarchy, measured on the current GPU; about five seconds."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = f"rooflane probe --hierarchy, {date.today().isoformat()}, {profile.title}, torch {torch.__version__}"
    readings = {run: read(run, device) for run in dict.fromkeys(probe.run for probe in PROBES if probe.run)}
    figures = {}
    for probe in PROBES:
        if probe.run:
            own = zip(readings[probe.run], readings[L1], strict=True)
            value = median(reckon(probe, reading, timing_cost(quick)) for reading, quick in own)
            figures[probe.name] = Figure(value=rounded(value), unit=probe.unit, mark="measured", source=source)
        else:
            figures[probe.name] = getattr(profile, probe.profile)
    return profile.model_copy(update={"hierarchy": figures})


def reckon(probe: Probe, reading: Reading, cost: float = 0.0) -> float:
    """Return a probe's value in its unit; `cost` is what timing a step by itself adds."""
    run = probe.run
    if probe.mode:
        return two_modes(reading.samples)[probe.mode == "far"] - cost
    steps = run.repeats * run.steps
    work = run.repeats * run.work
    return {
        CYCLES: reading.cycles / steps,
        "us": reading.nanoseconds / 1e3 / steps,
        "GHz": reading.cycles / reading.nanoseconds,
        "TB/s": work * (1 if run.whole else reading.blocks) / reading.nanoseconds / 1e3,
    }.get(probe.unit, work / reading.cycles)


def timing_cost(reading: Reading) -> float:
    """Return the cycles that timing a step by itself adds: of steps that all take the same time."""
    return median(reading.samples) - reading.cycles / L1.repeats


def two_modes(samples: Sequence[int]) -> tuple[float, float]:
    """Return the medians of the two parts whose split leaves the least variance within them (Otsu)."""
    ordered = torch.tensor(sorted(samples), dtype=torch.float64)
    count, sums = len(ordered), ordered.cumsum(0)
    low = torch.arange(1, count, dtype=torch.float64)
    means = sums[:-1] / low, (sums[-1] - sums[:-1]) / (count - low)
    split = int((low * (count - low) * (means[1] - means[0]) ** 2).argmax()) + 1
    return float(ordered[:split].median()), float(ordered[split:].median())


def in_time(value: float, unit: str, units: int, gigahertz: float) -> str:
    """Return a figure of a clock as text in nanoseconds, or as the rate of all multiprocessors; others have none."""
    each = units * gigahertz
    amount, name = {
        CYCLES: (value / gigahertz, "ns"),
        "B/clk/SM": (value * each / 1e3, "TB/s"),
        "op/clk/SM": (value * each, "Gop/s"),
        "FLOP/clk/SM": (value * each / 1e3, "TFLOP/s"),
    }.get(unit, (0.0, ""))
    return f"{number(amount)} {name}" if name else NONE


def successors(count: int, shuffled: bool, device: Any = "cpu") -> torch.Tensor:
    """Return for each of `count` places the one that follows it; the walk visits all before it returns."""
    if not shuffled:
        return (torch.arange(count, device=device) + 1) % count
    order = torch.randperm(count, generator=torch.Generator(device).manual_seed(count), device=device)
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)
    return follows


def lay_out(order: Order, device: Any = "cpu") -> torch.Tensor:
    """Return memory in which each place of the order holds the address of the next; int64."""
    words = torch.zeros(order.size // 8, dtype=torch.int64, device=device)
    places = words[:: order.stride // 8]
    places.copy_(successors(len(places), order.shuffled, device) * order.stride + words.data_ptr())
    return words


def read(run: Run, device: torch.device) -> list[Reading]:
    """Return readings of a run, after one that is not counted; raises `RuntimeError` where the kernel did not run."""
    from rooflane.families.ladder.launch import bind_kernel

    units = torch.cuda.get_device_properties(device).multi_processor_count
    cluster = run.constants.get("CLUSTER", 1)
    blocks = run.blocks or units // cluster * cluster
    chased = isinstance(run.data, Order)
    data = lay_out(run.data, device) if chased else torch.empty(run.data, dtype=torch.uint8, device=device)
    times = torch.empty(4 * blocks + run.samples, dtype=torch.int64, device=device)
    arguments = (times, data, run.repeats, *run.arguments)
    launch = (run.source(), run.kernel, blocks, run.threads, run.shared_bytes)
    call = bind_kernel(*launch, arguments, device, held=arguments)
    flush = torch.empty(FLUSH_BYTES if run.data_bytes > FLUSH_BYTES else 0, dtype=torch.uint8, device=device)
    found = []
    for _ in range(1 + READINGS):
        if not chased:
            data.zero_()  # a barrier's counter starts at zero
        flush.zero_()
        times.zero_()
        call()
        found.append(take_reading(times.tolist(), blocks, run.kernel))
    return found[1:]


def take_reading(times: Sequence[int], blocks: int, kernel: str) -> Reading:
    """Return the reading of what a kernel wrote: four numbers a block, then the samples."""
    ran = [times[at : at + 4] for at in range(0, 4 * blocks, 4) if times[at + 2]]
    if not ran:
        raise RuntimeError(f"no block of the kernel {kernel} timed itself; measure again on an idle GPU")
    starts, ends = min(one[1] for one in ran), max(one[3] for one in ran)
    return Reading(median(one[2] - one[0] for one in ran), ends - starts, len(ran), tuple(times[4 * blocks :]))


def examine_runs() -> tuple[list[str], str]:
    """Return what is wrong with the machine code of the runs for sm_90a, and why it was not read, "" if it was."""
    if nvrtc_version() is None:
        return [], "not compiled: NVRTC is not installed (pip install 'rooflane[hopper]')"
    from rooflane.families.runtime.cuda_kernel import compile_cubin

    def disassemble(source: str) -> list[str]:
        return instructions(compile_cubin(source, f"sm_{SM90.number}a"))

    runs = {probe.name: probe.run for probe in PROBES if probe.run}
    sources = list(dict.fromkeys(run.source() for run in runs.values()))
    try:
        with ThreadPoolExecutor() as pool:
            codes = dict(zip(sources, pool.map(disassemble, sources), strict=True))
    except LookupError as error:
        return [], f"instructions not read: {error}"
    return [f"{name}: {fault}" for name, run in runs.items() for fault in code_faults(run, codes[run.source()])], ""


def code_faults(run: Run, code: Sequence[str]) -> list[str]:
    """Return the instructions that a run lacks, and those of local memory."""
    faults = [f"no {name}" for name in run.expected if not any(one.startswith(name) for one in code)]
    return faults + [f"{name} in the code" for name in FORBIDDEN if any(one.startswith(name) for one in code)]
