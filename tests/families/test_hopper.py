"""The Hopper kernels: their packed tiles against float64, their sizes by hand, what they refuse."""

from __future__ import annotations

import pytest
import torch

from rooflane.families.resident.hopper.pack import pack_hopper
from rooflane.families.resident.hopper.plan import STEP, RowblockPlan, rowblock_plan, warpgroup_plan
from rooflane.shapes import Shape, load_shapes

H200_UNITS = 132
# Half-precision weights, everything else in float64, two layers.
TOLERANCE = 4e-3


class Tiles:
    """Reads packed tiles in the order the kernel does."""

    def __init__(self, packed, plan):
        self._bytes = packed["tiles"].view(-1, plan.tile_bytes)
        self._width, self._index = STEP * plan.shape.d_model * 2, 0

    def next(self, columns):
        """Return the operand `[columns, K]` and the bias of the next tile."""
        tile = self._bytes[self._index]
        self._index += 1
        cores = tile[: self._width].view(torch.float16).double()
        k8 = cores.numel() // (columns * 8)
        operand = cores.view(k8, columns // 8, 8, 8).permute(1, 2, 0, 3).reshape(columns, k8 * 8)
        return operand, tile[self._width :].view(torch.float32).double()

    @property
    def used_up(self):
        return self._index == len(self._bytes)


def walk(packed, plan, x, mask, eps):
    """Compute the forward from the packed tiles alone, in the kernel's order, in float64."""
    shape, tiles = plan.shape, Tiles(packed, plan)
    d, hw, head = shape.d_model, plan.heads * plan.head, plan.head
    x = x.double()
    seen = mask[:, None, None, :].expand(-1, 1, shape.seq_len, -1)
    if shape.causal:
        seen = seen & torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool).tril()
    for _ in range(shape.num_layers):
        a = torch.nn.functional.layer_norm(x, (d,), eps=eps)
        k = torch.cat([a @ tiles.next(STEP)[0].t() for _ in range(hw // STEP)], dim=-1)
        v = torch.cat([a @ tiles.next(STEP)[0].t() for _ in range(hw // STEP)], dim=-1)
        wide = max(STEP, head)
        for start in range(0, hw, wide):
            queries = [tiles.next(STEP) for _ in range(wide // STEP)]
            q = torch.cat([a @ w.t() + b[:STEP] for w, b in queries], dim=-1)
            split = [t.unflatten(-1, (wide // head, head)).transpose(1, 2) for t in (q, k[..., start : start + wide], v[..., start : start + wide])]
            scores = (split[0] @ split[1].transpose(2, 3)).masked_fill(~seen, -1e30)
            probs = torch.softmax(scores * 0.6931471805599453, dim=-1)
            context = (probs @ split[2]).transpose(1, 2).flatten(2)
            for part in range(wide // STEP):
                w, b = tiles.next(d)
                x = x + context[..., part * STEP : (part + 1) * STEP] @ w.t() + (b[:d] if start + part == 0 else 0)
        a = torch.nn.functional.layer_norm(x, (d,), eps=eps)
        for start in range(0, plan.ffn, STEP):
            (w1, b1), (w2, b2) = tiles.next(STEP), tiles.next(d)
            x = x + torch.nn.functional.gelu(a @ w1.t() + b1[:STEP]) @ w2.t() + (b2[:d] if start == 0 else 0)
    assert tiles.used_up
    scale, shift = packed["final_norm"].double().view(2, d)
    return (torch.nn.functional.layer_norm(x, (d,), eps=eps) * scale + shift).masked_fill(~mask[..., None], 0.0)


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
    assert packed["tiles"].numel() + packed["final_norm"].numel() * 4 == plan.packed_bytes
    out = walk(packed, plan, x, mask, 1e-5)
    assert (out - expected).abs().max() <= TOLERANCE
