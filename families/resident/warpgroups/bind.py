"""Bind the launch of a warpgroup forward."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rooflane.families.bound import Launch
from rooflane.families.cuda_kernel import CudaKernel, compile_cubin
from rooflane.families.resident.warpgroups.plan import STEP, WarpgroupPlan
from rooflane.families.resident.warpgroups.source import source

ARCHITECTURE = "sm_90a"
NAME = "resident_warpgroups"


class WarpgroupBinder:
    """Binds one forward's launch for calls like a sample `(x, mask, out)`."""

    def __init__(
        self, plan: WarpgroupPlan, tensors: dict[str, Tensor], operands: torch.dtype, eps: float, units: int
    ) -> None:
        self._plan, self._tensors, self._eps, self._units = plan, tensors, eps, units
        self._bfloat16 = operands is torch.bfloat16

    def __call__(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Return the launch of a call."""
        plan, shape = self._plan, self._plan.shape
        sizes = [ctypes.c_int(n) for n in (plan.blocks, shape.batch_size, shape.seq_len, shape.num_layers)]
        fixed = [self._tensors["tiles"], self._tensors["final_norm"], *sizes, ctypes.c_float(self._eps)]
        cubin = compile_cubin(source(plan.constants(mask is not None, self._bfloat16)), ARCHITECTURE)
        threads = 2 * STEP * plan.warpgroups
        kernel = CudaKernel(cubin, NAME, plan.programs(self._units), threads, plan.shared_bytes, 3, fixed)

        def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
            kernel(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr())

        return launch
