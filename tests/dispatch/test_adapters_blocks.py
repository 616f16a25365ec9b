"""optimize(mapping=...): pre-norm blocks of other making, described tensor by tensor."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from rooflane.dispatch import BlockMapping, OptimizeError, WeightsAt, optimize, weights_at
from rooflane.dispatch.adapters.mapping import Call

pytestmark = pytest.mark.usefixtures("warnings_are_errors")

B, S, D, H, F = 2, 6, 16, 2, 40
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


class Block(nn.Module):
    """A GPT-style block: packed QKV in one Linear, no bias on the output, GELU written into forward."""

    def __init__(self, causal: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.causal = causal
        self.heads = H
        self.ln_1, self.ln_2 = nn.LayerNorm(D, eps=eps), nn.LayerNorm(D, eps=eps, bias=False)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)
        self.drop = nn.Dropout(0.1)
        self.activation = functional.gelu

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1]).bool()
        mask = mask.tril() if self.causal else mask
        mask = mask if keep is None else mask & keep[:, None, None, :]
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.proj(context.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.activation(self.up(self.ln_2(x)))))


class Stack(nn.Module):
    """Blocks behind each other and a norm, as user code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(3)), "ln_f": nn.LayerNorm(D)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk["h"]:
            x = block(x)
        return self.trunk["ln_f"](x)


def read_keep(module: nn.Module, causal: bool, x: torch.Tensor, keep: torch.Tensor | None = None) -> Call:
    return Call(x, keep, causal)


MAPPING = BlockMapping(
    norm1="ln_1",
    norm2="ln_2",
    q=weights_at("qkv", (0, 3)),
    k=weights_at("qkv", (1, 3)),
    v=weights_at("qkv", (2, 3)),
    out=weights_at("proj"),
    ffn_in=weights_at("up"),
    ffn_out=weights_at("down"),
    num_heads="heads",
    causal=True,
    read=read_keep,
)


@pytest.fixture
def rules(write_rules):
    return write_rules('[[rule]]\nname = "all"\nwhen = {}\nfamily = "sdpa_flash"\nbecause = "a test"\n')


@pytest.fixture
def x():
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def block():
    return randomised(Block())


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


@pytest.mark.parametrize("causal", [True, False])
def test_a_mapped_block_computes_what_the_block_does(causal, x, rules):
    block = randomised(Block(causal, eps=1e-4))
    fast = optimize(block, x, mapping=replace(MAPPING, causal=lambda block: block.causal), rules=rules)
    keep = torch.arange(S) < torch.tensor([[S], [2]])
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)
        torch.testing.assert_close(fast(x, keep=keep)[keep], block(x, keep)[keep], **TOLERANCE)
    assert fast.route.shape.causal == causal
    assert list(fast.state_dict()) == list(block.state_dict())


def test_a_stack_with_a_final_norm_is_mapped_whole(x, rules):
    stack = randomised(Stack())
    mapping = BlockMapping(**{**vars(MAPPING), "layers": "trunk.h", "final_norm": "trunk.ln_f", "read": read_keep})
    fast = optimize(stack, x, mapping=mapping, rules=rules)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), stack(x), **TOLERANCE)
        stack.trunk["h"][2].qkv.bias[2 * D :].add_(1)
        torch.testing.assert_close(fast(x), stack(x), **TOLERANCE)
    assert fast.route.shape.num_layers == 3


def test_what_the_mapping_does_not_read_runs_the_modules_own_forward(block, x, rules):
    plain = BlockMapping(**{**vars(MAPPING), "read": BlockMapping.read})
    fast = optimize(block, x, mapping=plain, rules=rules)
    keep = torch.ones(B, S, dtype=torch.bool)
    with torch.inference_mode(), pytest.warns(UserWarning, match="it passes keep; this mapping reads module.x. alone"):
        assert torch.equal(fast(x, keep=keep), block(x, keep))


def test_gradients_flow_through_the_blocks_own_forward(block, x, rules):
    fast = optimize(block, x, mapping=MAPPING, rules=rules)
    with pytest.warns(UserWarning, match="needs gradients"):
        fast(x).sum().backward()
    found = block.qkv.weight.grad.clone()
    block.zero_grad()
    block(x).sum().backward()
    assert torch.equal(found, block.qkv.weight.grad)


def test_a_mapped_module_can_be_pickled(block, x, rules):
    twin = pickle.loads(pickle.dumps(optimize(block, x, mapping=MAPPING, rules=rules)))
    with torch.inference_mode():
        torch.testing.assert_close(twin(x), block(x), **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": MAPPING.k, "k": MAPPING.q, "v": MAPPING.out}, "the mapping does not describe Block"),
        ({"q": MAPPING.k, "k": MAPPING.v, "v": MAPPING.q}, "the mapping does not describe Block"),
        ({"out": weights_at("proj", transposed=True)}, "the mapping does not describe Block"),
        ({"causal": False}, "the mapping does not describe Block"),
        ({"norm1": "ln_2"}, "the mapping does not describe Block"),
        ({"ffn_out": WeightsAt("down.weight", "nowhere.bias")}, "the mapping does not describe Block"),
        ({"q": weights_at("qkv")}, r"q_proj is mapped to a weight \(48, 16\), expected \(16, 16\)"),
        ({"v": weights_at("qkv")}, r"v_proj is mapped to a weight \(48, 16\), expected \(16, 16\)"),
        ({"ffn_in": weights_at("up", transposed=True)}, r"ffn_in is mapped to a weight \(16, 40\), expected"),
        ({"norm2": "ln_3"}, "the mapping does not fit Block: 'Block' object has no attribute 'ln_3'"),
        ({"num_heads": "qkv.heads"}, "the mapping does not fit Block: .* no attribute 'heads'"),
        ({"norm1": "drop"}, "drop is a Dropout, which is no LayerNorm"),
        ({"activation": "drop.forward"}, "the activation forward of Block differs from the exact .erf. GELU"),
        ({"refuse": lambda block: "is of a bad year"}, "Block is of a bad year"),
    ],
)
def test_a_wrong_mapping_is_found_before_it_is_used(block, x, rules, changes, reason):
    mapping = BlockMapping(**{**vars(MAPPING), **changes})
    with pytest.raises(OptimizeError, match=reason):
        optimize(block, x, mapping=mapping, rules=rules)


