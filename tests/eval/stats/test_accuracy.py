"""Errors against fp64 on both sides: their units, their histogram, and what of it goes into a table."""

import copy
import math

import pytest
import torch

from rooflane.baseline import build_baseline
from rooflane.eval.check.gate import ATOL, check_gate
from rooflane.eval.check.truth import (
    PLAIN,
    STRESSES,
    Truth,
    draw_stress,
    judge,
    stressed,
)
from rooflane.eval.record.records import BIN_EDGES, TruthCheck, Verification
from rooflane.eval.stats.figures import COLUMNS, accuracy_lines
from rooflane.shapes import Shape

CPU = torch.device("cpu")


def judged(mine, own, factor=2.0):
    """Judge errors standing on a zero truth of the same size."""
    true = torch.zeros(len(mine), 1, dtype=torch.float64)
    as_column = [torch.tensor(values, dtype=torch.float64)[:, None] for values in (mine, own)]
    return judge("plain", *as_column, true, factor, "all rows")


def test_errors_are_in_units_of_the_baselines_own():
    check = judged([3e-4, -4e-4, 0, 0], [1e-4, 0, 0, -1e-4])
    assert check.max_ratio == pytest.approx(4)
    # Root mean squares: 5e-4 / 2 over sqrt(2) e-4 / 2.
    assert check.gate.rms == pytest.approx(2.5e-4)
    assert check.rms_ratio == pytest.approx(5 / math.sqrt(2))
    assert check.use == pytest.approx(4e-4 / ATOL)
    assert check.headroom == pytest.approx(5)
    assert check.passed


def test_use_is_that_of_the_kinder_limit_and_agrees_with_the_verdict():
    # Ten times the tolerance, but only 1.5 times what eager strays itself: three quarters of what is allowed.
    check = judged([10 * ATOL], [10 * ATOL / 1.5])
    assert check.passed
    assert check.use == pytest.approx(0.75)
    worse = judged([10 * ATOL], [10 * ATOL / 3])
    assert not worse.passed
    assert worse.use == pytest.approx(1.5)
    assert worse.headroom == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_fails_on_either_side(bad):
    assert not judged([bad], [1.0]).passed
    assert judged([bad], [1.0]).use == math.inf
    # A baseline that is not finite excuses nobody; a candidate that is right passes beside it.
    assert not judged([1.0], [bad]).passed
    assert judged([1e-5], [bad]).passed


def test_the_same_function_as_the_baseline_has_ratio_one():
    check = judged([0.0], [0.0])
    assert (check.max_ratio, check.rms_ratio, check.use, check.headroom) == (1, 1, 0, math.inf)


def test_bins_count_every_element_once():
    uses = [0.0, 0.0005, 0.005, 0.02, 0.05, 0.2, 0.9, 1.0, 1.1, 500.0]
    out = torch.tensor(uses, dtype=torch.float64)[:, None] * ATOL
    found = check_gate(out, torch.zeros_like(out), spread=True)
    assert found.bins == (2, 1, 1, 1, 1, 2, 2)
    assert check_gate(out, torch.zeros_like(out)).bins == ()
    out[0] = math.nan
    assert check_gate(out, torch.zeros_like(out), spread=True).bins[-1] == 3
    assert len(BIN_EDGES) + 1 == len(found.bins)


def test_the_worst_tile_is_that_of_the_worst_element():
    true = torch.zeros(2, 300, 260, dtype=torch.float64)
    out = true.clone()
    out[1, 257, 140] = 1.0  # one element alone
    out[0, :128, :128] = 0.01  # a whole tile that fails by less
    found = check_gate(out, true)
    assert found.tile_of_worst == (2, 1)
    assert found.worst_tile == (0, 0)


def test_a_stress_changes_every_copy_alike_and_is_put_back_exactly():
    shape = Shape("tiny", 2, 8, 16, 2, 16, 2)
    drawn = next(stress for stress in STRESSES if stress.norms)
    one, two = build_baseline(shape, CPU, 1), build_baseline(shape, CPU, 1).double()
    before = {name: value.clone() for name, value in one.state_dict().items()}
    with stressed(one, drawn), stressed(two, drawn):
        now = one.state_dict()
        assert all(torch.equal(value, two.state_dict()[name].float()) for name, value in now.items())
        changed = {name for name, value in now.items() if not torch.equal(value, before[name])}
        assert changed == {name for name in before if "norm" in name}
        weights = torch.cat([value for name, value in now.items() if "norm" in name and name.endswith("weight")])
        assert weights.min() >= 0.5 and weights.max() < 1.5 and weights.std() > 0.2
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


