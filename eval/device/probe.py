"""Measure the device at hand and state its limits as a profile.

The profile is made first, then the readings it is made from.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case, reference_numerics
from rooflane.dispatch import Profile, ProfileError, keep_profile, load_profile, match_profile
from rooflane.dispatch.device import AUTO, CPU, find_kept, host_memory_bytes, processor_name
from rooflane.dispatch.ledger import ledger
from rooflane.dispatch.profile import SI, Figure
from rooflane.eval.worker.clock import make_clock
from rooflane.shapes import Shape

# Sizes and counts are exact; rounding a memory up would promise bytes that are not there.
EXACT = 12
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# One burst must stay below the launch queue's depth (1024 on CUDA), or the host waits for the device.
BURST = 200
BURSTS = 15
# About 25 ms: longer than the host needs to submit a burst.
SLEEP_CYCLES = 50_000_000
GRAPH_NODES = 128
# How long one reading repeats its call.
PATIENCE_S = 0.1
# The matmul grows until one call takes this long: long enough to time, short enough for slow half types on a CPU.
LONG_CALL_S = {"cpu": 0.03, "cuda": 0.001}
LARGEST_MATMUL = {"cpu": 2048, "cuda": 8192}
SPECIAL_ELEMENTS = 1 << 18
# Four layers: the 132 operations of the published shapes, on tensors that cost nothing.
DISPATCH_SHAPE = Shape("dispatch", 1, 4, 16, 2, 32, 4)
# Windows at the least, and how long more are taken. On one shared host those of a second
# lay between 1.5 and 3.1 ms a forward; at rest a second window comes within a few percent of the quickest.
WINDOWS = 4
WINDOWS_S = 4.0
CONFIRMED = 1.1
# A thread alone on its core runs over 95% of its time.
LEAST_RUNNING = 0.9


def measure_profile(device: torch.device | str = "cpu", name: str | None = None) -> Profile:
    """Return the measured profile of a device; about three seconds on a CPU, ten on a GPU.

    Every figure that can be read here is marked measured, with the date and the device as its source. The price,
    what the device does not report, and an eager dispatch cost measured on a busy host are marked assumed.
    """
    device = torch.device(device)
    title = device_name(device)
    source = f"rooflane probe, {date.today().isoformat()}, {title}, torch {torch.__version__}"
    known = _known_profile(device, title)

    def measured(value: float, unit: str, digits: int = 3) -> Figure:
        value = rounded(value / SI[unit], digits)
        return Figure(value=value, unit=unit, mark="measured", source=source)

    def assumed(value: float, unit: str, why: str) -> Figure:
        return Figure(value=value, unit=unit, mark="assumed", source=why)

    cache = cache_bytes(device)
    dispatch_s, doubt = eager_dispatch_s(device)
    dispatch = measured(dispatch_s, "us")
    if doubt:
        source = f"{dispatch.source}, on a busy host: {doubt}; probe again when it is idle"
        dispatch = assumed(dispatch.value, "us", source)
    figures = {
        "eager_dispatch": dispatch,
        "copy_rate": measured(copy_bytes_per_s(device, cache or 0), "TB/s"),
        "special": measured(special_per_s(device), "Gop/s"),
        "cache": measured(cache, "MiB", EXACT) if cache else assumed(1, "MiB", "the system names no cache size"),
    }
    rates = {dtype: matmul_flops(device, dtype) for dtype in DTYPES}
    for dtype, rate in rates.items():
        if rate:
            figures[f"matmul_{dtype}"] = measured(rate, "TFLOP/s")
        else:
            why = f"no {dtype} matmul runs here; the float32 rate stands in for it"
            figures[f"matmul_{dtype}"] = assumed(figures["matmul_float32"].value, "TFLOP/s", why)
    figures |= _cuda_figures(device, measured) if device.type == "cuda" else _cpu_figures(measured, assumed)
    price = known.price if known else assumed(0, "USD/h", "no price is known for this device; edit this figure")
    return Profile(
        name=name or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        title=title,
        kind=device.type,
        match=(title,) if device.type == "cuda" else (),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        price=price,
        **figures,
    )


def measure_once(profile: str, kind: str) -> None:
    """Measure this host and keep its profile where `profile` is `auto`, the device a CPU, and none is kept yet."""
    if profile.lower() == AUTO and kind == CPU and find_kept() is None:
        keep_profile(measure_profile(CPU))


def _known_profile(device: torch.device, title: str) -> Profile | None:
    """Return the shipped profile of this device, for what cannot be measured: its price."""
    try:
        return match_profile(title) if device.type == "cuda" else load_profile("cpu")
    except ProfileError:
        return None


def _cuda_figures(device: torch.device, measured) -> dict[str, Figure]:
    limits = torch.cuda.get_device_properties(device)
    replay, node = graph_times(device)
    return {
        "kernel_launch": measured(kernel_launch_s(device), "us"),
        "graph_replay": measured(replay, "us"),
        "graph_node": measured(node, "us"),
        "memory": measured(limits.total_memory, "GB", EXACT),
        "shared_memory": measured(limits.shared_memory_per_block_optin, "KiB", EXACT),
        "sm_count": measured(limits.multi_processor_count, "count", EXACT),
    }


def _cpu_figures(measured, assumed) -> dict[str, Figure]:
    """Return the figures that differ between a CPU and a GPU; what a CPU lacks is 0."""
    absent = {"kernel_launch": "us", "graph_replay": "us", "shared_memory": "KiB"}
    figures = {name: assumed(0, unit, "a CPU has none") for name, unit in absent.items()}
    # A CPU has no graph; the least any operation costs is given where a GPU states the cost of a node.
    figures["graph_node"] = measured(smallest_op_s(torch.device("cpu")), "us")
    memory = host_memory_bytes()
    if memory is None:
        raise ProfileError("this system does not report its memory; write the profile by hand from devices/cpu.toml")
    return figures | {"memory": measured(memory, "GB", EXACT), "sm_count": measured(torch.get_num_threads(), "count")}


def seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the best time of one call, host and device work both awaited.

    Calls repeat for `PATIENCE_S`, twice at least: a pool of CPU threads takes tens of milliseconds to wake up. A rate
    is a ceiling, so the least disturbed call is the one that shows it.
    """
    await_device = make_clock(device).synchronize
    call()
    best, began = math.inf, time.perf_counter()
    calls = 0
    while calls < 2 or time.perf_counter() - began < PATIENCE_S:
        await_device()
        start = time.perf_counter()
        call()
        await_device()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def eager_dispatch_s(device: torch.device) -> tuple[float, str]:
    """Return the host seconds of one eager operation, and why they are in doubt, "" if they are not.

    Averaged over the mix of operations a baseline forward submits: a forward too small to keep any device busy, over
    its ledger's operation count. On CUDA the host's own time counts, with nothing awaited; on a CPU the little
    arithmetic is in it. Several windows are taken, the median of each, and the quickest window counts: other work on
    the host only lengthens one. More follow, for a few seconds, until the quickest is confirmed.
    """
    await_device = make_clock(device).synchronize
    model = build_baseline(DISPATCH_SHAPE, device, seed=0)
    x, mask = generate_random_case(config_of(DISPATCH_SHAPE), device, torch.float32, seed=0)

    def window() -> tuple[float, float]:
        times, ran, began = [], 0.0, time.perf_counter()
        while len(times) < 5 or time.perf_counter() - began < PATIENCE_S:
            await_device()
            start, before = time.perf_counter(), time.thread_time()
            model(x, mask)
            ran += time.thread_time() - before
            times.append(time.perf_counter() - start)
        return statistics.median(times), ran / sum(times)

    found, began = [], time.perf_counter()
    with torch.inference_mode():
        model(x, mask)
        while len(found) < WINDOWS or (doubt(found) and time.perf_counter() - began < WINDOWS_S):
            found.append(window())
    await_device()
    return min(found)[0] / ledger(DISPATCH_SHAPE).device_ops, doubt(found)


