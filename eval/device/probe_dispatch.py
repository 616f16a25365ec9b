"""Measure what one eager operation costs the host, and tell when the host was too busy to say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.dispatch.ledger import ledger
from rooflane.eval.device.probe_readings import PATIENCE_S
from rooflane.eval.worker.clock import make_clock
from rooflane.shapes import Shape

# Four layers: the 132 operations of the published shapes, on tensors that cost nothing.
DISPATCH_SHAPE = Shape("dispatch", 1, 4, 16, 2, 32, 4)
# Windows at the least, and how long more are taken. On one shared host those of a second
# lay between 1.5 and 3.1 ms a forward; at rest a second window comes within a few percent of the quickest.
WINDOWS = 4
WINDOWS_S = 4.0
CONFIRMED = 1.1
# A thread alone on its core runs over 95% of its time.
LEAST_RUNNING = 0.9


def eager_dispatch_s(device: torch.device) -> tuple[float, str]:
    """Return the host seconds of one eager operation, and why they are in doubt, "" where they are not.

    Averaged over the mix of operations a baseline forward submits: a forward too small to keep any device busy, over
    its ledger's operation count. On CUDA the host's own time counts, with nothing awaited; on a CPU the little
    arithmetic is in it. Several windows are taken, the median of each, and the quickest window stands: a neighbour on
    the host only ever lengthens one. More follow, for a few seconds, until the quickest is confirmed.
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
    """Return why the quickest of some windows may not be the host's own pace, "" where nothing speaks against it.

    A window is the median seconds of a call and the share of its time in which this thread ran.
    """
    (best, share), (second, _) = sorted(windows)[:2]
    if second > CONFIRMED * best:
        return f"its two quickest readings lie {second / best - 1:.0%} apart"
    if share < LEAST_RUNNING:
        return f"other work took {1 - share:.0%} of the host's time"
    return ""
