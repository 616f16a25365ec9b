"""optimize(): the built forward where the call allows it, the model's own everywhere else."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from rooflane.baseline import BaselineTransformer, build_baseline
from rooflane.dispatch import OptimizeError, ProfileError, load_profile, optimize

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

RULES = '[[rule]]\nname = "all"\nwhen = {}\nfamily = "double"\noptions = { size = 3 }\nbecause = "a test"\n'


@pytest.fixture
def double(fake_families):
    """Stand-in family whose forward is twice the model's, so that a test sees which forward ran."""
    return fake_families(double={"options": ("size",)})["double"]


@pytest.fixture
def model(small):
    return build_baseline(small, "cpu", 0).requires_grad_(False)


@pytest.fixture
def dispatched(model, small, double, write_rules):
    return optimize(model, small, rules=write_rules(RULES))


@pytest.fixture
def x(small):
    return torch.randn(small.batch_size, small.seq_len, small.d_model, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask(small):
    return torch.arange(small.seq_len) < torch.tensor([[1], [3], [5]])


def test_calls_of_the_built_shape_run_the_family(dispatched, model, double, x, mask):
    assert torch.equal(dispatched(x, mask), 2 * model(x, mask))
    assert torch.equal(dispatched(x), 2 * model(x))
    assert len(double.builds) == 1
    assert double.builds[0].options == {"size": 3}
    assert dispatched.route.family == "double"


def test_the_module_is_a_baseline_with_the_models_own_weights(dispatched, model):
    assert isinstance(dispatched, BaselineTransformer)
    assert list(dispatched.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(dispatched.parameters(), model.parameters(), strict=True))
    assert dispatched.training == model.training


def test_a_built_module_does_not_join_the_state_dict(model, small, double, write_rules, monkeypatch):
    monkeypatch.setattr(double, "build", lambda *args, **options: nn.Linear(1, 1))
    assert list(optimize(model, small, rules=write_rules(RULES)).state_dict()) == list(model.state_dict())


def own_errors():
    """Let the model's own complaint about a malformed input pass: it comes from the forward the call was given to."""
    return contextlib.suppress(RuntimeError, ValueError)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, mask: (x[:2], mask[:2]), r"x is \(2, 5, 16\), the dispatched forward was built for \(3, 5, 16\)"),
        (lambda x, mask: (x.double(), mask), "the weights are torch.float64; the families take float32"),
        (lambda x, mask: (x[:, :, :8], mask), r"x is \(3, 5, 8\), the module's width is 16"),
        (lambda x, mask: (x[0], mask), r"x is no plain \[batch, sequence, width\] tensor"),
        (lambda x, mask: (x, mask[:, :1]), r"the mask is \(3, 1\) of torch.bool"),
        (lambda x, mask: (x.clone().requires_grad_(), mask), "it needs gradients"),
    ],
)
def test_other_calls_run_the_baseline_and_warn_once(dispatched, model, x, mask, change, reason):
    call = change(x, mask)
    reference = model.double() if call[0].dtype == torch.float64 else model
    with pytest.warns(UserWarning, match=reason), own_errors():
        assert torch.equal(dispatched(*call), reference(*call))
    with own_errors():
        dispatched(*call)


def test_trainable_weights_need_gradients_unless_they_are_off(dispatched, model, x):
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match="gradients"):
        assert dispatched(x).requires_grad
    with torch.no_grad():
        assert torch.equal(dispatched(x), 2 * model(x))
    with torch.inference_mode():
        assert torch.equal(dispatched(x), 2 * model(x))


def test_loaded_weights_are_those_of_the_model(dispatched, model, small, x):
    dispatched.load_state_dict(build_baseline(small, "cpu", 7).state_dict())
    assert torch.equal(dispatched(x), 2 * build_baseline(small, "cpu", 7)(x))
    assert torch.equal(dispatched(x), 2 * model(x))


def test_a_move_drops_what_was_built(dispatched, double, x):
    dispatched.to("cpu")
    dispatched(x)
    dispatched(x)
    assert len(double.builds) == 2


def test_a_cast_model_runs_its_own_forward(dispatched, model, x, double):
    dispatched.to(torch.float64)
    with pytest.warns(UserWarning, match="the weights are torch.float64"):
        assert torch.equal(dispatched(x.double()), model(x.double()))
    with pytest.warns(UserWarning, match="x is torch.float32, the weights are torch.float64"):
        pytest.raises(RuntimeError, dispatched, x)
    assert len(double.builds) == 1


def test_a_model_cast_to_a_dtype_the_families_take_is_built_anew(dispatched, model, x, double):
    dispatched.bfloat16()
    assert torch.equal(dispatched(x.bfloat16()), 2 * model(x.bfloat16()))
    assert [build.shape.dtype for build in double.builds] == ["float32", "bfloat16"]


