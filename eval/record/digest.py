"""The digest of a run: held in memory while the run is written, and on disk once the run is finished."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rooflane.dispatch.state_files import read_regular, replace_file
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.record.nulls import NULLS_FILE
from rooflane.eval.record.records import RECORDS_FILE, RUN_FILE

DIGEST_FILE = "digest.json"
ALGORITHM = "sha256"
# What every figure of a report comes from.
SEALED_FILES = (RUN_FILE, RECORDS_FILE, NULLS_FILE)


class WrittenFiles:
    """The digests of a run's files as this process wrote them, held in memory until the run is finished."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / RECORDS_FILE
        # Rows of an interrupted part are there already.
        self._rows = hashlib.sha256(read_regular(path) if path.exists() else b"")
        # None for a file that is not there: nothing else may make it.
        self._others = {name: _digest(folder / name) for name in (RUN_FILE, NULLS_FILE, DIGEST_FILE)}

    def add(self, data: bytes) -> None:
        """Note rows that this process appended."""
        self._rows.update(data)

    def page(self, text: str) -> None:
        """Note the page that this process wrote."""
        self._others[RUN_FILE] = hashlib.sha256(text.encode()).hexdigest()

    def check(self) -> None:
        """Raise `EvaluationError` when a file on disk differs from what this process wrote, or is one more."""
        found = _digest(self._folder / RECORDS_FILE) or hashlib.sha256().hexdigest()
        changed = [] if found == self._rows.hexdigest() else [RECORDS_FILE]
        changed += [name for name, kept in self._others.items() if _digest(self._folder / name) != kept]
        if changed:
            raise EvaluationError(
                f"{self._folder / changed[0]}: the file changed while the run was in progress, and not by the run "
                "itself, so the run is not finished; measure again"
            )


def seal(folder: Path) -> Path:
    """Write the digests of a run's files; what is sealed is what reports and comparisons accept from then on."""
    path = folder / DIGEST_FILE
    files = {name: _digest(folder / name) for name in SEALED_FILES if (folder / name).exists()}
    text = json.dumps({"algorithm": ALGORITHM, "files": files}, indent=1) + "\n"
    try:
        replace_file(path, text)
    except OSError as error:
        raise EvaluationError(f"{path}: the run's digest cannot be written ({error})") from None
    return path


def is_sealed(folder: Path) -> bool:
    """Return whether a run was finished and sealed; one that was not is in progress, or was interrupted."""
    return (folder / DIGEST_FILE).exists()


def verify_seal(folder: Path) -> None:
    """Raise `EvaluationError` when a sealed run's files are not those that were sealed; pass over an unsealed run."""
    path = folder / DIGEST_FILE
    if not path.exists():
        return
    try:
        page = json.loads(read_regular(path).decode("utf-8"))
        sealed, algorithm = dict(page["files"]), page["algorithm"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{path}: cannot be read as a digest ({error}); take the run from its source again"
        ) from None
    if algorithm != ALGORITHM or not {RUN_FILE, RECORDS_FILE} <= sealed.keys():
        raise EvaluationError(f"{path}: seals {', '.join(sealed) or 'nothing'} by {algorithm}, which is no run's seal")
    there = {name for name in SEALED_FILES if (folder / name).exists()}
    changed = sorted(
        name for name in there | sealed.keys() if name not in sealed or sealed[name] != _digest(folder / name)
    )
    if changed:
        raise EvaluationError(
            f"{folder}: {' and '.join(changed)} changed after the run was finished: the digest in {DIGEST_FILE} does "
            "not hold, so no figure is shown; take the run from its source again, or measure again"
        )


def unseal(folder: Path) -> None:
    """Take the seal off a run that goes on; raises `EvaluationError` when it did not hold."""
    verify_seal(folder)
    (folder / DIGEST_FILE).unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    """Return a file's SHA-256, None when it is not there."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error})") from None
