"""The package's own files while candidates run: hashed before the first candidate, compared before they are read again.

Whatever a candidate may write, a later process of the run would load: sources, rules, stress inputs, kernels. A change
is reported with the file's name. A bytecode cache that came or changed meanwhile is removed, and Python makes it again
from its source: that is certain, where a look into a cache would first have to load it. Loads no torch.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

from rooflane.dispatch.state_files import read_regular
from rooflane.eval.exit_codes import EvaluationError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("shapes", "baseline", "families", "dispatch", "eval")
# What is imported, read at run time or compiled; an editor's own files beside them mean nothing.
SUFFIXES = {".py", ".so", ".csv", ".toml", ".json", ".j2", ".html", ".css", ".js", ".cu", ".cpp", ".cuh", ".h"}
BYTECODE = ".pyc"


class PackageFiles:
    """The digests of the package's files at one moment."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._sources = self._digests(SUFFIXES)
        self._bytecode = self._digests({BYTECODE})

    def changes(self) -> list[str]:
        """Return the names of files that changed, came or went since; remove bytecode that is not of before."""
        for name, found in self._digests({BYTECODE}).items():
            if self._bytecode.get(name) != found:
                (self._root / name).unlink(missing_ok=True)
        now = self._digests(SUFFIXES)
        names = sorted(self._sources.keys() | now.keys())
        return [name for name in names if self._sources.get(name) != now.get(name)]

    def require_unchanged(self) -> None:
        """Raise `EvaluationError` when a new interpreter would load other files than this one did."""
        if names := self.changes():
            raise EvaluationError(
                f"{self._root}: rooflane's own {_listed(names)} changed on disk since this process began, so that new "
                "workers would run other code than it does; where you changed them yourself, start again, else "
                "install rooflane again"
            )

    def _digests(self, suffixes: set[str]) -> dict[str, str]:
        """Return the digest of each file with one of these suffixes, by its path inside the package."""
        found = {}
        for folder in FOLDERS:
            for path in (self._root / folder).rglob("*"):
                if path.suffix in suffixes:
                    found[str(path.relative_to(self._root))] = _digest(path)
        return found


@cache
def loaded_package() -> PackageFiles:
    """Return the package's files as they were when this process first asked, which is before any candidate."""
    return PackageFiles()


def finding(names: list[str]) -> str:
    """Return the line of evidence that stands in the rows of the candidates that ran meanwhile."""
    return (
        f"rooflane's own {_listed(names)} changed on disk while candidates ran; where you changed them yourself, "
        "measure again"
    )


def advice(names: list[str]) -> str:
    """Return the paragraph for the user."""
    return (
        f"rooflane's own {_listed(names)} changed on disk while this run was in progress, and no further process is "
        "started, since it could load them. Where you changed them yourself, measure again. Else a candidate did: "
        "install rooflane again before anything else, and do not run that candidate outside a sandbox"
    )


def _listed(names: list[str]) -> str:
    return f"file {names[0]}" if len(names) == 1 else f"files {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _digest(path: Path) -> str:
    """Return a file's SHA-256, or what it is where it is no regular file."""
    try:
        return sha256(read_regular(path)).hexdigest()
    except OSError as error:
        return str(error)
