"""`rooflane submit` from end to end: real processes, every way a run can end, interruption, resumption, the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rooflane.eval import cli
from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.submit import open_submission, resume_submission, runs, submit, summarise_submission
from rooflane.eval.submit.launch import KEPT_BYTES
from rooflane.eval.submit.submission import ROWS_FILE
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

SHAPE = Shape("a", 2, 8, 16, 2, 16, 1, True)
OTHER = dataclasses.replace(SHAPE, id="b")
HUGE = Shape("14", 32, 100000, 1024, 16, 1024, 2, True)
SCRIPT = """
import os, signal, subprocess, sys, time
class BaselineTransformer: pass
class UserOptimizedTransformer(BaselineTransformer): pass
def main():
    text = open({output!r}).read()
{body}
if __name__ == "__main__":
    raise SystemExit(main())
"""
GOOD = "print(text); return 0"


@pytest.fixture
def organiser(tmp_path, root) -> Callable[[str], Path]:
    """Return a function that writes a script with the contract's names and the body of `main` given."""

    def write(body: str = GOOD) -> Path:
        path = tmp_path / "organiser.py"
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        path.write_text(SCRIPT.format(output=str(root / "tests" / "standin" / "output.txt"), body=indented))
        return path

    return write


@pytest.fixture
def mine(tmp_path) -> str:
    """A candidate that loads no torch, so that a run takes half a second."""
    path = tmp_path / "mine.py"
    path.write_text("class UserOptimizedTransformer:\n    name = 'mine'\n")
    return str(path)


@pytest.fixture
def run(tmp_path, organiser, mine):
    """Return a function that submits to a script with a given main; the submission."""

    def submit_to(body: str = GOOD, shapes=(SHAPE,), **options):
        options = {"device": "cpu", "runs_dir": tmp_path / "runs", "time_limit_s": 60.0, **options}
        return submit(organiser(body), list(shapes), mine, **options)

    return submit_to


def test_a_good_run_becomes_a_row_with_its_figures_and_raw_text(run, root):
    submission = run("print(text); print('[warning] aside', file=sys.stderr); return 0")
    (row,) = submission.rows()
    assert (row.outcome, row.exit_status, row.figures.speedup) == ("passed", 0, 2.0)
    assert row.stdout.strip() == (root / "tests" / "standin" / "output.txt").read_text().strip()
    assert "aside" in row.stderr
    summary = summarise_submission(submission)
    assert summary.exit_code() == ExitCode.COMPLETE and summary.geomean.centre == pytest.approx(2.0)


def test_our_class_stands_in_the_place_and_the_flags_arrive(run):
    body = "print(UserOptimizedTransformer.name, sys.argv[1:], __name__)\nprint(text); return 0"
    (row,) = run(body, organiser_args="--repeats 3").rows()
    assert row.stdout.startswith("mine ['--batch-size', '2', '--seq-len', '8', '--d-model', '16', '--heads', '2'")
    assert "'--causal'" in row.stdout and "'--benchmark-rounds', '4', '--repeats', '3'" in row.stdout
    assert row.arguments[-2:] == ["--repeats", "3"]


FAIL = "print(text.replace('PASS', 'FAIL').replace('failed=0/', 'failed=1/').replace('failed=1/512', 'failed=2/512')"
ENDS = [
    (FAIL + ".split('=== Perf')[0]); return 2", "failed", "2 of 512 elements outside the tolerance", 20),
    (FAIL + "); return 2", "failed", "outside the tolerance", 20),  # timed all the same
    ("print('usage: organiser.py [-h]\\norganiser.py: error: no such flag', file=sys.stderr); return 2", "usage",
     "refused its flags: no such flag", 22),
    ("raise ValueError('layers must be > 0')", "error", "the script raised ValueError: layers", 22),
    ("raise RuntimeError('CUDA out of memory. Tried to allocate 20 GiB')", "oom", "its baseline runs first", 22),
    ("os.kill(os.getpid(), signal.SIGKILL)", "error", "SIGKILL", 22),
    ("print(text.replace('2.000x', '3.000x')); return 0", "unreadable", "is not the baseline's", 22),
    ("return 0", "unreadable", "configuration is missing", 22),
    (FAIL + ".split('=== Perf')[0]); return 0", "unreadable", "no performance section|contradicts it", 22),
    ("print('x' * 1_000_000); print(text); return 0", "unreadable", "far more was printed", 22),
]  # fmt: skip


