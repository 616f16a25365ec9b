"""Truth: the forward in float64 on part of the batch, and the inputs on which both sides are compared with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from rooflane.baseline import BaselineTransformer, chunked_reference, config_of, generate_random_case, torch_dtype
from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.stresses import SHARPEN, SPIKE, SPIKE_EVERY, WIDEN, Stress, load_stress_set
from rooflane.eval.record.records import GateResult, TruthCheck
from rooflane.shapes import Shape

# The worst error allowed, in units of the eager baseline's own: on stress inputs, and on any input of a
# half-precision model.
STRESS_FACTOR = 2.0
HALF_FACTOR = 1.5

Gate = Callable[..., GateResult]

PLAIN = Stress("plain")
# The plain input stands first, so that every record carries both sides' ordinary error against fp64.
STRESSES = (PLAIN, *load_stress_set())

RAGGED_PADDING = 0.3

# What fp64 may cost: FLOPs at the slowest rates we meet (CPU cores: 20 GFLOP/s; GPUs with 1/64 rate: 1 TFLOP/s).
TRUTH_FLOPS = {"cpu": 2e9, "cuda": 2e11}
TRUTH_SCRATCH_BYTES = 1 << 30
TRUTH_INPUT_BYTES = 1 << 30


class Truth:
    """The float64 forward of a model on chosen rows of the batch; sequences are independent of each other.

    As many rows as the FLOP and memory bounds above allow are compared, spread evenly, first and last included.
    """

    def __init__(self, model: BaselineTransformer, shape: Shape, device: torch.device) -> None:
        self.model = copy.deepcopy(model).double()  # a stress changes its weights beside the candidate's
        # 2 FLOPs a multiply-add: 4 square and 2 feed-forward projections a token, two products over S keys.
        per_token = 4 * shape.d_model**2 + 2 * shape.d_model * shape.ffn_dim + 2 * shape.seq_len * shape.d_model
        per_row = 2 * shape.num_layers * shape.seq_len * per_token
        input_bytes = 8 * shape.seq_len * shape.d_model
        affordable = min(TRUTH_FLOPS[device.type] / per_row, TRUTH_INPUT_BYTES / input_bytes)
        count = max(1, min(shape.batch_size, int(affordable)))
        last = shape.batch_size - 1
        picks = sorted({round(index * last / max(1, count - 1)) for index in range(count)})
        self.rows = torch.tensor(picks, device=device)
        self.label = "all rows" if len(picks) == shape.batch_size else f"{len(picks)} of {shape.batch_size} rows"

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the float64 output `[rows, S, D]` of the chosen rows."""
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return chunked_reference(self.model, x[self.rows].double(), mask[self.rows], budget_bytes=TRUTH_SCRATCH_BYTES)


def judge(
    name: str, out: Tensor, eager: Tensor, true: Tensor, factor: float, label: str, gate: Gate = check_gate
) -> TruthCheck:
    """Compare a candidate's and eager's output rows with the truth.

    Passes when every element passes the gate, or the worst error is at most `factor` times eager's own; a value
    that is not finite fails either way.
    """
    mine, own = gate(out, true, spread=True), gate(eager, true, spread=True)
    passed = mine.passed or (isfinite(own.max_abs) and mine.max_abs <= factor * own.max_abs)
    return TruthCheck(
        name=name,
        passed=passed,
        gate=mine,
        eager_max_abs=own.max_abs,
        eager_rms=own.rms,
        eager_bins=own.bins,
        factor=factor,
        rows=label,
    )


def draw_stress(stress: Stress, shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Return a stress's input and mask."""
    dtype = torch_dtype(shape.dtype)
    x, mask = generate_random_case(config_of(shape), device, dtype, seed, shape.padding_ratio, stress.scale)
    if stress.spikes:
        x.flatten()[::SPIKE_EVERY] *= SPIKE
    return x, mask


@contextmanager
def stressed(model: nn.Module, stress: Stress) -> Iterator[None]:
    """Change a model's weights in place as a stress asks, and put the exact values back afterwards.

    Models with parameters of the same names get the same values, whatever their dtype and device.
    """
    chosen = [entry for entry in model.named_parameters() if any(part in entry[0] for part in stress.touches)]
    kept = [parameter.detach().clone() for _, parameter in chosen]
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in chosen:
            if "q_proj" in name:
                parameter.mul_(SHARPEN)
            elif "ffn" in name:
                parameter.mul_(WIDEN if "ffn_in" in name else 1 / WIDEN)
            else:
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                # Weights 0.5 to 1.5, biases -0.5 to 0.5.
                parameter.copy_(drawn + 0.5 if name.endswith("weight") else drawn - 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for (_, parameter), value in zip(chosen, kept, strict=True):
                parameter.copy_(value)


def mask_cases(full: Tensor, mask: Tensor, seed: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return the mask checks of an unpadded input and a ragged mask: input and mask by name.

    Rows are zeroed only under a mask that calls them padding: LayerNorm blows up the rounding of a zero row, and
    TF32 eager itself is inaccurate there.
    """
    mask = mask.clone()
    mask[0] = True
    single = mask.clone()
    single[-1, 1:] = False
    if len(mask) > 1:
        mask = single
    generator = torch.Generator(device=mask.device).manual_seed(seed)
    holes = torch.rand(mask.shape, generator=generator, dtype=torch.float32, device=mask.device) > RAGGED_PADDING
    holes[:, 0] = True  # a first token that is valid; left padding has those that are not
    # Every sequence but one keeps its valid tokens; the rows of the one are 0 by the contract.
    alone = mask.clone()
    alone[len(alone) // 2] = False
    return {
        f"padding {RAGGED_PADDING:g}": (full * mask[:, :, None], mask),
        "one token": (full * single[:, :, None], single),
        "padding alone": (full, alone),
        "left padding": (full, single.flip(1)),
        "holes": (full, holes),
        "no mask": (full, None),
    }
