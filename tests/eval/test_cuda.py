"""The CUDA side of timing and of a run; needs a GPU."""

import time

import pytest
import torch

from rooflane.eval import ExitCode, evaluate
from rooflane.eval.campaign.device import Telemetry
from rooflane.eval.record.environment import describe_environment, gpu_uuid
from rooflane.eval.worker.clock import CudaClock, estimate_ns
from rooflane.shapes import Shape

pytestmark = pytest.mark.gpu

LAUNCHES = 50
PAUSE_S = 0.002


def many_small_kernels(x, mask):
    """Submit work whose launches take far longer than the device needs."""
    for _ in range(LAUNCHES):
        x = x + 1
    return x


@pytest.fixture
def case():
    return torch.zeros(64, 64, device="cuda"), torch.ones(1, 1, dtype=torch.bool, device="cuda")


def test_device_time_leaves_out_the_launch_gaps(case):
    def paused(x, mask):
        out = many_small_kernels(x, mask)
        time.sleep(PAUSE_S)
        return many_small_kernels(out, mask)

    clock = CudaClock()
    clock.window(paused, [case] * 20)
    events, host = clock.window(paused, [case] * 20)()
    spans = clock.spans(paused, [case] * 20, sorted(host)[10])
    assert len(events) == len(host) == len(spans) == 20
    # The device waits for the host in the pause. 50 kernels of about 1.3 us each cannot take less than 25 us.
    assert sorted(events)[10] > PAUSE_S * 1e9 > sorted(spans)[10] > 25_000


def test_the_estimate_counts_the_hosts_share(case):
    assert estimate_ns(many_small_kernels, case, CudaClock()) > LAUNCHES * 1000


def test_the_environment_names_gpu_and_driver():
    facts = describe_environment("cuda")
    assert facts["gpu"] == torch.cuda.get_device_name(0)
    assert facts["driver"]
    assert Telemetry(gpu_uuid()).read(own_processes=1)["sm_mhz"] > 0


@pytest.mark.slow
def test_a_run_on_the_gpu(tmp_path):
    shape = Shape("g", 4, 64, 64, 4, 64, 2)
    run = evaluate(
        [shape], ["dispatched"], processes=2, runs_dir=tmp_path, device="cuda", budget_s=0.2, compile_processes=1
    )
    rows = {record.key: record for record in run.records()}
    assert {row.status for row in rows.values()} <= {"ok"}, [row.reason for row in rows.values()]
    assert rows[0, "g", "compiled_reduce_overhead"].timing.clock == "cuda-events"
    assert (1, "g", "compiled") not in rows
    eager = rows[0, "g", "eager"]
    assert eager.timing.device_ns
    assert len(eager.timing.host_ns) == 4
    assert eager.telemetry["blocks"][0]["sm_mhz"] > 0
    assert eager.timing.idle_ns
    assert eager.timing.cold_ns
    assert eager.timing.harness_ns
    assert not any(row.integrity for row in rows.values()), [row.integrity for row in rows.values()]
    summary = run.summary()
    assert summary.exit_code() is ExitCode.COMPLETE
    assert summary.row("g").measured_regime == "launch"
