"""What the profiler sees of one forward: kernels and copies on CUDA, aten operations on a CPU, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rooflane.eval.worker.clock import make_clock

Forward = Callable[[Tensor, Tensor | None], Tensor]

COPY_PREFIX = "Memcpy DtoD"
# Other transfers and fills the driver lists beside kernels; the baseline submits none of them.
NEITHER_PREFIXES = ("Memcpy ", "Memset ")
# torch.compile names each graph by a hash; the time of its own loops is listed apart from the operations it calls.
GENERATED_PREFIX = "## Call CompiledFxGraph"
GENERATED_NAME = "compiled graph's generated code"
# Host functions that call the operation that does the work; that operation is listed instead.
WRAPPER_NAMES = """
    linear matmul reshape contiguous clone masked_fill ones zeros layer_norm softmax to _to_copy type_as
    scaled_dot_product_attention chunk split unbind flatten
"""
# Host functions that read and write no element.
METADATA_NAMES = """
    empty empty_like empty_strided new_empty view _unsafe_view as_strided transpose t permute expand unsqueeze squeeze
    slice select narrow _reshape_alias resolve_conj resolve_neg detach alias lift_fresh result_type is_nonzero item
    _local_scalar_dense split_with_sizes
"""
NO_WORK = frozenset(f"aten::{name}" for name in (WRAPPER_NAMES + METADATA_NAMES).split())


@dataclass(frozen=True)
class Launch:
    """One stretch of work as the profiler saw it.

    `kind` is kernel or copy on CUDA, operation on a CPU, and region for the code round operations there, such as a
    compiled graph's generated loops.
    """

    name: str
    seconds: float
    kind: str


def count_device_operations(forward: Forward, x: Tensor, mask: Tensor | None) -> tuple[int, int]:
    """Return (kernels, device-to-device copies) of one call on CUDA; on a CPU, (operations, 0)."""
    return count_launches(trace(forward, x, mask))


def count_launches(launches: list[Launch]) -> tuple[int, int]:
    """Return (kernels or operations, device-to-device copies); regions are neither."""
    kinds = [launch.kind for launch in launches]
    return kinds.count("kernel") + kinds.count("operation"), kinds.count("copy")


def trace(forward: Forward, x: Tensor, mask: Tensor | None) -> list[Launch]:
    """Return the operations of one warmed call in the order they started."""
    # The profiler's library prints its own start and stop as errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cuda, await_device = x.device.type == "cuda", make_clock(x.device).synchronize
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.inference_mode():
        # Twice: the first call compiles or captures, and the profiler's own first use is slow.
        for _ in range(2):
            forward(x, mask)
        await_device()
        with profile(activities=activities) as profiler:
            forward(x, mask)
            await_device()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    if cuda:
        return list(_device_launches(events))
    roots = [event for event in events if event.cpu_parent is None]
    return [launch for root in roots for launch in _host_launches(root)]


def _device_launches(events: Iterable) -> Iterable[Launch]:
    for event in events:
        if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        if event.name.startswith(COPY_PREFIX):
            yield Launch(event.name, event.time_range.elapsed_us() / 1e6, "copy")
        elif not event.name.startswith(NEITHER_PREFIXES):
            yield Launch(event.name, event.time_range.elapsed_us() / 1e6, "kernel")


def _host_launches(event) -> Iterable[Launch]:
    """Walk the call tree: wrappers and regions are entered, an operation takes its whole subtree's time."""
    if "::" not in event.name:
        name = GENERATED_NAME if event.name.startswith(GENERATED_PREFIX) else event.name
        yield Launch(name, event.self_cpu_time_total / 1e6, "region")
    elif event.name not in NO_WORK:
        yield Launch(event.name, event.cpu_time_total / 1e6, "operation")
        return
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield from _host_launches(child)
