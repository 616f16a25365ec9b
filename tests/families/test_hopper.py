"""The Hopper kernels: their packed tiles against float64, their sizes by hand, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from rooflane.families.resident.hopper.pack import pack_hopper
from rooflane.families.resident.hopper.plan import warpgroup_plan
from rooflane.shapes import Shape

H200_UNITS = 132
# Half-precision weights, everything else in float64, two layers.
TOLERANCE = 4e-3


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


def walk(packed, plan, x, mask, eps):
    """Compute the forward from the packed tensors alone, in the kernel's order, in float64."""
    shape, tiles, floats = plan.shape, Tiles(packed, plan), packed["floats"].double()
    d, heads = shape.d_model, (shape.num_heads, shape.head_dim)
    x = x.double()
    seen = mask[:, None, None, :].expand(-1, 1, shape.seq_len, -1)
    if shape.causal:
        seen = seen & torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool).tril()
    for _ in range(shape.num_layers):
        q_bias, out_bias, ffn_out_bias, ffn_in_bias, floats = floats.split([d, d, d, plan.ffn, len(floats) - 3 * d - plan.ffn])
        a = layer_norm(x, (d,), eps=eps)
        k, v = a @ tiles.next().t(), a @ tiles.next().t()
        q = a @ tiles.next().t() + q_bias
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(2, 3)).masked_fill(~seen, -1e30)
        context = (torch.softmax(scores * 0.6931471805599453, dim=-1) @ v).transpose(1, 2).flatten(2)
        x = x + context @ tiles.next().t() + out_bias
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
    plan = warpgroup_plan(shape, H200_UNITS)
    packed = pack_hopper(model, plan, torch.float16)
    assert packed["tiles"].numel() + packed["floats"].numel() * 4 == plan.packed_bytes
    out = walk(packed, plan, x, mask, 1e-5)
    assert (out - expected).abs().max() <= TOLERANCE
