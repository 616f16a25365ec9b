"""`rooflane models`: what is taken, as text and JSON."""

from __future__ import annotations

import json

import pytest

from rooflane.dispatch.adapters.known import KNOWN, REFUSED
from rooflane.eval.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("empty_folder")

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        other = nn.TransformerEncoderLayer(32, 4, 48)
        self.other = nn.TransformerEncoder(other, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.other(self.trunk(x))


def get_inputs():
    return [torch.randn(2, 11, 32)]


def get_init_inputs():
    return []
"""


def test_the_list_names_every_known_block(rooflane):
    status, out, _ = rooflane("models")
    assert status == 0
    for known in KNOWN:
        assert known.label in out and known.name.rpartition(".")[2] in out and known.form in out
    assert all(reason in out for reason in REFUSED.values())
    status, out, _ = rooflane("models", "--json")
    listed = json.loads(out)
    assert [row["class"] for row in listed["taken"]] == [
        *(known.name for known in KNOWN),
        "torch.nn.TransformerEncoder",
    ]
    assert {row["class"]: row["reason"] for row in listed["refused"]} == REFUSED


def test_a_problem_is_told_stack_by_stack_what_is_served_and_why_the_rest_is_not(rooflane, tmp_path):
    (tmp_path / "mine.py").write_text(PROBLEM)
    status, out, err = rooflane("models", "--problem", "mine.py", "--profile", "h200")
    assert status == 0, err
    assert "mine on NVIDIA H200" in out and "trunk" in out and "3 x TransformerEncoderLayer" in out
    assert "post-norm, relu, no final norm" in out and "sdpa_flash" in out
    assert "other: 2 x TransformerEncoderLayer: not served: layers.0 has batch_first=False" in " ".join(out.split())
    status, out, _ = rooflane("models", "--problem", "mine.py", "--profile", "cpu", "--json")
    (found,) = json.loads(out)
    (row,) = found["served"]
    assert (row["stack"], row["call"], row["family"]) == ("trunk", "2x11x32 h4 f48 l3 full", "sdpa_flash")
    assert row["kernel"] and row["predicted_s"] > 0 and len(found["remarks"]) == 1


def test_a_problem_of_which_nothing_is_served_is_an_error_with_the_reason(rooflane):
    status, _, err = rooflane("models", "--problem", "softmax", "--profile", "cpu")
    assert status == ExitCode.USAGE and "Model has no stack of blocks that optimize() can serve" in err
