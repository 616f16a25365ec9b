"""Commit and reveal: the run's secret seed is bound by its hash at the start and shown when nothing is left to learn.

In between it lies in a file of the run folder that only the user may read, so that an interrupted run can go on.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.records import RUN_FILE, RunMeta
from rooflane.eval.record.spent import Spent, overhead_share

if TYPE_CHECKING:
    from rooflane.eval.stats.run import Run

SEED_FILE = "seed.secret"


def seed_hash(seed: int) -> str:
    """Return the hash that binds a seed."""
    return hashlib.sha256(str(seed).encode()).hexdigest()


def keep_seed(folder: Path, seed: int) -> None:
    """Write the seed where only the user may read it."""
    descriptor = os.open(folder / SEED_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{seed}\n")


def recall_seed(folder: Path, meta: RunMeta) -> int:
    """Return the seed of a run that is not complete; raises `EvaluationError` when it is lost or another."""
    if meta.seed is not None:
        return meta.seed
    path = folder / SEED_FILE
    try:
        seed = int(path.read_text())
    except (OSError, ValueError):
        raise EvaluationError(
            f"{path}: the run's secret seed is missing or unreadable, so it cannot go on; start a new run"
        ) from None
    if seed_hash(seed) != meta.seed_hash:
        raise EvaluationError(f"{path}: this is not the seed that {RUN_FILE} was bound to; start a new run")
    return seed


def reveal(run: Run, seed: int, spent: Spent | None = None) -> None:
    """Write the seed, and where the time went, into the run's page in one step; remove the secret file."""
    account = spent.account() if spent else {}
    share = round(overhead_share(account), 4) if account else None
    run.update(seed=seed, spent_s=account, overhead_share=share)
    (run.folder / SEED_FILE).unlink(missing_ok=True)
