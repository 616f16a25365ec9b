"""A synthetic campaign: what a GPU's clock would have shown, drawn by numpy, handed to the code that judges records."""

import importlib.util
import zlib
from pathlib import Path

import numpy as np
import pytest

from rooflane.eval.record.records import ANCHOR, COPY_PREFIX, EAGER, NOOP
from rooflane.eval.stats.evidence import assess
from rooflane.eval.stats.rounds import Rounds, find_contamination

# Whole stored rows are made as in the evaluator's own tests; fixtures of a sister folder are not found by themselves.
_SPEC = importlib.util.spec_from_file_location("stored_rows", Path(__file__).parents[1] / "eval" / "conftest.py")
_STORED = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_STORED)
make_meta, make_record, full_rows, stored_run = (
    getattr(_STORED, name) for name in ("make_meta", "make_record", "full_rows", "stored_run")
)

MINE = "mine"
ARMS = (EAGER, "identity", MINE, COPY_PREFIX + MINE, ANCHOR, NOOP)
BASE_NS = 2e6
PROCESSES, SHAPES, ROUNDS, CALLS = 8, 14, 8, 5


def draw_calls(
    rng,
    *,
    gain=0.0,
    sd=0.01,
    noise=0.02,
    processes=PROCESSES,
    shapes=SHAPES,
    rounds=ROUNDS,
    calls=CALLS,
    disturb=None,
):
    """Return nanoseconds `[process, shape, arm, round, call]` of one campaign.

    Each arm of a process is an object with its own addresses: its speed strays by sd / sqrt(2) over all shapes, so
    that a ratio of two arms strays by `sd`. `gain` is how much faster the candidate and its copy truly are. The arms
    of a block stand in random order, and in reverse in the block's second half. `disturb(when, logs)` gets each
    window's place in its process, 0 to 1, in the shape of `logs`, and may add to the logs.
    """
    arms = len(ARMS)
    shape = (processes, shapes, arms, rounds)
    # A part of the spread is common to all shapes of a process, the rest of the same size is each shape's own.
    own = rng.normal(0, sd / np.sqrt(2), (processes, 1, arms, 1)) * np.sqrt(1 - 1 / shapes)
    logs = np.broadcast_to(own, shape) + rng.normal(0, sd / np.sqrt(2), (processes, shapes, arms, 1))
    for index, arm in enumerate(ARMS):
        if arm in (MINE, COPY_PREFIX + MINE):
            logs[:, :, index] -= np.log1p(gain)
        if arm in (ANCHOR, NOOP):  # one kernel and no kernel: the machine's own, which has no addresses to stray by
            logs[:, :, index] = 0
    order = rng.permuted(np.tile(np.arange(arms), (processes, shapes, rounds // 2, 1)), axis=-1)
    position = np.stack([order, arms - 1 - order], axis=3).reshape(processes, shapes, rounds, arms)
    turn = rng.permuted(np.tile(np.arange(shapes), (processes, 1)), axis=1)
    when = (turn[:, :, None, None] * rounds + np.arange(rounds)[None, None, :, None]) * arms + position
    when = np.moveaxis(when, -1, 2) / (shapes * rounds * arms - 1)
    if disturb:
        logs = disturb(when, logs)
    scale = np.where(np.array(ARMS) == NOOP, 0.01, 1.0)[None, None, :, None, None] * BASE_NS
    return scale * np.exp(logs[..., None] + rng.normal(0, noise, (*shape, calls)))


def rounds_from(calls, telemetry=None):
    """Reduce drawn calls to medians a round, as `rounds_of` reduces records."""
    medians = np.median(calls, axis=-1)
    times = {
        (str(shape), arm): {process: medians[process, shape, index].tolist() for process in range(len(medians))}
        for index, arm in enumerate(ARMS)
        for shape in range(medians.shape[1])
    }
    return Rounds(times, telemetry or {})


def judge_calls(calls, stored=None, telemetry=None):
    """Return the assessment of a drawn campaign by the production code."""
    rounds = rounds_from(calls, telemetry)
    shapes = [str(shape) for shape in range(calls.shape[1])]
    return assess(rounds, find_contamination(rounds), shapes, MINE, range(len(calls)), stored)


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """Keep each test's stored nulls to itself."""
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def rng(request):
    """A generator for each test, the same in every session."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def draw():
    """Return the function that draws a campaign's calls."""
    return draw_calls


@pytest.fixture
def judge():
    """Return the function that judges drawn calls by the code that judges records."""
    return judge_calls
