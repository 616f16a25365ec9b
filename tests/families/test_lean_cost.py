"""Closed forms of the lean forward's work and memory."""

from __future__ import annotations

import torch

from rooflane.baseline import build_baseline
from rooflane.families import get_family
from rooflane.families.chunked import LEAST_ROWS, chunk_plan
from rooflane.families.lean.cost import lean_ops, weight_elements
from rooflane.shapes import Shape

SHAPE = Shape("a", 4, 32, 16, 2, 24, 3)


def test_weight_elements_equal_the_models():
    model = build_baseline(SHAPE, "cpu", seed=0)
    assert weight_elements(SHAPE) == sum(parameter.numel() for parameter in model.parameters())


def test_a_layer_is_eight_ops_and_its_gemms_cost_two_flops_a_weight_and_token():
    ops = lean_ops(SHAPE)
    assert len(ops) == 8 * 3 + 1
    gemm = sum(op.flops for op in ops if op.name in {"qkv", "out", "ffn_in", "ffn_out"})
    assert gemm == 3 * 2 * SHAPE.tokens * (4 * 16 * 16 + 2 * 16 * 24)
    attention = sum(op.flops for op in ops if op.name == "attention")
    assert attention == 3 * 4 * (4 * 2 * 32 * 33 / 2) * 8, "a causal row i reads i + 1 keys"
    full = lean_ops(Shape("b", 4, 32, 16, 2, 24, 3, causal=False))
    assert sum(op.specials for op in full) == 3 * 4 * 2 * 32 * 32


def test_chunk_plan_respects_budget_until_rows_run_out():
    published = Shape("14", 32, 100_000, 1024, 16, 1024, 2)
    sequences, rows, scratch = chunk_plan(published, 2 * 2**30, 2)
    # A sequence keeps 4 x 1024 half-precision values a token, 0.82 GB: two fit 2.1 GB with rows to spare.
    assert sequences == 2 and LEAST_ROWS < rows <= 200_000 and scratch <= 2 * 2**30
    sequences, rows, _ = chunk_plan(published, 1.0, 2)
    assert (sequences, rows) == (1, LEAST_ROWS)
    sequences, rows, scratch = chunk_plan(published, 64 * 2**30, 2)
    assert sequences > 1 and rows == sequences * 100_000 and scratch <= 64 * 2**30


def test_chunked_peak_is_weights_ends_and_scratch():
    spec = get_family("chunked")

    class Cuda:
        kind = "cuda"

    published = Shape("14", 32, 100_000, 1024, 16, 1024, 2)
    ends = 2 * published.tokens * 1024 * 4
    peak = spec.peak_bytes(published, Cuda(), budget_gib=2.0)
    assert ends < peak <= ends + 2 * 2**30 + 6 * weight_elements(published)


def test_specs_load_no_torch_objects():
    for name in ("graph_compile", "gemm_fp16", "sdpa_flash", "chunked"):
        spec = get_family(name)
        assert spec.name == name and spec.summary and spec.contract == ""
        assert not any(isinstance(value, torch.Tensor) for value in vars(spec).values())
