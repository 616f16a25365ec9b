"""The sm90 kernels on an H200: every element of a poisoned output against float64, whatever stands ragged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooflane.families.resident.build import room_of
from rooflane.families.resident.config import H200
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.families.resident.spec import choose
from rooflane.families.runtime.call_checks import operand_dtype
from rooflane.families.runtime.launch import raw_stream
from rooflane.shapes import Shape

pytestmark = pytest.mark.gpu

# Half-precision operands with float32 sums over two layers of values near 3, rounded to the model's dtype at the end.
TOLERANCES = {"float32": 8e-3, "float16": 1.2e-2, "bfloat16": 8e-2}
# Row blocks: rows of the last block left over, each width's warps, heads of one, two and four warps, a second pass of
# the feed-forward, padded hidden columns.
ROWBLOCKS = [
    Shape("ragged", 3, 100, 128, 4, 128, 2, True),
    Shape("one-head", 2, 33, 16, 1, 16, 2, True),
    Shape("three-heads", 5, 31, 48, 3, 200, 2, True),
    Shape("wide-head", 4, 64, 64, 1, 128, 2, True),
    Shape("six-heads", 3, 127, 96, 6, 96, 2, True),
    Shape("long-feed-forward", 2, 17, 128, 2, 512, 2, True),
]
# Row warps: a sequence over four programs, over two, in one, several a program; with pairs and without; causal and not;
# heads of 8 to 64 columns, taken one to four at a time; padded hidden columns; one token; more units than the device
# holds, the last one not full.
ROWWARPS = [
    Shape("token", 1, 1, 16, 1, 16, 1, True),
    Shape("over-four", 3, 100, 32, 4, 32, 3, True),
    Shape("over-four-both-ways", 5, 128, 64, 4, 200, 2, False),
    Shape("over-two", 64, 128, 32, 4, 32, 4, True),
    Shape("over-two-both-ways", 40, 65, 48, 2, 96, 2, False),
    Shape("heads-of-eight-over-two", 61, 127, 64, 8, 64, 2, True),
    Shape("whole", 100, 50, 64, 8, 512, 2, True),
    Shape("whole-both-ways", 131, 30, 32, 2, 32, 2, False),
    Shape("one-block", 90, 16, 64, 2, 64, 2, False),
    Shape("many", 150, 113, 64, 4, 64, 2, True),
    Shape("narrow", 300, 50, 16, 1, 16, 2, False),
    Shape("three-heads", 200, 45, 48, 3, 200, 2, True),
    Shape("one-wide-head", 200, 64, 64, 1, 128, 2, True),
    Shape("heads-of-eight-narrow", 257, 48, 48, 6, 192, 2, True),
    Shape("short-both-ways", 1099, 29, 64, 4, 64, 2, False),
    Shape("shortest", 1111, 7, 48, 2, 48, 2, True),
]
# Warpgroups: sequences of one band and of two, causal and not, heads a pair shares and heads each has its own, of 8
# to 128 columns, padded hidden columns; then several short sequences a block and more blocks than the device holds,
# the last block not full.
WARPGROUPS = [
    Shape("both-ways", 9, 77, 96, 3, 192, 2, False),
    Shape("square", 200, 64, 128, 2, 128, 2, True),
    Shape("wide-head", 140, 128, 128, 1, 64, 2, True),
    Shape("persistent", 150, 113, 128, 4, 128, 2, True),
    Shape("persistent-both-ways", 401, 100, 128, 2, 512, 2, False),
    Shape("heads-of-eight", 140, 128, 128, 16, 128, 2, True),
    Shape("heads-of-eight-short", 257, 48, 80, 10, 192, 2, True),
    Shape("heads-of-eight-both-ways", 21, 96, 96, 12, 96, 2, False),
    Shape("short", 1100, 13, 128, 4, 128, 2, True),
    Shape("short-both-ways", 1099, 29, 96, 4, 64, 2, False),
]
SINGLE = [
    (shape, kernel)
    for shapes, kernel in ((ROWBLOCKS, RowBlocks), (ROWWARPS, RowWarps), (WARPGROUPS, Warpgroups))
    for shape in shapes
]
HALVES = [
    (replace(shape, dtype=dtype), kernel)
    for shape, kernel in SINGLE
    if shape.id in ("ragged", "over-four", "many", "persistent", "short")
    for dtype in ("float16", "bfloat16")
]
CASES = SINGLE + HALVES


@pytest.fixture
def h200():
    device = torch.device("cuda")
    room = room_of(device)
    if not room.sm90 or room.units != H200.units:
        pytest.skip("the sizes are chosen for an H200's multiprocessors")
    return device, room


@pytest.mark.parametrize(
    ("shape", "kernel"), CASES, ids=[f"{kernel.__name__}-{shape.id}-{shape.dtype}" for shape, kernel in CASES]
)
@pytest.mark.parametrize("kind", ["none", "prefix", "holes"])
def test_every_element_is_written_and_equals_float64(make_case, h200, shape, kernel, kind):
    device, room = h200
    model, x, mask, expected = make_case(shape, 5, kind)
    config = choose(shape, room).config
    assert type(config) is kernel
    operands = operand_dtype(None, shape, device.type)
    with torch.no_grad():
        packed = config.pack(model, operands)
    out = torch.empty_like(x)
    launch = config.binder(packed, operands, model.final_norm.eps, room.units)(x, mask, out)
    for _ in range(2):  # the second launch finds the flags as the first left them
        out.fill_(float("nan"))
        launch(raw_stream(x.device.index or 0), x, mask, out)
        assert torch.isfinite(out).all(), "every element of the poisoned output is written"
        assert (out.double() - expected).abs().max() <= TOLERANCES[shape.dtype]
        if mask is not None:
            assert not out[~mask].any()
