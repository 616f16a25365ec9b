"""The sm90 kernels' configurations by hand: sizes, shared memory, programs, predictions, translation units."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from rooflane.families import get_family
from rooflane.families.resident.config import H200, LIMITS
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_row_warps import WIDEST, RowWarps, clusters_at_a_time
from rooflane.families.resident.kernels.sm90_warpgroups import LEAST_STAGES, Warpgroups
from rooflane.families.resident.sm90_config import Sm90Config, translation_unit
from rooflane.families.resident.spec import choose
from rooflane.families.resources.resource_gate import nvrtc_version
from rooflane.shapes import Shape, load_shapes

PUBLISHED = Shape("published", 64, 128, 128, 4, 128, 4, True)
# Shared memory one program may have, its own arrays included; the system takes another KiB.
PROGRAM_LIMIT = 227 * 1024


class Device:
    """An H200's figures."""

    name, kind, capability, shared_memory_bytes, units = "h200", "cuda", (9, 0), H200.shared_bytes, H200.units
    graph_replay_s, special_per_s = 10.3e-6, 4182e9

    def matmul_flops(self, dtype):
        return 714e12


def in_limits(root):
    shapes = [shape for name in ("published", "neighbours") for shape in load_shapes(root / "shapes" / f"{name}.csv")]
    return [shape for shape in shapes if all(getattr(shape, name) <= limit for name, limit in LIMITS)]


def test_warpgroup_sizes_by_hand():
    plan = Warpgroups.try_plan(PUBLISHED, H200)
    assert (plan.spans, plan.group, plan.threads, plan.layer_tiles) == (True, 1, 512, 12)
    # 64 of 128 columns of half-precision weights; keys, values, rows and queries of 128 rows; three tiles of each half.
    assert plan.tile_bytes == 64 * 128 * 2 and plan.stages == 3
    assert plan.shared_bytes == 4 * 128 * 128 * 2 + 2 * 3 * 16384 == 229376
    assert plan.packed_bytes == 4 * 12 * 16384 + (4 * 4 * 128 + 2 * 128) * 4
    assert (plan.scratch_words, plan.flags) == (0, 0)
    # Heads of 8 need a core matrix of zeros for 64 rows, which costs a tile.
    narrow = Warpgroups.try_plan(replace(PUBLISHED, num_heads=16), H200)
    assert (narrow.zero_bytes, narrow.stages, narrow.shared_bytes) == (1024, 2, 131072 + 4 * 16384 + 1024)
    wide = Warpgroups.try_plan(replace(PUBLISHED, ffn_dim=200), H200)
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
    plan = Warpgroups.try_plan(Shape("a", batch, seq_len, 128, 4, 128, 4, False), H200)
    assert (plan.group, plan.row_blocks, plan.programs(H200.units)) == (group, blocks, programs)


def test_rowblock_sizes_by_hand():
    plan = RowBlocks.try_plan(Shape("a", 3, 100, 128, 4, 200, 4, True), H200)
    assert (plan.sequence_blocks, plan.programs(H200.units), plan.threads) == (7, 21, 288)
    assert (plan.ffn, plan.layer_tiles) == (256, 8)
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
    assert isinstance(RowBlocks.try_plan(shape, H200), RowBlocks)
    assert isinstance(RowBlocks.try_plan(replace(shape, **changes), H200), str)


