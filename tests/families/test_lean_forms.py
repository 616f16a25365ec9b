"""The lean families and chunked on every form of a stack, against float64 written here; on a GPU within the gate."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rooflane.eval.check.gate import check_gate
from rooflane.eval.check.outputs import poison
from rooflane.families import get_family
from rooflane.families.lean import build as lean_build
from rooflane.families.lean.attention import attention, mask_extent
from rooflane.families.lean.lean import TORCH_OPS, LeanOps, lean_weights
from rooflane.families.lean.pointwise import activate, add_norm, rotate
from rooflane.families.runtime.half_range import half_obstacle
from rooflane.families.runtime.weights import PackedWeights
from rooflane.shapes import Form, Shape

# Each field alone, then forms that libraries use, then every field at once. Heads of 8 to 80 columns; D / H is 12.
FORMS = {
    "published": Form(),
    "no final norm": Form(final_norm=False),
    "post-norm": Form(norm_first=False, final_norm=False),
    "tanh gelu": Form(activation="gelu_tanh"),
    "quick gelu": Form(activation="quick_gelu"),
    "relu": Form(activation="relu"),
    "silu": Form(activation="silu"),
    "rms": Form(norm="rms"),
    "narrow heads": Form(head_dim=8),
    "wide heads": Form(head_dim=80),
    "rotary": Form(rotary_theta=10000.0),
    "bias": Form(score_bias=True),
    "bert": Form(norm_first=False, final_norm=False, score_bias=True),
    "encoder": Form(norm_first=False, activation="relu", head_dim=24),
    "clip": Form(activation="quick_gelu", score_bias=True, head_dim=40),
    "decoder": Form(activation="silu", norm="rms", rotary_theta=500.0, head_dim=20),
    "all": Form(False, "gelu_tanh", "rms", False, 8, 100.0, True),
}
# 37 tokens end no tile of 32 or 64 rows.
RAGGED, ONE = Shape("ragged", 3, 37, 48, 4, 40, 2, False), Shape("one", 1, 21, 48, 4, 40, 1, True)
SMALL = Shape("small", 2, 19, 48, 2, 40, 2, True)
VIT, BERT = Shape("vit", 4, 197, 192, 3, 768, 3, False), Shape("bert", 3, 130, 768, 12, 3072, 2, False)
TOLERANCE = 2e-5  # float32 rounding over two layers of values near 4
COMPILED = ("decoder", "all")  # on a CPU; a GPU compiles every form
FAMILIES = ("gemm_fp16", "sdpa_flash", "chunked", "graph_compile")


class Norm(nn.Module):
    """The weights of a norm; RMSNorm has a shift of 0."""

    def __init__(self, form: Form, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.bias = nn.Parameter(torch.zeros(width) if form.norm == "rms" else 0.1 * torch.randn(width))
        self.eps = 1e-5


class Attention(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = shape.num_heads, width, width**-0.5
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(shape.d_model, shape.num_heads * width) for _ in range(3))
        self.out_proj = nn.Linear(shape.num_heads * width, shape.d_model)


class Layer(nn.Module):
    def __init__(self, shape: Shape, form: Form) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(form, shape.d_model), Norm(form, shape.d_model)
        self.attention = Attention(shape, form.head_dim or shape.d_model // shape.num_heads)
        self.ffn_in, self.ffn_out = nn.Linear(shape.d_model, shape.ffn_dim), nn.Linear(shape.ffn_dim, shape.d_model)


class Stack(nn.Module):
    """Weights drawn from a seed, under the names that families read."""

    def __init__(self, shape: Shape, form: Form) -> None:
        super().__init__()
        self.form = form
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers = nn.ModuleList(Layer(shape, form) for _ in range(shape.num_layers))
            self.final_norm = Norm(form, shape.d_model) if form.final_norm else None


ACTIVATE = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def normed(x: Tensor, norm: Norm, form: Form) -> Tensor:
    centred = x if form.norm == "rms" else x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def heads(value: Tensor, attention: Attention, theta: float | None = None) -> Tensor:
    """Return `[B, H, S, d]`, turned as complex numbers where the positions are rotary."""
    split = value.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
    if theta is None:
        return split
    half = attention.head_dim // 2
    speed = torch.tensor([theta ** (-2 * i / attention.head_dim) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(split.shape[2], dtype=torch.float64)[:, None] * speed
    turn = torch.polar(torch.ones_like(angle), angle).to(value.device)
    turned = torch.complex(split[..., :half], split[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def attend(x: Tensor, layer: Layer, form: Form, causal: bool, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    own, length = layer.attention, x.shape[1]
    q, k = (heads(linear(x), own, form.rotary_theta) for linear in (own.q_proj, own.k_proj))
    scores = q @ k.transpose(-1, -2) * own.scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.to(x.dtype)
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, device=x.device).triu(1).bool(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    # The context of a row that sees no key is 0.
    probs = torch.softmax(scores, -1).nan_to_num(0.0)
    return own.out_proj((probs @ heads(own.v_proj(x), own)).transpose(1, 2).flatten(-2))


@torch.no_grad()
def plain(stack: Stack, causal: bool, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return the output `[B, S, D]` in the number type of x, rows of invalid tokens 0."""
    form = stack.form
    for layer in stack.layers:
        update = ACTIVATE[form.activation]
        if form.norm_first:
            x = x + attend(normed(x, layer.norm1, form), layer, form, causal, mask, bias)
            x = x + layer.ffn_out(update(layer.ffn_in(normed(x, layer.norm2, form))))
        else:
            x = normed(x + attend(x, layer, form, causal, mask, bias), layer.norm1, form)
            x = normed(x + layer.ffn_out(update(layer.ffn_in(x))), layer.norm2, form)
    x = x if stack.final_norm is None else normed(x, stack.final_norm, form)
    return x if mask is None else x * mask[:, :, None]


