"""A problem: a Python file with a module and its inputs, read as text. Nothing here imports the file.

The file defines `class Model(nn.Module)`, `get_inputs()` and `get_init_inputs()`: `Model(*get_init_inputs())` is called
on `*get_inputs()`. It may set `ATOL` and `RTOL`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rooflane.shapes.shape import Shape, ShapeError

REQUIRED = ("Model", "get_inputs", "get_init_inputs")
TOLERANCES = {"atol": "ATOL", "rtol": "RTOL"}
SHIPPED = Path(__file__).with_name("problems")
# The name of the shipped problems on a command line, and of the candidates beside them.
SHIPPED_NAME = "shipped"
LABEL_CHARACTERS = 60
DIGEST_CHARACTERS = 6


@dataclass(frozen=True)
class Problem:
    """One problem file, and what its module takes and returns.

    `id` is the file's stem, `digest` the SHA-256 of its text. `atol` and `rtol` are None where the gate's own hold.
    The fields from `inputs` on are found by running the file in a worker; until then they are empty. Tensors are
    written as `float32[64,128]`, and `structure` shows how outputs are nested, `*` for each tensor. `flops` are
    counted of one call; `bytes` are those of inputs, weights and outputs. `no_truth` says why the module is not
    compared with float64, "" where it is.
    """

    id: str
    # Not compared: the same text in another folder is the same problem.
    file: str = field(compare=False)
    digest: str
    atol: float | None = None
    rtol: float | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    structure: str = ""
    dtype: str = "float32"
    flops: int = 0
    bytes: int = 0
    no_truth: str = ""
    kind: Literal["problem"] = "problem"

    @property
    def tokens(self) -> int:
        """0: what a token is, a module does not say."""
        return 0

    @property
    def padding_ratio(self) -> float:
        """0: there is no mask to draw."""
        return 0.0

    @property
    def has_elements(self) -> bool:
        """Whether the reference can be computed one batch element at a time: of a module nobody knows."""
        return False

    @property
    def brief(self) -> str:
        """The inputs, for a line of progress; the file's name until they are known."""
        text = ", ".join(self.inputs) or Path(self.file).name
        return text if len(text) <= LABEL_CHARACTERS else f"{text[:LABEL_CHARACTERS]}…"

    def label(self) -> str:
        """Return the inputs and the beginning of the digest: no other file has the same label."""
        return f"{self.brief} #{self.digest[:DIGEST_CHARACTERS]}"

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for records and JSON output."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(values: dict[str, Any]) -> Shape | Problem:
    """Return the shape or problem that `as_dict` wrote."""
    if values.get("kind") != "problem":
        return Shape(**values)
    return Problem(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def load_problems(name: str | Path, atol: float | None = None, rtol: float | None = None) -> list[Problem]:
    """Return the problem of a file, every problem of a folder, or a shipped one by its name, sorted by id.

    `shipped` means all shipped ones. In a folder, files whose name begins with an underscore are left out. `atol` and
    `rtol` take the place of what the files set. Raises `ShapeError` for a missing or unfit file.
    """
    path = _find(name)
    if not path.is_dir():
        return [_load_file(path, atol, rtol)]
    files = sorted(file for file in path.glob("*.py") if not file.name.startswith("_"))
    if not files:
        raise ShapeError(f"{path}: the folder holds no problem; a problem is a Python file that defines {_wanted()}")
    return [_load_file(file, atol, rtol) for file in files]


def summary_of(problem: Problem) -> str:
    """Return the first line of a problem file's docstring, "" where it has none."""
    text = ast.get_docstring(ast.parse(Path(problem.file).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def candidate_of(problem: Problem) -> Path:
    """Return the file of the candidate that is shipped with a shipped problem."""
    return SHIPPED / "candidates" / f"{problem.id}.py"


def _find(name: str | Path) -> Path:
    """Return the file or folder of a name."""
    path = Path(name)
    if path.exists():
        return path
    if str(name) == SHIPPED_NAME:
        return SHIPPED
    shipped = SHIPPED / path.with_suffix(".py").name
    if path.name == str(name) and shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py") if not file.name.startswith("_")))
    raise ShapeError(f"{name}: no such problem file or folder; the shipped problems are named {names}")


def _load_file(path: Path, atol: float | None, rtol: float | None) -> Problem:
    """Read one problem file; raises `ShapeError` where it is no Python or lacks a definition."""
    try:
        source = path.read_bytes()
        tree = ast.parse(source, filename=str(path))
    except OSError as error:
        raise ShapeError(f"{path}: the problem cannot be read ({error})") from None
    except (SyntaxError, ValueError) as error:
        raise ShapeError(f"{path}: the problem is no Python ({error}); it must define {_wanted()}") from None
    missing = [name for name in REQUIRED if name not in _defined(tree.body)]
    if missing:
        raise ShapeError(f"{path}: the problem does not define {', '.join(missing)}; a problem file needs {_wanted()}")
    given = {"atol": atol, "rtol": rtol}
    tolerance = {
        name: _tolerance(path, tree, constant) if given[name] is None else given[name]
        for name, constant in TOLERANCES.items()
    }
    for name, value in tolerance.items():
        if value is not None and not 0 < value < float("inf"):
            raise ShapeError(f"{path}: {name} is {value:g}; it must be a number above 0")
    return Problem(path.stem, str(path.resolve()), hashlib.sha256(source).hexdigest(), **tolerance)


def _wanted() -> str:
    return "class Model(nn.Module), get_inputs() and get_init_inputs()"


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that the top level of a file binds."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names


def _tolerance(path: Path, tree: ast.Module, constant: str) -> float | None:
    """Return the number that a file assigns to a name at its top level, None where it assigns none."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == constant for target in targets):
            try:
                return float(ast.literal_eval(statement.value))
            except (TypeError, ValueError):
                raise ShapeError(f"{path}: {constant} is no plain number; write it as one, such as 1e-3") from None
    return None
