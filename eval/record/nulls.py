"""Null results: comparisons of an arm with its own copy, stored for the noise floor of later campaigns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rooflane.dispatch.device import state_dir
from rooflane.dispatch.state_files import holders, open_regular, read_regular, take_lock
from rooflane.eval.exit_codes import EvaluationError

NULLS_FILE = "nulls.jsonl"
Key = tuple[str, str, int]  # machine, software, processes
# A floor uses this many of the newest nulls; the machine may have changed since older ones.
MOST_USED = 200
# Other campaigns hold a store's lock for milliseconds.
LOCK_WAIT_S = 10.0


class NullResult(BaseModel):
    """One arm of one campaign against its own copy: log-ratios of the geometric mean and of each shape, by label."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: str
    software: str
    processes: int
    run: str
    arm: str
    measured_at: str
    log: float
    sd: float | None
    shapes: dict[str, float]
    process_s: float | None = None

    @property
    def key(self) -> Key:
        """The values that two campaigns must share before the noise of one applies to the other."""
        return self.machine, self.software, self.processes


def machine_of(environment: Mapping[str, Any]) -> str:
    """Return the machine a record was made on: the GPU, or the processor and its threads."""
    return environment.get("gpu") or f"{environment.get('cpu', 'unknown')}, {environment.get('threads', '?')} threads"


def software_of(environment: Mapping[str, Any]) -> str:
    """Return the versions that decide the speed and the noise of eager."""
    names = ("torch", "triton", "cuda", "driver")
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


def store_path() -> Path:
    """Return the file that stores the nulls of this user's campaigns."""
    return state_dir() / NULLS_FILE


def append_nulls(path: Path, nulls: Iterable[NullResult]) -> None:
    """Add nulls to a store under a file lock; an arm that a campaign stored already is skipped."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", encoding="utf-8") as file:
            if not take_lock(file.fileno(), LOCK_WAIT_S):
                who = " and ".join(holders(path)) or "another process"
                raise EvaluationError(
                    f"{path}: the null results were not stored, because {who} has held the file's lock for "
                    f"{LOCK_WAIT_S:.0f} s; end it"
                )
            file.seek(0)
            known = {(null.run, null.arm) for null in _parse(path, file)}
            file.writelines(null.model_dump_json() + "\n" for null in nulls if (null.run, null.arm) not in known)
    except OSError as error:
        raise EvaluationError(
            f"{path}: the null results cannot be stored ({error}); give ROOFLANE_STATE_DIR a folder that may be written"
        ) from None


def read_nulls(path: Path) -> list[NullResult]:
    """Read the null results of a store; raises `EvaluationError` for an unreadable file or line."""
    try:
        return _parse(path, read_regular(path).decode("utf-8").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: the null results cannot be read ({error})") from None


def matching(nulls: Sequence[NullResult], key: Key, run: str) -> list[NullResult]:
    """Return the newest nulls of the same machine, software and number of processes, other runs' only."""
    found = sorted((null for null in nulls if null.key == key and null.run != run), key=lambda null: null.measured_at)
    return found[-MOST_USED:]


def stored_logs(
    nulls: Sequence[NullResult], labels: Mapping[str, str]
) -> tuple[list[list[float]], dict[str, list[list[float]]]]:
    """Return the log-ratios that floors are made of: means over exactly these shapes, and each shape by its id.

    Those of one run stand together, however often the run was stored: its nulls share its machine state.
    """
    wanted = set(labels.values())
    means = _by_run(null for null in nulls if set(null.shapes) == wanted)
    shapes = {name: _by_run((null for null in nulls if label in null.shapes), label) for name, label in labels.items()}
    return means, shapes


def _by_run(nulls: Iterable[NullResult], label: str = "") -> list[list[float]]:
    """Return the log-ratios of nulls, each arm once, a list for each run; of a shape's label where one is given."""
    runs: dict[str, dict[str, float]] = {}
    for null in nulls:
        runs.setdefault(null.run, {})[null.arm] = null.shapes[label] if label else null.log
    return [list(arms.values()) for arms in runs.values()]


def _parse(path: Path, lines: Iterable[str]) -> list[NullResult]:
    """Return the nulls of a store's lines."""
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(NullResult.model_validate(json.loads(line)))
        except (ValueError, ValidationError) as error:
            problem = str(error).splitlines()[0]
            raise EvaluationError(f"{path}:{number}: not a null result ({problem}); remove the line") from None
    return found