def test_every_plan_fits_a_multiprocessor(root):
    more = [
        Shape("a", batch, s, 16 * w, w, f, 1, True)
        for w in (1, 4, 7, 8)
        for s in (17, 64, 128)
        for f in (16, 512)
        for batch in (1, 200, 2000)
    ]
    plans = [choose(shape, H200).config for shape in (*in_limits(root), *more)]
    plans = [plan for plan in plans if isinstance(plan, Sm90Config)]
    assert {type(plan) for plan in plans} == {Warpgroups, RowBlocks, RowWarps}
    for plan in plans:
        assert plan.stages >= LEAST_STAGES
        if isinstance(plan, RowWarps):
            # The kernel's own arrays: the barriers of the ring, of eight blocks at most, and one more.
            assert plan.shared_bytes + (2 * plan.stages + 9) * 8 <= PROGRAM_LIMIT, plan
        elif isinstance(plan, RowBlocks):
            assert plan.programs(H200.units) <= H200.units
            # The kernel's own arrays: moments and tops of 16 rows a warp, the barriers of a ring.
            own = 2 * plan.shape.d_model // 16 * 16 * 8 + 2 * plan.stages * 8
            assert plan.shared_bytes + own <= PROGRAM_LIMIT, plan
        else:
            # The kernel's own arrays: moments of 128 rows for two sides, the barriers of two rings.
            own = 128 * 2 * 8 + 4 * plan.stages * 8
            assert plan.shared_bytes + own <= PROGRAM_LIMIT, plan


def test_rowwarp_sizes_by_hand():
    plan = RowWarps.try_plan(Shape("a", 64, 128, 32, 4, 32, 4, True), H200)
    # 512 blocks of rows, four a program of paired warps: 128 programs, two a sequence.
    assert (plan.sequence_blocks, plan.pair, plan.warps, plan.split) == (8, 2, 8, 2)
    assert (plan.sequence_groups, plan.programs(H200.units)) == (64, 128)
    assert plan.threads == 8 * 32 + 128 and plan.together == 2
    assert plan.tile_bytes == 32 * 32 * 2 + 32 * 4 and plan.layer_tiles == 6 and plan.stages == 4 * 6
    # Keys and values of 128 rows, two shares of 16 rows in float32 a warp.
    assert plan.kv_bytes == 2 * 128 * 32 * 2 and plan.exchange_bytes == 8 * 2 * 16 * 32 * 4
    assert plan.shared_bytes == 24 * 2176 + plan.kv_bytes + plan.exchange_bytes
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
        (64, 128, 48, 3, (4, 1, 2, 4, 128)),  # an odd number of heads has no pairs
        (64, 128, 16, 2, (4, 1, 2, 4, 128)),  # nor has a width half of which no product divides
        (64, 32, 32, 4, (4, 2, 1, 2, 64)),
        (132, 16, 64, 4, (2, 2, 1, 1, 132)),
        (133, 16, 64, 4, (4, 2, 1, 1, 67)),
        (1000, 16, 64, 4, (8, 1, 1, 1, 125)),
    ],
)
def test_row_warps_take_as_few_rows_a_program_as_the_device_has_room_for(batch, seq_len, width, heads, sizes):
    plan = RowWarps.try_plan(Shape("a", batch, seq_len, width, heads, width, 4, True), H200)
    assert (plan.warps, plan.pair, plan.split, plan.span, plan.programs(H200.units)) == sizes


@pytest.mark.parametrize("changes", [{"d_model": 80}, {"d_model": 40, "num_heads": 5}, {"num_heads": 16}], ids=str)
def test_what_row_warps_do_not_take(changes):
    shape = Shape("a", 64, 128, WIDEST, 4, 64, 4, True)
    assert isinstance(RowWarps.try_plan(shape, H200), RowWarps)
    assert isinstance(RowWarps.try_plan(replace(shape, **changes), H200), str)


def test_clusters_at_a_time_on_small_devices():
    assert [clusters_at_a_time(programs, 132) for programs in (1, 2, 4)] == [132, 64, 24]
    assert [clusters_at_a_time(programs, 4) for programs in (1, 2, 4)] == [4, 1, 1]


@pytest.mark.parametrize("columns", [16, 24, 32, 40, 48, 64])
def test_heads_taken_together_fill_slices_of_sixteen_columns(columns):
    for heads in (1, 2, 3, 4, 6, 8):
        for head_dim in (8, 16, 24, 32, 48, 64):
            if heads * head_dim != columns or columns % 16:
                continue
            plan = RowWarps.try_plan(Shape("a", 64, 128, columns, heads, columns, 2, True), H200)
            assert plan.together * head_dim % 16 == 0, (heads, head_dim)
            assert heads // plan.pair % plan.together == 0


