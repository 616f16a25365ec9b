"""A new family is a folder and an entry point: a copy is installed, listed, routed to and passes the gate.

No file of rooflane changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[1] / "example_family"
HEADER = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal,padding_ratio\n"
RULES = """\
[[rule]]
name = "packs-well"
when = { d_model = { le = 64 } }
family = "packed_qkv"
options = { contiguous = true }
because = "three thin products cost three launches"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install a copy of the example in a folder of its own; return a function that runs a command with it."""
    folder = tmp_path_factory.mktemp("example")
    # setuptools leaves build/ and egg-info where it works.
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*install, "--target", folder / "site", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "rules.toml").write_text(RULES)
    (folder / "small.csv").write_text(HEADER + "a,3,17,24,3,40,2,true,0.3\nwide,1,8,1024,2,16,1,false,0\n")
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
    environment.pop("ROOFLANE_RULES", None)

    def run(*arguments: str, rules: bool = False) -> subprocess.CompletedProcess[str]:
        variables = environment | ({"ROOFLANE_RULES": str(folder / "rules.toml")} if rules else {})
        command = [sys.executable, "-m", "rooflane.eval", *arguments]
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)

    return run


def output(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_with_the_shapes_it_refuses(installed):
    done = installed("families", "small.csv", "--profile", "h200", "--json")
    rows = {row["family"]: row for row in json.loads(output(done))}
    assert rows["packed_qkv"]["serves"] == 1
    assert rows["packed_qkv"]["refused"] == [
        {"reason": "head_dim 512 is over the 256 that fused attention takes", "shapes": ["wide"]}
    ]
    assert {"resident", "chunked"} <= rows.keys()


def test_a_rule_of_the_users_routes_to_it_and_ours_serve_the_rest(installed):
    checked = installed("rules", "check", rules=True)
    assert "8 rules, nothing wrong" in output(checked)
    done = installed("route", "small.csv", "--profile", "h200", "--json", rules=True)
    found = {item["shape"]["id"]: item for item in json.loads(output(done))}
    assert (found["a"]["family"], found["a"]["options"]) == ("packed_qkv", {"contiguous": True})
    assert found["a"]["predicted_s"] > 0 and found["a"]["peak_bytes"] > 0
    assert found["wide"]["family"] != "packed_qkv"


def test_it_passes_the_gate_and_keeps_its_promises(installed):
    done = installed(
        "eval", "small.csv", "--shape", "a", "--candidate", "dispatched", "--candidate", "packed_qkv",
        "--control", "identity", "--processes", "1", "--budget", "0.05", "--device", "cpu", "--profile", "cpu",
        "--json", rules=True,
    )  # fmt: skip
    # Exit 0: every output is correct on ragged masks and stress inputs, and no promise is broken.
    (shape,) = json.loads(output(done))["shapes"]
    cells = shape["cells"]
    assert (cells["dispatched"]["family"], cells["dispatched"]["rule"]) == ("packed_qkv", "packs-well")
    assert all(cells[name]["status"] == "ok" and cells[name]["use"] < 1 for name in ("dispatched", "packed_qkv"))


def test_without_the_package_a_rule_for_it_is_refused_by_name(tmp_path):
    (tmp_path / "rules.toml").write_text(RULES)
    command = [sys.executable, "-m", "rooflane.eval", "rules", "check", "rules.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "names the unknown family 'packed_qkv'" in done.stdout
