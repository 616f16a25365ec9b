"""How a candidate's exception is described: its kind, its text on one line, and the place in the candidate's files."""

import json

import pytest
import torch

from rooflane.eval.worker.candidates import describe_error, place


def raised(function):
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_the_innermost_place_of_the_candidates_own_is_told(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def helper(x):\n    return x @ x\n\n\ndef forward(x):\n    return helper(x)\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    error = raised(lambda: space["forward"](torch.zeros(2, 3)))
    assert place(error) == "mine.py:2 in helper"
    text = describe_error(error)
    assert text.startswith("RuntimeError: mat1 and mat2") and text.endswith(" (mine.py:2 in helper)")


def test_a_place_inside_python_or_a_package_is_passed_over():
    error = raised(lambda: json.loads("{"))
    assert place(error).startswith("test_error_place.py:"), "the caller's own line, not json's"
    error = raised(lambda: torch.nn.Linear(2, 2)(torch.zeros(3)))
    assert place(error).startswith("test_error_place.py:")


def test_an_exception_that_was_never_raised_has_no_place():
    assert place(ValueError("x")) == "" and describe_error(ValueError("a\n b")) == "ValueError: a b"
