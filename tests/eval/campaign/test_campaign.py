"""Whole runs on tiny shapes: what a dying worker costs, what an interruption keeps, what is left out and why."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from math import inf
from types import SimpleNamespace

import pytest

from rooflane.eval import EvaluationError, ExitCode, evaluate, resume
from rooflane.eval.campaign import session
from rooflane.eval.campaign.shape_work import ShapeWork
from rooflane.eval.campaign.team import ReferenceLost, Team
from rooflane.eval.check.cases import Case
from rooflane.eval.record.digest import DIGEST_FILE
from rooflane.eval.record.records import RECORDS_FILE, ArmId
from rooflane.eval.stats.run import open_run
from rooflane.eval.worker.protocol import Build, Call, Compare, Repeat
from rooflane.shapes import Shape

A = Shape("a", 2, 8, 16, 2, 16, 1)
B = Shape("b", 3, 8, 16, 2, 16, 1)
FAST = {"device": "cpu", "profile": "cpu", "controls": ("identity",), "budget_s": 0.02, "seed": 5}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Keep the workers' tiny operations on one thread: handing them to a second costs more than they do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def candidate(folder, name, body, head=""):
    """Write a candidate file whose forward has the given body, with `model`, `shape`, `x` and `mask` in reach."""
    path = folder / f"{name}.py"
    path.write_text(
        f"import os, sys, time, signal, torch\n{head}\n"
        "def build(model, shape, device):\n    def forward(x, mask=None):\n        "
        + body.replace("\n", "\n        ")
        + "\n    return forward\n"
    )
    return str(path)


def statuses(run):
    """Return the status of every row by process, shape and arm, copies and probes left out."""
    kept = ("baseline", "candidate", "control", "reference")
    return {record.key: record.status for record in run.records() if record.kind in kept}


def arms_of(*candidates):
    """Return the arms of a run with these candidates."""
    return ("eager", *candidates, "identity", *(f"copy of {name}" for name in candidates), "noop", "anchor")


@pytest.mark.slow
def test_every_row_is_written_with_its_measurement_and_a_torn_batch_is_measured_again(tmp_path, quiet_host):
    events = []
    mine = candidate(tmp_path, "mine", "return model(x, mask)")
    run = evaluate([A, B], mine, processes=2, runs_dir=tmp_path / "runs", on_event=events.append, **FAST)
    rows = run.records()
    assert {row.key for row in rows} == {(p, s, arm) for p in range(2) for s in "ab" for arm in arms_of(mine)}
    assert all(row.status == "ok" and len(row.timing.event_ns) == 4 for row in rows)
    assert all(len(row.timing.loop_ns) == 4 and min(row.timing.loop_ns) > 0 for row in rows)
    assert all(not row.integrity for row in rows), [row.integrity for row in rows]
    assert all(row.setup_s > 0 and row.environment["torch"] for row in rows)
    # Process 0 checks everything, the others the accuracy trials; each draws its own weights and inputs.
    full = {row.process: bool(row.verification.truth) for row in rows if row.arm == mine}
    assert full == {0: True, 1: False}
    assert len({row.seeds["weights"] for row in rows}) == 4
    assert (events[-1].done, events[-1].total) == (24, 24)
    assert run.summary().exit_code() is ExitCode.COMPLETE
    assert run.summary().headlines[0].geomean.count == 2

    path = run.folder / RECORDS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    (run.folder / DIGEST_FILE).unlink()  # as it is while a run is in progress
    path.write_bytes(b"".join(lines[:23]) + lines[23][:40])
    page = json.loads((run.folder / "run.json").read_text())
    page["seed"] = None
    (run.folder / "run.json").write_text(json.dumps(page))
    resume(run.folder)
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:18] == lines[:18], "a whole batch is not measured again"
    # The torn shape's arms were timed against an eager row that is lost: all six are measured again.
    assert len(again) == 23 + 1 + 6
    assert set(Counter(record.key for record in open_run(run.folder).records()).values()) == {1}


@pytest.mark.slow
def test_each_bad_candidate_gets_its_own_row_and_harms_no_other(tmp_path):
    bad = {
        "raises": ("raise ValueError('no luck')", "error"),
        "shape": ("return model(x, mask)[:, :-1]", "incorrect"),
        "nan": ("return model(x, mask) * float('nan')", "incorrect"),
        "memory": ("torch.empty(1 << 60)", "oom"),
        "floods": ("print('x' * 100000)\nreturn model(x, mask)", "ok"),
        "leaves": ("sys.exit(3)", "error"),
        "leaves quietly": ("sys.exit(0)", "error"),
        "interrupts": ("raise KeyboardInterrupt", "error"),
    }
    names = {name: candidate(tmp_path, name, body) for name, (body, _) in bad.items()}
    # What a candidate printed before it raised is what its author looks for; the build and first call are one request.
    speaks = "print('rows', tuple(x.shape))\nraise ValueError('said so')"
    speaks = candidate(tmp_path, "speaks", speaks, "print('loaded')")
    run = evaluate([A], [*names.values(), speaks], processes=1, runs_dir=tmp_path / "runs", **FAST)
    found = statuses(run)
    assert {name: found[0, "a", path] for name, path in names.items()} == {n: status for n, (_, status) in bad.items()}
    assert found[0, "a", "eager"] == found[0, "a", "identity"] == "ok"
    reasons = {record.arm: record.reason for record in run.records()}
    assert "said so" in reasons[speaks] and reasons[speaks].endswith("; it printed: loaded rows (2, 8, 16)")
    assert reasons[names["leaves quietly"]].startswith("the worker exited with status 0 at build of ")
    assert reasons[names["interrupts"]].endswith(" KeyboardInterrupt")
    assert "Traceback" not in reasons[names["interrupts"]] and "File" not in reasons[names["interrupts"]]
    summary = run.summary()
    assert summary.exit_code() is ExitCode.INCORRECT
    problems = "\n".join(summary.problems())
    for said in ("no luck", "(2, 7, 16), expected (2, 8, 16)", "not finite", "out of memory", "exited with status 3"):
        assert said in problems
    assert len(summary.problems()) == 8


@pytest.mark.slow
def test_a_killed_worker_costs_only_the_row_at_hand(tmp_path):
    mine = candidate(
        tmp_path, "mine", "if shape.id == 'b': os.kill(os.getpid(), signal.SIGKILL)\nreturn model(x, mask)"
    )
    run = evaluate([A, B], [mine], processes=2, runs_dir=tmp_path / "runs", **FAST)
    found = statuses(run)
    # With no candidate left to compare on b, the second process leaves its controls out.
    assert {key: status for key, status in found.items() if status != "ok"} == {
        (0, "b", mine): "error", (1, "b", mine): "error", (1, "b", "identity"): "skipped"
    }  # fmt: skip
    assert len(found) == 12
    copies = {record.key[:2] for record in run.records() if record.kind == "copy" and record.status == "ok"}
    assert copies == {(0, "a"), (1, "a")}
    (row,) = [row for row in run.records() if row.key == (0, "b", mine)]
    assert "SIGKILL" in row.reason
    assert "build" in row.reason


@pytest.mark.slow
def test_a_hanging_candidate_is_reported_while_it_hangs_ended_and_not_asked_again(tmp_path, monkeypatch):
    """The other candidate cannot be built: each process tries it, and none has anything to compare after the first.

    The run is interrupted between its processes and resumed: the row on disk tells the second process of the silence.
    """
    monkeypatch.setattr("rooflane.eval.campaign.launch.LONG_WAIT_S", 2.0)
    hangs = candidate(tmp_path, "hangs", "time.sleep(3600)")
    broken = candidate(tmp_path, "broken", "raise ValueError('no luck')")
    notes = []

    def note(event):
        if event.kind == "note":
            notes.append(event.text)
        if event.kind == "shape":
            raise KeyboardInterrupt

    run = evaluate([A], [hangs, broken], processes=2, runs_dir=tmp_path / "runs", arm_timeout_s=8, on_event=note,
                   **FAST)  # fmt: skip
    assert run.interrupted and {record.process for record in run.records()} == {0}
    run = resume(run.folder)
    assert notes == [f"build of {hangs}: no answer for 2 s; its worker is ended at 8 s"]
    rows = {record.key: record for record in run.records()}
    assert rows[0, "a", hangs].reason == f"the worker gave no answer for 8 s at build of {hangs} and was ended"
    assert [rows[process, "a", hangs].silent for process in range(2)] == [True, False]
    assert rows[1, "a", hangs].status == "error" and rows[1, "a", hangs].reason.startswith("not asked again")
    assert all("no luck" in rows[process, "a", broken].reason for process in range(2))
    assert {rows[0, "a", arm].status for arm in ("eager", "identity", "noop", "anchor")} == {"ok"}
    for arm in ("identity", "noop", "anchor"):
        assert rows[1, "a", arm].status == "skipped" and "no candidate was timed" in rows[1, "a", arm].reason
    assert set(rows) == {(process, "a", arm) for process in range(2) for arm in arms_of(hangs, broken)}


@pytest.mark.parametrize(
    ("eager_s", "left_s", "build", "call"),
    [
        (0.002, inf, 300, 60),  # what a compiler may take, and an ordinary request
        (2.0, inf, 300, 200),  # a hundred calls of eager
        (0.002, 100, 100, 60),  # never more than the run's budget leaves
        (0.002, -5, 30, 30),  # and a little when that is spent
        (inf, inf, inf, inf),  # eager does not fit: the worker's own limit stands
    ],
)
def test_a_candidates_time_for_an_answer_follows_eager_and_the_budget(monkeypatch, eager_s, left_s, build, call):
    monkeypatch.setattr(session, "monotonic", lambda: 1000.0)
    work = session.ShapeSession.__new__(session.ShapeSession)
    work.eager_s, work.context = eager_s, SimpleNamespace(deadline=1000.0 + left_s, setup_s={})
    arm = ArmId("mine", "candidate", "mine")
    assert work._limit_s("mine", Build(arm)) == pytest.approx(build)
    assert work._limit_s("mine", Repeat(arm, Case(1))) == pytest.approx(call)
    assert work._limit_s("mine", Call(arm, Case(1), "odd offset")) == pytest.approx(call)
    assert work._limit_s("mine", Call(arm, Case(1), "second model")) == pytest.approx(build)
    assert work._limit_s("reference", Repeat(arm, Case(1))) is None
    # A second model may take three times what the first one took, also when the time is spent.
    work.context.setup_s[arm] = 50.0
    assert work._limit_s("mine", Call(arm, Case(1), "second model")) == pytest.approx(max(build, 150))


@pytest.mark.parametrize(("calls", "skipped"), [([16.0, 2.0], False), ([14.0, 13.0], False), ([21.0, 15.5], True)])
def test_a_shape_is_skipped_by_measurement_only_when_two_eager_calls_are_too_long(monkeypatch, calls, skipped):
    """The limit of 5 s a call is allowed threefold, since a prediction may be too kind."""
    said, left = [], list(calls)
    work = ShapeWork.__new__(ShapeWork)
    work.team, work.todo = SimpleNamespace(spending=lambda what: nullcontext()), SimpleNamespace(oversize=False)
    work.settings = SimpleNamespace(max_call_s=5.0)
    monkeypatch.setattr(work, "begin_all", lambda: None, raising=False)
    monkeypatch.setattr(work, "hold_reference", lambda call: left.pop(0), raising=False)
    monkeypatch.setattr(work, "skip_all", said.append, raising=False)
    monkeypatch.setattr(work, "compare_arms", lambda eager: said.append(eager.ready), raising=False)
    work.run()
    assert left == [] and work.eager_s == min(calls)
    if skipped:
        assert "predicted within the limit" in said[0] and "at least 15.5 s, over 15 s" in said[0]
    else:
        assert said == [True]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    mine = candidate(tmp_path, "mine", "return model(x, mask)")

    def interrupt(event):
        if event.kind == "stage" and event.done >= 6:
            raise KeyboardInterrupt

    run = evaluate([A, B], [mine], processes=2, runs_dir=tmp_path / "runs", on_event=interrupt, **FAST)
    assert run.interrupted
    assert str(run.folder) in run.resume_hint()
    kept = (run.folder / RECORDS_FILE).read_bytes()
    assert kept.count(b"\n") == 6

    again = resume(run.folder)
    data = (run.folder / RECORDS_FILE).read_bytes()
    assert data.startswith(kept)
    assert data.count(b"\n") == 24
    assert set(Counter(record.key for record in again.records()).values()) == {1}
    assert not again.interrupted
    first, whole = run.meta.spent_s, again.meta.spent_s
    assert sum(first.values()) > 0 and all(whole[what] > seconds for what, seconds in first.items())
    assert 0 < again.meta.overhead_share < 1
    size = len(data)
    resume(run.folder)
    assert (run.folder / RECORDS_FILE).stat().st_size == size, "a complete run measures nothing more"


@pytest.mark.slow
def test_killing_the_parent_ends_its_worker_and_loses_nothing_written(tmp_path):
    # Its candidate says where it is in a file, which the sandbox would refuse.
    pids = tmp_path / "pids"
    mine = candidate(
        tmp_path, "mine",
        f"if shape.id == 'b' and not os.path.exists({str(pids)!r}):\n"
        f"    open({str(pids)!r}, 'w').write(str(os.getpid()))\n    time.sleep(3600)\nreturn model(x, mask)",
    )  # fmt: skip
    script = (
        "import sys\nfrom rooflane.eval import evaluate\nfrom rooflane.shapes import Shape\n"
        "shapes = [Shape('a', 2, 8, 16, 2, 16, 1), Shape('b', 3, 8, 16, 2, 16, 1)]\n"
        f"evaluate(shapes, [{mine!r}], processes=1, runs_dir={str(tmp_path / 'runs')!r}, sandbox=False, **{FAST!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 120
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    worker = int(pids.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(worker)

    (folder,) = (tmp_path / "runs").iterdir()
    kept = (folder / RECORDS_FILE).read_bytes() if (folder / RECORDS_FILE).exists() else b""
    run = resume(folder)
    data = (folder / RECORDS_FILE).read_bytes()
    assert data.startswith(kept)
    assert data.count(b"\n") == 12
    assert set(statuses(run).values()) == {"ok"}
    lost = bool(kept)  # what a killed part took is not known, unless it wrote no row
    assert (run.meta.overhead_share is None, run.meta.spent_s == {}) == (lost, lost)


@pytest.mark.slow
def test_what_does_not_fit_is_measured_against_the_chunked_reference(tmp_path, quiet_host):
    shape = Shape("o", 3, 512, 16, 2, 16, 1, causal=True)
    settings = FAST | {"memory_cap_bytes": 3_500_000}
    run = evaluate([shape], ["chunked"], processes=2, runs_dir=tmp_path / "runs", **settings)
    rows = {record.key: record for record in run.records()}
    assert rows[0, "o", "eager"].status == "infeasible"
    assert "13.4 MB" in rows[0, "o", "eager"].reason
    assert len(rows[0, "o", "chunked_reference"].timing.event_ns[0]) == 3
    assert len(rows[1, "o", "chunked_reference"].timing.event_ns[0]) == 1
    assert all(rows[process, "o", "chunked"].status == "ok" for process in range(2))
    summary = run.summary()
    assert summary.exit_code() is ExitCode.COMPLETE
    assert summary.row("o").cells["chunked"].speedup.count == 2
    assert summary.headlines[0].geomean is None


def test_which_shapes_a_run_leaves_out_does_not_follow_the_memory_that_is_free(tmp_path, monkeypatch):
    """A shape is too large for the machine, or it runs: on the day it does not fit, its row says so."""

    def stop(event):
        raise KeyboardInterrupt

    shape = Shape("wide", 4, 512, 256, 4, 256, 2)
    monkeypatch.setattr("rooflane.eval.record.environment.available_memory_bytes", lambda: 1)
    run = evaluate([A, shape], ["chunked"], runs_dir=tmp_path, on_event=stop, **FAST | {"max_call_s": 1e9})
    assert run.meta.not_run == {}
    monkeypatch.setattr("rooflane.eval.campaign.planning.machine_memory_bytes", lambda: 10_000_000)
    run = evaluate([A, shape], ["chunked"], runs_dir=tmp_path, on_event=stop, **FAST | {"max_call_s": 1e9})
    assert set(run.meta.not_run) == {"wide"} and "the machine has 10 MB" in run.meta.not_run["wide"]


@pytest.mark.slow
def test_a_spent_time_budget_lists_what_was_left_out(tmp_path):
    mine = candidate(tmp_path, "mine", "return model(x, mask)")
    run = evaluate([A, B], [mine], processes=2, runs_dir=tmp_path / "runs", time_budget_s=1e-6, **FAST)
    assert set(statuses(run).values()) == {"skipped"}
    assert all("time budget" in record.reason for record in run.records())
    assert run.summary().exit_code() is ExitCode.INCOMPLETE, "nothing was measured"
    assert "nothing was measured" in run.summary().problems()[0]


def test_what_is_predicted_too_slow_or_too_large_needs_no_worker(tmp_path):
    slow = Shape("slow", 64, 1024, 128, 4, 128, 4)
    huge = Shape("huge", 32, 100000, 1024, 16, 1024, 2)
    run = evaluate([slow, huge], ["dispatched"], processes=2, runs_dir=tmp_path, max_call_s=1e-3, **FAST)
    found = statuses(run)
    assert found[0, "slow", "eager"] == found[1, "slow", "identity"] == "skipped"
    assert found[0, "huge", "eager"] == "infeasible"
    assert found[0, "huge", "dispatched"] in ("skipped", "infeasible")
    reasons = {record.key: record.reason for record in run.records()}
    assert "over the limit of 0.001 s" in reasons[0, "slow", "eager"]
    assert "TB at its peak" in reasons[0, "huge", "eager"]
    summary = run.summary()
    assert (summary.missing, summary.exit_code()) == (0, ExitCode.INCOMPLETE)


def test_a_time_budget_leaves_out_the_slowest_shapes_by_prediction(tmp_path):
    shapes = [Shape(f"s{size}", size, 256, 128, 4, 128, 4) for size in (64, 1, 32, 8)]

    def stop(event):
        raise KeyboardInterrupt

    def skipped(budget):
        settings = FAST | {"max_call_s": 1e9, "time_budget_s": budget}
        run = evaluate(shapes, ["chunked"], processes=3, runs_dir=tmp_path, on_event=stop, **settings)
        return set(run.meta.not_run)

    # Neither the clock nor the memory that happens to be free has a say: asked again, the same shapes are left out.
    assert skipped(4.0) == skipped(4.0)
    assert skipped(1e9) == set()
    assert skipped(1e-9) == {"s64", "s1", "s32", "s8"}
    tightening = [skipped(2**power) for power in range(14, -4, -1)]
    first = next(found for found in tightening if found)
    assert first == {"s64"}, "the slowest goes first"
    assert all(before <= after for before, after in itertools.pairwise(tightening))


def test_under_a_time_budget_every_process_begins_with_the_quickest_shapes(tmp_path, monkeypatch):
    shapes = [Shape(f"s{size}", size, 64, 32, 4, 32, 1) for size in (64, 1, 32, 8)]
    orders = {}

    def note(self, process, todo):
        orders.setdefault(process, [item.shape["id"] for item in todo])
        self._add(self.pending.losses(process, ReferenceLost("not run here", None), todo, ""))

    monkeypatch.setattr("rooflane.eval.campaign.campaign.Campaign._run_team", note)
    evaluate(shapes, ["chunked"], processes=3, runs_dir=tmp_path / "short", time_budget_s=1e6, **FAST)
    assert list(orders.values()) == [["s1", "s8", "s32", "s64"]] * 3
    orders.clear()
    evaluate(shapes, ["chunked"], processes=8, runs_dir=tmp_path / "long", **FAST)
    assert len({tuple(order) for order in orders.values()}) > 1, "in chance order where nothing runs out"


def test_the_prediction_is_on_disk_before_anything_runs(tmp_path):
    seen = []

    def look(event):
        if event.kind == "run":
            (folder,) = tmp_path.iterdir()
            seen.append(open_run(folder).meta.prediction("slow").classification["regime"])

    evaluate([Shape("slow", 8, 1024, 128, 4, 128, 4)], ["chunked"], runs_dir=tmp_path, on_event=look, max_call_s=1e-6,
             **FAST)  # fmt: skip
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 3}, "rounds"),
        ({"processes": 0}, "processes"),
        ({"speed": 1}, "settings are: device"),
        ({"controls": ("nothing",)}, "no control is called 'nothing'"),
        ({"device": "tpu"}, "not one of auto, cpu, cuda"),
        ({"budget_s": float("inf")}, "budget_s"),
        ({"time_budget_s": float("nan")}, "time_budget_s"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"profile": "h200"}, "describes a cuda device"),
        ({"profile": "nonesuch"}, "nonesuch"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_before_anything_is_written(tmp_path, changes, said):
    with pytest.raises(EvaluationError, match=said):
        evaluate([A], ["chunked"], runs_dir=tmp_path / "runs", **(FAST | changes))
    assert not (tmp_path / "runs").exists()


def test_cuda_without_a_gpu_says_how_to_go_on(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EvaluationError, match="rooflane doctor"):
        evaluate([A], ["chunked"], runs_dir=tmp_path, device="cuda")


@pytest.mark.parametrize(("shapes", "candidates"), [([], ["chunked"]), ([A], []), ([A], ["chunked", "chunked"])])
def test_an_empty_or_doubled_request_is_refused(tmp_path, shapes, candidates):
    with pytest.raises(EvaluationError):
        evaluate(shapes, candidates, runs_dir=tmp_path, **FAST)


def test_the_parent_loads_neither_torch_nor_the_candidate(tmp_path):
    mine = candidate(tmp_path, "mine", "return model(x, mask)", head="raise SystemExit('imported')")
    script = (
        "import sys\nfrom rooflane.eval import evaluate\nfrom rooflane.shapes import Shape\n"
        f"run = evaluate([Shape('s', 64, 1024, 128, 4, 128, 4)], [{mine!r}], runs_dir={str(tmp_path / 'runs')!r}, "
        f"max_call_s=1e-6, **{FAST!r})\nrun.summary()\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def _alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one of two", "copy of mine, afresh"])
def test_a_reference_lost_while_it_judges_costs_the_arm_it_judged_and_no_other(tmp_path, quiet_host, monkeypatch, name):
    """The failure carries the arm itself: no name of one, whatever stands in it, can be mistaken for another."""
    real, killed = Team.ask, []
    wanted = "candidate" if name == "one of two" else "copy"

    def ask(self, worker, request, doing, limit_s=None):
        if isinstance(request, Compare) and doing.arm.kind == wanted and not killed:
            killed.append(doing.arm)
            os.kill(self._workers[worker].pid, signal.SIGKILL)
        return real(self, worker, request, doing, limit_s)

    monkeypatch.setattr(Team, "ask", ask)
    mine, other = (candidate(tmp_path, one, "return model(x, mask)") for one in (name, "other"))
    run = evaluate([A], [mine, other], processes=1, inputs="fixed", runs_dir=tmp_path / "runs", **FAST)
    rows = {row.arm: row for row in run.records()}
    copy = f"copy of {mine}"
    lost, kept = (mine, copy) if wanted == "candidate" else (copy, mine)
    assert [str(arm) for arm in killed] == [lost]
    assert rows[lost].status == "error" and "SIGKILL" in rows[lost].reason
    assert rows[lost].kind == wanted and rows[kept].status == ("skipped" if wanted == "candidate" else "ok")
    assert rows[other].status == rows["eager"].status == "ok"
    timing = rows[other].timing
    assert timing.inputs == "fixed" and timing.harness_ns and not timing.bare_ns
