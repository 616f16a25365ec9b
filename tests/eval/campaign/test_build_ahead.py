"""What is compiled before the workers ask for it: the right things, once, ended in time, and none of a user's code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rooflane.dispatch import load_profile
from rooflane.eval.campaign import build_ahead
from rooflane.eval.campaign.build_ahead import compile_orders, start_host_build, start_kernels, wait_for_builds
from rooflane.eval.campaign.planning import predict
from rooflane.eval.worker.candidates import load_rule_table, parse_candidate
from rooflane.families import get_family
from rooflane.families.resident.config import H200
from rooflane.families.resident.kernels.sm90_row_warps import RowWarps
from rooflane.families.resident.spec import SPEC, choose
from rooflane.families.runtime import cuda_kernel
from rooflane.shapes import Shape

# A warp for each 16 rows: the quickest of the kernels to compile.
NARROW = Shape("narrow", 64, 128, 32, 4, 32, 4, causal=True)


@pytest.fixture
def started(monkeypatch):
    """Record what would be started, as commands and the text on their standard input."""
    found = []
    monkeypatch.setattr(build_ahead, "_start", lambda command, text: found.append((command, text)))
    monkeypatch.setattr(build_ahead, "_host", None)
    monkeypatch.setattr(build_ahead, "usable_cores", lambda: 16.0)
    return found


@pytest.fixture
def meta(make_meta):
    """Return a function that makes the page of a run of candidates on an H200."""

    def make(*candidates, shapes=(NARROW, Shape("wide", 64, 128, 1024, 4, 1024, 4, causal=True))):
        profile, rules = load_profile("h200"), load_rule_table(None)
        parsed = [parse_candidate(text) for text in candidates]
        predictions = [predict(shape, profile, parsed, rules) for shape in shapes]
        values = {"predictions": predictions, "profile": profile.model_dump(mode="json"), "candidates": candidates}
        return make_meta(list(shapes)).model_copy(update=values)

    return make


@pytest.mark.parametrize(
    ("candidates", "pending", "builds"),
    [
        (["dispatched"], True, True),
        (["resident"], True, True),
        (["dispatched"], False, False),  # it is on the disk
        (["graph_compile"], True, False),  # torch's own code
        (["mine.py"], True, False),  # what a user's file calls is not known
        (["mine.py", "sdpa_flash"], True, True),
    ],
)
def test_the_call_path_is_built_where_a_family_may_call_it(started, monkeypatch, tmp_path, candidates, pending, builds):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(model, shape, device):\n    return model\n")
    monkeypatch.setattr(build_ahead, "host_build_pending", lambda: pending)
    start_host_build([parse_candidate(text) for text in candidates])
    assert len(started) == builds


def test_the_kernels_of_every_shape_are_spread_over_some_cores(started, monkeypatch, meta, tmp_path):
    (tmp_path / "mine.py").write_text("def build(model, shape, device):\n    return model\n")
    shapes = tuple(Shape(str(size), 64, 128, 32, 4, 32, size, causal=True) for size in range(1, 10))
    start_kernels(meta("dispatched", str(tmp_path / "mine.py"), shapes=shapes))
    orders = [order for _, text in started for order in json.loads(text)["orders"]]
    assert len(started) == 6 and sorted(order["shape"]["id"] for order in orders) == [item.id for item in shapes]
    assert {order["family"] for order in orders} == {"resident"}
    assert all("mine.py" not in text for _, text in started)
    for cores, count in ((2.0, 0), (4.0, 1), (8.0, 3)):
        started.clear()
        monkeypatch.setattr(build_ahead, "usable_cores", lambda cores=cores: cores)
        start_kernels(meta("dispatched", shapes=shapes))
        assert len(started) == count, cores


def _alive(pid):
    """Tell whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_is_awaited_and_what_takes_too_long_is_ended_with_its_children(monkeypatch, tmp_path):
    told = tmp_path / "child"
    script = f"sleep 300 & echo $! > {told}.new; mv {told}.new {told}; sleep 300"
    quick = build_ahead._start([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], "four")
    wait_for_builds()
    assert quick.returncode == 4 and not build_ahead._running
    monkeypatch.setattr(build_ahead, "WAIT_S", 0.5)
    slow = build_ahead._start(["sh", "-c", script], "")
    before = time.monotonic()
    wait_for_builds()
    assert time.monotonic() - before < 5 and slow.returncode == -signal.SIGKILL
    child, deadline = int(told.read_text()), time.monotonic() + 5
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)
    wait_for_builds()


def test_an_order_that_cannot_be_compiled_stops_no_other(monkeypatch):
    done = []

    class Family:
        def compile_ahead(self, shape, profile, **options):
            if shape.id == "2":
                raise RuntimeError("no compiler")
            done.append(shape.id)
            return 2

    monkeypatch.setattr(build_ahead, "get_family", lambda name: Family())
    shapes = [Shape(name, 1, 16, 16, 2, 16, 1).as_dict() for name in "123"]
    orders = [{"family": "x", "shape": shape, "options": {}} for shape in shapes]
    assert compile_orders(load_profile("h200").model_dump(mode="json"), orders) == 4
    assert done == ["1", "3"]


@pytest.mark.parametrize(("dtype", "bfloat16"), [("float32", 0), ("float16", 0), ("bfloat16", 1)])
def test_a_kernel_is_compiled_with_a_mask_and_without(monkeypatch, dtype, bfloat16):
    compiled = []
    monkeypatch.setattr(cuda_kernel, "compile_cubin", lambda source, target: compiled.append((source, target)))
    shape = Shape("narrow", 64, 128, 32, 4, 32, 4, causal=True, dtype=dtype)
    assert SPEC.compile_ahead(shape, load_profile("h200")) == len(compiled) == 2
    config = choose(shape, H200).config
    assert compiled == [(config.source(masked, bool(bfloat16)), "sm_90a") for masked in (True, False)]


def test_kernels_of_triton_and_families_without_any_are_left_to_the_worker():
    # A device without the CUDA C++ kernels, and a family of torch's operations.
    assert SPEC.compile_ahead(NARROW, load_profile("h200").model_copy(update={"capability": (8, 0)})) == 0
    assert get_family("sdpa_flash").compile_ahead(NARROW, load_profile("h200")) == 0


@pytest.mark.gpu
def test_a_worker_finds_the_kernels_with_and_without_a_mask_in_the_cache(tmp_path, meta):
    assert isinstance(choose(NARROW, H200).config, RowWarps)
    page = meta("dispatched")
    orders = [{"family": "resident", "shape": NARROW.as_dict(), "options": {}}]
    text = json.dumps({"profile": page.profile, "orders": orders})
    command = [sys.executable, "-m", "rooflane.eval.campaign.build_ahead"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run(command, input=text, text=True, env=environment, check=True, timeout=120)
    assert len(list(tmp_path.rglob("kernel.cubin"))) == 2
    script = (
        "from rooflane.families.runtime import cuda_kernel\n"
        "from rooflane.families.resident.config import H200\n"
        "from rooflane.families.resident.spec import choose\n"
        "from rooflane.shapes import Shape\n"
        "cuda_kernel._compile = None\n"
        f"config = choose(Shape(**{NARROW.as_dict()!r}), H200).config\n"
        "for masked in (True, False):\n"
        "    assert cuda_kernel.compile_cubin(config.source(masked, False), 'sm_90a')\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
