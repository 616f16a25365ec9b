"""The base class of the families built on the lean forward, and its kernels as they ship; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rooflane.families.lean.attention_config import BIASED, LADDER, AttentionConfig
from rooflane.families.lean.cost import lean_peak_bytes, lean_predict_s
from rooflane.families.resources.kernel_case import ARCHITECTURES, Architecture, KernelCase, TritonCase
from rooflane.families.spec import FamilySpec, Limits, operands, true_or_false
from rooflane.shapes import Form, Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward


ATTENTION_TYPES = {"qkv_ptr": "*fp16", "mask_ptr": "*i1", "extent_ptr": "*i32", "out_ptr": "*fp16", "length": "i32"}
STRIDES = ("bias_batch", "bias_head", "bias_query")
EXTENT_TYPES = {"mask_ptr": "*i1", "extent_ptr": "*i32", "length": "i32"}
ADD_NORM_TYPES = {
    "x_ptr": "*fp32", "update_ptr": "*fp16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "mask_ptr": "*i1",
    "residual_ptr": "*fp32", "out_ptr": "*fp16", "tokens": "i32", "eps": "fp32",
}  # fmt: skip
ACTIVATION_TYPES = {"x_ptr": "*fp16", "out_ptr": "*fp16", "elements": "i32"}
ROTATE_TYPES = {
    "qkv_ptr": "*fp16", "cosine_ptr": "*fp32", "sine_ptr": "*fp32", "tokens": "i32", "length": "i32",
}  # fmt: skip


class LeanSpec(FamilySpec):
    """A family whose forward is the lean one. A subclass sets its name and summary, and what it supports."""

    options = {
        "operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model and device",
        "captured": "true (default) replays a CUDA graph, false launches op by op; no effect on a CPU",
    }
    option_checks = {"operand_dtype": operands, "captured": true_or_false}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        return None

    def refuse_form(self, form: Form) -> str | None:
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, *, captured: bool = True, **options: Any) -> int:
        return lean_peak_bytes(shape, captured=captured and profile.kind == "cuda")

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        return lean_predict_s(shape, profile, captured=profile.kind == "cuda")

    def kernel_cases(self) -> Iterator[KernelCase]:
        """Return the kernels that ship with the lean forward, for the resource gate."""
        return lean_cases()

    def build(
        self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None, captured: bool = True
    ) -> Forward:
        """Return the built forward; compilation and capture happen at its first call."""
        from rooflane.families.lean.build import build_lean

        return build_lean(model, shape, device, operand_dtype, captured=captured, compiled=self.compiles)


def lean_cases() -> Iterator[KernelCase]:
    """Yield every configuration of the lean kernels for the published form, and the branches of other forms."""
    for at in ARCHITECTURES:
        for width, length, _, config in LADDER:
            name = f"attention d{width} s{length or 'any'} {config.block_m}x{config.block_n}"
            no_bias = dict.fromkeys(("bias_ptr", *STRIDES, "bias_key"))
            yield _attention_case(name, at, width, config, ATTENTION_TYPES, no_bias)
        for kind in ("i1", "fp32"):
            width, _, _, config = BIASED[0]
            types = ATTENTION_TYPES | {"bias_ptr": f"*{kind}"} | dict.fromkeys(STRIDES, "i32")
            yield _attention_case(f"attention bias {kind} d{width}", at, width, config, types, {"bias_key": 1})
        yield TritonCase(
            "mask_extent", at, _kernel("attention_kernel:mask_extent_kernel"), EXTENT_TYPES, {"BLOCK": 1024}, 1, 1
        )
        for width, post_norm in ((128, False), (1024, False), (1024, True)):
            stores = {"STORE_RESIDUAL": not post_norm, "STORE_NORMED": post_norm}
            flags = stores | {"HAS_UPDATE": True, "HAS_MASK": False, "RMS": False}
            name = f"add_norm d{width}" + " post-norm" * post_norm
            add_norm = _kernel("pointwise_kernel:add_norm_kernel")
            yield TritonCase(name, at, add_norm, ADD_NORM_TYPES, flags | _row_tiles(width), 4, 3)
        activation, gelu = _kernel("pointwise_kernel:activation_kernel"), {"KIND": "gelu", "BLOCK": 2048}
        yield TritonCase("gelu", at, activation, ACTIVATION_TYPES, gelu, 4, 3)
        rotate = _kernel("pointwise_kernel:rotate_kernel")
        yield TritonCase("rotate d1024", at, rotate, ROTATE_TYPES, {"HALF": 32} | _row_tiles(1024), 4, 3)


def _attention_case(
    name: str, at: Architecture, width: int, config: AttentionConfig, types: dict[str, str], bias: dict[str, Any]
) -> TritonCase:
    flags = {"HAS_BIAS": "bias_ptr" in types, "ADDS_BIAS": types.get("bias_ptr") == "*fp32"}
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": width}
    model = {"SCALE_LOG2": 0.25, "NUM_HEADS": 4, "HEAD_DIM": width, "CAUSAL": True, "HAS_MASK": True}
    kernel = _kernel("attention_kernel:attention_kernel")
    return TritonCase(name, at, kernel, types, model | flags | tiles | bias, config.num_warps, config.num_stages)


def _row_tiles(width: int) -> dict[str, int]:
    return {"WIDTH": width, "BLOCK_T": 2048 // width, "BLOCK_W": width}


def _kernel(name: str) -> Callable[[], Any]:
    """Return a loader of `module:kernel` that a spawned process can unpickle; loading imports Triton."""
    return partial(resolve_name, f"rooflane.families.lean.{name}")
