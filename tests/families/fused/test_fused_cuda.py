"""The fused family on a GPU: attention against float64, and the gate on shapes, masks and inputs of every kind."""

from __future__ import annotations

import copy

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.dispatch import load_profile
from rooflane.eval.check.gate import check_gate
from rooflane.families import get_family
from rooflane.families.fused.attention import PLANS, bind_attention, plan_attention
from rooflane.families.lean.attention import mask_extent
from rooflane.families.runtime.host import missing_compiler
from rooflane.shapes import Shape, load_shapes

CUDA = torch.device("cuda", 0)
FUSED = get_family("fused")
# (batch, heads, tokens): one; within a tile; whole tiles; one over; several tiles of rows and keys.
SIZES = [(2, 2, 1), (1, 1, 17), (2, 3, 64), (3, 2, 127), (2, 2, 128), (2, 1, 129), (2, 3, 197), (2, 2, 1024)]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0) or missing_compiler():
        pytest.skip("the kernels are for compute capability 9.0 and need NVRTC")


def attend(qkv, heads, causal, mask):
    """Return attention in float64; rows behind the last valid token, and rows that see nothing, are 0."""
    batch, length, _ = qkv.shape
    q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2).double() for part in qkv.chunk(3, -1))
    visible = torch.ones(length, length, dtype=torch.bool, device=CUDA)
    visible = (visible.tril() if causal else visible).expand(batch, 1, -1, -1)
    last = torch.full((batch,), length, device=CUDA)
    if mask is not None:
        visible = visible & mask[:, None, None, :]
        last = torch.where(mask, torch.arange(1, length + 1, device=CUDA), 0).amax(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    shares = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    out = (shares @ v).transpose(1, 2).reshape(batch, length, -1)
    return torch.where((torch.arange(length, device=CUDA) < last[:, None])[:, :, None], out, 0.0)


@pytest.mark.parametrize("head_dim", PLANS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "prefix", "holes", "sharp"])
def test_attention_equals_float64(head_dim, causal, kind):
    for batch, heads, length in SIZES:
        generator = torch.Generator(CUDA).manual_seed(length)
        qkv = torch.randn(batch, length, 3 * heads * head_dim, device=CUDA, generator=generator).half()
        if kind == "sharp":
            qkv[:, :, : heads * head_dim] *= 8
        mask = None
        if kind in ("prefix", "holes"):
            valid = torch.randint(0, length + 1, (batch, 1), device=CUDA, generator=generator)
            mask = torch.arange(length, device=CUDA) < valid
            if kind == "holes":
                mask &= torch.rand(mask.shape, device=CUDA, generator=generator) > 0.4
        wanted = attend(qkv, heads, causal, mask)
        if kind == "prefix":
            qkv[~mask] = torch.nan  # tokens behind a sequence's end reach nothing
        whole = torch.full((wanted.numel() + 128,), torch.nan, dtype=torch.float16, device=CUDA)
        out = whole[64:-64].view(wanted.shape)
        extent = None if mask is None else mask_extent(mask)
        launch = bind_attention(plan_attention(head_dim, heads, causal), qkv, mask, extent, out)
        launch()
        first = out.clone()
        assert (out.double() - wanted).abs().max() <= 4e-3, (batch, heads, length)
        out.fill_(torch.nan)
        launch()
        assert torch.equal(first, out)
        assert whole[:64].isnan().all() and whole[-64:].isnan().all()


def gate_use(model, forward, x, mask) -> float:
    """Return the largest use of the gate against float64 over valid tokens."""
    with torch.inference_mode():
        out, wanted = forward(x, mask), copy.deepcopy(model).double()(x.double(), mask)
    rows = slice(None) if mask is None else mask
    return check_gate(out[rows].double(), wanted[rows]).use


SHAPES = [
    Shape("8", 64, 128, 1024, 4, 1024, 4, True), Shape("MiniLM", 8, 128, 384, 12, 1536, 6, False),
    Shape("ViT", 4, 197, 192, 3, 768, 12, False), Shape("odd", 7, 300, 200, 5, 520, 3, True),
    Shape("one", 1, 1, 16, 1, 16, 1, True), Shape("wide heads", 3, 100, 512, 2, 520, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)
def test_the_gate_holds_on_plain_shifted_and_large_inputs(shape):
    model = build_baseline(shape, CUDA, 3)
    forward = FUSED.build(model, shape, CUDA)
    for padding in (0.0, 0.3):
        x, mask = generate_random_case(config_of(shape), CUDA, torch.float32, 5, padding)
        for kind, case in {"plain": x, "shifted": x + 100, "large": 1e4 * x, "larger": 1e6 * x}.items():
            assert gate_use(model, forward, case, mask) < 1, kind


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.id)
def test_small_and_sharp_inputs_show_no_more_rounding_than_the_lean_forward(shape):
    """Rounding of sharp scores and of small inputs uses up the gate in every family of float16 operands."""
    model = build_baseline(shape, CUDA, 3)
    x, mask = generate_random_case(config_of(shape), CUDA, torch.float32, 5, 0.3)
    for kind, scale, sharpness in (("small", 1e-3, 1), ("a tenth", 0.1, 1), ("sharp", 1.0, 8)):
        sharp = copy.deepcopy(model)
        for layer in sharp.layers:
            layer.attention.q_proj.weight.data *= sharpness
        own, lean = (
            gate_use(sharp, get_family(name).build(sharp, shape, CUDA), scale * x, mask)
            for name in ("fused", "gemm_fp16")
        )
        assert own <= max(1.0, 1.25 * lean), kind


def test_the_gate_holds_on_every_neighbour_that_it_takes(pytestconfig):
    taken = 0
    for shape in load_shapes(pytestconfig.rootpath / "shapes" / "neighbours.csv"):
        if FUSED.supports(shape, load_profile("h200")) or shape.dtype != "float32" or shape.tokens > 1 << 17:
            continue
        model = build_baseline(shape, CUDA, 1)
        forward = FUSED.build(model, shape, CUDA)
        for padding in (0.0, 0.3):
            x, mask = generate_random_case(config_of(shape), CUDA, torch.float32, 7, padding)
            assert gate_use(model, forward, x, mask) < 1, shape.id
        taken += 1
    assert taken >= 15
