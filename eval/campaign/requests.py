"""What a campaign is asked to evaluate, seen from the parent: shapes, or problem files.

The two differ before anything is measured: in the names of candidates and controls, in what is expected of eager, and
in what the hardware allows at best. Everything after that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rooflane.dispatch import Profile, classify
from rooflane.dispatch.classify import BORDERLINE_MARGIN
from rooflane.eval.campaign.device import campaign_lock, device_key
from rooflane.eval.campaign.planning import predict
from rooflane.eval.campaign.team import Doing, ReferenceLost, Team
from rooflane.eval.check.integrity import physical_floor_ns
from rooflane.eval.check.verify import CallFailed
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import EAGER_ARM, MEASURED, REFERENCE, Prediction
from rooflane.eval.record.settings import Settings
from rooflane.eval.stats.figures import LAUNCH_SHARE
from rooflane.eval.worker.candidates import parse_candidate
from rooflane.eval.worker.problem_candidates import parse_problem_candidate, plan_problem_candidate
from rooflane.eval.worker.protocol import Described, DescribeProblem, Hello
from rooflane.shapes import Problem, Shape

# Those that need no compiler first: should the time run short, the dear ones are what is left out.
CONTROL_NAMES = ("identity", "sdpa", "compiled", "compiled_reduce_overhead")
# A problem's own attention cannot be exchanged.
PROBLEM_CONTROLS = tuple(name for name in CONTROL_NAMES if name != "sdpa")
# What a worker may take to read one problem.
DESCRIBE_S = 600.0

Request = Shape | Problem


class Requests(Protocol):
    """The requests of one campaign."""

    controls: tuple[str, ...]
    default_candidates: tuple[str, ...]

    def default_controls(self, settings: Settings) -> tuple[str, ...]:
        """Return the controls of a run that names none."""

    def parse(self, candidate: str) -> Any:
        """Parse a candidate's name; raises `EvaluationError`."""

    def describe(self, requests: Sequence[Request], hello: Hello, timeout_s: float) -> list[Request]:
        """Return the requests with everything that is found by running them once."""

    def predict(self, request: Request, profile: Profile, candidates: Sequence[Any], rules: object) -> Prediction:
        """Return what is expected of a request."""

    def floor_ns(self, request: Request, profile: Profile, tokens: float) -> tuple[float, str]:
        """Return the nanoseconds no forward can beat, and how well the rates behind it are known."""

    def peak_bytes(self, request: Request, profile: Profile) -> int:
        """Return the memory that eager takes at the least."""


class ShapeRequests:
    """Published transformer shapes: a ledger predicts them."""

    controls = CONTROL_NAMES
    default_candidates = ("dispatched",)
    parse = staticmethod(parse_candidate)
    predict = staticmethod(predict)
    floor_ns = staticmethod(physical_floor_ns)

    def default_controls(self, settings: Settings) -> tuple[str, ...]:
        """Return every control, or those that a quick run has time for."""
        return self.controls if settings.controls is None else settings.controls

    def describe(self, requests: Sequence[Shape], hello: Hello, timeout_s: float) -> list[Shape]:
        """Return the shapes: they say everything themselves."""
        return list(requests)

    def peak_bytes(self, request: Shape, profile: Profile) -> int:
        """Return the ledger's peak."""
        return classify(request, profile).peak_bytes


