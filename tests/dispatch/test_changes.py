"""What changes after optimize(): weights by every way there is to write them, parts, settings, and calls in disguise.

The module's own eager answer is the right one each time.
"""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune

from rooflane.baseline import build_baseline
from rooflane.dispatch import OptimizeError, optimize
from rooflane.shapes import Shape

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

B, S, D, H, F = 3, 7, 16, 2, 24
TOLERANCE = {"atol": 3e-5, "rtol": 3e-5}


def build_encoder(seed: int = 0, **changes) -> nn.TransformerEncoder:
    settings = {"activation": "gelu", "batch_first": True, "norm_first": True} | changes
    layer = nn.TransformerEncoderLayer(D, H, F, **settings)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + torch.randn(parameter.shape, generator=generator) * 0.2)
    return encoder.eval()


def make_rules(write_rules, family: str):
    return write_rules(f'[[rule]]\nname = "all"\nwhen = {{}}\nfamily = "{family}"\nbecause = "a test"\n')


@pytest.fixture
def rules(write_rules):
    return make_rules(write_rules, "sdpa_flash")


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def encoder():
    return build_encoder()


@pytest.fixture
def fast(encoder, x, rules):
    return optimize(encoder, x, rules=rules)


@pytest.fixture(autouse=True)
def plain_operations():
    """Turn PyTorch's fast path off, which skips hooks and replaced parts and would answer wrongly itself."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


def step(make):
    """Return a change: one step of an optimiser that is gone afterwards, with gradients of 1."""

    def change(encoder):
        for parameter in encoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(encoder.parameters()).step()
        encoder.zero_grad()

    return change


def step_on_a_flat_parameter(encoder):
    """Move two weights into one memory, as sharded training does, and step on that."""
    linear = encoder.layers[0].linear1
    flat = nn.Parameter(torch.cat([linear.weight.detach().flatten(), linear.bias.detach()]))
    linear.weight.data, linear.bias.data = flat.data[: F * D].view(F, D), flat.data[F * D :]
    flat.grad = torch.ones_like(flat)
    torch.optim.SGD([flat], 0.1, fused=True).step()


def merge_an_adapter(encoder):
    for layer in encoder.layers:
        layer.linear1.weight.data += torch.full((F, 2), 0.2) @ torch.full((2, D), 0.3)


def through_numpy(encoder):
    encoder.layers[1].linear2.weight.detach().numpy()[:] *= 2


def through_dlpack(encoder):
    torch.from_dlpack(np.from_dlpack(encoder.norm.weight.detach())).mul_(3)


def exchange(encoder):
    one, other = encoder.layers[0].linear1.weight, encoder.layers[1].linear1.weight
    one.data, other.data = other.data, one.data


WRITES = {
    "SGD fused": step(lambda p: torch.optim.SGD(p, 0.1, fused=True)),
    "Adam fused": step(lambda p: torch.optim.Adam(p, 0.1, fused=True)),
    "AdamW fused": step(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
    "Adagrad fused": step(lambda p: torch.optim.Adagrad(p, 0.1, fused=True)),
    "SGD foreach": step(lambda p: torch.optim.SGD(p, 0.1, foreach=True)),
    "a step on a flat parameter": step_on_a_flat_parameter,
    "foreach": lambda e: torch._foreach_mul_([p.detach() for p in e.parameters()], 1.5),
    "foreach on .data": lambda e: torch._foreach_mul_([p.data for p in e.parameters()], 1.5),
    ".data.add_": lambda e: e.layers[0].linear1.weight.data.add_(0.3),
    ".data of a norm": lambda e: e.layers[1].norm1.bias.data.add_(0.3),
    ".data of packed projections": lambda e: e.layers[1].self_attn.in_proj_weight.data.mul_(2),
    ".data =": lambda e: setattr(e.layers[0].linear1.weight, "data", torch.ones(F, D)),
    ".data exchanged": exchange,
    "a merged adapter": merge_an_adapter,
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "a parameter put in place": lambda e: e.layers[0].linear1._parameters.update(weight=nn.Parameter(torch.ones(F, D))),
    "a part of the same kind": lambda e: setattr(e.layers[0], "linear1", nn.Linear(D, F)),
}


@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
@pytest.mark.parametrize("kind", ["encoder", "baseline"])
def test_weights_written_in_any_way_are_used_at_the_next_call(kind, family, x, write_rules):
    shape = Shape("s", B, S, D, H, F, 2, causal=False)
    writes = WRITES if kind == "encoder" else BASELINE_WRITES
    for name, write in writes.items():
        module = build_encoder() if kind == "encoder" else build_baseline(shape, "cpu", 0)
        fast = optimize(module, shape, rules=make_rules(write_rules, family), on_unseen="error")
        with torch.inference_mode():
            before = fast(x)
        with torch.no_grad():
            write(module)
        with torch.inference_mode():
            found, expected = fast(x), module.double()(x.double())
        assert not torch.allclose(found, before, **TOLERANCE), f"{name} changes the answer"
        torch.testing.assert_close(found.double(), expected, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


BASELINE_WRITES = {
    "SGD fused": WRITES["SGD fused"],
    ".data of a projection": lambda m: m.layers[0].attention.k_proj.weight.data.mul_(3),
    ".data of the final norm": lambda m: m.final_norm.weight.data.mul_(2),
    "numpy": lambda m: np.multiply(
        m.layers[1].ffn_in.bias.detach().numpy(), 3, m.layers[1].ffn_in.bias.detach().numpy()
    ),
}


def test_an_optimiser_of_another_model_packs_nothing():
    from rooflane.families.runtime.watch import ModelWatch

    watch = ModelWatch(build_encoder())
    step(lambda p: torch.optim.SGD(p, 0.1, fused=True))(build_encoder())
    assert not watch.changed()


def test_repack_reports_a_write_that_torch_does_not_record(fast, x):
    from rooflane.families.runtime.watch import ModelWatch

    watch = ModelWatch(fast._model)
    fast.repack()
    assert watch.changed() and not watch.changed()


@pytest.mark.parametrize("where", ["itself", "a parent", "some of them"])
def test_parameters_swapped_for_a_call_are_those_of_that_call_alone(where, encoder, fast, x):
    doubled = {name: value * 2 for name, value in encoder.state_dict().items()}
    if where == "some of them":
        doubled = {name: value for name, value in doubled.items() if "linear1" in name}
    call = (encoder, fast, doubled)
    if where == "a parent":
        prefixed = {f"0.{name}": value for name, value in doubled.items()}
        call = (nn.Sequential(encoder), nn.Sequential(fast), prefixed)
    with torch.no_grad():
        plain = encoder(x)
        torch.testing.assert_close(fast(x), plain, **TOLERANCE)
        expected = functional_call(call[0], call[2], (x,))
        assert not torch.allclose(expected, plain, atol=1e-3)
        torch.testing.assert_close(functional_call(call[1], call[2], (x,)), expected, **TOLERANCE)
        torch.testing.assert_close(fast(x), plain, **TOLERANCE)


@sdpa_kernel(SDPBackend.MATH)  # the other kernels have no rule for vmap, and warn
def test_transforms_of_torch_func_run_the_modules_own_forward(encoder, x, rules):
    models = [build_encoder(seed) for seed in range(3)]
    parameters, _ = stack_module_state(models)
    fast = optimize(encoder, x, rules=rules)
    with pytest.warns(UserWarning, match="inside a transform of torch.func"), torch.no_grad():
        found = vmap(lambda p: functional_call(fast, p, (x,)))(parameters)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]), **TOLERANCE)
    inputs = torch.stack([x, 2 * x])
    with torch.no_grad():
        torch.testing.assert_close(vmap(fast)(inputs), torch.stack([encoder(x), encoder(2 * x)]), **TOLERANCE)
    found = grad(lambda one: fast(one).square().sum())(x)
    torch.testing.assert_close(found, grad(lambda one: encoder(one).square().sum())(x), **TOLERANCE)


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def prune_a_weight(encoder):
    prune.l1_unstructured(encoder.layers[0].linear1, "weight", amount=0.5)


def normalise_a_weight(encoder):
    linear = parametrizations.weight_norm(encoder.layers[0].linear1)
    linear.parametrizations.weight.original0.data.mul_(2)


def quantise(encoder):
    # As torch's dynamic quantisation does it: another class in the place of the Linear.
    class Quantised(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.register_buffer("weight", (linear.weight.detach() * 16).round().to(torch.int8))
            self.bias = linear.bias

        def forward(self, x):
            return functional.linear(x, self.weight.float() / 16, self.bias)

    encoder.layers[0].linear1 = Quantised(encoder.layers[0].linear1)


CHANGES = {
    "a layer deleted": lambda e: e.layers.__delitem__(1),
    "a layer appended": lambda e: e.layers.append(copy.deepcopy(e.layers[0])),
    "a layer inserted": lambda e: e.layers.insert(0, copy.deepcopy(e.layers[1])),
    "layers in another list": lambda e: setattr(e, "layers", nn.ModuleList([e.layers[0]])),
    "a wider feed-forward": lambda e: (
        setattr(e.layers[0], "linear1", nn.Linear(D, 2 * F)), setattr(e.layers[0], "linear2", nn.Linear(2 * F, D))
    ),
    "a norm of another kind": lambda e: setattr(e.layers[0], "norm1", nn.RMSNorm(D)),
    "a norm with a forward of its own": lambda e: setattr(e.layers[1], "norm2", Shifted(D)),
    "a norm over two axes": lambda e: setattr(e, "norm", nn.LayerNorm((S, D))),
    "no final norm": lambda e: setattr(e, "norm", None),
    "eps of one norm": lambda e: setattr(e.layers[0].norm1, "eps", 0.5),
    "the activation": lambda e: setattr(e.layers[1], "activation", functional.relu),
    "the heads": lambda e: vars(e.layers[0].self_attn).update(num_heads=4, head_dim=4),
    "post-norm": lambda e: setattr(e.layers[0], "norm_first", False),
    "a hook": lambda e: e.layers[0].linear1.register_forward_hook(lambda module, args, out: out + 1),
    "a hook before": lambda e: e.layers[1].norm1.register_forward_pre_hook(lambda module, args: (args[0] ** 3,)),
    "a hook on the module": lambda e: e.register_forward_hook(lambda module, args, out: out + 1),
    "a forward of its own": lambda e: setattr(e.layers[0].linear2, "forward", lambda x: x[..., :D]),
    "a parametrization": lambda e: parametrize.register_parametrization(e.layers[0].linear1, "weight", Doubled()),
    "weight norm": normalise_a_weight,
    "pruned weights": prune_a_weight,
    "a quantised part": quantise,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_function_runs_the_modules_own_forward_and_says_so(change, encoder, fast, x):
    with torch.no_grad():
        before = fast(x)
        CHANGES[change](encoder)
        encoder.eval()
        expected = encoder(x)
        assert not torch.allclose(expected, before, atol=1e-3), "the change shows"
        with pytest.warns(UserWarning, match="the module was changed after optimize|the module has other sizes"):
            torch.testing.assert_close(fast(x), expected, **TOLERANCE)
        torch.testing.assert_close(fast(x), expected, **TOLERANCE)


def test_what_is_changed_back_is_built_again(encoder, x, rules):
    fast = optimize(encoder, x, rules=rules, on_unseen="error")
    handle = encoder.layers[0].register_forward_hook(lambda *arguments: None)
    with torch.no_grad():
        with pytest.raises(OptimizeError, match="forward hook on the submodule 'layers.0'"):
            fast(x)
        handle.remove()
        torch.testing.assert_close(fast(x), encoder(x), **TOLERANCE)
        for norm in (module for module in encoder.modules() if isinstance(module, nn.LayerNorm)):
            norm.eps = 0.1
        torch.testing.assert_close(fast(x), encoder(x), **TOLERANCE)


def test_hooks_on_all_modules_and_a_training_part_run_the_modules_own_forward(encoder, fast, x):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out + 1 if isinstance(module, nn.Linear) else None
    )
    try:
        with torch.no_grad(), pytest.warns(UserWarning, match="hook is registered on all modules"):
            torch.testing.assert_close(fast(x), encoder(x), **TOLERANCE)
    finally:
        handle.remove()
    encoder.layers[1].dropout1.train()
    with torch.no_grad(), pytest.warns(UserWarning, match="training mode"):
        torch.manual_seed(3)
        found = fast(x)
        torch.manual_seed(3)
        assert torch.equal(found, encoder(x))


BASELINE_CHANGES = {
    "a layer deleted": lambda m: m.layers.__delitem__(1),
    "the scale": lambda m: setattr(m.layers[0].attention, "scale", 2.0),
    "eps": lambda m: setattr(m.layers[1].norm2, "eps", 0.5),
    "a projection of another kind": lambda m: setattr(m.layers[0].attention, "q_proj", nn.Identity()),
}


@pytest.mark.parametrize("change", BASELINE_CHANGES)
def test_a_changed_baseline_runs_its_own_forward(change, x, rules):
    model = build_baseline(Shape("s", B, S, D, H, F, 2), "cpu", 0)
    fast = optimize(model, x, rules=rules)
    with torch.no_grad():
        fast(x)
        BASELINE_CHANGES[change](model)
        with pytest.warns(UserWarning, match="the module was changed after optimize"):
            torch.testing.assert_close(fast(x), model(x), **TOLERANCE)


@pytest.mark.parametrize("way", ["export", "trace", "compile"])
def test_programs_made_from_a_dispatched_module_read_the_weights_at_every_call(way, encoder, fast, x):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "export":
            made = torch.export.export(fast, (x,)).module()
        elif way == "trace":
            made = torch.jit.trace(fast, (x,), check_trace=False)
        else:
            made = torch.compile(fast, backend="eager")
        torch.testing.assert_close(made(x), encoder(x), **TOLERANCE)
        state = build_encoder(9).state_dict()
        (made if way == "export" else fast).load_state_dict(state)
        torch.testing.assert_close(made(x), build_encoder(9)(x), **TOLERANCE)


def test_programs_are_refused_where_nothing_but_built_forwards_is_allowed(encoder, x, rules):
    fast = optimize(encoder, x, rules=rules, on_unseen="error")
    with pytest.raises(OptimizeError, match="traced, compiled or exported by its own operations"), torch.no_grad():
        torch.jit.trace(fast, (x,), check_trace=False)


NORMS = {
    "norm1": lambda e: setattr(e.layers[0], "norm1", nn.LayerNorm((S, D))),
    "norm2": lambda e: setattr(e.layers[1], "norm2", nn.LayerNorm((S, D))),
    "the final norm": lambda e: setattr(e, "norm", nn.LayerNorm((S, D))),
    "a width that is not the model's": lambda e: setattr(e, "norm", nn.LayerNorm(1)),
}


@pytest.mark.parametrize("change", NORMS)
def test_norms_over_other_axes_are_refused(change, encoder, x, rules):
    NORMS[change](encoder)
    with pytest.raises(OptimizeError, match=r"normalises over .* the families normalise each token's \(16,\) alone"):
        optimize(encoder.eval(), x, rules=rules)


def test_a_forward_of_a_parts_own_and_a_parametrization_are_refused(x, rules):
    encoder = build_encoder()
    encoder.norm.forward = lambda x: x
    with pytest.raises(OptimizeError, match="norm is a LayerNorm, which computes neither"):
        optimize(encoder, x, rules=rules)
    encoder = build_encoder()
    parametrize.register_parametrization(encoder.layers[1].linear2, "weight", Doubled())
    with pytest.raises(OptimizeError, match=r"layers.1.linear2 has a parametrization.*remove_parametrizations"):
        optimize(encoder, x, rules=rules)
    parametrize.remove_parametrizations(encoder.layers[1].linear2, "weight")
    with torch.no_grad():
        torch.testing.assert_close(optimize(encoder, x, rules=rules)(x), encoder(x), **TOLERANCE)


@pytest.fixture(params=["meta", "float64", "set_default_device"])
def defaults(request):
    """Set a default device or number type, as a script that makes models without memory does."""
    if request.param == "float64":
        torch.set_default_dtype(torch.float64)
    elif request.param == "set_default_device":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if request.param == "meta" else warnings.catch_warnings():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
def test_defaults_of_device_and_number_type_change_nothing(defaults, family, write_rules):
    x = torch.randn(B, S, D, generator=torch.Generator("cpu").manual_seed(1), device="cpu", dtype=torch.float32)
    with torch.device("cpu"):
        encoder = build_encoder().float()
        encoder.layers[0].activation = nn.GELU()
        causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float32)
    padding = torch.zeros(B, S, dtype=torch.bool, device="cpu")
    padding[1, 4:] = True
    fast = optimize(encoder, x, mask=causal, rules=make_rules(write_rules, family), on_unseen="error")
    with torch.no_grad():
        found = fast(x, causal, padding)
    assert found.device.type == "cpu" and found.dtype == torch.float32
    with torch.device("cpu"), torch.no_grad():
        expected = encoder.double()(x.double(), causal.isinf(), padding).float()
    torch.testing.assert_close(found[~padding], expected[~padding], **TOLERANCE)
