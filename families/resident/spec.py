"""resident: the whole forward of short, narrow sequences on the SM, for launch- and bandwidth-bound shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflane.families.lean.cost import HALF, SINGLE, operand_name, weight_elements
from rooflane.families.option_values import operands
from rooflane.families.resident.choice import choose
from rooflane.families.resident.config import ResidentConfig, Room
from rooflane.families.resident.hopper.plan import BAND, RowblockPlan, WarpgroupPlan
from rooflane.families.resident.hopper.rowwarp_plan import ROWS, RowwarpPlan, clusters_at_a_time
from rooflane.families.resident.layout import layout_of, padded
from rooflane.families.resident.sizes import programs, scratch_bytes
from rooflane.families.runtime.runtime_compiler import CAPABILITY
from rooflane.families.spec import FamilySpec, Limits
from rooflane.shapes import Shape

if TYPE_CHECKING:
    from torch import device, nn

    from rooflane.families.spec import Forward

# (what, limit): a program holds a sequence's residual in registers and its heads' keys in shared memory.
LIMITS = [("seq_len", 128), ("d_model", 128), ("head_dim", 128), ("ffn_dim", 512)]
LEAST_CAPABILITY = (8, 0)
# KiB of shared memory a program takes where the device has no more than a consumer card's 99 (resources.json).
SHARED_KIB = 99
# Share of the tensor and exp rates a program reaches: its steps depend on each other, so units wait. Whole sequences
# (eight warps) and halves (four), from shapes 5, 6, 9 and 1, 7, 11 on the H200.
WHOLE_EFFICIENCY, HALVES_EFFICIENCY = 0.58, 0.36
# A layer of thin rows is a chain of dependent steps, however few the rows: from shapes 2 to 4 on the H200, with flags,
# and with a launch a layer.
FLAGGED_LAYER_S, LAYERED_STEP_S = 9e-6, 10e-6
# The row-block kernel's layer likewise: 7.6 us on shape 2, 6.5 on 12 (H200).
ROWBLOCK_LAYER_S = 7.5e-6
# A layer of the warpgroup kernel: its barriers and waits, and the share of the tensor and exp rates it reaches beside
# them. Within 12 % of shapes 1, 5, 6, 9 to 11, and of 7 and 12, were it to take them (H200).
WARPGROUP_LAYER_S, WARPGROUP_EFFICIENCY = 4e-6, 0.9
# The row-warp kernel's likewise: of thirteen shapes 16 to 64 wide ten lie within 15 %, all within 30 % (H200).
ROWWARP_LAYER_S, ROWWARP_EFFICIENCY = 2.9e-6, 0.65


class Resident(FamilySpec):
    """Keep every intermediate on the SM: one launch for the forward (small non-causal batches: one a layer)."""

    name = "resident"
    summary = "the whole forward in one kernel, activations on the SM"
    options = {"operand_dtype": "GEMM operands: float16 or bfloat16; by default what suits the model"}
    option_checks = {"operand_dtype": operands}

    def supports(self, shape: Shape, profile: Limits) -> str | None:
        """Return None when the shape can be built for the device, else the reason."""
        if profile.kind != "cuda":
            return "needs an NVIDIA GPU; on a CPU its kernels are only interpreted, in tests"
        if profile.capability is not None and profile.capability < LEAST_CAPABILITY:
            return f"needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
        for name, limit in LIMITS:
            if getattr(shape, name) > limit:
                return f"{name} {getattr(shape, name)} is over {limit}: one SM cannot hold a sequence"
        if shape.head_dim > 64 and shape.ffn_dim <= 16:
            return f"ffn_dim {shape.ffn_dim} is under 17 with a head_dim over 64: too little for the kernel's two steps"
        if profile.shared_memory_bytes < SHARED_KIB * 1024:
            return (
                f"needs {SHARED_KIB} KiB of shared memory a block, the device has {profile.shared_memory_bytes >> 10}"
            )
        return None

    def peak_bytes(self, shape: Shape, profile: Limits, **options: Any) -> int:
        """Return the device bytes of one call: weights, packed weights, input, output; small batches' scratch."""
        ends = 2 * shape.tokens * shape.d_model * shape.dtype_bytes
        return weight_elements(shape) * shape.dtype_bytes + ends + _held_bytes(shape, profile)

    def predict_s(self, shape: Shape, profile: Limits) -> float:
        """Return the predicted event time of one call in seconds."""
        choice = choose(shape, _room(profile))
        if isinstance(choice, ResidentConfig):
            return profile.graph_replay_s + _triton_s(shape, choice, profile)
        if isinstance(choice, RowblockPlan):
            return profile.graph_replay_s + shape.num_layers * ROWBLOCK_LAYER_S
        if isinstance(choice, RowwarpPlan):
            return profile.graph_replay_s + _rowwarp_s(choice, profile)
        return profile.graph_replay_s + _warpgroup_s(choice, profile)

    def build(self, model: nn.Module, shape: Shape, device: device, operand_dtype: str | None = None) -> Forward:
        """Return the built forward; its kernels are compiled at the first call."""
        from rooflane.families.resident.build import build

        return build(model, shape, device, operand_dtype)


