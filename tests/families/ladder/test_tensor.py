"""The tensor-core rungs without a GPU: where operands lie in shared memory, as the hardware's rules read it.

The rules are those of the PTX ISA: the 128-byte swizzle flips bits 4 to 6 of an address by bits 7 to 9; a K-major
descriptor holds the address of the first element, and the distance of eight rows.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from importlib.resources import files

import numpy as np
import pytest
import torch

from rooflane.families.ladder import tensor_map
from rooflane.families.ladder.gemm.tensor import (
    BOX_ROWS,
    CONSUMER_WARPS,
    LINE,
    OPERANDS,
    READ_COLUMNS,
    READ_ROWS,
    TENSOR,
    PersistentRung,
    persistent,
    swizzled,
)
from rooflane.families.resources.resource_gate import nvrtc_version
from rooflane.families.runtime.cuda_kernel import compiler_report

CPU = torch.device("cpu")
needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="needs NVRTC: pip install 'rooflane[hopper]'")
DEPTH = LINE // 2  # operands of a row of a tile
PERSISTENT = [rung for rung in TENSOR if isinstance(rung, PersistentRung)]
SOURCE = {file.name: file.read_text() for file in files("rooflane.families.ladder.gemm").iterdir() if file.is_file()}


def hardware_swizzle(address: np.ndarray) -> np.ndarray:
    return address ^ (address >> 7 & 7) << 4


def staged(tile: np.ndarray) -> np.ndarray:
    """Return a tile [rows, 64] as the kernels stage it, 16 bytes at a time."""
    rows = len(tile)
    memory = np.full(rows * DEPTH, -1, dtype=tile.dtype)
    for row in range(rows):
        for chunk in range(8):
            at = swizzled(row, chunk) // 2
            memory[at : at + 8] = tile[row, chunk * 8 : chunk * 8 + 8]
    return memory


def numbered(rows: int, columns: int = DEPTH) -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns)


def constant(file: str, pattern: str) -> int:
    (found,) = re.findall(pattern, SOURCE[file])
    return eval(found, {"LINE": LINE})


def test_staging_writes_what_the_copy_engine_would():
    """The engine writes element (r, d) of a box at the swizzled address of its line-by-line place."""
    tile = numbered(256)
    row, depth = np.divmod(np.arange(tile.size), DEPTH)
    written = np.empty(tile.size, dtype=int)
    written[hardware_swizzle(row * LINE + depth * 2) // 2] = tile.ravel()
    assert (staged(tile) == written).all()


@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize("base", [0, 1024, 5 * 1024])
def test_a_descriptor_reads_the_rows_and_depths_that_it_names(rows, base):
    high = constant("warpgroup.cuh", r'#define HIGH_WORD "(\w+)"')
    next_slice = constant("warpgroup.cuh", r"NEXT_SLICE = ([^;]+);") << 4
    eight_rows = (high & 0x3FFF) << 4
    assert high >> 30 == 1  # the 128-byte swizzle
    tile = numbered(rows)
    memory = np.concatenate([np.full(base // 2, -1), staged(tile)])
    row, depth = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    for part in range(DEPTH // 16):
        start = base + part * next_slice
        address = start + row // 8 * eight_rows + row % 8 * LINE + depth * 2
        assert (memory[hardware_swizzle(address) // 2] == tile[:, part * 16 : part * 16 + 16]).all()


def test_the_second_rows_of_a_warpgroup_lie_64_rows_further():
    next_rows = constant("warpgroup.cuh", r"NEXT_ROWS = ([^;]+);") << 4
    tile = numbered(128)
    memory, row = staged(tile), np.arange(64)
    address = next_rows + row // 8 * 1024 + row % 8 * LINE
    assert (memory[hardware_swizzle(address) // 2] == tile[64:, 0]).all()


def test_a_descriptor_holds_every_address_of_shared_memory():
    """14 bits of 16 bytes reach 256 KiB; the field above, 16 bits up, must not be met."""
    assert max(rung.shared_bytes for rung in TENSOR) >> 4 < 1 << 14


def matrices(memory: np.ndarray, word, offset: int) -> np.ndarray:
    """Return the registers [4, lane, 2] of an ldmatrix.x4 whose lanes give the addresses of eight rows each."""
    found = np.empty((4, 32, 2), dtype=memory.dtype)
    for matrix in range(4):
        for lane in range(32):
            at = offset + word(matrix * 8 + lane // 4) * 2 + lane % 4 * 2
            found[matrix, lane] = memory[at : at + 2]
    return found


def test_ldmatrix_reads_the_operands_of_mma_in_the_order_of_its_registers():
    """m16n8k16: lane l holds rows l / 4 and l / 4 + 8 of A, column l / 4 of W, at depths l % 4 * 2 and 8 further."""
    a, w = numbered(16), numbered(16) + 5000
    left = matrices(staged(a), READ_ROWS.word, 0)
    right = matrices(staged(w), READ_COLUMNS.word, 0)
    for lane in range(32):
        depth = lane % 4 * 2
        for register, (row, more) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            assert (left[register, lane] == a[lane // 4 + row, depth + more : depth + more + 2]).all()
        for register, (column, more) in enumerate([(0, 0), (0, 8), (8, 0), (8, 8)]):
            assert (right[register, lane] == w[lane // 4 + column, depth + more : depth + more + 2]).all()


def test_the_output_is_staged_as_the_copy_engine_reads_it():
    """A warp's sums of 16 x 64: register 4 j + 2 i + e of lane l is row l / 4 + 8 i, column 8 j + l % 4 * 2 + e."""
    box = numbered(BOX_ROWS)
    memory = np.full(box.size, -1)
    for pair in range(0, 8, 2):  # an stmatrix.x4 stores columns 8 pair to 8 pair + 15
        for matrix in range(4):
            i, j = matrix % 2, pair + matrix // 2
            for lane in range(32):
                row, column = lane // 4 + 8 * i, 8 * j + lane % 4 * 2
                # The lane that gives the address of this lane's row of the matrix.
                giver = matrix * 8 + lane // 4
                at = swizzled(giver % 16, pair + giver // 16) // 2 + lane % 4 * 2
                memory[at : at + 2] = box[row, column : column + 2]
    assert (memory == staged(box)).all()


@pytest.mark.parametrize("rung", TENSOR, ids=lambda rung: rung.name)
def test_the_parts_of_shared_memory_fill_it(rung):
    staging = 0
    if isinstance(rung, PersistentRung) and rung.result != "float32":
        # A stream takes two boxes where an output takes one, and a barrier.
        place = BOX_ROWS * LINE * 2 + 8 if rung.residual else BOX_ROWS * LINE
        staging = CONSUMER_WARPS * rung.boxes * place
    barriers = 2 * 8 * rung.stages if "UTMALDG" in rung.expected else 0
    assert rung.shared_bytes == rung.ring_bytes + staging + barriers
    assert rung.shared_bytes <= 227 * 1024
    # Tiles start at multiples of 1,024 bytes, or the swizzle would not be a function of the row.
    assert all(side * LINE % 1024 == 0 for side in rung.tile[:2])


@pytest.mark.parametrize("rung", TENSOR, ids=lambda rung: rung.name)
def test_rows_of_other_than_16_bytes_are_refused_by_name(rung):
    multiple = 16 // getattr(torch, rung.operand).itemsize
    assert rung.refuse(1, 8, multiple) is None
    assert rung.refuse(5, 12, 64) == "N must be a multiple of 8, not 12"
    assert rung.refuse(5, 16, 3 * multiple + 1) == f"K must be a multiple of {multiple}, not {3 * multiple + 1}"


@pytest.mark.parametrize("rung", PERSISTENT, ids=lambda rung: rung.name)
def test_a_launch_has_whole_clusters_and_no_more_than_the_device_or_the_output(rung):
    assert rung.grid(132, 1, 8, 8) == rung.cluster
    assert rung.grid(132, 1 << 14, 1 << 14, 64) == 132
    assert rung.grid(131, 1 << 14, 1 << 14, 64) == 131 // rung.cluster * rung.cluster


@pytest.mark.parametrize("name", sorted(OPERANDS))
def test_a_map_tells_the_driver_the_matrix_and_the_box(name, monkeypatch):
    """A stand-in for the driver's function reads its arguments as the driver would."""
    told, size = [], OPERANDS[name].size

    def driver(room, kind, rank, address, sizes, strides, box, steps, *modes):
        assert room % 64 == 0  # or the driver refuses
        words = ctypes.c_uint64.from_address, ctypes.c_uint32.from_address
        told.append((kind, rank, address, *(words[0](sizes + 8 * i).value for i in range(2)), words[0](strides).value))
        told.append((*(words[1](at + 4 * i).value for at in (box, steps) for i in range(2)), *modes))
        ctypes.memset(room, 7, 128)
        return len(told) > 2

    word, pointer = ctypes.c_uint32, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, word, word, *[pointer] * 5, *[word] * 4)
    monkeypatch.setattr(tensor_map, "_encoder", lambda: kind(driver))
    matrix = torch.zeros(5, 48).to(getattr(torch, name))
    assert tensor_map.encode_map(matrix, 96) == bytes([7]) * 128
    # The driver's number of the type; widths before heights; then no interleaving, the swizzle, the L2's bytes, zeros.
    number = {"float16": 6, "bfloat16": 9, "float32": 7, "float8_e4m3fn": 0}[name]
    assert told == [(number, 2, matrix.data_ptr(), 48, 5, 48 * size), (128 // size, 96, 1, 1, 0, 3, 3, 0)]
    with pytest.raises(RuntimeError, match=r"refused a tensor map of \[5, 48\]"):
        tensor_map.encode_map(matrix, 96)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("rung", TENSOR, ids=lambda rung: rung.name)
def test_products_are_not_serialized(rung):
    """The assembler says so where it must wait after each product, which costs about half of the rate."""
    assert "serialized" not in compiler_report(rung.source(), "sm_90a")


def test_the_folded_norm_is_the_norm():
    """rstd (a . w - mean colsum(w)) from the moments that the kernel reads, against layer_norm in float64."""
    rung = dataclasses.replace(persistent("norm", 256, "", 1.0, "", norm=True), operand="float64")
    drawn = [one.double() for one in rung.draw(CPU, 5, 16, 24)]
    a, w, moments, column_sums, inverses = (one.double() for one in rung.prepare(drawn))
    assert inverses.eq(1).all()
    total, squares = moments.sum(0).T
    mean = total / 24
    rstd = (squares / 24 - mean.square() + 1e-5).rsqrt()
    folded = rstd[:, None] * (a @ w.T - mean[:, None] * column_sums)
    assert torch.allclose(folded, rung.truth(drawn), atol=1e-5)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu tanh"])
def test_the_truth_of_an_epilogue_is_its_definition(activation):
    rung = persistent("all", 128, "", 1.0, "", bias=True, activation=activation, residual=True, row_sums=True)
    drawn = rung.draw(CPU, 4, 136, 16)
    a, w, bias, residual = (one.double() for one in drawn)
    x = a @ w.T + bias
    by_name = {
        "none": x,
        "relu": x * (x > 0),
        "gelu": x * (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu tanh": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    }
    assert torch.allclose(rung.truth(drawn), by_name[activation] + residual)
    # Two tiles of 128 columns hold 136: the sums of each row come in two parts.
    assert rung.prepare(drawn)[-1].shape == (2, 4, 2)
