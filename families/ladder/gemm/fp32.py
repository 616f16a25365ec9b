"""The rungs in fp32: operands, products and sums."""

from __future__ import annotations

from rooflane.families.ladder.rungs import GemmRung

FP32 = (
    GemmRung(
        name="naive",
        idea="a thread an output; neighbouring threads take neighbouring rows",
        predicted=0.6,
        reason="a warp's load of A touches 32 cache lines, so an SM makes one warp's step in about 33 cycles",
        file="naive.cu",
        kernel="gemm_naive",
        threads=256,
        tile=(256, 1, 1),
        registers=64,
        blocks=4,
        expected=("FFMA",),
    ),
)
