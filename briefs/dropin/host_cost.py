"""Measure what a call costs the host: a dispatched module, its built forward, and the check of the weights.

    python briefs/dropin/host_cost.py [--repeats 2000]

`paired.py` beside it compares two commits. On a CPU only the check is measured, in C++ and in Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import torch

from rooflane.baseline import build_baseline
from rooflane.dispatch import optimize
from rooflane.families.runtime.host import host_module
from rooflane.families.runtime.watch import ModelWatch
from rooflane.shapes import Shape

# A launch-bound published shape, batch 1: nothing hides the host there.
SHAPE = Shape("2", 1, 128, 128, 4, 128, 4)
BLOCKS = 15


def host_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median of the blocks' host microseconds a call; the device is idle when a block starts."""
    found = []
    for _ in range(BLOCKS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = perf_counter_ns()
        for _ in range(repeats):
            call()
        found.append((perf_counter_ns() - start) / repeats / 1000)
    return median(found)


def main() -> None:
    """Print one line for each thing measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000, help="calls of a block")
    repeats = parser.parse_args().repeats
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_baseline(SHAPE, device, 0)
    if device == "cuda":
        fast = optimize(model, SHAPE, on_unseen="error")
        x = torch.randn(SHAPE.batch_size, SHAPE.seq_len, SHAPE.d_model, device=device)
        with torch.inference_mode():
            fast(x)
            built = fast._built.get((SHAPE.batch_size, SHAPE.seq_len, SHAPE.causal, False)).forward
            # Few calls a block: the queue of launches must not fill, or the host would wait for the device.
            print(f"dispatched module: {host_us(lambda: fast(x), 200):.2f} us a call")
            print(f"built forward: {host_us(lambda: built(x), 200):.2f} us a call")
    watch = ModelWatch(model)
    watch._native = None
    watch._take()
    print(f"check of the weights, Python: {host_us(watch.changed, repeats // 10):.2f} us")
    if (module := host_module()) is not None:
        watch._native = module.Watch
        watch._take()
        print(f"check of the weights, C++: {host_us(watch.changed, repeats):.2f} us")


if __name__ == "__main__":
    main()