@pytest.mark.parametrize(("body", "outcome", "words", "status"), ENDS, ids=[str(i) for i in range(len(ENDS))])
def test_every_end_has_its_outcome_and_its_reason(run, body, outcome, words, status):
    submission = run(body)
    (row,) = submission.rows()
    assert row.outcome == outcome, row
    assert any(part in row.reason for part in words.split("|")), row.reason
    assert len(row.stdout) <= KEPT_BYTES
    assert summarise_submission(submission).exit_code() == status


def test_a_run_over_its_time_is_ended_with_what_it_started(run, tmp_path):
    # The script starts a process of its own; both must be gone.
    body = f"child = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    start = time.monotonic()
    (row,) = run(body + "time.sleep(600)", time_limit_s=3.0).rows()
    assert time.monotonic() - start < 30
    assert row.outcome == "timeout" and "time limit of 3 s" in row.reason and row.exit_status is None
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and _state(child) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or _state(child) == "Z"


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_failure_costs_its_own_row_and_takes_the_mean_away(run):
    body = "if '--layers' in sys.argv and sys.argv[2] == '3': raise KeyError('x')\nprint(text); return 0"
    submission = run(body, shapes=[dataclasses.replace(OTHER, batch_size=3), SHAPE])
    assert [row.outcome for row in submission.rows()] == ["error", "passed"]
    summary = summarise_submission(submission)
    assert summary.geomean is None and "shape b" in summary.why


def test_processes_repeat_every_shape_for_a_spread(run):
    submission = run(shapes=[SHAPE, OTHER], processes=2)
    assert [row.key for row in submission.rows()] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [row.speedup for row in summarise_submission(submission).rows] == [(2.0, 2.0)] * 2


def test_a_script_that_changes_during_the_run_is_refused_and_its_row_not_kept(run, tmp_path):
    with pytest.raises(EvaluationError, match="changed during the run"):
        run("print(text); open(sys.argv[0], 'a').write('# edited'); return 0")
    (folder,) = (tmp_path / "runs").iterdir()
    assert open_submission(folder).rows() == []


