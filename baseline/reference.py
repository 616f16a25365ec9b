"""The reference forward: the organiser's pre-norm stack, op for op, with the same state_dict keys; seeded inputs.

Shapes: B batch, S sequence, D model, H heads, d = D / H, F feed-forward. Every op is written as in
the benchmark (explicit scores, out-of-place fills, a new causal mask each call), because those ops are timed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooflane.shapes import Shape

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one stack, in the benchmark's own field order."""

    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool


class BaselineSelfAttention(nn.Module):
    """Multi-head self-attention over explicit `[B, H, S, S]` scores."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.d_model // config.num_heads
        self.scale = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        """Return `[B, S, D]` as a contiguous `[B, H, S, d]`."""
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

    def merge_heads(self, x: Tensor) -> Tensor:
        """Return `[B, H, S, d]` as a contiguous `[B, S, D]`."""
        batch, _, length, _ = x.shape
        return x.transpose(1, 2).contiguous().view(batch, length, self.num_heads * self.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, valid_token_mask: Tensor | None, causal: bool) -> Tensor:
        """Return softmax(q k^T d^-0.5) v, `[B, H, S, d]`, masked keys at -inf and the softmax in float32 or wider."""
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        if causal:
            length = scores.shape[-1]
            future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(diagonal=1)
            scores = scores.masked_fill(future, float("-inf"))
        if valid_token_mask is not None:
            scores = scores.masked_fill(~valid_token_mask[:, None, None, :], float("-inf"))
        # NOTE: a float64 stack is the oracle of the error figures, so it must not be cast to float32 here.
        probs = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1).to(q.dtype)
        return torch.matmul(probs, v)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Return the attention output `[B, S, D]`, rows of invalid tokens set to 0."""
        q = self.split_heads(self.q_proj(x))
        k = self.split_heads(self.k_proj(x))
        v = self.split_heads(self.v_proj(x))
        out = self.out_proj(self.merge_heads(self.attend(q, k, v, valid_token_mask, causal)))
        if valid_token_mask is not None:
            out = out.masked_fill(~valid_token_mask[:, :, None], 0)
        return out


class BaselineTransformerBlock(nn.Module):
    """One pre-norm layer: attention, then a feed-forward with exact (erf) GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attention = BaselineSelfAttention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.ffn_in = nn.Linear(config.d_model, config.ffn_dim)
        self.ffn_out = nn.Linear(config.ffn_dim, config.d_model)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Return the layer's output `[B, S, D]`, rows of invalid tokens set to 0."""
        x = x + self.attention(self.norm1(x), valid_token_mask, causal)
        x = x + self.ffn_out(functional.gelu(self.ffn_in(self.norm2(x))))
        if valid_token_mask is not None:
            x = x.masked_fill(~valid_token_mask[:, :, None], 0)
        return x


class BaselineTransformer(nn.Module):
    """The whole stack: `num_layers` blocks, then a final LayerNorm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BaselineTransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """Return the stack's output for `x [B, S, D]` and `valid_token_mask [B, S]` bool (True = real token)."""
        for layer in self.layers:
            x = layer(x, valid_token_mask, self.config.causal)
        x = self.final_norm(x)
        if valid_token_mask is not None:
            x = x.masked_fill(~valid_token_mask[:, :, None], 0)
        return x


def config_of(shape: Shape) -> TransformerConfig:
    """Return the stack's sizes for a shape."""
    return TransformerConfig(*(getattr(shape, field.name) for field in fields(TransformerConfig)))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a shape's dtype name."""
    return TORCH_DTYPES[name]


def build_baseline(shape: Shape, device: torch.device | str, seed: int) -> BaselineTransformer:
    """Build the reference stack in eval mode on `device`, in the shape's dtype.

    The weights are drawn on the CPU in float32 from `seed`. They are the same for every device and, up to the cast, for
    every dtype. The caller's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BaselineTransformer(config_of(shape))
    return model.to(device=device, dtype=torch_dtype(shape.dtype)).eval()


def copy_model_weights(source: nn.Module, target: nn.Module, strict: bool = True) -> None:
    """Copy every weight of `source` into `target` through their state_dicts.

    Raises `RuntimeError` on a missing, extra or differently sized weight; with `strict=False` only on a different size.
    """
    weights = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
    target.load_state_dict(weights, strict=strict)


def reference_numerics(device: torch.device | str) -> None:
    """Set the process's matmul precision as the benchmark does: TF32 on CUDA, "high" elsewhere."""
    torch.set_float32_matmul_precision("high")
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


def generate_random_case(
    config: TransformerConfig, device: torch.device | str, dtype: torch.dtype, seed: int, padding_ratio: float = 0.0,
    input_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw an input `[B, S, D]`, as the benchmark does, and its mask `[B, S]` (bool, True = real token, never None).

    The generator is on the device, so one seed gives different data on CPU and CUDA. With a padding ratio each row's
    length is uniform between `max(1, round(S (1 - padding_ratio)))` and S. Padding is on the right and its rows of x
    are 0. Before that, x equals the unpadded x of the same seed.
    """
    device = torch.device(device)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    batch, length, width = config.batch_size, config.seq_len, config.d_model
    x = torch.randn(batch, length, width, generator=generator, device=device, dtype=dtype) * input_scale
    if padding_ratio <= 0:
        return x, torch.ones(batch, length, dtype=torch.bool, device=device)
    shortest = max(1, round(length * (1 - padding_ratio)))
    lengths = torch.randint(shortest, length + 1, (batch,), generator=generator, device=device)
    mask = torch.arange(length, device=device)[None, :] < lengths[:, None]
    return x.masked_fill(~mask[:, :, None], 0), mask
