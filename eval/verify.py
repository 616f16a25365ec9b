"""Verification: is an arm's output right, on accuracy trials, ragged masks, stress inputs and the caller's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

import torch
from torch import Tensor, nn

from rooflane.baseline import BaselineTransformer, config_of, generate_random_case, torch_dtype
from rooflane.eval.gate import GateResult, check_gate, merge_gates
from rooflane.eval.records import Verification
from rooflane.eval.truth import (
    HALF_FACTOR,
    RAGGED_PADDING,
    STRESSES,
    Truth,
    judge,
    mask_cases,
    missing_parameter,
    run_stress,
)
from rooflane.shapes import Shape

Forward = Callable[[Tensor, Tensor | None], Tensor]
Level = Literal["full", "trials"]

# Freed NaN blocks the next allocation of the output's size may land on.
POISON_BLOCKS = 4
POISON_BYTES = 4 << 30


class WrongOutput(Exception):
    """An output that fails a check other than the gate; the text is the one-line reason."""


@dataclass
class _Bench:
    """What every check of one arm shares."""

    forward: Forward
    weights: nn.Module
    reference: BaselineTransformer
    shape: Shape
    device: torch.device
    seed: int
    deadline: float
    truth: Truth | None = None
    notes: list[str] = field(default_factory=list)

    def draw(self, offset: int, padding: float) -> tuple[Tensor, Tensor]:
        """Return the input and mask of a running number."""
        dtype = torch_dtype(self.shape.dtype)
        return generate_random_case(config_of(self.shape), self.device, dtype, self.seed + offset, padding)

    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Call the candidate on poisoned memory and check what it returned besides the values."""
        kept = x.clone(), None if mask is None else mask.clone()
        poison(x)  # last, or the copies above would take the poisoned blocks
        out = self.forward(x, mask)
        _check_kind(out, x)
        if not torch.equal(x, kept[0]) or (mask is not None and not torch.equal(mask, kept[1])):
            raise WrongOutput("the call changed its input x or its mask")
        return out

    def gate(self, x: Tensor, mask: Tensor | None, *, candidate_first: bool) -> GateResult:
        """Compare one call with the reference."""
        if candidate_first:
            out = self.run(x, mask)
            return self.compare(out, self.reference(x, mask), x, mask)
        ref = self.reference(x, mask)
        return self.compare(self.run(x, mask), ref, x, mask)

    def compare(self, out: Tensor, ref: Tensor, x: Tensor, mask: Tensor | None) -> GateResult:
        """Gate an output; for half precision, where eager itself fails the gate, judge both sides against fp64."""
        if self.truth is None:
            return check_gate(out, ref)
        rows = self.truth.rows
        whole = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        check = judge("", out[rows], ref[rows], self.truth(x, whole), HALF_FACTOR, self.truth.label)
        finite = bool(torch.isfinite(out).all())
        # Stated in the units of the limit that holds here, so that above 1 fails for every dtype.
        use = min(check.gate.use, check.gate.max_abs / (HALF_FACTOR * check.eager_max_abs or 1e-300))
        passed = check.passed and finite
        failed = 0 if passed else max(1, check.gate.failed)
        use = use if finite else float("inf")
        return check.gate.model_copy(update={"passed": passed, "failed": failed, "use": use})

    def late(self, what: str) -> bool:
        """Tell whether the time for checks is spent, and note what is left out."""
        if monotonic() < self.deadline:
            return False
        self.notes.append(f"{what} not run: the time budget was spent")
        return True


def verify(
    forward: Forward,
    weights: nn.Module,
    reference: BaselineTransformer,
    shape: Shape,
    device: torch.device,
    *,
    seed: int,
    trials: int = 5,
    level: Level = "full",
    deadline: float = float("inf"),
) -> Verification:
    """Check one arm and return what was found; nothing the arm does raises.

    `weights` is the module the forward was built on, `reference` a separately built eager baseline with the same
    weights. Level "trials" runs the accuracy trials alone; "full" adds ragged masks, stress inputs and the promises
    to the caller. Checks that would start after `deadline` (`time.monotonic()`) are left out and noted; the first
    accuracy trial always runs.
    """
    bench = _Bench(forward, weights, reference, shape, device, seed, deadline)
    found: dict[str, object] = {}
    try:
        # Not in inference mode: inputs made here are ordinary tensors, as in timing, and weights may change.
        before = {name: tensor.detach().clone() for name, tensor in weights.state_dict().items()}
        if shape.dtype != "float32":
            bench.truth = Truth(reference, shape, device)
        _trials(bench, trials, found)
        if level == "full":
            _ragged(bench, found)
            _stress(bench, found)
            _contract(bench, found)
        if any(not torch.equal(tensor, before[name]) for name, tensor in weights.state_dict().items()):
            raise WrongOutput("the weights differ from those before the first call")
    except WrongOutput as error:
        found |= {"status": "incorrect", "reason": str(error)}
    except Exception as error:  # whatever a candidate raises is a result, not our failure
        found |= {"status": "oom" if is_oom(error) else "error", "reason": f"{type(error).__name__}: {one_line(error)}"}
    found.setdefault("status", "ok")
    return Verification(notes=bench.notes, **found)


