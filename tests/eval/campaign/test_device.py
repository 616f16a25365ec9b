"""One campaign a device: the second is told who holds it, and nothing outlives the holder."""

import os
import signal
import subprocess
import sys

import pytest

from rooflane.eval import evaluate
from rooflane.eval.campaign.device import campaign_lock
from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

HOLDER = """
import sys, time
from rooflane.eval.campaign.device import campaign_lock
from rooflane.shapes import Shape
with campaign_lock(sys.argv[1], sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def holder():
    """Another process that holds a device."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "GPU-1234", "20260101T000000Z-beef"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_campaign_is_told_the_holders_pid_and_run(holder):
    with pytest.raises(EvaluationError) as refused, campaign_lock("GPU-1234", "second"):
        pass
    assert f"process {holder.pid} with run 20260101T000000Z-beef" in str(refused.value)
    assert "wait for it" in str(refused.value)
    with campaign_lock("GPU-5678", "another device"), campaign_lock("cpu", "the CPU"):
        pass


def test_a_killed_holder_leaves_the_device_free(holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with campaign_lock("GPU-1234", "second"):
        pass


def test_a_campaign_frees_the_device_when_it_ends_or_fails():
    with pytest.raises(ZeroDivisionError), campaign_lock("cpu", "first"):
        raise ZeroDivisionError
    with campaign_lock("cpu", "second") as path:
        assert '"second"' in path.read_text()
        with pytest.raises(EvaluationError, match="run second"), campaign_lock("cpu", "third"):
            pass
        # A child started while the lock is held does not keep it: file descriptors close on exec.
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with campaign_lock("cpu", "fourth"):
        pass
    child.communicate()
    assert path.read_text() == ""


def test_a_folder_that_cannot_be_written_is_one_paragraph(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(EvaluationError, match="ROOFLANE_STATE_DIR"), campaign_lock("cpu", "run"):
        pass


def test_odd_device_names_stay_inside_the_folder(tmp_path):
    with campaign_lock("../MIG/one two", "run") as path:
        assert path.parent == tmp_path / "state"


def test_a_second_campaign_is_refused_before_anything_runs_or_is_written(tmp_path):
    shape = Shape("a", 2, 8, 16, 2, 16, 1)
    with campaign_lock("cpu", "the first"):
        with pytest.raises(EvaluationError, match="cpu is taken by process .* with run the first"):
            evaluate([shape], "dispatched", device="cpu", profile="cpu", processes=1, runs_dir=tmp_path / "runs")
        assert not (tmp_path / "runs").exists()
