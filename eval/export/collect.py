"""Collect whole modules by their imports, and the C++ files of their packages."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# `cuda` holds cuda.bindings, which torch for CUDA 13 installs; without it the Triton kernels run.
LIBRARIES = {"torch", "triton", "cuda"}
# What `pkgutil.resolve_name` imports: "package.module:name".
REFERENCE = re.compile(r"\w+(\.\w+)+:\w+")
DATA_SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


class ExportError(ValueError):
    """A request that cannot be exported; the text names the obstacle and its place."""


def collect_files(roots: Iterable[str]) -> dict[str, str]:
    """Return the texts of the modules `roots` and of all that they import from their packages, by path, sorted.

    A path is relative to the folder of the package, such as "rooflane/shapes/shape.py". Imports in functions count, and
    so do strings such as "rooflane.shapes.shape:Shape"; imports under `if TYPE_CHECKING` do not. Raises `ExportError`
    for an import of another library, unless the module runs without it (under `try` or `suppress`), and for a module
    without a Python source.
    """
    roots = list(roots)
    packages = {root.split(".")[0] for root in roots}
    found: dict[str, Path] = {}
    pending = roots
    while pending:
        name = pending.pop()
        path = _locate(name)
        if path is None:
            if name not in packages:  # a namespace has no file of its own
                raise ExportError(f"module {name}: has no Python source to export")
        elif name not in found:
            found[name] = path
            pending += [name.rpartition(".")[0]] if "." in name else []
            pending += _imported(name, path, packages)
    files = {}
    for name, path in found.items():
        folder = name.replace(".", "/") if path.name == "__init__.py" else name.rpartition(".")[0].replace(".", "/")
        files[f"{folder}/{path.name}".lstrip("/")] = path.read_text(encoding="utf-8")
        if path.name == "__init__.py":
            data = (item for item in path.parent.iterdir() if item.suffix in DATA_SUFFIXES)
            files |= {f"{folder}/{item.name}": item.read_text(encoding="utf-8") for item in data}
    return dict(sorted(files.items()))


def _imported(name: str, path: Path, packages: set[str]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REFERENCE.fullmatch(node.value):
            module = node.value.partition(":")[0]
            if module.split(".")[0] in packages:
                yield module
    for node, optional in _imports(tree, False):
        if isinstance(node, ast.Import):
            modules, attributes = [alias.name for alias in node.names], []
        else:
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            modules, attributes = [base], [f"{base}.{alias.name}" for alias in node.names]
        for module in modules:
            top = module.split(".")[0]
            if top in packages:
                if isinstance(node, ast.Import) and (len(node.names) > 1 or not node.names[0].asname):
                    raise ExportError(f"{path}:{node.lineno}: write `from ... import ...` to be exportable")
                yield module
                yield from filter(_locate, attributes)
            elif not optional and top not in LIBRARIES and top not in sys.stdlib_module_names:
                raise ExportError(
                    f"{path}:{node.lineno}: needs {top}, and an exported file may import only torch, triton and the "
                    "standard library; export shapes that route to another family"
                )


def _imports(tree: ast.AST, optional: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports that run, each with whether the module runs without it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, optional
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        else:
            guarded = isinstance(node, ast.Try) and any("ImportError" in _caught(item) for item in node.handlers)
            guarded |= isinstance(node, ast.With) and any(
                "suppress" in ast.unparse(item) and "ImportError" in ast.unparse(item) for item in node.items
            )
            yield from _imports(node, optional or guarded)


def _caught(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type).replace("ModuleNotFoundError", "ImportError") if handler.type else ""


@cache
def _locate(name: str) -> Path | None:
    """Return a module's source file, found without importing anything but the package at its top; None without one."""
    parent, _, child = name.rpartition(".")
    above = _locate(parent) if parent else None
    if above is not None:
        if above.name != "__init__.py":
            return None
        found = (above.parent / f"{child}.py", above.parent / child / "__init__.py")
        return next((path for path in found if path.is_file()), None)
    if parent.count("."):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and (spec.origin or "").endswith(".py") else None
