"""The sm90 kernels' packed tiles against float64: the forward computed from the tiles alone, as the kernel does."""

from __future__ import annotations

import inspect
import re
from importlib.resources import files

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

import rooflane.families.resident.triton_steps as triton_steps
from rooflane.families.resident.config import H200
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.shapes import Shape

# Half-precision weights, everything else in float64, two layers.
TOLERANCE = 4e-3
BOTH = (torch.float16, torch.bfloat16)


class Tiles:
    """Reads a warpgroup plan's packed weights in the order its kernel does: both halves of a product at a time."""

    def __init__(self, packed, plan):
        self._width = plan.shape.d_model
        halves = packed["tiles"].view(torch.float16).double()
        # [half, product, k8, n8, row, column]: core matrices of 8 x 8, those of eight columns of K behind each other.
        self._halves = halves.view(2, -1, self._width // 8, self._width // 16, 8, 8)
        self._index = 0

    def next(self):
        """Return the operand `[N, K]` of the next product."""
        halves = self._halves[:, self._index]
        self._index += 1
        return halves.permute(0, 2, 3, 1, 4).reshape(self._width, self._width)

    @property
    def used_up(self):
        return self._index == self._halves.shape[1]


def attend(q, k, v, heads, seen):
    """Return the context of `[B, S, D]` queries that hold the scale and log2(e), `heads` being (count, width)."""
    q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in (q, k, v))
    scores = (q @ k.transpose(2, 3)).masked_fill(~seen, -1e30)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2)


def walk(packed, plan, x, mask, eps):
    """Compute the forward from the packed tensors alone, in the kernel's order, in float64."""
    shape, tiles, floats = plan.shape, Tiles(packed, plan), packed["floats"].double()
    d, heads = shape.d_model, (shape.num_heads, shape.head_dim)
    x = x.double()
    seen = mask[:, None, None, :].expand(-1, 1, shape.seq_len, -1)
    if shape.causal:
        seen = seen & torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool).tril()
    for _ in range(shape.num_layers):
        sizes = (d, d, d, plan.ffn)
        q_bias, out_bias, ffn_out_bias, ffn_in_bias, floats = floats.split([*sizes, len(floats) - sum(sizes)])
        a = layer_norm(x, (d,), eps=eps)
        k, v = a @ tiles.next().t(), a @ tiles.next().t()
        q = a @ tiles.next().t() + q_bias
        x = x + attend(q, k, v, heads, seen) @ tiles.next().t() + out_bias
        a = layer_norm(x, (d,), eps=eps)
        x = x + ffn_out_bias
        for start in range(0, plan.ffn, d):
            hidden = gelu(a @ tiles.next().t() + ffn_in_bias[start : start + d])
            x = x + hidden @ tiles.next().t()
    assert tiles.used_up
    scale, shift = floats.view(2, d)
    return (layer_norm(x, (d,), eps=eps) * scale + shift).masked_fill(~mask[..., None], 0.0)


CASES = [
    Shape("published", 2, 16, 128, 4, 128, 2, True),
    Shape("one-head", 1, 9, 128, 1, 64, 2, True),
    Shape("two-heads", 2, 9, 128, 2, 128, 1, False),
    Shape("narrow-heads", 2, 20, 128, 16, 128, 2, True),
    Shape("ragged", 3, 11, 48, 3, 200, 2, True),
    Shape("narrow", 2, 5, 16, 2, 16, 1, False),
    Shape("square", 2, 20, 64, 2, 128, 2, True),
]


@pytest.mark.parametrize("shape", CASES, ids=lambda shape: shape.id)
@pytest.mark.parametrize("kind", ["prefix", "holes"])
def test_packed_tiles_hold_the_model(make_case, shape, kind):
    model, x, mask, expected = make_case(shape, 5, kind)
    plan = Warpgroups.try_plan(shape, H200)
    packed = plan.pack(model, torch.float16)
    assert packed["tiles"].numel() + packed["floats"].numel() * 4 == plan.packed_bytes
    out = walk(packed, plan, x, mask, 1e-5)
    assert (out - expected).abs().max() <= TOLERANCE


