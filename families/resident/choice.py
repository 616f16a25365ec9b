"""Which resident kernel takes a shape on a device; no torch."""

from __future__ import annotations

from rooflane.families.resident.config import ResidentConfig, Room, resident_config
from rooflane.families.resident.hopper.plan import HopperPlan, rowblock_plan, warpgroup_plan
from rooflane.shapes import Shape

# Columns of a head from which on the warpgroup kernel is ahead: it pads heads to 16 (H200, device time, heads of 8:
# shape 11 137 us against Triton's 104, shape 7 36.5 against 27.5; heads of 32 to 128: 5 to 22 % less than Triton, but
# for shape 1, which it takes 60 for 57).
LEAST_WARPGROUP_HEAD = 9


def choose(shape: Shape, room: Room) -> HopperPlan | ResidentConfig:
    """Return the plan of a Hopper kernel where one is ahead of Triton's, else the Triton configuration.

    Row blocks where they fit: 26 to 29 % less device time than Triton's flagged rows (H200, shapes 2, 3, 4 and 12).
    """
    if room.warpgroups:
        plan = rowblock_plan(shape, room.units)
        if plan is None and shape.head_dim >= LEAST_WARPGROUP_HEAD:
            plan = warpgroup_plan(shape, room.units)
        if plan is not None:
            return plan
    return resident_config(shape, room)
