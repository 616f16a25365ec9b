"""A cap on a CPU's memory: what needs more fails as out of memory, and the cap can be lifted."""

import subprocess
import sys

import pytest

from rooflane.eval import evaluate
from rooflane.shapes import Shape

# In a process of its own: the cap holds for a whole process.
CAPPED = """
import torch
from rooflane.eval.worker.candidates import is_oom
from rooflane.eval.worker.oversize import cap_memory
device = torch.device("cpu")
cap_memory(device, 300 << 20)
torch.empty(200 << 20, dtype=torch.uint8)
try:
    torch.empty(1 << 30, dtype=torch.uint8)
except RuntimeError as error:
    print(is_oom(error))
cap_memory(device, None)
print(torch.empty(1 << 30, dtype=torch.uint8).numel())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="addresses are counted from /proc")
def test_memory_beyond_the_cap_is_refused_until_it_is_lifted():
    done = subprocess.run([sys.executable, "-c", CAPPED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", str(1 << 30)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="addresses are counted from /proc")
def test_a_candidate_that_wants_all_the_memory_on_a_shape_too_large_for_eager_is_refused_it(tmp_path):
    greedy = tmp_path / "greedy.py"
    # Never written to: without the cap the system grants it.
    greedy.write_text(
        "import torch\nfrom rooflane.eval.record.environment import available_memory_bytes\n\n\n"
        "def build(model, shape, device):\n    def forward(x, mask=None):\n"
        "        held = torch.empty(int(1.1 * available_memory_bytes()), dtype=torch.uint8)\n"
        "        return model(x, mask)\n    return forward\n"
    )
    run = evaluate(
        [Shape("o", 3, 512, 16, 2, 16, 1, causal=True)],
        str(greedy),
        runs_dir=tmp_path / "runs",
        processes=1,
        device="cpu",
        profile="cpu",
        controls=(),
        budget_s=0.02,
        memory_cap_bytes=3_500_000,
    )
    rows = {row.arm: row.status for row in run.records()}
    assert (rows["eager"], rows[str(greedy)]) == ("infeasible", "oom")
