"""Free controls: what a user gets without rooflane, built and timed like any candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rooflane.baseline.reference import TORCH_DTYPES, BaselineSelfAttention, BaselineTransformer
from rooflane.shapes import Shape

# A built forward: `(x [B, S, D], mask [B, S] bool or None) -> [B, S, D]`.
Forward = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Control:
    """An arm that every user of torch has; `contract` names the promises that its outputs break, "" when none."""

    name: str
    summary: str
    contract: str
    cuda_only: bool
    build: Callable[[BaselineTransformer, Shape, torch.device], Forward]

    def supports(self, device_type: str) -> str | None:
        """Return None when the control runs on the device type, else the reason."""
        if self.cuda_only and device_type != "cuda":
            return f"{self.name} needs CUDA graphs; on {device_type} it equals the compiled control"
        return None


class SdpaSelfAttention(BaselineSelfAttention):
    """The reference attention with `scaled_dot_product_attention` in place of explicit scores. Nothing else differs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, valid_token_mask: Tensor | None, causal: bool) -> Tensor:
        """Return attention `[B, H, S, d]`; a given mask becomes the boolean mask that SDPA takes."""
        if valid_token_mask is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        visible = valid_token_mask[:, None, None, :]
        if causal:
            length = q.shape[-2]
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _build_identity(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    """Return the eager forward itself. Its ratio to eager is the noise that a speedup must exceed."""
    return model


def _build_compiled(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    return torch.compile(model, dynamic=False)


def _build_reduce_overhead(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    return torch.compile(model, mode="reduce-overhead", dynamic=False)


def _build_sdpa(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    """Return the eager model with SDPA in its attention: the class changes and the weights stay."""
    for layer in model.layers:
        layer.attention.__class__ = SdpaSelfAttention
    return model


def _build_noop(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    """Return a forward that does nothing. Its time is the cost of the harness."""
    held = torch.zeros(shape.batch_size, shape.seq_len, shape.d_model, device=device, dtype=TORCH_DTYPES[shape.dtype])
    return lambda x, mask=None: held


def _build_anchor(model: BaselineTransformer, shape: Shape, device: torch.device) -> Forward:
    """Return one matrix product, the same for every shape. A change in its time is a change of the machine."""
    size, dtype = ANCHOR_SIZES[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(left)
    return lambda x, mask=None: torch.mm(left, left, out=out)


# These take 50 to 100 us: long for the clock's resolution, short beside every arm.
ANCHOR_SIZES = {"cpu": (128, torch.float32), "cuda": (3072, torch.float16)}

# Arms that compute no forward. They show the cost of the harness and the steadiness of the machine.
PROBES: dict[str, Control] = {
    probe.name: probe
    for probe in (
        Control("noop", "a call that does nothing", "", False, _build_noop),
        Control("anchor", "one matrix product of fixed size", "", False, _build_anchor),
    )
}

CONTROLS: dict[str, Control] = {
    control.name: control
    for control in (
        Control("identity", "the eager baseline, built a second time", "", False, _build_identity),
        Control("compiled", "torch.compile of the baseline", "", False, _build_compiled),
        Control(
            "compiled_reduce_overhead",
            "torch.compile of the baseline with CUDA graphs",
            "the next call overwrites the output",
            True,
            _build_reduce_overhead,
        ),
        Control("sdpa", "the baseline with SDPA attention", "", False, _build_sdpa),
    )
}
