"""Run the organiser's script with another class in the contract's place. Standard library only: exports carry it."""

from __future__ import annotations

import ast
import hashlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODULE_NAME = "organiser_benchmark"


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
    ends = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
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
