"""The classifier: the regimes the published shapes must have, and the definition's own consequences."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflane.dispatch import BORDERLINE_MARGIN, REGIMES, classify, ledger, load_profile, op_time, profile_names
from rooflane.shapes import Shape

SHAPES = st.builds(
    lambda batch, seq, head, heads, ffn, layers, causal, dtype: Shape(
        "any", batch, seq, head * heads, heads, ffn, layers, causal, dtype
    ),
    batch=st.integers(1, 4096),
    seq=st.integers(1, 4096),
    head=st.sampled_from([1, 8, 32, 128]),
    heads=st.integers(1, 16),
    ffn=st.integers(1, 8192),
    layers=st.integers(1, 8),
    causal=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
PROFILES = st.sampled_from(profile_names()).map(load_profile)


@pytest.mark.parametrize("id", ["1", "2", "3", "4", "7", "9", "10", "12"])
def test_small_shapes_are_launch_bound_on_an_rtx_5090(published, id):
    found = classify(published[id], load_profile("rtx5090"))
    assert (found.regime, found.borderline) == ("launch", False)


@pytest.mark.parametrize("id", ["6", "13"])
@pytest.mark.parametrize("profile", sorted(set(profile_names()) - {"cpu"}))
def test_large_attention_is_bandwidth_bound_on_every_gpu(published, id, profile):
    found = classify(published[id], load_profile(profile))
    if found.regime != "infeasible":
        assert (found.regime, found.borderline) == ("bandwidth", False)


@pytest.mark.parametrize(("id", "regime"), [("5", "launch"), ("11", "launch"), ("8", "compute")])
def test_edge_shapes_are_as_expected_or_said_to_be_borderline(published, id, regime):
    found = classify(published[id], load_profile("rtx5090"))
    assert found.regime == regime or found.borderline


@pytest.mark.parametrize("profile", profile_names())
def test_the_largest_shape_fits_nowhere(published, profile):
    assert classify(published["14"], load_profile(profile)).regime == "infeasible"


def test_evidence_by_hand(published, h200):
    found = classify(published["2"], h200)
    assert found.launch_s == pytest.approx(132 * 13.6e-6)
    assert found.predicted_s == found.launch_s
    assert found.breakeven_dispatch_s == found.device_s / 132
    assert found.margin == found.launch_s / found.device_s
    assert found.peak_bytes < found.memory_bytes == h200.memory_bytes


def test_a_cpu_pays_dispatch_and_work_one_after_the_other(published):
    found = classify(published["2"], load_profile("cpu"))
    assert found.predicted_s == found.launch_s + found.device_s


def test_infeasible_starts_one_byte_above_the_memory(published, h200):
    peak = classify(published["1"], h200).peak_bytes
    for memory, infeasible in [(peak, False), (peak - 1, True)]:
        capped = h200.with_figure("memory", memory / 1e9, "assumed", "a cap")
        assert (classify(published["1"], capped).regime == "infeasible") is infeasible


def test_op_time_takes_the_largest_of_its_limits(published, h200):
    ops = {op.name: op for op in ledger(published["8"]).ops if op.layer == 0}
    seconds, limit = op_time(ops["q_proj"], "float32", h200)
    assert (seconds, limit) == (2 * 8192 * 1024**2 / 360e12, "compute")
    seconds, limit = op_time(ops["attention_residual"], "float32", h200)
    assert (seconds, limit) == (3 * 8192 * 1024 * 4 / 4.25e12, "bandwidth")
    slow = h200.with_figure("special", 1e-3, "assumed", "a device with hardly any exp")
    seconds, limit = op_time(ops["gelu"], "float32", slow)
    assert (seconds, limit) == (pytest.approx(8192 * 1024 / 1e6), "compute")


def test_attention_share_counts_what_one_fused_op_replaces(published, h200):
    book = ledger(published["13"])
    fused = {"scores", "scale", "causal_ones", "causal_triu", "causal_fill.copy", "causal_fill.fill"}
    fused |= {"key_invert", "key_fill.copy", "key_fill.fill", "softmax", "context"}
    assert {op.name for op in book.ops if op.part == "attention"} == fused
    held = sum(op_time(op, "float32", h200)[0] for op in book.ops if op.name in fused)
    found = classify(published["13"], h200)
    assert found.attention_share == pytest.approx(held / found.device_s)


@given(shape=SHAPES, profile=PROFILES)
def test_the_definition_holds_everywhere(shape, profile):
    found = classify(shape, profile)
    assert found.regime in REGIMES
    assert found.margin >= 1
    assert found.borderline == (found.margin < BORDERLINE_MARGIN)
    assert found.device_s == pytest.approx(found.compute_s + found.bandwidth_s)
    assert 0 <= found.compute_share <= 1
    assert 0 <= found.attention_share <= 1
    assert (found.regime == "infeasible") == (found.peak_bytes > profile.memory_bytes)
    if found.regime != "infeasible":
        assert (found.regime == "launch") == (found.launch_s > found.device_s)


@given(shape=SHAPES, profile=PROFILES, factor=st.floats(1, 1e3))
def test_a_slower_host_never_leaves_the_launch_regime(shape, profile, factor):
    slower = profile.with_figure("eager_dispatch", profile.eager_dispatch.value * factor, "assumed", "a slower host")
    before, after = classify(shape, profile), classify(shape, slower)
    assert after.launch_s >= before.launch_s
    assert after.predicted_s >= before.predicted_s
    if before.regime == "launch":
        assert after.regime == "launch"


@given(shape=SHAPES, profile=PROFILES)
def test_margin_is_the_change_that_flips_the_launch_verdict(shape, profile):
    found = classify(shape, profile)
    if found.regime != "launch":
        return
    for change, regime_stays in [(found.margin * 0.99, True), (found.margin * 1.01, False)]:
        faster = profile.with_figure("eager_dispatch", profile.eager_dispatch.value / change, "assumed", "faster")
        assert (classify(shape, faster).regime == "launch") is regime_stays


def test_explanation_and_json_carry_the_evidence(published, h200):
    found = classify(published["8"], h200)
    text = found.explain()
    assert "shape 8" in text and "(borderline)" in text and "132 operations" in text and "us an operation" in text
    assert "369 MB at the peak, of 141 GB" in text
    assert "41.1 TB at the peak" in classify(published["14"], h200).explain()
    values = json.loads(json.dumps(found.as_dict()))
    assert values["regime"] == found.regime
    assert values["shape"]["d_model"] == 1024
    assert values["borderline"] is True
    assert values["breakeven_dispatch_s"] == found.breakeven_dispatch_s


def test_half_precision_is_judged_at_its_own_rate(published, h200):
    single = classify(published["8"], h200)
    half = classify(replace(published["8"], dtype="float16"), h200)
    assert half.flops == single.flops
    assert half.compute_s < single.compute_s
