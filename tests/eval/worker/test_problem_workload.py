"""Candidates for problems, built and verified as a worker and the judge do it."""

from __future__ import annotations

import sys

import pytest
import torch

from rooflane.eval.check.cases import Case
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.worker.problem_candidates import parse_problem_candidate, plan_problem_candidate
from rooflane.eval.worker.workload import workload_of

CPU = torch.device("cpu")
LINEAR = {
    "model": "def __init__(self, width):\n    super().__init__()\n    self.linear = nn.Linear(width, width)\n"
    "def forward(self, x):\n    return self.linear(x).relu()",
    "inputs": "[torch.randn(5, 8)]",
    "init": "[8]",
}
# Two floating-point tensors and one of indices, nested.
NESTED = {
    "model": "def forward(self, x, k):\n    values, indices = x.topk(k)\n"
    "    return {'top': (values, indices), 'sum': x.sum(-1)}",
    "inputs": "[torch.randn(5, 8), 3]",
}

SAME_NAMES = """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return torch.relu(nn.functional.linear(x, self.linear.weight, self.linear.bias))
"""
BUILD = """
def build(model{more}):
    def forward(*inputs):
        {body}
    return forward
"""


def built_as(body, more=""):
    return BUILD.format(body=body, more=more)


@pytest.mark.parametrize(
    ("parts", "candidate", "note"),
    [
        (LINEAR, SAME_NAMES, "weights matched by state_dict"),
        (LINEAR, SAME_NAMES.replace("self.linear", "self.only"), "under one seed"),
        (LINEAR, built_as("return model(*inputs)"), ""),
        (LINEAR, built_as("return model(*inputs)", ", inputs"), ""),
        (LINEAR, "half", ""),
        (NESTED, built_as("return model(*inputs)"), ""),
        (NESTED, "class ModelNew(nn.Module):\n    def forward(self, x, k):\n        v, i = x.topk(k)\n"
                 "        return {'sum': x.sum(-1), 'top': [v, i]}\n", "no weights"),
    ],
)  # fmt: skip
def test_a_right_candidate_is_pure_and_the_report_says_how_its_weights_matched(
    problem_of, verify_problem, parts, candidate, note
):
    built, found = verify_problem(problem_of(**parts), candidate)
    assert built.status == "ok" and note in built.note and bool(note) == bool(built.note)
    assert (found.status, found.reason, found.contract, found.missed) == ("ok", "", [], [])
    assert found.contract_class == "pure" and [check.name for check in found.truth] == ["plain"]


@pytest.mark.parametrize(
    ("parts", "body", "said"),
    [
        (LINEAR, "return model(*inputs) + 0.1", "elements fail the gate"),
        (LINEAR, "return model(*inputs).double()", "the output has dtype torch.float64"),
        (LINEAR, "return [model(*inputs)]", "the output is [*], the reference's is *"),
        (LINEAR, "return inputs[0].copy_(model(*inputs))", "the output lies in the memory of input 1"),
        (LINEAR, "out = model(*inputs); inputs[0].zero_(); return out", "the call changed an input"),
        (NESTED, "out = model(*inputs); return {'top': out['top'], 'sum': out['sum'] + 1}", "elements fail the gate"),
        (NESTED, "out = model(*inputs); v, i = out['top']; return {'top': (v, i + 1), 'sum': out['sum']}",
         "elements fail the gate"),
        (NESTED, "out = model(*inputs); return {'top': out['top']}", "the output is {'top': [*, *]}"),
        (NESTED, "out = model(*inputs); v, i = out['top']; return {'top': (v, i.int()), 'sum': out['sum']}",
         "tensor 3 of the output has dtype torch.int32"),
    ],
)  # fmt: skip
def test_a_wrong_output_is_found(problem_of, verify_problem, parts, body, said):
    _, found = verify_problem(problem_of(**parts), built_as(body))
    assert found.status == "incorrect" and said in found.reason


STATIC_OUTPUT = """
def build(model):
    held = torch.empty(5, 8)
    return lambda x: held.copy_(model(x))
"""
CACHE_BY_ADDRESS = """
def build(model):
    seen = {}
    def forward(x):
        if x.data_ptr() not in seen:
            seen[x.data_ptr()] = x, model(x)  # the input is held, so that no other one gets its address
        return seen[x.data_ptr()][1].clone()
    return forward
"""
OWN_WEIGHTS = """
def build(model):
    weight = model.linear.weight.clone()
    return lambda x: nn.functional.linear(x, weight, model.linear.bias).relu()
"""
READS_AS_CONTIGUOUS = """
def build(model):
    return lambda x: model(torch.as_strided(x, x.shape, (8, 1), x.storage_offset()))
"""
# The second model's weights stand in the place of the first's, for every later call.
LAST_MODEL = """
KEPT = []
def build(model):
    KEPT[:] = [model]
    return lambda x: KEPT[0](x)
"""


