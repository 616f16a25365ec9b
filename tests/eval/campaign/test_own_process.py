"""What a candidate changes in its own process stays there: eager and the judge live in another."""

import os
from types import SimpleNamespace

import pytest

from rooflane.dispatch import load_profile, load_rules
from rooflane.eval.campaign.team import Doing, Team
from rooflane.eval.record.records import REFERENCE, ArmId
from rooflane.eval.worker import protocol
from rooflane.eval.worker.outside import standing
from rooflane.shapes import Shape

PROGRAM = """
import torch
def build(model, shape, device):
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_math_sdp(False)
    return lambda x, mask=None: model(x, mask)
"""
CHANGED = {
    "the float32 matmul precision": "high to highest",
    "deterministic algorithms": "False to True",
    "the number of threads": "",
    "math attention": "True to False",
}


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """What the two workers of a team say of themselves, the candidate's having changed every kind of flag."""
    file = tmp_path_factory.mktemp("flags") / "flags.py"
    file.write_text(PROGRAM)
    path = str(file)
    arm = ArmId(path, "candidate", path)
    rules = load_rules().text()
    hello = protocol.Hello("cpu", load_profile("cpu").model_dump(mode="json"), rules, False, standing())
    team, doing = Team([path], hello, 60.0), Doing("check", arm)
    try:
        team.start()
        for worker in (REFERENCE, path):
            team.ask(worker, protocol.BeginShape(Shape("tiny", 3, 16, 16, 2, 16, 1), 1, None), doing)
        team.ask(REFERENCE, protocol.HoldReference(True), doing)
        assert team.ask(path, protocol.Build(arm), doing).status == "ok"
        yield SimpleNamespace(
            candidate=team.ask(path, protocol.Inspect(), doing),
            reference=team.ask(REFERENCE, protocol.Inspect(), doing),
            pids=[team.pid(worker) for worker in (REFERENCE, path)],
        )
    finally:
        team.close()


def test_eager_and_the_judge_live_in_another_process(inspected):
    assert len({*inspected.pids, os.getpid()}) == 3


@pytest.mark.parametrize("name", CHANGED)
def test_a_flag_is_noted_where_it_changed_and_nowhere_else(inspected, name):
    assert any("the default dtype is torch.float64" in line for line in inspected.candidate.notes)
    (line,) = [line for line in inspected.candidate.notes if f"process {name} went" in line]
    assert line.endswith(CHANGED[name])
    assert inspected.candidate.findings == []
    assert inspected.reference.notes == inspected.reference.findings == []