def doubt(windows: Sequence[tuple[float, float]]) -> str:
    """Return why the quickest window may not show the host's own pace, "" where there is no reason.

    A window is the median seconds of a call and the share of its time in which this thread ran.
    """
    (best, share), (second, _) = sorted(windows)[:2]
    if second > CONFIRMED * best:
        return f"its two quickest readings lie {second / best - 1:.0%} apart"
    if share < LEAST_RUNNING:
        return f"other work took {1 - share:.0%} of the host's time"
    return ""


def smallest_op_s(device: torch.device) -> float:
    """Return the seconds of one in-place add of one element: the least any eager operation costs."""
    await_device = make_clock(device).synchronize
    value = torch.zeros(1, device=device)
    times = []
    with torch.inference_mode():
        for _ in range(BURSTS):
            await_device()
            start = time.perf_counter()
            for _ in range(BURST):
                value.add_(1.0)
            times.append((time.perf_counter() - start) / BURST)
    await_device()
    return statistics.median(times)


def matmul_flops(device: torch.device, dtype: str) -> float | None:
    """Return the FLOPs a second of a square matmul of that dtype, or None where the device has none.

    float32 is measured as the baseline runs it: TF32 on CUDA. The size doubles until one call is long enough.
    """
    size, best = 256, 0.0
    precision = torch.get_float32_matmul_precision()
    reference_numerics(device)
    try:
        with torch.inference_mode():
            while True:
                left = torch.randn(size, size, device=device).to(DTYPES[dtype])
                right = torch.randn(size, size, device=device).to(DTYPES[dtype])
                seconds = seconds_per_call(lambda a=left, b=right: torch.mm(a, b), device)
                best = max(best, 2 * size**3 / seconds)
                if seconds > LONG_CALL_S[device.type] or size >= LARGEST_MATMUL[device.type]:
                    return best
                size *= 2
    except RuntimeError:
        # Old devices refuse half types; a figure that does not exist must not stop the others.
        return best or None
    finally:
        torch.set_float32_matmul_precision(precision)