def test_predictions_and_bytes_follow_the_plan():
    spec, small = get_family("resident"), Shape("a", 4, 128, 128, 4, 128, 4, True)
    assert spec.predict_s(small, Device()) == pytest.approx(10.3e-6 + 4 * 7.5e-6)
    # Two bands, 128 rows: 33.6 MFLOP of products and 65,536 exponentials a layer, on one of 132 multiprocessors.
    layer = (2 * 128 * 98304 + 4 * 128 * 128 * 128) * 132 / 714e12 + 4 * 128 * 128 * 132 / 4182e9
    large = replace(PUBLISHED, batch_size=10_000)
    assert spec.predict_s(large, Device()) == pytest.approx(10.3e-6 + 76 * 4 * (4e-6 + layer / 0.9))
    plan = RowBlocks.try_plan(small, H200)
    weights = 4 * (6 * 128 * 128 + 10 * 128) + 2 * 128
    ends = 2 * 4 * 128 * 128 * 4
    assert spec.peak_bytes(small, Device()) == weights * 4 + ends + plan.packed_bytes + 4 * (plan.scratch_words + 64)


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
    predicted = get_family("resident").predict_s(shape, Device()) - Device.graph_replay_s
    assert predicted * 1e6 == pytest.approx(microseconds, rel=0.21)


UNITS = {kernel: kernel.try_plan(shape, H200).source(masked=True, bfloat16=False) for kernel, shape in (
    (Warpgroups, PUBLISHED), (RowBlocks, replace(PUBLISHED, batch_size=1)), (RowWarps, replace(PUBLISHED, d_model=32)),
)}  # fmt: skip


@pytest.mark.parametrize("kernel", UNITS, ids=lambda kernel: kernel.kernel)
def test_a_translation_unit_is_whole_and_every_line_names_its_file(kernel):
    """NVRTC has no include path: nothing may be left to include; an error must name the line of the real file."""
    text = UNITS[kernel]
    assert "#include" not in text and f"{kernel.FUNCTION}(" in text
    folder = files("rooflane.families.resident.kernels")
    name, number, seen = "", 0, {}
    for line in text.splitlines():
        if marker := re.fullmatch(r'#line (\d+) "(.+)"', line):
            number, name = int(marker[1]), marker[2]
            continue
        if name:
            assert line == (folder / name).read_text().splitlines()[number - 1]
            seen.setdefault(name, []).append(number)
            number += 1
    assert kernel.SOURCE in seen and "sm90_steps.cuh" in seen
    for name, numbers in seen.items():
        lines = (folder / name).read_text().splitlines()
        includes = [place for place, line in enumerate(lines, 1) if line.startswith("#include")]
        assert sorted(numbers + includes) == list(range(1, len(lines) + 1)), f"each line of {name} once"


def test_a_compilers_message_names_the_file_and_the_line(monkeypatch):
    if nvrtc_version() is None:
        pytest.skip("needs NVRTC: pip install 'rooflane[hopper]'")
    from rooflane.families.runtime.cuda_kernel import compiler_report

    sizes = RowBlocks.try_plan(replace(PUBLISHED, batch_size=1), H200).constants(True, False)
    steps = (files("rooflane.families.resident.kernels") / "sm90_steps.cuh").read_text().splitlines()
    (place,) = [number for number, line in enumerate(steps, 1) if line.startswith("typedef unsigned long long u64")]
    broken = translation_unit(RowBlocks.SOURCE, sizes).replace("typedef unsigned long long u64;", "typedef wrong u64;")
    with pytest.raises(RuntimeError, match=rf"sm90_steps\.cuh\({place}\)"):
        compiler_report(broken, "sm_90a")


def test_no_python_string_of_the_families_holds_a_page_of_cuda(root):
    for path in (root / "families").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 20:
                assert "__device__" not in node.value and "#include" not in node.value, f"{path}:{node.lineno}"