def test_an_unsupported_family_is_reported_and_not_run(organiser, tmp_path):
    submission = submit(organiser(), [SHAPE], "gemm_fp16", device="cpu", runs_dir=tmp_path / "runs")
    (row,) = submission.rows()
    assert row.outcome == "unsupported" and "CPU" in row.reason and row.wall_s == 0


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(run, monkeypatch):
    real, calls = runs.run_once, []

    def interrupt(job, limit):
        calls.append(job.shape["id"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(job, limit)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "run_once", interrupt)
        submission = run(shapes=[SHAPE, OTHER])
    assert submission.interrupted and [row.shape for row in submission.rows()] == ["a"]
    assert f"--resume {submission.folder}" in submission.resume_hint()
    before = (submission.folder / ROWS_FILE).read_bytes()
    # A line torn off by a crash costs itself only.
    (submission.folder / ROWS_FILE).write_bytes(before + before[:40])
    resumed = resume_submission(submission.folder)
    assert [row.shape for row in resumed.rows()] == ["a", "b"] and not resumed.interrupted
    assert (submission.folder / ROWS_FILE).read_bytes().startswith(before)


@pytest.mark.parametrize("which", ["organiser.py", "mine.py"])
def test_resume_refuses_another_script_or_candidate(run, tmp_path, which):
    submission = run()
    rows = submission.folder / ROWS_FILE
    (tmp_path / which).write_text((tmp_path / which).read_text() + "\n# edited\n")
    # A whole submission needs neither; one with a run to make needs both as they were.
    assert len(resume_submission(submission.folder).rows()) == 1
    rows.write_bytes(b"")
    with pytest.raises(EvaluationError, match="began"):
        resume_submission(submission.folder)


@pytest.mark.slow
def test_memory_that_runs_out_as_predicted_is_no_failure(root, tmp_path, monkeypatch):
    # The real allocation of the published shape 14, in a process that may take 6 GB: 13 GB of input cannot be made.
    monkeypatch.setattr(runs, "available_memory_bytes", lambda: 6_000_000_000)
    path = tmp_path / "plain.py"
    path.write_text("def build(model, shape, device):\n    return model\n")
    organiser = root / "tests" / "standin" / "benchmark.py"
    submission = submit(organiser, [HUGE], str(path), device="cpu", runs_dir=tmp_path / "runs")
    (row,) = submission.rows()
    assert row.outcome == "oom" and row.expected, row
    assert "as predicted" in row.reason and "can't allocate memory" in row.reason
    assert row.environment["torch"]
    summary = summarise_submission(submission)
    assert summary.exit_code() == ExitCode.COMPLETE and summary.geomean is None


def test_memory_the_candidate_runs_out_of_is_its_failure_whatever_was_predicted(organiser, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class UserOptimizedTransformer:\n    def run():\n        raise MemoryError('too wide')\n")
    body = "UserOptimizedTransformer.run()"
    submission = submit(organiser(body), [HUGE], str(path), device="cpu", runs_dir=tmp_path / "runs")
    (row,) = submission.rows()
    assert row.outcome == "oom" and not row.expected and row.reason.startswith("the candidate ran out of memory")
    assert summarise_submission(submission).exit_code() == ExitCode.INCOMPLETE


@pytest.fixture
def rooflane(tmp_path, monkeypatch, capsys):
    """Return a function that runs one command in this process: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


HEADER = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"


def test_the_command_prints_a_table_a_note_and_its_folder(rooflane, organiser, mine, tmp_path):
    (tmp_path / "s.csv").write_text(HEADER + "a,2,8,16,2,16,1,true\n")
    status, out, err = rooflane(
        "submit", "s.csv", "--organiser", organiser(), "--candidate", mine, "--device", "cpu", "--processes", "2"
    )
    assert status == 0, err
    assert "2x (2-2)" in out and "geometric mean 2.00x [2.00, 2.00] over 1 shape, 2 processes" in out
    assert "is not a file this version knows" in err and "[2/2] process 2  shape a  passed: 0.4 ms, 2x" in err
    status, out, err = rooflane("submit", "--resume", next((tmp_path / "runs").iterdir()), "--json")
    document = json.loads(out)
    assert status == 0 and document["shapes"][0]["optimized_ms"] == [0.4, 0.4] and document["missing"] == 0


WRONG = [
    (["submit"], "name the organiser's script"),
    (["submit", "--organiser", "nowhere.py"], "there is no such file"),
    (["submit", "--organiser", "mine.py"], "is not the organiser's benchmark"),
    (["submit", "none.csv", "--organiser", "organiser.py"], "no such shape file"),
    (["submit", "--organiser", "organiser.py", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES=1"),
    (["submit", "--organiser", "organiser.py", "--candidate", "warp"], "no family is called"),
    (["submit", "--organiser", "organiser.py", "--organiser-args", "--batch-size 3"], "column batch_size"),
    (["submit", "--organiser", "organiser.py", "--organiser-args", "--benchmark-rounds 3"], "an odd number"),
    (["submit", "--organiser", "organiser.py", "--device", "cpu", "--profile", "h200"], "describes a cuda device"),
    (["submit", "--organiser", "organiser.py", "--shape", "99"], "holds no shape"),
    (["submit", "--organiser", "organiser.py", "--time-limit", "0"], "time limit above 0"),
    (["submit", "--resume", "runs"], "not a submission"),
    (["submit", "--resume", "runs", "--processes", "3"], "leave out: processes"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_uses_give_one_paragraph(rooflane, organiser, mine, arguments, words):
    organiser()
    status, _, err = rooflane(*arguments)
    flat = " ".join(err.replace("│", " ").split())
    assert status == ExitCode.USAGE and words in flat and "Traceback" not in err


@pytest.mark.slow
def test_the_readmes_command_with_the_stand_in(root, tmp_path):
    (command,) = re.findall(r"^rooflane submit .*$", (root / "README.md").read_text(), re.MULTILINE)
    script = command.split()[-1]
    (tmp_path / script).write_text((root / "tests" / "standin" / "benchmark.py").read_text())
    # One published shape and few calls; the command as it stands runs all of them.
    words = [sys.executable, "-m", "rooflane.eval", *command.split()[1:], "--device", "cpu", "--shape", "3", "--json"]
    words += ["--organiser-args", "--repeats 2 --warmup 1 --accuracy-trials 2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (shape,) = document["shapes"]
    assert shape["outcome"] == "passed" and shape["family"] == "sdpa_flash" and 0 < shape["max_abs"] < 2e-3
    assert document["environment"]["torch"] and document["meta"]["known"] == ""
