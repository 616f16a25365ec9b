"""Profile one forward: the time, arithmetic, traffic and place under the roofline of every operation.

On CUDA an operation is a kernel or a copy, on a CPU an aten operation.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rooflane.baseline import CONTROLS, build_baseline, config_of, generate_random_case, reference_numerics, torch_dtype
from rooflane.dispatch import Profile, load_profile
from rooflane.dispatch.ledger import Op, ledger
from rooflane.eval.device.probe import measure_once
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import resolve_device
from rooflane.eval.record.records import EAGER, parse_arm
from rooflane.eval.worker.arms import build_arm
from rooflane.eval.worker.candidates import load_rule_table, parse_candidate
from rooflane.eval.worker.clock import make_clock
from rooflane.shapes import Shape

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
WALL_CALLS = 5
SEED = 1234


@dataclass(frozen=True)
class Launch:
    """One stretch of work as the profiler saw it.

    `kind` is kernel or copy on CUDA, operation on a CPU, and region for the code round operations there, such as a
    compiled graph's generated loops.
    """

    name: str
    seconds: float
    kind: str


@dataclass(frozen=True)
class Operation:
    """Like operations of a forward, added up. FLOPs and bytes are None where they are unknown."""

    name: str
    kind: str
    count: int
    seconds: float
    flops: int | None = None
    bytes: int | None = None

    @property
    def flops_per_s(self) -> float | None:
        """Achieved arithmetic, matrix products only."""
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved traffic, each operand counted once."""
        return self.bytes / self.seconds if self.bytes and self.seconds else None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.flops and self.bytes else None

    def roof(self, profile: Profile, dtype: str) -> tuple[str, float] | None:
        """Return (what bounds the operation, the share of that bound it reaches), or None when unknown."""
        if self.bytes is None or not self.seconds:
            return None
        compute_s = (self.flops or 0) / profile.matmul_flops(dtype)
        bandwidth_s = self.bytes / profile.copy_bytes_per_s
        if compute_s > bandwidth_s:
            return "compute", compute_s / self.seconds
        return "bandwidth", bandwidth_s / self.seconds