class Fragments:
    """Reads the row-block kernel's tiles in its order, lane by lane as PTX lays out matrix B of mma.m16n8k16."""

    def __init__(self, packed, plan):
        self._width = plan.shape.d_model
        self._bytes = packed["tiles"].view(-1, self._width * self._width * 2 + self._width * 4)
        self._index = 0

    def next(self):
        """Return the operand `[D, D]`, columns of the product first, and the bias of the next tile."""
        width, tile = self._width, self._bytes[self._index]
        self._index += 1
        lanes = tile[: 2 * width * width].view(torch.float16).double().view(width // 16, width // 16, 32, 8)
        operand = torch.full((width, width), float("nan"), dtype=torch.float64)
        for lane in range(32):
            group, thread = divmod(lane, 4)
            for element in range(8):
                # b0, b1 at rows 2t and 2t + 1, b2, b3 eight rows further; then the same of the next eight columns.
                register, low = divmod(element % 4, 2)
                column, row = 8 * (element // 4) + group, 8 * register + 2 * thread + low
                operand[column::16, row::16] = lanes[:, :, lane, element]
        return operand, tile[2 * width * width :].view(torch.float32).double()

    @property
    def used_up(self):
        return self._index == len(self._bytes)


def walk_fragments(packed, plan, x, mask, eps):
    """Compute the forward from tiles of fragments alone, in their kernels' order, in float64."""
    shape, tiles = plan.shape, Fragments(packed, plan)
    d = shape.d_model
    x = x.double()
    seen = mask[:, None, None, :] & torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool)
    if shape.causal:
        seen = seen.tril()
    for _ in range(shape.num_layers):
        a = layer_norm(x, (d,), eps=eps)
        (key, none), (value, no_more) = tiles.next(), tiles.next()
        assert not none.any() and not no_more.any()
        query, query_bias = tiles.next()
        heads = (shape.num_heads, shape.head_dim)
        context = attend(a @ query.t() + query_bias, a @ key.t(), a @ value.t(), heads, seen)
        out, out_bias = tiles.next()
        x = x + context @ out.t() + out_bias
        a = layer_norm(x, (d,), eps=eps)
        for start in range(0, plan.ffn, d):
            (w1, b1), (w2, b2) = tiles.next(), tiles.next()
            assert start == 0 or not b2.any()
            x = x + gelu(a @ w1.t() + b1) @ w2.t() + b2
    assert tiles.used_up
    scale, shift = packed["floats"].double().view(2, d)
    return (layer_norm(x, (d,), eps=eps) * scale + shift).masked_fill(~mask[..., None], 0.0)


ROWBLOCK_CASES = [
    Shape("published", 2, 20, 128, 4, 128, 2, True),
    Shape("two-heads", 1, 17, 128, 2, 64, 1, True),
    Shape("three-heads", 3, 31, 48, 3, 200, 2, True),
    Shape("seven-heads", 2, 18, 112, 7, 224, 1, True),
    Shape("one-head", 2, 33, 16, 1, 16, 2, True),
]
ROWWARP_CASES = [
    Shape("heads-of-eight", 2, 20, 32, 4, 32, 2, True),
    Shape("both-ways", 3, 17, 64, 4, 200, 2, False),
    Shape("token", 1, 1, 16, 1, 16, 1, True),
]
TILED_CASES = [(shape, RowBlocks) for shape in ROWBLOCK_CASES] + [(shape, RowWarps) for shape in ROWWARP_CASES]


@pytest.mark.parametrize(("shape", "kernel"), TILED_CASES, ids=lambda value: getattr(value, "id", None))
@pytest.mark.parametrize("kind", ["prefix", "holes"])
def test_packed_fragments_hold_the_model(make_case, shape, kernel, kind):
    model, x, mask, expected = make_case(shape, 5, kind)
    plan = kernel.try_plan(shape, H200)
    packed = plan.pack(model, torch.float16)
    assert packed["tiles"].numel() + packed["floats"].numel() * 4 == plan.packed_bytes
    out = walk_fragments(packed, plan, x, mask, 1e-5)
    assert (out - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kernel", [Warpgroups, RowBlocks, RowWarps])
def test_bfloat16_operands_hold_the_model_as_closely_as_they_can(make_case, kernel):
    shape = Shape("bfloat16", 1, 40, 64, 2, 64, 1, True)
    model, _, _, _ = make_case(shape, 5, "none")
    plan = kernel.try_plan(shape, H200)
    half, brain = (plan.pack(model, dtype)["tiles"].view(-1, plan.tile_bytes) for dtype in BOTH)
    operands = plan.tile_bytes - (0 if kernel is Warpgroups else 4 * shape.d_model)
    assert torch.equal(half[:, operands:], brain[:, operands:]), "biases are float32 whatever the operands"
    halves, brains = half[:, :operands].view(torch.float16).double(), brain[:, :operands].view(torch.bfloat16).double()
    assert ((halves - brains).abs() <= halves.abs() * 2**-8 + 2**-24).all()


def test_both_languages_have_one_gelu():
    """The polynomial stands in Triton and in CUDA C++: the same coefficients, highest power first."""
    cuda = (files("rooflane.families.resident.kernels") / "sm90_steps.cuh").read_text()
    triton_text, cuda_text = inspect.getsource(triton_steps), cuda
    numbers = [re.findall(r"-?\d\.\d{6,}e-\d+", text) for text in (triton_text, cuda_text)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 7
