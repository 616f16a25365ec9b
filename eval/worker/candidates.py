"""Candidates: what is evaluated, from its name on the command line to a built forward."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflane.dispatch import RouteError, load_rules, refusal, route
from rooflane.eval.exit_codes import EvaluationError
from rooflane.families import FamilyError, get_family, load_families
from rooflane.families.spec import option_fault
from rooflane.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rooflane.dispatch import Profile

    Forward = Callable[[Tensor, Tensor | None], Tensor]


DISPATCHED = "dispatched"
DEFAULT_NAMES = ("build", "UserOptimizedTransformer")


class NoLoadableWeights(Exception):
    """A candidate whose module does not take the baseline's weights; the text is one line on how."""

    def __str__(self) -> str:
        """Return what is wrong and how to mend it."""
        return (
            f"it holds no loadable weights ({super().__str__()}); keep every weight of the baseline in the module "
            "under its own name and shape, as a parameter or a buffer, or pack it again in load_state_dict"
        )


@dataclass(frozen=True)
class Candidate:
    """A parsed request: the routed table, one family with options, or a file of the user's."""

    text: str
    family: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    attribute: str = ""

    @property
    def uses_host_path(self) -> bool:
        """Whether it may call kernels through the C++ call path: a family that torch does not compile."""
        return not self.path and not (self.family and get_family(self.family).compiles)


@dataclass(frozen=True)
class Plan:
    """What a candidate comes to on one shape: family, rule and options, or the reason why it cannot run."""

    # Read from another process: no field may be missing, unknown or of another type.
    __pydantic_config__ = {"strict": True, "extra": "forbid"}

    family: str = ""
    rule: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    contract: str = ""
    predicted_s: float | None = None
    peak_bytes: int | None = None
    unsupported: str | None = None


def parse_candidate(text: str) -> Candidate:
    """Parse `dispatched`, `family`, `family:key=value,...` or `path.py[:name]`.

    Raises `EvaluationError` for a missing file, an unknown family or an option the family does not take.
    """
    if text == DISPATCHED:
        return Candidate(text)
    head, _, tail = text.partition(":")
    if head.endswith(".py"):
        path = Path(head)
        if not path.is_file():
            raise EvaluationError(
                f"candidate {text!r}: there is no file {head}; give the path of a Python file that defines "
                "build(model, shape, device) or a class UserOptimizedTransformer(config)"
            )
        check_source(text, path, (tail,) if tail else DEFAULT_NAMES)
        return Candidate(text, path=path.resolve(), attribute=tail)
    try:
        family = get_family(head)
    except FamilyError as error:
        raise EvaluationError(
            f"candidate {text!r}: {error}; a candidate is {DISPATCHED}, a family, or the path of a .py file"
        ) from None
    options = dict(_option(text, part) for part in tail.split(",")) if tail else {}
    for name in options:
        if name not in family.options:
            known = ", ".join(family.options) or "none"
            raise EvaluationError(f"candidate {text!r}: family {head} has no option {name!r}; it takes: {known}")
        if wanted := option_fault(family, name, options[name]):
            raise EvaluationError(f"candidate {text!r}: {name} is {options[name]!r}; it must be {wanted}")
    return Candidate(text, family=head, options=options)


def plan_candidate(candidate: Candidate, shape: Shape, profile: Profile, rules: Any) -> Plan:
    """Return what a candidate comes to on a shape; loads no torch and never imports the user's file."""
    if candidate.path:
        return Plan()
    if candidate.family:
        name, rule, options = candidate.family, "", candidate.options
    else:
        try:
            chosen = route(shape, profile, rules)
        except RouteError:
            reasons = [f"{name}: {refusal(spec, shape, profile, {})}" for name, spec in load_families().items()]
            return Plan(unsupported=f"no rule's family can serve it on {profile.name} ({'; '.join(reasons)})")
        name, rule, options = chosen.family, chosen.rule.name, dict(chosen.options)
    family = get_family(name)
    reason = refusal(family, shape, profile, options)
    return Plan(
        family=name,
        rule=rule,
        options=options,
        contract=family.contract,
        predicted_s=None if reason else family.predict_s(shape, profile),
        peak_bytes=None if reason else family.peak_bytes(shape, profile, **options),
        unsupported=reason,
    )


def build_candidate(
    candidate: Candidate, plan: Plan, model: nn.Module, shape: Shape, device: torch.device, *, again: bool = False
) -> tuple[Forward, nn.Module]:
    """Build a candidate on `model`; return its forward and the module that holds its weights.

    A user's file is imported each time; `again` takes it as it was imported last, as two models of one user share it.

    A `UserOptimizedTransformer` class is constructed with the config alone, then given the weights through its
    state_dict before it is moved to the device, as the organiser does. Parameters and buffers are alike to it.
    Raises `NoLoadableWeights` where the class does not take them.
    """
    if not candidate.path:
        return get_family(plan.family).build(model, shape, device, **plan.options), model
    target = load_attribute(candidate, again=again)
    if not inspect.isclass(target):
        forward = target(model, shape, device)
        if not callable(forward):
            raise TypeError(f"{target.__name__}(model, shape, device) returned {type(forward).__name__}, not a forward")
        return forward, model
    from rooflane.baseline import config_of, copy_model_weights, torch_dtype

    user = target(config_of(shape))
    try:
        copy_model_weights(model, user)
    except RuntimeError as error:
        raise NoLoadableWeights(one_line(error)) from None
    user = user.to(device=device, dtype=torch_dtype(shape.dtype)).eval()
    return user, user