@pytest.mark.parametrize(
    ("candidate", "finding"),
    [
        (STATIC_OUTPUT, "the next call overwrites the output"),
        (CACHE_BY_ADDRESS, "an input updated in place is not seen"),
        (OWN_WEIGHTS, "weights loaded into the module are not used"),
        (READS_AS_CONTIGUOUS, "an input of other strides gives another output"),
        (LAST_MODEL, "a second model of the shape changes the first one's output"),
    ],
)
def test_a_broken_promise_is_found_by_name(problem_of, verify_problem, candidate, finding):
    _, found = verify_problem(problem_of(**LINEAR), candidate)
    assert found.contract_class != "pure" and finding in found.reason + str(found.contract)
    assert found.status == ("incorrect" if candidate == LAST_MODEL else "ok")


@pytest.mark.parametrize(
    ("candidate", "status", "said"),
    [
        ("optimize", "unsupported", "Model has no stack of blocks that optimize() can serve"),
        (SAME_NAMES.replace("self, width", "self, width, more"), "error", "give it the constructor of the problem's"),
        ("def build(model):\n    return 3\n", "error", "returned int, not a forward"),
        ("def build(model):\n    raise OSError('no kernel today')\n", "error", "OSError: no kernel today"),
    ],
)  # fmt: skip
def test_a_candidate_that_cannot_be_built_says_why(problem_of, verify_problem, candidate, status, said):
    built, _ = verify_problem(problem_of(**LINEAR), candidate)
    assert built.status == status and said in built.reason


def test_optimize_is_asked_with_the_problem_s_input_and_mask(problem_of, verify_problem, monkeypatch):
    asked = []

    def optimize(model, x, mask):
        asked.append((x.shape, mask.dtype))
        return model

    # Its own compilation takes most of a minute on a CPU.
    monkeypatch.setattr("rooflane.dispatch.optimize", optimize)
    monkeypatch.setattr(sys.modules["rooflane.dispatch.optimize"], "takes_shape", lambda model: True)
    problem = problem_of("def forward(self, x, mask): return x * mask[:, :, None]",
                         "[torch.randn(2, 8, 4), torch.rand(2, 8) > 0.5]")  # fmt: skip
    built, found = verify_problem(problem, "optimize")
    assert asked[0] == ((2, 8, 4), torch.bool)
    assert (built.status, found.status, found.contract) == ("ok", "ok", [])


def test_one_element_of_each_tensor_is_nudged_and_plain_values_stay(problem_of, describe_here):
    problem = describe_here(problem_of(**NESTED)).problem
    workload = workload_of(problem, CPU)
    plain, nudged = workload.draw(Case(4)), workload.draw(Case(4, kind="nudged"))
    assert int((plain[0] != nudged[0]).sum()) == 1 and plain[1] == nudged[1] == 3


def test_a_packed_output_is_unpacked_as_it_was_integers_exact(problem_of, describe_here):
    workload = workload_of(describe_here(problem_of(**NESTED)).problem, CPU)
    big = 2**40 + 1
    out = {"top": (torch.randn(5, 3), torch.full((5, 3), big)), "sum": torch.randn(5)}
    packed = workload.pack(out)
    total, values, indices = workload.unpack(packed)
    assert packed.shape == (128,) and torch.equal(total.float(), out["sum"])
    assert torch.equal(values.float(), out["top"][0]) and indices.long().tolist() == [[big] * 3] * 5
    # One off in an index is wrong, however large the index is.
    other = workload.pack({"top": (out["top"][0], out["top"][1] + 1), "sum": out["sum"]})
    assert workload.gate(packed, packed).passed and workload.gate(other, packed).failed == 15


def test_a_folder_matches_candidates_by_the_problem_s_name(problem_of, tmp_path):
    one, other = problem_of(), problem_of()
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / f"{one.id}.py").write_text("def build(model): return model\n")
    candidate = parse_problem_candidate(str(folder))
    assert plan_problem_candidate(candidate, one).unsupported is None
    assert plan_problem_candidate(candidate, other).unsupported == f"the folder holds no {other.id}.py"
    (folder / f"{other.id}.py").write_text("def run(model): return model\n")
    assert "does not define" in plan_problem_candidate(candidate, other).unsupported


@pytest.mark.parametrize("name", ["resident", "nowhere.py", "dispatched"])
def test_a_candidate_for_a_problem_is_a_built_in_a_file_or_a_folder(name):
    with pytest.raises(EvaluationError, match=r"ModelNew or build\(model, inputs\)|optimize, half, compile"):
        parse_problem_candidate(name)