def test_a_block_in_training_mode_is_refused(block, x, rules):
    with pytest.raises(OptimizeError, match="Block is in training mode with dropout in drop"):
        optimize(block.train(), x, mapping=MAPPING, rules=rules)


@pytest.mark.parametrize("activation", [functional.relu, lambda x: functional.gelu(x, approximate="tanh")])
def test_another_activation_hidden_in_forward_is_found_by_the_trial(block, x, rules, activation):
    block.activation = activation
    with pytest.raises(OptimizeError, match="the mapping does not describe Block"):
        optimize(block, x, mapping=MAPPING, rules=rules)


def test_a_module_that_cannot_be_tried_is_refused(block, x, rules):
    block.activation = lambda x: x.missing
    with pytest.raises(OptimizeError, match="Block cannot be tried as module.x. .*AttributeError.*missing"):
        optimize(block, x, mapping=MAPPING, rules=rules)


class Unread(Block):
    """A block with one more part, which is the identity until it is trained, set or met."""

    def __init__(self, kind: str, eps: float = 1e-5) -> None:
        super().__init__(eps=eps)
        self.kind = kind
        if kind == "adapter":
            self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, F, bias=False)
            nn.init.zeros_(self.b.weight)
        elif kind == "layer scale":
            self.gamma = nn.Parameter(torch.ones(D))
        elif kind == "gate":
            self.gate = nn.Parameter(torch.zeros(()))
        elif kind == "buffer":
            self.register_buffer("factor", torch.ones(1))
        elif kind == "bias":
            self.relative = nn.Parameter(torch.zeros(H, S, S))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.kind == "window":
            mask = mask.triu(-self.window)
        if self.kind == "bias":
            mask = self.relative[:, :length, :length].masked_fill(~mask, float("-inf"))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        update = self.proj(out)
        if self.kind == "layer scale":
            update = update * self.gamma
        x = x + (update * self.factor if self.kind == "buffer" else update)
        hidden = self.up(self.ln_2(x))
        if self.kind == "adapter":
            hidden = hidden + self.b(self.a(self.ln_2(x)))
        update = self.down(functional.gelu(hidden))
        return x + (update * (1 + self.gate.tanh()) if self.kind == "gate" else update)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("adapter", "a.weight, b.weight"),
        ("layer scale", "gamma"),
        ("gate", "gate"),
        ("buffer", "factor"),
        ("bias", "relative"),
    ],
)
def test_a_part_that_is_the_identity_today_is_refused_by_name(kind, name, x, rules):
    with pytest.raises(OptimizeError, match=rf"does not describe Unread.*check what it does not read \({name}\)"):
        optimize(Unread(kind).eval(), x, mapping=replace(MAPPING, read=BlockMapping.read), rules=rules)


@pytest.mark.parametrize("window", [8, 20, 60])
def test_a_window_shorter_than_the_asked_sequences_is_found(window, rules):
    block = Unread("window")
    block.window = window
    mapping = replace(MAPPING, read=BlockMapping.read)
    with pytest.raises(OptimizeError, match="on an input of 64 tokens.*windows"):
        optimize(block.eval(), torch.randn(1, 64, D), mapping=mapping, rules=rules)
    x = torch.randn(1, window, D)
    fast = optimize(block, x, mapping=mapping, rules=rules, on_unseen="build")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)
        # Longer sequences are tried when they are met.
        x = torch.randn(1, window + 4, D)
        with pytest.warns(UserWarning, match="does not describe Unread"):
            assert torch.equal(fast(x), block(x))


def test_a_setting_that_changes_the_function_later_is_tried_again(block, x, rules):
    fast = optimize(block, x, mapping=MAPPING, rules=rules)
    with torch.no_grad():
        fast(x)
        block.causal = False
        with pytest.warns(UserWarning, match="the module was changed after optimize.*does not describe Block"):
            assert torch.equal(fast(x), block(x))
        block.causal = True
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)


def test_a_part_of_the_users_own_that_trains_runs_the_blocks_forward(x, rules):
    class DropPath(nn.Module):
        drop_prob = 0.5

        def forward(self, x):
            return x * 2 if self.training else x

    block = randomised(Block())
    block.drop = DropPath().eval()
    fast = optimize(block, x, mapping=MAPPING, rules=rules)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)
        block.drop.train()
        with pytest.warns(UserWarning, match="training mode"):
            assert torch.equal(fast(x), block(x))
