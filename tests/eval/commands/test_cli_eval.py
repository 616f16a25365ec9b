"""`rooflane eval` from end to end on the CPU: measured, reported, compared, interrupted, resumed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rooflane.dispatch import kept_path
from rooflane.eval import Event, open_run
from rooflane.eval.commands import evaluate
from rooflane.eval.exit_codes import ExitCode

SHAPES = """id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal
a,2,8,16,2,32,1,true
b,1,4,16,2,16,1,false
"""
CANDIDATES = {
    "same": "def build(model, shape, device):\n    return model\n",
    "wrong": "def build(model, shape, device):\n    return lambda x, mask: model(x, mask) + 1\n",
    "raises": "def build(model, shape, device):\n    raise RuntimeError('no kernel today')\n",
}
# The least a run can do: two processes, so that there is an interval, and the null alone, so that nothing compiles.
LEAST = ["--device", "cpu", "--profile", "cpu", "--processes", "2", "--budget", "0.05", "--control", "identity"]

pytestmark = pytest.mark.slow


def rooflane(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rooflane.eval", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a shape file and the candidates."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "shapes.csv").write_text(SHAPES)
    for name, source in CANDIDATES.items():
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """A run of the candidate that is eager itself."""
    done = rooflane(folder, "eval", "shapes.csv", *LEAST, "--candidate", "same.py", "--out", "finished")
    assert done.returncode == ExitCode.COMPLETE, done.stderr
    # 2 processes x 2 shapes x 6 arms: the candidate, its copy, eager, the null, the no-op and the anchor.
    assert "[16/24]" in done.stderr and "report.md" in done.stderr
    assert "geometric mean" in done.stdout
    (run,) = (folder / "finished").iterdir()
    return run


def test_a_run_leaves_records_and_a_report(finished: Path):
    assert len(open_run(finished).records()) == 24
    assert (finished / "report.md").read_text().startswith("#")
    assert open_run(finished).sealed


def test_the_run_keeps_the_command_that_made_it(finished: Path):
    assert open_run(finished).meta.command.startswith("rooflane eval shapes.csv --device cpu")


def test_report_renews_the_readme_table_and_then_finds_it_up_to_date(folder: Path, finished: Path):
    readme = folder / "README.md"
    readme.write_text("before\n<!-- table:begin -->\nold\n<!-- table:end -->\nafter\n")
    first = rooflane(folder, "report", str(finished), "--readme", "README.md", "--markdown", "full.md")
    assert first.returncode == 0, first.stderr
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "same.py" in text
    assert (folder / "full.md").read_text() == (finished / "report.md").read_text()
    second = rooflane(folder, "report", str(finished), "--readme", "README.md")
    assert "up to date" in second.stdout and readme.read_text() == text


def test_report_prints_json(folder: Path, finished: Path):
    done = rooflane(folder, "report", str(finished), "--markdown", "beside.md", "--json")
    assert {row["shape"]["id"] for row in json.loads(done.stdout)["shapes"]} == {"a", "b"}


def test_compare_candidate_with_the_null(folder: Path, finished: Path):
    done = rooflane(folder, "compare", f"{finished}::same.py", f"{finished}::identity", "--json")
    assert done.returncode == 0, done.stderr
    assert [pair["shape"] for pair in json.loads(done.stdout)["pairs"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [("wrong.py", ExitCode.INCORRECT, "wrong.py is wrong"), ("raises.py", ExitCode.INCOMPLETE, "no kernel today")],
)
def test_a_bad_candidate_has_its_own_exit_status_and_paragraph(folder: Path, candidate: str, status: int, words: str):
    arguments = [*LEAST, "--processes", "1", "--shape", "a", "--candidate", candidate, "--out", f"runs-{candidate}"]
    done = rooflane(folder, "eval", "shapes.csv", *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_quick_cpu_run_measures_its_host_and_keeps_the_profile(folder: Path):
    arguments = ["--device", "cpu", "--quick", "--processes", "1", "--shape", "b", "--budget", "0.05"]
    arguments += ["--control", "none", "--candidate", "same.py", "--out", "probed", "--json"]
    done = rooflane(folder, "eval", "shapes.csv", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quick"] is True
    (run,) = (folder / "probed").iterdir()
    # What `auto` stands for from now on, in every command.
    assert kept_path().is_file()
    assert open_run(run).meta.profile["eager_dispatch"]["source"].startswith("rooflane probe")


def test_an_interrupted_run_is_kept_and_can_go_on(folder: Path, monkeypatch, capsys):
    from rooflane.eval import cli
    from rooflane.eval.campaign import campaign

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        patch.setattr(campaign.Campaign, "_run_team", interrupt)
        with pytest.raises(SystemExit) as end:
            cli.main(["eval", "shapes.csv", *LEAST, "--candidate", "same.py", "--out", "interrupted"])
    assert end.value.code == ExitCode.INTERRUPTED
    (run,) = (folder / "interrupted").iterdir()
    assert f"--resume {Path('interrupted') / run.name}" in capsys.readouterr().err
    assert not open_run(run).sealed
    done = rooflane(folder, "eval", "--resume", str(run))
    assert done.returncode == ExitCode.COMPLETE, done.stderr
    assert len(open_run(run).records()) == 24
    assert open_run(run).sealed


def test_a_terminal_gets_a_bar_with_the_shape_and_arm_at_hand(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        with evaluate.follow() as on_event:
            on_event(Event("stage", 1, 3, "s7", "sdpa", "time", 4, 9, "time sdpa"))
        terminal.flush()
    # One read returns what the terminal has passed on so far; once the other end is closed, the last one raises.
    text = b""
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    text = text.decode()
    assert "process 2/3  shape s7  sdpa  time" in text and "4/9" in text
