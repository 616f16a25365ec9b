"""Workloads: what a worker must know of the thing it evaluates, behind one interface.

Worker, judge and windows handle a model, tuples of inputs and outputs. How they are made, and what an output must be,
is the workload's alone: `TransformerWorkload` is the published shape; a problem file has one of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rooflane.baseline import CONTROLS, PROBES, build_baseline, torch_dtype
from rooflane.baseline.controls import Control
from rooflane.eval.check import fingerprint
from rooflane.eval.check.cases import Case, draw_case
from rooflane.eval.check.gate import ATOL, RTOL, check_gate
from rooflane.eval.check.outputs import output_fault, poison
from rooflane.eval.check.promises import Inputs, run_trial
from rooflane.eval.check.stresses import Stress
from rooflane.eval.check.truth import STRESSES, Truth
from rooflane.eval.record.records import GateResult
from rooflane.eval.worker.candidates import Plan, build_candidate, parse_candidate, plan_candidate
from rooflane.shapes import Problem, Shape

if TYPE_CHECKING:
    from rooflane.dispatch import Profile

# Bound here, before any candidate is imported.
_detach = torch.Tensor.detach

Forward = Callable[..., Any]
# The inputs of one call.
Given = tuple[Any, ...]


class Workload(ABC):
    """What is evaluated on a device: its model, its inputs, and what an output must be.

    A judge reads one tensor a call. `size` and `dtype` are that tensor's; `pack` makes it of an output, and `packed`
    says whether that is work. `rows` divides its elements: a fingerprint has a number for each of at most 128 rows.
    """

    size: torch.Size
    dtype: torch.dtype
    rows: int
    packed = False
    input_names = "its inputs"
    # How the candidate that was built last got its weights, where that is worth a note.
    note = ""
    atol, rtol = ATOL, RTOL
    # Whether outputs are half precision, and both sides are judged against float64.
    half = False
    stresses: tuple[Stress, ...] = ()
    # Whether a candidate takes the reference's weights by name.
    shares_weights = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # With the index that tensors carry.
        self.place = torch.empty(0, device=device).device

    @property
    def output_bytes(self) -> int:
        """Bytes of one packed output."""
        return math.prod(self.size) * self.dtype.itemsize

    @property
    @abstractmethod
    def input_bytes(self) -> int:
        """Bytes of the inputs of one call."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Build the reference on the device, its weights drawn from a seed."""

    @abstractmethod
    def draw(self, case: Case) -> Given:
        """Return the inputs of a case: ordinary tensors, never inference ones."""

    @abstractmethod
    def timed_case(self, seed: int) -> Case:
        """Return the case of a timed call."""

    @abstractmethod
    def clone(self, inputs: Given) -> Given:
        """Return inputs of the same contents at another address."""

    @abstractmethod
    def tokens(self, calls: Sequence[Given]) -> float:
        """Return the mean number of valid tokens of calls; 0 where there are no tokens."""

    @abstractmethod
    def fault(self, out: object, inputs: Given | None = None) -> str | None:
        """Return why an output is not what the reference returns, in memory of its own; None if it is."""

    @abstractmethod
    def aliased(self, places: Sequence[Any], calls: Sequence[Given]) -> str:
        """Return whether the output of a call, known by its `place_of`, lies in its inputs' memory; "" if none does."""

    @abstractmethod
    def poison(self, inputs: Given, **options: int) -> None:
        """Fill memory that the next output may reuse with values no output has."""

    @abstractmethod
    def trial(
        self, promise: str, arm: Any, case: Case, template: nn.Module, second: Callable[[], Any]
    ) -> tuple[Any, Given]:
        """Call an arm as a promise allows; return the output and the inputs it must match.

        `template` is the reference; `second` returns an arm that was built a second time, with other weights.
        """

    @abstractmethod
    def truth(self, model: nn.Module) -> Truth:
        """Return a model's float64 forward."""

    @abstractmethod
    def control(self, name: str) -> Control:
        """Return the control or probe of a name."""

    @abstractmethod
    def plan(self, candidate: str, profile: Profile, rules: Any) -> Plan:
        """Return what a candidate comes to."""

    @abstractmethod
    def build(self, candidate: str, plan: Plan, model: nn.Module, *, again: bool = False) -> tuple[Forward, nn.Module]:
        """Build a candidate on a model; return its forward and the module that holds its weights.

        `again` says that its file was imported before, and that the second build must find the same module.
        """

    def pack(self, out: Any) -> Tensor:
        """Return an output as the one tensor that the judge reads, without attributes that were put on it."""
        return _detach(out)

    def place_of(self, out: Any) -> Any:
        """Return where an output lies: a number or a tuple of numbers."""
        return out.data_ptr()

    def fingerprinter(self, seed: int, slots: int) -> fingerprint.Fingerprinter:
        """Return what takes fingerprints of packed outputs."""
        return fingerprint.Fingerprinter(math.prod(self.size), self.rows, self.dtype, self.place, seed, slots)

    def mark_limits(self, ref: Tensor) -> Tensor:
        """Return for each row how far a fingerprint may lie from that of the reference's packed output."""
        return fingerprint.limits(ref, self.rows)

    def gate(self, out: Tensor, ref: Tensor, *, spread: bool = False) -> GateResult:
        """Compare a packed output with the reference's."""
        return check_gate(out, ref, self.atol, self.rtol, spread=spread)

    def truth_gate(self, out: Tensor, ref: Tensor, *, spread: bool = False) -> GateResult:
        """Compare a packed output with float64's."""
        return self.gate(out, ref, spread=spread)


