"""What every test shares: GPU tests skip where there is no GPU, and the repository's root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rooflane.eval.check.truth import STRESS_FACTOR, draw_stress, judge, stressed
from rooflane.eval.record.records import TruthCheck

# Triton reads this when a kernel is defined: with no GPU, kernels are interpreted on CPU tensors.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The tensors here are tiny: a second thread costs more than it brings, and more still beside other work.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Locks and stored nulls of a test session are its own, in its workers' processes too.
_STATE = tempfile.TemporaryDirectory(prefix="rooflane-state-")
os.environ["ROOFLANE_STATE_DIR"] = _STATE.name

ROOT = Path(__file__).parents[1]


# Minutes each: begun first, so that one of two workers is not left with them at the end.
LONG_FILES = {"test_readme.py", "test_corpus.py", "test_cli_eval.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_stress() -> Callable[..., TruthCheck]:
    """Return a function that runs one stress input through a candidate, eager and truth, and judges it."""
    return _run_stress


def _run_stress(stress, forward, weights, reference, truth, shape, device, seed) -> TruthCheck:
    x, mask = draw_stress(stress, shape, device, seed)
    with ExitStack() as changed:
        for model in (weights, reference, truth.model):
            changed.enter_context(stressed(model, stress))
        with torch.inference_mode():
            out, eager = forward(x, mask)[truth.rows], reference(x, mask)[truth.rows]
            true = truth(x, mask)
    return judge(stress.name, out, eager, true, STRESS_FACTOR, truth.label)
