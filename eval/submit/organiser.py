"""The organiser's file: recognised by hash, checked for the names our model is put between, never changed."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

from rooflane.eval.exit_codes import EvaluationError

# The scripts whose printed format and flags this package was written for.
KNOWN_HASHES = {"5529c96a80799b51f68092e1444a30b17994554dffdf52da98ba701489a7f36e": "torch_transformer_benchmark.py"}
PLACE = "UserOptimizedTransformer"
NAMES = ("BaselineTransformer", PLACE, "main")


@dataclass(frozen=True)
class OrganiserFile:
    """The organiser's script as it was when the run began; `known` names the release the hash stands for, or ""."""

    path: Path
    sha256: str
    known: str

    def note(self) -> str:
        """Return the line that says what is known of the file."""
        if self.known:
            return f"{self.path.name}: sha256 {self.sha256[:12]} is the organiser's {self.known}"
        return (
            f"{self.path.name}: sha256 {self.sha256[:12]} is not a file this version knows; it runs as it is, and "
            "figures that cannot be read are said so"
        )

    def check_unchanged(self) -> None:
        """Raise `EvaluationError` when the file is no longer what it was when the run began."""
        try:
            now = hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise EvaluationError(f"{self.path}: could be read when the run began, and no longer ({error})") from None
        if now != self.sha256:
            raise EvaluationError(
                f"{self.path}: changed during the run (sha256 {self.sha256[:12]} before, {now[:12]} now), so the last "
                "figures belong to no one file and are not kept; put the organiser's file back and start a new run"
            )


def read_organiser(path: str | Path) -> OrganiserFile:
    """Return the organiser's file at `path`.

    Raises `EvaluationError` when it cannot be read, is no Python, or lacks a name of the contract: the classes
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
            "works otherwise; the contract needs them to put a model in place and run the script's own main"
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
