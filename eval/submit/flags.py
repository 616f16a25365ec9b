"""The organiser's flags: those a shape sets, and those a user may pass on."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

# With an odd number the baseline goes first once more than the candidate, and a linear drift shows as a speedup.
ROUNDS = 4
SIZES = {
    "--batch-size": "batch_size",
    "--seq-len": "seq_len",
    "--d-model": "d_model",
    "--heads": "num_heads",
    "--ffn-dim": "ffn_dim",
    "--layers": "num_layers",
}
# Set by the shape file or by an option of ours: passing them on as well would contradict it.
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EvaluationError(f"--organiser-args: {message}; the organiser's script would refuse it for every shape")


def parse_organiser_args(text: str, known_script: bool) -> list[str]:
    """Return the flags to pass on, as a list.

    Raises `EvaluationError` for what the script would refuse, for a flag the shape file sets, and for an odd number
    of rounds. Flags nobody described are passed on, unless the script is one we know and has no such flag.
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
        raise EvaluationError(f"device {name!r} is not one of auto, cpu, cuda; only these does the script time rightly")


def _parser() -> argparse.ArgumentParser:
    """Return the script's own flags, abbreviations included; what is not given leaves no value."""
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
