"""Bind the launches of a resident configuration: everything but a call's own pointers is fixed here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooflane.families.resident.blocks import blocks_kernel
from rooflane.families.resident.config import ResidentConfig
from rooflane.families.resident.flagged_rows import flagged_rows_kernel
from rooflane.families.resident.layout import Layout
from rooflane.families.resident.rows import rows_kernel
from rooflane.families.resident.sizes import constants, flag_count, programs, scratch_elements
from rooflane.families.runtime.bound import Launch
from rooflane.families.runtime.launch import BoundKernel, raw_stream
from rooflane.families.runtime.staged import StagedGraph
from rooflane.shapes import Shape


class Binder:
    """Binds one forward's launches for calls like a sample `(x, mask, out)`, and keeps the scratch they use."""

    def __init__(
        self, shape: Shape, layout: Layout, config: ResidentConfig, tensors: dict[str, Tensor], eps: float
    ) -> None:
        self._shape, self._layout, self._config = shape, layout, config
        self._weights, self._biases = tensors["weights"], tensors["biases"]
        self._eps = eps
        self._programs = programs(shape, config)
        # Ordinary tensors even when the first call comes in inference mode.
        with torch.inference_mode(False):
            elements = scratch_elements(shape, layout, config)
            self._scratch = self._weights.new_empty(elements)
            self._flags = self._weights.new_zeros(flag_count(shape, config), dtype=torch.int32)

    def __call__(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Return the launch of a call."""
        return self._layered(x, mask, out) if self._config.mode == "layered rows" else self._single(x, mask, out)

    def _single(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Return the one launch of a kernel that takes its rows through every layer."""
        shape = self._shape
        if self._config.mode == "flagged rows":
            function, sizes = flagged_rows_kernel, (shape.seq_len, shape.num_layers, shape.tokens, self._eps)
        else:
            sizes = (shape.batch_size, shape.seq_len, shape.num_layers, self._layout.tiles, self._eps)
            function = blocks_kernel
        held = (self._scratch, self._flags, self._weights, self._biases)
        kernel = self._bound(function, (x, mask, out, *held, *sizes))
        fixed = (*(tensor.data_ptr() for tensor in held), *sizes)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor, _held: object = held) -> None:
            # `_held` keeps alive what the kernel knows by address alone.
            kernel(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(), *fixed)

        return launch

    def _layered(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Return a launch a layer and one more: a graph for all but the last, which writes the output."""
        layers = self._shape.num_layers
        with torch.inference_mode(False):
            residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        kernels: dict[tuple[bool, bool, torch.dtype], BoundKernel] = {}
        qkv = self._scratch.view(2, -1)

        def step_launch(step: int, source: Tensor, mask: Tensor | None, target: Tensor) -> Launch:
            first, last, finished = step == 0, step == layers, max(step - 1, 0)
            weights = self._weights[finished * self._layout.layer_weights :]
            biases = self._biases[finished * self._layout.layer_biases :]
            inner = (qkv[(step + 1) % 2], qkv[step % 2], weights, biases)
            sizes = (self._shape.seq_len, self._eps)
            kind = (first, last, source.dtype)
            if kind not in kernels:
                arguments = (source, mask, target, *inner, *sizes)
                kernels[kind] = self._bound(rows_kernel, arguments, FIRST=first, LAST=last)
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

    def _bound(self, function: Any, arguments: tuple[Any, ...], **more: bool) -> BoundKernel:
        """Compile a kernel for arguments like those given."""
        masked = arguments[1] is not None
        fixed = constants(self._shape, self._layout, self._config, masked) | more
        return BoundKernel(function, self._programs, arguments, fixed, self._config.num_warps, self._config.num_stages)
