"""The rungs on tensor cores: operands of 16 bits, sums in float32.

cuBLAS reaches 745 TFLOP/s at 4096 x 4096 x 4096 on an H200. The tensor cores do 4,096 FLOPs a cycle and SM, which is
1,070 TFLOP/s at 1.98 GHz. At full load the power limit holds the clock below that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooflane.families.ladder.banks import Access
from rooflane.families.ladder.rungs import EPSILON, WORD, GemmRung, draw_normal

if TYPE_CHECKING:
    from torch import Tensor, device

LINE = 128  # bytes of a row of a tile
CHUNK = 16  # bytes that the swizzle moves together
BARRIER = 8
BOX_ROWS, CONSUMER_WARPS = 16, 8
SHARED_BYTES = 227 << 10  # of a block, compute capability 9.0
# The boxes that a warp stages, by the columns of a tile and whether warpgroups take turns. In turns, a box that waits
# for the copy engine waits behind the other warpgroup's operands, so that all or half of a tile is staged.
BOXES = {(256, False): 2, (192, False): 1, (128, False): 2, (192, True): 3, (128, True): 4}
ACTIVATIONS = ("none", "relu", "gelu", "gelu tanh", "gelu pairs")


def swizzled(row: int, chunk: int) -> int:
    """Return the byte of a tile at which a chunk of a row lies."""
    return row * LINE + (chunk ^ row % 8) * CHUNK


def _word(row: int, chunk: int) -> int:
    return swizzled(row, chunk) // WORD


STAGE = Access("stage a tile", lambda lane: _word(lane // 8, lane % 8), 4)
READ_ROWS = Access("read rows", lambda lane: _word(lane % 16, lane // 16), 4)
STAGE_OUTPUT = Access("stage the output", READ_ROWS.word, 4)
READ_COLUMNS = Access("read columns", lambda lane: _word(lane // 16 * 8 + lane % 8, lane // 8 % 2), 4)


@dataclass(frozen=True)
class Operand:
    """A type of the operands: its number in the kernels, its bytes, its mode, the output's type and the error's bound.

    The operands and the output are rounded, which is 3.6e-4 in fp16; the bound leaves room for outputs of few elements.
    """

    number: int
    size: int
    mode: str
    result: str
    bound: float


OPERANDS = {
    "float16": Operand(0, 2, "fp16", "float16", 1e-3),
    "bfloat16": Operand(1, 2, "bf16", "bfloat16", 8e-3),
    # The tensor cores cut a float32 to 11 bits; they do not round it.
    "float32": Operand(2, 4, "TF32", "float32", 1.5e-3),
    "float8_e4m3fn": Operand(3, 1, "FP8", "float16", 6e-2),
}
MOST_FLOAT8 = 448.0


@dataclass(frozen=True)
class TensorRung(GemmRung):
    """A product on tensor cores. Rows are copied 16 bytes at a time, so that N and K are multiples of eight.

    `stages` are the tiles of the ring. Blocks take the output in bands of `group` rows of tiles.
    """

    operand: str = "float16"
    result: str = "float16"
    mode: str = "fp16"
    bound: float = OPERANDS["float16"].bound
    multiples: tuple[int, int, int] = (1, 8, 8)
    stages: int = 4
    group: int = 8

    @property
    def ring_bytes(self) -> int:
        """Bytes of the tiles in shared memory."""
        return self.stages * (self.tile[0] + self.tile[1]) * LINE

    def defines(self) -> dict[str, int | str]:
        own: dict[str, int | str] = {
            "OPERAND": OPERANDS[self.operand].number, "STAGES": self.stages, "GROUP": self.group,
        }  # fmt: skip
        return own | super().defines()


@dataclass(frozen=True)
class RingRung(TensorRung):
    """A product whose operands the copy engine brings."""

    def arguments(self, inputs: Sequence[Tensor], out: Tensor, *scratch: Tensor) -> tuple[Any, ...]:
        from rooflane.families.ladder.tensor_map import encode_map

        maps = [encode_map(matrix, rows) for matrix, rows in zip(inputs, self.tile, strict=False)]
        return (*maps, out, *self.sizes(inputs))


@dataclass(frozen=True)
class PersistentRung(TensorRung):
    """A product by persistent blocks, with what is done to it before it is stored.

    Inputs behind A and W, each only where it is asked for, in float32 unless said otherwise: `bias` [N]; with `norm`,
    which stands for a LayerNorm of the rows of A, moments [moment_tiles, M, 2] (sum and sum of squares of parts of a
    row of A) and column sums of W [N]; with `norm` or `residual`, inverses [M]; with `residual` a stream [2, M, N] in
    float16; with `row_sums` [tiles of columns, M, 2], which the launch writes: the moments of the output's rows; for
    float8, the scales of the rows of A [M] and of W [N].

    A stream is x times its row's inverse, a power of two: the float16 nearest to it, and the float16 nearest to what is
    left, which together have 22 bits. With `residual` the output is such a stream of the same inverses.
    """

    cluster: int = 2
    pingpong: bool = False
    boxes: int = 2
    bias: bool = False
    activation: str = "none"
    norm: bool = False
    moment_tiles: int = 1
    epsilon: float = EPSILON
    residual: bool = False
    row_sums: bool = False

    @property
    def scales(self) -> bool:
        """Whether rows of the operands have scales."""
        return self.operand == "float8_e4m3fn"

    def grid(self, units: int, m: int, n: int, k: int) -> int:
        rows, columns, _ = self.tile
        tiles = -(-m // (rows * self.cluster)) * -(-n // columns)
        return min(units // self.cluster, tiles) * self.cluster

    def input_shapes(self, m: int, n: int, k: int) -> list[tuple[int, ...]]:
        shapes = [
            *((m, k), (n, k), (n,), (self.moment_tiles, m, 2), (n,), (m,), (2, m, n)),
            *((-(-n // self.tile[1]), m, 2), (m,), (n,)),
        ]
        return [shape for shape, given in zip(shapes, self._given(), strict=True) if given]

    def input_types(self) -> Iterable[str]:
        types = [self.operand] * 2 + ["float32"] * 4 + [self.result] + ["float32"] * 3
        return [name for name, given in zip(types, self._given(), strict=True) if given]

    def output_shape(self, m: int, n: int, k: int) -> tuple[int, ...]:
        return (2, m, n) if self.residual else (m, n)

    def value(self, out: Tensor) -> Tensor:
        return out.double().sum(0) if self.residual else out

    def _given(self) -> tuple[bool, ...]:
        """Return which inputs there are: all that the class names, in their order."""
        norm, residual, scales = self.norm, self.residual, self.scales
        return True, True, self.bias, norm, norm, norm or residual, residual, self.row_sums, scales, scales

    def draw(self, device: device, m: int, n: int, k: int) -> list[Tensor]:
        """Return A, W and, where asked for, the bias and the residual."""
        shapes = [(m, k), (n, k), *[(n,)] * self.bias, *[(m, n)] * self.residual]
        return [draw_normal(shape, device, seed) for seed, shape in enumerate(shapes)]

    def prepare(self, drawn: Sequence[Tensor]) -> list[Tensor]:
        import torch

        matrices = list(drawn[:2])
        scales = [one.abs().amax(1).clamp_min(1e-30) / MOST_FLOAT8 for one in matrices] if self.scales else []
        for index, scale in enumerate(scales):
            matrices[index] = matrices[index] / scale[:, None]
        a, w = (one.to(getattr(torch, self.operand)) for one in matrices)
        given = [a, w, *drawn[2 : 2 + self.bias]]
        if self.norm:
            wide = a.float()
            given += [torch.stack([wide.sum(1), wide.square().sum(1)], 1)[None], w.float().sum(1)]
        if self.norm or self.residual:
            given.append(drawn[0].new_ones(a.shape[0]))
        if self.residual:
            high = drawn[-1].half()
            given.append(torch.stack([high, (drawn[-1] - high.float()).half()]))
        if self.row_sums:
            given.append(drawn[0].new_zeros(-(-w.shape[0] // self.tile[1]), a.shape[0], 2))
        return given + scales

    def truth(self, drawn: Sequence[Tensor]) -> Tensor:
        from torch.nn import functional

        a, w, *more = (tensor.double() for tensor in drawn)
        if self.norm:
            a = functional.layer_norm(a, a.shape[1:], eps=EPSILON)
        out = a @ w.T
        if self.bias:
            out = out + more.pop(0)
        if self.activation == "relu":
            out = out.relu()
        elif self.activation != "none":
            out = functional.gelu(out, approximate="tanh" if self.activation == "gelu tanh" else "none")
        return out + more[0] if self.residual else out

    def refuse(self, m: int, n: int, k: int) -> str | None:
        if self.norm and self.scales:
            return "a norm is not folded into operands with scales"
        if self.residual and self.operand != "float16":
            return "a stream is of float16, as its operands must be"
        return super().refuse(m, n, k)

    def arguments(self, inputs: Sequence[Tensor], out: Tensor, *scratch: Tensor) -> tuple[Any, ...]:
        from rooflane.families.ladder.tensor_map import encode_map

        rows, columns, _ = self.tile
        maps = [encode_map(inputs[0], rows), encode_map(inputs[1], columns // self.cluster)]
        left = iter(inputs[2:])
        given = [next(left) if there else None for there in self._given()[2:]]
        bias, moments, column_sums, inverses, residual, sums, *scales = given
        direct = self.result == "float32"  # the copy engine stores outputs of 16 bits
        # What the copy engine stores, and what it reads beside the operands. The kernel does not read an unused map.
        boxes: list[Tensor] = [] if direct else [out] if residual is None else [*out, *residual]
        maps += [encode_map(matrix, BOX_ROWS) for matrix in boxes]
        maps += maps[:1] * (6 - len(maps))
        pointers = (bias, column_sums, moments, inverses, out if direct else None, sums, *scales)
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in pointers)
        return (*maps, struct.pack("<8Qif", *addresses, self.moment_tiles, self.epsilon), *self.sizes(inputs))

    def defines(self) -> dict[str, int | str]:
        return {
            "CLUSTER": self.cluster, "PINGPONG": int(self.pingpong), "BOXES": self.boxes, "BIAS": int(self.bias),
            "ACTIVATION": ACTIVATIONS.index(self.activation), "NORM": int(self.norm), "SCALES": int(self.scales),
            "RESIDUAL": int(self.residual), "FLOAT_OUT": int(self.result == "float32"),
            "ROW_SUMS": int(self.row_sums),
        } | super().defines()  # fmt: skip


def persistent(
    name: str, columns: int, idea: str, predicted: float, reason: str, operand: str = "float16", **more: Any
) -> PersistentRung:
    """Return a persistent rung whose tiles have so many columns: as many tiles in its ring as shared memory holds.

    A stream takes twice the places of an output, and a barrier each.
    """
    kind = OPERANDS[operand]
    direct = kind.result == "float32"
    residual = more.get("residual", False)
    boxes = 3 if residual and columns < 256 else BOXES[columns, more.get("pingpong", False)]
    place = BOX_ROWS * LINE * (1 + residual) + BARRIER * residual
    staging = 0 if direct else CONSUMER_WARPS * boxes * place
    stage = (128 + columns) * LINE + 2 * BARRIER
    stages = (SHARED_BYTES - staging) // stage
    return PersistentRung(
        name=name,
        idea=idea,
        predicted=predicted,
        reason=reason,
        file="persistent.cu",
        kernel="gemm_persistent",
        threads=384,
        tile=(128, columns, LINE // kind.size),
        registers=168,
        blocks=1,
        expected=("QGMMA" if kind.size == 1 else "HGMMA", "UTMALDG", "USETMAXREG")
        + (() if direct else ("UTMASTG", "STSM")),
        shared_bytes=stages * stage + staging,
        stages=stages,
        boxes=boxes,
        accesses=() if direct else (STAGE_OUTPUT,),
        operand=operand,
        result=kind.result,
        mode=kind.mode,
        bound=kind.bound,
        multiples=(1, 8, 16 // kind.size),
        **more,
    )


TENSOR = (
    TensorRung(
        name="mma sync",
        idea="tensor cores by mma.sync: a warp holds 64 x 64 sums; ldmatrix reads swizzled tiles",
        predicted=420.0,
        reason="mma.sync reaches 62 % of the tensor cores' rate; barriers take a third of that",
        file="mma_sync.cu",
        kernel="gemm_mma_sync",
        threads=128,
        tile=(128, 128, 64),
        stages=3,
        shared_bytes=3 * 256 * LINE,
        registers=255,
        blocks=2,
        expected=("HMMA", "LDSM", "LDGSTS"),
        accesses=(STAGE, READ_ROWS, READ_COLUMNS),
    ),
    TensorRung(
        name="wgmma",
        idea="a warpgroup multiplies 64 x 256 from shared memory; the threads still copy",
        predicted=520.0,
        reason="a tile of 128 x 256 asks the L2 for 48 bytes a cycle at full rate; a barrier a step",
        file="wgmma_shared.cu",
        kernel="gemm_wgmma_shared",
        threads=256,
        tile=(128, 256, 64),
        shared_bytes=4 * 384 * LINE,
        registers=200,
        blocks=1,
        expected=("HGMMA", "LDGSTS"),
        accesses=(STAGE,),
    ),
    RingRung(
        name="TMA ring",
        idea="one thread asks the copy engine for tiles; full and empty barriers in place of those of the block",
        predicted=600.0,
        reason="no barrier of the block; start and end of a tile are not overlapped: 3,000 cycles of 70,000",
        file="tma_ring.cu",
        kernel="gemm_tma_ring",
        threads=288,
        tile=(128, 256, 64),
        shared_bytes=4 * (384 * LINE + 2 * BARRIER),
        registers=224,
        blocks=1,
        expected=("HGMMA", "UTMALDG", "SYNCS"),
    ),
    persistent(
        "persistent", 256, "a block an SM; the next tile is copied under this one's end; the copy engine stores", 650.0,
        "start and end of a tile cost 1,500 cycles of 67,000; the L2 still gives 48 bytes a cycle", cluster=1,
    ),
    persistent(
        "cluster", 256, "two blocks share the rows of W that they copy", 730.0,
        "32 bytes a cycle of the L2 in place of 48; then the power limit holds, as for cuBLAS",
    ),
    persistent(
        "ping-pong", 128, "two warpgroups take tiles in turn: the end of one under the products of the other", 690.0,
        "nothing of a tile's end shows, but products of 128 columns read a fifth more of shared memory", pingpong=True,
    ),
    persistent(
        "ping-pong 192", 192, "turns, with tiles of 192 columns", 640.0,
        "22 columns of tiles waste 3 %, and 704 tiles take six rounds where 512 take four", pingpong=True,
    ),
    persistent(
        "bias", 128, "the ping-pong rung, with a bias", 725.0, "64 loads a thread from the L1, 67,000 cycles a tile",
        pingpong=True, bias=True,
    ),
    persistent(
        "bias ReLU", 128, "a bias and a ReLU", 725.0, "one instruction an output more", pingpong=True, bias=True,
        activation="relu",
    ),
    persistent(
        "bias GELU", 128, "a bias and the exact GELU, by a polynomial", 685.0,
        "11 instructions an output take issue slots that the products leave free", pingpong=True, bias=True,
        activation="gelu",
    ),
    persistent(
        "bias tanh GELU", 128, "a bias and the GELU by tanh", 690.0,
        "two special functions an output: 4,100 cycles of 71,000 a tile", pingpong=True, bias=True,
        activation="gelu tanh",
    ),
    persistent(
        "bias GELU pairs", 128, "a bias and the exact GELU in pairs of float16", 690.0,
        "11 instructions a pair of outputs, at 4e-4 of the output", pingpong=True, bias=True, activation="gelu pairs",
    ),
    persistent(
        "residual", 128, "a bias and a residual stream of two float16, read and written by the copy engine", 650.0,
        "128 MB of the stream take 30 us of device memory, and half of it shows", pingpong=True, bias=True,
        residual=True,
    ),
    persistent(
        "row sums", 128, "the residual, and the sum and sum of squares of each row for the next norm", 640.0,
        "two multiply-adds an output more than the residual", pingpong=True, bias=True, residual=True, row_sums=True,
    ),
    persistent(
        "folded norm", 128, "LayerNorm of A's rows by two numbers a row behind the product", 715.0,
        "two multiply-adds an output, and the moments of 128 rows a tile", pingpong=True, bias=True, norm=True,
    ),
    persistent("bf16", 256, "the cluster rung in bfloat16", 740.0, "as fp16, at less power", operand="bfloat16"),
    persistent(
        "TF32", 256, "the cluster rung on float32 operands read as TF32", 370.0, "half the rate of fp16",
        operand="float32",
    ),
    persistent(
        "FP8 row scales", 256, "the cluster rung in float8 (e4m3), a scale for each row of A and of W", 1250.0,
        "twice the rate of fp16, less what the power limit takes", operand="float8_e4m3fn",
    ),
)  # fmt: skip
