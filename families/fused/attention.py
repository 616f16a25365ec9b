"""Attention over packed q, k and v on sm_90: what a launch needs, and its binding. No torch until it is bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflane.families.resident.sm90_config import translation_unit
from rooflane.families.resources.kernel_case import SM90, CudaCase

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64  # of a warpgroup
BARRIER = 8
REGISTERS = 1 << 16  # of an SM
COPY_REGISTERS, MOST_REGISTERS = 24, 240
# By the columns of a head: keys of a tile, places of the ring, blocks an SM, warpgroups that multiply in a block.
# Four small blocks hide each other's exponentials best: 82 us on 64x1024, h4 d32, causal, and two of twice the rows 87.
PLANS = {16: (64, 4, 4, 1), 32: (64, 4, 4, 1), 64: (64, 3, 3, 1), 128: (128, 2, 1, 2), 256: (64, 2, 1, 2)}


@dataclass(frozen=True)
class Attention:
    """One configuration of the kernel. A block has `groups` warpgroups of 64 rows, and one that copies."""

    head_dim: int
    heads: int
    causal: bool
    keys: int
    stages: int
    blocks: int
    groups: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.groups + 1) * 128

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies: those that the block starts with, less 24 for each that copies."""
        start = REGISTERS // (self.threads * self.blocks) // 8 * 8
        left = start * self.threads - COPY_REGISTERS * 128
        return min(left // (self.groups * 128) // 8 * 8, MOST_REGISTERS)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: q, the ring of keys and values, four barriers a place, and one for q."""
        held = self.groups * ROWS + self.stages * 2 * self.keys
        return held * self.head_dim * 2 + (4 * self.stages + 1) * BARRIER

    def source(self) -> str:
        """Return the translation unit."""
        scores, context = self.keys // 2, self.head_dim // 2
        names = {
            "SCORE_N": self.keys, "SCORE_NAMES": _names(0, scores), "SCORE_LEFT": f"%{scores}",
            "SCORE_RIGHT": f"%{scores + 1}", "SCORE_HIGH": f"%{scores + 2}", "SCORE_ADD": f"%{scores + 3}",
            "CONTEXT_N": self.head_dim, "CONTEXT_NAMES": _names(0, context), "CONTEXT_LEFT": _names(context, 4),
            "CONTEXT_RIGHT": f"%{context + 4}", "CONTEXT_HIGH": f"%{context + 5}",
        }  # fmt: skip
        defines: dict[str, int | str] = {name: f'"{text}"' for name, text in names.items()}
        defines |= {
            "SCORE_SUMS": _sums(scores), "CONTEXT_SUMS": _sums(context), "D": self.head_dim, "HEADS": self.heads,
            "CAUSAL": int(self.causal), "KEYS": self.keys, "STAGES": self.stages, "GROUPS": self.groups,
            "THREADS": self.threads, "BLOCKS": self.blocks, "OPERAND": 0, "BK": 64, "GROUP": 1, "CLUSTER": 1,
            "OWN_REGISTERS": self.registers,
        }  # fmt: skip
        return translation_unit("attention.cu", defines, "rooflane.families.fused")

    def case(self) -> CudaCase:
        """Return the kernel as the resource gate compiles it."""
        name = f"fused attention d{self.head_dim}" + " causal" * self.causal
        return CudaCase(name, SM90, self.source(), self.threads, self.shared_bytes)


def plan_attention(head_dim: int, heads: int, causal: bool) -> Attention | None:
    """Return the configuration for a head's columns, None where the kernel has none."""
    plan = PLANS.get(head_dim)
    return None if plan is None else Attention(head_dim, heads, causal, *plan)


def bind_attention(
    plan: Attention, qkv: Tensor, mask: Tensor | None, extent: Tensor | None, out: Tensor
) -> Callable[[], None]:
    """Return a function that launches the kernel on the current stream.

    `qkv` [B, S, 3 H d] and `out` [B, S, H d] are contiguous float16; `mask` [B, S] bool and `extent` [B] are those of
    `lean.attention`. Rows behind a sequence's extent and rows that see no key are written as 0.
    """
    from rooflane.families.ladder.launch import bind_kernel
    from rooflane.families.ladder.tensor_map import encode_map

    batch, length, _ = qkv.shape
    columns = min(plan.head_dim, 64)
    maps = [encode_map(qkv, ROWS, columns), encode_map(qkv, plan.keys, columns), encode_map(out, 16, columns)]
    scale = plan.head_dim**-0.5 * math.log2(math.e)
    arguments = (*maps, mask, extent, length, scale)
    grid = -(-length // (ROWS * plan.groups)) * plan.heads * batch
    return bind_kernel(
        plan.source(), "fused_attention", grid, plan.threads, plan.shared_bytes, arguments, out.device,
        (qkv, mask, extent, out),
    )  # fmt: skip


def _names(first: int, count: int) -> str:
    return ", ".join(f"%{number}" for number in range(first, first + count))


def _sums(count: int) -> str:
    return ", ".join(f'"+f"(c[{number}])' for number in range(count))