def _room(profile: Limits) -> Room:
    return Room(profile.units, profile.shared_memory_bytes, profile.capability == CAPABILITY)


def _held_bytes(shape: Shape, profile: Limits) -> int:
    """Return the device bytes a built forward holds: packed weights, scratch, flags."""
    choice = choose(shape, _room(profile))
    if not isinstance(choice, ResidentConfig):
        return choice.packed_bytes + (choice.scratch_words + choice.flags) * SINGLE
    layout = layout_of(shape, choice.ffn_tile, choice.pack)
    packed = layout.layers * (layout.layer_weights * HALF + layout.layer_biases * SINGLE)
    return packed + scratch_bytes(shape, layout, choice)


def _triton_s(shape: Shape, config: ResidentConfig, profile: Limits) -> float:
    """Return the device seconds of a Triton configuration."""
    if config.mode == "flagged rows":
        return shape.num_layers * FLAGGED_LAYER_S
    if config.mode == "layered rows":
        return (shape.num_layers + 1) * LAYERED_STEP_S
    layout = layout_of(shape, config.ffn_tile, config.pack)
    keys = padded(shape.seq_len)
    flops = 2 * config.rows * layout.layer_weights + 4 * config.rows * keys * layout.heads_width * layout.pack
    seconds = _unit_s(shape, profile, flops, shape.num_heads * config.rows * keys)
    waves = -(-programs(shape, config) // profile.units)
    efficiency = HALVES_EFFICIENCY if config.mode == "halves" else WHOLE_EFFICIENCY
    return waves * shape.num_layers * seconds / efficiency


def _warpgroup_s(plan: WarpgroupPlan, profile: Limits) -> float:
    """Return the device seconds of a warpgroup plan: a multiprocessor takes two bands through a layer at a time."""
    shape, rows, keys = plan.shape, 2 * BAND, BAND * (2 if plan.spans else 1)
    flops = 2 * rows * plan.layer_tiles * plan.tile_bytes // HALF + 4 * rows * keys * shape.d_model
    seconds = _unit_s(shape, profile, flops, shape.num_heads * rows * keys)
    waves = -(-plan.blocks // profile.units)
    return waves * shape.num_layers * (WARPGROUP_LAYER_S + seconds / WARPGROUP_EFFICIENCY)


def _rowwarp_s(plan: RowwarpPlan, profile: Limits) -> float:
    """Return the device seconds of a row-warp plan: what one program's blocks of rows take."""
    shape, rows, keys = plan.shape, plan.warps // plan.twins * ROWS, plan.blocks * ROWS
    flops = 2 * rows * plan.layer_tiles * shape.d_model**2 + 4 * rows * keys * shape.d_model
    seconds = _unit_s(shape, profile, flops, shape.num_heads * rows * keys)
    waves = -(-plan.units // clusters_at_a_time(plan.split, profile.units))
    return waves * shape.num_layers * (ROWWARP_LAYER_S + seconds / ROWWARP_EFFICIENCY)


def _unit_s(shape: Shape, profile: Limits, flops: int, specials: int) -> float:
    """Return the seconds one multiprocessor takes at its full rates."""
    seconds = flops * profile.units / profile.matmul_flops(operand_name(shape, "cuda"))
    return seconds + specials * profile.units / profile.special_per_s


SPEC = Resident()
