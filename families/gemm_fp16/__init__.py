"""Compute-bound shapes: half-precision GEMMs."""

from rooflane.families.gemm_fp16.spec import SPEC

__all__ = ["SPEC"]
