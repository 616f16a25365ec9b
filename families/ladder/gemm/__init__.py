"""The rungs of the matrix product, from the slowest on."""

from rooflane.families.ladder.gemm.fp32 import FP32
from rooflane.families.ladder.gemm.tensor import TENSOR

RUNGS = (*FP32, *TENSOR)
