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
        ({"q": weights_at("qkv")}, r"k_proj is mapped to a weight \(16, 16\), expected \(48, 16\)"),
        ({"v": weights_at("qkv")}, r"v_proj is mapped to a weight \(48, 16\), expected \(16, 16\)"),
        ({"ffn_in": weights_at("up", transposed=True)}, r"ffn_in is mapped to a weight \(16, 40\), expected"),
        ({"norm2": "ln_3"}, "the mapping does not fit Block: 'Block' object has no attribute 'ln_3'"),
        ({"num_heads": "qkv.heads"}, "the mapping does not fit Block: .* no attribute 'heads'"),
        ({"norm1": "drop"}, "drop is a Dropout, which computes neither LayerNorm nor RMSNorm"),
        ({"activation": "drop.forward"}, "the activation forward of Block differs from silu, the nearest"),
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


WIDE = 12  # columns of a head, of which two make 24 in a stack of 16


class OwnRms(nn.Module):
    """RMSNorm as models write it themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Modern(nn.Module):
    """A block with RMSNorm, heads of another width, no biases, SiLU, rotary positions and factors on both updates."""

    def __init__(self, norm_first: bool = True, norm: type[nn.Module] = OwnRms) -> None:
        super().__init__()
        self.norm_first, self.heads = norm_first, H
        self.before, self.after = norm(), norm()
        self.q, self.k, self.v = (nn.Linear(D, H * WIDE, bias=False) for _ in range(3))
        self.out, self.up = nn.Linear(H * WIDE, D, bias=False), nn.Linear(D, F, bias=False)
        self.down, self.act = nn.Linear(F, D, bias=False), nn.SiLU()
        self.factor1, self.factor2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[:, None] * 1000.0 ** (-torch.arange(0, WIDE, 2) / WIDE)
        cosine, sine = (torch.cat([part, part], dim=-1).to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-second, first], dim=-1) * sine

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (H, WIDE)).transpose(1, 2) for one in (self.q, self.k, self.v))
        context = functional.scaled_dot_product_attention(self.turn(q), self.turn(k), v)
        return self.factor1 * self.out(context.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attend(self.before(x))
            return x + self.factor2 * self.down(self.act(self.up(self.after(x))))
        x = self.before(x + self.attend(x))
        return self.after(x + self.factor2 * self.down(self.act(self.up(x))))


MODERN = BlockMapping(
    norm1="before",
    norm2="after",
    q=weights_at("q"),
    k=weights_at("k"),
    v=weights_at("v"),
    out=replace(weights_at("out"), scale="factor1"),
    ffn_in=weights_at("up"),
    ffn_out=replace(weights_at("down"), scale="factor2"),
    num_heads="heads",
    causal=False,
    activation="act",
    norm_first=lambda block: block.norm_first,
    rotary_theta=1000.0,
)


def drawn(block: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return block.eval()


@pytest.mark.parametrize("norm", [OwnRms, lambda: nn.RMSNorm(D), lambda: nn.LayerNorm(D, bias=False)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block_of_another_form_is_mapped(x, rules, norm_first, norm):
    block = drawn(Modern(norm_first, norm))
    fast = optimize(block, x, mapping=MODERN, rules=rules, on_unseen="error")
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)
    with torch.no_grad():
        block.factor1.mul_(3)
        block.before.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), block(x), **TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_theta": None},
        {"rotary_theta": 10000.0},
        {"norm_first": False},
        {"out": weights_at("out")},
        {"activation": ""},
    ],
)
def test_a_wrong_form_is_found_by_the_trial(x, rules, changes):
    # Factors of 1 would hide a mapping that forgets them: the trial draws its own.
    with pytest.raises(OptimizeError, match="the mapping does not describe Modern"):
        optimize(Modern().eval(), x, mapping=replace(MODERN, **changes), rules=rules)
