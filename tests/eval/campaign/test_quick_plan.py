"""A quick run on a fresh H200, played with the durations seen there and a clock of its own: it ends in five minutes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rooflane.eval import evaluate
from rooflane.eval.campaign import campaign, requests, session, shape_work
from rooflane.eval.campaign.planning import share_of_first
from rooflane.eval.campaign.shape_timing import LEAST_BUDGET_S, ShapeTiming
from rooflane.eval.check.gate import GateResult
from rooflane.eval.record.records import Timing, Verification
from rooflane.eval.record.settings import Settings
from rooflane.eval.worker import protocol
from rooflane.eval.worker.candidates import Plan

# Seconds on an H200 whose caches are empty.
IMPORTS, START, CALL_PATH, KERNELS, ALL_KERNELS, LATER_BUILD = 4.0, 8.0, 30.0, 5.0, 25.0, 0.2
COMPILE, COMPILE_AGAIN, WEIGHTS, FIRST_CALL = 25.0, 5.0, 0.1, 0.3
CHECKS, TRIALS, OTHER_CLOCKS = 3.0, 0.2, 0.3
WHOLE_CALL, WHOLE_REFERENCE, SHIPPED, PREFIX = 3.2, 86.0, 0.3, 0.1
PASSED = GateResult(passed=True, total=1, failed=0, max_abs=0.0, max_rel=0.0, use=0.0)


class Machine:
    """The clock, what has been compiled by then, and the workers' answers."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.call_path_at = self.kernels_at = None
        self.built: set[tuple[str, str]] = set()

    def monotonic(self) -> float:
        return self.now

    def start_host_build(self, candidates) -> None:
        self.call_path_at = self.now + CALL_PATH
        self.now += IMPORTS

    def start_kernels(self, meta) -> None:
        self.kernels_at = self.now + ALL_KERNELS

    def wait_for_builds(self) -> None:
        self.now = max(self.now, self.call_path_at or 0, self.kernels_at or 0)

    def build(self, shape, arm) -> float:
        if arm.kind == "control":
            if not arm.name.startswith("compiled"):
                return LATER_BUILD
            first, again = COMPILE, COMPILE_AGAIN
        else:
            self.now = max(self.now, self.call_path_at or self.now + CALL_PATH)
            self.call_path_at = self.now
            first, again = LATER_BUILD if self.now >= (self.kernels_at or 1e9) else KERNELS, LATER_BUILD
        known = (shape.id, arm.name) in self.built
        self.built.add((shape.id, arm.name))
        return again if known else first


class PlayedTeam:
    """Answers as a team does, after as long as it would take."""

    machine: Machine

    def __init__(self, *given) -> None:
        self.environment, self.uuid, self.shape = {"gpu": "played"}, None, None

    def start(self) -> None:
        self.machine.now += START

    def __contains__(self, name) -> bool:
        return True

    def ask_all(self, names, request, doing):
        self.shape = request.shape
        self.machine.now += WEIGHTS
        return {name: protocol.Begun(64) for name in names}

    def ask(self, name, request, doing, limit_s=None):
        seconds, answer = self.answer(request)
        self.machine.now += seconds
        return answer

    def answer(self, request):
        match request:
            case protocol.BeginShape():
                return WEIGHTS, protocol.Begun(64)
            case protocol.HoldReference():
                return FIRST_CALL, protocol.Held(FIRST_CALL)
            case protocol.Build():
                seconds = self.machine.build(self.shape, request.arm)
                return seconds, protocol.Built(Plan(family="played"), "ok", "", seconds)
            case protocol.CallWhole():
                return WHOLE_CALL, protocol.WholeCalled(WHOLE_CALL, None, self.shape.tokens)
            case protocol.ShipPart():
                return SHIPPED, SimpleNamespace()
            case protocol.CompareElement():
                whole = request.rows == self.shape.seq_len
                seconds = WHOLE_REFERENCE / self.shape.batch_size if whole else PREFIX
                return seconds, protocol.ElementCompared(PASSED, round(seconds * 1e9))
            case protocol.TimeWhole():
                ns = round(WHOLE_CALL * 1e9)
                return WHOLE_CALL, protocol.WholeTimed([ns], [ns], self.shape.tokens)
            case protocol.Inspect():
                return 0.05, protocol.Inspected([], [], None)
        return 0.0, protocol.Done()

    def spending(self, what):
        return nullcontext()

    def buffer(self, name):
        return 0

    def count(self):
        return 2

    def forged(self, name):
        return []

    def ensure(self, name):
        pass

    def end(self, name):
        pass

    def close(self):
        pass


