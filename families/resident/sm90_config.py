"""What the resident kernels in CUDA C++ share: sizes, their source, the launch, gate cases. No torch to plan."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar

from rooflane.families.lean.cost import HALF, SINGLE
from rooflane.families.resident.config import BLOCK_ROWS, H200, LIMITS, ResidentConfig, Room
from rooflane.families.resources.kernel_case import PROGRAM_BYTES, SM90, Architecture, CudaCase
from rooflane.shapes import Shape, load_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.families.runtime.bound import Bind, Launch

NO_SM90 = "needs compute capability 9.0 and the CUDA C++ compiler"
# Shared memory that a program and its own arrays may take together.
MOST_SHARED_BYTES = SM90.shared_bytes - PROGRAM_BYTES
IO_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
INCLUDE = re.compile(r'#include "([\w./]+)"\s*')


@dataclass(frozen=True)
class Sm90Config(ResidentConfig):
    """A launch of one CUDA C++ kernel for compute capability 9.0."""

    SOURCE: ClassVar[str]  # file beside the kernel's module
    FUNCTION: ClassVar[str]

    @property
    def ffn(self) -> int:
        """Hidden columns, zeros behind ffn_dim."""
        return -(-self.shape.ffn_dim // self.shape.d_model) * self.shape.d_model

    @property
    @abstractmethod
    def stages(self) -> int:
        """Tiles of a ring of weights."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Shared memory of a program that is asked for at launch; the kernel's own arrays come on top."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a program."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Device bytes of the packed weights, biases and final norm."""

    @property
    def scratch_words(self) -> int:
        """32-bit words that pass between programs through device memory."""
        return 0

    @property
    def held_bytes(self) -> int:
        return self.packed_bytes + (self.scratch_words + self.flags) * SINGLE

    @abstractmethod
    def programs(self, units: int) -> int:
        """Return the programs of a launch on a device of so many multiprocessors."""

    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Return the kernel's run-time sizes."""

    @abstractmethod
    def own_constants(self) -> dict[str, int]:
        """Return the compile-time sizes of this kernel alone."""

    @property
    @abstractmethod
    def case_name(self) -> str:
        """What tells the configuration from others of its kernel and sizes, in the resource record."""

    def constants(self, masked: bool, bfloat16: bool) -> dict[str, int]:
        """Return the kernel's compile-time sizes."""
        shape = self.shape
        return {
            "D": shape.d_model, "HEADS": shape.num_heads, "HD": shape.head_dim, "FFN": self.ffn,
            "MASKED": int(masked), "BF16": int(bfloat16), "IO": IO_KINDS[shape.dtype],
        } | self.own_constants()  # fmt: skip

    def source(self, masked: bool, bfloat16: bool) -> str:
        """Return the kernel's translation unit."""
        return translation_unit(self.SOURCE, self.constants(masked, bfloat16))

    def binder(self, weights: dict[str, Tensor], operands: torch.dtype, eps: float, units: int) -> Bind:
        """Return what binds the one launch, which compiles the kernel where no cache has it."""
        import torch

        from rooflane.families.runtime.cuda_kernel import compile_cubin, load_kernel

        held = [weights["tiles"], weights["floats"]]
        if self.flags:
            # Ordinary tensors even when the first call comes in inference mode.
            with torch.inference_mode(False):
                held.append(held[0].new_empty(self.scratch_words, dtype=torch.int32))
                held.append(held[0].new_zeros(self.flags, dtype=torch.int32))
        fixed = (*held, *self.sizes(), eps)

        def bind(x: Tensor, mask: Tensor | None, out: Tensor) -> Launch:
            text = self.source(mask is not None, operands is torch.bfloat16)
            cubin = compile_cubin(text, f"sm_{SM90.number}a")
            grid = self.programs(units)
            return load_kernel(cubin, self.FUNCTION, grid, self.threads, self.shared_bytes, fixed, x.device)

        return bind

    def compile_ahead(self, operands: torch.dtype) -> int:
        import torch

        from rooflane.families.runtime.cuda_kernel import compile_cubin

        sources = [self.source(masked, operands is torch.bfloat16) for masked in (True, False)]
        for source in sources:
            compile_cubin(source, f"sm_{SM90.number}a")
        return len(sources)

    @classmethod
    def cases(cls) -> Iterable[tuple[Shape, Architecture, Room]]:
        """Return the shipped shapes that the family takes, on the H200, which the kernels are made for."""
        for table in ("published.csv", "neighbours.csv"):
            for shape in load_shapes(files("rooflane.shapes") / table):
                if all(getattr(shape, name) <= limit for name, limit in LIMITS):
                    yield shape, SM90, H200

    def case(self, architecture: Architecture) -> CudaCase:
        """Return this configuration as the resource gate compiles it: with a mask and the model's usual operands."""
        shape = self.shape
        name = f"resident {self.kernel} d{shape.d_model} h{shape.num_heads}x{shape.head_dim} f{self.ffn} {shape.dtype}"
        source = self.source(masked=True, bfloat16=shape.dtype == "bfloat16")
        return CudaCase(f"{name} {self.case_name}".strip(), architecture, source, self.threads, self.shared_bytes)


@dataclass(frozen=True)
class FragmentConfig(Sm90Config):
    """A kernel whose warps read tiles of `mma.sync` fragments: a product's weights and its bias each."""

    @property
    def tile_bytes(self) -> int:
        """Bytes of a weight tile with its bias."""
        return self.shape.d_model * (self.shape.d_model * HALF + SINGLE)

    @property
    def layer_tiles(self) -> int:
        """Weight tiles of a layer."""
        return 4 + 2 * self.ffn // self.shape.d_model

    @property
    def packed_bytes(self) -> int:
        """Device bytes of the packed weights, the final norm included."""
        return self.shape.num_layers * self.layer_tiles * self.tile_bytes + 2 * self.shape.d_model * SINGLE

    @property
    def sequence_blocks(self) -> int:
        """Blocks of rows of a sequence."""
        return -(-self.shape.seq_len // BLOCK_ROWS)

    def pack(self, model: nn.Module, operands: torch.dtype) -> dict[str, Tensor]:
        """Return `tiles` (uint8), biases among them, and `floats` (float32): the final norm."""
        from rooflane.families.resident.pack import pack_fragments

        return pack_fragments(model, self.ffn, operands)


def translation_unit(
    name: str, sizes: Mapping[str, int | str], package: str = "rooflane.families.resident.kernels"
) -> str:
    """Return a kernel's file of a package with its sizes defined and our own files inlined.

    An included file is one of the package, or `package/file` for another package of the families.
    NVRTC gets no include path, and the cache's key is a digest of this text. `#line` keeps a compiler's message at the
    file and line that it is about.
    """
    defines = "".join(f"#define {size} {value}\n" for size, value in sizes.items())
    return defines + "".join(_inlined(name, set(), package))


def _inlined(name: str, seen: set[str], package: str) -> Iterator[str]:
    """Yield the lines of a file, each file it includes in the place of the first `#include` of it."""
    seen.add(name)
    yield f'#line 1 "{name}"\n'
    *folders, file = name.split("/")
    home = ".".join(["rooflane.families", *folders]) if folders else package
    text = (files(home) / file).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        include = INCLUDE.fullmatch(line)
        if include is None:
            yield line
            continue
        if include[1] not in seen:
            yield from _inlined(include[1], seen, home)
        yield f'#line {number + 1} "{name}"\n'
