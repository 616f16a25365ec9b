"""The interval of the geometric mean over simulated null campaigns with lost blocks: it claims and covers at its level.

The production function takes a leading dimension of campaigns, so 20,000 are judged in one call.
"""

import math

import numpy as np
import pytest
from scipy.special import stdtrit

from rooflane.eval.stats.estimator import combine
from rooflane.eval.stats.mean import CONFIDENCE, mean_of, mean_over_shapes, shape_means
from rooflane.eval.stats.verdict import STRICT

CAMPAIGNS = 20_000
PROCESS_SD = 0.01


def draw(rng, processes, shapes, *, process_sd=PROCESS_SD, shape_sd=0.02, tails=None, campaigns=CAMPAIGNS):
    """Return null log-ratios `[campaign, process, shape]`: an effect of the process, and one of each shape in it.

    `tails` are the degrees of freedom of Student's t in place of the normal distribution, at the same sd.
    """

    def noise(*size):
        if tails is None:
            return rng.normal(size=size)
        return rng.standard_t(tails, size) / math.sqrt(tails / (tails - 2))

    common, own = noise(campaigns, processes, 1), noise(campaigns, processes, shapes)
    return process_sd * common + np.asarray(shape_sd) * own


def lose_at_random(rng, cells, share):
    """Lose a share of the cells."""
    return np.where(rng.random(cells.shape) < share, np.nan, cells)


def lose_in_bursts(rng, cells):
    """Lose three shapes in half of the processes, one after another, and half of the shapes in one process."""
    cells = cells.copy()
    campaigns, processes, shapes = cells.shape
    every, run = np.arange(campaigns), processes // 2
    for _ in range(3):
        shape, start = rng.integers(0, shapes, campaigns), rng.integers(0, processes - run + 1, campaigns)
        for step in range(run):
            cells[every, start + step, shape] = np.nan
    half = rng.permuted(np.tile(np.arange(shapes) < shapes // 2, (campaigns, 1)), axis=1)
    at = rng.integers(0, processes, campaigns)
    cells[every, at] = np.where(half, np.nan, cells[every, at])
    return cells


LOSSES = {
    "nothing": lambda rng, cells: cells,
    "a tenth": lambda rng, cells: lose_at_random(rng, cells, 0.1),
    "three tenths": lambda rng, cells: lose_at_random(rng, cells, 0.3),
    "bursts": lose_in_bursts,
}
SETTINGS = {
    "1%": {"shape_sd": 0.01},
    "3%": {"shape_sd": 0.03},
    "process effects alone": {"process_sd": 0.03, "shape_sd": 0.001},
    "heavy tails": {"tails": 3},
    # The noisiest shape has ten times the sd of the quietest; or it decides the whole error.
    "tenfold, graded": {"shape_sd": "graded"},
    "tenfold, one shape": {"process_sd": 0.003, "shape_sd": "one"},
}


def beyond(log, error, freedom, confidence):
    """Return the share of campaigns whose interval at a level excludes the true ratio of 1."""
    return float(np.mean(np.abs(log) > stdtrit(freedom, 0.5 + confidence / 2) * error))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("processes", "shapes"), [(8, 14), (6, 13)])
def test_false_verdicts_stay_at_their_level_and_intervals_cover(processes, shapes, loss):
    rng = np.random.default_rng([processes, len(loss)])
    for name, setting in SETTINGS.items():
        sds = {"graded": np.geomspace(0.003, 0.03, shapes), "one": np.r_[0.03, np.full(shapes - 1, 0.003)]}
        chosen = setting | {"shape_sd": sds.get(setting.get("shape_sd"), setting.get("shape_sd", 0.02))}
        cells = LOSSES[loss](rng, draw(rng, processes, shapes, **chosen))
        found = shape_means(cells)
        # Campaigns with a shape in fewer than two processes claim nothing: few, and never the rule.
        answered = ~np.isnan(found[1])
        assert answered.mean() > 0.85, name
        log, error, freedom = (part[answered] for part in found)
        # FASTER and SLOWER without a floor, which only makes them rarer. The coverage is the rest.
        false = beyond(log, error, freedom, CONFIDENCE)
        assert false <= 0.055, (name, false)
        assert 0.93 <= 1 - false <= 0.97, (name, false)
        # The strict level of a quick run, under which 1 in 1,000 is right.
        assert beyond(log, error, freedom, STRICT) <= 0.002, name


@pytest.mark.slow
def test_three_processes_claim_at_their_level_too():
    rng = np.random.default_rng(3)
    for setting in ({"shape_sd": 0.01}, {"shape_sd": 0.03}, {"tails": 3}):
        for loss in ("nothing", "a tenth"):
            log, error, freedom = shape_means(LOSSES[loss](rng, draw(rng, 3, 13, **setting)))
            answered = ~np.isnan(error)
            found = log[answered], error[answered], freedom[answered]
            assert 0.03 <= beyond(*found, CONFIDENCE) <= 0.055
            assert beyond(*found, STRICT) <= 0.002
            # The rule of a factor of 2: the interval at 95% clears 1 by log 2.
            assert not np.any(np.abs(found[0]) > stdtrit(found[2], 0.975) * found[1] + math.log(2))


def test_one_campaign_reads_as_many_do():
    rng = np.random.default_rng(5)
    cells = lose_at_random(rng, draw(rng, 8, 14, campaigns=50), 0.2)
    batch = shape_means(cells)
    for index, campaign in enumerate(cells):
        logs = {
            str(shape): {process: value for process, value in enumerate(column) if not math.isnan(value)}
            for shape, column in enumerate(campaign.T.tolist())
        }
        lost = {
            process: tuple(str(shape) for shape in np.flatnonzero(np.isnan(row)))
            for process, row in enumerate(campaign)
            if np.isnan(row).any()
        }
        mean = combine(logs, range(8), lost).mean
        assert (mean.log, mean.error, mean.freedom) == pytest.approx(tuple(part[index] for part in batch))


@pytest.mark.parametrize(("processes", "shapes"), [(8, 14), (6, 1), (3, 5)])
def test_without_a_lost_cell_it_is_students_t_over_the_processes(processes, shapes):
    (cells,) = draw(np.random.default_rng(7), processes, shapes, campaigns=1)
    logs = {str(shape): dict(enumerate(column)) for shape, column in enumerate(cells.T.tolist())}
    mean, wanted = mean_over_shapes(logs), mean_of(cells.mean(axis=1).tolist())
    assert (mean.log, mean.error, mean.freedom, mean.count) == pytest.approx(
        (wanted.log, wanted.error, processes - 1, processes)
    )


def test_a_lost_cell_costs_precision_and_not_the_shape():
    rng = np.random.default_rng(9)
    cells = draw(rng, 8, 4, campaigns=4000)
    whole, lost = shape_means(cells), shape_means(lose_at_random(rng, cells, 0.2))
    kept = ~np.isnan(lost[1])
    assert 1.05 < np.mean(lost[1][kept] ** 2) / np.mean(whole[1] ** 2) < 1.35
    assert np.all(lost[2][kept] <= 7) and 4 < np.mean(lost[2][kept]) < 7


def test_a_shape_of_one_clean_process_gives_no_error():
    mean = mean_over_shapes({"a": {0: 0.1, 1: 0.2}, "b": {0: 0.3}})
    assert (mean.log, mean.error, mean.p) == (pytest.approx(0.225), None, None)
    assert mean.interval().low is None
    both = mean_over_shapes({"a": {0: 0.1, 1: 0.2}, "b": {1: 0.3, 2: 0.5}})
    assert both.error > 0 and 1 <= both.freedom <= 2
