"""The rungs in fp32: operands, products and sums.

An H200's 132 SMs do 128 multiply-adds a cycle at 1.98 GHz, 67 TFLOP/s: a prediction is a share of that.
"""

from __future__ import annotations

from rooflane.families.ladder.banks import Access
from rooflane.families.ladder.rungs import GemmRung


def _lines(across: int, gap: int) -> Access:
    """Return the staging of `across` depths of one line after another, `gap` words from line to line."""
    return Access("stage a tile", lambda lane: lane // across * gap + lane % across)


def _transposed(depths: int, width: int, gap: int) -> Access:
    """Return a transposed store: lanes take `depths` places in K, `width` depths apart, of one line after another."""
    return Access("stage a tile", lambda lane: lane % depths * width * gap + lane // depths)


def _across(lane: int) -> int:
    return lane & 1 | lane >> 1 & 2 | lane >> 2 & 4


def _down(lane: int) -> int:
    return lane >> 1 & 1 | lane >> 2 & 2


FP32 = (
    GemmRung(
        name="naive",
        idea="a thread an output; neighbouring threads take neighbouring rows",
        predicted=0.5,
        reason="32 cache lines a load of A: 33 cycles of the L1 for 32 multiply-adds",
        file="naive.cu",
        kernel="gemm_naive",
        threads=256,
        tile=(256, 1, 1),
        registers=64,
        blocks=4,
        expected=("FFMA", "LDG"),
    ),
    GemmRung(
        name="coalesced",
        idea="a warp an output; neighbouring lanes take neighbouring depths",
        predicted=5.0,
        reason="two cache lines for 32 multiply-adds allow 8.4, the L2's 1.5 bytes for each allow 7",
        file="coalesced.cu",
        kernel="gemm_coalesced",
        threads=1024,
        tile=(8, 4, 32),
        registers=32,
        blocks=2,
        expected=("FFMA", "LDG", "SHFL"),
    ),
    GemmRung(
        name="shared tiles",
        idea="a block stages 32 x 32 of each operand in shared memory",
        predicted=7.0,
        reason="two passes of shared memory for 32 multiply-adds allow 8.4",
        file="shared_tiles.cu",
        kernel="gemm_shared_tiles",
        threads=1024,
        tile=(32, 32, 32),
        constants={"PAD": 1},
        registers=32,
        blocks=2,
        expected=("FFMA", "LDS", "STS"),
        accesses=(_lines(32, 33), Access("read columns", lambda lane: lane * 33)),
    ),
    GemmRung(
        name="several results",
        idea="a thread computes eight outputs of a column",
        predicted=13.0,
        reason="nine passes for eight times 32 multiply-adds allow 15",
        file="several_results.cu",
        kernel="gemm_several_results",
        threads=512,
        tile=(64, 64, 8),
        constants={"PAD": 1},
        registers=64,
        blocks=2,
        expected=("FFMA", "LDS", "STS"),
        # Lines of 9 words cannot spare both: an odd length serves the many reads, at two passes a store.
        accesses=(_lines(8, 9), Access("read columns", lambda lane: lane * 9)),
    ),
    GemmRung(
        name="register tiles",
        idea="a thread computes 8 x 8 outputs from 16 words",
        predicted=32.0,
        reason="four instructions of five are multiply-adds; staging is waited for",
        file="register_tiles.cu",
        kernel="gemm_register_tiles",
        threads=256,
        tile=(128, 128, 8),
        constants={"PAD": 1},
        registers=128,
        blocks=2,
        expected=("FFMA", "LDS", "STS"),
        accesses=(_lines(8, 9), Access("read columns", lambda lane: lane % 16 * 9)),
    ),
    GemmRung(
        name="vectorised",
        idea="16-byte loads along K, staged transposed, 16-byte reads",
        predicted=38.0,
        reason="64 instructions of 68 of a step are multiply-adds; staging is waited for",
        file="vectorised.cu",
        kernel="gemm_vectorised",
        threads=256,
        tile=(128, 128, 8),
        constants={"PAD": 4},
        registers=128,
        blocks=2,
        expected=("FFMA", "LDG.E.128", "LDS.128"),
        accesses=(
            _transposed(2, 4, 132),
            Access("read rows", lambda lane: lane // 16 * 4, 4),
            Access("read columns", lambda lane: lane % 16 * 4, 4),
        ),
    ),
    GemmRung(
        name="warp tiles",
        idea="a warp computes 64 x 32 outputs, so its lanes share more of what they read",
        predicted=40.0,
        reason="8 passes of shared memory in place of 12, if half a warp's reads merge; staging is waited for",
        file="warp_tiles.cu",
        kernel="gemm_warp_tiles",
        threads=256,
        tile=(128, 128, 8),
        constants={"PAD": 4},
        registers=128,
        blocks=2,
        expected=("FFMA", "LDG.E.128", "LDS.128"),
        accesses=(
            _transposed(2, 4, 132),
            Access("read rows", lambda lane: _across(lane) * 4, 4),
            Access("read columns", lambda lane: _down(lane) * 4, 4),
        ),
    ),
    GemmRung(
        name="async copies",
        idea="a ring of tiles filled by cp.async; 16 x 8 outputs a thread; reads one step ahead",
        predicted=54.0,
        reason="2,048 of the loop's 2,243 instructions are multiply-adds, which allows 61; nothing is waited for",
        file="async_copies.cu",
        kernel="gemm_async_copies",
        threads=128,
        tile=(128, 128, 32),
        constants={"PAD": 4, "STAGES": 3, "PARTS": 8},
        shared_bytes=3 * 2 * 32 * 132 * 4,
        registers=255,
        blocks=2,
        expected=("FFMA", "LDGSTS", "LDS.128"),
        accesses=(
            _transposed(8, 1, 132),
            Access("read rows", lambda lane: _down(lane) * 4, 4),
            Access("read columns", lambda lane: _across(lane) * 4, 4),
        ),
    ),
)
