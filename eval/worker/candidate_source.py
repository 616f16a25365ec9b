"""Look into a candidate's file without running it: the parent of a run never imports one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from rooflane.eval.exit_codes import EvaluationError


def check_source(text: str, path: Path, names: Sequence[str]) -> None:
    """Refuse a file that is no Python, or that plainly defines none of the names looked for.

    A name may come from a definition, an assignment or an import, in branches too; a file that fills its namespace in
    ways that reading cannot follow (`import *`, `exec`, `globals()`, a module `__getattr__`) is left to its import.
    Raises `EvaluationError`; `text` is the candidate as the user named it.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise EvaluationError(
            f"candidate {text!r}: {path}:{error.lineno}: not valid Python: {error.msg}; mend that line"
        ) from None
    except (OSError, ValueError) as error:
        raise EvaluationError(f"candidate {text!r}: {path} cannot be read ({error})") from None
    found = _defined(tree.body)
    if "*" in found or "__getattr__" in found or _writes_unseen(tree) or any(name in found for name in names):
        return
    defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_kernel(node)]
    has = ", ".join(sorted(node.name for node in defined if not node.name.startswith("_"))) or "nothing"
    either = "build(model, shape, device) or the class UserOptimizedTransformer(config)"
    wanted = names[0] if len(names) == 1 else either
    raise EvaluationError(
        f"candidate {text!r}: {path.name} does not define {wanted}; it defines: {has}. Name what is to be built as "
        f"{path.name}:NAME, or start from `rooflane new candidate`"
    )


def _defined(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements at the top level bind, branches included."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
            continue
        for part in ("body", "orelse", "finalbody"):
            names |= _defined(getattr(statement, part, []))
        for branch in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            names |= _defined(branch.body)
        names |= {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return names


def _is_kernel(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a definition is decorated as a Triton kernel, which is launched and never built."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _writes_unseen(tree: ast.Module) -> bool:
    """Return whether the file may bind names that are not written in it."""
    unseen = ("exec", "globals", "setattr", "vars")
    return any(isinstance(node, ast.Name) and node.id in unseen for node in ast.walk(tree))