class ProblemRequests:
    """Problem files: each is run once in a worker, and its regime is that of this run."""

    controls = PROBLEM_CONTROLS
    default_candidates = ("optimize",)
    parse = staticmethod(parse_problem_candidate)

    def __init__(self) -> None:
        self._measured: dict[str, Described] = {}

    def default_controls(self, settings: Settings) -> tuple[str, ...]:
        """Return every control: problems are few, and what torch.compile brings is what their users ask."""
        return self.controls

    def describe(self, requests: Sequence[Problem], hello: Hello, timeout_s: float) -> list[Problem]:
        """Run each problem once, in one worker that ends afterwards: torch's FLOP counter takes seconds to import.

        Raises `EvaluationError` with one paragraph for a problem that cannot be evaluated.
        """
        team = Team((), hello, min(timeout_s, DESCRIBE_S))
        try:
            with campaign_lock(device_key(hello.device), "that reads problem files"):
                self._measured = {problem.id: _run_once(team, problem) for problem in requests}
        finally:
            team.close()
        return [self._measured[problem.id].problem for problem in requests]

    def predict(self, request: Problem, profile: Profile, candidates: Sequence[Any], rules: object) -> Prediction:
        """Return a problem's measured profile in the place of a prediction."""
        plans = {}
        for candidate in candidates:
            plan = plan_problem_candidate(candidate, request)
            plans[candidate.text] = {
                "family": "", "rule": "", "options": {}, "contract": "", "predicted_s": None, "peak_bytes": None,
                "unsupported": plan.unsupported,
            }  # fmt: skip
        found = measured_profile(self._measured[request.id], profile)
        return Prediction(shape=request.id, classification=found, candidates=plans)

    def floor_ns(self, request: Problem, profile: Profile, tokens: float) -> tuple[float, str]:
        """Return 0: a candidate may need none of the work that the reference does."""
        return 0.0, "assumed"

    def peak_bytes(self, request: Problem, profile: Profile) -> int:
        """Return the bytes of inputs, weights and outputs."""
        return request.bytes


def requests_of(requests: Sequence[Request]) -> Requests:
    """Return the kind of a campaign's requests; raises `EvaluationError` where there are both."""
    kinds = {type(request) for request in requests}
    if len(kinds) > 1:
        raise EvaluationError("a run evaluates shapes or problems, not both; start two runs")
    return ProblemRequests() if kinds == {Problem} else ShapeRequests()


def _run_once(team: Team, problem: Problem) -> Described:
    try:
        team.ensure(REFERENCE)
        return team.ask(REFERENCE, DescribeProblem(problem), Doing(f"reading {problem.id}", EAGER_ARM))
    except CallFailed as error:
        raise EvaluationError(str(error).removeprefix("ProblemError: ")) from None
    except ReferenceLost as lost:
        raise EvaluationError(f"problem {problem.file}: the worker that read it was lost: {lost}") from None


def measured_profile(found: Described, profile: Profile) -> dict[str, Any]:
    """Return a problem's regime and its evidence, under the names of a classification.

    Launch when a call lasts over 1.3 times what the device needs with the host kept ahead. Otherwise the larger of two
    lower bounds decides: the counted FLOPs at the matrix rate, and the bytes of inputs, weights and outputs at the copy
    rate.
    """
    problem, call_s = found.problem, found.call_ns / 1e9
    device_s = found.device_ns / 1e9 if found.device_ns else call_s
    compute_s = problem.flops / profile.matmul_flops(problem.dtype)
    bandwidth_s = problem.bytes / profile.copy_bytes_per_s
    sides = {"compute": compute_s, "bandwidth": bandwidth_s}
    heavier, lighter = sorted(sides, key=sides.get, reverse=True)
    share = call_s / device_s
    if share > LAUNCH_SHARE:
        regime, margin = "launch", share / LAUNCH_SHARE
    else:
        regime = heavier
        margin = sides[heavier] / sides[lighter] if sides[lighter] else BORDERLINE_MARGIN
        if found.device_ns:
            margin = min(margin, LAUNCH_SHARE / share)
    return {
        "basis": MEASURED,
        "shape": problem.as_dict(),
        "profile": profile.name,
        "regime": regime,
        "margin": margin,
        "borderline": margin < BORDERLINE_MARGIN,
        "flops": problem.flops,
        "bytes": problem.bytes,
        "launch_s": call_s,
        "device_s": device_s,
        "compute_s": compute_s,
        "bandwidth_s": bandwidth_s,
        "predicted_s": call_s,
        "peak_bytes": found.peak_bytes,
        "memory_bytes": profile.memory_bytes,
    }
