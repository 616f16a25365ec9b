"""What every test shares: GPU tests skip where there is no GPU, and the repository's root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rooflane.eval.check.truth import STRESS_FACTOR, draw_stress, judge, stressed
from rooflane.eval.record.records import TruthCheck
from rooflane.eval.stats.run import Run, open_run
from rooflane.shapes import Shape

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
LONG_FILES = {"test_readme.py", "test_corpus.py", "test_cli_eval.py", "test_sandbox_cuda.py"}


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
def evaluate_at_once(tmp_path_factory) -> Callable[[Shape, list[list[str]], int], list[Run]]:
    """Return a function that evaluates groups of candidates on the GPU, each group in a campaign at the same time.

    A campaign has a state folder of its own: a lock there lets one run alone on a device.
    """

    def evaluate(shape: Shape, groups: list[list[str]], processes: int) -> list[Run]:
        folder = tmp_path_factory.mktemp("at_once")
        row = shape.as_dict()
        (folder / "shapes.csv").write_text("\n".join(",".join(map(str, line)) for line in (row, row.values())) + "\n")

        def one(number: int) -> Run:
            place = folder / str(number)
            place.mkdir()
            command = [sys.executable, "-c", "from rooflane.eval.cli import main; main()", "eval", "../shapes.csv"]
            command += ["--device", "cuda", "--processes", str(processes), "--control", "identity", "--budget", "0.1"]
            command += [word for path in groups[number] for word in ("--candidate", path)]
            own = {"ROOFLANE_STATE_DIR": str(place / "state"), "TMPDIR": str(place)}
            done = subprocess.run(command, cwd=place, env=os.environ | own, capture_output=True, text=True)
            folders = list((place / "runs").glob("*/"))
            assert len(folders) == 1, done.stdout + done.stderr
            return open_run(folders[0])

        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(one, range(len(groups))))

    return evaluate


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
