"""What a problem takes, returns and costs, found by running its file once before a campaign.

Whatever makes a problem unfit to be judged is refused here, with one paragraph: a forward that is not deterministic,
inputs that do not depend on the seed, outputs that are no tensors of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from rooflane.eval.check.outputs import output_fault
from rooflane.eval.check.tamper import digests
from rooflane.eval.check.truth import TRUTH_FLOPS
from rooflane.eval.worker import protocol
from rooflane.eval.worker.clock import Clock, estimate_ns
from rooflane.eval.worker.problem import (
    Given,
    ProblemError,
    blamed,
    build_model,
    cast_floats,
    describe,
    draw_inputs,
    model_dtype,
    seeded,
    take_apart,
    tensor_bytes,
)
from rooflane.eval.worker.problem_workload import ProblemWorkload
from rooflane.shapes import Problem

# Any seeds: what a problem takes and returns depends on none.
WEIGHTS, FIRST, OTHER = 1, 2, 3
CALLS = 7


def describe_problem(problem: Problem, device: torch.device, clock: Clock) -> protocol.Described:
    """Run a problem once; raises `ProblemError` where it cannot be evaluated."""
    model = build_model(problem, device, WEIGHTS)
    inputs = draw_inputs(problem, device, FIRST)
    problem = replace(problem, inputs=tuple(map(describe, inputs)))
    _require_fresh(problem, inputs, draw_inputs(problem, device, OTHER))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = _marks(inputs)
    with torch.inference_mode(), blamed(problem, "Model.forward"):
        out = model(*inputs)
    clock.synchronize()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if _marks(inputs) != before:
        raise ProblemError(f"problem {problem.file}: Model.forward changes its inputs in place; let it work on a copy")
    structure, found = _tensors_of(problem, out, inputs)
    problem = replace(problem, structure=structure, outputs=tuple(map(describe, found)))
    workload = ProblemWorkload(problem, device)
    _require_deterministic(workload, model, inputs, out)
    flops = _count_flops(model, inputs)
    weights = [*model.parameters(), *model.buffers()]
    problem = replace(
        problem,
        dtype=model_dtype(model, inputs),
        flops=flops,
        bytes=tensor_bytes([*inputs, *weights, *found]),
        no_truth=_why_no_truth(model, inputs, found, flops, device),
    )
    with torch.inference_mode():
        call_ns = estimate_ns(model, inputs, clock)
        events, hosts = clock.window(model, [inputs] * CALLS)()
        spans = clock.spans(model, [inputs] * CALLS, max(hosts, default=0))
    return protocol.Described(
        problem=problem,
        call_ns=max(1, min(call_ns, round(median(events)))),
        device_ns=max(1, round(median(spans))) if spans else None,
        peak_bytes=max(peak, problem.bytes),
    )


def _require_fresh(problem: Problem, one: Given, other: Given) -> None:
    """Refuse inputs that are the same for every seed: a stored output could not be told from a computed one."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, Tensor)]
    if not pairs:
        raise ProblemError(f"problem {problem.file}: get_inputs() returns no tensor; Model needs at least one")
    if all(torch.equal(a, b) for a, b in pairs):
        raise ProblemError(
            f"problem {problem.file}: get_inputs() returns the same values for every seed; draw them with torch.rand "
            "and the like, without a seed or generator of your own, so that each timed call gets new ones"
        )


def _tensors_of(problem: Problem, out: object, inputs: Given) -> tuple[str, list[Tensor]]:
    """Return the structure and tensors of the reference's output; refuse what cannot be judged."""
    try:
        structure, found = take_apart(out)
    except TypeError as error:
        raise ProblemError(
            f"problem {problem.file}: {error}; return a tensor, or a list, tuple or dictionary of tensors"
        ) from None
    if not sum(leaf.numel() for leaf in found):
        raise ProblemError(f"problem {problem.file}: the output of Model has no element to compare")
    for leaf in found:
        fault = "a tensor of the output is complex" if leaf.is_complex() else None
        like = torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        for part in (None, *(part for part in inputs if isinstance(part, Tensor))):
            fault = fault or output_fault(leaf, like, part)
        if fault:
            fault = fault.replace("the mask", "an input")
            raise ProblemError(f"problem {problem.file}: {fault}; let Model return a new contiguous tensor")
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            raise ProblemError(
                f"problem {problem.file}: the output of Model is not finite for inputs of get_inputs(); nothing can be "
                "compared with that"
            )
    return structure, found


def _require_deterministic(workload: ProblemWorkload, model: nn.Module, inputs: Given, out: object) -> None:
    """Refuse a forward that gives two outputs for one input, although it is in eval mode."""
    with seeded(OTHER, workload.device), torch.inference_mode():
        again = workload.pack(model(*inputs))
    if not workload.gate(again, workload.pack(out)).passed:
        raise ProblemError(
            f"problem {workload.problem.file}: Model gives different outputs for one input, although it was set to "
            "eval(); take the randomness out of its forward, such as dropout with training=True"
        )


def _count_flops(model: nn.Module, inputs: Given) -> int:
    """Return the FLOPs that torch counts in one call; 0 where it cannot."""
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
        return counter.get_total_flops()
    except Exception:  # a module may hold what the counter cannot trace; its work is then unknown
        return 0


def _why_no_truth(model: nn.Module, inputs: Given, found: Sequence[Tensor], flops: int, device: torch.device) -> str:
    """Return why a module is not compared with its float64 self, "" where it can be."""
    if not any(leaf.is_floating_point() for leaf in found):
        return "its outputs are no floating-point numbers"
    if flops > (most := 10 * TRUTH_FLOPS[device.type]):
        return f"a float64 call of {flops:.2g} FLOPs would take too long here, the limit is {most:.2g}"
    try:
        with torch.inference_mode():
            wide = take_apart(copy.deepcopy(model).double()(*cast_floats(inputs, torch.float64)))[1]
    except Exception as error:  # a module may name a dtype; then it has no float64 form
        return f"the module does not run in float64 ({type(error).__name__})"
    for leaf, own in zip(wide, found, strict=True):
        if own.is_floating_point() and leaf.dtype != torch.float64:
            return f"the module returns {str(leaf.dtype).removeprefix('torch.')} in float64 too"
    return ""


def _marks(inputs: Given) -> list[int]:
    return digests(part for part in inputs if isinstance(part, Tensor))
