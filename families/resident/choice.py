"""Which resident kernel takes a shape on a device; no torch."""

from __future__ import annotations

from rooflane.families.resident.config import ResidentConfig, Room, resident_config
from rooflane.families.resident.hopper.plan import HopperPlan, rowblock_plan, warpgroup_plan
from rooflane.families.resident.hopper.rowwarp_plan import rowwarp_plan
from rooflane.shapes import Shape

THIN = 32  # columns, or tokens, up to which row warps with twins are ahead of row blocks


def choose(shape: Shape, room: Room) -> HopperPlan | ResidentConfig:
    """Return the plan of a Hopper kernel where one is ahead of Triton's, else the Triton configuration.

    Device time on the H200 in us, Triton's first: row blocks 45.5 to 30.5 on shape 2, 35.7 to 25.8 on 12; warpgroups
    57 to 53 on shape 1, 70.5 to 54.6 on 5, 4664 to 3717 on 6, 60 to 49 on 9, 55 to 47 on 10, 104 to 91 on 11. Row warps
    against warpgroups: 29.3 to 20.1 on 7, 35 to 25 at twice its width, 208 to 191 at a batch of 1000; against row
    blocks, 18.8 to 15.2 at width 32, 17.5 to 15.0 on 32 tokens of width 64, but 21.3 to 23.1 on 128. Small causal
    batches of one wide head stay with flagged rows, 46 us where a warpgroup's chain takes 53. Small batches that attend
    both ways leave layered rows for warpgroups, which are as fast and cost the host 11 us where five launches cost 30.
    """
    config = resident_config(shape, room)
    if not room.warpgroups:
        return config
    blocks, narrow = rowblock_plan(shape, room.units), rowwarp_plan(shape, room.units)
    ahead = narrow is not None and narrow.twins == 2 and min(shape.d_model, shape.seq_len) <= THIN
    plan = narrow if ahead or blocks is None else blocks
    if plan is None and config.mode == "flagged rows":
        return config
    return plan or warpgroup_plan(shape, room.units) or config