class PlayedTiming(ShapeTiming):
    """Times nothing, for as long as the timing of the arms would take."""

    def run(self) -> None:
        work, clock = self.work, PlayedTeam.machine
        share = (work.deadline - clock.now) / len(self.rows)
        self.budget_s = max(LEAST_BUDGET_S, min(work.settings.budget_s, share))
        for row in self.rows.values():
            clock.now += self.budget_of(row)
            if not work.context.process and row.arm.kind in ("baseline", "candidate", "control"):
                clock.now += OTHER_CLOCKS
            calls = [1_000_000 if row.arm.kind != "candidate" else 25_000] * 3
            row.timing = Timing(
                clock="synthetic", event_ns=[calls] * 4, warmups=1, repeats=3, shrunk=True, inputs="fresh",
                valid_tokens=work.shape.tokens,
            )  # fmt: skip

    def findings(self, row):
        return []


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Return a function that plays a run on the published shapes; it returns the run, its events and its seconds."""

    def run(ahead=True, **settings):
        machine = PlayedTeam.machine = Machine()

        def verify(subject, judge, shape, *, level, **options):
            machine.now += CHECKS if level == "full" else TRIALS
            return Verification(status="ok", trials=1, gate=PASSED)

        for module in (campaign, session, shape_work):
            monkeypatch.setattr(module, "monotonic", machine.monotonic)
        monkeypatch.setattr(campaign, "Team", PlayedTeam)
        for name in ("start_host_build", "start_kernels", "wait_for_builds"):
            monkeypatch.setattr(campaign, name, getattr(machine, name) if ahead else lambda *given: None)
        monkeypatch.setattr(campaign, "host_build_pending", lambda: False)
        monkeypatch.setattr(campaign, "fork_server", lambda: None)
        monkeypatch.setattr(campaign, "resolve_device", lambda device: "cuda")
        monkeypatch.setattr(campaign, "device_key", lambda device: "played")
        monkeypatch.setattr(campaign, "campaign_lock", lambda *given: nullcontext())
        monkeypatch.setattr(shape_work, "verify", verify)
        monkeypatch.setattr(shape_work, "ShapeTiming", PlayedTiming)
        events = []
        shapes = campaign_shapes()
        found = evaluate(shapes, runs_dir=tmp_path, on_event=events.append, device="cuda", profile="h200", **settings)
        return found, events, machine.now - 1000.0

    return run


def campaign_shapes():
    from rooflane.eval.commands.output import find_shapes

    return find_shapes("published.csv")


def timed(run, arm):
    return {(row.process, row.shape_id) for row in run.records() if row.arm == arm and row.timing}


def test_every_shape_has_its_rows_in_all_processes_within_five_minutes(play):
    run, events, seconds = play(quick=True)
    assert seconds < 300
    small = {(process, str(shape)) for process in range(3) for shape in range(1, 14)}
    for arm in ("eager", "dispatched", "copy of dispatched", "identity"):
        assert timed(run, arm) >= small, arm
    big = {(process, "14") for process in range(3)}
    assert timed(run, "dispatched") >= big and timed(run, "chunked_reference") >= big
    summary = run.summary()
    assert summary.missing == 0 and summary.not_run == ()
    assert summary.headlines[0].shapes == 13 and summary.headlines[0].oversize == 1 and summary.headlines[0].geomean
    # The first row: the start of a team, and the call path, which was built meanwhile.
    first = next(event for event in events if event.kind == "shape")
    assert first.shape == "2" and first.elapsed_s <= 40
    # Never more left than the budget, and after a third of the run no more than a third beside the truth.
    rows = [event for event in events if event.left_s is not None]
    assert all(event.elapsed_s + event.left_s <= max(270, event.elapsed_s) for event in rows)


def test_what_a_quick_run_leaves_out_is_one_line_on_screen_and_in_the_report(play):
    run, events, _ = play(quick=True)
    (line,) = [event.text for event in events if event.kind == "note"]
    assert line.startswith("left out of this quick run: compiled, compiled_reduce_overhead (--control NAME")
    assert "0.25 s a shape" in line and "15 s" in line and "\n" not in line
    assert run.meta.left_out == line and run.meta.controls == ["identity", "sdpa"]
    notes = {row.process: row.verification.notes for row in run.records() if row.verification and row.shape_id == "14"}
    compared = int(notes[0][0].removeprefix("compared: ").split(" of 32")[0])
    assert 1 <= compared <= 15 / (WHOLE_REFERENCE / 32) and "the first 2048 rows compared of the other" in notes[0][2]
    assert notes[1][0].startswith("compared: 1 of 32")


def test_named_controls_are_timed_in_the_first_process_while_time_lasts_the_null_always(play):
    run, events, seconds = play(quick=True, controls=("identity", "sdpa", "compiled", "compiled_reduce_overhead"))
    assert not [event for event in events if event.kind == "note"] and not run.meta.left_out
    for arm in ("compiled", "compiled_reduce_overhead"):
        rows = [row for row in run.records() if row.arm == arm]
        assert {row.process for row in rows if row.timing} <= {0}
        late = [row for row in rows if row.status == "skipped"]
        assert late and all("time budget" in row.reason for row in late)
    assert len(timed(run, "identity")) == len(timed(run, "eager")) == 39
    assert run.summary().headlines[0].geomean
    assert seconds < 420, "two compilations of the first shape, whose cost nobody knew"


def test_without_the_plan_the_run_does_not_end_in_time(play):
    """What the plan saves: the run of before, with every control and the whole reference."""
    before = Settings(quick=True).model_dump(exclude_none=True) | {
        "quick": False, "processes": 3, "budget_s": 0.6, "controls": requests.CONTROL_NAMES, "profile": "h200",
    }  # fmt: skip
    before.pop("device")
    before.pop("profile")
    _, _, seconds = play(ahead=False, **before)
    assert seconds > 540, "it had not ended after nine minutes"


@pytest.mark.parametrize(
    ("left", "needs", "share"),
    [
        (100.0, [None, None, None, None], 25.0),
        (100.0, [None, None, 40.0], 30.0),  # what shape 14 needs is kept for it
        (100.0, [None, 120.0], 0.0),  # the fewest calls of the others
        (50.0, [40.0], 50.0),  # the last has what is left
        (10.0, [40.0], 40.0),
        (100.0, [40.0, None], 40.0),
        (float("inf"), [None, 40.0], float("inf")),
    ],
)
def test_shares(left, needs, share):
    assert share_of_first(left, needs) == share


def test_what_is_compiled_ahead_saves_a_minute(play):
    _, _, ahead = play(quick=True)
    _, events, seconds = play(ahead=False, quick=True)
    assert seconds > ahead + 60
    assert next(event for event in events if event.kind == "shape").elapsed_s > 40


def test_the_time_left_does_not_take_a_start_for_the_pace(play):
    """Without a budget: the half minute before the first row is a start and stands for each process once."""
    run, events, seconds = play(quick=False, processes=3, controls=("identity",), budget_s=0.25)
    shapes = [event for event in events if event.kind == "shape" and event.shape != "14" and event.left_s]
    # By the drawn order of shapes the largest estimate is 1.4 to 2.2 times the run.
    assert all(event.elapsed_s + event.left_s < 2.5 * seconds for event in shapes)
    assert not run.meta.left_out
