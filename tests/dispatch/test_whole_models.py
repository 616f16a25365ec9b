"""optimize() on a whole model: its stacks are served in place, and everything else works as before."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rooflane.dispatch import OptimizeError, optimize, restore, served

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("warnings_are_errors")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(0))
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=40, **SIZES)).eval()


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=40, bos_token_id=1)
    return transformers.GPT2LMHeadModel(config).eval()


def hidden(model, ids=IDS, **more):
    with torch.inference_mode():
        return model(ids, **more).last_hidden_state


def test_the_model_itself_is_returned_with_its_keys_and_its_answer(bert):
    expected, keys, kinds = hidden(bert), list(bert.state_dict()), [type(module) for module in bert.modules()]
    assert optimize(bert) is bert
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)
    assert list(bert.state_dict()) == keys and [type(module) for module in bert.modules()] == kinds
    (stack,) = served(bert)
    assert (stack.path, stack.blocks, stack.stack.form.norm_first) == ("encoder.layer", 3, False)
    assert [route.family for route in stack.stack.routes] == ["sdpa_flash"]
    text = stack.explain()
    assert text.startswith("encoder.layer: 3 x BertLayer: served (post-norm, no final norm)\n  2x11x32 h4 f48 l3 full")


def test_restore_undoes_it_and_a_second_call_does_no_harm(bert):
    expected = hidden(bert)
    stack = served(optimize(optimize(bert)))[0].stack
    assert served(optimize(bert))[0].stack is stack
    assert restore(bert) is bert
    assert not any("forward" in vars(module) for module in bert.modules())
    torch.testing.assert_close(hidden(bert), expected, rtol=0, atol=0)
    assert "not served" in served(bert)[0].explain()


def test_no_block_runs_its_own_code(bert):
    optimize(bert)
    hidden(bert)
    for block in bert.encoder.layer:
        block.intermediate.dense.register_forward_hook(lambda *given: pytest.fail("a block ran"))
    with (
        pytest.warns(UserWarning, match="forward hook on the submodule"),
        pytest.raises(BaseException, match="a block"),
    ):
        hidden(bert)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_serves_its_own_weights(bert, way):
    expected = hidden(optimize(bert))
    if way == "deepcopy":
        twin = copy.deepcopy(bert)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(bert))
    else:
        file = io.BytesIO()
        torch.save(bert, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    torch.testing.assert_close(hidden(twin), expected, **CLOSE)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)
    own = hidden(restore(copy.deepcopy(twin)))
    assert not torch.allclose(own, expected, atol=1e-2)
    torch.testing.assert_close(hidden(twin), own, **CLOSE)


def test_hidden_states_and_attentions_are_the_models_own_and_later_calls_are_served_again(bert):
    bert.set_attn_implementation("eager")
    with torch.inference_mode():
        own = bert(IDS, output_hidden_states=True, output_attentions=True)
    optimize(bert)
    expected = hidden(bert)
    with torch.inference_mode(), pytest.warns(UserWarning, match="collects hidden states or attentions"):
        found = bert(IDS, output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == 4 and len(found.attentions) == 3
    for name in ("hidden_states", "attentions"):
        for one, other in zip(found[name], own[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    stack = served(bert)[0].stack
    assert stack._built.get((2, 11, False, False)).called
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)
    assert stack._built.get((2, 11, False, False)).called


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers.__delitem__(1),
        lambda layers: layers.__delitem__(0),
        lambda layers: layers.append(copy.deepcopy(layers[2])),
        lambda layers: layers.__setitem__(2, copy.deepcopy(layers[1])),
        lambda layers: setattr(layers[1], "forward", lambda x, *given, **more: x),
        lambda layers: setattr(layers[1].attention.output.LayerNorm, "eps", 0.5),
    ],
    ids=["deleted", "first deleted", "appended", "replaced", "a forward of its own", "eps"],
)
def test_a_changed_list_of_blocks_gives_the_models_own_answer(bert, change):
    hidden(optimize(bert))
    twin = restore(copy.deepcopy(bert))
    change(bert.encoder.layer)
    change(twin.encoder.layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(hidden(bert), hidden(twin), **CLOSE)


def test_weights_that_change_are_followed(bert):
    optimize(bert)
    hidden(bert)
    optimizer = torch.optim.SGD(bert.parameters(), 0.1)
    with pytest.warns(UserWarning, match="needs gradients"):
        bert(IDS).last_hidden_state.square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(hidden(bert), hidden(restore(copy.deepcopy(bert))), **CLOSE)
    other = {name: tensor + 0.1 for name, tensor in bert.state_dict().items()}
    bert.load_state_dict(other)
    torch.testing.assert_close(hidden(bert), hidden(restore(copy.deepcopy(bert))), **CLOSE)


def test_training_runs_the_models_own_code(bert):
    optimize(bert)
    bert.train()
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="training mode"):
        found = hidden(bert)
    torch.manual_seed(1)
    torch.testing.assert_close(found, hidden(restore(bert)), rtol=0, atol=0)


def test_a_call_that_fails_half_way_leaves_nothing_behind(bert):
    expected = hidden(optimize(bert))
    handle = bert.encoder.layer[1].register_forward_pre_hook(lambda *given: (_ for _ in ()).throw(KeyError("half way")))
    with warnings.catch_warnings(), pytest.raises(KeyError, match="half way"):
        warnings.simplefilter("ignore")
        hidden(bert)
    handle.remove()
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)


def test_a_model_that_changes_what_passes_between_blocks_is_told(bert):
    optimize(bert)
    x = torch.randn(1, 5, 32)
    first, second = bert.encoder.layer[:2]
    with torch.inference_mode(), pytest.raises(OptimizeError, match="block 1 got another input .*restore.model."):
        second(first(x).clamp(-1, 1))
    with torch.inference_mode(), pytest.raises(OptimizeError, match="or other arguments than the first block"):
        second(first(x), torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_a_block_alone_runs_its_own_code(bert):
    x = torch.randn(1, 5, 32)
    with torch.inference_mode():
        expected = bert.encoder.layer[1](x)
        optimize(bert)
        torch.testing.assert_close(bert.encoder.layer[1](x), expected, rtol=0, atol=0)


def test_threads_do_not_meet(bert):
    batches = [torch.randint(0, 50, (1 + index % 3, 5 + index % 4)) for index in range(24)]
    expected = [hidden(bert, ids) for ids in batches]
    optimize(bert, cache_size=16)
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(lambda ids: hidden(bert, ids), batches), expected, strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_stack_of_one_block(gpt2):
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=40, **SIZES | {"num_hidden_layers": 1})
    model = transformers.BertModel(config).eval()
    expected = hidden(model)
    torch.testing.assert_close(hidden(optimize(model)), expected, **CLOSE)
    torch.testing.assert_close(hidden(model), expected, **CLOSE)


def test_generation_gives_the_same_tokens_and_says_once_that_a_cache_is_not_served(gpt2):
    prompt = IDS[:, :4]
    expected = gpt2.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        logits = gpt2(IDS, use_cache=False).logits
    optimize(gpt2)
    with pytest.warns(UserWarning, match="whole sequence needs no cache") as said:
        found = gpt2.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(found, expected) and len(said) == 1
    with torch.inference_mode():
        torch.testing.assert_close(gpt2(IDS, use_cache=False).logits, logits, **CLOSE)
    assert [route.family for route in served(gpt2)[0].stack.routes] == ["sdpa_flash"]


def test_save_pretrained_writes_the_same_file(bert, tmp_path):
    hidden(optimize(bert))
    bert.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(hidden(again), hidden(bert), **CLOSE)


def test_export_and_compile_take_the_models_own_operations(bert):
    optimize(bert)
    x = torch.randn(2, 7, 32)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = bert.encoder

        def forward(self, x):
            return self.encoder(x).last_hidden_state

    model = Encoder().eval()
    with torch.inference_mode():
        expected = model(x)
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        compiled = torch.compile(model, backend="eager")
        for program in (exported, compiled):
            torch.testing.assert_close(program(x), expected, **CLOSE)
        bert.encoder.layer[0].output.dense.weight.mul_(3)
        torch.testing.assert_close(compiled(x), model(x), **CLOSE)


class Tabular(nn.Module):
    """A user's model around PyTorch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.inner = nn.ModuleDict({"trunk": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)})
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.inner["trunk"](x, mask))


