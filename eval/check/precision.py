"""The precision ladder: what narrow operands of the matrix products cost in error on a shape.

Each format rounds the operands of some products of the float32 forward; the rest of the forward stays in float32.
The output is compared with eager's by the gate, and with float64 by the norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import Tensor

from rooflane.baseline import build_baseline
from rooflane.eval.check.audit import CONFIG, check_size
from rooflane.eval.check.formats import FORMATS, TF32, Format, RoundedOperands
from rooflane.eval.check.gate import check_gate, merge_gates
from rooflane.eval.check.truth import PLAIN, draw_stress
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import GateResult
from rooflane.families.ladder.launch import normwise_error
from rooflane.shapes import Shape

# Sequences do not see each other; eight of the smallest published shape still hold 8192 elements.
SEQUENCES = 8
EAGER, SIX, ATTENTION = "eager", "q k v out ffn", "attention"
CASES: tuple[tuple[str, Format], ...] = (
    *((SIX, one) for one in FORMATS),
    *((ATTENTION, one) for one in FORMATS if one.attention),
)


class Cost(BaseModel):
    """What a format of some products costs on a shape: the worst of the seeds, and the failing share of all."""

    model_config = CONFIG

    shape: str
    products: str
    format: str
    use: float
    failing: float
    error: float
    passed: bool


class Precision(BaseModel):
    """The costs of every format on every shape; shapes that differ in their batch alone are one."""

    model_config = CONFIG

    shapes: dict[str, str]
    left_out: dict[str, str]
    seeds: int
    tf32: bool
    costs: tuple[Cost, ...]


def measure_precision(
    shapes: Sequence[Shape], *, seeds: int = 1, tf32: bool = False,
    on_stage: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Precision:  # fmt: skip
    """Return what each format costs on each shape, on the CPU with eight sequences a shape.

    `tf32` rounds eager's own products to TF32, as a GPU does. A shape whose scores do not fit, or whose dtype is not
    float32, is left out with the reason. `on_stage(done, total, text)` is called after each forward. Raises
    `EvaluationError` when no shape is left, or for a count of seeds below 1.
    """
    if seeds < 1:
        raise EvaluationError(f"seeds must be a whole number above 0; got {seeds}")
    groups: dict[Shape, list[str]] = {}
    left_out: dict[str, str] = {}
    for shape in shapes:
        cut = replace(shape, batch_size=SEQUENCES)
        if reason := _obstacle(cut):
            left_out[shape.id] = reason
        else:
            groups.setdefault(replace(cut, id=""), []).append(shape.id)
    if not groups:
        raise EvaluationError("; ".join(left_out.values()) or "give at least one shape")
    named = [replace(shape, id=", ".join(ids)) for shape, ids in groups.items()]
    total, done = len(named) * seeds * (1 + len(CASES)), 0
    found: dict[tuple[str, str, str], list[tuple[GateResult, float]]] = {}
    for shape in named:
        for seed in range(1, 1 + seeds):
            for products, name, gate, error in _forwards(shape, seed, TF32 if tf32 else None):
                on_stage(done, total, f"shape {shape.id}: {name}, {products}")
                done += 1
                found.setdefault((shape.id, products, name), []).append((gate, error))
    return Precision(
        shapes={shape.id: shape.label() for shape in named},
        left_out=left_out,
        seeds=seeds,
        tf32=tf32,
        costs=tuple(_cost(key, results) for key, results in found.items()),
    )


def _obstacle(shape: Shape) -> str:
    """Return why a shape is left out, "" when it is measured."""
    if shape.dtype != "float32":
        return f"shape {shape.id}: its dtype is {shape.dtype}, and the formats are compared on float32 models"
    try:
        check_size(shape)
    except EvaluationError as error:
        return str(error)
    return ""


def _forwards(shape: Shape, seed: int, eager: Format | None) -> Iterator[tuple[str, str, GateResult, float]]:
    """Yield products, format, the gate's result and the error against float64: eager's first, then each case."""
    model = build_baseline(shape, "cpu", seed)
    x, mask = draw_stress(PLAIN, shape, torch.device("cpu"), 1000 * seed)

    def forward(linear: Format | None, attention: Format | None) -> Tensor:
        with torch.no_grad(), RoundedOperands(linear, attention):
            return model(x, mask)

    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double(), mask)
    reference = forward(eager, eager)
    yield EAGER, eager.name if eager else "float32", check_gate(reference, reference), normwise_error(reference, truth)
    for products, one in CASES:
        out = forward(one, None) if products == SIX else forward(None, one)
        yield products, one.name, check_gate(out, reference), normwise_error(out, truth)


def _cost(key: tuple[str, str, str], results: list[tuple[GateResult, float]]) -> Cost:
    shape, products, name = key
    gate = merge_gates([gate for gate, _ in results])
    return Cost(
        shape=shape,
        products=products,
        format=name,
        use=gate.use,
        failing=gate.failed / gate.total,
        error=max(error for _, error in results),
        passed=gate.passed,
    )
