"""Build a resident forward: packed weights, bound launches, a fresh output a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.families.door import aligned, check_call
from rooflane.families.launch import BoundKernel, raw_stream
from rooflane.families.resident.config import ResidentConfig
from rooflane.families.resident.kernel import rows_kernel, whole_kernel
from rooflane.families.resident.pack import layout_of, pack_resident, padded
from rooflane.families.weights import PackedWeights
from rooflane.shapes import Shape


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
        self._launches: dict[bool, Callable[[int, Tensor, Tensor | None, Tensor], None]] = {}

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_call(x, mask, self._shape)
        x = aligned(x)
        out = torch.empty_like(x)
        self._weights.refresh()
        launch = self._launches.get(mask is not None)
        if launch is None:
            bind = self._bind_rows if self._config.rows else self._bind_whole
            launch = self._launches[mask is not None] = bind(x, mask, out)
        launch(raw_stream(self._device.index or 0), x, None if mask is None else aligned(mask), out)
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
        """Return the launches of the rows kernel: one a layer and one before the first."""
        shape, config, layout = self._shape, self._config, self._layout
        weights, biases = self._weights.tensors["weights"], self._weights.tensors["biases"]
        # Ordinary tensors even when the first call comes in inference mode.
        with torch.inference_mode(False):
            qkv = [
                torch.empty(shape.tokens * 3 * layout.heads_width, dtype=weights.dtype, device=self._device)
                for _ in range(2)
            ]
            residual = torch.empty(shape.tokens * shape.d_model, dtype=torch.float32, device=self._device)
        byte_mask = None if mask is None else mask
        constants = {**self._constants(mask is not None), "ROWS": config.rows, "HEADS_A_STEP": config.heads_a_step}
        sizes = (shape.seq_len, self._eps)
        kernels: dict[tuple[bool, bool, bool], BoundKernel] = {}
        steps = []
        for step in range(shape.num_layers + 1):
            first, last, reads_input = step == 0, step == shape.num_layers, step < 2
            done = max(step - 1, 0)
            layer_weights = weights[done * layout.layer_weights :]
            layer_biases = biases[done * layout.layer_biases :]
            kind = (first, last, reads_input)
            if kind not in kernels:
                sample = (
                    x if reads_input else residual, byte_mask, qkv[0], qkv[1], out if last else residual,
                    layer_weights, layer_biases, *sizes,
                )  # fmt: skip
                kernels[kind] = BoundKernel(
                    rows_kernel,
                    shape.batch_size * -(-shape.seq_len // config.rows),
                    sample,
                    {"FIRST": first, "LAST": last, **constants},
                    config.num_warps,
                    config.num_stages,
                )
            fixed = (layer_weights.data_ptr(), layer_biases.data_ptr(), *sizes)
            buffers = (qkv[(step + 1) % 2].data_ptr(), qkv[step % 2].data_ptr())
            steps.append((kernels[kind], reads_input, last, buffers, fixed))
        residual_ptr = residual.data_ptr()
        self._scratch = (*qkv, residual)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            x_ptr, mask_ptr, out_ptr = x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr()
            for kernel, reads_input, last, buffers, fixed in steps:
                source = x_ptr if reads_input else residual_ptr
                kernel(stream, source, mask_ptr, *buffers, out_ptr if last else residual_ptr, *fixed)

        return launch