def test_a_cast_of_the_original_is_seen(dispatched, model, x, double):
    model.half()
    assert torch.equal(dispatched(x.half()), 2 * model(x.half()))
    assert len(double.builds) == 2


def test_an_input_elsewhere_than_the_weights_reaches_the_baseline(dispatched, x):
    elsewhere = pytest.warns(UserWarning, match="x is on meta, the weights are on cpu")
    with elsewhere, pytest.raises(RuntimeError, match="device"):
        dispatched(x.to("meta"))


def test_a_move_to_a_device_without_profile_runs_the_baseline(dispatched, x):
    dispatched.to("meta")
    with pytest.warns(UserWarning, match="devices of type 'meta'"):
        assert dispatched(x.to("meta")).device.type == "meta"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_build_their_own_forward(dispatched, model, double, x, mask, clone):
    twin = clone(dispatched)
    twin.final_norm.weight.zero_()
    twin.final_norm.bias.zero_()
    assert not twin(x, mask).any()
    assert torch.equal(dispatched(x, mask), 2 * model(x, mask))
    assert len(double.builds) == 2
    assert double.builds[1].model.layers is twin.layers


def test_another_device_than_the_models_waits_for_the_move(model, small, double, write_rules, monkeypatch):
    from rooflane.dispatch import dispatched as module

    monkeypatch.setattr(module, "profile_of", lambda device: load_profile("h200"))
    moved = optimize(model, small, "cuda", rules=write_rules(RULES))
    assert moved.route.profile == "h200"
    assert not double.builds


def test_a_given_profile_is_used(model, small, double, write_rules):
    profile = load_profile("cpu").with_figure("memory", 1, "assumed", "a cap")
    found = optimize(model, small, rules=write_rules(RULES), profile=profile).route
    assert found.classification.memory_bytes == 10**9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"d_model": 32}, "shape small has d_model 32, the model 16"),
        ({"causal": False}, "causal False, the model True"),
        ({"dtype": "float16"}, "the model's weights are torch.float32"),
    ],
)
def test_a_model_of_other_sizes_is_refused(model, small, changes, complaint):
    with pytest.raises(OptimizeError, match=complaint):
        optimize(model, replace(small, **changes))


def test_another_kind_of_model_is_refused(small):
    with pytest.raises(OptimizeError, match=r"Linear is no module that optimize\(\) can read with a shape: it takes"):
        optimize(nn.Linear(1, 1), small)
    with pytest.raises(OptimizeError, match="Sequential has no stack .* no list of blocks with attention, but 2"):
        optimize(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    decoder = nn.TransformerDecoderLayer(16, 2, batch_first=True)
    with pytest.raises(OptimizeError, match="TransformerDecoderLayer has cross attention"):
        optimize(decoder, small)


def test_a_baseline_whose_norms_differ_in_eps_is_refused(model, small):
    model.final_norm.eps = 1e-6
    with pytest.raises(OptimizeError, match="differ in eps .layers.0.norm1 has 1e-05, final_norm 1e-06"):
        optimize(model, small)


def test_a_forward_hook_is_refused_with_its_place(model, small):
    model.layers[1].ffn_in.register_forward_hook(lambda *args: None)
    with pytest.raises(OptimizeError, match="a forward hook on the submodule 'layers.1.ffn_in'"):
        optimize(model, small)


def test_weights_without_a_number_format_of_the_families_are_refused(model, small):
    with pytest.raises(OptimizeError, match="is torch.float64; the families take float32, float16, bfloat16"):
        optimize(model.double(), small)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device this machine has")
def test_a_missing_device_is_named(model, small, double, write_rules):
    with pytest.raises(ProfileError, match="the device asked for is cuda, but torch finds no CUDA device"):
        optimize(model, small, "cuda", rules=write_rules(RULES))


@pytest.mark.parametrize("causal", [True, False])
def test_the_shipped_families_agree_with_the_baseline_on_a_cpu(x, mask, small, causal):
    # Wide and long enough for the device time to outweigh the launches: no compiler is needed for such a shape.
    shape = replace(small, seq_len=128, d_model=64, ffn_dim=64, batch_size=16, causal=causal)
    model = build_baseline(shape, "cpu", 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.batch_size, shape.seq_len, shape.d_model, generator=generator)
    mask = torch.arange(shape.seq_len) < torch.randint(1, shape.seq_len + 1, (shape.batch_size, 1), generator=generator)
    built = optimize(model, shape)
    with torch.inference_mode():
        torch.testing.assert_close(built(x, mask), model(x, mask), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 5, 16), [3, 5, 16]])
def test_bare_sizes_are_explained(small, sizes):
    from rooflane.baseline import build_baseline

    with pytest.raises(OptimizeError, match=r"sizes alone leave out heads and layers: give a rooflane Shape, or an "):
        optimize(build_baseline(small, "cpu", seed=1), sizes)
