"""The simulator of shared memory's banks: by closed forms, and what it says of the rungs' accesses."""

from __future__ import annotations

import math
from itertools import product

import pytest

from rooflane.families.ladder import gemm
from rooflane.families.ladder.banks import BANKS, LANES, Access, passes
from rooflane.families.ladder.gemm.fp32 import FP32


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 9, 16, 31, 32, 33, 64, 132])
def test_words_a_stride_apart_meet_a_bank_as_often_as_the_divisor_they_share(stride):
    assert passes([lane * stride for lane in range(LANES)], 1) == math.gcd(stride, BANKS)


def test_lanes_that_read_one_word_share_it_and_two_words_of_a_bank_do_not():
    assert passes([7] * LANES, 1) == 1
    assert passes([lane % 2 * BANKS for lane in range(LANES)], 1) == 2


@pytest.mark.parametrize("width", [2, 4])
def test_wide_reads_take_a_part_of_the_warp_at_a_time(width):
    assert passes([lane * width for lane in range(LANES)], width) == width
    # A stride of a whole line of banks puts each lane of a part into the same banks.
    assert passes([lane * BANKS for lane in range(LANES)], width) == LANES
    assert Access("", lambda lane: lane * BANKS, width).repeats == LANES / width


@pytest.mark.parametrize(("words", "width"), [(range(0, 64, 2), 4), (range(31), 1), (range(32), 3)])
def test_an_access_that_the_hardware_does_not_have_is_refused(words, width):
    with pytest.raises(ValueError, match="no access of shared memory"):
        passes(words, width)


def test_a_swizzle_by_the_row_spares_the_pad():
    """Rows of 32 words: a column meets one bank 32 times, and none twice where the row is added into the column."""
    assert passes([lane * 32 for lane in range(LANES)], 1) == 32
    assert passes([lane * 32 + (5 ^ lane) for lane in range(LANES)], 1) == 1


@pytest.mark.parametrize("rung", FP32, ids=lambda rung: rung.name)
def test_the_rungs_read_without_conflicts_and_store_at_most_twice(rung):
    for access in rung.accesses:
        assert access.repeats <= (1 if access.what.startswith("read") else 2), access.what


def test_without_their_pads_the_staging_patterns_conflict():
    """The transposed copies of the top rung: 8 depths of 4 lines; lines of 128 words would meet 4 banks alone."""
    (top,) = (rung for rung in FP32 if rung.name == "async copies")
    stage = top.accesses[0]
    line = top.tile[0] + top.constants["PAD"]
    assert sorted(map(stage.word, range(LANES))) == sorted(
        depth * line + row for depth, row in product(range(8), range(4))
    )
    assert stage.repeats == 1
    assert passes([lane % 8 * top.tile[0] + lane // 8 for lane in range(LANES)], 1) == 8


def test_every_rung_that_stages_states_its_accesses():
    assert all(
        rung.accesses for rung in gemm.RUNGS if any(name.startswith(("STS", "LDGSTS")) for name in rung.expected)
    )
