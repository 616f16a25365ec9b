"""Problems from text, and a candidate for one verified with both sides in the test's process."""

from __future__ import annotations

import itertools
import textwrap
from types import SimpleNamespace

import pytest
import torch

from rooflane.dispatch import load_profile
from rooflane.eval.campaign.launch import Buffer
from rooflane.eval.campaign.session import ArmJudge, ArmWorker
from rooflane.eval.campaign.team import unwrap
from rooflane.eval.check.outputs import SharedBytes
from rooflane.eval.check.verify import verify
from rooflane.eval.record.records import ArmId
from rooflane.eval.worker.clock import CpuClock
from rooflane.eval.worker.judge import Judge
from rooflane.eval.worker.problem_description import describe_problem
from rooflane.eval.worker.protocol import Build
from rooflane.eval.worker.subject import Subject, answer_to
from rooflane.eval.worker.workload import workload_of
from rooflane.shapes import load_problems

CPU = torch.device("cpu")
HEAD = "import torch\nfrom torch import nn\n"


@pytest.fixture
def problem_of(tmp_path):
    """Return a function that writes a problem file and reads it; what is not given is the least there can be."""
    numbers = itertools.count()

    def make(
        model="def forward(self, x):\n    return x.exp()",
        inputs="[torch.randn(4, 6)]",
        init="[]",
        more="",
        base="nn.Module",
    ):
        text = f"{HEAD}{textwrap.dedent(more)}\nclass Model({base}):\n{textwrap.indent(model, '    ')}\n"
        text += f"def get_inputs():\n    return {inputs}\ndef get_init_inputs():\n    return {init}\n"
        path = tmp_path / f"problem{next(numbers)}.py"
        path.write_text(text)
        return load_problems(path)[0]

    return make


@pytest.fixture
def describe_here():
    """Return a function that runs a problem once in this process."""
    return lambda problem: describe_problem(problem, CPU, CpuClock())


@pytest.fixture
def verify_problem(tmp_path, describe_here):
    """Return a function that builds a candidate's file on a problem and verifies it; also what the build answered."""

    def run(problem, candidate):
        name = candidate
        if "\n" in candidate:
            path = tmp_path / f"{problem.id}_candidate.py"
            path.write_text(HEAD + textwrap.dedent(candidate))
            name = str(path)
        problem = describe_here(problem).problem
        reference = workload_of(problem, CPU).model(7)
        buffer = Buffer()
        try:
            shared = SharedBytes(buffer.descriptor)
            subject = Subject(problem, CPU, load_profile("cpu"), None, reference, shared)
            mine = ArmId(name, "candidate", name)
            built = subject.build(Build(mine))
            if built.status != "ok":
                return built, None
            handlers = subject.handlers() | Judge(reference, problem, CPU, [SharedBytes(buffer.descriptor)]).handlers()

            def ask(worker, request, what, arm):
                return unwrap(answer_to(handlers[type(request)], request))

            session = SimpleNamespace(ask=ask, team=SimpleNamespace(buffer=lambda worker: 0))
            return built, verify(ArmWorker(session, mine), ArmJudge(session, mine), problem, seed=11, trials=2)
        finally:
            buffer.close()

    return run
