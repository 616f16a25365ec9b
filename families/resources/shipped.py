"""Every kernel as it ships: Triton's with types, constants, warps and stages; CUDA C++ with its plan. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rooflane.families.lean.attention.config import LADDER
from rooflane.families.lean.attention.kernel import attention_kernel, mask_extent_kernel
from rooflane.families.lean.pointwise.kernel import add_norm_kernel, gelu_kernel
from rooflane.families.resident.blocks import blocks_kernel
from rooflane.families.resident.choice import choose
from rooflane.families.resident.config import HOPPER, ResidentConfig, Room, resident_config
from rooflane.families.resident.flagged_rows import flagged_rows_kernel
from rooflane.families.resident.hopper.plan import HopperPlan, RowblockPlan
from rooflane.families.resident.hopper.rowwarp_plan import RowwarpPlan
from rooflane.families.resident.hopper.source import rowblock_source, rowwarp_source, warpgroup_source
from rooflane.families.resident.layout import layout_of
from rooflane.families.resident.rows import rows_kernel
from rooflane.families.resident.sizes import constants
from rooflane.families.resident.spec import LIMITS
from rooflane.shapes import Shape, load_shapes

ATTENTION_TYPES = {"qkv_ptr": "*fp16", "mask_ptr": "*i1", "extent_ptr": "*i32", "out_ptr": "*fp16", "length": "i32"}
EXTENT_TYPES = {"mask_ptr": "*i1", "extent_ptr": "*i32", "length": "i32"}
ADD_NORM_TYPES = {
    "x_ptr": "*fp32", "update_ptr": "*fp16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "mask_ptr": "*i1",
    "residual_ptr": "*fp32", "out_ptr": "*fp16", "tokens": "i32", "eps": "fp32",
}  # fmt: skip
GELU_TYPES = {"x_ptr": "*fp16", "out_ptr": "*fp16", "elements": "i32"}
RESIDENT_TYPES = {
    "x_ptr": "*fp32", "mask_ptr": "*i1", "out_ptr": "*fp32", "weight_ptr": "*fp16", "bias_ptr": "*fp32",
    "length": "i32", "eps": "fp32",
}  # fmt: skip
FLAGGED_TYPES = RESIDENT_TYPES | {"kv_ptr": "*fp16", "flag_ptr": "*i32", "layers": "i32", "tokens": "i32"}
LAYERED_TYPES = RESIDENT_TYPES | {"qkv_in_ptr": "*fp16", "qkv_out_ptr": "*fp16"}
BLOCKS_TYPES = RESIDENT_TYPES | {
    "kv_ptr": "*fp16", "flag_ptr": "*i32", "batch": "i32", "layers": "i32", "tiles": "i32",
}  # fmt: skip

# One shape for each resident configuration that differs in what the compiler sees: (d_model, heads, ffn, sequence,
# batch, causal). The published ones, then the padded, the odd, the non-causal and the widest that the family takes.
RESIDENT_SIZES = [
    (128, 4, 128, 128, 64, True),
    (128, 4, 128, 128, 1, True),
    (128, 4, 128, 128, 128, True),
    (32, 4, 32, 128, 64, True),
    (32, 4, 128, 128, 64, True),
    (128, 1, 128, 128, 64, True),
    (128, 2, 128, 128, 64, True),
    (128, 16, 128, 128, 64, True),
    (128, 4, 128, 32, 64, True),
    (128, 4, 512, 128, 256, True),
    (96, 3, 384, 100, 64, True),
    (48, 3, 96, 31, 64, True),
    (128, 4, 128, 128, 1, False),
    (128, 4, 128, 16, 500, False),
]


@dataclass(frozen=True)
class KernelCase:
    """One kernel compiled one way; `name` is what the resource record is keyed by."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperCase:
    """One CUDA C++ kernel compiled one way: its plan and its translation unit."""

    name: str
    plan: HopperPlan
    source: str


