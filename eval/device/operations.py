"""Profile one forward: the time, arithmetic, traffic and place under the roofline of every operation."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from rooflane.baseline import (
    CONTROLS,
    build_baseline,
    config_of,
    generate_random_case,
    reference_numerics,
    torch_dtype,
)
from rooflane.dispatch import Profile, load_profile
from rooflane.dispatch.ledger import Op, ledger
from rooflane.eval.device.operation_trace import Forward, Launch, count_launches, trace
from rooflane.eval.device.probe import measure_once
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import resolve_device
from rooflane.eval.record.records import EAGER, parse_arm
from rooflane.eval.worker.arms import build_arm
from rooflane.eval.worker.candidates import load_rule_table, parse_candidate
from rooflane.eval.worker.clock import make_clock
from rooflane.shapes import Shape

WALL_CALLS = 5
SEED = 1234


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
            bound = operation.roof(self.profile, self.shape.dtype)
            rows.append(
                {
                    "name": operation.name,
                    "kind": operation.kind,
                    "count": operation.count,
                    "seconds": operation.seconds,
                    "flops": operation.flops,
                    "bytes": operation.bytes,
                    "flops_per_s": operation.flops_per_s,
                    "bytes_per_s": operation.bytes_per_s,
                    "bound": bound and bound[0],
                    "share_of_roof": bound and bound[1],
                }
            )
        return {
            "shape": self.shape.as_dict(),
            "arm": self.arm,
            "device": self.device,
            "profile": self.profile.name,
            "kernels": self.kernels,
            "copies": self.copies,
            "wall_s": self.wall_s,
            "busy_s": self.busy_s,
            "baseline_flops": self.baseline_flops,
            "note": self.note,
            "operations": rows,
        }


def profile_arm(shape: Shape, arm: str, device: str, profile: str, rules: str | None) -> ForwardProfile:
    """Build the eager baseline, a control or a candidate for a shape as the evaluator does, and profile it.

    Raises `EvaluationError` when the arm cannot be built on the device.
    """
    place = torch.device(resolve_device(device))
    reference_numerics(place)
    if arm != EAGER and arm not in CONTROLS:
        parse_candidate(arm)  # a wrong name is its own paragraph, not a failure to build
    # On a CPU the shipped profile describes another host; a roof must be this host's.
    measure_once(profile, place.type)
    limits = load_profile(profile, place.type)
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
    if matched is not None:
        operations, note = _add_up_matched(matched), ""
    elif arm == EAGER:
        operations = _add_up_launches(launches)
        note = (
            f"the profiler saw {len(launches)} operations and the ledger lists {sum(op.device_ops for op in ops)}: "
            "so FLOPs and bytes are left out"
        )
    else:
        operations = _add_up_launches(launches)
        note = (
            "fused kernels do not report their FLOPs and bytes; the baseline's arithmetic is given for the whole call"
        )
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
    pairs, start = [], 0
    for op, share in zip(ops, shares, strict=True):
        pairs.append((op, launches[start : start + share]))
        start += share
    return pairs


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
    """Add up by kernel name."""
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