def copy_bytes_per_s(device: torch.device, cache: int) -> float:
    """Return the bytes a second, read plus written, of a copy far larger than the cache."""
    limit = torch.cuda.get_device_properties(device).total_memory // 8 if device.type == "cuda" else 1 << 28
    size = min(max(4 * cache, 1 << 26 if device.type == "cpu" else 1 << 31), limit)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call(lambda: target.copy_(source), device)


def special_per_s(device: torch.device) -> float:
    """Return the exponentials a second, on data that stays in the cache or in registers."""
    values = torch.rand(SPECIAL_ELEMENTS, device=device)
    if device.type == "cuda":
        from rooflane.eval.device.probe_kernel import CHAIN, exp_chain

        values = values.repeat(64)
        return values.numel() * CHAIN / seconds_per_call(lambda: exp_chain(values), device)
    out = torch.empty_like(values)
    return values.numel() / seconds_per_call(lambda: torch.exp(values, out=out), device)


def graph_times(device: torch.device) -> tuple[float, float]:
    """Return (event seconds of replaying a one-kernel CUDA graph, seconds each further node adds).

    The first is the organiser's clock: an event pair around each replay, no synchronisation between them. The second
    comes from back-to-back replays of two graphs, so that the host's pace cancels.
    """
    value = torch.zeros(1, device=device)

    def capture(count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                value.add_(1.0)
        return graph

    with torch.inference_mode():
        value.add_(1.0)
        single, many = capture(1), capture(1 + GRAPH_NODES)
        for _ in range(BURST):
            single.replay()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(BURST)]
        for start, end in pairs:
            start.record()
            single.replay()
            end.record()
        torch.cuda.synchronize(device)
        replay = statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3
        many.replay()
        torch.cuda.synchronize(device)
        short, long = (_back_to_back_s(graph.replay, device, 50) for graph in (single, many))
    return replay, max(long - short, 0.0) / GRAPH_NODES


def _back_to_back_s(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the CUDA event time of one of `calls` calls between a single pair of events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / calls


def kernel_launch_s(device: torch.device) -> float:
    """Return the seconds from one tiny kernel to the next in a stream, the host's own pace kept out.

    The kernels queue up behind a long one, so the device never waits for the host.
    """
    value = torch.zeros(1, device=device)

    def burst_s() -> float:
        torch.cuda._sleep(SLEEP_CYCLES)
        return _back_to_back_s(lambda: value.add_(1.0), device, BURST)

    with torch.inference_mode():
        burst_s()
        return statistics.median(burst_s() for _ in range(BURSTS))


def cache_bytes(device: torch.device) -> int | None:
    """Return the last-level cache (L2 on CUDA), or None when the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [_size(path.read_text()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=None)


def _size(text: str) -> int:
    """Turn the kernel's '32768K' into bytes."""
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of this host's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def rounded(value: float, digits: int = 3) -> float:
    """Round to significant digits: a measured figure carries no more."""
    return 0.0 if value == 0 else round(value, digits - 1 - math.floor(math.log10(abs(value))))
