"""What a worker can see of tampering in its own process: replaced functions, changed inputs and weights.

A candidate shares its worker's interpreter, so none of this stops one that is written to evade it; the judge in
another process, the parent's wall clock and the fingerprints do not depend on it. It names what honest mistakes and
ordinary cheats leave behind.
"""

from __future__ import annotations

import builtins
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooflane.eval.check.leftovers import Leftovers

CANDIDATE_MODULE = "rooflane_candidate_"
# Functions the harness measures and compares with; each is watched by identity and by its code.
WATCHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (time, ("perf_counter", "perf_counter_ns", "monotonic", "time", "time_ns", "sleep")),
    (statistics, ("median", "fmean")),
    (builtins, ("type", "isinstance", "len", "sum", "min", "max", "abs", "__import__")),
    (torch, ("equal", "isfinite", "allclose", "mv", "empty", "empty_like", "randn", "rand", "randint", "Generator")),
    (torch.Tensor, ("data_ptr", "copy_", "clone", "cpu", "to", "float", "untyped_storage", "reshape", "__eq__")),
    (torch.cuda, ("Event", "Stream", "synchronize", "current_stream", "_sleep")),
    (torch.cuda.Event, ("record", "elapsed_time", "synchronize", "query", "wait")),
    (torch.cuda.Stream, ("synchronize", "wait_stream", "record_event")),
    (torch.nn.Module, ("__call__", "_call_impl", "state_dict", "load_state_dict")),
)
# Operations that fingerprints, digests, comparisons and draws are made of.
WATCHED_OPERATIONS = (
    "aten::mv.out", "aten::equal", "aten::copy_", "aten::sum", "aten::mul.Tensor", "aten::fill_.Scalar",
    "aten::bitwise_xor.Scalar", "aten::arange.start_out", "aten::clone", "aten::_to_copy", "aten::normal_",
    "aten::_local_scalar_dense", "aten::empty_like", "aten::empty.memory_format", "aten::zero_", "aten::stack",
)  # fmt: skip
# Where torch's compiler registers kernels of its own when it is imported, which no plain operation runs.
UNWATCHED_KEYS = ("Meta", "Functionalize", "Tracer", "Func", "Batched", "Python", "Fake", "debug", "schema", "name")
DIGEST_BYTES = 1 << 26
# Any odd multiplier and any constant will do: neighbouring places must get unrelated weights.
ODD = 0x1E3779B97F4A7C15
MIX = 0x2545F4914F6CDD1D
MASK = (1 << 63) - 1
# Bound here, before any candidate is imported.
_arange = torch.arange
_detach = torch.Tensor.detach
_dispatch_dump = torch._C._dispatch_dump
_data_ptr = torch.Tensor.data_ptr
_equal = torch.equal

# The inputs of one call; a part may be no tensor.
Given = tuple[Any, ...]

# torch.compile puts these into the module of the function that it compiles, and takes them out again.
COMPILED_NAMES = ("__compiled_fn_", "__resume_at_")
WATCHED_PACKAGES = ("rooflane.eval.", "rooflane.baseline.")


class ProcessState:
    """A worker's functions at one moment; `changes` compares them with now."""

    def __init__(self) -> None:
        self._functions = _functions()
        self._operations = _operations()
        self.leftovers = Leftovers()

    def changes(self) -> list[str]:
        """Return one line for each function that is another now, and for each import hook of the candidate's."""
        now = _functions()
        lines = [
            f"{name} was replaced while the candidate ran"
            for name, mark in self._functions.items()
            if now.get(name) != mark
        ]
        for finder in sys.meta_path:
            home = getattr(finder, "__module__", "") or ""
            if home.startswith(CANDIDATE_MODULE):
                lines.append(f"the candidate put an import hook in place ({type(finder).__name__})")
        lines += [
            f"another kernel was registered for {name}, which the harness uses"
            for name, text in _operations().items()
            if text != self._operations[name]
        ]
        lines += self.leftovers.inspect()
        return lines