def draw_masks(shape: Shape, device: torch.device) -> dict[str, Tensor | None]:
    """Return no mask, one of ragged lengths and one with holes; the third sequence is padding alone."""
    generator = torch.Generator().manual_seed(3)
    holes = torch.rand(shape.batch_size, shape.seq_len, generator=generator) > 0.4
    lengths = torch.randint(1, shape.seq_len + 1, (shape.batch_size,), generator=generator)
    ragged = torch.arange(shape.seq_len)[None] < lengths[:, None]
    holes[2:3], ragged[2:3] = False, False
    return {"none": None, "ragged": ragged.to(device), "holes": holes.to(device)}


def draw_biases(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Return biases of the scores of every kind that libraries pass."""
    batch, length = shape.batch_size, shape.seq_len
    generator = torch.Generator().manual_seed(4)
    position = torch.arange(length)
    pairs = torch.rand(batch, 1, length, length, generator=generator) > 0.3
    padded = (position[None] > length - 2 - torch.arange(batch)[:, None])[:, None, None, :]
    zeros = torch.zeros(batch, 1, 1, length)
    found = {
        "causal bool": position[None] <= position[:, None],
        "pairs bool": pairs,
        "window, transposed": ((position[None] - position[:, None] - 2).abs() < 5).T,
        "relative": torch.randn(shape.num_heads, length, length, generator=generator),
        "padding, least float32": zeros.masked_fill(padded, torch.finfo(torch.float32).min),
        "padding, half": zeros.half().masked_fill(padded, -math.inf),
        "pairs, -inf": torch.zeros(batch, 1, length, length).masked_fill(~pairs, -math.inf),
    }
    return {name: bias.to(device) for name, bias in found.items()}


def calls(shape: Shape, form: Form, device: torch.device) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """Return `(name, mask, bias)` of every kind of call that a form takes."""
    masks = draw_masks(shape, device)
    if not form.score_bias:
        return [(name, mask, None) for name, mask in masks.items()]
    biases = draw_biases(shape, device)
    kinds = [(f"{name}, none", None, bias) for name, bias in biases.items()]
    return kinds + [(f"relative, {name}", masks[name], biases["relative"]) for name in ("ragged", "holes")]


def check_every_call(forward, stack: Stack, shape: Shape, device: torch.device, judge, last: int = 0) -> None:
    """Check the last kinds of call, or all of them."""
    exact = copy.deepcopy(stack).double()
    x = torch.randn(shape.batch_size, shape.seq_len, shape.d_model, generator=torch.Generator().manual_seed(6))
    x = x.to(device)
    for name, mask, bias in calls(shape, stack.form, device)[-last:]:
        given = x if mask is None else x.masked_fill(~mask[:, :, None], 30.0)  # rows of padding hold anything
        expected = plain(exact, shape.causal, given.double(), mask, bias)
        poison(x)
        with torch.inference_mode():
            out = forward(given, mask, bias) if stack.form.score_bias else forward(given, mask)
        assert out.dtype == x.dtype and judge(out, expected), name
        if mask is not None:
            assert not out[~mask].any(), name


def close(out: Tensor, expected: Tensor) -> bool:
    return bool((out.double() - expected).abs().max() <= TOLERANCE)


def within_gate(out: Tensor, expected: Tensor) -> bool:
    return check_gate(out, expected).passed


def served(*names: str) -> list:
    """Return the pairs of family and form that the family takes; on a CPU few of those that compile."""
    pairs = []
    for name in names:
        for form in FORMS:
            if get_family(name).refuse_form(FORMS[form]) is None:
                compiles = get_family(name).compiles
                marks = [pytest.mark.slow] * compiles + [pytest.mark.gpu] * (compiles and form not in COMPILED)
                pairs.append(pytest.param(name, form, marks=marks))
    return pairs


def test_the_lean_families_take_every_form_and_chunked_all_but_a_bias():
    taken = {(pair.values[0], pair.values[1]) for pair in served(*FAMILIES)}
    biased = {("chunked", name) for name, form in FORMS.items() if form.score_bias}
    assert taken == {(family, form) for family in FAMILIES for form in FORMS} - biased
    assert get_family("chunked").refuse_form(Form(score_bias=True)) == "it takes no bias on the scores"


@pytest.mark.parametrize(("family", "name"), served("sdpa_flash", "chunked"))
@pytest.mark.parametrize("shape", [RAGGED, ONE], ids=lambda shape: shape.id)
def test_every_form_equals_float64(device, family, name, shape):
    stack = Stack(shape, FORMS[name]).to(device)
    options = {"budget_gib": 1e-5} if family == "chunked" else {}
    forward = get_family(family).build(stack, shape, device, **options)
    check_every_call(forward, stack, shape, device, close if device.type == "cpu" else within_gate)


@pytest.mark.parametrize(("family", "name"), served("graph_compile"))
def test_every_compiled_form_equals_float64(device, family, name):
    stack = Stack(RAGGED, FORMS[name]).to(device)
    forward = get_family(family).build(stack, RAGGED, device)
    # Both calls run one compiled body.
    check_every_call(forward, stack, RAGGED, device, close if device.type == "cpu" else within_gate, last=2)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), served("gemm_fp16", "sdpa_flash", "chunked"))
@pytest.mark.parametrize("shape", [VIT, BERT], ids=lambda shape: shape.id)
def test_every_form_is_within_the_gate_on_a_gpu(device, family, name, shape):
    stack = Stack(shape, FORMS[name]).to(device)
    forward = get_family(family).build(stack, shape, device)
    check_every_call(forward, stack, shape, device, within_gate)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the exponent of a least number is -inf
@pytest.mark.parametrize("name", ["encoder", "decoder", "all"])
def test_the_interpreted_kernels_are_within_the_gate(monkeypatch, name):
    kernels = LeanOps(add_norm, activate, rotate, attention, mask_extent)
    monkeypatch.setattr(lean_build, "choose_ops", lambda *given, **options: kernels)
    stack, device = Stack(SMALL, FORMS[name]), torch.device("cpu")
    forward = get_family("sdpa_flash").build(stack, SMALL, device, operand_dtype="float16")
    check_every_call(forward, stack, SMALL, device, within_gate)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["post-norm", "encoder", "clip"])
def test_half_models_err_no_more_than_eager(device, name, dtype):
    shape = Shape("half", 3, 37, 48, 4, 40, 2, False, dtype)
    number = getattr(torch, dtype)
    stack = Stack(shape, FORMS[name]).to(device, number)
    x = torch.randn(3, 37, 48, generator=torch.Generator().manual_seed(6)).to(device, number)
    _, mask, bias = calls(shape, stack.form, device)[-1]
    expected = plain(copy.deepcopy(stack).double(), False, x.double(), mask, bias)
    forward = get_family("sdpa_flash").build(stack, shape, device)
    out = forward(x, mask, bias) if stack.form.score_bias else forward(x, mask)
    eager = (plain(stack, False, x, mask, bias).double() - expected).abs().max()
    assert out.dtype == number and (out.double() - expected).abs().max() <= 1.5 * eager


def test_torchs_own_encoder_at_its_defaults_agrees(device):
    layer = nn.TransformerEncoderLayer(48, 4, 40, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(48), enable_nested_tensor=False).to(device).eval()
    stack = Stack(RAGGED, Form(norm_first=False, activation="relu")).to(device)
    with torch.no_grad():
        for own, theirs in zip(stack.layers, encoder.layers, strict=True):
            attention = own.attention
            for part in ("weight", "bias"):
                packed = getattr(theirs.self_attn, f"in_proj_{part}").chunk(3)
                pairs = list(zip((attention.q_proj, attention.k_proj, attention.v_proj), packed, strict=True))
                pairs += [(attention.out_proj, getattr(theirs.self_attn.out_proj, part))]
                pairs += [(own.ffn_in, getattr(theirs.linear1, part)), (own.ffn_out, getattr(theirs.linear2, part))]
                pairs += [(own.norm1, getattr(theirs.norm1, part)), (own.norm2, getattr(theirs.norm2, part))]
                for module, tensor in pairs:
                    getattr(module, part).copy_(tensor)
        stack.final_norm.weight.fill_(1.0)
        stack.final_norm.bias.zero_()
        x, mask = torch.randn(3, 37, 48, device=device), draw_masks(RAGGED, device)["ragged"]
        mask[2, :5] = True
        forward = get_family("sdpa_flash").build(stack, RAGGED, device)
        expected = encoder.double()(x.double(), src_key_padding_mask=~mask) * mask[:, :, None]
    assert (close if device.type == "cpu" else within_gate)(forward(x, mask), expected)


@pytest.mark.parametrize("name", ["encoder", "all"])
def test_changed_weights_are_seen(device, name):
    stack = Stack(RAGGED, FORMS[name]).to(device)
    forward = get_family("sdpa_flash").build(stack, RAGGED, device)
    judge = close if device.type == "cpu" else within_gate
    check_every_call(forward, stack, RAGGED, device, judge)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(1.25)
    check_every_call(forward, stack, RAGGED, device, judge)


def test_folded_weights_are_copied():
    stack = Stack(ONE, Form())
    stack.folded = True
    weights = lean_weights(stack, torch.float32, TORCH_OPS)
    assert isinstance(weights, PackedWeights)
    assert weights.tensors["0.out.weight"].data_ptr() != stack.layers[0].attention.out_proj.weight.data_ptr()


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (torch.zeros(37, 36), r"broadcasts to \(3, 4, 37, 37\), called with one of shape \(37, 36\)"),
        (torch.zeros(2, 1, 37, 37), r"of shape \(2, 1, 37, 37\)"),
        (torch.zeros(1, 3, 4, 37, 37), "called with one of shape"),
        (torch.zeros(37, 37, dtype=torch.int64), r"the bias is torch.int64; give a bool mask \(True is visible\)"),
        (torch.zeros(37, 37, device="meta"), "x is on cpu, the bias on meta; move the bias"),
    ],
)
def test_a_bias_of_another_kind_is_refused(bias, said):
    forward = get_family("sdpa_flash").build(Stack(RAGGED, FORMS["bias"]), RAGGED, torch.device("cpu"))
    with pytest.raises(ValueError, match=said):
        forward(torch.zeros(3, 37, 48), None, bias)


def test_rotary_positions_need_pairs():
    with pytest.raises(ValueError, match="heads of 9 columns take no rotary positions"):
        get_family("sdpa_flash").build(Stack(ONE, Form(head_dim=9, rotary_theta=1e4)), ONE, torch.device("cpu"))


# (form, part, factor, what the obstacle names or None); a part is multiplied, in a stack of two layers.
RANGES = [
    ("encoder", "layers.0.attention.v_proj", 1e5, None),  # reads x, which no weight bounds
    ("encoder", "layers.1.attention.v_proj", 1e5, "layers.1.v_proj may reach"),
    ("encoder", "layers.0.norm1", 1e5, "layers.0.norm1 may reach"),
    ("encoder", "layers.0.norm2", 1e5, "layers.0.norm2 may reach"),
    ("encoder", "layers.1.norm2", 1e5, None),  # no product reads it
    ("encoder", "layers.0.ffn_in", 1e-8, "weights of layers.0.ffn_in lose"),
    ("encoder", "layers.0.attention.q_proj", 1e-8, "weights of layers.0.q_proj lose"),
    ("rms", "layers.0.norm1", 1e5, "layers.0.norm1 may reach"),
    ("silu", "layers.1.ffn_in", 1e5, "layers.1.ffn_in may reach"),
]


@pytest.mark.parametrize(("name", "part", "factor", "said"), RANGES)
def test_the_range_of_float16_by_form(name, part, factor, said):
    stack = Stack(RAGGED, FORMS[name])
    assert half_obstacle(stack) is None
    with torch.no_grad():
        stack.get_submodule(part).weight.mul_(factor)
    found = half_obstacle(stack)
    assert found is None if said is None else said in found


def test_rotary_positions_may_lengthen_an_element_by_the_root_of_two():
    stack = Stack(ONE, FORMS["rotary"])
    q = stack.layers[0].attention.q_proj
    with torch.no_grad():
        q.weight.mul_(30000 / (float(half_of(stack)) * math.sqrt(2)))
        assert half_obstacle(stack) is None
        q.weight.mul_(1.2)
    assert "q_proj may reach 3.6e+04" in half_obstacle(stack)
    stack.form = Form()
    assert half_obstacle(stack) is None


def half_of(stack: Stack) -> Tensor:
    """Return the largest element that q can have before it is turned, its biases set to 0."""
    layer = stack.layers[0]
    layer.norm1.bias.zero_()
    layer.attention.q_proj.bias.zero_()
    return (layer.attention.q_proj.weight * layer.norm1.weight).norm(dim=1).max() * 48**0.5


@pytest.mark.parametrize("name", ["encoder", "all"])
def test_weights_out_of_float16s_range_are_computed_in_the_models_own_type(name):
    stack, device = Stack(RAGGED, FORMS[name]), torch.device("cpu")
    with torch.no_grad():
        stack.layers[1].attention.v_proj.weight.mul_(1e6)
        stack.layers[1].attention.v_proj.bias.mul_(1e6)
        stack.layers[1].attention.out_proj.weight.mul_(1e-6)
    with pytest.warns(UserWarning, match=r"layers\.1\.v_proj.*calls take a slower path"):
        forward = get_family("sdpa_flash").build(stack, RAGGED, device, operand_dtype="float16")
    check_every_call(forward, stack, RAGGED, device, close)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["encoder", "decoder", "all"])
def test_a_built_forward_becomes_part_of_a_graph(device, name):
    stack = Stack(RAGGED, FORMS[name]).to(device)
    forward = get_family("sdpa_flash").build(stack, RAGGED, device)
    _, mask, bias = calls(RAGGED, stack.form, device)[-1]
    x = torch.zeros(3, 37, 48, device=device)
    given = (x, mask, bias) if stack.form.score_bias else (x, mask)
    with torch.inference_mode():
        forward(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(*given)
        x.normal_()
        graph.replay()
        expected = plain(copy.deepcopy(stack).double(), False, x.double(), mask, bias)
    assert within_gate(out, expected)
