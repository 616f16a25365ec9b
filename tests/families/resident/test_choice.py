"""Which kernel takes which shape, and the Hopper kernels' sizes by hand."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from rooflane.families import get_family
from rooflane.families.resident import build as building
from rooflane.families.resident.choice import choose
from rooflane.families.resident.config import HOPPER, ResidentConfig, Room, resident_config
from rooflane.families.resident.hopper.plan import (
    LEAST_STAGES,
    MULTIPROCESSOR_BYTES,
    PROGRAM_BYTES,
    RowblockPlan,
    WarpgroupPlan,
    rowblock_plan,
    warpgroup_plan,
)
from rooflane.families.resident.hopper.rowwarp_plan import WIDEST, RowwarpPlan, clusters_at_a_time, rowwarp_plan
from rooflane.families.resident.spec import LIMITS
from rooflane.shapes import Shape, load_shapes

UNITS = HOPPER.units
CONSUMER = Room(128, 99 * 1024)
PUBLISHED = Shape("published", 64, 128, 128, 4, 128, 4, True)
# Shared memory one program may have, its own arrays and what the system takes included.
PROGRAM_LIMIT = 227 * 1024


class H200:
    name, kind, capability, shared_memory_bytes, units = "h200", "cuda", (9, 0), HOPPER.shared_bytes, HOPPER.units
    graph_replay_s, special_per_s = 10.3e-6, 4182e9

    def matmul_flops(self, dtype):
        return 714e12


def in_limits(root):
    shapes = [shape for name in ("published", "neighbours") for shape in load_shapes(root / "shapes" / f"{name}.csv")]
    return [shape for shape in shapes if all(getattr(shape, name) <= limit for name, limit in LIMITS)]


def kernel(choice) -> str:
    return choice.mode if isinstance(choice, ResidentConfig) else type(choice).__name__


def test_an_h200_takes_the_kernels_that_were_measured_ahead(root):
    found = {shape.id: kernel(choose(shape, HOPPER)) for shape in in_limits(root)}
    rowblocks = dict.fromkeys(["2", "3", "4", "12", "n1", "n3", "n24"], "RowblockPlan")
    rowwarps = dict.fromkeys(["7", "n2", "n9", "n11", "n17", "n18"], "RowwarpPlan")  # up to 64 wide
    assert found == dict.fromkeys(found, "WarpgroupPlan") | rowblocks | rowwarps
    assert {"1", "5", "6", "9", "10", "11"} < set(found) - set(rowblocks | rowwarps)


def test_row_warps_go_before_row_blocks_where_rows_or_sequences_are_thin():
    both = Shape("a", 4, 128, 64, 2, 64, 4, True)
    assert kernel(choose(both, HOPPER)) == "RowblockPlan"
    assert kernel(choose(replace(both, d_model=32), HOPPER)) == "RowwarpPlan"
    assert kernel(choose(replace(both, seq_len=32), HOPPER)) == "RowwarpPlan"
    assert kernel(choose(replace(both, seq_len=32, d_model=128), HOPPER)) == "RowblockPlan"
    assert kernel(choose(replace(both, d_model=16, num_heads=1), HOPPER)) == "RowblockPlan", "no twins, not measured"


def test_small_causal_batches_of_one_wide_head_keep_triton():
    assert kernel(choose(Shape("a", 4, 128, 128, 1, 128, 4, True), HOPPER)) == "flagged rows"


@pytest.mark.parametrize("room", [CONSUMER, replace(HOPPER, warpgroups=False)], ids=["consumer", "no-compiler"])
def test_other_devices_keep_triton(root, room):
    for shape in in_limits(root):
        assert choose(shape, room) == resident_config(shape, room)


def test_a_width_no_tensor_core_divides_keeps_triton():
    shape = Shape("odd", 64, 128, 36, 2, 64, 2, True)
    assert isinstance(choose(shape, HOPPER), ResidentConfig)


def test_a_cpu_interprets_triton_alone():
    room = building.room_of(torch.device("cpu"))
    assert not room.warpgroups and (room.units, room.shared_bytes) == (HOPPER.units, HOPPER.shared_bytes)


@pytest.mark.parametrize(
    ("capability", "compiler", "expected"),
    [((9, 0), True, True), ((9, 0), False, False), ((10, 0), True, False), ((8, 9), True, False)],
)
def test_a_gpus_room_asks_for_its_capability_and_the_compiler(monkeypatch, capability, compiler, expected):
    class Properties:
        major, minor = capability
        multi_processor_count, shared_memory_per_block_optin = 78, 227 * 1024

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(building, "missing_compiler", lambda: "" if compiler else "ImportError: none here")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert building.room_of(torch.device("cuda", 0)) == Room(78, 227 * 1024, expected)
    # Only a device that would have run them is told.
    assert [str(one.message) for one in said if "none here" in str(one.message)] == [
        str(one.message) for one in said
    ] and bool(said) == (capability == (9, 0) and not compiler)


def test_operands_follow_the_model_or_the_request(monkeypatch):
    """What the builder hands on, with a device that is said to be an H200 and nothing launched."""
    seen = []
    monkeypatch.setattr(building, "room_of", lambda device: HOPPER)
    monkeypatch.setattr(building, "build_hopper", lambda *arguments: seen.append(arguments[2]))
    for dtype in ("float32", "float16", "bfloat16"):
        building.build(None, replace(PUBLISHED, dtype=dtype), "cuda", None)
    building.build(None, PUBLISHED, "cuda", "bfloat16")
    assert seen == [torch.float16, torch.float16, torch.bfloat16, torch.bfloat16]
    with pytest.raises(ValueError, match="accepted: float16, bfloat16"):
        building.build(None, PUBLISHED, "cuda", "float8")


def test_warpgroup_sizes_by_hand():
    plan = warpgroup_plan(PUBLISHED, UNITS)
    assert (plan.spans, plan.group, plan.threads, plan.layer_tiles) == (True, 1, 512, 12)
    # 64 of 128 columns of half-precision weights; keys, values, rows and queries of 128 rows; three tiles of each half.
    assert plan.tile_bytes == 64 * 128 * 2 and plan.stages == 3
    assert plan.shared_bytes == 4 * 128 * 128 * 2 + 2 * 3 * 16384 == 229376
    assert plan.packed_bytes == 4 * 12 * 16384 + (4 * 4 * 128 + 2 * 128) * 4
    assert (plan.scratch_words, plan.flags) == (0, 0)
    # Heads of 8 need a core matrix of zeros for 64 rows, which costs a tile.
    narrow = warpgroup_plan(replace(PUBLISHED, num_heads=16), UNITS)
    assert (narrow.zero_bytes, narrow.stages, narrow.shared_bytes) == (1024, 2, 131072 + 4 * 16384 + 1024)
    wide = warpgroup_plan(replace(PUBLISHED, ffn_dim=200), UNITS)
    assert (wide.ffn, wide.layer_tiles) == (256, 16)


@pytest.mark.parametrize(
    ("batch", "seq_len", "group", "blocks", "programs"),
    [
        (64, 128, 1, 64, 64),
        (10_000, 65, 1, 10_000, 132),  # persistent: a program a multiprocessor takes block after block
        (264, 13, 1, 132, 132),  # two bands, a sequence each
        (1100, 13, 4, 138, 132),  # two bands of four sequences of 16 rows
        (1101, 33, 1, 551, 132),
    ],
)
def test_programs_by_hand(batch, seq_len, group, blocks, programs):
    plan = warpgroup_plan(Shape("a", batch, seq_len, 128, 4, 128, 4, False), UNITS)
    assert (plan.group, plan.blocks, plan.programs(UNITS)) == (group, blocks, programs)


def test_rowblock_sizes_by_hand():
    plan = rowblock_plan(Shape("a", 3, 100, 128, 4, 200, 4, True), UNITS)
    assert (plan.blocks, plan.programs(UNITS), plan.threads, plan.ffn, plan.layer_tiles) == (7, 21, 288, 256, 8)
    # 128 x 128 half-precision weights and 128 floats; three operands of 16 rows with eight columns between, and eight
    # warps' 16 rows of a head of 32 and eight more.
    assert plan.tile_bytes == 32768 + 512
    assert plan.passed_bytes == 3 * 16 * 136 * 2 + 8 * 16 * 40 * 4 == 33536
    assert plan.stages == 5 and plan.shared_bytes == 5 * 33280 + 33536
    assert plan.scratch_words == 4 * 21 * 16 * 128 and plan.flags == 3 * 16
    assert plan.packed_bytes == 4 * 8 * 33280 + 1024


@pytest.mark.parametrize(
    "changes", [{"causal": False}, {"seq_len": 16}, {"batch_size": 17}, {"num_heads": 1}, {"num_heads": 16}], ids=str
)
def test_what_row_blocks_do_not_take(changes):
    shape = Shape("a", 16, 128, 128, 4, 128, 4, True)
    assert isinstance(rowblock_plan(shape, UNITS), RowblockPlan)
    assert rowblock_plan(replace(shape, **changes), UNITS) is None


def test_every_plan_fits_a_multiprocessor(root):
    more = [
        Shape("a", batch, s, 16 * w, w, f, 1, True)
        for w in (1, 4, 7, 8)
        for s in (17, 64, 128)
        for f in (16, 512)
        for batch in (1, 200, 2000)
    ]
    plans = [choose(shape, HOPPER) for shape in (*in_limits(root), *more)]
    plans = [plan for plan in plans if not isinstance(plan, ResidentConfig)]
    assert {type(plan) for plan in plans} == {WarpgroupPlan, RowblockPlan, RowwarpPlan}
    for plan in plans:
        assert plan.stages >= LEAST_STAGES
        if isinstance(plan, RowwarpPlan):
            # The kernel's own arrays: the barriers of the ring, of eight blocks at most, and one more.
            assert plan.shared_bytes + (2 * plan.stages + 9) * 8 <= PROGRAM_LIMIT, plan
        elif isinstance(plan, RowblockPlan):
            assert plan.programs(UNITS) <= UNITS
            # The kernel's own arrays: moments and tops of 16 rows a warp, the barriers of a ring.
            own = 2 * plan.shape.d_model // 16 * 16 * 8 + 2 * plan.stages * 8
            assert plan.shared_bytes + own <= PROGRAM_LIMIT, plan
        else:
            # The kernel's own arrays: moments of 128 rows for two sides, the barriers of two rings.
            own = 128 * 2 * 8 + 4 * plan.stages * 8
            assert plan.shared_bytes + own + PROGRAM_BYTES <= MULTIPROCESSOR_BYTES, plan


def test_rowwarp_sizes_by_hand():
    plan = rowwarp_plan(Shape("a", 64, 128, 32, 4, 32, 4, True), UNITS)
    # 512 blocks of rows, four a program of twins: 128 programs, two a sequence.
    assert (plan.blocks, plan.twins, plan.warps, plan.split, plan.units, plan.programs(UNITS)) == (8, 2, 8, 2, 64, 128)
    assert plan.threads == 8 * 32 + 128 and plan.together == 2
    assert plan.tile_bytes == 32 * 32 * 2 + 32 * 4 and plan.layer_tiles == 6 and plan.stages == 4 * 6
    # Keys and values of 128 rows, two shares of 16 rows in float32 a warp.
    assert plan.held_bytes == 2 * 128 * 32 * 2 and plan.exchange_bytes == 8 * 2 * 16 * 32 * 4
    assert plan.shared_bytes == 24 * 2176 + plan.held_bytes + plan.exchange_bytes
    assert plan.packed_bytes == 24 * 2176 + 2 * 32 * 4
    assert (plan.scratch_words, plan.flags) == (0, 0)


@pytest.mark.parametrize(
    ("batch", "seq_len", "width", "heads", "sizes"),
    [
        # (warps, twins, split, span, programs)
        (4, 128, 32, 4, (4, 2, 4, 8, 16)),
        (24, 65, 64, 2, (4, 2, 4, 8, 96)),
        (25, 65, 64, 2, (8, 2, 2, 4, 50)),  # more clusters of four than run at a time
        (65, 128, 64, 4, (8, 1, 1, 2, 65)),  # more of two: a sequence a program, which takes eight warps
        (1000, 128, 32, 4, (8, 1, 1, 2, 132)),
        (64, 128, 48, 3, (4, 1, 2, 4, 128)),  # an odd number of heads has no twins
        (64, 128, 16, 2, (4, 1, 2, 4, 128)),  # nor has a width half of which no product divides
        (64, 32, 32, 4, (4, 2, 1, 2, 64)),
        (132, 16, 64, 4, (2, 2, 1, 1, 132)),
        (133, 16, 64, 4, (4, 2, 1, 1, 67)),
        (1000, 16, 64, 4, (8, 1, 1, 1, 125)),
    ],
)
def test_row_warps_take_as_few_rows_a_program_as_the_device_has_room_for(batch, seq_len, width, heads, sizes):
    plan = rowwarp_plan(Shape("a", batch, seq_len, width, heads, width, 4, True), UNITS)
    assert (plan.warps, plan.twins, plan.split, plan.span, plan.programs(UNITS)) == sizes


@pytest.mark.parametrize("changes", [{"d_model": 80}, {"d_model": 40, "num_heads": 5}, {"num_heads": 16}], ids=str)
def test_what_row_warps_do_not_take(changes):
    shape = Shape("a", 64, 128, WIDEST, 4, 64, 4, True)
    assert isinstance(rowwarp_plan(shape, UNITS), RowwarpPlan)
    assert rowwarp_plan(replace(shape, **changes), UNITS) is None


def test_clusters_at_a_time_on_small_devices():
    assert [clusters_at_a_time(programs, 132) for programs in (1, 2, 4)] == [132, 64, 24]
    assert [clusters_at_a_time(programs, 4) for programs in (1, 2, 4)] == [4, 1, 1]


@pytest.mark.parametrize("columns", [16, 24, 32, 40, 48, 64])
def test_heads_taken_together_fill_slices_of_sixteen_columns(columns):
    for heads in (1, 2, 3, 4, 6, 8):
        for head_dim in (8, 16, 24, 32, 48, 64):
            if heads * head_dim != columns or columns % 16:
                continue
            plan = rowwarp_plan(Shape("a", 64, 128, columns, heads, columns, 2, True), UNITS)
            assert plan.together * head_dim % 16 == 0, (heads, head_dim)
            assert heads // plan.twins % plan.together == 0


@pytest.mark.parametrize("seq_len", [17, 32, 100, 128])
def test_scratch_is_bounded_by_the_device_and_not_the_batch(seq_len):
    held = []
    for batch in range(1, 300):
        plan = choose(Shape("a", batch, seq_len, 128, 4, 128, 4), HOPPER)
        held.append(plan.scratch_words * 4 + plan.flags * 4)
    # A block of 16 rows a multiprocessor, four layers, keys and values of 128 columns, two bytes each; 16 flags each.
    assert 0 < max(held) <= UNITS * (4 * 16 * 128 * 2 * 2 + 16 * 4)
    assert held[-1] == 0


def test_predictions_and_bytes_follow_the_plan():
    spec, small = get_family("resident"), Shape("a", 4, 128, 128, 4, 128, 4, True)
    assert spec.predict_s(small, H200()) == pytest.approx(10.3e-6 + 4 * 7.5e-6)
    # Two bands, 128 rows: 33.6 MFLOP of products and 65,536 exponentials a layer, on one of 132 multiprocessors.
    layer = (2 * 128 * 98304 + 4 * 128 * 128 * 128) * 132 / 714e12 + 4 * 128 * 128 * 132 / 4182e9
    large = replace(PUBLISHED, batch_size=10_000)
    assert spec.predict_s(large, H200()) == pytest.approx(10.3e-6 + 76 * 4 * (4e-6 + layer / 0.9))
    plan = rowblock_plan(small, UNITS)
    weights = 4 * (6 * 128 * 128 + 10 * 128) + 2 * 128
    ends = 2 * 4 * 128 * 128 * 4
    assert spec.peak_bytes(small, H200()) == weights * 4 + ends + plan.packed_bytes + 4 * (plan.scratch_words + 64)


# (shape, device us on the H200); a prediction lies within a fifth of them, the floor of the event time off.
MEASURED = [
    (PUBLISHED, 52.9), (replace(PUBLISHED, batch_size=1), 30.5), (replace(PUBLISHED, batch_size=128), 54.6),
    (replace(PUBLISHED, batch_size=10_000), 3717), (replace(PUBLISHED, d_model=32, ffn_dim=32), 20.1),
    (replace(PUBLISHED, d_model=64, ffn_dim=64), 25.2), (replace(PUBLISHED, batch_size=128, d_model=64), 35.5),
    (replace(PUBLISHED, batch_size=1000, d_model=32, ffn_dim=32), 191),
    (replace(PUBLISHED, num_heads=1), 49.1), (replace(PUBLISHED, num_heads=2), 47.4),
    (replace(PUBLISHED, num_heads=16), 91.2), (replace(PUBLISHED, seq_len=32), 25.8),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "microseconds"), MEASURED, ids=lambda value: getattr(value, "label", str)())
def test_predictions_lie_near_the_measurements_they_were_fitted_to(shape, microseconds):
    predicted = get_family("resident").predict_s(shape, H200()) - H200.graph_replay_s
    assert predicted * 1e6 == pytest.approx(microseconds, rel=0.21)
