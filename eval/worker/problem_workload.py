"""A problem file as a workload: any module, any tuple of inputs, and outputs nested in lists, tuples and mappings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rooflane.baseline import CONTROLS, PROBES
from rooflane.baseline.controls import Control
from rooflane.eval.check import fingerprint
from rooflane.eval.check.cases import Case
from rooflane.eval.check.gate import ATOL, RTOL, check_gate, merge_gates
from rooflane.eval.check.outputs import output_fault
from rooflane.eval.check.outputs import poison as poison_floats
from rooflane.eval.check.problem_promises import Trial, run_problem_trial
from rooflane.eval.check.truth import PLAIN
from rooflane.eval.record.records import GateResult
from rooflane.eval.worker.candidates import Plan
from rooflane.eval.worker.problem import (
    Given,
    build_model,
    cast_floats,
    construct,
    draw_inputs,
    parse_tensor,
    take_apart,
    tensor_bytes,
)
from rooflane.eval.worker.problem_candidates import (
    BY_SEED,
    Unsupported,
    build_problem_candidate,
    parse_problem_candidate,
    plan_problem_candidate,
)
from rooflane.eval.worker.workload import Forward, Workload
from rooflane.shapes import Problem

if TYPE_CHECKING:
    from rooflane.dispatch import Profile

# Outputs that a fingerprint reads as they are; any others are packed.
READ_AS_THEY_ARE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Packed values are exact in float32 where each dtype has at most 24 bits.
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16)
# A packed output has this many rows; its end is filled with zeros.
PACKED_ROWS = 128
# Integers must be equal.
EXACT = {"atol": 0.5, "rtol": 1e-18}
# On a model: the seed it was built under, for classes that are constructed under the same.
SEED = "_rooflane_seed"


class ProblemWorkload(Workload):
    """One problem on a device."""

    input_names = "an input"

    def __init__(self, problem: Problem, device: torch.device) -> None:
        super().__init__(device)
        self.problem = problem
        self.atol = ATOL if problem.atol is None else problem.atol
        self.rtol = RTOL if problem.rtol is None else problem.rtol
        self.leaves = [parse_tensor(text) for text in problem.outputs]
        self.packed = problem.structure != "*" or self.leaves[0][1] not in READ_AS_THEY_ARE
        dtypes = {dtype for _, dtype in self.leaves}
        if self.packed:
            self.dtype = torch.float32 if dtypes <= set(NARROW) else torch.float64
            count = sum(math.prod(size) for size, _ in self.leaves)
            self.rows, self.size = PACKED_ROWS, torch.Size([-(-count // PACKED_ROWS) * PACKED_ROWS])
        else:
            ((self.size, self.dtype),) = self.leaves
            self.rows = math.prod(self.size)
        # Judged against float64 where the file sets no tolerance of its own and the outputs are half precision.
        own = problem.atol is not None or problem.rtol is not None
        self.half = not own and not problem.no_truth and dtypes <= {torch.float16, torch.bfloat16}
        self.stresses = () if problem.no_truth else (PLAIN,)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the tensors of one call."""
        sizes = (parse_tensor(text) for text in self.problem.inputs if text.endswith("]"))
        return max(1, sum(math.prod(size) * dtype.itemsize for size, dtype in sizes))

    def model(self, seed: int) -> nn.Module:
        """Build the problem's Model; it remembers its seed, for candidates that are constructed under the same."""
        model = build_model(self.problem, self.device, seed)
        setattr(model, SEED, seed)
        return model

    def draw(self, case: Case) -> Given:
        """Return the inputs of a case.

        `swapped` are those of the next seed; of `nudged` inputs each tensor has one element of the next seed's.
        """
        if case.kind == "swapped":
            return draw_inputs(self.problem, self.device, case.seed + 1)
        inputs = draw_inputs(self.problem, self.device, case.seed)
        if case.kind == "nudged":
            generator = torch.Generator().manual_seed(case.seed)
            for part, other in zip(inputs, draw_inputs(self.problem, self.device, case.seed + 1), strict=True):
                if isinstance(part, Tensor) and part.numel():
                    at = int(torch.randint(part.numel(), (1,), generator=generator))
                    part.view(-1)[at] = other.view(-1)[at]
        return inputs

    def timed_case(self, seed: int) -> Case:
        """Return the case of a seed."""
        return Case(seed)

    def clone(self, inputs: Given) -> Given:
        """Return copies of the tensors."""
        return tuple(part.clone() if isinstance(part, Tensor) else part for part in inputs)

    def tokens(self, calls: Sequence[Given]) -> float:
        """Return 0: a module does not say what a token is."""
        return 0.0

    def fault(self, out: object, inputs: Given | None = None) -> str | None:
        """Return where an output differs in structure, or a tensor of it in kind, or lies in an input's memory."""
        try:
            structure, found = take_apart(out)
        except TypeError as error:
            return str(error)
        if structure != self.problem.structure:
            return f"the output is {structure}, the reference's is {self.problem.structure} (* is a tensor)"
        tensors = [(number, part) for number, part in enumerate(inputs or ()) if isinstance(part, Tensor)]
        for index, (leaf, (size, dtype)) in enumerate(zip(found, self.leaves, strict=True)):
            name = "the output" if len(found) == 1 else f"tensor {index + 1} of the output"
            # One element behind every index: the size without the memory.
            like = torch.empty((), dtype=dtype, device=self.place).expand(size)
            if fault := output_fault(leaf, like):
                return fault.replace("the output", name, 1)
            for number, part in tensors:
                if output_fault(leaf, like, part):
                    return f"{name} lies in the memory of input {number + 1}"
        return None

    def place_of(self, out: Any) -> tuple[int, ...]:
        """Return the addresses of an output's tensors."""
        return tuple(leaf.data_ptr() for leaf in take_apart(out)[1] if leaf.numel())

    def aliased(self, places: Sequence[Any], calls: Sequence[Given]) -> str:
        """Return whether a tensor of an output lies in the memory of an input of its call."""
        sizes = [math.prod(size) * dtype.itemsize for size, dtype in self.leaves if math.prod(size)]
        for place, inputs in zip(places, calls, strict=True):
            starts = place if isinstance(place, tuple) else (place,)
            for number, part in enumerate(inputs):
                if not isinstance(part, Tensor):
                    continue
                first, last = part.data_ptr(), part.data_ptr() + tensor_bytes([part])
                if any(start < last and first < start + size for start, size in zip(starts, sizes, strict=True)):
                    return f"the output lies in the memory of input {number + 1}"
        return ""

    def poison(self, inputs: Given, **options: int) -> None:
        """Fill blocks of each output tensor's size with NaN, of integers with the largest."""
        for size, dtype in self.leaves:
            like = torch.empty((), dtype=dtype, device=self.place).expand(size)
            if dtype.is_floating_point:
                poison_floats(like, **options)
            elif dtype != torch.bool and not dtype.is_complex:
                torch.empty(size, dtype=dtype, device=self.place).fill_(torch.iinfo(dtype).max)

    def pack(self, out: Any) -> Tensor:
        """Return the one tensor, or all of them flat behind each other."""
        if not self.packed:
            return out
        try:
            structure, found = take_apart(out)
        except TypeError:
            structure, found = "", []
        if structure != self.problem.structure or [leaf.shape for leaf in found] != [size for size, _ in self.leaves]:
            # Of another size: whoever reads it looks for the fault.
            return torch.empty(0, dtype=self.dtype, device=self.place)
        flat = [leaf.reshape(-1).to(self.dtype) for leaf in found]
        rest = self.size[0] - sum(leaf.numel() for leaf in flat)
        return torch.cat([*flat, torch.zeros(rest, dtype=self.dtype, device=self.place)])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the tensors of an output that was packed."""
        if not self.packed:
            return [packed]
        parts, start = [], 0
        for size, _ in self.leaves:
            parts.append(packed[start : start + math.prod(size)].view(size))
            start += math.prod(size)
        return parts

    def mark_limits(self, ref: Tensor) -> Tensor:
        """Return how far each row of a fingerprint may lie from the reference's, from the problem's own tolerance."""
        return fingerprint.limits(ref, self.rows, self.atol, self.rtol)

    def gate(self, out: Tensor, ref: Tensor, *, spread: bool = False) -> GateResult:
        """Compare every tensor of an output with the reference's; integers must be equal."""
        return self._gate(out, ref, spread=spread, integers=True)

    def truth_gate(self, out: Tensor, ref: Tensor, *, spread: bool = False) -> GateResult:
        """Compare the floating-point tensors with float64's: an index may be another where two values are close."""
        return self._gate(out, ref, spread=spread, integers=False)

    def _gate(self, out: Tensor, ref: Tensor, *, spread: bool, integers: bool) -> GateResult:
        results = []
        for mine, own, (_, dtype) in zip(self.unpack(out), self.unpack(ref), self.leaves, strict=True):
            if not own.numel() or not (integers or dtype.is_floating_point):
                continue
            tolerance = {"atol": self.atol, "rtol": self.rtol} if dtype.is_floating_point else EXACT
            results.append(check_gate(mine, own, spread=spread, **tolerance))
        return results[0] if len(results) == 1 else merge_gates(results)

    def trial(
        self, promise: str, arm: Any, case: Case, template: nn.Module, second: Callable[[], Any]
    ) -> tuple[Any, Given]:
        """Run one of the promises to the caller."""

        def draw(kind: str = "drawn", further: int = 0) -> Given:
            return self.draw(replace(case, kind=kind, seed=case.seed + further))

        return run_problem_trial(promise, Trial(arm, draw, self.device, template, second, self.pack))

    def truth(self, model: nn.Module) -> ProblemTruth:
        """Return the model's float64 forward."""
        return ProblemTruth(self, model)

    def control(self, name: str) -> Control:
        """Return the control or probe of a name; the empty call returns outputs of the problem's kind."""
        if name == "noop":
            return replace(PROBES[name], build=self._noop)
        return CONTROLS.get(name) or PROBES[name]

    def _noop(self, model: nn.Module, *given: Any) -> Forward:
        with torch.inference_mode():
            held = model(*self.draw(Case(0)))
        return lambda *inputs: held

    def plan(self, candidate: str, profile: Profile, rules: Any) -> Plan:
        """Return why a candidate cannot be built, if it cannot."""
        return plan_problem_candidate(parse_problem_candidate(candidate), self.problem)

    @property
    def shares_weights(self) -> bool:
        """Whether the candidate built last takes the reference's weights by name."""
        return self.note != BY_SEED

    def build(self, candidate: str, plan: Plan, model: nn.Module, *, again: bool = False) -> tuple[Forward, nn.Module]:
        """Build a candidate on a model; `note` then says how its weights were matched."""
        seed = getattr(model, SEED)

        def make(kind: Any) -> nn.Module:
            return construct(self.problem, kind, seed, self.device).to(self.device).eval().requires_grad_(False)

        forward, weights, self.note = build_problem_candidate(
            parse_problem_candidate(candidate), self.problem, model, self.draw(Case(0)), make, again=again
        )
        if again and self.note == BY_SEED:
            raise Unsupported("its weights were matched by a seed, so that it cannot be built with other weights")
        return forward, weights


class ProblemTruth:
    """A model's float64 forward; all of an output is compared."""

    rows = slice(None)
    label = "all elements"

    def __init__(self, workload: ProblemWorkload, model: nn.Module) -> None:
        self.workload = workload
        self.model = copy.deepcopy(model).double()  # a stress changes its weights beside the candidate's

    def __call__(self, *inputs: Any) -> Tensor:
        """Return the float64 output, packed like any other."""
        _, found = take_apart(self.model(*cast_floats(inputs, torch.float64)))
        if not self.workload.packed:
            return found[0]
        flat = [leaf.reshape(-1).double() for leaf in found]
        rest = self.workload.size[0] - sum(leaf.numel() for leaf in flat)
        return torch.cat([*flat, flat[0].new_zeros(rest)])
