"""Build a resident forward: packed weights, bound launches, a fresh output a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.families.door import aligned, check_call, operand_dtype
from rooflane.families.launch import BoundKernel, raw_stream
from rooflane.families.resident.config import ResidentConfig, resident_config
from rooflane.families.resident.kernel import rows_kernel, whole_kernel
from rooflane.families.resident.layout import layout_of, padded
from rooflane.families.resident.pack import pack_resident
from rooflane.families.staged import StagedGraph, StreamGuard
from rooflane.families.weights import PackedWeights
from rooflane.shapes import Shape


def build(
    model: nn.Module, shape: Shape, device: torch.device | str, operands: str | None
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return `(x [B, S, D], mask [B, S] or None) -> [B, S, D]`."""
    device = torch.device(device)
    return ResidentForward(model, shape, device, operand_dtype(operands, shape, device.type), resident_config(shape))


class ResidentForward:
    """Run the whole forward in one launch, or in one launch a layer and one more."""

    def __init__(
        self, model: nn.Module, shape: Shape, device: torch.device, operand_dtype: torch.dtype, config: ResidentConfig
    ) -> None:
        self._shape = shape
        self._config = config
        self._device = device
        self._layout = layout_of(shape, config.ffn_tile)
        self._weights = PackedWeights(model, lambda source: pack_resident(source, self._layout, operand_dtype))
        self._eps = model.final_norm.eps
        self._guard = StreamGuard(device)
        self._launches: dict[bool, Callable[[int, Tensor, Tensor | None, Tensor], None]] = {}

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        x = aligned(x)
        mask = None if mask is None else aligned(mask)
        stream = raw_stream(self._device.index or 0)
        self._guard.enter(stream)
        self._weights.refresh()
        out = torch.empty_like(x)
        launch = self._launches.get(mask is not None)
        if launch is None:
            bind = self._bind_rows if self._config.rows else self._bind_whole
            launch = self._launches[mask is not None] = bind(x, mask, out)
        launch(stream, x, mask, out)
        return out

    def _constants(self, masked: bool) -> dict[str, object]:
        """Return the compile-time parameters both kernels share."""
        shape, layout = self._shape, self._layout
        return {
            "WIDTH": shape.d_model,
            "NUM_HEADS": shape.num_heads,
            "HEAD": layout.head,
            "FFN": layout.ffn,
            "CAUSAL": shape.causal,
            "HAS_MASK": masked,
            "BLOCK_S": padded(shape.seq_len),
            "BLOCK_D": layout.width,
            "BLOCK_F": self._config.ffn_tile,
            "STAGES": self._config.num_stages,
        }

    def _bind_whole(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Callable[..., None]:
        """Return the one launch of the whole kernel."""
        shape, config = self._shape, self._config
        weights, biases = self._weights.tensors["weights"], self._weights.tensors["biases"]
        sizes = (shape.batch_size, shape.seq_len, shape.num_layers, self._eps)
        kernel = BoundKernel(
            whole_kernel,
            -(-shape.batch_size // config.group),
            (x, mask, out, weights, biases, *sizes),
            {**self._constants(mask is not None), "GROUP": config.group},
            config.num_warps,
            config.num_stages,
        )
        fixed = (weights.data_ptr(), biases.data_ptr(), *sizes)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            kernel(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(), *fixed)

        return launch

    def _bind_rows(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Callable[..., None]:
        """Return the launches of the rows kernel: a graph for all layers but the last, which writes the output."""
        shape, layout = self._shape, self._layout
        weights, biases = self._weights.tensors["weights"], self._weights.tensors["biases"]
        # Ordinary tensors even when the first call comes in inference mode.
        with torch.inference_mode(False):
            qkv = [
                torch.empty(shape.tokens * 3 * layout.heads_width, dtype=weights.dtype, device=self._device)
                for _ in range(2)
            ]
            residual = torch.empty(x.shape, dtype=torch.float32, device=self._device)
        kernels: dict[tuple[bool, bool, torch.dtype], BoundKernel] = {}

        def launch_step(step: int, stream: int, source: Tensor, mask: Tensor | None, target: Tensor) -> None:
            first, last = step == 0, step == shape.num_layers
            finished = max(step - 1, 0)
            tensors = (
                source,
                mask,
                qkv[(step + 1) % 2],
                qkv[step % 2],
                target,
                weights[finished * layout.layer_weights :],
                biases[finished * layout.layer_biases :],
            )
            kind = (first, last, source.dtype)
            if kind not in kernels:
                kernels[kind] = self._rows_kernel(first, last, tensors)
            pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
            kernels[kind](stream, *pointers, shape.seq_len, self._eps)

        def body(x: Tensor, mask: Tensor | None) -> None:
            for step in range(shape.num_layers):
                source = x if step < 2 else residual
                launch_step(step, raw_stream(self._device.index or 0), source, mask, residual)

        graph = StagedGraph(body, x, mask, self._device)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            graph.run(stream, x, mask)
            launch_step(shape.num_layers, stream, x if shape.num_layers == 1 else residual, mask, out)

        return launch

    def _rows_kernel(self, first: bool, last: bool, tensors: tuple[Tensor | None, ...]) -> BoundKernel:
        """Compile one kind of step for tensors like those given."""
        shape, config = self._shape, self._config
        constants = self._constants(tensors[1] is not None)
        return BoundKernel(
            rows_kernel,
            shape.batch_size * -(-shape.seq_len // config.rows),
            (*tensors, shape.seq_len, self._eps),
            {"FIRST": first, "LAST": last, **constants, "ROWS": config.rows, "HEADS_A_STEP": config.heads_a_step},
            config.num_warps,
            config.num_stages,
        )