def poison(like: Tensor) -> None:
    """Fill memory the next allocation of that size may reuse with NaN, so that unwritten elements show."""
    blocks = max(1, min(POISON_BLOCKS, POISON_BYTES // max(1, like.numel() * like.element_size())))
    for block in [torch.empty_like(like) for _ in range(blocks)]:
        block.fill_(float("nan"))


def is_oom(error: Exception) -> bool:
    """Tell whether an exception says that memory ran out; the CPU allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def one_line(error: Exception, limit: int = 300) -> str:
    """Return an exception's text on one line."""
    return " ".join(str(error).split())[:limit] or "no message"


def _check_kind(out: object, x: Tensor) -> None:
    """Raise unless the output is a plain tensor of the input's shape, dtype and device, in memory of its own."""
    # Exact type: a subclass may compute its values when they are looked at, outside the timed window.
    if type(out) is not torch.Tensor:
        raise WrongOutput(f"the output is a {type(out).__name__}, not a torch.Tensor")
    for name in ("shape", "dtype", "device"):
        got, wanted = getattr(out, name), getattr(x, name)
        if got != wanted:
            shown = (tuple(got), tuple(wanted)) if name == "shape" else (got, wanted)
            raise WrongOutput(f"the output has {name} {shown[0]}, expected {shown[1]}")
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        raise WrongOutput("the output lies in the memory of the input x")


def _require(gate: GateResult, what: str) -> None:
    """Raise when a gate failed, with the figures that say how."""
    if gate.passed:
        return
    if gate.max_abs == float("inf"):
        why = f"not finite at {gate.worst_index}"
    else:
        why = f"worst at {gate.worst_index}: {gate.out_at_worst:.6g} for {gate.ref_at_worst:.6g}"
    raise WrongOutput(f"{what}: {gate.failed} of {gate.total} elements fail the gate, {why}")


def _trials(bench: _Bench, trials: int, found: dict[str, object]) -> None:
    """Run the accuracy trials; the candidate goes first on every other one, so memory cannot hold the answer."""
    gates = []
    for trial in range(trials):
        if trial and bench.late(f"accuracy trials after number {trial}"):
            break
        x, mask = bench.draw(trial, bench.shape.padding_ratio)
        with torch.inference_mode():
            gates.append(bench.gate(x, mask, candidate_first=trial % 2 == 0))
        found |= {"gate": merge_gates(gates), "trials": len(gates)}
    failing = [str(index + 1) for index, gate in enumerate(gates) if not gate.passed]
    _require(found["gate"], f"accuracy trial {', '.join(failing)}")


def _ragged(bench: _Bench, found: dict[str, object]) -> None:
    """Check ragged padding, a full and a one-token sequence, masks with holes, and no mask at all."""
    ragged: dict[str, GateResult] = {}
    found["ragged"] = ragged
    _, mask = bench.draw(100, RAGGED_PADDING)
    full, _ = bench.draw(100, 0.0)
    cases = mask_cases(full, mask, bench.seed + 101)
    for name, (x, mask) in cases.items():
        if bench.late(f"mask check {name!r}"):
            return
        with torch.inference_mode():
            ragged[name] = bench.gate(x, mask, candidate_first=True)
        _require(ragged[name], f"mask check {name!r}")


def _stress(bench: _Bench, found: dict[str, object]) -> None:
    """Judge a plain input and the stress inputs, then one plain trial: weights are back, and that must be seen."""
    checks = []
    found["truth"] = checks
    truth = bench.truth or Truth(bench.reference, bench.shape, bench.device)
    for index, stress in enumerate(STRESSES):
        if bench.late(f"stress input {stress.name!r}"):
            return
        if part := missing_parameter(bench.weights, stress):
            bench.notes.append(f"stress input {stress.name!r} not run: the candidate has no parameter named {part}")
            continue
        check = run_stress(
            stress,
            bench.forward,
            bench.weights,
            bench.reference,
            truth,
            bench.shape,
            bench.device,
            bench.seed + 200 + index,
        )
        checks.append(check)
        if not check.passed:
            raise WrongOutput(
                f"stress input {stress.name!r}: the worst error against fp64 is {check.gate.max_abs:.3g}, "
                f"eager's own {check.eager_max_abs:.3g}; {check.gate.failed} elements fail the gate"
            )
    x, mask = bench.draw(300, bench.shape.padding_ratio)
    with torch.inference_mode():
        _require(bench.gate(x, mask, candidate_first=True), "after weights were changed in place and put back")


def _contract(bench: _Bench, found: dict[str, object]) -> None:
    """Look for the promises to the caller that honest code tends to break; a broken one is a finding, not a failure."""
    findings: list[str] = []
    found["contract"] = findings
    if bench.late("checks of the promises to the caller"):
        return
    x, mask = bench.draw(400, bench.shape.padding_ratio)
    # Drawn unpadded: zero rows that x's mask calls valid would make TF32 eager itself stray past the gate.
    other, _ = bench.draw(401, 0.0)
    ragged = mask.clone()
    ragged[:, (mask.shape[1] + 1) // 2 :] = False

    def holds(finding: str, check: Callable[[], bool]) -> None:
        try:
            with torch.inference_mode():
                kept = check()
        except RuntimeError as error:
            if is_oom(error):
                raise
            kept = False  # CUDA graph trees refuse to read an output that a later call overwrote
        if not kept:
            findings.append(finding)

    def kept_output() -> bool:
        first = bench.forward(x, mask)
        copy = first.clone()
        bench.forward(other, mask)
        return torch.equal(first, copy)

    def updated_input() -> bool:
        bench.forward(x, mask)
        x.copy_(other)
        return bench.compare(bench.forward(x, mask), bench.reference(x, mask), x, mask).passed

    def changed_mask() -> bool:
        bench.forward(x, mask)
        mask.copy_(ragged)
        return bench.compare(bench.forward(x, mask), bench.reference(x, mask), x, mask).passed

    holds("the next call overwrites the output", kept_output)
    holds("an input updated in place is not seen", updated_input)
    holds("a mask changed in place is not seen", changed_mask)
