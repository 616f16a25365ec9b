"""Candidates for a problem: the user's file, or a path that every torch user has, built on the problem's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.worker.candidates import Candidate, Plan, check_source, load_attribute, one_line
from rooflane.shapes.problem import SHIPPED, SHIPPED_NAME, Problem

if TYPE_CHECKING:
    from torch import nn

    Forward = Callable[..., Any]

BUILT_IN = {
    "optimize": "rooflane.dispatch.optimize of the model, where it takes it",
    "half": "the model in float16: floating-point inputs are cast, outputs are cast back",
    "compile": "torch.compile of the model",
}
DEFAULT_NAMES = ("ModelNew", "build")
BY_STATE_DICT = "weights matched by state_dict"
BY_SEED = "weights matched by construction under one seed: the names in its state_dict differ from the problem's"
NO_WEIGHTS = "the problem has no weights"


class Unsupported(Exception):
    """A candidate that says it does not take the problem; the text is its reason."""


@dataclass(frozen=True)
class ProblemCandidate:
    """A parsed request: a built-in, one file for every problem, or a folder with a file for each problem."""

    text: str
    built_in: str = ""
    path: Path | None = None
    attribute: str = ""

    @property
    def uses_host_path(self) -> bool:
        """Whether it may call kernels through the C++ call path."""
        return self.built_in == "optimize"

    def file_for(self, problem: Problem) -> Path:
        """Return the candidate's file for a problem."""
        return self.path / f"{problem.id}.py" if self.path.is_dir() else self.path


def parse_problem_candidate(text: str) -> ProblemCandidate:
    """Parse a built-in's name, `path.py[:name]`, or a folder of files named like the problems.

    `shipped` is the folder of the shipped candidates. Raises `EvaluationError` for a missing file or another name.
    """
    if text in BUILT_IN:
        return ProblemCandidate(text, built_in=text)
    head, _, tail = text.partition(":")
    path = SHIPPED / "candidates" if head == SHIPPED_NAME else Path(head)
    if path.is_dir() and not tail:
        return ProblemCandidate(text, path=path.resolve())
    if head.endswith(".py"):
        if not path.is_file():
            raise EvaluationError(
                f"candidate {text!r}: there is no file {head}; give the path of a Python file that defines ModelNew or "
                "build(model, inputs), or a folder with a file for each problem"
            )
        check_source(text, path, (tail,) if tail else DEFAULT_NAMES)
        return ProblemCandidate(text, path=path.resolve(), attribute=tail)
    raise EvaluationError(
        f"candidate {text!r}: a candidate for a problem is {', '.join(BUILT_IN)}, the path of a .py file, or a folder "
        "with a file for each problem; families take shapes"
    )


def plan_problem_candidate(candidate: ProblemCandidate, problem: Problem) -> Plan:
    """Return what a candidate comes to on a problem; the user's file is read and not imported."""
    if candidate.path and candidate.path.is_dir():
        path = candidate.file_for(problem)
        if not path.is_file():
            return Plan(unsupported=f"the folder holds no {path.name}")
        try:
            check_source(candidate.text, path, DEFAULT_NAMES)
        except EvaluationError as error:
            return Plan(unsupported=str(error))
    return Plan()


def build_problem_candidate(
    candidate: ProblemCandidate,
    problem: Problem,
    model: nn.Module,
    inputs: tuple[Any, ...],
    construct: Callable[[Any], nn.Module],
    *,
    again: bool = False,
) -> tuple[Forward, nn.Module, str]:
    """Build a candidate on a model of the problem; return its forward, the module with its weights, and how they match.

    `construct` makes a class as the problem's own Model was made, on the same device and under the same seed. `again`
    takes a file as it was imported last. Raises `Unsupported` where the candidate does not take the problem.
    """
    if candidate.built_in:
        return *_BUILDERS[candidate.built_in](model, inputs), ""
    found = Candidate(candidate.text, path=candidate.file_for(problem), attribute=candidate.attribute)
    target = load_attribute(found, again=again, names=DEFAULT_NAMES)
    if not inspect.isclass(target):
        forward = target(model, inputs) if _takes_inputs(target) else target(model)
        if not callable(forward):
            raise TypeError(f"{target.__name__}(model, inputs) returned {type(forward).__name__}, not a forward")
        return forward, model, ""
    try:
        user = construct(target)
    except TypeError as error:
        raise TypeError(
            f"{target.__name__}(*get_init_inputs()) cannot be constructed ({one_line(error)}); give it the "
            "constructor of the problem's Model"
        ) from None
    return user, user, match_weights(user, model)


def match_weights(user: nn.Module, model: nn.Module) -> str:
    """Give a module the model's weights where the names and sizes agree; return how the weights match."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    held = {name: tensor.shape for name, tensor in user.state_dict().items()}
    if not wanted and not held:
        return NO_WEIGHTS
    if wanted != held:
        return BY_SEED
    user.load_state_dict(model.state_dict())
    return BY_STATE_DICT


def _takes_inputs(build: Callable[..., Any]) -> bool:
    """Return whether a build function takes example inputs beside the model."""
    try:
        inspect.signature(build).bind(None, None)
    except TypeError:
        return False
    return True


def _optimize(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Forward, nn.Module]:
    """Return optimize() of the model; a stack of layers is built for the example inputs, x and perhaps a mask."""
    import torch

    from rooflane.dispatch import ProfileError, RouteError, optimize
    from rooflane.dispatch.adapters.mapping import OptimizeError
    from rooflane.dispatch.optimize import takes_shape

    alone = 0 < len(inputs) < 3 and all(isinstance(part, torch.Tensor) for part in inputs)
    try:
        if alone and takes_shape(model):
            fast = optimize(model, inputs[0], mask=inputs[1] if len(inputs) > 1 else None)
        else:
            fast = optimize(model)
    except (OptimizeError, RouteError, ProfileError) as error:
        raise Unsupported(one_line(error, limit=1000)) from None
    return fast, model


def _half(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Forward, nn.Module]:
    """Return the model in float16 behind a forward that casts its inputs, and its outputs back."""
    import torch

    from rooflane.eval.worker.problem import cast_floats

    tensors = [part for part in inputs if isinstance(part, torch.Tensor) and part.is_floating_point()]
    weights = [part for part in model.parameters() if part.is_floating_point()]
    dtype = (weights or tensors or [torch.empty(0)])[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"the model is in {dtype} already")
    small = model.half()

    def forward(*given: Any) -> Any:
        return cast_floats(small(*cast_floats(given, torch.float16)), dtype)

    return forward, small


def _compile(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Forward, nn.Module]:
    import torch

    return torch.compile(model, dynamic=False), model


_BUILDERS: dict[str, Callable[[nn.Module, tuple[Any, ...]], tuple[Forward, nn.Module]]] = {
    "optimize": _optimize,
    "half": _half,
    "compile": _compile,
}
