"""The encoders of the drop-in comparison, PyTorch's ways to run one, and what an output of ours is gated against."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rooflane.baseline import config_of, generate_random_case, torch_dtype
from rooflane.dispatch import optimize
from rooflane.eval.check.gate import GateResult, check_gate
from rooflane.eval.check.outputs import poison
from rooflane.shapes import Shape

Forward = Callable[[Tensor, Tensor | None], Tensor]

SEED = 20261129
PADDING = 0.3


def build_encoder(shape: Shape, device: torch.device, *, final_norm: bool = True) -> nn.TransformerEncoder:
    """Return an encoder of the shape's sizes in evaluation mode, its layers initialised one by one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [_layer(shape) for _ in range(shape.num_layers)]
    norm = nn.LayerNorm(shape.d_model) if final_norm else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the default enable_nested_tensor=True says it does nothing for norm_first
        encoder = nn.TransformerEncoder(layers[0], shape.num_layers, norm)
    encoder.layers = nn.ModuleList(layers)
    return encoder.to(device, torch_dtype(shape.dtype)).eval()


def _layer(shape: Shape) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        shape.d_model, shape.num_heads, shape.ffn_dim, activation="gelu", batch_first=True, norm_first=True
    )


def without_fast_path(encoder: nn.TransformerEncoder) -> nn.TransformerEncoder:
    """Return a copy whose layers never take PyTorch's fast path.

    NOTE: not by the global switch: torch.compile puts no guard on it and would hand one arm the other's graph.
    """
    twin = copy.deepcopy(encoder)
    for layer in twin.layers:
        layer.activation_relu_or_gelu = 0
    return twin


def own_forward(encoder: nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype | None = None) -> Forward:
    """Return PyTorch's forward of a call without padding; the mask comes with the hint that it is causal."""
    mask = None
    if shape.causal:
        dtype = dtype or torch_dtype(shape.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len, device=device, dtype=dtype)
    return lambda x, _=None: encoder(x, mask, is_causal=shape.causal)


def build_own(name: str, encoder: nn.TransformerEncoder, shape: Shape, device: torch.device) -> Forward:
    """Build one of PyTorch's arms by its name, on the encoder's weights."""
    base, _, mode = name.partition("+")
    module = encoder if base == "fast path" else without_fast_path(encoder)
    if mode:
        options = {"mode": "reduce-overhead"} if mode == "graphs" else {}
        module = torch.compile(module, dynamic=False, **options)
    return own_forward(module, shape, device)


def ours_forward(module: nn.Module, shape: Shape) -> Forward:
    """Return the dispatched encoder's forward of a call without padding."""
    return lambda x, _=None: module(x, is_causal=shape.causal)


def verify_shape(encoder: nn.Module, module: nn.Module, shape: Shape, device: torch.device) -> dict[str, GateResult]:
    """Gate the dispatched encoder against PyTorch's outputs as configured, in full float32, in float64, and padded."""
    config, dtype = config_of(shape), torch_dtype(shape.dtype)
    ours = ours_forward(module, shape)
    slow = without_fast_path(encoder)
    gates = {}
    with torch.inference_mode():
        x, _ = generate_random_case(config, device, dtype, SEED + 1)
        poison(x)
        out = ours(x)
        gates["fast path"] = check_gate(out, own_forward(encoder, shape, device)(x))
        gates["fast path off"] = check_gate(out, own_forward(slow, shape, device)(x))
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        gates["full float32"] = check_gate(out, own_forward(slow, shape, device)(x))
        torch.set_float32_matmul_precision(precision)
        rows = slice(0, min(shape.batch_size, 64))
        wide = own_forward(slow.double(), shape, device, torch.float64)
        gates["float64"] = check_gate(out[rows].double(), wide(x[rows].double()))
        x, valid = generate_random_case(config, device, dtype, SEED + 2, PADDING)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len, device=device).isinf()
        call = {"mask": mask if shape.causal else None, "is_causal": shape.causal, "src_key_padding_mask": ~valid}
        gates[f"padding {PADDING:g}"] = check_gate(module(x, **call)[valid], encoder(x, **call)[valid])
    return gates


def verify_variants(shape: Shape, device: torch.device) -> dict[str, GateResult]:
    """Gate the modules that are not timed: no final norm, a single layer, calls that are not causal."""
    gates = {}
    full = Shape(**(shape.as_dict() | {"causal": False}))
    single = Shape(**(shape.as_dict() | {"num_layers": 1}))
    cases = {
        "no final norm": (build_encoder(shape, device, final_norm=False), shape),
        "a single layer": (build_encoder(single, device).layers[0], single),
        "not causal": (build_encoder(full, device), full),
    }
    for name, (module, of) in cases.items():
        fast = optimize(module, of, on_unseen="error")
        x, valid = generate_random_case(config_of(of), device, torch_dtype(of.dtype), SEED + 3, PADDING)
        padded = {"src_key_padding_mask": ~valid, "is_causal": of.causal}
        mask = nn.Transformer.generate_square_subsequent_mask(of.seq_len, device=device).isinf() if of.causal else None
        with torch.inference_mode():
            gates[name] = check_gate(fast(x, mask, **padded)[valid], module(x, mask, **padded)[valid])
    return gates
