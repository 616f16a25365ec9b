"""A new resident kernel is one file (with its .cuh) and its entry in the ladder: shown in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

KERNEL = '''
"""Copies sequences of one token: no model, only the interface of a kernel."""

from dataclasses import dataclass

from rooflane.families.resident.config import H200, ResidentConfig
from rooflane.families.resident.sm90_config import translation_unit
from rooflane.families.resources.kernel_case import SM90, CudaCase
from rooflane.shapes import Shape


@dataclass(frozen=True)
class CopyTokens(ResidentConfig):
    kernel = "copy tokens"
    held_bytes = 1000

    @classmethod
    def try_plan(cls, shape, room):
        return cls(shape) if shape.seq_len == 1 else f"takes one token, not {shape.seq_len}"

    def predict_s(self, profile):
        return 1e-6 * self.shape.batch_size

    def pack(self, model, operands):
        return {"weights": model.final_norm.weight.clone()}

    def binder(self, weights, operands, eps, units):
        return lambda x, mask, out: lambda stream, x, mask, out: out.copy_(x)

    @classmethod
    def cases(cls):
        return [(Shape("case", 1, 1, 16, 1, 16, 1), SM90, H200)]

    def case(self, architecture):
        source = translation_unit("copy_tokens.cuh", {"D": self.shape.d_model, "TILE_BYTES": 16, "STAGES": 1,
                                                      "BF16": 0, "IO": 0})
        return CudaCase("copy tokens", architecture, source, 32, 0)
'''
CUDA = """#include "sm90_steps.cuh"
extern "C" __global__ void copy_tokens(const float* input, float* output) {
  output[blockIdx.x * D + threadIdx.x] = input[blockIdx.x * D + threadIdx.x];
}
"""
PROGRAM = """
import torch
from rooflane.baseline import build_baseline
from rooflane.dispatch import load_profile
from rooflane.families.resident.config import H200
from rooflane.families.resident.spec import SPEC, choose
from rooflane.shapes import Shape

one, two = (Shape("a", 3, tokens, 16, 1, 16, 1, True) for tokens in (1, 2))
profile = load_profile("h200")
assert choose(one, H200).explain() == ["copy tokens: takes the shape"]
assert choose(two, H200).passed_over[0] == ("copy tokens", "takes one token, not 2")
assert SPEC.predict_s(one, profile) == profile.graph_replay_s + 3e-6
assert SPEC.peak_bytes(one, profile) - SPEC.peak_bytes(Shape("b", 1, 1, 16, 1, 16, 1, True), profile) == 2 * 2 * 16 * 4
(case,) = [case for case in SPEC.kernel_cases() if case.name == "copy tokens"]
assert "copy_tokens(" in case.source and "struct Stream" in case.source
model = build_baseline(one, torch.device("cpu"), 1)
from rooflane.families.resident import build
packed = choose(one, H200).config.pack(model, torch.float16)
x = torch.randn(3, 1, 16)
out = torch.empty_like(x)
choose(one, H200).config.binder(packed, torch.float16, 1e-5, 132)(x, None, out)(0, x, None, out)
assert torch.equal(x, out)
handed = []
build.bound_forward = lambda bind, weights, shape, device, wide: handed.append(
    (shape, weights.tensors["weights"].shape)
)
SPEC.build(model, one, torch.device("cpu"))
assert handed == [(one, (16,))]
print(build.__file__)
"""


def test_one_file_and_its_entry_in_the_ladder_add_a_kernel(root, tmp_path):
    package = tmp_path / "rooflane"
    (package / "families").mkdir(parents=True)
    for folder in ("shapes", "baseline", "dispatch", "eval"):
        (package / folder).symlink_to(root / folder)
    for entry in (root / "families").iterdir():
        if entry.name not in ("resident", "__pycache__"):
            (package / "families" / entry.name).symlink_to(entry)
    resident = package / "families" / "resident"
    shutil.copytree(root / "families" / "resident", resident, ignore=shutil.ignore_patterns("__pycache__"))

    (resident / "kernels" / "copy_tokens.py").write_text(KERNEL)
    (resident / "kernels" / "copy_tokens.cuh").write_text(CUDA)
    ladder = resident / "spec.py"
    text, first = ladder.read_text(), "LADDER = (\n"
    assert first in text
    # One line: the kernel's place in the order of preference.
    line = '    "rooflane.families.resident.kernels.copy_tokens:CopyTokens",\n'
    ladder.write_text(text.replace(first, first + line))

    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path)), "the copy was read, not the clone"
