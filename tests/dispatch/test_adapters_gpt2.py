"""optimize() on transformers' own GPT-2 block; skipped where the extra `models` is not installed."""

from __future__ import annotations

import pytest
import torch

from rooflane.dispatch import GPT2_BLOCK, OptimizeError, optimize

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

gpt2 = pytest.importorskip(
    "transformers.models.gpt2.modeling_gpt2", reason="needs transformers: pip install 'rooflane[models]'"
)

B, S, D, H = 3, 6, 32, 4
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


def build_block(attention: str = "sdpa", **changes):
    from transformers import GPT2Config

    settings = {"activation_function": "gelu", "n_positions": 16} | changes
    config = GPT2Config(n_embd=D, n_head=H, n_layer=2, attn_implementation=attention, **settings)
    block = gpt2.GPT2Block(config, layer_idx=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return block


def output_of(block, x, **arguments):
    """Return a block's hidden states; older versions put them in a tuple."""
    out = block(x, **arguments)
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def rules(write_rules):
    return write_rules('[[rule]]\nname = "all"\nwhen = {}\nfamily = "sdpa_flash"\nbecause = "a test"\n')


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_output_is_the_blocks_own(attention, x, rules):
    block = build_block(attention)
    fast = optimize(block, x, rules=rules, on_unseen="error")
    with torch.inference_mode():
        out, own = fast(x), block(x)
        assert type(out) is type(own)
        torch.testing.assert_close(output_of(fast, x), output_of(block, x), **TOLERANCE)
    assert list(fast.state_dict()) == list(block.state_dict())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_attention_mask_of_the_model_is_understood(attention, side, x, rules):
    block = build_block(attention)
    fast = optimize(block, x, mapping=GPT2_BLOCK, rules=rules, on_unseen="build")
    valid = torch.arange(S) < torch.tensor([[S], [4], [1]])
    valid = valid if side == "right" else valid.flip(1)
    visible = torch.ones(S, S, dtype=torch.bool).tril() & valid[:, None, None, :]
    mask = torch.zeros(B, 1, S, S).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        out = output_of(fast, x, attention_mask=mask)
        torch.testing.assert_close(out[valid], output_of(block, x, attention_mask=mask)[valid], **TOLERANCE)
        assert not out[~valid].any()
        if attention == "sdpa":
            torch.testing.assert_close(output_of(fast, x, attention_mask=visible), out, **TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"attention_mask": torch.zeros(B, 1, S, S)},
            r"x is \(3, 6, 32\) not causal, .* was built for \(3, 6, 32\) causal",
        ),
        ({"attention_mask": torch.randn(B, 1, S, S)}, r"not causal with a bias on the scores, .* was built for"),
        ({"output_attentions": True}, "it passes output_attentions; served: hidden_states and attention_mask"),
    ],
)
def test_other_calls_run_the_blocks_own_forward(arguments, reason, x, rules):
    block = build_block()
    fast = optimize(block, x, rules=rules)
    with torch.inference_mode(), pytest.warns(UserWarning, match=reason):
        assert torch.equal(output_of(fast, x, **arguments), output_of(block, x, **arguments))


def test_a_block_inside_its_model(x, rules):
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
        n_embd=D,
        n_head=H,
        n_layer=2,
        n_positions=16,
        activation_function="gelu",
        use_cache=False,
    )
    model = GPT2Model(config).eval()
    tokens = torch.randint(0, 50, (B, S), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(tokens).last_hidden_state
        for index, block in enumerate(model.h):
            model.h[index] = optimize(block, x, rules=rules, on_unseen="error")
        torch.testing.assert_close(model(tokens).last_hidden_state, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"add_cross_attention": True}, "GPT2Block has cross attention"),
        ({"attention": "flex_attention"}, "has the attention implementation 'flex_attention'"),
        ({"scale_attn_weights": False}, "scales its scores otherwise"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scales its scores otherwise"),
    ],
)
def test_blocks_of_another_function_are_refused(changes, reason, x, rules):
    with pytest.raises(OptimizeError, match=reason):
        optimize(build_block(**changes), x, rules=rules)


class GatedBlock(gpt2.GPT2Block):
    """A block with a gate that is closed when it is new, as adapters are; the gate is a buffer."""

    def __init__(self, config, layer_idx=None):
        super().__init__(config, layer_idx)
        self.register_buffer("gate", torch.zeros(D))

    def forward(self, hidden_states, **arguments):
        return super().forward(hidden_states * (1 + self.gate), **arguments)


def test_a_buffer_that_is_the_identity_today_is_drawn_and_found(x, rules, monkeypatch):
    monkeypatch.setattr(gpt2, "GPT2Block", GatedBlock)
    with pytest.raises(OptimizeError, match=r"does not describe GatedBlock: .* check what it does not read \(gate\)"):
        optimize(build_block(), x, mapping=GPT2_BLOCK, rules=rules)


def test_buffers_that_no_call_reads_are_no_obstacle(x, rules):
    block = build_block()
    # Those of transformers before version 5.
    block.attn.register_buffer("bias", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(), persistent=False)
    block.attn.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
    fast = optimize(block, x, rules=rules, on_unseen="error")
    with torch.inference_mode():
        torch.testing.assert_close(output_of(fast, x), output_of(block, x), **TOLERANCE)
