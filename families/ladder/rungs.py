"""What a rung of a ladder is: one kernel with its idea, its prediction and its sizes. No torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

from rooflane.families.ladder.banks import Access
from rooflane.families.resident.sm90_config import translation_unit
from rooflane.families.resources.kernel_case import SM90, CudaCase

if TYPE_CHECKING:
    from torch import Tensor, device

# A kernel numbers the elements of a tile's rows by 32 bits, and a launch its blocks by 31.
MOST_DEPTH = 1 << 22
MOST_BLOCKS = (1 << 31) - 1
MOST_COLUMNS = 1 << 30
WORD = 4  # bytes of a float32
EPSILON = 1e-5  # of the norms
# The mean of a task's random inputs: one that shows what summing a long row, or its squares, costs in digits.
OFFSETS = {"sum": 0.1, "layernorm": 30.0}


@dataclass(frozen=True)
class Rung(ABC):
    """One kernel of a ladder.

    `predicted` is in `UNIT` on an H200 at the ladder's default size, and `reason` says how it was reckoned.
    `constants` become `#define`s of the source. `registers` is the most that a thread may take, and `blocks` the least
    that an SM must hold. The machine code must have each instruction of `expected`, given by the start of its name.
    `operand` is the type of the inputs and `result` that of the output; sums are float32. `mode` is the arithmetic of
    the products, which names the roof. `bound` is the largest normwise error against float64 that passes. `accesses`
    are the kernel's accesses of shared memory, as a simulator of its banks reads them.
    """

    LADDER: ClassVar[str]
    UNIT: ClassVar[str]

    name: str
    idea: str
    predicted: float
    reason: str
    file: str
    kernel: str
    threads: int
    registers: int
    blocks: int
    expected: tuple[str, ...]
    constants: Mapping[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    operand: str = "float32"
    result: str = "float32"
    mode: str = "fp32"
    bound: float = 1e-5
    accesses: tuple[Access, ...] = ()

    @abstractmethod
    def refuse(self, *sizes: int) -> str | None:
        """Return None when the rung computes these sizes, else the reason on one line."""

    @abstractmethod
    def grid(self, units: int, *sizes: int) -> int:
        """Return the blocks of a launch on a device of so many multiprocessors."""

    @abstractmethod
    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the sizes that the inputs have, in the order of the command line."""

    @abstractmethod
    def input_shapes(self, *sizes: int) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs."""

    def input_types(self) -> Iterable[str]:
        """Return the types of the inputs."""
        return repeat(self.operand)

    @abstractmethod
    def output_shape(self, *sizes: int) -> tuple[int, ...]:
        """Return the shape of the output."""

    @abstractmethod
    def draw(self, device: device, *sizes: int) -> list[Tensor]:
        """Return random inputs of a seed in float32, before `prepare`."""

    def prepare(self, drawn: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs as the kernel takes them."""
        import torch

        return [tensor.to(getattr(torch, name)) for tensor, name in zip(drawn, self.input_types(), strict=False)]

    @abstractmethod
    def truth(self, drawn: Sequence[Tensor]) -> Tensor:
        """Return the result of the drawn inputs in float64."""

    def value(self, out: Tensor) -> Tensor:
        """Return the result that an output stands for."""
        return out

    @abstractmethod
    def work(self, *sizes: int) -> float:
        """Return the work of a launch: its FLOPs, or the bytes that it must move."""

    def arguments(self, inputs: Sequence[Tensor], out: Tensor, *scratch: Tensor) -> tuple[Any, ...]:
        """Return the kernel's parameters: tensors, 32-bit ints and floats, or bytes that are passed as they are."""
        return (*inputs, out, *scratch, *self.sizes(inputs))

    def scratch_words(self, units: int, *sizes: int) -> int:
        """Return the 32-bit words, zero at first, that blocks share; each launch leaves what the next one needs."""
        return 0

    def defines(self) -> dict[str, int | str]:
        """Return the constants of the source."""
        return {"THREADS": self.threads, "BLOCKS": self.blocks, **self.constants}

    def source(self) -> str:
        """Return the translation unit."""
        return translation_unit(self.file, self.defines(), f"rooflane.families.ladder.{self.LADDER}")

    def case(self) -> CudaCase:
        """Return the kernel as the resource gate compiles it."""
        return CudaCase(f"ladder {self.LADDER} {self.name}", SM90, self.source(), self.threads, self.shared_bytes)


