"""A candidate that prints in every way there is: the evaluator's own output stays what it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SHAPES = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\na,2,8,16,2,32,1,true\n"
LEAST = ["--device", "cpu", "--profile", "cpu", "--processes", "1", "--budget", "0.05", "--control", "identity"]
# From Python, from native code on both descriptors, from a child, from a child that outlives its parent, and from the
# streams that Python keeps aside; each at import, when it is built and in a call.
PRINTING = r"""
import atexit, os, subprocess, sys, warnings


def shout(where):
    print(f"LOUD print {where} \x1b[31m")
    print(f"LOUD stderr {where}", file=sys.stderr)
    warnings.warn(f"LOUD warning {where}")
    os.write(1, b"LOUD descriptor\n{\"shapes\": 1}\n")
    os.write(2, b"LOUD descriptor\n")
    sys.__stdout__.write("LOUD kept aside\n")
    sys.__stdout__.flush()


shout("import")
atexit.register(lambda: os.write(1, b"LOUD at exit\n"))


def build(model, shape, device):
    shout("build")
    os.system("echo LOUD shell; echo LOUD shell >&2")
    subprocess.Popen(["sh", "-c", "sleep 0.3; echo LOUD orphan; echo LOUD orphan >&2"])
    calls = []

    def forward(x, mask=None):
        if not calls:
            shout("call")
        calls.append(1)
        return model(x, mask)

    return forward
"""
FAILING = PRINTING.replace("    calls = []\n", '    raise RuntimeError("\\x1b[2J\\u202eno kernel\\rtoday")\n')


def test_what_candidates_print_stays_out_of_json_and_is_plain_in_a_reason(tmp_path):
    """One run of two: the first prints and is right, the second prints and fails."""
    (tmp_path / "shapes.csv").write_text(SHAPES)
    (tmp_path / "loud.py").write_text(PRINTING)
    (tmp_path / "fails.py").write_text(FAILING)
    command = [sys.executable, "-m", "rooflane.eval", "eval", "shapes.csv", *LEAST, "--json"]
    command += ["--candidate", "loud.py", "--candidate", "fails.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 22, done.stderr
    found = json.loads(done.stdout)
    assert [row["shape"]["id"] for row in found["shapes"]] == ["a"]
    for text in (done.stdout, done.stderr):
        assert not {"\x1b", "\r", "\u202e"} & set(text)
        assert not [line for line in text.splitlines() if line.lstrip().startswith("LOUD")]
    (problem,) = [line for line in done.stderr.splitlines() if "fails.py is" in line]
    assert "\\x1b[2J\\u202eno kernel" in problem and "it printed: " in problem and "LOUD" in problem
