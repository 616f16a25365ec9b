"""optimize() on torch.nn.TransformerEncoder and a single layer: PyTorch's own module is the reference."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from rooflane.dispatch import OptimizeError, load_rules, optimize, route
from rooflane.shapes import Form, Shape

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

B, S, D, H, F = 3, 7, 16, 2, 24
# float32 on a CPU: the two differ in the order of sums only.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S)
PADDING = torch.arange(S) >= torch.tensor([[S], [4], [1]])


def build_layer(**changes) -> nn.TransformerEncoderLayer:
    settings = {"dim_feedforward": F, "activation": "gelu", "batch_first": True, "norm_first": True} | changes
    return nn.TransformerEncoderLayer(D, settings.pop("nhead", H), **settings)


def build_encoder(layers: int = 2, final_norm: bool = True, **changes) -> nn.TransformerEncoder:
    norm = nn.LayerNorm(D) if final_norm else None
    return randomised(nn.TransformerEncoder(build_layer(**changes), layers, norm, enable_nested_tensor=False))


def randomised(module: nn.Module) -> nn.Module:
    """Give every parameter values of its own: PyTorch starts biases at 0 and layers equal, which hides mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


@pytest.fixture
def rules(write_rules):
    return write_rules('[[rule]]\nname = "all"\nwhen = {}\nfamily = "sdpa_flash"\nbecause = "a test"\n')


@pytest.fixture
def encoder():
    return build_encoder()


@pytest.fixture
def fast(encoder, x, rules):
    return optimize(encoder, x, rules=rules)


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))