@dataclass(frozen=True)
class GemmRung(Rung):
    """A product C [M, N] = A [M, K] B [N, K]^T, all row-major: activations times a linear layer's weights.

    `tile` is what a block computes: its rows, its columns, and the depth of a step. M, N and K must be multiples of
    `multiples`.
    """

    LADDER = "gemm"
    UNIT = "TFLOP/s"

    tile: tuple[int, int, int] = (1, 1, 1)
    multiples: tuple[int, int, int] = (1, 1, 1)

    def refuse(self, m: int, n: int, k: int) -> str | None:
        if min(m, n, k) < 1:
            return f"M, N and K must be at least 1, not {m}, {n} and {k}"
        if k > MOST_DEPTH:
            return f"K must be at most {MOST_DEPTH}, not {k}"
        if self.tiles(m, n) > MOST_BLOCKS:
            return f"an output of {m} x {n} needs more than {MOST_BLOCKS} blocks"
        for name, size, multiple in zip("MNK", (m, n, k), self.multiples, strict=True):
            if size % multiple:
                return f"{name} must be a multiple of {multiple}, not {size}"
        return None

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of the output."""
        return -(-m // self.tile[0]) * -(-n // self.tile[1])

    def grid(self, units: int, m: int, n: int, k: int) -> int:
        return self.tiles(m, n)

    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        (m, k), n = inputs[0].shape, inputs[1].shape[0]
        return m, n, k

    def input_shapes(self, m: int, n: int, k: int) -> list[tuple[int, ...]]:
        return [(m, k), (n, k)]

    def output_shape(self, m: int, n: int, k: int) -> tuple[int, ...]:
        return m, n

    def draw(self, device: device, m: int, n: int, k: int) -> list[Tensor]:
        return [draw_normal(shape, device, seed) for seed, shape in enumerate(self.input_shapes(m, n, k))]

    def truth(self, drawn: Sequence[Tensor]) -> Tensor:
        return drawn[0].double() @ drawn[1].double().T

    def work(self, m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k

    def defines(self) -> dict[str, int | str]:
        rows, columns, depth = self.tile
        return {"BM": rows, "BN": columns, "BK": depth} | super().defines()


@dataclass(frozen=True)
class ReduceRung(Rung):
    """A reduction of each row of X [rows, columns], row-major; the sum is that of one row.

    `task` names what is computed: rungs of one task are compared with one call of the library. A block takes a row, or
    for a sum `per_block` elements; 0 stands for as many blocks as the device holds. A kernel that keeps rows in
    registers has `held` groups of four values a thread, and its blocks take as many rows as they hold.
    """

    LADDER = "reduce"
    UNIT = "TB/s"

    mode: str = "memory"
    task: str = "sum"
    per_block: int = 0
    held: int = 0

    @property
    def longest(self) -> int:
        """The most columns of a row."""
        return self.held * 4 * self.threads or MOST_COLUMNS

    def refuse(self, rows: int, columns: int) -> str | None:
        if min(rows, columns) < 1:
            return f"rows and columns must be at least 1, not {rows} and {columns}"
        if self.task == "sum" and rows > 1:
            return f"it sums one row, not {rows}"
        return f"a row has at most {self.longest} columns, not {columns}" if columns > self.longest else None

    def grid(self, units: int, rows: int, columns: int) -> int:
        if self.held:
            span = next(span for span in (32, 64, self.threads) if columns <= self.held * 4 * span)
            return -(-rows // (self.threads // span))
        if self.task != "sum":
            return rows
        return -(-columns // self.per_block) if self.per_block else units * self.blocks

    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(inputs[0].shape)

    def input_shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        return [(rows, columns)]

    def output_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows,) if self.task in ("sum", "argmax") else (rows, columns)

    def draw(self, device: device, rows: int, columns: int) -> list[Tensor]:
        return [draw_normal((rows, columns), device, 0).add_(OFFSETS.get(self.task, 0.0))]

    def truth(self, drawn: Sequence[Tensor]) -> Tensor:
        from torch.nn.functional import layer_norm, rms_norm

        x = drawn[0].double()
        if self.task == "sum":
            return x.sum(1)
        if self.task == "softmax":
            return x.softmax(1)
        if self.task == "argmax":
            return x.argmax(1)
        norm = layer_norm if self.task == "layernorm" else rms_norm
        return norm(x, x.shape[1:], eps=EPSILON)

    def defines(self) -> dict[str, int | str]:
        return {"EPSILON": f"{EPSILON}f", "HELD": self.held} | super().defines()

    def work(self, rows: int, columns: int) -> float:
        return WORD * (rows * columns + math.prod(self.output_shape(rows, columns)))

    def scratch_words(self, units: int, rows: int, columns: int) -> int:
        """Return a counter of blocks and a total, or a sum of each block."""
        return 2 + self.grid(units, rows, columns) * (not self.per_block) if self.task == "sum" else 0


def draw_normal(shape: tuple[int, ...], device: device, seed: int) -> Tensor:
    """Return normal random numbers in float32."""
    import torch

    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
