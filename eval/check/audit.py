"""The gate-power audit: which faults would the checks notice, and which stress inputs catch the rest.

Each ablation of the reference goes through the checks that a candidate meets: the plain trials, the mask checks and
the stress inputs, each judged by its own verdict. The use is its error over the limit: above 1 it is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, count, groupby

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rooflane.baseline import build_baseline, config_of, generate_random_case, torch_dtype
from rooflane.eval.check.ablations import DEFAULT_WINDOW, Ablation, ablations
from rooflane.eval.check.formats import TF32, RoundedOperands
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.stresses import CATALOGUE, KEPT, Stress
from rooflane.eval.check.truth import (
    HALF_FACTOR,
    PLAIN,
    RAGGED_PADDING,
    STRESS_FACTOR,
    draw_stress,
    judge,
    mask_cases,
    stressed,
)
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.environment import available_memory_bytes
from rooflane.shapes import Shape

# Sequences of a batch are independent: two are enough to hold a ragged row and a full one.
AUDIT_ROWS = 2
# Score copies alive in one float64 forward of an ablation, in elements of 8 bytes.
SCORE_COPIES = 6
# Relative to the output's largest value; float64 rounding of these forwards is about 1e-14.
SAME_FUNCTION = 1e-10

# Small enough for a minute on two cores; the long one is where a polynomial softmax slips through.
DEFAULT_SHAPES = (
    Shape("S128", 2, 128, 64, 4, 256, 2, causal=False),
    Shape("S128 causal", 2, 128, 64, 4, 256, 2, causal=True),
    Shape("S1024", 1, 1024, 64, 2, 256, 1, causal=False),
)


# At this use a catch is safe. One nearer to the limit may be lost with other weights, inputs or sizes.
SURE_USE = 10.0

CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

# A shape's id and an ablation's name.
Fault = tuple[str, str]


class Finding(BaseModel):
    """One ablation under one condition on one shape: the least use over the seeds, above 1 where all catch it."""

    model_config = CONFIG

    shape: str
    condition: str
    ablation: str
    use: float
    same: bool


class Audit(BaseModel):
    """An audit's findings and what follows from them.

    `always` names the conditions that every verification runs anyway, `stresses` those a set may be picked from,
    `asked` those shown on request only.
    """

    model_config = CONFIG

    shapes: dict[str, str]
    seeds: int
    window: int
    tf32: bool
    always: tuple[str, ...]
    stresses: tuple[str, ...]
    asked: tuple[str, ...]
    findings: tuple[Finding, ...]

    def best(self, conditions: Sequence[str]) -> dict[Fault, float]:
        """Return the largest use that some of the conditions reach for each fault; 0 where none shows it."""
        best: dict[Fault, float] = {}
        for finding in self.findings:
            if finding.condition in (*self.always, *self.stresses) and not finding.same:
                use = finding.use if finding.condition in conditions else 0.0
                fault = (finding.shape, finding.ablation)
                best[fault] = max(best.get(fault, 0.0), use)
        return best

    def unseen(self, stresses: Sequence[str] = ()) -> list[Fault]:
        """Return the faults that pass the checks run anyway and these stresses."""
        return [fault for fault, use in self.best((*self.always, *stresses)).items() if use <= 1]

    def lost(self, stresses: Sequence[str]) -> list[Fault]:
        """Return the faults that these stresses catch less surely than the whole catalogue can."""
        wanted = self.best((*self.always, *self.stresses))
        reached = self.best((*self.always, *stresses))
        return [fault for fault, use in wanted.items() if use > 1 and reached[fault] < min(use, SURE_USE)]

    def pick(self) -> tuple[str, ...]:
        """Return the smallest set of stresses that catches every fault as surely as the whole catalogue can.

        Every subset is tried, small ones first; of one size, the one whose weakest catch is the strongest is taken.
        """
        for size in range(len(self.stresses) + 1):
            covers = [chosen for chosen in combinations(self.stresses, size) if not self.lost(chosen)]
            if covers:
                return max(covers, key=self._weakest)
        raise AssertionError("the whole catalogue loses nothing against itself")

    def needed_for(self, stress: str) -> list[Fault]:
        """Return the faults that the picked set would lose without one of its stresses."""
        return self.lost([name for name in self.pick() if name != stress])

    def verified(self) -> tuple[str, ...]:
        """Return the set that verification should run: the picked stresses and those kept whatever is picked."""
        picked = self.pick()
        return tuple(name for name in self.stresses if name in picked or name in KEPT)

    def same_everywhere(self) -> list[str]:
        """Return the ablations that are the reference's own function under every condition of every shape."""
        names = dict.fromkeys(finding.ablation for finding in self.findings)
        changed = {finding.ablation for finding in self.findings if not finding.same}
        return [name for name in names if name not in changed]

    def _weakest(self, stresses: Sequence[str]) -> float:
        return min((use for use in self.best((*self.always, *stresses)).values() if use > 1), default=0.0)


@dataclass(frozen=True)
class _Condition:
    """One check: how its input is drawn and whether the gate or the stress verdict decides."""

    name: str
    stress: Stress
    mask: str = ""

    @property
    def against_truth(self) -> bool:
        return self.stress is not PLAIN