class GivenInputs:
    """The inputs and masks of a window's calls, and the seed that each was drawn from."""

    def __init__(self, cases: Sequence[Given], seeds: Sequence[int]) -> None:
        self._cases = cases
        self._seeds = seeds
        self._places = [_places(case) for case in cases]

    def change(self, draw: Callable[[int], Given], chosen: int) -> str:
        """Return how a call changed what it was given, "" where nothing shows it.

        Every input's dtype, strides and address are compared, and the contents of one that `chosen` decides with a
        new draw of it.
        """
        for case, before in zip(self._cases, self._places, strict=True):
            if _places(case) != before:
                return "an input or mask has another dtype, shape or place in memory than before its call"
        number = random.Random(f"inputs {chosen}").randrange(len(self._cases))
        pairs = zip(self._cases[number], draw(self._seeds[number]), strict=True)
        if all(not isinstance(held, Tensor) or _equal(held, drawn) for held, drawn in pairs):
            return ""
        return "an input or mask has other contents than before its call"


class GivenWeights:
    """A module's parameters and buffers at one moment: contents, dtype and place of each."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = self._read()

    def changes(self) -> list[str]:
        """Return how the module's weights differ from these, a line for each way with the first tensor it shows in."""
        now, found = self._read(), {}
        if now.keys() != self._held.keys():
            return ["names have come or gone"]
        for name, (contents, place) in self._held.items():
            if now[name][1][0] != place[0]:
                found.setdefault("dtype", f"{name} is {now[name][1][0]}, was {place[0]}")
            elif now[name][0] != contents:
                found.setdefault("contents", f"{name} holds other values")
            elif now[name][1] != place:
                found.setdefault("place", f"{name} lies elsewhere in memory")
        return list(found.values())

    def _read(self) -> dict[str, tuple[int, tuple]]:
        held = self._module.state_dict()
        marks = zip(held.items(), digests(held.values()), strict=True)
        return {name: (mark, _place(tensor)) for (name, tensor), mark in marks}


def digest(tensor: torch.Tensor) -> int:
    """Return a number that depends on every bit of a tensor and its place, the same on every device."""
    return digests([tensor])[0]


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return each tensor's digest, having waited for the device once."""
    parts = []
    for index, tensor in enumerate(tensors):
        flat = _detach(tensor).contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, max(1, flat.numel()), DIGEST_BYTES):
            part = flat[start : start + DIGEST_BYTES]
            if part.numel() % 4 == 0 and part.storage_offset() % 4 == 0:
                part = part.view(torch.int32)
            mixed = (_arange(1, 1 + part.numel(), device=part.device) * ODD) ^ MIX
            parts.append((index, 2 * start + 1, (part * mixed).sum()))
    if not parts:
        return []
    found = [0] * (parts[-1][0] + 1)
    sums = torch.stack([total.to(parts[0][2].device) for _, _, total in parts]).tolist()
    for (index, factor, _), total in zip(parts, sums, strict=True):
        found[index] ^= (total * factor) & MASK
    return found


def _functions() -> dict[str, Any]:
    """Return a mark of every watched function: the object's identity and, of Python functions, its code's."""
    marks: dict[str, Any] = {}
    for owner, names in WATCHED:
        home = owner.__name__
        for name in names:
            if hasattr(owner, name):
                marks[f"{home}.{name}"] = _mark(getattr(owner, name))
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(WATCHED_PACKAGES) and isinstance(module, ModuleType):
            marks[module_name] = id(module)
            for name, value in list(vars(module).items()):
                if callable(value) and not name.startswith(COMPILED_NAMES):
                    marks[f"{module_name}.{name}"] = _mark(value)
                if isinstance(value, type) and value.__module__ == module_name:
                    for method, function in list(vars(value).items()):
                        if isinstance(function, FunctionType):
                            marks[f"{module_name}.{name}.{method}"] = _mark(function)
    return marks


def _operations() -> dict[str, str]:
    """Return where the kernels of each watched operation were registered, as torch's dispatcher tells it."""
    return {
        name: "\n".join(line for line in _dispatch_dump(name).splitlines() if not line.startswith(UNWATCHED_KEYS))
        for name in WATCHED_OPERATIONS
    }


def _mark(value: Callable) -> tuple[int, int]:
    code = getattr(value, "__code__", None)
    return id(value), hash(code.co_code) if isinstance(code, CodeType) else 0


def _places(case: Given) -> tuple:
    return tuple(_place(part) if isinstance(part, Tensor) else None for part in case)


def _place(tensor: Tensor) -> tuple:
    """Return a tensor's dtype, shape, strides and address."""
    return tensor.dtype, tensor.shape, tensor.stride(), _data_ptr(tensor)
