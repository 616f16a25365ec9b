"""The reference forward against an independent float64 implementation, and its contract of names and draws."""

from __future__ import annotations

import math

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, copy_model_weights, generate_random_case, torch_dtype
from rooflane.shapes import Shape

# float32 keeps 24 bits: a few hundred roundings of values near 1 stay far below this.
FLOAT32_TOLERANCE = 5e-6


def naive_forward(state: dict[str, torch.Tensor], shape: Shape, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the stack token by token and head by head in float64, straight from the published description."""
    weight = {name: tensor.double() for name, tensor in state.items()}
    x = x.double()

    def norm(row: torch.Tensor, name: str) -> torch.Tensor:
        scaled = (row - row.mean()) / torch.sqrt(((row - row.mean()) ** 2).mean() + 1e-5)
        return scaled * weight[f"{name}.weight"] + weight[f"{name}.bias"]

    def linear(row: torch.Tensor, name: str) -> torch.Tensor:
        return weight[f"{name}.weight"] @ row + weight[f"{name}.bias"]

    def gelu(row: torch.Tensor) -> torch.Tensor:
        return torch.stack([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in row])

    out = torch.zeros_like(x)
    for sequence in range(shape.batch_size):
        rows = list(x[sequence])
        valid = mask[sequence].tolist()
        for layer in range(shape.num_layers):
            name = f"layers.{layer}"
            normed = [norm(row, f"{name}.norm1") for row in rows]
            q, k, v = ([linear(row, f"{name}.attention.{part}_proj") for row in normed] for part in "qkv")
            updated = []
            for i, row in enumerate(rows):
                keys = [j for j in range(len(rows)) if valid[j] and (j <= i or not shape.causal)]
                context = torch.zeros_like(row)
                for head in range(shape.num_heads):
                    part = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
                    scores = torch.stack([q[i][part] @ k[j][part] for j in keys]) / math.sqrt(shape.head_dim)
                    probs = torch.exp(scores - scores.max())
                    probs = probs / probs.sum()
                    context[part] = sum(p * v[j][part] for p, j in zip(probs, keys, strict=True))
                attended = linear(context, f"{name}.attention.out_proj") if valid[i] else torch.zeros_like(row)
                row = row + attended
                hidden = gelu(linear(norm(row, f"{name}.norm2"), f"{name}.ffn_in"))
                row = row + linear(hidden, f"{name}.ffn_out")
                updated.append(row if valid[i] else torch.zeros_like(row))
            rows = updated
        for i, row in enumerate(rows):
            out[sequence, i] = norm(row, "final_norm") if valid[i] else 0
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_forward_equals_the_description(causal, padding):
    shape = Shape("a", 2, 5, 12, 3, 20, 2, causal)
    model = build_baseline(shape, "cpu", seed=3)
    x, mask = generate_random_case(config_of(shape), "cpu", torch.float32, 11, padding)
    with torch.inference_mode():
        out = model(x, mask)
    torch.testing.assert_close(
        out.double(), naive_forward(model.state_dict(), shape, x, mask), atol=FLOAT32_TOLERANCE, rtol=0
    )


def test_no_mask_equals_an_all_true_mask():
    shape = Shape("a", 2, 7, 16, 2, 16, 2)
    model = build_baseline(shape, "cpu", seed=0)
    x, mask = generate_random_case(config_of(shape), "cpu", torch.float32, 0)
    with torch.inference_mode():
        assert torch.equal(model(x), model(x, mask))


def test_state_dict_names_and_sizes_follow_the_contract():
    shape = Shape("a", 1, 4, 12, 3, 20, 2)
    state = build_baseline(shape, "cpu", seed=0).state_dict()
    layer = [
        ("norm1.weight", (12,)), ("norm1.bias", (12,)),
        ("attention.q_proj.weight", (12, 12)), ("attention.q_proj.bias", (12,)),
        ("attention.k_proj.weight", (12, 12)), ("attention.k_proj.bias", (12,)),
        ("attention.v_proj.weight", (12, 12)), ("attention.v_proj.bias", (12,)),
        ("attention.out_proj.weight", (12, 12)), ("attention.out_proj.bias", (12,)),
        ("norm2.weight", (12,)), ("norm2.bias", (12,)),
        ("ffn_in.weight", (20, 12)), ("ffn_in.bias", (20,)),
        ("ffn_out.weight", (12, 20)), ("ffn_out.bias", (12,)),
    ]  # fmt: skip
    expected = [(f"layers.{i}.{name}", size) for i in range(2) for name, size in layer]
    expected += [("final_norm.weight", (12,)), ("final_norm.bias", (12,))]
    assert [(name, tuple(tensor.shape)) for name, tensor in state.items()] == expected


def test_weights_depend_on_the_seed_alone():
    shape = Shape("a", 1, 4, 16, 2, 16, 1)
    torch.manual_seed(1)
    first = build_baseline(shape, "cpu", seed=5).state_dict()
    expected_next = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), expected_next), "building must not draw from the caller's random state"
    second = build_baseline(Shape("b", 9, 8, 16, 2, 16, 1, dtype="float16"), "cpu", seed=5).state_dict()
    other = build_baseline(shape, "cpu", seed=6).state_dict()
    name = "layers.0.ffn_in.weight"
    assert torch.equal(first[name].half(), second[name])
    assert not torch.equal(first[name], other[name])


def test_copy_is_strict_and_does_not_alias():
    shape = Shape("a", 1, 4, 16, 2, 16, 1)
    source, target = build_baseline(shape, "cpu", seed=1), build_baseline(shape, "cpu", seed=2)
    copy_model_weights(source, target)
    with torch.no_grad():
        source.final_norm.bias.add_(1)
    assert torch.equal(target.final_norm.bias, torch.zeros(16))
    deeper = build_baseline(Shape("b", 1, 4, 16, 2, 16, 2), "cpu", seed=2)
    with pytest.raises(RuntimeError, match="layers.1"):
        copy_model_weights(source, deeper)
    copy_model_weights(source, deeper, strict=False)
    assert torch.equal(deeper.final_norm.bias, source.final_norm.bias)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_models_run_in_their_own_dtype(dtype):
    shape = Shape("a", 2, 5, 16, 2, 16, 1, dtype=dtype)
    model = build_baseline(shape, "cpu", seed=1)
    x, mask = generate_random_case(config_of(shape), "cpu", torch_dtype(dtype), 1)
    with torch.inference_mode():
        out = model(x, mask)
    assert out.dtype == torch_dtype(dtype) and torch.isfinite(out).all()