class TransformerWorkload(Workload):
    """The published transformer: x `[B, S, D]` and a mask `[B, S]` in, `[B, S, D]` out."""

    input_names = "its input x or its mask"

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(device)
        self.shape = shape
        self.size = torch.Size((shape.batch_size, shape.seq_len, shape.d_model))
        self.dtype = torch_dtype(shape.dtype)
        self.rows = shape.tokens
        self.half = shape.dtype != "float32"

    @property
    def stresses(self) -> tuple[Stress, ...]:
        """Return the stress inputs that a model of the shape's dtype can compute."""
        return tuple(stress for stress in STRESSES if stress.suits(self.shape.dtype))

    @property
    def input_bytes(self) -> int:
        """Bytes of x; the mask's are few beside them."""
        return self.output_bytes

    def model(self, seed: int) -> nn.Module:
        """Build the reference stack."""
        return build_baseline(self.shape, self.device, seed)

    def draw(self, case: Case) -> Given:
        """Return x and mask of a case."""
        return draw_case(case, self.shape, self.device)

    def timed_case(self, seed: int) -> Case:
        """Return a draw with the shape's own padding."""
        return Case(seed, self.shape.padding_ratio)

    def clone(self, inputs: Given) -> Given:
        """Return x at another address; the mask is shared."""
        x, mask = inputs
        return x.clone(), mask

    def tokens(self, calls: Sequence[Given]) -> float:
        """Return the mean number of tokens that are not padding."""
        if not self.shape.padding_ratio:
            return self.shape.tokens
        return float(torch.stack([mask for _, mask in calls]).sum()) / len(calls)

    def fault(self, out: object, inputs: Given | None = None) -> str | None:
        """Return why an output is no plain tensor like x in memory of its own."""
        like = torch.empty(self.size, dtype=self.dtype, device=self.place) if inputs is None else inputs[0]
        return output_fault(out, like, inputs[1] if inputs else None)

    def aliased(self, places: Sequence[int], calls: Sequence[Given]) -> str:
        """Return whether an output lies in the memory of its x."""
        close = any(abs(place - x.data_ptr()) < self.output_bytes for place, (x, _) in zip(places, calls, strict=True))
        return "the output lies in the memory of the input x" if close else ""

    def poison(self, inputs: Given, **options: int) -> None:
        """Fill blocks of x's size with NaN."""
        poison(inputs[0], **options)

    def trial(
        self, promise: str, arm: Any, case: Case, template: nn.Module, second: Callable[[], Any]
    ) -> tuple[Any, Given]:
        """Run one of the promises to the caller."""
        inputs = Inputs(self.shape, self.device, case.seed, case.padding, template, second)
        out, *given = run_trial(promise, arm, inputs)
        return out, tuple(given)

    def truth(self, model: nn.Module) -> Truth:
        """Return the float64 forward on as many rows as are affordable."""
        return Truth(model, self.shape, self.device)

    def control(self, name: str) -> Control:
        """Return the control or probe of a name."""
        return CONTROLS.get(name) or PROBES[name]

    def plan(self, candidate: str, profile: Profile, rules: Any) -> Plan:
        """Return a candidate's family, rule and options."""
        return plan_candidate(parse_candidate(candidate), self.shape, profile, rules)

    def build(self, candidate: str, plan: Plan, model: nn.Module, *, again: bool = False) -> tuple[Forward, nn.Module]:
        """Build a family or the user's file."""
        return build_candidate(parse_candidate(candidate), plan, model, self.shape, self.device, again=again)


def workload_of(request: Shape | Problem, device: torch.device) -> Workload:
    """Return the workload of a shape or problem."""
    if isinstance(request, Shape):
        return TransformerWorkload(request, device)
    from rooflane.eval.worker.problem_workload import ProblemWorkload

    return ProblemWorkload(request, device)
