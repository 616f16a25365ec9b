"""Problem files read as text: what they must define, their tolerance, and the shipped ones by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rooflane.shapes import Shape, ShapeError, from_dict, load_problems
from rooflane.shapes.problem import candidate_of, summary_of

GOOD = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_file_is_one_problem_and_a_folder_is_every_problem_in_it(tmp_path: Path):
    one = write(tmp_path, "b.py", GOOD + "ATOL = 1e-3\n")
    write(tmp_path, "a.py", GOOD)
    write(tmp_path, "_helper.py", "")
    (problem,) = load_problems(one)
    assert (problem.id, problem.file, problem.atol, problem.rtol) == ("b", str(one.resolve()), 1e-3, None)
    assert [found.id for found in load_problems(tmp_path)] == ["a", "b"]


def test_the_command_line_s_tolerance_takes_the_place_of_the_file_s(tmp_path: Path):
    path = write(tmp_path, "a.py", GOOD + "ATOL = 1e-3\nRTOL = 0.5\n")
    (problem,) = load_problems(path, rtol=0.1)
    assert (problem.atol, problem.rtol) == (1e-3, 0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_inputs(): return []\n", "does not define Model, get_init_inputs"),
        (GOOD.replace("get_inputs", "make_inputs"), "does not define get_inputs"),
        ("class Model(:\n", "is no Python"),
        (GOOD + "ATOL = 10 ** -3 * len('a')\n", "ATOL is no plain number"),
        (GOOD + "RTOL = 0.0\n", "rtol is 0; it must be a number above 0"),
    ],
)
def test_an_unfit_file_is_refused_by_name(tmp_path: Path, text: str, said: str):
    path = write(tmp_path, "a.py", text)
    with pytest.raises(ShapeError, match=said) as error:
        load_problems(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path):
    with pytest.raises(ShapeError, match="the shipped problems are named mlp, softmax, transformer_block"):
        load_problems(tmp_path / "none.py")
    with pytest.raises(ShapeError, match="the folder holds no problem"):
        load_problems(tmp_path)


def test_shipped_problems_are_found_by_name_and_each_has_a_candidate():
    shipped = load_problems("shipped")
    assert [problem.id for problem in shipped] == ["mlp", "softmax", "transformer_block"]
    for problem in shipped:
        assert load_problems(problem.id) == [problem]
        assert candidate_of(problem).is_file() and summary_of(problem).endswith(".")


def test_a_problem_and_a_shape_are_read_back_from_records(tmp_path: Path):
    (problem,) = load_problems(write(tmp_path, "a.py", GOOD))
    for request in (problem, Shape("a", 2, 8, 16, 2, 16, 1)):
        assert from_dict(json.loads(json.dumps(request.as_dict()))) == request


def test_the_same_text_in_another_folder_is_the_same_problem_and_another_text_is_not(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (one,) = load_problems(write(tmp_path, "a.py", GOOD))
    (same,) = load_problems(write(tmp_path / "other", "a.py", GOOD))
    assert one == same
    (changed,) = load_problems(write(tmp_path / "other", "a.py", GOOD + "\n"))
    assert one != changed
