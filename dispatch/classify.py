"""The classifier: what limits the eager forward of a shape on a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rooflane.dispatch.ledger import Op, ledger, peak_bytes
from rooflane.dispatch.profile import Profile, duration, size
from rooflane.shapes import Shape

REGIMES = ("infeasible", "launch", "bandwidth", "compute")
BORDERLINE_MARGIN = 1.3  # host costs drift by about this much within a minute on one machine


@dataclass(frozen=True)
class Classification:
    """The regime of a shape on a device, with its evidence. Times in seconds, sizes in bytes.

    `margin` is how much one side would have to change for another regime: the peak over the memory when infeasible;
    launch over device time when launch-bound; otherwise the smaller of device over launch time and of the heavier
    over the lighter of `compute_s` and `bandwidth_s`. `attention_share` is the share of `device_s` held by the ops
    one fused attention replaces, from q k^T to probabilities times v. `predicted_s` is what an eager forward should
    take: on a GPU the larger of launch and device time, since the host runs ahead; on a CPU their sum.
    """

    shape: Shape
    profile: str
    regime: str
    margin: float
    device_ops: int
    flops: int
    bytes: int
    launch_s: float
    device_s: float
    bandwidth_s: float
    compute_s: float
    predicted_s: float
    attention_share: float
    peak_bytes: int
    memory_bytes: int

    @property
    def borderline(self) -> bool:
        """Whether the margin is too small to bet on."""
        return self.margin < BORDERLINE_MARGIN

    @property
    def breakeven_dispatch_s(self) -> float:
        """The cost of one eager operation at which launch time equals device time."""
        return self.device_s / self.device_ops

    @property
    def launch_ratio(self) -> float:
        """Launch time over device time; above 1 the host is the limit."""
        return self.launch_s / self.device_s

    @property
    def compute_share(self) -> float:
        """Share of the device time held by ops that arithmetic limits."""
        return self.compute_s / self.device_s

    def as_dict(self) -> dict[str, Any]:
        """Return every field and derived figure as plain values, for JSON."""
        derived = ("borderline", "breakeven_dispatch_s", "launch_ratio", "compute_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def explain(self) -> str:
        """Return the evidence in readable lines."""
        edge = " (borderline)" if self.borderline else ""
        return "\n".join(
            (
                f"shape {self.shape.id} ({self.shape.label()}) on {self.profile}: {self.regime}, "
                f"margin {self.margin:.2f}{edge}",
                f"  launch    {self.device_ops} operations take the host {duration(self.launch_s)}",
                f"  device    {duration(self.device_s)}, of which {duration(self.compute_s)} in ops that arithmetic "
                f"limits and {duration(self.bandwidth_s)} in ops that memory limits",
                f"  breakeven at {duration(self.breakeven_dispatch_s)} an operation",
                f"  attention holds {self.attention_share:.0%} of the device time",
                f"  memory    {size(self.peak_bytes)} at the peak, of {size(self.memory_bytes)}",
                f"  eager     {duration(self.predicted_s)} predicted",
            )
        )


def op_time(op: Op, dtype: str, profile: Profile) -> tuple[float, str]:
    """Return the op's device time in seconds and its limit, "compute" or "bandwidth".

    The larger of FLOPs / matmul rate, special functions / special rate, and bytes / copy rate.
    """
    compute = max(op.flops / profile.matmul_flops(dtype), op.special / profile.special_per_s)
    bandwidth = op.bytes / profile.copy_bytes_per_s
    return (compute, "compute") if compute > bandwidth else (bandwidth, "bandwidth")


def classify(shape: Shape, profile: Profile) -> Classification:
    """Predict what limits the eager forward, given a mask as the benchmark always gives one.

    Infeasible when the peak bytes do not fit the memory; else launch when operations x eager dispatch exceeds the
    sum of the ops' device times; else compute or bandwidth, whichever ops hold more of that time.
    """
    book = ledger(shape)
    totals = {"compute": 0.0, "bandwidth": 0.0}
    attention = 0.0
    for op in book.ops:
        seconds, limit = op_time(op, shape.dtype, profile)
        totals[limit] += seconds
        if op.part == "attention":
            attention += seconds
    device = sum(totals.values())
    launch = book.device_ops * profile.eager_dispatch_s
    peak = peak_bytes(shape)

    heavier, lighter = sorted(totals, key=totals.get, reverse=True)
    if peak > profile.memory_bytes:
        regime, margin = "infeasible", peak / profile.memory_bytes
    elif launch > device:
        regime, margin = "launch", launch / device
    else:
        regime, margin = heavier, device / launch
        if totals[lighter]:
            margin = min(margin, totals[heavier] / totals[lighter])
    return Classification(
        shape=shape,
        profile=profile.name,
        regime=regime,
        margin=margin,
        device_ops=book.device_ops,
        flops=book.flops,
        bytes=book.bytes,
        launch_s=launch,
        device_s=device,
        bandwidth_s=totals["bandwidth"],
        compute_s=totals["compute"],
        predicted_s=max(launch, device) if profile.kind == "cuda" else launch + device,
        attention_share=attention / device,
        peak_bytes=peak,
        memory_bytes=profile.memory_bytes,
    )