@dataclass(frozen=True)
class ForwardProfile:
    """One profiled forward: its operations in the order they first ran, and the wall time of an unprofiled call."""

    shape: Shape
    arm: str
    device: str
    profile: Profile
    operations: tuple[Operation, ...]
    kernels: int
    copies: int
    wall_s: float
    note: str

    @property
    def busy_s(self) -> float:
        """Time inside operations; the rest of the wall time is launch cost and waiting."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def baseline_flops(self) -> int:
        """Matrix arithmetic of the baseline forward, the measure every arm is compared with."""
        return ledger(self.shape).flops

    def as_dict(self) -> dict[str, object]:
        """Return the profile as plain values, the form JSON output carries."""
        rows = []
        for operation in self.operations:
            bound, share = operation.roof(self.profile, self.shape.dtype) or (None, None)
            rates = {"flops_per_s": operation.flops_per_s, "bytes_per_s": operation.bytes_per_s}
            rows.append(asdict(operation) | rates | {"bound": bound, "share_of_roof": share})
        plain = {name: getattr(self, name) for name in ("arm", "device", "kernels", "copies", "wall_s", "busy_s")}
        return {
            "shape": self.shape.as_dict(),
            **plain,
            "profile": self.profile.name,
            "baseline_flops": self.baseline_flops,
            "note": self.note,
            "operations": rows,
        }


def profile_arm(shape: Shape, arm: str, device: str, profile_name: str, rules: str | None) -> ForwardProfile:
    """Build the eager baseline, a control or a candidate for a shape as the evaluator does, and profile it.

    Raises `EvaluationError` when the arm cannot be built on the device.
    """
    place = torch.device(resolve_device(device))
    reference_numerics(place)
    if arm != EAGER and arm not in CONTROLS:
        parse_candidate(arm)  # a wrong name is its own paragraph, not a failure to build
    # On a CPU the shipped profile describes another host; a roof must be this host's.
    measure_once(profile_name, place.type)
    limits = load_profile(profile_name, place.type)
    model = build_baseline(shape, place, SEED)
    forward: Forward | None = model
    if arm != EAGER:
        wanted = parse_arm(arm, () if arm in CONTROLS else (arm,))
        built = build_arm(wanted, model, shape, place, limits, load_rule_table(rules), SEED)
        if built.forward is None:
            raise EvaluationError(f"{arm} cannot be profiled on shape {shape.id} ({shape.label()}): {built.reason}")
        forward = built.forward
    x, mask = generate_random_case(config_of(shape), place, torch_dtype(shape.dtype), SEED, shape.padding_ratio)
    return profile_operations(forward, x, mask, shape, arm, limits)


def profile_operations(
    forward: Forward, x: Tensor, mask: Tensor | None, shape: Shape, arm: str, limits: Profile
) -> ForwardProfile:
    """Profile one call of `forward` and return its `ForwardProfile`.

    The eager baseline (`arm` "eager") is matched with the ledger operation by operation, which gives every row its
    FLOPs and bytes; any other arm is listed by kernel, its FLOPs and bytes unknown.
    """
    launches = trace(forward, x, mask)
    ops = ledger(shape, masked=mask is not None).ops
    matched = match_ledger(launches, ops, x.device.type) if arm == EAGER else None
    note = ""
    if arm != EAGER:
        note = (
            "fused kernels do not report their FLOPs and bytes; the baseline's arithmetic is given for the whole call"
        )
    elif matched is None:
        listed = sum(op.device_ops for op in ops)
        note = f"FLOPs and bytes are unknown: the profiler saw {len(launches)} operations, the ledger lists {listed}"
    operations = _add_up_launches(launches) if matched is None else _add_up_matched(matched)
    kernels, copies = count_launches(launches)
    wall_s = _wall_s(forward, x, mask)
    return ForwardProfile(shape, arm, x.device.type, limits, operations, kernels, copies, wall_s, note)


def match_ledger(launches: list[Launch], ops: tuple[Op, ...], device_type: str) -> list[tuple[Op, list[Launch]]] | None:
    """Pair the ledger's ops with launches in order, or return None when the counts differ.

    On CUDA an op owns `device_ops` launches; a CPU runs each op as one.
    """
    shares = [op.device_ops if device_type == "cuda" else 1 for op in ops]
    if sum(shares) != len(launches):
        return None
    rest = iter(launches)
    return [(op, list(islice(rest, share))) for op, share in zip(ops, shares, strict=True)]


def _add_up_matched(pairs: list[tuple[Op, list[Launch]]]) -> tuple[Operation, ...]:
    """Add up the layers: one row for each name in the ledger."""
    rows: dict[str, list[tuple[Op, list[Launch]]]] = {}
    for op, launches in pairs:
        rows.setdefault(op.name, []).append((op, launches))
    return tuple(
        Operation(
            name=name,
            kind=row[0][0].kind,
            count=sum(len(launches) for _, launches in row),
            seconds=sum(launch.seconds for _, launches in row for launch in launches),
            flops=sum(op.flops for op, _ in row),
            bytes=sum(op.bytes for op, _ in row),
        )
        for name, row in rows.items()
    )


def _add_up_launches(launches: list[Launch]) -> tuple[Operation, ...]:
    rows: dict[str, list[Launch]] = {}
    for launch in launches:
        rows.setdefault(launch.name, []).append(launch)
    return tuple(
        Operation(name, row[0].kind, len(row), sum(launch.seconds for launch in row)) for name, row in rows.items()
    )


def _wall_s(forward: Forward, x: Tensor, mask: Tensor | None) -> float:
    """Return the median wall time of a call in seconds, until its device work ends, without the profiler's cost."""
    times, await_device = [], make_clock(x.device).synchronize
    with torch.inference_mode():
        for _ in range(WALL_CALLS):
            await_device()
            start = time.perf_counter()
            forward(x, mask)
            await_device()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


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