def load_rule_table(path: str | None) -> Any:
    """Return the rule table in force, the one at `path` over ours where a path is given."""
    return load_rules(path or None)


def load_attribute(candidate: Candidate, *, again: bool = False, names: Sequence[str] = DEFAULT_NAMES) -> Any:
    """Import the user's file under a name of its own and return what is to be built; `again` imports nothing new."""
    name = f"rooflane_candidate_{candidate.path.stem}"
    if again and name in sys.modules:
        module = sys.modules[name]
    else:
        spec = importlib.util.spec_from_file_location(name, candidate.path)
        module = importlib.util.module_from_spec(spec)
        _add_folder(str(candidate.path.parent))
        sys.modules[name] = module
        spec.loader.exec_module(module)
    names = (candidate.attribute,) if candidate.attribute else names
    for wanted in names:
        if hasattr(module, wanted):
            return getattr(module, wanted)
    raise AttributeError(f"{candidate.path.name} defines none of {', '.join(names)}; see `rooflane eval --help`")


def _add_folder(folder: str) -> None:
    """Let a candidate import what lies beside its file, ahead of the working folder and behind what is installed.

    Behind the standard library too: a helper called `random.py` is not imported where torch means Python's own.
    """
    if folder not in sys.path:
        sys.path.insert(len(sys.path) - (sys.path[-1:] == [os.getcwd()]), folder)


def _option(text: str, part: str) -> tuple[str, Any]:
    """Parse one `key=value`; whole numbers, decimals, true and false become values, the rest stays text."""
    key, equals, value = part.partition("=")
    if not (key and equals and value):
        raise EvaluationError(f"candidate {text!r}: {part!r} is not key=value; write family:key=value,key=value")
    if value in ("true", "false"):
        return key, value == "true"
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


def check_source(text: str, path: Path, names: Sequence[str]) -> None:
    """Refuse a file that is no Python, or that plainly defines none of the names looked for.

    A name may come from a definition, an assignment or an import, in branches too; a file that fills its namespace in
    ways that reading cannot follow (`import *`, `exec`, `globals()`, a module `__getattr__`) is left to its import.
    Raises `EvaluationError`; `text` is the candidate as the user named it.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise EvaluationError(
            f"candidate {text!r}: {path}:{error.lineno}: not valid Python: {error.msg}; fix that line"
        ) from None
    except (OSError, ValueError) as error:
        raise EvaluationError(f"candidate {text!r}: {path} cannot be read ({error})") from None
    found = _defined(tree.body)
    if "*" in found or "__getattr__" in found or _writes_unseen(tree) or any(name in found for name in names):
        return
    defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_kernel(node)]
    has = ", ".join(sorted(node.name for node in defined if not node.name.startswith("_"))) or "nothing"
    either = "build(model, shape, device) or the class UserOptimizedTransformer(config)"
    wanted = names[0] if len(names) == 1 else either
    raise EvaluationError(
        f"candidate {text!r}: {path.name} does not define {wanted}; it defines: {has}. Name what is to be built as "
        f"{path.name}:NAME, or start from `rooflane new candidate`"
    )


def _defined(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements at the top level bind, branches included."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
            continue
        for part in ("body", "orelse", "finalbody"):
            names |= _defined(getattr(statement, part, []))
        for branch in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            names |= _defined(branch.body)
        names |= {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return names


def _is_kernel(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a definition is decorated as a Triton kernel, which is launched and never built."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _writes_unseen(tree: ast.Module) -> bool:
    """Return whether the file may bind names that are not written in it."""
    unseen = ("exec", "globals", "setattr", "vars")
    return any(isinstance(node, ast.Name) and node.id in unseen for node in ast.walk(tree))


OURS = [Path(__file__).resolve().parents[2] / name for name in ("shapes", "baseline", "families", "dispatch", "eval")]
# Folders of installed packages; Python's own modules lie in one named like its version.
INSTALLED = {"site-packages", "dist-packages", Path(sysconfig.get_paths()["stdlib"]).name}


def is_oom(error: Exception) -> bool:
    """Return whether an exception says that memory ran out; the CPU allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        # torch.OutOfMemoryError is a RuntimeError too.
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def describe_error(error: BaseException) -> str:
    """Return an exception's kind, its text on one line, and where in the candidate's own files it was raised."""
    where = place(error)
    return f"{type(error).__name__}: {one_line(error)}" + (f" ({where})" if where else "")


def place(error: BaseException) -> str:
    """Return where an exception left code that is neither ours, torch's nor an installed package's; "" for none.

    A candidate's author looks for their own file and line, and both sides call into torch.
    """
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        path = Path(code.co_filename)
        theirs = INSTALLED & set(path.parts) or any(map(path.is_relative_to, OURS))
        if not theirs and path.is_file():
            found = f"{path.name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text on one line."""
    return " ".join(str(error).split())[:limit] or "no message"
