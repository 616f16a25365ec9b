"""The organiser's script: recognised by hash, given a shape's flags, run with our class in place, never changed."""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

# The scripts whose printed format and flags this package was written for.
KNOWN_HASHES = {"5529c96a80799b51f68092e1444a30b17994554dffdf52da98ba701489a7f36e": "torch_transformer_benchmark.py"}
PLACE = "UserOptimizedTransformer"
NAMES = ("BaselineTransformer", PLACE, "main")
MODULE_NAME = "organiser_benchmark"
# With an odd number the baseline goes first once more than the candidate: a linear drift looks like a speedup.
ROUNDS = 4
SIZES = {
    "--batch-size": "batch_size",
    "--seq-len": "seq_len",
    "--d-model": "d_model",
    "--heads": "num_heads",
    "--ffn-dim": "ffn_dim",
    "--layers": "num_layers",
}
# The shape file or an option of `rooflane submit` sets these: passing them on too would contradict it.
OURS = {
    **{flag: f"the shape file's column {column}" for flag, column in SIZES.items()},
    "--causal": "the shape file's column causal",
    "--dtype": "the shape file's column dtype",
    "--padding-ratio": "the shape file's column padding_ratio",
    "--device": "--device",
}
_INTEGERS = ("--accuracy-trials", "--seed", "--warmup", "--repeats", "--benchmark-rounds")
_NUMBERS = ("--input-scale", "--rtol", "--atol")
_SWITCHES = ("--benchmark-on-failure", "--compile-baseline", "--compile-user", "--non-strict-weight-copy")
_CHOICES = {
    "--compile-mode": ("default", "reduce-overhead", "max-autotune"),
    "--matmul-precision": ("highest", "high", "medium"),
}
LEAST = {"accuracy_trials": 1, "warmup": 0, "repeats": 1, "benchmark_rounds": 1, "rtol": 0, "atol": 0}


@dataclass(frozen=True)
class OrganiserFile:
    """The organiser's script as it was when the run began; `known` names the release the hash stands for, or ""."""

    path: Path
    sha256: str
    known: str

    def note(self) -> str:
        """Return one line on whether the file is a known release."""
        if self.known:
            return f"{self.path.name}: sha256 {self.sha256[:12]} is the organiser's {self.known}"
        return (
            f"{self.path.name}: sha256 {self.sha256[:12]} is not a file this version knows; it runs unchanged, and "
            "figures that cannot be read are reported"
        )

    def check_unchanged(self) -> None:
        """Raise `EvaluationError` when the file is no longer what it was when the run began."""
        try:
            now = hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise EvaluationError(f"{self.path}: was readable when the run began and is no longer ({error})") from None
        if now != self.sha256:
            raise EvaluationError(
                f"{self.path}: changed during the run (sha256 {self.sha256[:12]} before, {now[:12]} now), so the last "
                "figures are not kept; to fix this, restore the organiser's file and start a new run"
            )


