"""Predicting, routing and checking rules must work where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

EVERYTHING = """
import sys
sys.modules["torch"] = None
import rooflane.dispatch.optimize
from rooflane.dispatch import classify, lint, load_profile, load_rules, route
from rooflane.shapes import load_shapes
shapes, profile = load_shapes(sys.argv[1]), load_profile("rtx5090")
# A table of the user's, named by the project file of the working directory.
rules = load_rules()
assert rules.rules[0].name == "mine" and lint(rules) == []
for shape in shapes:
    classify(shape, profile).explain(), route(shape, profile, rules).explain()
"""


def test_everything_but_building_runs_without_torch(root, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.rooflane]\nrules = "mine.toml"\n')
    row = 'name = "mine"\nwhen = { d_model = 7 }\nfamily = "chunked"\nbecause = "a test"\n'
    (tmp_path / "mine.toml").write_text("[[rule]]\n" + row)
    command = [sys.executable, "-c", EVERYTHING, root / "shapes" / "published.csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