@contextmanager
def off_fast_path():
    """Let PyTorch run its layers op by op: its fast path takes other masks for bool, and any GELU for the exact one."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def assert_valid_rows_close(out, reference, padding=None):
    valid = torch.ones(B, S, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(out[valid], reference.to(out.dtype)[valid], **TOLERANCE)
    assert not out[~valid].any(), "rows of padded tokens are 0"


MODULES = {
    "a final norm": lambda: build_encoder(3),
    "no final norm": lambda: build_encoder(final_norm=False),
    "no biases": lambda: build_encoder(bias=False),
    "one layer, one head": lambda: build_encoder(1, nhead=1),
    "gelu as a module": lambda: build_encoder(activation=nn.GELU()),
    "another eps": lambda: build_encoder(final_norm=False, layer_norm_eps=1e-3),
    "a single layer": lambda: randomised(build_layer()),
}


@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "ragged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_the_output_is_pytorchs_own_and_that_of_float64(kind, causal, padding, family, x, write_rules):
    module = MODULES[kind]()
    shape = Shape("s", B, S, D, H if "one head" not in kind else 1, F, len(getattr(module, "layers", [0])), causal)
    rules = write_rules(f'[[rule]]\nname = "all"\nwhen = {{}}\nfamily = "{family}"\nbecause = "a test"\n')
    fast = optimize(module, shape, rules=rules, on_unseen="error")
    call = {"src_key_padding_mask": padding, "is_causal": causal}
    # One type for both masks, as PyTorch wants; boolean True hides.
    mask = CAUSAL.isinf() if causal else None
    with torch.inference_mode():
        out = fast(x, mask, **call)
        assert_valid_rows_close(out, module(x, mask, **call), padding)
        assert_valid_rows_close(out, copy.deepcopy(module).double()(x.double(), mask, **call), padding)


@pytest.mark.parametrize(
    "call",
    [
        {"mask": CAUSAL},
        {"mask": CAUSAL.isinf()},
        {"mask": CAUSAL, "is_causal": True},
        {"mask": CAUSAL, "is_causal": False},
        {"is_causal": True},
        {"is_causal": True, "src_key_padding_mask": PADDING},
        {"mask": CAUSAL, "src_key_padding_mask": torch.zeros(B, S).masked_fill(PADDING, float("-inf"))},
    ],
    ids=["additive", "bool", "hinted", "found", "alone", "padded", "additive padding"],
)
def test_every_way_to_say_causal_is_understood(encoder, x, rules, call):
    fast = optimize(encoder, x, mask=CAUSAL, rules=rules, on_unseen="error")
    padding = call.get("src_key_padding_mask")
    with torch.inference_mode():
        reference = encoder(x, CAUSAL, None if padding is None else PADDING.float().masked_fill(PADDING, -torch.inf))
        assert_valid_rows_close(fast(x, **call), reference, None if padding is None else PADDING)


@pytest.mark.parametrize("mask", [torch.zeros(S, S), torch.zeros(S, S, dtype=torch.bool)])
def test_a_mask_that_hides_nothing_is_no_mask(fast, encoder, x, mask):
    with torch.inference_mode():
        assert_valid_rows_close(fast(x, mask), encoder(x))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"mask": CAUSAL + torch.eye(S)}, r"x is \(3, 7, 16\) not causal with a bias on the scores, the dispatched"),
        ({"mask": CAUSAL}, r"x is \(3, 7, 16\) causal, the dispatched forward was built for \(3, 7, 16\) not causal"),
    ],
)
def test_other_masks_run_pytorchs_own_forward_and_say_so_once(fast, encoder, x, call, reason):
    with torch.inference_mode():
        with pytest.warns(UserWarning, match=reason):
            out = fast(x, **call)
        torch.testing.assert_close(out, encoder(x, **call), equal_nan=True)
        fast(x, **call)


WINDOW = (torch.arange(S)[:, None] - torch.arange(S)).abs() > 2
# In-context tables: every row sees the first four, which hold the examples, and itself.
EXAMPLES = ~((torch.arange(S) < 4) | torch.eye(S, dtype=torch.bool))
MASKS = {
    "a window": WINDOW,
    "examples": EXAMPLES,
    "additive": CAUSAL + torch.eye(S),
    "of each head": torch.stack([CAUSAL.isinf(), WINDOW]).repeat(B, 1, 1),
    "additive of each head": torch.randn(B * H, S, S, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("padding", [None, PADDING, torch.zeros(B, S).masked_fill(PADDING, -3.0)], ids=type)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_any_other_mask_is_a_bias_of_the_scores(x, rules, mask, padding):
    encoder = build_encoder().eval()
    fast = optimize(encoder, x, mask=mask, rules=rules, on_unseen="error")
    own_mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
    own_padding = padding
    if padding is not None and padding.dtype == torch.bool:
        own_padding = torch.zeros(B, S).masked_fill(padding, -torch.inf)
    hidden = padding if padding is not None and padding.dtype == torch.bool else None
    with torch.inference_mode(), off_fast_path():
        assert_valid_rows_close(fast(x, mask, padding), encoder(x, own_mask, own_padding), hidden)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.zeros(S, S - 1), r"the attention mask is \(7, 6\); served: \[7, 7\] and \[6, 7, 7\]"),
        (torch.zeros(S, S, dtype=torch.int64), "the attention mask is torch.int64; PyTorch takes bool and floating"),
    ],
)
def test_an_example_with_a_mask_of_another_kind_is_refused(encoder, x, rules, mask, reason):
    with pytest.raises(OptimizeError, match="the example call cannot be optimised: " + reason):
        optimize(encoder, x, mask=mask, rules=rules)


FORMS = {
    "PyTorch's defaults": {"norm_first": False, "activation": "relu"},
    "post-norm": {"norm_first": False},
    "post-norm without a final norm": {"norm_first": False, "final_norm": False},
    "relu": {"activation": "relu"},
    "tanh": {"activation": nn.GELU(approximate="tanh")},
    "silu": {"activation": functional.silu},
    "no biases": {"bias": False},
    "post-norm, no biases": {"norm_first": False, "bias": False, "final_norm": False},
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_every_form_of_pytorchs_encoder(x, rules, changes):
    encoder = build_encoder(**changes).eval()
    exact = copy.deepcopy(encoder).double()
    fast = optimize(encoder, [x, x[:1, :5]], rules=rules, on_unseen="error", cache_size=2)
    with torch.inference_mode(), off_fast_path():
        for given in (x, x[:1, :5]):
            torch.testing.assert_close(fast(given), exact(given.double()).float(), **TOLERANCE)
        expected = exact(x.double(), src_key_padding_mask=PADDING).float()
        assert_valid_rows_close(fast(x, src_key_padding_mask=PADDING), expected, PADDING)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(1.1)
    with torch.inference_mode(), off_fast_path():
        assert_valid_rows_close(fast(x), copy.deepcopy(encoder).double()(x.double()).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_model_in_pytorchs_default_form(x, rules, dtype):
    encoder = build_encoder(**FORMS["PyTorch's defaults"]).eval()
    exact = copy.deepcopy(encoder).double()
    fast = optimize(encoder.to(dtype), x.to(dtype), rules=rules, on_unseen="error")
    with torch.inference_mode():
        expected = exact(x.double())
        own = (encoder(x.to(dtype)).double() - expected).norm()
        # Our residual is float32, PyTorch's is rounded to the model's type after each sum.
        assert (fast(x.to(dtype)).double() - expected).norm() < 1.2 * own


def test_is_causal_alone_means_the_same_in_the_fallback(encoder, x, rules):
    # PyTorch's own forward ignores the flag on its fast path and refuses it on the other.
    fast = optimize(encoder, x[:1], rules=rules)
    with torch.inference_mode(), pytest.warns(UserWarning, match="causal"):
        assert_valid_rows_close(fast(x, is_causal=True), encoder(x, CAUSAL))


def test_a_sequence_of_padding_alone_gives_zeros_and_harms_no_other(fast, encoder, x):
    padding = PADDING.clone()
    padding[1] = True
    with torch.inference_mode():
        out = fast(x, src_key_padding_mask=padding)
        assert_valid_rows_close(out, encoder(x, src_key_padding_mask=padding), padding)
    assert not out[1].any()


def test_padding_on_the_left_of_a_causal_call(encoder, x, rules):
    # PyTorch's fast path turns such rows into NaN, which is why the other one is the reference.
    padding = PADDING.flip(1)
    fast = optimize(encoder, x, mask=CAUSAL, rules=rules)
    with torch.inference_mode(), off_fast_path():
        reference = encoder(x, CAUSAL.isinf(), padding)
        assert_valid_rows_close(fast(x, is_causal=True, src_key_padding_mask=padding), reference, padding)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            lambda: build_encoder(activation=functional.softplus),
            "softplus of .* differs from relu, .* by 0.69; served: gelu, gelu_tanh",
        ),
        (lambda: build_encoder(activation=lambda x: 1 / 0), "<lambda> of .* cannot be tried .* .division by zero."),
        (lambda: build_encoder(batch_first=False), "layers.0 has batch_first=False"),
        (lambda: build_encoder().double(), "is torch.float64; the families take"),
        (lambda: build_encoder().train(), "in training mode with dropout in layers.0.self_attn; call model.eval"),
        (lambda: build_layer(dropout=0.0), "in training mode and built forwards compute no gradients"),
        (lambda: nn.TransformerEncoder(build_layer(), 0, enable_nested_tensor=False), "has no layers"),
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H), 1), "TransformerDecoder has cross attention"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(module, reason, x, rules):
    with pytest.raises(OptimizeError, match=reason):
        optimize(module(), x, rules=rules)


def test_changed_parts_are_refused_with_their_place(encoder, x, rules):
    class OwnNorm(nn.LayerNorm):
        def forward(self, x):
            return x

    def refused(reason):
        with pytest.raises(OptimizeError, match=reason):
            optimize(encoder, x, rules=rules)

    encoder.layers[1].norm2 = OwnNorm(D).eval()
    refused("layers.1.norm2 is a OwnNorm, which computes neither LayerNorm nor RMSNorm")
    encoder.layers[1].norm2 = nn.BatchNorm1d(D).eval()
    refused("layers.1.norm2 is a BatchNorm1d, which computes neither")
    encoder.layers[1].norm2 = nn.RMSNorm(D).eval()
    refused("layers.0.norm1 is a layer norm and layers.1.norm2 a rms norm; a family takes one")
    encoder.layers[1].norm2 = nn.LayerNorm(D, eps=1e-6).eval()
    refused("differ in eps .layers.0.norm1 has 1e-05, layers.1.norm2 1e-06")
    encoder.layers[1] = randomised(build_layer(dim_feedforward=F + 1))
    refused("the layers of TransformerEncoder differ in size")
    encoder.layers[1] = randomised(build_layer())
    handle = encoder.layers[0].linear1.register_forward_pre_hook(lambda *args: None)
    refused("a forward hook on the submodule 'layers.0.linear1'")
    handle.remove()
    encoder.layers[0].self_attn = nn.MultiheadAttention(D, H, batch_first=True, add_bias_kv=True).eval()
    refused("layers.0.self_attn has kdim, vdim, add_bias_kv")


def test_a_shape_of_other_sizes_is_refused(encoder, rules):
    with pytest.raises(OptimizeError, match="shape s has num_heads 4, the model 2"):
        optimize(encoder, Shape("s", B, S, D, 4, F, 2), rules=rules)


def test_the_module_is_an_encoder_with_the_originals_own_weights(fast, encoder):
    assert isinstance(fast, nn.TransformerEncoder)
    assert list(fast.state_dict()) == list(encoder.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), encoder.parameters(), strict=True))
    assert fast.num_layers == 2 and not hasattr(fast, "norm_first")


def double_ffn(encoder):
    encoder.layers[0].linear2.weight.mul_(2)


def change_packed(encoder):
    encoder.layers[1].self_attn.in_proj_weight[D : 2 * D].mul_(-3)


def replace_parameter(encoder):
    encoder.layers[0].norm1.bias = nn.Parameter(torch.full((D,), 0.5))


def load(encoder):
    encoder.load_state_dict({name: tensor * 1.1 for name, tensor in encoder.state_dict().items()})


def load_by_assignment(encoder):
    state = {name: tensor * 1.1 for name, tensor in encoder.state_dict().items()}
    encoder.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [double_ffn, change_packed, replace_parameter, load, load_by_assignment])
@pytest.mark.parametrize("through", ["the original", "the module"])
def test_changed_weights_of_the_original_are_seen(fast, encoder, x, change, through):
    with torch.no_grad():
        before = fast(x)
        change(encoder if through == "the original" else fast)
        out = fast(x)
        assert not torch.allclose(out, before, atol=1e-3)
        assert_valid_rows_close(out, encoder(x))


def test_what_is_built_in_inference_mode_sees_changes_made_outside_it(encoder, x, rules):
    fast = optimize(encoder, x[:1], rules=rules, on_unseen="build")
    with torch.inference_mode():
        fast(x)
    with torch.no_grad():
        double_ffn(encoder)
        assert_valid_rows_close(fast(x), encoder(x))


def test_weights_come_back_from_a_state_dict(fast, encoder, x, rules):
    other = optimize(build_encoder(), x, rules=rules)
    with torch.no_grad():
        change_packed(encoder)
        other.load_state_dict(fast.state_dict())
        assert_valid_rows_close(other(x), encoder(x))


def by_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), by_torch_save])
def test_copies_have_weights_and_forwards_of_their_own(fast, encoder, x, clone):
    twin = clone(fast)
    with torch.no_grad():
        expected = encoder(x)
        assert_valid_rows_close(twin(x), expected)
        twin.layers[0].linear1.weight.zero_()
        assert_valid_rows_close(fast(x), expected)
        assert_valid_rows_close(twin(x), twin._model(x))
        assert not torch.allclose(twin(x), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_a_cast_module_is_built_for_its_new_dtype(final_norm, family, x, write_rules):
    rules = write_rules(f'[[rule]]\nname = "all"\nwhen = {{}}\nfamily = "{family}"\nbecause = "a test"\n')
    encoder = build_encoder(final_norm=final_norm)
    fast = optimize(encoder, x, rules=rules, on_unseen="error")
    with torch.inference_mode():
        reference = encoder(x)
        fast.bfloat16()
        out = fast(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert fast.route.shape.dtype == "bfloat16"
    torch.testing.assert_close(out.float(), reference, atol=0.1, rtol=0.05)


def test_gradients_flow_through_pytorchs_own_forward(fast, encoder, x):
    def gradients(module):
        inputs = x.clone().requires_grad_()
        encoder.zero_grad()
        (module(inputs, CAUSAL.isinf(), PADDING).square() * ~PADDING[:, :, None]).sum().backward()
        return [inputs.grad, *(parameter.grad.clone() for parameter in encoder.parameters())]

    expected = gradients(encoder)
    with pytest.warns(UserWarning, match="it needs gradients"):
        found = gradients(fast)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in expected)


@pytest.mark.parametrize("through", ["the original", "the module"])
def test_training_mode_drops_values_as_pytorch_does(fast, encoder, x, through):
    (encoder if through == "the original" else fast).train()
    assert encoder.training
    with torch.no_grad(), pytest.warns(UserWarning, match="training mode and drops values"):
        torch.manual_seed(0)
        out = fast(x)
    with torch.no_grad():
        torch.manual_seed(0)
        assert torch.equal(out, encoder(x))
        fast.eval()
        encoder.eval()
        assert_valid_rows_close(fast(x), encoder(x))
    assert not fast.training and not encoder.training


def test_a_layer_serves_inside_an_encoder(encoder, x, rules):
    with torch.inference_mode():
        expected = encoder(x, CAUSAL)
        for index, layer in enumerate(encoder.layers):
            encoder.layers[index] = optimize(layer, x, mask=CAUSAL, rules=rules, on_unseen="error")
        assert_valid_rows_close(encoder(x, CAUSAL), expected)


def test_a_family_that_always_norms_is_passed_over_without_a_final_norm(published, h200):
    chosen = route(published["1"], h200, load_rules(), Form(final_norm=False))
    assert route(published["1"], h200, load_rules()).family == "resident"
    assert chosen.family == "graph_compile"
    assert any("the model has no final norm" in rejection.reason for rejection in chosen.rejected)


GPU_SHAPES = {
    "resident": Shape("resident", 8, 64, 64, 4, 64, 2),
    "graph_compile": Shape("graph_compile", 4, 200, 128, 4, 256, 2),
    "gemm_fp16": Shape("gemm_fp16", 4, 200, 128, 4, 256, 2),
    "sdpa_flash": Shape("sdpa_flash", 4, 200, 128, 4, 256, 2),
    "chunked": Shape("chunked", 4, 200, 128, 4, 256, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("family", GPU_SHAPES)
def test_every_family_serves_an_encoder_on_a_gpu(family, final_norm, write_rules):
    from rooflane.eval import check_gate

    if family == "resident" and not final_norm:
        pytest.skip("resident always ends with a norm")
    shape = GPU_SHAPES[family]
    rules = write_rules(f'[[rule]]\nname = "all"\nwhen = {{}}\nfamily = "{family}"\nbecause = "a test"\n')
    layer = nn.TransformerEncoderLayer(shape.d_model, shape.num_heads, shape.ffn_dim, **build_settings())
    norm = nn.LayerNorm(shape.d_model) if final_norm else None
    encoder = nn.TransformerEncoder(layer, shape.num_layers, norm, enable_nested_tensor=False).cuda().eval()
    fast = optimize(encoder, shape, rules=rules, on_unseen="error")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape.batch_size, shape.seq_len, shape.d_model, generator=generator, device="cuda")
    lengths = torch.randint(1, shape.seq_len + 1, (shape.batch_size, 1), generator=generator, device="cuda")
    padding = torch.arange(shape.seq_len, device="cuda") >= lengths
    mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len, device="cuda").isinf()
    with torch.inference_mode():
        for call in ({}, {"src_key_padding_mask": padding}):
            valid = ~padding if call else torch.ones_like(padding)
            for _ in range(2):
                out = fast(x, mask, is_causal=True, **call)
                assert check_gate(out[valid], encoder(x, mask, **call)[valid]).passed
                assert not out[~valid].any()
            kept = out.clone()
            encoder.layers[0].linear1.weight.mul_(1.5)
            changed = fast(x, mask, is_causal=True, **call)
            assert check_gate(changed[valid], encoder(x, mask, **call)[valid]).passed
            assert torch.equal(out, kept), "the next call must not overwrite an output"


@pytest.mark.gpu
def test_an_evicted_forward_gives_its_memory_back(write_rules):
    rules = write_rules('[[rule]]\nname = "all"\nwhen = {}\nfamily = "sdpa_flash"\nbecause = "a test"\n')
    layer = nn.TransformerEncoderLayer(256, 4, 1024, **build_settings())
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(256), enable_nested_tensor=False).cuda().eval()
    x = torch.randn(16, 512, 256, device="cuda")
    fast = optimize(encoder, x, rules=rules, on_unseen="build", cache_size=1)
    used = []
    with torch.inference_mode():
        for batch in (16, 15, 14, 13, 12):
            fast(x[:batch])
            used.append(torch.cuda.memory_allocated())
    assert max(used[1:]) <= used[0] + (1 << 20)


def build_settings() -> dict:
    return {"activation": "gelu", "batch_first": True, "norm_first": True}
