"""Problem files as a campaign: the shipped ones from end to end, their regimes, and requests that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooflane.dispatch import load_profile
from rooflane.eval import EvaluationError, ExitCode, evaluate, render_markdown, resume
from rooflane.eval.campaign.requests import PROBLEM_CONTROLS, measured_profile, requests_of
from rooflane.eval.report.page.html import render_page
from rooflane.eval.report.page.source import read_page
from rooflane.eval.stats.comparison import compare
from rooflane.shapes import Problem, Shape, load_problems
from rooflane.shapes.problem import SHIPPED

EMBEDDING = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, index, scale):
        return {"rows": self.table(index) * scale, "largest": index.max()}

def get_inputs():
    return [torch.randint(0, 50, (4, 16)), 2.0]

def get_init_inputs():
    return [50, 8]
"""
GATHER = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, index, scale):
        return {"largest": index.amax(), "rows": (self.table.weight * scale)[index]}
"""
WRONG = """
import torch

def build(model):
    def worse(part):
        return part * 1.1 if part.is_floating_point() else part
    return lambda *inputs: torch.utils._pytree.tree_map(worse, model(*inputs))
"""
LEAST = {"profile": "cpu", "controls": ("identity",), "budget_s": 0.02, "rounds": 2, "repeats": 2, "warmups": 1}


@pytest.fixture
def problems(tmp_path: Path) -> SimpleNamespace:
    """The shipped problems and an embedding in one folder, a right candidate for each, and a wrong one for all."""
    shutil.copytree(SHIPPED, tmp_path / "problems", ignore=shutil.ignore_patterns("_*", "candidates"))
    shutil.copytree(SHIPPED / "candidates", tmp_path / "right", ignore=shutil.ignore_patterns("_*"))
    (tmp_path / "problems" / "embedding.py").write_text(EMBEDDING)
    (tmp_path / "right" / "embedding.py").write_text(GATHER)
    (tmp_path / "wrong.py").write_text(WRONG)
    return SimpleNamespace(
        folder=tmp_path / "problems", right=str(tmp_path / "right"), wrong=str(tmp_path / "wrong.py")
    )


@pytest.mark.slow
def test_a_folder_of_problems_from_end_to_end(tmp_path: Path, problems: SimpleNamespace, quiet_host, monkeypatch):
    # Tiny operations on one thread: handing them to a second costs more than they do.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = load_problems(problems.folder)
    assert [one.id for one in found] == ["embedding", "mlp", "softmax", "transformer_block"]
    run = evaluate(
        found,
        [problems.right, problems.wrong],
        device="cpu",
        processes=1,
        trials=2,
        runs_dir=tmp_path / "runs",
        **LEAST,
    )
    summary = run.summary()
    for row in summary.rows:
        right, wrong = row.cells[problems.right], row.cells[problems.wrong]
        assert (right.status, right.reason, right.contract_class) == ("ok", "", "pure"), row.shape.id
        assert not right.integrity and not right.findings and right.speedup and right.event_ms
        assert wrong.status == "incorrect" and "fail the gate" in wrong.reason
        # No tokens, no price; the regime is said to be measured.
        assert right.tokens_per_s is None and right.price is None and row.profiled
        assert row.regime in ("bandwidth", "compute") and row.measured_regime is None
    assert summary.exit_code() == ExitCode.INCORRECT
    notes = {row.shape.id: row.cells[problems.right].notes for row in summary.rows}
    assert "weights matched by state_dict" in notes["mlp"] + notes["embedding"]
    assert "the problem has no weights" in notes["softmax"]
    # Everything is read back from disk, and every report is made of it.
    again = resume(run.folder)
    assert again.meta.shape_list() == [row.shape for row in summary.rows]
    assert again.meta.shape_list()[0].outputs == ("int64[]", "float32[4,16,8]")
    text = render_markdown(again.summary())
    assert "Regimes of problems: measured, not predicted" in text and "(measured)" in text
    assert "transformer_block" in render_page(read_page(again), tmp_path)
    assert again.folder.joinpath("digest.json").exists()
    assert len(compare(f"{run.folder}::{problems.right}", f"{run.folder}::identity").pairs) == 4


@pytest.mark.gpu
@pytest.mark.slow
def test_problems_on_a_gpu(tmp_path: Path, problems: SimpleNamespace):
    """Eager, the controls, a right candidate, the half-precision self and optimize() on the shipped problems."""
    names = [problems.right, problems.wrong, "half", "optimize"]
    settings = LEAST | {"profile": "auto", "controls": None, "budget_s": 0.1}
    run = evaluate(load_problems(problems.folder), names, device="cuda", processes=1, runs_dir=tmp_path, **settings)
    for row in run.summary().rows:
        right = row.cells[problems.right]
        assert (right.status, right.reason, right.contract_class) == ("ok", "", "pure"), row.shape.id
        assert row.cells[problems.wrong].status == "incorrect"
        assert row.cells["optimize"].status == "unsupported" and not row.cells["half"].integrity
        assert row.measured_regime in ("launch", "bandwidth", "compute") and right.device_ms
        assert all(row.cells[name].event_ms for name in PROBLEM_CONTROLS)


@pytest.mark.parametrize(
    ("call_ns", "device_ns", "flops", "moved", "regime"),
    [
        (100_000, 20_000, 10**6, 10**5, "launch"),  # five times the device's time
        (100_000, 99_000, 10**9, 10**3, "compute"),
        (100_000, 99_000, 10**3, 10**8, "bandwidth"),
        (100_000, None, 10**9, 10**3, "compute"),  # no clock of the device's own: never called launch
    ],
)
def test_a_regime_is_the_measured_profile_s(call_ns, device_ns, flops, moved, regime):
    problem = Problem("a", "a.py", "", inputs=("float32[2]",), outputs=("float32[2]",), flops=flops, bytes=moved)
    described = SimpleNamespace(problem=problem, call_ns=call_ns, device_ns=device_ns, peak_bytes=moved)
    found = measured_profile(described, load_profile("cpu"))
    assert (found["regime"], found["basis"], found["predicted_s"]) == (regime, "measured", 1e-4)


def test_shapes_and_problems_do_not_share_a_run():
    with pytest.raises(EvaluationError, match="shapes or problems, not both"):
        requests_of([Shape("a", 2, 8, 16, 2, 16, 1), Problem("a", "a.py", "")])


@pytest.mark.slow
def test_a_problem_that_cannot_be_evaluated_is_refused_before_anything_runs(tmp_path: Path):
    path = tmp_path / "ones.py"
    path.write_text(EMBEDDING.replace("torch.randint(0, 50, (4, 16))", "torch.ones(2, dtype=torch.long)"))
    with pytest.raises(EvaluationError, match=r"ones\.py: get_inputs\(\) returns the same values for every seed"):
        evaluate(load_problems(path), ["half"], device="cpu", runs_dir=tmp_path / "runs", **LEAST)
    with pytest.raises(EvaluationError, match="no control is called 'sdpa' here"):
        evaluate(load_problems(path), ["half"], device="cpu", **LEAST | {"controls": ("sdpa",)})
    assert not (tmp_path / "runs").exists()