def audit_gate(
    shapes: Sequence[Shape] = DEFAULT_SHAPES, *, seeds: int = 1, window: int = DEFAULT_WINDOW,
    scales: Sequence[float] = (), tf32: bool = False,
    on_stage: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Audit:  # fmt: skip
    """Run every ablation through every check on the CPU and return what each would catch.

    `scales` adds input scales; `tf32` rounds the operands of the baseline's products to 10 bits of
    mantissa, which is what the baseline does on a GPU and what increases its error on stress inputs. Batches are cut to
    two rows. `on_stage(done, total, text)` is called before each case. Raises `EvaluationError` for a shape whose
    scores do not fit, or for a count or scale without meaning.
    """
    if seeds < 1 or window < 1:
        raise EvaluationError(f"seeds and window must be whole numbers above 0; got {seeds} and {window}")
    for scale in scales:
        if not 0 < scale < float("inf"):
            raise EvaluationError(f"input scale {scale:g} has no meaning here; give a number above 0, such as 300")
    shapes = [replace(shape, batch_size=min(shape.batch_size, AUDIT_ROWS)) for shape in shapes]
    if len({shape.id for shape in shapes}) < len(shapes) or not shapes:
        raise EvaluationError("give at least one shape, and each id only once")
    for shape in shapes:
        check_size(shape)
    asked = [Stress(f"input x {scale:g}", scale=scale) for scale in scales]
    asked = [stress for stress in asked if stress.name not in {known.name for known in CATALOGUE}]
    faults = ablations(window)
    least: dict[tuple[str, str, str], Finding] = {}
    groups = sum(len(_by_weights(asked, shape.dtype)) for shape in shapes)
    total, done = groups * seeds * len(faults), count()

    def on_case(text: str) -> None:
        on_stage(next(done), total, text)

    for shape in shapes:
        for seed in range(seeds):
            for finding in _audit_shape(shape, 1 + seed, faults, asked, tf32, on_case):
                key = (finding.shape, finding.condition, finding.ablation)
                least[key] = min(finding, least.get(key, finding), key=lambda found: found.use)
    return Audit(
        shapes={shape.id: shape.label() for shape in shapes},
        seeds=seeds,
        window=window,
        tf32=tf32,
        always=tuple(condition.name for condition in _conditions((), "float32") if not condition.against_truth),
        stresses=tuple(stress.name for stress in CATALOGUE),
        asked=tuple(stress.name for stress in asked),
        findings=tuple(least.values()),
    )


def _conditions(asked: Sequence[Stress], dtype: str) -> list[_Condition]:
    """Return every check that suits a model of the dtype, those on unchanged weights first."""
    masks = (f"padding {RAGGED_PADDING:g}", "one token", "holes")
    stresses = sorted((*CATALOGUE, *asked), key=lambda stress: stress.touches)
    return [
        _Condition("plain", PLAIN),
        *(_Condition(name, PLAIN, mask=name) for name in masks),
        *(_Condition(stress.name, stress) for stress in stresses if stress.suits(dtype)),
    ]


def _by_weights(asked: Sequence[Stress], dtype: str) -> list[list[_Condition]]:
    """Return the checks in groups of the same weights: copying a faulty model costs more than a small forward."""
    groups = groupby(_conditions(asked, dtype), key=lambda condition: condition.stress.touches)
    return [list(group) for _, group in groups]


def _audit_shape(
    shape: Shape, seed: int, faults: Sequence[Ablation], asked: Sequence[Stress], tf32: bool,
    on_case: Callable[[str], None],
) -> Iterator[Finding]:  # fmt: skip
    cpu = torch.device("cpu")
    reference = build_baseline(shape, cpu, seed)
    true_model = build_baseline(shape, cpu, seed).double()
    for conditions in _by_weights(asked, shape.dtype):
        with ExitStack() as changed, torch.no_grad():
            for model in (reference, true_model):
                changed.enter_context(stressed(model, conditions[0].stress))
            prepared = []
            for condition in conditions:
                x, mask = _draw(condition, shape, cpu, 1000 * seed)
                with RoundedOperands(TF32, TF32) if tf32 else nullcontext():
                    eager = reference(x, mask)
                prepared.append((condition, x.double(), mask, eager, true_model(x.double(), mask)))
            for fault in faults:
                on_case(f"shape {shape.id}, {conditions[0].name} and others, {fault.name}")
                forward = fault.build(true_model)
                for condition, x, mask, eager, true in prepared:
                    out = forward(x, mask)
                    error = (out - true).abs().max()
                    yield Finding(
                        shape=shape.id,
                        condition=condition.name,
                        ablation=fault.name,
                        use=_use(condition, shape, out, eager, true),
                        same=bool(error <= SAME_FUNCTION * true.abs().max()),
                    )


def _draw(condition: _Condition, shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    if not condition.mask:
        return draw_stress(condition.stress, shape, device, seed)
    config, dtype = config_of(shape), torch_dtype(shape.dtype)
    full, _ = generate_random_case(config, device, dtype, seed)
    _, mask = generate_random_case(config, device, dtype, seed, RAGGED_PADDING)
    return mask_cases(full, mask, seed + 1)[condition.mask]


def _use(condition: _Condition, shape: Shape, out: Tensor, eager: Tensor, true: Tensor) -> float:
    """Return the use of what the condition's verdict allows."""
    if condition.against_truth or shape.dtype != "float32":
        factor = STRESS_FACTOR if condition.against_truth else HALF_FACTOR
        return judge(condition.name, out, eager, true, factor, "").use
    return check_gate(out, eager).use


def check_size(shape: Shape) -> None:
    """Raise when the float64 scores of a shape do not fit into half the free memory."""
    need = 8 * SCORE_COPIES * shape.batch_size * shape.num_heads * shape.seq_len**2
    free = available_memory_bytes()
    if need > free // 2:
        raise EvaluationError(
            f"shape {shape.id}: the audit's float64 scores need {need / 1e9:.3g} GB, {free / 1e9:.3g} GB are free; "
            "name other shapes with --shape, or audit a shorter sequence of the same widths"
        )
