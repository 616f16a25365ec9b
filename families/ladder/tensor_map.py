"""Describe a tensor in device memory to the copy engine (TMA), for kernels that copy boxes of it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

MAP_BYTES = 128
MAP_ALIGNMENT = 64  # which the driver asks for; an object of the bindings lies at 16
LINE_BYTES = 128  # a row of a box, unless it is said otherwise


def encode_map(tensor: Tensor, rows: int, columns: int | None = None) -> bytes:
    """Return the tensor map of a tensor whose boxes are `rows` rows of so many columns, by default of 128 bytes.

    `tensor` [R, C] or [B, R, C] is contiguous, of float16, bfloat16, float32 or float8 (e4m3); its rows are a multiple
    of 16 bytes. A row of a box has 32, 64 or 128 bytes and is swizzled by as many. What a box holds outside of its
    matrix is read as zero and not written. Raises `RuntimeError` where the driver refuses.
    """
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    # The copy engine moves bytes as bytes: float8 has no type of its own.
    types = {
        "float16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bfloat16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, "float8_e4m3fn": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }  # fmt: skip
    size = tensor.element_size()
    columns = columns or LINE_BYTES // size
    swizzle = driver.CUtensorMapSwizzle
    swizzles = {
        32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B, 64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    }  # fmt: skip
    # The innermost dimension comes first, and its stride is not asked for.
    rank, sizes, strides = tensor.dim(), tensor.shape[::-1], tensor.stride()[-2::-1]
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(room) % MAP_ALIGNMENT
    status = _encoder()(
        ctypes.addressof(room) + start,
        int(types[str(tensor.dtype)[6:]]),
        rank,
        tensor.data_ptr(),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * size for stride in strides)),
        (ctypes.c_uint32 * rank)(columns, rows, *[1] * (rank - 2)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(swizzles[columns * size]),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if status:
        raise RuntimeError(f"the driver refused a tensor map of {list(tensor.shape)} with status {status}")
    return room.raw[start : start + MAP_BYTES]


@cache
def _encoder() -> Any:
    """Return the driver's function. Its map must be aligned, which the bindings' own object is not."""
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    types = (pointer, word, word, pointer, pointer, pointer, pointer, pointer, word, word, word, word)
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(("cuTensorMapEncodeTiled", ctypes.CDLL("libcuda.so.1")))