def read_organiser(path: str | Path) -> OrganiserFile:
    """Return the organiser's file at `path`.

    Raises `EvaluationError` when it cannot be read, is not Python, or lacks a name of the contract: the classes
    `BaselineTransformer` and `UserOptimizedTransformer`, the function `main`, and the guarded call at the end.
    """
    path = Path(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise EvaluationError(
            f"{path}: {reason}; --organiser takes the path of the organiser's own benchmark script, which is not part "
            "of rooflane: download it from the competition's page"
        ) from None
    try:
        tree = ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise EvaluationError(f"{path}: is not a Python file ({error}); name the organiser's script") from None
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    missing = [name for name in NAMES if name not in defined]
    if not any(map(is_main_guard, tree.body)):
        missing.append('if __name__ == "__main__"')
    if missing:
        raise EvaluationError(
            f"{path}: defines no {', no '.join(missing)}, so it is not the organiser's benchmark, or a release that "
            "works differently; rooflane needs these names to replace the class and to run the script's own main"
        )
    sha256 = hashlib.sha256(source).hexdigest()
    return OrganiserFile(path.resolve(), sha256, KNOWN_HASHES.get(sha256, ""))


def is_main_guard(node: ast.stmt) -> bool:
    """Tell whether a statement is `if __name__ == "__main__":`."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and len(node.test.comparators) == 1):
        return False
    sides = (node.test.left, node.test.comparators[0])
    names = {side.id for side in sides if isinstance(side, ast.Name)}
    values = {side.value for side in sides if isinstance(side, ast.Constant)}
    return isinstance(node.test.ops[0], ast.Eq) and names == {"__name__"} and values == {"__main__"}


class ChangedError(ValueError):
    """The script is not the one that was checked."""


def run_with_class(
    path: Path, arguments: Sequence[str], place: Callable[[types.ModuleType], Any], sha256: str = ""
) -> None:
    """Define what the script defines, set its `UserOptimizedTransformer` to `place(module)`, run its guarded end.

    The script is compiled from the bytes read here, so what was hashed is what runs; its `main` ends this process as
    it would end the script's own. Raises `ChangedError` when `sha256` is given and is not the file's.
    """
    source = path.read_bytes()
    if sha256 and hashlib.sha256(source).hexdigest() != sha256:
        raise ChangedError(f"{path} changed since it was checked")
    tree = ast.parse(source, filename=str(path))
    ends = [node for node in tree.body if is_main_guard(node)]
    module = types.ModuleType(MODULE_NAME)
    module.__file__ = str(path)
    # dataclasses look their module up by name.
    sys.modules[MODULE_NAME] = module
    sys.argv = [str(path), *arguments]
    tree.body = [node for node in tree.body if node not in ends]
    exec(compile(tree, str(path), "exec"), module.__dict__)
    module.UserOptimizedTransformer = place(module)
    end = ast.Module([statement for node in ends for statement in node.body], [])
    exec(compile(end, str(path), "exec"), module.__dict__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EvaluationError(f"--organiser-args: {message}; the organiser's script would refuse it for every shape")


def parse_organiser_args(text: str, known_script: bool) -> list[str]:
    """Return the flags to pass on, as a list.

    Raises `EvaluationError` for what the script would refuse, for a flag the shape file sets, and for an odd number
    of rounds. Unknown flags are passed on, unless the script is a known release that has no such flag.
    """
    try:
        given = shlex.split(text)
    except ValueError as error:
        raise EvaluationError(f"--organiser-args: {text!r} cannot be split into words ({error})") from None
    found, unknown = _parser().parse_known_args(given)
    values = vars(found)
    for flag, where in OURS.items():
        if _name(flag) in values:
            raise EvaluationError(f"--organiser-args: {flag} is set by {where}; set it there")
    if unknown and known_script:
        flags = ", ".join([*_INTEGERS, *_NUMBERS, *_SWITCHES, *_CHOICES, "--no-allow-tf32"])
        raise EvaluationError(f"--organiser-args: the script knows no {unknown[0]!r}; it takes: {flags}")
    for name, least in LEAST.items():
        if values.get(name, least) < least:
            raise EvaluationError(
                f"--organiser-args: --{name.replace('_', '-')} is {values[name]}; the script takes {least} or more"
            )
    if values.get("input_scale", 1) <= 0:
        raise EvaluationError(f"--organiser-args: --input-scale is {values['input_scale']}; it must be above 0")
    if values.get("benchmark_rounds", ROUNDS) % 2:
        raise EvaluationError(
            f"--organiser-args: --benchmark-rounds is {values['benchmark_rounds']}, an odd number: the baseline would "
            f"go first once more than the candidate, and a drifting clock would count for one of them; pass an even "
            f"number ({ROUNDS} unless given)"
        )
    return given


def shape_arguments(shape: Shape, device: str, extra: list[str]) -> list[str]:
    """Return the script's arguments for a shape: its sizes, an even number of rounds, then the user's own."""
    arguments = [part for flag, field in SIZES.items() for part in (flag, str(getattr(shape, field)))]
    arguments += ["--causal"] if shape.causal else []
    arguments += ["--dtype", shape.dtype, "--padding-ratio", repr(shape.padding_ratio), "--device", device]
    return [*arguments, "--benchmark-rounds", str(ROUNDS), *extra]


def check_device(name: str) -> None:
    """Raise `EvaluationError` for a device the script does not time: only auto, cpu, cuda and cuda:0 are taken."""
    other = re.fullmatch(r"cuda:(\d+)", name)
    if other and int(other[1]) > 0:
        raise EvaluationError(
            f"device {name}: the organiser's script records its events on GPU 0 whatever the device, so the times "
            f"would mean nothing; set CUDA_VISIBLE_DEVICES={other[1]} and ask for cuda"
        )
    if name not in ("auto", "cpu", "cuda", "cuda:0"):
        raise EvaluationError(f"device {name!r} is not one of auto, cpu, cuda; the script times only these correctly")


def _parser() -> argparse.ArgumentParser:
    """Return the script's own flags, abbreviations included; a flag that is not given has no value."""
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    kinds: dict[str, Any] = {**dict.fromkeys((*SIZES, *_INTEGERS), int), **dict.fromkeys(_NUMBERS, float)}
    for flag, kind in kinds.items():
        parser.add_argument(flag, type=kind)
    for flag, accepted in _CHOICES.items():
        parser.add_argument(flag, choices=accepted)
    for flag in ("--dtype", "--padding-ratio", "--device"):
        parser.add_argument(flag)
    for flag in ("--causal", *_SWITCHES):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--allow-tf32", action=argparse.BooleanOptionalAction)
    return parser


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
