"""Wrong uses: each gives one clear paragraph, with the exit status of a request that cannot be run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooflane.eval import EvaluationError, cli, resume
from rooflane.eval.exit_codes import ExitCode

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "briefs" / "records" / "h200-published"
HEADER = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"
ROW = '[[rule]]\nname = "mine"\nwhen = {{ {when} }}\nfamily = "{family}"\nbecause = "a test"\n'
FILES = {
    "shapes.csv": HEADER + "a,1,8,16,3,16,1,true\n",
    "tiny.csv": HEADER + "a,1,8,16,2,16,1,true\n",
    "family.toml": ROW.format(when="seq_len = 8", family="residnt"),
    "field.toml": ROW.format(when="seqlen = 8", family="resident"),
    "empty.py": "def bild(model, shape, device):\n    return model\n",
    "broken.py": "def build(model, shape, device)\n    return model\n",
    "mine.py": "# mine\n",
    "notarun/readme.txt": "nothing here",
}
# What was done, and what the paragraph must hold: what is wrong, where, and how to fix it.
WRONG = {
    "a shape whose heads do not divide its width": (
        ["eval", "shapes.csv"],
        ["shapes.csv:2", "d_model 16 is not divisible by num_heads 3"],
    ),
    "an unknown family in a rule": (
        ["route", "tiny.csv", "--profile", "h200", "--rules", "family.toml"],
        ["family.toml:1", "'residnt', did you mean 'resident'?"],
    ),
    "a field with a typing error in a rules file": (
        ["eval", "tiny.csv", "--rules", "field.toml", "--device", "cpu", "--profile", "cpu"],
        ["field.toml:3", "no field is called 'seqlen'", "seq_len"],
    ),
    "a candidate without build": (
        ["eval", "tiny.csv", "--candidate", "empty.py"],
        ["empty.py does not define build(model, shape, device)", "it defines: bild", "rooflane new candidate"],
    ),
    "a candidate that is no Python": (
        ["eval", "tiny.csv", "--candidate", "broken.py"],
        ["broken.py:1: not valid Python", "fix that line"],
    ),
    "an unknown profile": (
        ["classify", "tiny.csv", "--profile", "h2000"],
        ["'h2000'", "h200", "path of a TOML file"],
    ),
    "a new candidate over a file that is there": (
        ["new", "candidate", "--out", "mine.py"],
        ["mine.py: exists already", "--out"],
    ),
    "a comparison with an unknown arm": (
        ["compare", f"{RECORD}::dispatched", f"{RECORD}::warp"],
        ["no arm 'warp'", "it has: "],
    ),
    "a report on a folder that is no run": (
        ["report", "notarun"],
        ["notarun: not a run", "run.json", "rooflane eval"],
    ),
    "a memory cap without end": (
        ["eval", "tiny.csv", "--memory-cap", "inf", "--device", "cpu"],
        ["--memory-cap inf", "greater than 0"],
    ),
    "a negative memory cap": (
        ["eval", "tiny.csv", "--memory-cap", "-1", "--device", "cpu"],
        ["--memory-cap -1", "greater than 0"],
    ),
    "no process at all": (
        ["eval", "tiny.csv", "--processes", "0", "--device", "cpu"],
        ["--processes 0", "greater than or equal to 1"],
    ),
    "an unknown family as a candidate": (
        ["eval", "tiny.csv", "--candidate", "warp", "--device", "cpu", "--profile", "cpu"],
        ["candidate 'warp'", "there are: ", "path of a .py file"],
    ),
    "a rule with what the table cannot do": (
        ["rules", "new", "--name", "a", "--when", "seq_len~8", "--family", "chunked", "--because", "b"],
        ["condition 'seq_len~8' is not FIELD", "seq_len<=128"],
    ),
    "regret of a run of one family": (
        ["rules", "regret", str(RECORD)],
        ["no shape can be judged", "--candidate FAMILY --candidate FAMILY"],
    ),
}
FIELDS_OF_OURS = ("memory_cap_bytes", "budget_s", "pydantic", "Traceback")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files the wrong uses name."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROOFLANE_RULES", raising=False)
    return tmp_path


@pytest.mark.parametrize("use", WRONG)
def test_one_clear_paragraph(use, folder, capsys):
    arguments, words = WRONG[use]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == ExitCode.USAGE
    assert out == ""
    assert err.startswith("rooflane: ") and err.count("\n") == 1, "one paragraph, and nothing before it"
    for word in words:
        assert word in err
    assert not any(word in err for word in FIELDS_OF_OURS)
    assert not (folder / "runs").exists(), "refused before anything is measured"


def test_the_same_through_python(folder):
    from rooflane.eval import EvaluationError, evaluate
    from rooflane.shapes import load_shapes

    shapes = load_shapes("tiny.csv")
    for values, words in (
        ({"memory_cap_bytes": -1}, "setting memory_cap_bytes: input should be greater than 0, got -1"),
        ({"speed": 1}, "there is no setting 'speed'; settings are: device"),
        ({"rules": "family.toml", "device": "cpu"}, "did you mean 'resident'"),
    ):
        with pytest.raises(EvaluationError, match=words):
            evaluate(shapes, **values)


@pytest.mark.slow
def test_a_candidate_of_the_wrong_shape_is_reported_by_shape_and_arm(folder, capsys):
    (folder / "half.py").write_text("def build(model, shape, device):\n    return lambda x, mask=None: x[:, :4]\n")
    arguments = ["eval", "tiny.csv", "--candidate", "half.py", "--control", "none", "--processes", "1"]
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--budget", "0.05", "--device", "cpu", "--profile", "cpu"])
    assert end.value.code == ExitCode.INCORRECT
    (found,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shape a")]
    assert "half.py is wrong: the output has shape (1, 4, 16), expected (1, 8, 16)" in found


def test_a_plugin_marker_with_a_negative_tolerance(folder):
    text = "import pytest\n@pytest.mark.rooflane(atol=-1)\ndef test_it(gate): pass\n"
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    found = [line for line in done.stdout.splitlines() if "@pytest.mark.rooflane atol is -1" in line]
    assert found and "a tolerance is a finite number of at least 0" in found[0]
    assert "Traceback" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can go on with a GPU's run")
def test_a_gpus_run_cannot_go_on_without_one():
    with pytest.raises(EvaluationError, match="device cuda was asked for"):
        resume(RECORD)
