"""Settings of a run, what is still to do of it, and seeds that nobody can guess."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rooflane.eval.exit_codes import EvaluationError

QUICK_PROCESSES = 3
# Defaults by device. A predicted GPU call above a minute is no useful benchmark, and a CPU run must end in one day.
# Three processes of compiled controls give an interval; each process compiles again.
DEFAULTS = {
    "cpu": {"budget_s": 1.0, "max_call_s": 5.0, "compile_processes": 3, "reference_budget_s": 120.0},
    # Eager host-bound calls of 2 ms fill 0.6 s with 300: thirteen shapes in eight processes stay within nine minutes.
    "cuda": {"budget_s": 0.6, "max_call_s": 60.0, "compile_processes": 3, "reference_budget_s": 120.0},
}
# A quick run is a first look: with its set-up it must end within ten minutes on two cores, and within five on an H200
# whose caches are empty. There the compiled controls alone take 10 to 40 s a shape, and the reference of a shape too
# large for eager 86 s, so the former are left out and the latter compares the elements that fit into 15 s.
QUICK = {
    "cpu": {"budget_s": 0.5, "compile_processes": 1, "time_budget_s": 390.0},
    "cuda": {
        "budget_s": 0.25, "compile_processes": 1, "time_budget_s": 270.0, "reference_budget_s": 15.0,
        "controls": ("identity", "sdpa"),
    },
}  # fmt: skip


class SettingError(EvaluationError):
    """A setting with a value it does not take; `field` names it and `why` says what it takes."""

    def __init__(self, field: str, why: str, value: Any) -> None:
        super().__init__(f"setting {field}: {why}, got {value!r}")
        self.field = field
        self.why = why


class Settings(BaseModel):
    """How a run measures; every field is written into `run.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "auto"
    profile: str = "auto"
    rules: str | None = None
    processes: int = Field(default=8, ge=1)
    quick: bool = Field(default=False, description="a verdict only where the interval at 99.9% shows it")
    inputs: Literal["fresh", "fixed"] = "fresh"
    controls: tuple[str, ...] | None = None
    compile_processes: int | None = Field(default=None, ge=0, description="processes that time the compiled controls")
    rounds: int = Field(default=4, ge=2, multiple_of=2)
    warmups: int = Field(default=20, ge=1)
    repeats: int = Field(default=100, ge=1)
    trials: int = Field(default=5, ge=1)
    budget_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="timing seconds per arm, shape and process"
    )
    max_call_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="a slower predicted call is not run"
    )
    time_budget_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds for the whole run"
    )
    reference_budget_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds for the chunked reference of a shape"
    )
    memory_cap_bytes: int | None = Field(default=None, gt=0)
    arm_timeout_s: float = Field(default=900.0, gt=0, description="a worker silent for longer is ended")
    seed: int | None = None
    sandbox: bool = Field(default=True, description="a candidate that is a user's file runs in the sandbox")

    @model_validator(mode="before")
    @classmethod
    def _quick_counts(cls, values: Any) -> Any:
        """Let `quick` choose the processes where the caller did not."""
        if isinstance(values, dict) and values.get("quick"):
            values = {"processes": QUICK_PROCESSES, **values}
        return values

    def on_device(self, device: str) -> Settings:
        """Return the settings with the device's own defaults where the caller left a field open."""
        defaults = DEFAULTS[device] | (QUICK[device] if self.quick else {})
        return self.model_copy(update={name: value for name, value in defaults.items() if getattr(self, name) is None})


def make_settings(**values: Any) -> Settings:
    """Return settings from keyword arguments; raises `SettingError` naming the field and what it accepts."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(Settings.model_fields)
            raise EvaluationError(f"there is no setting {name!r}; settings are: {known}") from None
        why = first["msg"][:1].lower() + first["msg"][1:]
        raise SettingError(name, why, first["input"]) from None


class ShapeTodo(BaseModel):
    """One shape still to be measured in a process, and the arms wanted of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: dict[str, Any]
    arms: tuple[str, ...]
    oversize: bool


def derive_seed(*parts: object) -> int:
    """Return a seed below 2^48 that depends on every part and cannot be guessed without the run's secret seed."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
