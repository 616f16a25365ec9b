"""Bind the launch of a Hopper forward."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflane.families.resident.hopper.plan import HopperPlan, WarpgroupPlan
from rooflane.families.resident.hopper.rowwarp_plan import RowwarpPlan
from rooflane.families.resident.hopper.source import rowblock_source, rowwarp_source, warpgroup_source
from rooflane.families.runtime.bound import Launch
from rooflane.families.runtime.cuda_kernel import compile_cubin, load_kernel

ARCHITECTURE = "sm_90a"


class HopperBinder:
    """Binds one forward's launch for calls like a sample `(x, mask, out)`, and keeps the scratch they use."""

    def __init__(
        self, plan: HopperPlan, tensors: dict[str, Tensor], operands: torch.dtype, eps: float, units: int
    ) -> None:
        self._plan, self._tensors, self._eps, self._units = plan, tensors, eps, units
        self._bfloat16 = operands is torch.bfloat16
        # Ordinary tensors even when the first call comes in inference mode.
        with torch.inference_mode(False):
            self._scratch = tensors["tiles"].new_empty(plan.scratch_words, dtype=torch.int32)
            self._flags = tensors["tiles"].new_zeros(plan.flags, dtype=torch.int32)

    def __call__(self, x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
        """Return the launch of a call."""
        plan, shape = self._plan, self._plan.shape
        constants = plan.constants(mask is not None, self._bfloat16)
        held: list[Tensor] = [self._tensors["tiles"], self._tensors["floats"]]
        if isinstance(plan, WarpgroupPlan):
            name, text = "resident_warpgroups", warpgroup_source(constants)
            sizes = (plan.blocks, shape.batch_size, shape.seq_len, shape.num_layers)
        elif isinstance(plan, RowwarpPlan):
            name, text = "resident_rowwarps", rowwarp_source(constants)
            sizes = (plan.units, shape.batch_size, shape.seq_len, shape.num_layers)
        else:
            name, text = "resident_rowblocks", rowblock_source(constants)
            held += [self._scratch, self._flags]
            sizes = (plan.blocks, shape.seq_len, shape.num_layers)
        cubin, fixed = compile_cubin(text, ARCHITECTURE), (*held, *sizes, self._eps)
        return load_kernel(cubin, name, plan.programs(self._units), plan.threads, plan.shared_bytes, fixed, x.device)
