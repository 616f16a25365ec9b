"""Stored rows without a measurement behind them, and verification with both of its sides in the test's process."""

from types import SimpleNamespace

import pytest
import torch

from rooflane.baseline import reference_numerics
from rooflane.dispatch import classify, load_profile
from rooflane.eval.campaign.launch import Buffer
from rooflane.eval.campaign.session import ArmJudge, ArmWorker
from rooflane.eval.campaign.team import unwrap
from rooflane.eval.check.gate import GateResult
from rooflane.eval.check.outputs import SharedBytes
from rooflane.eval.check.verify import verify
from rooflane.eval.record.records import ArmId, Prediction, Record, RunMeta, Timing, Verification
from rooflane.eval.record.settings import Settings
from rooflane.eval.stats.rounds import Contamination
from rooflane.eval.stats.run import create_run, open_run
from rooflane.eval.worker.arms import Arm
from rooflane.eval.worker.judge import Judge
from rooflane.eval.worker.subject import Subject, answer_to
from rooflane.shapes import Shape

CPU = torch.device("cpu")
PASSING_GATE = GateResult(passed=True, total=4, failed=0, max_abs=1e-3, max_rel=1e-2, use=0.25)


@pytest.fixture
def quiet_host(monkeypatch):
    """Keep every block of a run that is timed for real: how many a busy host spoils is no matter of the test's."""
    monkeypatch.setattr("rooflane.eval.stats.evidence.find_contamination", lambda rounds: Contamination())


@pytest.fixture
def tiny_shape():
    """A shape whose forward takes well under a millisecond."""
    return Shape("tiny", 3, 16, 16, 2, 24, 2, causal=True)


@pytest.fixture
def verify_here():
    """Return a function that verifies a forward and its weights against a reference, as an arm called "mine".

    `make` builds the same on another model, for the promises about a second one.
    """

    def check(forward, weights, reference, shape, device=CPU, make=None, **options) -> Verification:
        # The gate is made for the baseline as the evaluator runs it: with TF32 on a GPU.
        reference_numerics(torch.device(device))
        buffer = Buffer()
        try:
            subject = Subject(shape, device, load_profile("cpu"), None, reference, SharedBytes(buffer.descriptor))
            mine = ArmId("mine", "candidate", "mine")
            subject.adopt(Arm(mine, forward=forward, weights=weights, make=make))
            judge = Judge(reference, shape, device, [SharedBytes(buffer.descriptor)])
            handlers = subject.handlers() | judge.handlers()

            def ask(worker, request, what, arm):
                return unwrap(answer_to(handlers[type(request)], request))

            session = SimpleNamespace(ask=ask, team=SimpleNamespace(buffer=lambda worker: 0))
            sides = ArmWorker(session, mine), ArmJudge(session, mine)
            return verify(*sides, shape, device=device.type, **({"seed": 11} | options))
        finally:
            buffer.close()

    return check


@pytest.fixture
def make_meta():
    """Return a function that makes the page of a run over shapes."""

    def make(shapes, *, processes=6, candidates=("mine",), controls=("identity", "sdpa"), quick=False):
        profile = load_profile("cpu")
        return RunMeta(
            id="20260102T030405Z-abcd",
            started_at="2026-01-02T03:04:05+00:00",
            command="rooflane eval",
            rooflane_version="0.1.0",
            settings=Settings(processes=processes, quick=quick).on_device("cpu").model_dump(mode="json"),
            device="cpu",
            seed=7,
            shapes=[shape.as_dict() for shape in shapes],
            candidates=list(candidates),
            controls=list(controls),
            profile=profile.model_dump(mode="json"),
            price_per_hour=3.0,
            predictions=[
                Prediction(shape=shape.id, classification=classify(shape, profile).as_dict(), candidates={})
                for shape in shapes
            ],
        )

    return make


@pytest.fixture
def make_record():
    """Return a function that makes one row; `times` is one number a round, in ns, or None for no timing."""

    def make(shape, process, arm, times=(1000, 1000), *, status="ok", device_ns=(), **fields):
        kind = "baseline" if arm == "eager" else "control" if arm in ("identity", "sdpa") else "candidate"
        timing = None
        if times is not None:
            timing = Timing(
                clock="synthetic",
                event_ns=[[time] * 3 for time in times],
                device_ns=list(device_ns),
                warmups=1,
                repeats=3,
                shrunk=False,
                inputs="fresh",
                valid_tokens=shape.tokens,
            )
        verification = None if kind == "baseline" else Verification(status="ok", trials=5, gate=PASSING_GATE)
        values = {"kind": kind, "verification": verification, "environment": {"device": "cpu", "torch": "2.13.0"}}
        return Record(
            run="20260102T030405Z-abcd",
            process=process,
            shape=shape.as_dict(),
            arm=arm,
            status=status,
            timing=timing,
            **(values | fields),
        )

    return make


@pytest.fixture
def full_rows(make_record):
    """Return a function that makes every row of a run; `speed` maps an arm to its speedup over eager."""

    def make(meta, speed):
        rows = []
        for shape in meta.shape_list():
            for process in range(meta.settings["processes"]):
                eager = 1_000_000 + 10_000 * process
                for arm in ("eager", *meta.candidates, *meta.controls):
                    time = round(eager / speed.get(arm, 1.0))
                    rows.append(make_record(shape, process, arm, (time, time)))
        return rows

    return make


@pytest.fixture
def stored_run(tmp_path, make_meta, full_rows):
    """A whole run on disk over two shapes: the candidate 2x, the SDPA control 1.25x."""
    shapes = [Shape("a", 2, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)]
    meta = make_meta(shapes)
    run = create_run(tmp_path / "runs", meta)
    run.append(full_rows(meta, {"mine": 2.0, "sdpa": 1.25}))
    return run


@pytest.fixture(scope="session")
def recorded_runs(root):
    """Every run on record that has rows, by its folder under briefs/records; its files are read once a session."""
    folder, found = root / "briefs" / "records", {}
    for path in sorted(folder.rglob("run.json")):
        run = open_run(path.parent)
        run.records = lambda kept=run.records(): kept
        run.summary = lambda kept=run.summary(): kept
        records = run.records()
        if records:
            found[str(path.parent.relative_to(folder))] = run
    return found
