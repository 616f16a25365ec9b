"""Predicting and routing must work where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREAMBLE = """
import sys
sys.modules["torch"] = None
from rooflane.dispatch import classify, load_profile, load_rules, route
from rooflane.shapes import load_shapes
profile, shapes = load_profile("rtx5090"), load_shapes(sys.argv[1])
"""
CLASSIFY = "[classify(shape, profile).explain() for shape in shapes]"
ROUTE = "rules = load_rules(); [route(shape, profile, rules).explain() for shape in shapes]"


@pytest.mark.parametrize("work", [CLASSIFY, ROUTE], ids=["classify", "route"])
def test_everything_but_building_runs_without_torch(request, work):
    shapes = request.config.rootpath / "shapes" / "published.csv"
    command = [sys.executable, "-c", PREAMBLE + work, shapes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["rooflane.dispatch", "rooflane.dispatch.optimize"])
def test_import_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
