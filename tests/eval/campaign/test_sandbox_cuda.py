"""Candidates on a GPU from inside the sandbox: the device, and every compiler that a candidate may call."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rooflane.shapes import Shape

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROGRAMS = {
    "eager_ops": """
def build(model, shape, device):
    return lambda x, mask=None: model(x.clone(), mask)
""",
    "triton_kernel": """
import torch
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count), mask=at < count)

def build(model, shape, device):
    def forward(x, mask=None):
        y = model(x, mask)
        out = torch.empty_like(y)
        copy_kernel[(triton.cdiv(y.numel(), 1024),)](y, out, y.numel(), BLOCK=1024)
        return out
    return forward
""",
    "compiled": """
import torch
def build(model, shape, device):
    return torch.compile(model)
""",
    "graph": """
import torch
def build(model, shape, device):
    return torch.compile(model, mode="reduce-overhead")
""",
    "dispatched_by_hand": """
from rooflane.dispatch import optimize
def build(model, shape, device):
    return optimize(model, shape, device)
""",
}
INLINE = '''
from torch.utils.cpp_extension import load_inline
CODE = """
#include <torch/extension.h>
__global__ void copy_kernel(const float* x, float* out, long count) {
    long at = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (at < count) out[at] = x[at];
}
torch::Tensor copy(torch::Tensor x) {
    auto out = torch::empty_like(x);
    copy_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
"""
def build(model, shape, device):
    made = load_inline("rooflane_test_copy", "torch::Tensor copy(torch::Tensor x);", CODE, functions=["copy"])
    return lambda x, mask=None: made.copy(model(x, mask).contiguous())
'''


@pytest.fixture(scope="module")
def rows(tmp_path_factory, evaluate_at_once):
    """Return the lines on the sandbox, and each program's row in the first and in the second process."""
    folder = tmp_path_factory.mktemp("programs")
    programs = PROGRAMS | ({"inline": INLINE} if shutil.which("nvcc") else {})
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    # Each in a campaign of its own: a compiler takes up to a minute.
    groups = [[str(folder / f"{name}.py")] for name in programs]
    runs = evaluate_at_once(Shape("g", 4, 64, 64, 4, 64, 2), groups, processes=2)
    found = {(Path(row.arm).stem, row.process): row for run in runs for row in run.records() if row.kind == "candidate"}
    return [run.meta.sandbox for run in runs], found


def test_the_sandbox_is_on(rows):
    assert all(line.startswith("on") for line in rows[0]), rows[0]


@pytest.mark.parametrize("name", [*PROGRAMS, "inline"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_candidate_builds_and_runs_on_the_gpu(rows, name, process):
    row = rows[1].get((name, process))
    if row is None:
        pytest.skip("no nvcc is here")
    assert row.status == "ok" and not row.integrity, (row.reason, row.integrity)
