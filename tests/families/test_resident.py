"""The resident kernels against float64, and what they are told: packed weights, configurations, refusals."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from rooflane.families import get_family
from rooflane.families.resident.config import ROWS_PROGRAMS, WHOLE_STAGES, resident_config
from rooflane.families.resident.kernel import _gelu, rows_kernel, whole_kernel
from rooflane.families.resident.layout import layout_of, padded
from rooflane.families.resident.pack import pack_resident
from rooflane.shapes import Shape, load_shapes

# Half-precision operands with float32 sums over two layers of values near 3.
TOLERANCE = 8e-3
FFN_TILE = 16


def shared_constants(shape, layout, mask):
    return {
        "WIDTH": shape.d_model,
        "NUM_HEADS": shape.num_heads,
        "HEAD": layout.head,
        "FFN": layout.ffn,
        "CAUSAL": shape.causal,
        "HAS_MASK": mask is not None,
        "BLOCK_S": padded(shape.seq_len),
        "BLOCK_D": layout.width,
        "BLOCK_F": FFN_TILE,
        "STAGES": 2,
    }


def run_whole(model, shape, x, mask, group):
    layout = layout_of(shape, FFN_TILE)
    packed = pack_resident(model, layout, torch.float16)
    out = torch.full_like(x, float("nan"))
    whole_kernel[(-(-shape.batch_size // group),)](
        x, mask, out, packed["weights"], packed["biases"], shape.batch_size, shape.seq_len, shape.num_layers, 1e-5,
        GROUP=group, **shared_constants(shape, layout, mask), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def run_rows(model, shape, x, mask, rows, heads_a_step):
    """Launch the layers one behind the other, as the graph does: the launch boundary is the exchange."""
    layout = layout_of(shape, FFN_TILE)
    packed = pack_resident(model, layout, torch.float16)
    out, residual = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    qkv = x.new_full((2, shape.tokens * 3 * layout.heads_width), float("nan"), dtype=torch.float16)
    for step in range(shape.num_layers + 1):
        last = step == shape.num_layers
        finished = max(step - 1, 0)
        rows_kernel[(shape.batch_size * -(-shape.seq_len // rows),)](
            x if step < 2 else residual, mask, qkv[(step + 1) % 2], qkv[step % 2], out if last else residual,
            packed["weights"][finished * layout.layer_weights :], packed["biases"][finished * layout.layer_biases :],
            shape.seq_len, 1e-5, FIRST=step == 0, LAST=last, ROWS=rows, HEADS_A_STEP=heads_a_step,
            **shared_constants(shape, layout, mask), num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


# Sequences a program, rows and heads a step; sizes off every tile: 37 of 64 rows, 48 of 64 columns, 3 heads, ffn 40.
CASES = [
    (Shape("grouped", 3, 16, 32, 4, 48, 2, True), 2, 16, 4),
    (Shape("ragged", 2, 37, 48, 3, 40, 2, False), 1, 16, 1),
    (Shape("short", 5, 9, 16, 1, 16, 1, True), 4, 16, 1),
    (Shape("token", 2, 1, 16, 2, 16, 3, True), 1, 16, 2),
    (Shape("wide-head", 1, 20, 64, 1, 64, 1, True), 1, 16, 1),
]


@pytest.mark.parametrize(("shape", "group", "rows", "step"), CASES, ids=lambda value: getattr(value, "id", None))
@pytest.mark.parametrize("kind", ["none", "full", "prefix", "holes"])
def test_kernels_equal_float64(make_case, shape, group, rows, step, kind):
    model, x, mask, expected = make_case(shape, 5, kind)
    for out in (run_whole(model, shape, x, mask, group), run_rows(model, shape, x, mask, rows, step)):
        assert torch.isfinite(out).all(), "every element of the poisoned output is written"
        assert (out.double() - expected).abs().max() <= TOLERANCE
        if mask is not None:
            assert not out[~mask].any()


def test_packing_folds_norms_scale_and_value_bias(make_case):
    """Undo the packing of one head by hand: q = (normed Wq' + bq') must be the scaled projection of the normed row."""
    shape = Shape("a", 1, 3, 16, 1, 16, 1)
    model, x, _, _ = make_case(shape, 3, "none")
    layout = layout_of(shape, FFN_TILE)
    packed = pack_resident(model, layout, torch.float64)
    layer = model.double().layers[0]
    row = torch.nn.functional.layer_norm(x.double()[0], (16,))
    q = row @ packed["weights"][:256].view(16, 16) + packed["biases"][:16].double()
    expected = layer.attention.q_proj(layer.norm1(x.double()[0])) * 16**-0.5 * 1.4426950408889634
    torch.testing.assert_close(q, expected.detach(), atol=1e-5, rtol=0)
    out_bias = layer.attention.out_proj.bias + layer.attention.out_proj.weight @ (
        layer.attention.v_proj.bias + layer.attention.v_proj.weight @ layer.norm1.bias
    )
    torch.testing.assert_close(packed["biases"][16:32].double(), out_bias.detach(), atol=1e-6, rtol=0)


def test_layout_counts_every_weight(root):
    layout = layout_of(Shape("a", 1, 1, 96, 3, 200, 2), 64)
    assert (layout.width, layout.head, layout.ffn) == (128, 32, 256)
    assert layout.layer_weights == 128 * (4 * 96 + 2 * 256)
    assert layout.layer_biases == 96 + 2 * 128 + 256


def test_small_batches_split_sequences_and_large_ones_never_run_one_stage(root):
    shapes = {shape.id: shape for shape in load_shapes(root / "shapes" / "published.csv")}
    split = [name for name, shape in shapes.items() if shape.d_model <= 128 and resident_config(shape).rows]
    assert split == ["2", "3", "4"]
    assert 16 * 8 <= ROWS_PROGRAMS < 64 * 2 * 2
    for name in ("1", "6", "11", "12"):
        assert resident_config(shapes[name]).num_stages == WHOLE_STAGES > 1
    odd = resident_config(Shape("a", 1, 31, 48, 3, 96, 2))
    assert odd.heads_a_step == 1, "three heads cannot stand two or four side by side"


@triton.jit
def gelu_probe(x_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, _gelu(tl.load(x_ptr + index)))


def test_gelu_polynomial_keeps_its_stated_error(device):
    x = torch.cat([torch.linspace(-12, 12, 4094), torch.tensor([-1e4, 1e4])]).to(device)
    out = torch.empty_like(x)
    gelu_probe[(1,)](x, out, BLOCK=4096)
    exact = 0.5 * x.double() * (1 + torch.erf(x.double() / 2**0.5))
    assert ((out.double() - exact).abs() / x.double().abs().clamp(min=1)).max() <= 1.4e-5


class Device:
    kind, capability, shared_memory_bytes = "cuda", (9, 0), 227 * 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": 129}, "seq_len 129"),
        ({"d_model": 256}, "d_model 256"),
        ({"ffn_dim": 513}, "ffn_dim 513"),
    ],
)
def test_refusals_say_what_is_over(changes, reason):
    sizes = {"batch_size": 1, "seq_len": 128, "d_model": 128, "num_heads": 4, "ffn_dim": 512, "num_layers": 1}
    spec = get_family("resident")
    assert spec.supports(Shape("a", **sizes), Device()) is None
    assert reason in spec.supports(Shape("a", **{**sizes, **changes}), Device())


def test_refuses_a_cpu_and_old_or_small_devices():
    spec, shape = get_family("resident"), Shape("a", 1, 8, 16, 1, 16, 1)

    class Cpu(Device):
        kind = "cpu"

    class Turing(Device):
        capability = (7, 5)

    class Small(Device):
        shared_memory_bytes = 64 * 1024

    assert "GPU" in spec.supports(shape, Cpu())
    assert "8.0" in spec.supports(shape, Turing())
    assert "96 KiB" in spec.supports(shape, Small())
