"""Modules as their top-level statements: what each binds, what the module imports, where a name comes from."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rooflane.eval.export.scopes import bound_names

# `cuda` holds cuda.bindings, which torch for CUDA 13 asks for; without it the Triton kernels run.
LIBRARIES = {"torch", "triton", "cuda"}


class ExportError(ValueError):
    """A request that cannot be exported; the text says what stands in the way, and where."""


@dataclass(frozen=True)
class External:
    """A name of a library: `import module as name`, or `from module import attribute as name`."""

    module: str
    attribute: str | None


@dataclass(frozen=True)
class ModuleRef:
    """A module of ours, imported as a name."""

    module: str


@dataclass(eq=False)
class Unit:
    """One top-level statement with the comment above it; `start` and `end` are its lines, from 1."""

    module: Module
    node: ast.stmt
    binds: frozenset[str]
    start: int
    end: int


@dataclass(eq=False)
class Module:
    """A parsed module of ours."""

    name: str
    path: Path
    lines: list[str]
    docstring: str
    units: list[Unit] = field(default_factory=list)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    edges: list[str] = field(default_factory=list)  # modules of ours imported at the top, in order

    def where(self, node: ast.AST) -> str:
        """Return file and line of a node, for messages."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


class Sources:
    """The modules of our packages, read on demand."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self._modules: dict[str, Module] = {}

    def ours(self, module: str) -> bool:
        """Tell whether a module belongs to a package that is exported by its source."""
        return module.split(".")[0] in self._packages

    def module(self, name: str) -> Module:
        """Return a module of ours by its full name."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def resolve(self, module: str, name: str) -> Unit | External | ModuleRef:
        """Return what a module's global name stands for, followed through re-exports.

        Raises `ExportError` when the module has no such name in its text.
        """
        source = self.module(module)
        for unit in source.units:
            if name in unit.binds:
                return unit
        if name in source.imports:
            target, attribute = source.imports[name]
            if not self.ours(target):
                return External(target, attribute)
            return ModuleRef(target) if attribute is None else self.resolve(target, attribute)
        if _locate(f"{module}.{name}"):
            return ModuleRef(f"{module}.{name}")
        raise ExportError(
            f"{source.path}: the name {name!r} is defined by no statement of the module, so its source cannot be "
            "exported; define or import it at the module's top level"
        )

    def _read(self, name: str) -> Module:
        path = _locate(name)
        if path is None:
            raise ExportError(f"module {name}: has no Python source to export")
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        module = Module(name, path, text.splitlines(), ast.get_docstring(tree) or "")
        self._add(module, tree.body[1:] if module.docstring else tree.body)
        return module

    def _add(self, module: Module, statements: list[ast.stmt]) -> None:
        """Sort a module's statements into imports and units; a TYPE_CHECKING block counts as part of the module."""
        for node in statements:
            if isinstance(node, ast.ImportFrom):
                self._add_from(module, node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    module.edges += [alias.name] if self.ours(alias.name) else []
                    name = alias.asname or alias.name.split(".")[0]
                    module.imports[name] = (alias.name if alias.asname else name, None)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                self._add(module, node.body)
            elif not _skipped(node):
                module.units.append(_unit(module, node))

    def _add_from(self, module: Module, node: ast.ImportFrom) -> None:
        if node.level or any(alias.name == "*" for alias in node.names):
            raise ExportError(f"{module.where(node)}: a relative or star import cannot be exported")
        if node.module == "__future__":
            return
        for alias in node.names:
            module.imports[alias.asname or alias.name] = (node.module, alias.name)
            if self.ours(node.module):
                inner = f"{node.module}.{alias.name}"
                module.edges.append(inner if _locate(inner) else node.module)


def check_library(reference: External, where: str) -> None:
    """Raise `ExportError` for a library an exported file may not need; torch, what it brings, and Python's are free."""
    top = reference.module.split(".")[0]
    if top not in LIBRARIES and top not in sys.stdlib_module_names:
        raise ExportError(
            f"{where}: needs {top}, and an exported file may import only torch, triton and the standard library; "
            "export shapes that route to another family"
        )


@cache
def _locate(name: str) -> Path | None:
    """Return a module's source file, found without importing anything but namespaces; None when it has none."""
    parent, _, child = name.rpartition(".")
    above = _locate(parent) if parent else None
    if above is not None:
        found = (above.parent / f"{child}.py", above.parent / child / "__init__.py") if _is_package(above) else ()
        return next((path for path in found if path.is_file()), None)
    if parent.count("."):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and (spec.origin or "").endswith(".py") else None


def _is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def _unit(module: Module, node: ast.stmt) -> Unit:
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
    while first > 1 and module.lines[first - 2].startswith("#"):
        first -= 1
    return Unit(module, node, frozenset(bound_names([node])), first, node.end_lineno)


def _skipped(node: ast.stmt) -> bool:
    """Tell whether a statement has no place in an export: `__all__`, a main guard."""
    if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
        return True
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    )
