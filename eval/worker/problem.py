"""Problem files in a worker: imported, their inputs drawn, their outputs taken apart into tensors.

Every worker of a problem imports its file: the reference's, and each candidate's, which builds on the same module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.eval.worker.candidates import one_line, place
from rooflane.shapes import DTYPE_BYTES, Problem

Given = tuple[Any, ...]
PLAIN_VALUES = (int, float, bool, str, type(None))
# Bound here, before any candidate is imported.
_type = type
_Tensor = torch.Tensor


class ProblemError(Exception):
    """A problem file that cannot be evaluated; the text is one paragraph on what and how to mend it."""


@contextmanager
def blamed(problem: Problem, what: str) -> Iterator[None]:
    """Raise what the problem's own code raises as a `ProblemError` that names the place."""
    try:
        yield
    except ProblemError:
        raise
    except Exception as error:
        at = place(error)
        where = f" ({at})" if at else ""
        raise ProblemError(
            f"problem {problem.file}: {what} raised {type(error).__name__}: {one_line(error)}{where}"
        ) from error


@lru_cache(maxsize=8)
def import_problem(problem: Problem) -> ModuleType:
    """Import a problem's file under a name of its own; raises `ProblemError` where its text has changed."""
    path = Path(problem.file)
    if hashlib.sha256(path.read_bytes()).hexdigest() != problem.digest:
        raise ProblemError(f"problem {problem.file}: the file was changed since the run began; start a new run")
    if str(path.parent) not in sys.path:
        # Behind everything that is installed: a neighbour must not stand in for a library.
        sys.path.append(str(path.parent))
    name = f"rooflane_problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with blamed(problem, "importing it"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's, Python's and NumPy's generators for a moment; theirs go on where they were afterwards."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[0] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(kept[0])
            if numpy:
                numpy.random.set_state(kept[1])


def construct(problem: Problem, kind: Callable[..., Any], seed: int, device: torch.device) -> Any:
    """Return `kind(*get_init_inputs())`, drawn on the CPU from a seed; classes that draw alike get equal weights."""
    module = import_problem(problem)
    with torch.inference_mode(False):
        with seeded(seed, device), blamed(problem, "get_init_inputs()"):
            arguments = module.get_init_inputs()
        with seeded(seed, device):
            return kind(*arguments)


def build_model(problem: Problem, device: torch.device, seed: int) -> nn.Module:
    """Return the problem's Model in eval mode on a device."""
    kind = import_problem(problem).Model
    with blamed(problem, "Model(*get_init_inputs())"):
        model = construct(problem, kind, seed, device)
    if not isinstance(model, nn.Module):
        raise ProblemError(f"problem {problem.file}: Model is no torch.nn.Module; derive it from one")
    return model.to(device).eval().requires_grad_(False)


def draw_inputs(problem: Problem, device: torch.device, seed: int) -> Given:
    """Return `get_inputs()` under a seed on a device: ordinary tensors of their own memory, and plain values."""
    module = import_problem(problem)
    with torch.inference_mode(False), torch.no_grad(), seeded(seed, device), blamed(problem, "get_inputs()"):
        drawn = _get_inputs(problem, module, device)
    if isinstance(drawn, Tensor) or not isinstance(drawn, Sequence):
        raise ProblemError(
            f"problem {problem.file}: get_inputs() returned a {type(drawn).__name__}; it must return a list of the "
            "forward's arguments"
        )
    with torch.inference_mode(False), torch.no_grad():
        inputs = tuple(_own(problem, number, part, device) for number, part in enumerate(drawn))
    found = tuple(map(describe, inputs))
    if problem.inputs and found != problem.inputs:
        raise ProblemError(
            f"problem {problem.file}: get_inputs() returned {', '.join(found)}, before it was "
            f"{', '.join(problem.inputs)}; every call must return the same shapes, dtypes and plain values"
        )
    return inputs


# Problems whose get_inputs() cannot make its tensors on the device itself.
_ON_CPU: set[str] = set()


def _get_inputs(problem: Problem, module: ModuleType, device: torch.device) -> Any:
    """Call get_inputs() with the device as the default, or without where that fails: drawing on a CPU is slow."""
    if device.type == "cuda" and problem.digest not in _ON_CPU:
        try:
            with torch.device(device):
                return module.get_inputs()
        except RuntimeError:  # such as a generator that is bound to the CPU
            _ON_CPU.add(problem.digest)
    return module.get_inputs()


def _own(problem: Problem, number: int, part: Any, device: torch.device) -> Any:
    """Return one input on the device, in memory of its own."""
    if isinstance(part, PLAIN_VALUES):
        return part
    if _type(part) not in (_Tensor, nn.Parameter) or part.layout != torch.strided:
        raise ProblemError(
            f"problem {problem.file}: input {number + 1} of get_inputs() is a {type(part).__name__}; inputs are plain "
            "tensors, numbers, strings and None"
        )
    return part.detach().to(device, copy=True).contiguous()


def describe(part: Any) -> str:
    """Return a tensor's dtype and sizes as `float32[64,128]`, of anything else its value."""
    if not isinstance(part, Tensor):
        return repr(part)
    return f"{str(part.dtype).removeprefix('torch.')}[{','.join(map(str, part.shape))}]"


def parse_tensor(text: str) -> tuple[torch.Size, torch.dtype]:
    """Return the sizes and dtype that `describe` wrote."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return torch.Size(int(size) for size in sizes.split(",") if size), getattr(torch, dtype)


def take_apart(out: Any) -> tuple[str, list[Tensor]]:
    """Return how an output is nested, `*` for each tensor, and its tensors in order.

    Lists and tuples are alike; the keys of a mapping are sorted. Raises `TypeError` for what is no tensor.
    """
    # Exact type: a subclass may compute its values when they are looked at, outside the timed window.
    if _type(out) is _Tensor:
        return "*", [out]
    if out is None:
        return "None", []
    if isinstance(out, Mapping):
        items = sorted(out.items(), key=lambda item: str(item[0]))
        parts = [take_apart(value) for _, value in items]
        texts = [f"{key!r}: {text}" for (key, _), (text, _) in zip(items, parts, strict=True)]
        return "{" + ", ".join(texts) + "}", [leaf for _, leaves in parts for leaf in leaves]
    if isinstance(out, (list, tuple)):
        parts = [take_apart(value) for value in out]
        return "[" + ", ".join(text for text, _ in parts) + "]", [leaf for _, leaves in parts for leaf in leaves]
    raise TypeError(f"the output holds a {_type(out).__name__}, not a torch.Tensor")


def tensor_bytes(parts: Sequence[Any]) -> int:
    """Return the bytes of the tensors among some parts."""
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def cast_floats(parts: Any, dtype: torch.dtype) -> Any:
    """Return nested values with every floating-point tensor in another dtype."""

    def cast(part: Tensor) -> Tensor:
        return part.to(dtype) if part.is_floating_point() else part

    return torch.utils._pytree.tree_map_only(torch.Tensor, cast, parts)


def model_dtype(model: nn.Module, inputs: Given) -> str:
    """Return the dtype of most of a module's weights, of its inputs where it has none, among those with a matrix rate.

    It is float32 where there is none of them: a device profile has no rate for float64.
    """
    sizes: dict[str, int] = {}
    for part in (*model.parameters(), *(part for part in inputs if isinstance(part, Tensor))):
        name = str(part.dtype).removeprefix("torch.")
        if name in DTYPE_BYTES:
            sizes[name] = sizes.get(name, 0) + max(1, math.prod(part.shape))
    return max(sizes, key=sizes.get, default="float32")
