"""The profiled forward: the profiler's operations against the ledger's, and what is shown of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, generate_random_case
from rooflane.dispatch import load_profile
from rooflane.dispatch.ledger import Op, ledger
from rooflane.eval.device import operations
from rooflane.eval.device.operations import (
    Launch,
    Operation,
    count_launches,
    match_ledger,
    profile_operations,
    trace,
)
from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

CPU_PROFILE = load_profile("cpu")
SHAPES = {
    "causal": Shape("causal", 2, 8, 16, 2, 32, 2),
    "full": Shape("full", 2, 8, 16, 2, 32, 2, causal=False),
    "half": Shape("half", 2, 8, 16, 2, 32, 1, dtype="bfloat16"),
}
# The shape whose 132 operations the contract counts out.
PUBLISHED_2 = Shape("2", 1, 128, 128, 4, 128, 4)


def eager(shape: Shape):
    model = build_baseline(shape, "cpu", seed=1)
    dtype = getattr(torch, shape.dtype)
    x, mask = generate_random_case(config_of(shape), "cpu", dtype, seed=1)
    return model, x, mask


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("masked", [True, False])
def test_cpu_operations_are_the_ledgers_one_for_one(name: str, masked: bool):
    # A CPU runs the same aten operations a GPU turns into kernels and copies; below 2 GiB each is one.
    model, x, mask = eager(SHAPES[name])
    found = count_launches(trace(model, x, mask if masked else None))
    assert found == (ledger(SHAPES[name], masked=masked).device_ops, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [PUBLISHED_2, SHAPES["full"]], ids=["published 2", "full"])
def test_gpu_kernels_and_copies_are_the_ledgers(shape: Shape):
    model = build_baseline(shape, "cuda", seed=1)
    x, mask = generate_random_case(config_of(shape), "cuda", getattr(torch, shape.dtype), seed=1)
    book = ledger(shape)
    assert count_launches(trace(model, x, mask)) == (book.device_ops - book.memcpys, book.memcpys)


def test_eager_rows_carry_the_ledgers_work():
    shape = SHAPES["causal"]
    profile = profile_operations(*eager(shape), shape, "eager", CPU_PROFILE)
    rows = {row.name: row for row in profile.operations}
    assert profile.note == ""
    assert sum(row.flops for row in profile.operations) == ledger(shape).flops
    assert sum(row.bytes for row in profile.operations) == ledger(shape).bytes
    # Two layers: the projections' rows hold both. 2 T D D each, T = 16 tokens, D = 16.
    assert rows["q_proj"].count == 2 and rows["q_proj"].flops == 2 * (2 * 16 * 16 * 16)
    assert rows["final_norm"].count == 1
    assert json.dumps(profile.as_dict())


def test_another_arm_has_no_invented_work():
    shape = SHAPES["causal"]
    profile = profile_operations(*eager(shape), shape, "sdpa", CPU_PROFILE)
    assert all(row.flops is None and row.bytes is None for row in profile.operations)
    assert profile.baseline_flops == ledger(shape).flops and "do not report" in profile.note


def test_a_miscount_leaves_the_work_out_and_says_so():
    shape = SHAPES["causal"]
    model, x, mask = eager(shape)
    profile = profile_operations(lambda x, mask: model(x, mask) + 1, x, mask, shape, "eager", CPU_PROFILE)
    assert all(row.flops is None for row in profile.operations)
    assert f"saw {ledger(shape).device_ops + 1} operations" in profile.note


def test_a_split_operation_owns_several_launches_on_cuda_only():
    ops = (Op("a", "p", "matmul", 0), Op("b", "p", "pointwise", 0, device_ops=2))
    launches = [Launch(name, 1.0, "kernel") for name in ("x", "y", "z")]
    pairs = match_ledger(launches, ops, "cuda")
    assert [[launch.name for launch in part] for _, part in pairs] == [["x"], ["y", "z"]]
    assert match_ledger(launches[:2], ops, "cuda") is None
    assert [len(part) for _, part in match_ledger(launches[:2], ops, "cpu")] == [1, 1]


def test_device_events_are_kernels_and_copies_only():
    def event(name: str, device=operations.DeviceType.CUDA, **extra) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: 2.0), **extra
        )

    events = [
        event("aten::add", operations.DeviceType.CPU),
        event("gemm_kernel"),
        event("Memcpy DtoD (Device -> Device)"),
        event("Memcpy HtoD (Pinned -> Device)"),
        event("Memset (Device)"),
        event("region", is_user_annotation=True),
    ]
    assert list(operations._device_launches(events)) == [
        Launch("gemm_kernel", 2e-6, "kernel"),
        Launch("Memcpy DtoD (Device -> Device)", 2e-6, "copy"),
    ]


def test_place_under_the_roof():
    # Half the peak rate with next to no traffic; then half the copy rate with no arithmetic.
    flops, size = CPU_PROFILE.matmul_flops("float32"), CPU_PROFILE.copy_bytes_per_s
    bound, share = Operation("mm", "matmul", 1, 2.0, int(flops), 1).roof(CPU_PROFILE, "float32")
    assert bound == "compute" and share == pytest.approx(0.5)
    bound, share = Operation("copy", "memcpy", 1, 2.0, 0, int(size)).roof(CPU_PROFILE, "float32")
    assert bound == "bandwidth" and share == pytest.approx(0.5)
    assert Operation("unknown", "kernel", 1, 2.0).roof(CPU_PROFILE, "float32") is None


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_is_written_and_names_the_operations(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    import matplotlib

    from rooflane.eval.device.roofline_plot import plot_roofline

    # As text rather than outlines, so that the names can be read back.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    shape = SHAPES["causal"]
    path = tmp_path / f"roof.{suffix}"
    plot_roofline(profile_operations(*eager(shape), shape, "eager", CPU_PROFILE), path)
    if suffix == "svg":
        assert "context" in path.read_text() and "FLOPs a byte" in path.read_text()
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_known_work_is_still_drawn(tmp_path: Path):
    from rooflane.eval.device.roofline_plot import plot_roofline

    shape = SHAPES["causal"]
    path = tmp_path / "roof.svg"
    plot_roofline(profile_operations(*eager(shape), shape, "sdpa", CPU_PROFILE), path)
    assert path.stat().st_size > 1000


def test_an_arm_that_cannot_be_built_is_refused_with_its_reason():
    with pytest.raises(EvaluationError, match="gemm_fp16 cannot be profiled on shape causal"):
        operations.profile_arm(SHAPES["causal"], "gemm_fp16", "cpu", "cpu", None)


def test_the_plot_has_the_same_bytes_twice_and_no_legend_over_its_bars(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    from rooflane.eval.device.roofline_plot import plot_roofline

    monkeypatch.setattr(Axes, "legend", lambda *_, **__: pytest.fail("a legend can cover a bar"))
    shape = Shape("$x^2$", 2, 16, 16, 2, 24, 2, causal=True)
    forward = profile_operations(*eager(shape), shape, "eager", CPU_PROFILE)
    for name in ("a.svg", "b.svg"):
        plot_roofline(forward, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert (tmp_path / "b.svg").read_text() == text
    assert "<dc:date>" not in text
