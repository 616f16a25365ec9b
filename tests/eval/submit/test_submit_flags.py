"""The script's flags: what a shape sets, what may be passed on, what is refused and how it is said."""

from __future__ import annotations

import pytest

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.submit import organiser
from rooflane.eval.submit.organiser import KNOWN_HASHES, read_organiser
from rooflane.shapes import Shape

SHAPE = Shape("s", 2, 8, 16, 4, 32, 3, True, "bfloat16", 0.25)
SCRIPT = """class BaselineTransformer: pass
class UserOptimizedTransformer(BaselineTransformer): pass
def main(): return 0
if __name__ == "__main__":
    main()
"""


def test_a_shape_sets_its_flags_and_an_even_number_of_rounds():
    arguments = organiser.shape_arguments(SHAPE, "cpu", ["--repeats", "7"])
    assert arguments == [
        "--batch-size", "2", "--seq-len", "8", "--d-model", "16", "--heads", "4", "--ffn-dim", "32", "--layers", "3",
        "--causal", "--dtype", "bfloat16", "--padding-ratio", "0.25", "--device", "cpu", "--benchmark-rounds", "4",
        "--repeats", "7",
    ]  # fmt: skip


def test_a_full_shape_is_not_causal():
    assert "--causal" not in organiser.shape_arguments(Shape("s", 2, 8, 16, 4, 32, 3, False), "cpu", [])


@pytest.mark.parametrize(
    "text", ["", "--repeats 5 --warmup 0", "--benchmark-rounds 6", "--no-allow-tf32 --rtol 0", "--compile-user"]
)
def test_what_the_script_takes_is_passed_on_as_it_is(text):
    assert organiser.parse_organiser_args(text, known_script=True) == text.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--batch-size 4", "--batch-size is set by the shape file's column batch_size"),
        ("--causal", "column causal"),
        ("--dev cpu", "--device is set by --device"),  # argparse takes abbreviations, so we see through them
        ("--layers=2", "column num_layers"),
        ("--benchmark-rounds 3", "an odd number"),
        ("--benchmark-r 5", "an odd number"),
        ("--repeats 0", "takes 1 or more"),
        ("--warmup -1", "takes 0 or more"),
        ("--repeats many", "invalid int value"),
        ("--compile-mode fast", "invalid choice"),
        ("--input-scale 0", "must be above 0"),
        ("--nope", "knows no '--nope'"),
        ("--help", "knows no '--help'"),
        ("stray", "knows no 'stray'"),
        ("--warmup 'x", "cannot be split"),
    ],
)
def test_wrong_flags_are_refused_in_one_paragraph(text, words):
    with pytest.raises(EvaluationError) as error:
        organiser.parse_organiser_args(text, known_script=True)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_script_may_have_flags_of_its_own():
    assert organiser.parse_organiser_args("--nope 3", known_script=False) == ["--nope", "3"]


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0"])
def test_devices_the_script_times_rightly(name):
    organiser.check_device(name)


@pytest.mark.parametrize(("name", "words"), [("cuda:1", "CUDA_VISIBLE_DEVICES=1"), ("mps", "not one of auto")])
def test_devices_it_does_not(name, words):
    with pytest.raises(EvaluationError, match=words):
        organiser.check_device(name)


def test_an_unknown_script_gets_a_note_and_a_known_one_is_recognised(tmp_path, monkeypatch):
    path = tmp_path / "organiser.py"
    path.write_text(SCRIPT)
    unknown = read_organiser(path)
    assert unknown.known == "" and "not a file this version knows" in unknown.note()
    monkeypatch.setitem(KNOWN_HASHES, unknown.sha256, "release.py")
    known = read_organiser(path)
    assert known.known == "release.py" and "is the organiser's release.py" in known.note()


def test_the_contracts_own_hash_is_known():
    (known,) = KNOWN_HASHES
    assert known.startswith("5529c96a") and len(known) == 64


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "there is no such file"),
        ("def main(:", "is not a Python file"),
        ("x = 1\n", "no BaselineTransformer, no UserOptimizedTransformer, no main"),
        (SCRIPT.replace("if __name__", "if __nome__"), 'no if __name__ == "__main__"'),
        (SCRIPT.replace("def main", "def start"), "defines no main"),
    ],
)
def test_a_file_that_is_not_the_organisers_is_refused(tmp_path, source, words):
    path = tmp_path / "organiser.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(EvaluationError, match=words):
        read_organiser(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match="--organiser takes the path"):
        read_organiser(tmp_path)


def test_a_file_changed_or_removed_since_is_refused(tmp_path):
    path = tmp_path / "organiser.py"
    path.write_text(SCRIPT)
    script = read_organiser(path)
    script.check_unchanged()
    path.write_text(SCRIPT + "# one more line\n")
    with pytest.raises(EvaluationError, match="changed during the run"):
        script.check_unchanged()
    path.unlink()
    with pytest.raises(EvaluationError, match="no longer"):
        script.check_unchanged()
