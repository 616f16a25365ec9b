"""chunked: the lean forward over batch and sequence chunks, for shapes whose eager forward does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.families.lean.cost import HALF, SINGLE, lean_predict_s, operand_name, weight_elements
from rooflane.families.spec import FamilySpec, Limits, operands, positive
from rooflane.shapes import PUBLISHED, Form, Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward

# Scratch that a call may use in addition to weights, input and output. At d_model 1024, 2 GiB holds
# one sequence of 100,000 tokens (0.8 GB of packed QKV and context) and 40,000 rows of its feed-forward.
BUDGET_GIB = 2.0
# Fewer rows do not fill the device with a GEMM, so a block keeps this many even over the budget.
LEAST_ROWS = 1024


def chunk_plan(shape: Shape, budget_bytes: float, operand_bytes: int, form: Form = PUBLISHED) -> tuple[int, int, int]:
    """Return `(sequences a chunk, rows a block, scratch bytes)` for a budget.

    A chunk keeps q, k, v and the context of whole sequences. The token-wise ops process it in blocks of rows. Each row
    holds an fp32 residual, its half-precision norm and update, and the feed-forward's hidden row twice.
    """
    kept = operand_bytes * 4 * shape.num_heads * form.head_width(shape) * shape.seq_len
    # A norm behind a sum has a float32 output beside its float32 input.
    singles = SINGLE if form.norm_first else 2 * SINGLE
    row = shape.d_model * (singles + 2 * operand_bytes) + 2 * operand_bytes * shape.ffn_dim
    sequences = int(min(shape.batch_size, max(1, budget_bytes // (kept + row * LEAST_ROWS))))
    room = budget_bytes - sequences * kept
    rows = int(min(sequences * shape.seq_len, max(LEAST_ROWS, room // row)))
    return sequences, rows, sequences * kept + rows * row


class Chunked(FamilySpec):
    """Hold the scratch of one chunk at a time; the residual stream is kept in the output."""

    name = "chunked"
    summary = "the lean forward over batch and sequence chunks within a scratch budget"
    options = {
        "operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model and device",
        "budget_gib": f"scratch bound in GiB, {BUDGET_GIB:g} unless given",
    }
    option_checks = {"operand_dtype": operands, "budget_gib": positive}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        return None

    def refuse_form(self, form: Form) -> str | None:
        return "it takes no bias on the scores" if form.score_bias else None

    def peak_bytes(self, shape: Shape, profile: Limits, *, budget_gib: float = BUDGET_GIB, **options: Any) -> int:
        """Return the most device bytes in use during one call: weights twice, input, output, scratch."""
        operand_bytes = SINGLE if operand_name(shape, profile.kind) == "float32" else HALF
        weights = weight_elements(shape) * (shape.dtype_bytes + operand_bytes)
        ends = shape.tokens * shape.d_model * 2 * shape.dtype_bytes
        sequences, _, scratch = chunk_plan(shape, budget_gib * 2**30, operand_bytes)
        # The output of a half model cannot hold the fp32 residual, so the chunk has its own.
        residual = sequences * shape.seq_len * shape.d_model * SINGLE if shape.dtype != "float32" else 0
        return int(weights + ends + scratch + residual)

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        return lean_predict_s(shape, profile, captured=False)

    def build(
        self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None,
        budget_gib: float = BUDGET_GIB,
    ) -> Forward:  # fmt: skip
        """Return the built forward."""
        from rooflane.families.chunked.build import build

        return build(model, shape, device, operand_dtype, budget_gib)


SPEC = Chunked()
