"""Shapes whose eager forward does not fit: the candidate against the chunked reference, element by element.

A batch element is one sequence; elements are independent, so the reference runs on one at a time and the time of the
whole batch is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch
from torch import Tensor

from rooflane.baseline import BaselineTransformer, chunked_reference, config_of, generate_random_case, torch_dtype
from rooflane.eval.arms import CHUNKED_REFERENCE, Arm
from rooflane.eval.environment import available_memory_bytes
from rooflane.eval.gate import GateResult, check_gate, merge_gates
from rooflane.eval.records import Timing, Verification
from rooflane.eval.timing import Clock
from rooflane.shapes import Shape

# Scratch of the chunked reference: fewer and larger blocks up to here, and what it can always have.
SCRATCH_BYTES = (128 << 20, 8 << 30)
# Values of one element's width alive beside the scratch: keys, values, two hidden states, temporaries.
ELEMENT_COPIES = 8
# Of a causal element left out of the full comparison, these first rows are still checked: they depend on no later one.
PREFIX_ROWS = 2048
RAGGED_PADDING = 0.3
TIMED_CALLS = 3


@dataclass(frozen=True)
class OversizePlan:
    """How much one process does: whether all elements, within which time, and on which padding."""

    every_element: bool
    reference_budget_s: float
    budget_s: float
    seed: int
    memory_cap_bytes: int | None


def measure_oversize(
    arm: Arm,
    model: BaselineTransformer,
    shape: Shape,
    device: torch.device,
    clock: Clock,
    plan: OversizePlan,
    on_stage: Callable[[str], None],
) -> Arm:
    """Verify and time a built candidate, in place; return the reference's own arm with its time per element.

    The process that does every element uses the shape's own padding; the others check one element of a ragged batch.
    """
    on_stage("verify")
    padding = shape.padding_ratio or (0.0 if plan.every_element else RAGGED_PADDING)
    x, mask = _draw(shape, device, plan.seed, padding)
    # The cap stands for a smaller device and binds the candidate; the reference may use what is really there.
    cap_memory(device, plan.memory_cap_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = perf_counter_ns()
    with torch.inference_mode():
        out = arm.forward(x, mask)
    clock.synchronize()
    arm.setup_s += (perf_counter_ns() - before) / 1e9
    if device.type == "cuda":
        arm.measured_peak_bytes = torch.cuda.max_memory_allocated()
    cap_memory(device, None)
    on_stage("reference")
    gates, times, notes = _compare(out, x, mask, model, shape, clock, plan, on_stage)
    gate = merge_gates(gates)
    reason = "" if gate.passed else f"{gate.failed} of {gate.total} elements fail the gate, worst at {gate.worst_index}"
    arm.verification = Verification(
        status="ok" if gate.passed else "incorrect", reason=gate.reason or reason, trials=1, gate=gate, notes=notes
    )
    arm.status, arm.reason = arm.verification.status, arm.verification.reason
    del out
    reference = Arm(CHUNKED_REFERENCE, "reference")
    reference.timing = Timing(
        clock=clock.name,
        event_ns=[times],
        warmups=0,
        repeats=len(times),
        shrunk=len(times) < shape.batch_size,
        inputs="fresh",
        valid_tokens=int(mask.sum()),
        elements_total=shape.batch_size,
    )
    if arm.status == "ok":
        on_stage("time")
        cap_memory(device, plan.memory_cap_bytes)
        arm.timing = _time(arm, x, mask, shape, clock, plan)
        cap_memory(device, None)
    return reference


def cap_memory(device: torch.device, cap_bytes: int | None) -> None:
    """Let this process allocate no more than `cap_bytes` of the GPU; None lifts the cap. No effect on a CPU."""
    if device.type != "cuda":
        return
    # Cached blocks count against the cap although nothing uses them.
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total) if cap_bytes else 1.0)


def _draw(shape: Shape, device: torch.device, seed: int, padding: float) -> tuple[Tensor, Tensor]:
    """Draw the one input that fits; the usual generator would hold two or three of them for a moment."""
    dtype = torch_dtype(shape.dtype)
    _, mask = generate_random_case(replace(config_of(shape), d_model=1), device, dtype, seed, padding)
    x = torch.empty(shape.batch_size, shape.seq_len, shape.d_model, device=device, dtype=dtype)
    _refill(x, mask, seed)
    return x, mask


def _refill(x: Tensor, mask: Tensor, seed: int) -> None:
    """Write new contents into an input whose size allows no second one, zero at padding."""
    x.normal_(generator=torch.Generator(device=x.device).manual_seed(seed))
    x.masked_fill_(~mask[:, :, None], 0)


def _scratch_bytes(x: Tensor) -> int:
    """Return the scratch the chunked reference may use beside what is allocated now."""
    if x.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
    else:
        free = available_memory_bytes()
    element = ELEMENT_COPIES * x[0].numel() * x.element_size()
    least, most = SCRATCH_BYTES
    return max(least, min(most, (free - element) // 2))


def _compare(
    out: Tensor,
    x: Tensor,
    mask: Tensor,
    model: BaselineTransformer,
    shape: Shape,
    clock: Clock,
    plan: OversizePlan,
    on_stage: Callable[[str], None],
) -> tuple[list[GateResult], list[int], list[str]]:
    """Gate an output against the chunked reference; return results, reference nanoseconds per element, notes."""
    if out.shape != x.shape:
        return [check_gate(out, x)], [], []
    gates: list[GateResult] = []
    times: list[int] = []
    budget_ns = plan.reference_budget_s * 1e9
    scratch = _scratch_bytes(x)
    wanted = list(range(shape.batch_size)) if plan.every_element else [plan.seed % shape.batch_size]
    for element in wanted:
        if times and sum(times) + times[-1] > budget_ns:
            break
        on_stage("reference")
        part = slice(element, element + 1)
        before = perf_counter_ns()
        with torch.inference_mode():
            ref = chunked_reference(model, x[part], mask[part], budget_bytes=scratch)
        clock.synchronize()
        times.append(perf_counter_ns() - before)
        gates.append(check_gate(out[part], ref))
    notes = [f"compared in full: {len(times)} of {shape.batch_size} batch elements"]
    left = wanted[len(times) :]
    if left and shape.causal:
        rows = min(PREFIX_ROWS, shape.seq_len)
        for element in left:
            on_stage("reference")
            with torch.inference_mode():
                ref = chunked_reference(
                    model,
                    x[element : element + 1, :rows],
                    mask[element : element + 1, :rows],
                    budget_bytes=scratch,
                )
            gates.append(check_gate(out[element : element + 1, :rows], ref))
        notes.append(f"the first {rows} rows compared of the other {len(left)}: causal rows depend on no later one")
    return gates, times, notes


def _time(arm: Arm, x: Tensor, mask: Tensor, shape: Shape, clock: Clock, plan: OversizePlan) -> Timing:
    """Time a few calls, new contents written into the one input before each."""
    if not shape.padding_ratio:
        mask.fill_(True)
    events: list[int] = []
    hosts: list[int] = []
    for call in _calls(events, plan.budget_s):
        _refill(x, mask, plan.seed + 1 + call)
        with torch.inference_mode():
            event, host = clock.window(arm.forward, [(x, mask)])
        events += event
        hosts += host
    return Timing(
        clock=clock.name,
        event_ns=[events],
        host_ns=[hosts] if hosts else [],
        warmups=1,
        repeats=len(events),
        shrunk=True,
        inputs="fresh",
        valid_tokens=int(mask.sum()),
    )


def _calls(events: list[int], budget_s: float) -> Iterator[int]:
    """Yield call numbers: two calls at least, so that a spread is seen, then up to the budget."""
    for call in range(TIMED_CALLS):
        if call >= 2 and sum(events) + events[-1] > budget_s * 1e9:
            return
        yield call