def test_the_wide_range_is_a_relu_network_that_float16_cannot_hold():
    shape = Shape("tiny", 2, 16, 32, 2, 48, 2)
    wide = next(stress for stress in STRESSES if stress.wide)
    model, narrow = build_baseline(shape, CPU, 1).double(), build_baseline(shape, CPU, 1).bfloat16()
    rounded = copy.deepcopy(narrow).double()
    x, _ = draw_stress(wide, shape, CPU, 3)
    hidden = []
    model.layers[0].ffn_in.register_forward_hook(lambda module, given, out: hidden.append(out.abs().max().item()))
    with torch.no_grad(), stressed(model, wide), stressed(narrow, wide), stressed(rounded, wide):
        out = model(x.double())
        # The factor is a power of two: rounding before it and behind it give the same weights.
        assert all(torch.equal(a.double(), b) for a, b in zip(narrow.parameters(), rounded.parameters(), strict=True))
    assert hidden[0] > torch.finfo(torch.float16).max
    # gelu(c h) / c differs from relu(h) by 0.17 / c at most, and c is 131,072.
    expected = x.double()
    with torch.no_grad():
        for layer in model.layers:
            expected = expected + layer.attention(layer.norm1(expected), None, shape.causal)
            expected = expected + layer.ffn_out(torch.relu(layer.ffn_in(layer.norm2(expected))))
        torch.testing.assert_close(out, model.final_norm(expected), atol=1e-4, rtol=0)


def test_forgotten_norm_parameters_are_caught_by_drawn_norms_alone(run_stress):
    shape = Shape("tiny", 2, 16, 16, 2, 24, 1)
    model, reference = build_baseline(shape, CPU, 1), build_baseline(shape, CPU, 1)

    def forgetful(x, mask=None):
        # Normalises without weight and bias, as a kernel tested on fresh norms alone might.
        with stressed(plain := build_baseline(shape, CPU, 1), STRESSES[0]):
            return plain(x, mask)

    truth = Truth(reference, shape, CPU)
    passed = {
        stress.name: run_stress(stress, forgetful, model, reference, truth, shape, CPU, 5).passed
        for stress in STRESSES
        if not (stress.sharpen or stress.wide)
    }
    assert passed == {"plain": True, "norms drawn": False, "input x 0.1": True, "input x 3": True, "spikes": True}


def test_spikes_are_in_the_input(tiny_shape):
    spikes = next(stress for stress in STRESSES if stress.spikes)
    shape = Shape("wide", 4, 64, 16, 2, 16, 1)
    spiked, plain = draw_stress(spikes, shape, CPU, 3)[0], draw_stress(PLAIN, shape, CPU, 3)[0]
    assert int((spiked != plain).sum()) == 5  # elements 0, 1021, 2042, 3063 and 4084 of 4096


def test_lines_keep_the_worst_process_and_a_record_grows_by_less_than_a_kilobyte(make_record, tiny_shape, run_stress):
    model, reference = build_baseline(tiny_shape, CPU, 1), build_baseline(tiny_shape, CPU, 1)
    truth = Truth(reference, tiny_shape, CPU)

    def checks(size):
        return [
            run_stress(stress, lambda x, m=None: model(x, m) + size, model, reference, truth, tiny_shape, CPU, 5)
            for stress in STRESSES
        ]

    rows = [
        make_record(tiny_shape, process, "mine", verification=Verification(status="ok", truth=checks(size)))
        for process, size in ((0, 1e-4), (1, 1e-3))
    ]
    lines = accuracy_lines(rows)
    assert [line.input for line in lines] == [stress.name for stress in STRESSES]
    assert all(0.4 < line.use < 0.6 for line in lines)
    assert all(len(line.cells()) == len(COLUMNS) for line in lines)
    assert lines[0].as_dict()["tile"] == 128
    # Against the same checks without root mean squares and histograms.
    lean = [
        check.model_copy(
            update={
                "eager_rms": None,
                "eager_bins": (),
                "gate": check.gate.model_copy(update={"rms": None, "bins": ()}),
            }
        )
        for check in rows[0].verification.truth
    ]
    bytes_of = [sum(len(check.model_dump_json()) for check in some) for some in (rows[0].verification.truth, lean)]
    assert 0 < bytes_of[0] - bytes_of[1] < 1000
    stored = rows[0].verification.truth[0].model_dump_json()
    assert TruthCheck.model_validate_json(stored).model_dump_json() == stored
