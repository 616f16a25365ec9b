"""Thin blocks of query rows, a launch a layer and one more: for small batches that attend both ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rooflane.families.lean.cost import SINGLE
from rooflane.families.resident.config import BLOCK_ROWS, STEP_COLUMNS, Room, padded, row_blocks, too_many_rows
from rooflane.families.resident.triton_config import TYPES, TritonConfig
from rooflane.families.resources.kernel_case import Architecture, TritonCase
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rooflane.families.runtime.bound import Bind, Launch

# A layer of thin rows with a launch of its own: shapes 2 to 4 on the H200.
LAUNCH_S = 10e-6


@dataclass(frozen=True)
class LayeredRows(TritonConfig):
    """A program for every 16 rows, one layer a launch; `heads_a_step` heads stand side by side."""

    kernel = "layered rows"
    CASES = [(128, 4, 128, 128, 1, False)]
    TYPES: ClassVar[dict[str, str]] = TYPES | {"qkv_in_ptr": "*fp16", "qkv_out_ptr": "*fp16"}

    heads_a_step: int

    @classmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        if shape.causal:
            return "causal: flags or whole sequences take one launch where this takes one a layer"
        if reason := too_many_rows(shape, room):
            return reason
        most = max(1, STEP_COLUMNS // padded(shape.head_dim))
        heads = next(count for count in (8, 4, 2, 1) if count <= most and shape.num_heads % count == 0)
        return cls(shape, BLOCK_ROWS, min(STEP_COLUMNS, padded(shape.ffn_dim)), 4, 1, heads)

    @staticmethod
    def function() -> Any:
        from rooflane.families.resident.kernels.layered_rows_kernel import rows_kernel

        return rows_kernel

    @property
    def programs(self) -> int:
        return row_blocks(self.shape)

    @property
    def scratch_elements(self) -> int:
        """Operand elements of the queries, keys and values of two layers."""
        return 2 * self.shape.tokens * 3 * self.layout.heads_width

    @property
    def held_bytes(self) -> int:
        """Device bytes a built forward holds, the staged input and the residual among them."""
        return super().held_bytes + self.shape.tokens * self.shape.d_model * (self.shape.dtype_bytes + SINGLE)

    def constants(self, masked: bool) -> dict[str, Any]:
        """Return the kernel's compile-time parameters, FIRST and LAST of a launch left out."""
        own = {"NUM_HEADS": self.layout.tiles, "BLOCK_S": padded(self.shape.seq_len), "CAUSAL": self.shape.causal}
        own |= {"BLOCK_F": self.ffn_tile, "STAGES": self.num_stages, "HEADS_A_STEP": self.heads_a_step}
        return self.shared_constants(masked) | own

    def sizes(self, eps: float) -> tuple[int | float, ...]:
        return self.shape.seq_len, eps

    def predict_s(self, profile: Limits) -> float:
        return (self.shape.num_layers + 1) * LAUNCH_S

    def binder(self, weights: dict[str, Tensor], operands: torch.dtype, eps: float, units: int) -> Bind:
        """Return what binds the launches: a graph for all but the last, which writes the output."""
        import torch

        from rooflane.families.runtime.launch import StagedGraph, raw_stream

        layers, layout, sizes = self.shape.num_layers, self.layout, self.sizes(eps)
        scratch, _ = self.allocate(weights)
        qkv = scratch.view(2, -1)

        def bind(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
            with torch.inference_mode(False):
                residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            kernels: dict[tuple[bool, bool, torch.dtype], Any] = {}

            def step_launch(step: int, source: Tensor, mask: Tensor | None, target: Tensor) -> Launch:
                first, last, finished = step == 0, step == layers, max(step - 1, 0)
                own_weights = weights["weights"][finished * layout.layer_weights :]
                own_biases = weights["biases"][finished * layout.layer_biases :]
                inner = (qkv[(step + 1) % 2], qkv[step % 2], own_weights, own_biases)
                kind = (first, last, source.dtype)
                if kind not in kernels:
                    kernels[kind] = self.bound((source, mask, target, *inner, *sizes), FIRST=first, LAST=last)
                kernel, fixed = kernels[kind], (*(tensor.data_ptr() for tensor in inner), *sizes)

                def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
                    kernel(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(), *fixed)

                return launch

            def body(x: Tensor, mask: Tensor | None) -> None:
                for step in range(layers):
                    source = x if step < 2 else residual
                    stream = raw_stream(x.device.index or 0)
                    step_launch(step, source, mask, residual)(stream, source, mask, residual)

            graph = StagedGraph(body, x, mask, x.device)
            last = step_launch(layers, x if layers == 1 else residual, mask, out)

            def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
                graph.run(stream, x, mask)
                last(stream, x if layers == 1 else residual, mask, out)

            return launch

        return bind

    def case(self, architecture: Architecture) -> TritonCase:
        """Return a layer between the first and the last as the resource gate compiles it."""
        case = super().case(architecture)
        return replace(case, constants=case.constants | {"FIRST": False, "LAST": False})
