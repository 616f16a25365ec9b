"""`rooflane eval` from end to end on the CPU: measured, reported, compared, interrupted, resumed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from rooflane.dispatch import kept_path
from rooflane.eval import Event, cli, open_run
from rooflane.eval.commands import evaluate
from rooflane.eval.exit_codes import ExitCode
from rooflane.shapes import Shape

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


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command in this process: torch is loaded once for all of them."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        return subprocess.CompletedProcess(arguments, end.value.code or 0, *capsys.readouterr())

    return run


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
    (run,) = (folder / "finished").iterdir()
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return run


def test_a_run_leaves_records_and_a_report(finished: Path):
    assert len(open_run(finished).records()) == 24
    assert (finished / "report.md").read_text().startswith("#")
    assert open_run(finished).sealed


def test_piped_progress_is_a_line_a_shape_and_then_a_line_a_process(folder: Path, finished: Path):
    lines = (folder / "stderr").read_text().splitlines()
    assert lines[0] == f"run {finished.relative_to(folder)}"
    time = r"[\d.]+ ms"
    for line, place in zip(lines[1:3], ("1/2", "2/2"), strict=True):
        found = rf"\[{place}\] shape (a 2x8x16|b 1x4x16): same.py {time}, eager {time}, [\d.]+x "
        found += r"\(process 1 of 2, about \d+ s left\)"
        assert re.fullmatch(found, line), line
    assert re.fullmatch(r"Process 2 of 2, about \d+ s left", lines[3])
    assert lines[-3] == f"report: {finished.relative_to(folder)}/report.md"
    # Two shapes make these; a run of 14 shapes and 3 processes prints 13 more of either kind and one process more.
    progress, table = len(lines), len((folder / "stdout").read_text().splitlines())
    assert progress + 12 + 1 + table + 12 <= 60
    said = (folder / "stdout").read_text()
    # On a busy machine a disturbed block leaves no interval, and the line says "no verdict".
    line = r"^same.py: [\d.]+x (faster than|slower than|the speed of) eager( \[|, )"
    assert re.search(line, said, re.MULTILINE), said


def test_the_next_commands_of_a_run_work(call, folder: Path, finished: Path):
    first, second = (folder / "stderr").read_text().splitlines()[-2:]
    done = subprocess.run(shlex.split(first.removeprefix("next: ")), cwd=folder, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    program = f"{shlex.quote(sys.executable)} -m rooflane.eval "
    assert second.strip().startswith(program), "the program of the first line, which was called above"
    done = call(*shlex.split(second.strip().removeprefix(program)))
    assert done.returncode == 0, done.stderr
    assert (folder / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_program_is_spelled_as_it_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for place in (".venv/bin", "elsewhere"):
        script = tmp_path / place / "rooflane"
        script.parent.mkdir(parents=True)
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/rooflane"), "eval"])
    monkeypatch.setenv("PATH", "/nonexistent")
    assert evaluate.spelled() == ".venv/bin/rooflane", "not on PATH: the path from here"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv/bin"))
    assert evaluate.spelled() == "rooflane"
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert evaluate.spelled() == ".venv/bin/rooflane", "another rooflane is on PATH"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "rooflane/eval/__main__.py")])
    assert evaluate.spelled().endswith("-m rooflane.eval")


def test_the_run_keeps_the_command_that_made_it(finished: Path):
    assert open_run(finished).meta.command.startswith("rooflane eval shapes.csv --device cpu")


def test_report_renews_the_readme_table_and_then_finds_it_up_to_date(call, folder: Path, finished: Path):
    readme = folder / "README.md"
    readme.write_text("before\n<!-- table:begin -->\nold\n<!-- table:end -->\nafter\n")
    first = call("report", str(finished), "--readme", "README.md", "--markdown", "full.md")
    assert first.returncode == 0, first.stderr
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "same.py" in text
    assert (folder / "full.md").read_text() == (finished / "report.md").read_text()
    second = call("report", str(finished), "--readme", "README.md")
    assert "up to date" in second.stdout and readme.read_text() == text


def test_report_prints_json(call, finished: Path):
    done = call("report", str(finished), "--markdown", "beside.md", "--json")
    assert {row["shape"]["id"] for row in json.loads(done.stdout)["shapes"]} == {"a", "b"}


def test_compare_candidate_with_the_null(call, finished: Path):
    done = call("compare", f"{finished}::same.py", f"{finished}::identity", "--json")
    assert done.returncode == 0, done.stderr
    assert [pair["shape"] for pair in json.loads(done.stdout)["pairs"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [("wrong.py", ExitCode.INCORRECT, "wrong.py is wrong"), ("raises.py", ExitCode.INCOMPLETE, "no kernel today")],
)
def test_a_bad_candidate_has_its_own_exit_status_and_paragraph(call, candidate: str, status: int, words: str):
    arguments = [*LEAST, "--processes", "1", "--shape", "a", "--candidate", candidate, "--out", f"runs-{candidate}"]
    done = call("eval", "shapes.csv", *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_quick_cpu_run_measures_its_host_and_keeps_the_profile(call, folder: Path):
    arguments = ["--device", "cpu", "--quick", "--processes", "1", "--shape", "b", "--budget", "0.05"]
    arguments += ["--control", "none", "--candidate", "same.py", "--out", "probed", "--json"]
    done = call("eval", "shapes.csv", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quick"] is True
    (run,) = (folder / "probed").iterdir()
    # What `auto` stands for from now on, in every command.
    assert kept_path().is_file()
    assert open_run(run).meta.profile["eager_dispatch"]["source"].startswith("rooflane probe")


def test_an_interrupted_run_is_kept_and_can_go_on(call, folder: Path, monkeypatch):
    from rooflane.eval.campaign import campaign

    def interrupt(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(campaign.Campaign, "_run_team", interrupt)
        done = call("eval", "shapes.csv", *LEAST, "--candidate", "same.py", "--out", "interrupted")
    assert done.returncode == ExitCode.INTERRUPTED
    (run,) = (folder / "interrupted").iterdir()
    assert f"--resume {Path('interrupted') / run.name}" in done.stderr
    assert not open_run(run).sealed
    done = call("eval", "--resume", str(run))
    assert done.returncode == ExitCode.COMPLETE, done.stderr
    assert len(open_run(run).records()) == 24
    assert open_run(run).sealed


def test_an_80_column_terminal_gets_a_bar_one_skip_line_and_a_table_without_split_cells(folder: Path):
    shapes = folder / "with_skips.csv"
    shapes.write_text(SHAPES + "slow,64,512,256,2,256,4,false\nslower,64,1024,256,2,256,4,false\n")
    command = [sys.executable, "-m", "rooflane.eval", "eval", str(shapes), *LEAST, "--candidate", "same.py"]
    command += ["--out", "terminal", "--max-call-s", "0.05", "--processes", "1"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"}
    )
    os.close(theirs)
    text = b""
    # One read returns what the terminal has passed on so far; once the other end is closed, the last one raises.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    assert process.wait(timeout=60) == ExitCode.COMPLETE, text.decode()
    # What a cursor movement or a colour leaves is the text alone; the bar redraws its line after a carriage return.
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode()))
    bars = [line for line in lines if line.startswith("process ") and "━" in line]
    assert any("shape a" in line and "same.py" in line for line in bars)
    assert any(re.search(r"\d+ s, about \d+ s left", line) for line in bars)
    assert all(len(line) <= 80 for line in bars), "the bar stays on one line"
    skips = [line for line in lines if line.startswith("not run on this device")]
    assert len(skips) == 1 and "shapes slow, slower" in " ".join(lines)
    (first,) = [place for place, line in enumerate(lines) if re.match(r" *─{20}", line)]
    *rows, after = lines[first + 1 : first + 4]
    assert [row.split()[0] for row in rows] == ["a", "b"] and not after.startswith(" " * 3), "no cell is split"
    assert all(len(line) <= 80 for line in lines[first - 1 : first + 3])


def test_lines_of_a_failure_are_cut_and_a_resumed_run_counts_from_its_own_first_process(capsys):
    shapes = [Shape(name, 2, 8, 16, 2, 32, 1) for name in ("s1", "s2", "too_large")]
    show = evaluate.Lines(shapes)
    show(Event("stage", 1, 3, "s1", "sdpa", "time", 4, 9, "time sdpa", 5.0, None, 2))
    show(Event("shape", 1, 3, "s1", "", "", 4, 9, "mine error: " + "x" * 5000, 5.0, 240.0, 2))
    show(Event("shape", 1, 3, "s2", "", "", 5, 9, "mine 1.00 ms", 6.0, 59.0, 2))
    show(Event("shape", 2, 3, "s1", "", "", 6, 9, "mine 1.00 ms", 7.0, 7400.0, 2))
    show(Event("shape", 2, 3, "s2", "", "", 9, 9, "mine 1.00 ms", 8.0, 0.0, 2))
    one, two, three = capsys.readouterr().err.splitlines()
    assert one.startswith("[1/2] shape s1 2x8x16: mine error: xxx") and len(one) < 200
    assert one.endswith("(process 2 of 3, about 4 min left)")
    assert two == "[2/2] shape s2 2x8x16: mine 1.00 ms (process 2 of 3, about 59 s left)"
    assert three == "Process 3 of 3, about 2 h 03 min left"
