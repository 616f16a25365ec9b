"""Problem files in a worker: their inputs, the nesting of outputs, and what makes a problem unfit."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy
import pytest
import torch

from rooflane.eval.worker.problem import ProblemError, describe, draw_inputs, parse_tensor, take_apart

CPU = torch.device("cpu")
EMBEDDING = {
    "model": "def __init__(self, rows, width):\n    super().__init__()\n    self.table = nn.Embedding(rows, width)\n"
    "def forward(self, index):\n    return self.table(index)",
    "inputs": "[torch.randint(0, 10, (3, 5))]",
    "init": "[10, 8]",
}


def test_one_seed_gives_one_input_and_leaves_every_generator_where_it_was(problem_of):
    drawn = "[torch.randn(3), torch.tensor([random.random()]), torch.from_numpy(numpy.random.rand(2))]"
    problem = problem_of(inputs=drawn, more="import random, numpy")
    states = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    one, same, other = (draw_inputs(problem, CPU, seed) for seed in (5, 5, 6))
    assert all(map(torch.equal, one, same)) and not any(map(torch.equal, one, other))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


def test_inputs_have_memory_of_their_own_and_plain_values_stay(problem_of):
    problem = problem_of(inputs="[HELD, 3, None, 'sum', True]", more="HELD = torch.ones(2)")
    one, other = draw_inputs(problem, CPU, 1), draw_inputs(problem, CPU, 2)
    assert one[1:] == (3, None, "sum", True) and one[0].data_ptr() != other[0].data_ptr()
    one[0].zero_()
    assert draw_inputs(problem, CPU, 3)[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"inputs": "1 / 0"}, "get_inputs() raised ZeroDivisionError: division by zero"),
        ({"inputs": "torch.randn(3)"}, "get_inputs() returned a Tensor; it must return a list"),
        ({"inputs": "[[torch.randn(3)]]"}, "input 1 of get_inputs() is a list"),
        ({"inputs": "[torch.randn(int(torch.randint(1, 99, ())))]"}, "every call must return the same shapes"),
        ({"inputs": "[torch.ones(3)]"}, "returns the same values for every seed"),
        ({"inputs": "[3]"}, "returns no tensor"),
        ({"init": "[1]"}, "Model(*get_init_inputs()) raised TypeError"),
        ({"more": "raise OSError('no such device')"}, "importing it raised OSError: no such device"),
        ({"model": "def forward(self, y, z): return y"}, "Model.forward raised TypeError"),
        ({"model": "def forward(self, x): return nn.functional.dropout(x, training=True)"}, "different outputs"),
        ({"model": "def forward(self, x): return x.mul_(2) + 1"}, "changes its inputs in place"),
        ({"model": "def forward(self, x): return x[1:]"}, "the output lies in the memory of an input"),
        ({"model": "def forward(self, x): return x.sum().expand(4)"}, "no memory of its own for every element"),
        ({"model": "def forward(self, x): return x.abs().neg().log()"}, "is not finite"),
        ({"model": "def forward(self, x): return [x + 1, 3.0]"}, "the output holds a float"),
        ({"model": "def forward(self, x): return {}"}, "has no element to compare"),
    ],
)  # fmt: skip
def test_an_unfit_problem_is_refused_with_one_paragraph(problem_of, describe_here, parts: dict, said: str):
    problem = problem_of(**parts)
    with pytest.raises(ProblemError) as error:
        describe_here(problem)
    assert said in str(error.value) and problem.file in str(error.value)


def test_dropout_in_a_module_is_off_because_the_model_is_in_eval_mode(problem_of, describe_here):
    model = "def __init__(self):\n    super().__init__()\n    self.drop = nn.Dropout(0.5)\n"
    problem = problem_of(model + "def forward(self, x):\n    return self.drop(x) + 1")
    assert describe_here(problem).problem.outputs == ("float32[4,6]",)


def test_a_file_that_changed_since_the_run_began_is_refused(problem_of):
    problem = problem_of()
    Path(problem.file).write_text(Path(problem.file).read_text() + "\n")
    with pytest.raises(ProblemError, match="was changed since the run began"):
        draw_inputs(problem, CPU, 1)


def test_a_description_counts_work_and_bytes_and_names_what_goes_in_and_out(problem_of, describe_here):
    linear = "def __init__(self):\n    super().__init__()\n    self.linear = nn.Linear(16, 32, bias=False)\n"
    found = describe_here(problem_of(linear + "def forward(self, x):\n    return self.linear(x)",
                                     "[torch.randn(8, 16)]"))  # fmt: skip
    problem = found.problem
    assert problem.flops == 2 * 8 * 16 * 32
    assert problem.bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert (problem.inputs, problem.outputs, problem.structure) == (("float32[8,16]",), ("float32[8,32]",), "*")
    assert problem.no_truth == "" and found.device_ns is None and found.call_ns > 0


def test_integer_inputs_are_described_and_evaluated_in_float64(problem_of, describe_here):
    problem = describe_here(problem_of(**EMBEDDING)).problem
    assert (problem.inputs, problem.outputs) == (("int64[3,5]",), ("float32[3,5,8]",))
    assert (problem.dtype, problem.no_truth) == ("float32", "")


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        ("[torch.randn(4, 6).half()]", "float16"),
        ("[torch.randn(4, 6).double()]", "float32"),  # no profile has a rate for float64
        ("[torch.randint(0, 9, (4, 6)), torch.randn(4, 6).bfloat16()]", "bfloat16"),
    ],
)
def test_the_dtype_of_a_problem_is_one_with_a_matrix_rate(problem_of, describe_here, inputs: str, dtype: str):
    assert describe_here(problem_of("def forward(self, *x): return x[-1] + 1", inputs)).problem.dtype == dtype


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("return x.argmax(-1)", "its outputs are no floating-point numbers"),
        ("return x.float() * torch.ones(6, dtype=torch.float32)", "the module returns float32 in float64 too"),
        ("return torch.nn.functional.linear(x, torch.ones(2, 6))", "the module does not run in float64 (RuntimeError)"),
    ],
)
def test_why_a_module_is_not_compared_with_float64(problem_of, describe_here, forward: str, said: str):
    assert describe_here(problem_of(f"def forward(self, x):\n    {forward}")).problem.no_truth == said


def test_nested_outputs_are_taken_apart_in_one_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    structure, found = take_apart({"z": (a, None), "b": [b, {"k": c}]})
    assert structure == "{'b': [*, {'k': *}], 'z': [*, None]}"
    assert [leaf.numel() for leaf in found] == [2, 3, 1]
    assert take_apart((a, b))[0] == take_apart([a, b])[0]
    with pytest.raises(TypeError, match=re.escape("holds a Parameter")):
        take_apart(torch.nn.Parameter(a))


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), torch.ones((), dtype=torch.int64), torch.ones(0, 4).half()])
def test_a_description_of_a_tensor_is_read_back(tensor):
    assert parse_tensor(describe(tensor)) == (tensor.shape, tensor.dtype)