def hopper_cases() -> Iterator[HopperCase]:
    """Yield every configuration of the Hopper kernels that a shipped shape takes on an H200, with a mask, once each."""
    seen: set[str] = set()
    for table in ("published.csv", "neighbours.csv"):
        for shape in load_shapes(files("rooflane.shapes") / table):
            if all(getattr(shape, name) <= limit for name, limit in LIMITS):
                plan = choose(shape, HOPPER)
                if not isinstance(plan, ResidentConfig) and (case := hopper_case(plan)).source not in seen:
                    seen.add(case.source)
                    yield case


def hopper_case(plan: HopperPlan) -> HopperCase:
    """Return the kernel of a plan, with a mask and the operands the model gets by default."""
    shape = plan.shape
    sizes = plan.constants(masked=True, bfloat16=shape.dtype == "bfloat16")
    inner = f"d{shape.d_model} h{shape.num_heads}x{shape.head_dim} f{plan.ffn} {shape.dtype}"
    if isinstance(plan, RowblockPlan):
        return HopperCase(f"resident rowblocks {inner}", plan, rowblock_source(sizes))
    if isinstance(plan, RowwarpPlan):
        reach = "causal" if shape.causal else "full"
        layout = f"{plan.warps}w {plan.twins}t over {plan.split} of {plan.blocks} {reach} r{plan.stages}"
        return HopperCase(f"resident rowwarps {inner} {layout}", plan, rowwarp_source(sizes))
    layout = f"{'spanning' if plan.spans else f'g{plan.group}'} {'causal' if shape.causal else 'full'} r{plan.stages}"
    return HopperCase(f"resident warpgroups {inner} {layout}", plan, warpgroup_source(sizes))


def shipped_cases(room: Room = HOPPER) -> Iterator[KernelCase]:
    """Yield every Triton configuration the families launch on a device, in a fixed order."""
    for width, length, _, config in LADDER:
        tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": width}
        model = {"SCALE_LOG2": 0.25, "NUM_HEADS": 4, "HEAD_DIM": width, "CAUSAL": True, "HAS_MASK": True}
        name = f"attention d{width} s{length or 'any'} {config.block_m}x{config.block_n}"
        yield KernelCase(name, attention_kernel, ATTENTION_TYPES, model | tiles, config.num_warps, config.num_stages)
    yield KernelCase("mask_extent", mask_extent_kernel, EXTENT_TYPES, {"BLOCK": 1024}, 1, 1)
    for width in (128, 1024):
        flags = {"HAS_UPDATE": True, "STORE_RESIDUAL": True, "HAS_MASK": False}
        tiles = {"BLOCK_T": 2048 // width, "BLOCK_W": width}
        yield KernelCase(f"add_norm d{width}", add_norm_kernel, ADD_NORM_TYPES, {"WIDTH": width} | flags | tiles, 4, 3)
    yield KernelCase("gelu", gelu_kernel, GELU_TYPES, {"BLOCK": 2048}, 4, 3)
    for sizes in RESIDENT_SIZES:
        yield resident_case(*sizes, room)


def resident_case(
    d_model: int, heads: int, ffn_dim: int, seq_len: int, batch: int, causal: bool, room: Room = HOPPER
) -> KernelCase:
    """Return the resident kernel as a shape of these sizes launches it."""
    shape = Shape("case", batch, seq_len, d_model, heads, ffn_dim, 4, causal)
    config = resident_config(shape, room)
    fixed = constants(shape, layout_of(shape, config.ffn_tile, config.pack), config, masked=True)
    name = f"resident {config.mode} d{d_model} h{heads} f{ffn_dim} s{seq_len} b{batch}"
    function, types = blocks_kernel, BLOCKS_TYPES
    if config.mode == "flagged rows":
        function, types = flagged_rows_kernel, FLAGGED_TYPES
    elif config.mode == "layered rows":
        function, types = rows_kernel, LAYERED_TYPES
        fixed |= {"FIRST": False, "LAST": False}
    return KernelCase(name, function, types, fixed, config.num_warps, config.num_stages)
