"""The rungs of the matrix product, from the slowest on."""

from rooflane.families.ladder.gemm.fp32 import FP32

RUNGS = (*FP32,)
