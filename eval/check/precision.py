"""The precision ladder: what narrow operands of the matrix products cost in error on a shape.

Each format rounds the operands of some products of the float32 forward; the rest of the forward stays in float32.
The gate compares the output with eager's, in float32 as on a CPU and in TF32 as on a GPU; the norm with float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

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

# Sequences do not see each other; eight of the smallest published shape still hold 32,768 elements.
SEQUENCES = 8
SIX, ATTENTION, EAGER = "q k v out ffn", "attention", "eager"
# Products, and the formats of the six and of attention's two: eager on a CPU and on a GPU first.
CASES: tuple[tuple[str, Format | None, Format | None], ...] = (
    (EAGER, None, None),
    (EAGER, TF32, TF32),
    *((SIX, one, None) for one in FORMATS),
    *((ATTENTION, None, one) for one in FORMATS if one.attention),
)
FLOAT32 = "float32"
EAGERS = (FLOAT32, TF32.name)
# The gate's results by eager's format, and the error against float64.
Result = tuple[dict[str, GateResult], float]


class Cost(BaseModel):
    """What a format of some products costs on a shape: the worst of the seeds, and the failing share of all.

    `use` and `failing` are by eager's own format, float32 or TF32; `passed` is true where both gates pass.
    """

    model_config = CONFIG

    shape: str
    products: str
    format: str
    use: dict[str, float]
    failing: dict[str, float]
    error: float
    passed: bool


class Precision(BaseModel):
    """The costs of every format on every shape; shapes that differ in their batch alone are one."""

    model_config = CONFIG

    shapes: dict[str, str]
    left_out: dict[str, str]
    seeds: int
    costs: tuple[Cost, ...]


def measure_precision(
    shapes: Sequence[Shape], *, seeds: int = 1,
    on_stage: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Precision:  # fmt: skip
    """Return what each format costs on each shape, on the CPU with eight sequences a shape.

    A shape whose scores do not fit, or whose dtype is not float32, is left out with the reason.
    `on_stage(done, total, text)` is called after each forward. Raises `EvaluationError` when no shape is left, or for
    a count of seeds below 1.
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
    total, done = len(named) * seeds * len(CASES), count()
    found: dict[tuple[str, str, str], list[Result]] = {}
    for shape in named:
        for seed in range(1, 1 + seeds):
            for products, name, result in _forwards(shape, seed):
                on_stage(next(done), total, f"shape {shape.id}: {name}, {products}")
                found.setdefault((shape.id, products, name), []).append(result)
    return Precision(
        shapes={shape.id: shape.label() for shape in named},
        left_out=left_out,
        seeds=seeds,
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


def _forwards(shape: Shape, seed: int) -> Iterator[tuple[str, str, Result]]:
    """Yield products, format, and a case's gates and error, case by case."""
    model = build_baseline(shape, "cpu", seed)
    x, mask = draw_stress(PLAIN, shape, torch.device("cpu"), 1000 * seed)

    def forward(linear: Format | None, attention: Format | None) -> Tensor:
        with torch.no_grad(), RoundedOperands(linear, attention):
            return model(x, mask)

    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double(), mask)
    references = {FLOAT32: forward(None, None), TF32.name: forward(TF32, TF32)}
    for products, linear, attention in CASES:
        out, one = forward(linear, attention), linear or attention
        gates = {name: check_gate(out, reference) for name, reference in references.items()}
        yield products, one.name if one else FLOAT32, (gates, normwise_error(out, truth))


def _cost(key: tuple[str, str, str], results: list[Result]) -> Cost:
    shape, products, name = key
    gates = {eager: merge_gates([gates[eager] for gates, _ in results]) for eager in EAGERS}
    return Cost(
        shape=shape,
        products=products,
        format=name,
        use={eager: gate.use for eager, gate in gates.items()},
        failing={eager: gate.failed / gate.total for eager, gate in gates.items()},
        error=max(error for _, error in results),
        passed=all(gate.passed for gate in gates.values()),
    )
