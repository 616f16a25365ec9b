"""What every resident kernel states about itself, its padded sizes, and what a device offers it. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from rooflane.families.lean.cost import operand_name
from rooflane.families.resources.kernel_case import Architecture, KernelCase
from rooflane.families.spec import Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.families.runtime.bound import Bind

CAPABILITY = (9, 0)  # of the GPUs that the CUDA C++ kernels run on
# What the family takes: a program holds a sequence's residual in registers and its heads' keys in shared memory.
LIMITS = [("seq_len", 128), ("d_model", 128), ("head_dim", 128), ("ffn_dim", 512)]
# Rows of a thin block: the least a tensor-core tile takes.
BLOCK_ROWS = 16
# Columns of heads side by side, and hidden columns of one tile, up to which a kernel takes them in one step.
STEP_COLUMNS = 128
# Columns of a tile of narrow heads: the fewest a tensor core takes. Every head of a tile pays the tile's width.
PACKED_COLUMNS = 16


@dataclass(frozen=True)
class Room:
    """What a device offers the kernels.

    `units` is its multiprocessors, `shared_bytes` the shared memory one program may take. `sm90` says whether it runs
    the CUDA C++ kernels: only compute capability 9.0 does, where their compiler is installed.
    """

    units: int
    shared_bytes: int
    sm90: bool = False


H200 = Room(132, 227 * 1024, True)  # the device the configurations were measured on


@dataclass(frozen=True)
class ResidentConfig(ABC):
    """How one kernel runs one shape. A subclass is a kernel, an instance is a launch configuration of it."""

    kernel: ClassVar[str]  # the kernel's name, as reasons and records print it
    shape: Shape

    @classmethod
    @abstractmethod
    def try_plan(cls, shape: Shape, room: Room) -> Self | str:
        """Return the configuration for a shape the family supports, or one line that says why there is none."""

    @abstractmethod
    def predict_s(self, profile: Limits) -> float:
        """Return the predicted device seconds of one call, without the launch."""

    @property
    def flags(self) -> int:
        """int32 flags of a launch."""
        return 0

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Device bytes a built forward holds: packed weights, scratch, flags."""

    @abstractmethod
    def pack(self, model: nn.Module, operands: torch.dtype) -> dict[str, Tensor]:
        """Return the model's weights as the kernel reads them."""

    @abstractmethod
    def binder(self, weights: dict[str, Tensor], operands: torch.dtype, eps: float, units: int) -> Bind:
        """Return what binds the launch for packed weights on a device of so many multiprocessors."""

    def compile_ahead(self, operands: torch.dtype) -> int:
        """Compile the kernel into the cache on the disk, without a GPU; return how many variants that can be done for.

        It is none for Triton's kernels, which are compiled for the device at hand.
        """
        return 0

    @classmethod
    @abstractmethod
    def cases(cls) -> Iterable[tuple[Shape, Architecture, Room]]:
        """Return shapes and devices for the resource gate: one for each configuration that differs in code.

        The gate compiles whichever kernel takes such a shape there.
        """

    @abstractmethod
    def case(self, architecture: Architecture) -> KernelCase:
        """Return this configuration as the resource gate compiles it."""


def unit_seconds(shape: Shape, profile: Limits, flops: int, specials: int) -> float:
    """Return the seconds one multiprocessor takes for tensor-core FLOP and exponentials at its full rates."""
    seconds = flops * profile.units / profile.matmul_flops(operand_name(shape, "cuda"))
    return seconds + specials * profile.units / profile.special_per_s


@dataclass(frozen=True)
class Layout:
    """Padded sizes of the packed buffers, in elements; powers of two where Triton's tiles need them."""

    width: int  # d_model padded to a power of two, 16 at least
    tiles: int  # head tiles: one head each, or `pack` narrow heads side by side
    head: int  # columns of a tile: head_dim padded likewise, or pack x head_dim
    pack: int
    ffn: int  # ffn_dim padded to a multiple of the feed-forward tile
    layers: int

    @property
    def heads_width(self) -> int:
        """Columns of all tiles side by side."""
        return self.tiles * self.head

    @property
    def layer_weights(self) -> int:
        """Operand elements of one layer."""
        return self.width * (4 * self.heads_width + 2 * self.ffn)

    @property
    def layer_biases(self) -> int:
        """Float32 elements of one layer: q bias, output bias, ffn_out bias, ffn_in bias."""
        return self.heads_width + 2 * self.width + self.ffn


def padded(size: int) -> int:
    """Return the next power of two, 16 at least: the least a tensor-core tile takes."""
    return max(16, 1 << (size - 1).bit_length())


def packable(shape: Shape) -> int:
    """Return how many adjacent heads a tile can take without padding, 1 where padding is needed anyway."""
    pack, rest = divmod(PACKED_COLUMNS, shape.head_dim)
    return pack if pack > 1 and rest == 0 and shape.num_heads % pack == 0 else 1


def layout_of(shape: Shape, ffn_tile: int, pack: int = 1) -> Layout:
    """Return the packed layout of a shape."""
    return Layout(
        width=padded(shape.d_model),
        tiles=shape.num_heads // pack,
        head=padded(shape.head_dim * pack),
        pack=pack,
        ffn=-(-shape.ffn_dim // ffn_tile) * ffn_tile,
        layers=shape.num_layers,
    )


def row_blocks(shape: Shape) -> int:
    """Return the blocks of 16 query rows of a batch."""
    return shape.batch_size * -(-shape.seq_len // BLOCK_ROWS)


def too_many_rows(shape: Shape, room: Room) -> str:
    """Return why thin blocks of rows do not pay, "" where a multiprocessor has at most one."""
    if shape.seq_len <= BLOCK_ROWS:
        return f"a sequence of {shape.seq_len} is one block of {BLOCK_ROWS} rows: nothing to split"
    if row_blocks(shape) > room.units:
        return f"{row_blocks(shape)} blocks of {BLOCK_ROWS} rows are more than {room.units} multiprocessors"
    return ""
