"""The drop-in comparison: its arms, its records and the table made from them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooflane.eval import EvaluationError, update_between_markers
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

_SPEC = importlib.util.spec_from_file_location("dropin", Path(__file__).parents[1] / "briefs/dropin/measure.py")
dropin = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dropin)
OURS, OWN, load_dropin, render_dropin_table = dropin.OURS, dropin.OWN, dropin.load_dropin, dropin.render_dropin_table
build_own, build_encoder, without_fast_path = dropin.build_own, dropin.build_encoder, dropin.without_fast_path

RECORD = "briefs/records/h200-dropin/dropin.jsonl"
# Long enough for the router to want no compiler on a CPU.
SHAPE = Shape("1", 16, 128, 64, 2, 64, 1)
CPU = torch.device("cpu")


def line(process: int, shape_id: str, times: dict[str, int], use: float | str = 0.1) -> dict:
    """Return a JSON line whose arms took a constant number of nanoseconds."""
    return {
        "process": process,
        "environment": {"gpu": "a GPU", "torch": "2.11.0", "cpu": "a CPU", "commit": "0123456789abcdef"},
        "shape": Shape(shape_id, 1, 8, 16, 2, 16, 1).as_dict(),
        "family": "resident",
        "gates": {"fast path": {"passed": use == 0.1, "use": use}},
        "arms": {name: {"event_ns": [[ns] * 3] * 4} for name, ns in times.items()},
    }


@pytest.fixture
def write(tmp_path):
    def write(*lines: dict):
        path = tmp_path / "dropin.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return path

    return write


def test_the_table_states_ratios_over_the_fast_path_and_over_the_fastest_arm(write):
    path = write(
        line(0, "1", {OURS: 100_000, "fast path": 400_000, "fast path off+graphs": 200_000}),
        line(1, "1", {OURS: 100_000, "fast path": 400_000, "fast path off+graphs": 200_000}),
        line(0, "2", {OURS: 300_000, "fast path": 100_000, "fast path off+graphs": 600_000}),
        line(1, "2", {OURS: 50_000, "fast path": 100_000}),
    )
    text = render_dropin_table(path)
    first, second = [row for row in text.splitlines() if row.startswith(("| 1 |", "| 2 |"))]
    assert first.split(" | ")[2:] == [
        "resident",
        "0.400",
        "0.200",
        "0.100",
        "4.00x [4.00, 4.00]",
        "2.00x [2.00, 2.00] (SDPA compiled RO)",
        "0.100 |",
    ]
    # Timed in one process alone: shown, but in no mean.
    assert second.split(" | ")[3:6] == ["0.100", "0.600", "0.175"] and "(fast path)" in second
    # log 4 and log 1/3 in one process, log 4 and log 2 in the other: sqrt(sqrt(4 / 3) * sqrt(8)) = 1.807
    assert "over fast path: 1.807x" in text and "over 2 shapes" in text
    assert "over SDPA compiled RO: 2.00x [2.00, 2.00] over 1 shape" in text
    assert "faster than every arm timed in every process: 1 of 2 shapes (not 2)" in text
    assert "a GPU; torch 2.11.0; commit 0123456789ab; 2 processes" in text


@pytest.mark.parametrize("use", [1.5, "Infinity"])
def test_a_failed_gate_shows_in_its_row_and_in_the_count(write, use):
    text = render_dropin_table(write(line(0, "1", {OURS: 1000, "fast path": 2000}, use)))
    assert " ! |" in text
    assert "passes the gate in every check: 0 of 1 shape (not 1)" in text


def test_a_shape_that_failed_counts_and_says_why(write):
    failed = {key: line(0, "2", {})[key] for key in ("process", "environment", "shape")} | {
        "error": "OutOfMemoryError: x"
    }
    text = render_dropin_table(write(line(0, "1", {OURS: 1000, "fast path": 2000}), failed))
    assert "passes the gate in every check: 1 of 2 shapes (not 2)" in text
    assert "faster than every arm timed in every process: 1 of 2 shapes (not 2)" in text
    assert "- shape 2 failed: OutOfMemoryError: x" in text


def test_records_that_cannot_be_read_are_refused(write, tmp_path):
    with pytest.raises(EvaluationError, match="holds no line"):
        load_dropin(write())
    with pytest.raises(EvaluationError, match="cannot be read as JSON lines"):
        load_dropin(tmp_path / "nowhere.jsonl")
    with pytest.raises(EvaluationError, match="shape 1 has two lines of process 0"):
        load_dropin(write(line(0, "1", {}), line(0, "1", {})))


def test_a_measured_line_holds_gates_times_and_what_was_left_out(write):
    found = dropin.measure_shape(SHAPE, CPU, list(OWN), budget_s=0.05, deadline=0.0)
    assert {"fast path", "fast path off", "full float32", "float64", "padding 0.3"} <= set(found["gates"])
    assert {"no final norm", "a single layer", "not causal"} <= set(found["gates"])
    assert all(gate["passed"] for gate in found["gates"].values())
    timed = {name for name, arm in found["arms"].items() if "event_ns" in arm}
    assert timed == {OURS, "fast path", "fast path off"}
    assert all(arm["skipped"] == "the time budget was spent" for name, arm in found["arms"].items() if "+" in name)
    text = render_dropin_table(write({"process": 0, "environment": {"cpu": "a CPU", "commit": None}} | found))
    assert "| fast path | SDPA | rooflane |" in text


def test_the_arms_without_the_fast_path_do_not_take_it(monkeypatch):
    encoder = build_encoder(SHAPE, CPU)
    x = torch.randn(16, 128, 64)
    calls = []
    kernel = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or kernel(*args))
    with torch.inference_mode():
        fast = build_own("fast path", encoder, SHAPE, CPU)(x)
        assert len(calls) == 1
        slow = build_own("fast path off", encoder, SHAPE, CPU)(x)
    assert len(calls) == 1
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compiled_arms_of_one_process_do_not_share_a_graph():
    encoder = build_encoder(Shape("s", 2, 8, 16, 2, 16, 1), CPU)
    graphs = []

    def backend(graph, inputs):
        graphs.append({getattr(node.target, "__name__", "") for node in graph.graph.nodes})
        return graph

    with torch.inference_mode():
        for module in (encoder, without_fast_path(encoder)):
            compiled = torch.compile(module, dynamic=False, backend=backend)
            dropin.own_forward(compiled, Shape("s", 2, 8, 16, 2, 16, 1), CPU)(torch.randn(2, 8, 16))
    assert ["_transformer_encoder_layer_fwd" in names for names in graphs] == [True, False]


def test_the_script_runs_by_its_path(tmp_path):
    script = Path(__file__).parents[1] / "briefs/dropin/measure.py"
    command = [sys.executable, script, "--ids", "12", "--device", "cpu", "--no-compile", "--out", tmp_path / "d.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "process 0 shape 12: passes the gate, 3 arms timed" in done.stdout and "| 12 | 64x32x128" in done.stdout


def test_the_briefs_table_is_what_its_record_gives(root, tmp_path):
    copy = shutil.copy(root / "briefs" / "dropin.md", tmp_path / "dropin.md")
    written = update_between_markers(copy, "dropin", render_dropin_table(root / RECORD))
    assert not written, f"to fix this: python briefs/dropin/measure.py --table {RECORD} --page briefs/dropin.md"
