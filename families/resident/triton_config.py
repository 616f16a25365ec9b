"""What the resident Triton kernels share: padded weights, scratch, the bound launch, gate cases. No torch to plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import H200, Layout, ResidentConfig, Room, layout_of
from rooflane.families.resources.kernel_case import ARCHITECTURES, PROGRAM_BYTES, Architecture, TritonCase
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.families.runtime.bound import Bind, Launch

TYPES = {
    "x_ptr": "*fp32", "mask_ptr": "*i1", "out_ptr": "*fp32", "weight_ptr": "*fp16", "bias_ptr": "*fp32",
    "length": "i32", "eps": "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class TritonConfig(ResidentConfig):
    """A launch of one Triton kernel: `rows` query rows a program, `ffn_tile` hidden columns at a time."""

    # (d_model, heads, ffn_dim, seq_len, batch, causal) of the shapes the resource gate compiles.
    CASES: ClassVar[list[tuple[int, int, int, int, int, bool]]]
    # The types of the kernel's arguments, as the resource gate compiles it.
    TYPES: ClassVar[dict[str, str]]

    rows: int
    ffn_tile: int
    num_warps: int
    num_stages: int

    @staticmethod
    @abstractmethod
    def function() -> Any:
        """Return the kernel."""

    @property
    @abstractmethod
    def programs(self) -> int:
        """Programs of a launch."""

    @abstractmethod
    def constants(self, masked: bool) -> dict[str, Any]:
        """Return the kernel's compile-time parameters."""

    @abstractmethod
    def sizes(self, eps: float) -> tuple[int | float, ...]:
        """Return the kernel's arguments behind its pointers."""

    @property
    def layout(self) -> Layout:
        """Padded sizes of the packed weights."""
        return layout_of(self.shape, self.ffn_tile)

    @property
    def scratch_elements(self) -> int:
        """Operand elements that pass between programs through device memory.

        Only batches that leave the device empty have any: at most 16 rows a multiprocessor, or 64 for halves, times
        the layers where each keeps a scratch of its own.
        """
        return 0

    @property
    def held_bytes(self) -> int:
        layout = self.layout
        packed = layout.layers * (layout.layer_weights * HALF + layout.layer_biases * SINGLE)
        return packed + self.scratch_elements * HALF + self.flags * SINGLE

    def shared_constants(self, masked: bool) -> dict[str, Any]:
        """Return the compile-time parameters that all Triton kernels have."""
        layout = self.layout
        sizes = {"WIDTH": self.shape.d_model, "HEAD": layout.head, "FFN": layout.ffn, "BLOCK_D": layout.width}
        return sizes | {"HAS_MASK": masked, "ROWS": self.rows}

    def pack(self, model: nn.Module, operands: torch.dtype) -> dict[str, Tensor]:
        """Return `weights` (operands) and `biases` (float32)."""
        from rooflane.families.resident.pack import pack_padded

        return pack_padded(model, self.layout, operands)

    def binder(self, weights: dict[str, Tensor], operands: torch.dtype, eps: float, units: int) -> Bind:
        """Return what binds the one launch that takes its rows through every layer."""
        held, sizes = (*self.allocate(weights), weights["weights"], weights["biases"]), self.sizes(eps)
        fixed = (*(tensor.data_ptr() for tensor in held), *sizes)

        def bind(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
            kernel = self.bound((x, mask, out, *held, *sizes))

            def launch(stream: int, x: Tensor, mask: Tensor | None, out: Tensor, _held: object = held) -> None:
                # `_held` keeps alive what the kernel knows by address alone.
                kernel(stream, x.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(), *fixed)

            return launch

        return bind

    def allocate(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the scratch and the flags."""
        import torch

        # Ordinary tensors even when the first call comes in inference mode.
        with torch.inference_mode(False):
            scratch = weights["weights"].new_empty(self.scratch_elements)
            return scratch, weights["weights"].new_zeros(self.flags, dtype=torch.int32)

    def bound(self, arguments: tuple[Any, ...], **more: bool) -> Any:
        """Compile the kernel for arguments like those given; the mask is the second."""
        from rooflane.families.runtime.launch import BoundKernel

        constants = self.constants(arguments[1] is not None) | more
        return BoundKernel(self.function(), self.programs, arguments, constants, self.num_warps, self.num_stages)

    @classmethod
    def cases(cls) -> Iterable[tuple[Shape, Architecture, Room]]:
        """Return the shapes of `CASES` on a large device of every architecture, without the CUDA C++ kernels."""
        for architecture in ARCHITECTURES:
            room = Room(H200.units, architecture.shared_bytes - PROGRAM_BYTES)
            for d_model, heads, ffn_dim, seq_len, batch, causal in cls.CASES:
                yield Shape("case", batch, seq_len, d_model, heads, ffn_dim, 4, causal), architecture, room

    def case(self, architecture: Architecture) -> TritonCase:
        shape, constants = self.shape, self.constants(masked=True)
        name = f"resident {self.kernel} d{shape.d_model} h{shape.num_heads} f{shape.ffn_dim}"
        name += f" s{shape.seq_len} b{shape.batch_size}"
        return TritonCase(name, architecture, self.function, self.TYPES, constants, self.num_warps, self.num_stages)