def test_pytorchs_encoder_inside_a_model(monkeypatch):
    torch.manual_seed(0)
    model, x = Tabular().eval(), torch.randn(2, 9, 32)
    mask = torch.arange(9).expand(9, 9) >= 6
    with torch.inference_mode():
        expected = model(x), model(x, mask)
        optimize(model)
        torch.testing.assert_close(model(x), expected[0], **CLOSE)
        torch.testing.assert_close(model(x, mask), expected[1], **CLOSE)
        (stack,) = served(model)
        assert (stack.path, stack.blocks, len(stack.stack.routes)) == ("inner.trunk", 2, 2)
        model.double()
        with pytest.warns(UserWarning, match="float64"):
            model(x.double())
        torch.testing.assert_close(restore(model)(x.double()).float(), expected[0], **CLOSE)


def test_a_refused_stack_beside_a_served_one_is_named(caplog):
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=50, max_source_positions=20, max_target_positions=20,
        num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperModel(config).eval()
    given = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": IDS[:1, :5]}
    with torch.inference_mode():
        expected = model(**given).last_hidden_state
    with pytest.warns(UserWarning, match="decoder.layers: 2 x WhisperDecoderLayer: not served: .*cross attention"):
        optimize(model)
    with torch.inference_mode(), caplog.at_level(logging.INFO, "rooflane"):
        torch.testing.assert_close(model(**given).last_hidden_state, expected, **CLOSE)
    assert "sdpa_flash for 1x20x32 h4 f48 l2 full was built in" in caplog.text
    assert [one.stack is None for one in served(model)] == [False, True]


def test_a_model_without_known_blocks_is_refused_by_what_it_has():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=4, **SIZES)
    with pytest.raises(OptimizeError, match="layers: 3 x LlamaDecoderLayer: not served: .*gated feed-forward"):
        optimize(transformers.LlamaModel(config).eval())
    with pytest.raises(OptimizeError, match="encoder.layer: .* in training mode"):
        optimize(transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZES)).train())


def test_a_shape_is_no_part_of_a_whole_models_request(bert):
    with pytest.raises(OptimizeError, match="BertModel is no module that optimize.. can read with a shape"):
        optimize(bert, torch.randn(2, 11, 32))
    assert "forward" not in vars(bert.encoder.layer[0])


def test_no_output_is_held_after_a_call(bert):
    out = weakref.ref(hidden(optimize(bert)))
    gc.collect()
    assert out() is None


def test_a_stack_without_its_first_block_is_not_served_until_it_is_asked_again(bert):
    hidden(optimize(bert))
    del bert.encoder.layer[0]
    expected = hidden(restore(copy.deepcopy(bert)))
    assert served(bert)[0].stack is None
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)
    (stack,) = served(optimize(bert))
    torch.testing.assert_close(hidden(bert), expected, **CLOSE)
    assert stack.blocks == 2 and len(stack.stack.routes) == 1
