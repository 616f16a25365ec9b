"""Gather the statements some names need, transitively, and give every one of them a name of its own."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from rooflane.eval.export.scopes import BUILTINS, Reference, references
from rooflane.eval.export.sources import ExportError, External, Module, ModuleRef, Sources, Unit, check_library

# What the router asks of a family before anything is built; an export has been routed.
PLANNING_METHODS = ("supports", "peak_bytes", "predict_s")
# A candidate file is searched for `build`, so a helper of that name would be taken for the candidate; `SPEC` says more
# with its family before it.
RESERVED = ("build", "SPEC")


@dataclass(frozen=True)
class Use:
    """One reference of a kept statement, and what it stands for: (unit, name) of ours or a library's name.

    `through`: the use is `module.name` of a module of ours, which the export knows by one name.
    """

    reference: Reference
    target: tuple[Unit, str] | External
    through: bool


@dataclass
class Collection:
    """The statements to keep, in the order they may run, with their uses and the final names."""

    units: list[Unit] = field(default_factory=list)
    uses: dict[int, list[Use]] = field(default_factory=dict)
    names: dict[tuple[int, str] | External, str] = field(default_factory=dict)

    def name_of(self, target: tuple[Unit, str] | External) -> str:
        """Return the name a target has in the export."""
        return self.names[_key(target)]

    def externals(self) -> list[tuple[External, str]]:
        """Return the library names to import, each with its name in the export."""
        return [(key, name) for key, name in self.names.items() if isinstance(key, External)]


class Collector:
    """Follows names from roots through the sources; `specs` are family classes, kept without their planning."""

    def __init__(self, sources: Sources, specs: set[tuple[str, str]]) -> None:
        self._sources = sources
        self._specs = specs
        self._kept: dict[int, Unit] = {}
        self._uses: dict[int, list[Use]] = {}
        self._wanted: list[str] = []

    def require(self, module: str, name: str) -> Unit:
        """Keep what a module's name stands for, and everything that needs; return its statement."""
        found = self._sources.resolve(module, name)
        if not isinstance(found, Unit):
            raise ExportError(f"{module}.{name} is no statement of ours to export")
        self._keep(found)
        return found

    def collect(self) -> Collection:
        """Return everything kept, ordered by the modules' imports, with a name for each."""
        order = [unit for name in self._order() for unit in self._sources.module(name).units if id(unit) in self._kept]
        collection = Collection(order, self._uses)
        _allot(collection)
        return collection

    def _keep(self, unit: Unit) -> None:
        if id(unit) in self._kept:
            return
        self._kept[id(unit)] = unit
        if unit.module.name not in self._wanted:
            self._wanted.append(unit.module.name)
        self._uses[id(unit)] = uses = list(self._follow(unit))
        for use in uses:
            if isinstance(use.target, tuple):
                self._keep(use.target[0])
        # What a module does when it is imported, such as registering a hook, its functions rely on.
        for other in unit.module.units:
            if not other.binds:
                self._keep(other)

    def _follow(self, unit: Unit) -> Iterator[Use]:
        module = unit.module
        kept = self._without_planning(unit)
        for node in ast.walk(kept):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if not self._sources.ours(name):
                    check_library(External(name, None), module.where(node))
        for reference in references(kept):
            name = reference.node.id
            if reference.imported:
                source, attribute = reference.imported
                if not self._sources.ours(source):
                    continue  # the import stays where it stands, in the function
                found: Unit | External | ModuleRef = self._sources.resolve(source, attribute)
                name = attribute
            elif name in BUILTINS and not self._defines(module, name):
                if name == "__file__":
                    raise ExportError(
                        f"{module.where(reference.node)}: reads files beside its module, which an exported file lacks"
                    )
                continue
            else:
                found = self._sources.resolve(module.name, name)
                name = self._original(module, name)
            through = isinstance(found, ModuleRef)
            if isinstance(found, ModuleRef):
                if reference.attribute is None:
                    raise ExportError(f"{module.where(reference.node)}: uses a module as a value, which has no export")
                name = reference.attribute.attr
                found = self._sources.resolve(found.module, name)
            if isinstance(found, ModuleRef):
                raise ExportError(
                    f"{module.where(reference.node)}: reaches through two modules; import the name itself"
                )
            if isinstance(found, External):
                check_library(found, module.where(reference.node))
                yield Use(reference, found, through)
            elif name in found.binds:
                yield Use(reference, (found, name), through)
            else:
                raise ExportError(
                    f"{module.where(reference.node)}: {name!r} was given another name on its way here; import it by "
                    "its own"
                )

    def _without_planning(self, unit: Unit) -> ast.stmt:
        """Return a unit's node; of a family's class, a copy that lacks what only the router asks."""
        node = unit.node
        if not isinstance(node, ast.ClassDef) or (unit.module.name, node.name) not in self._specs:
            return node
        kept = copy.copy(node)
        kept.body = [item for item in node.body if getattr(item, "name", "") not in PLANNING_METHODS]
        return kept

    def _defines(self, module: Module, name: str) -> bool:
        return name in module.imports or any(name in unit.binds for unit in module.units)

    def _original(self, module: Module, name: str) -> str:
        """Return the name a global has where it is defined: an import may have given it another."""
        target, attribute = module.imports.get(name, ("", None))
        return attribute or name if self._sources.ours(target) else name

    def _order(self) -> list[str]:
        """Return the kept modules, each behind those it imports at its top."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen:
                return
            seen.add(name)
            for edge in self._sources.module(name).edges:
                visit(edge)
            order.append(name)

        for name in self._wanted:
            visit(name)
        return [name for name in order if name in self._wanted]


def _key(target: tuple[Unit, str] | External) -> tuple[int, str] | External:
    return target if isinstance(target, External) else (id(target[0]), target[1])


def _allot(collection: Collection) -> None:
    """Give every kept name one of its own: its old one where that is free and no use stands among locals of it."""
    taken: set[str] = set(RESERVED)
    locals_of: dict[object, set[str]] = {}
    for uses in collection.uses.values():
        for use in uses:
            locals_of.setdefault(_key(use.target), set()).update(use.reference.taken - {use.reference.node.id})

    def allot(key: tuple[int, str] | External, wishes: list[str]) -> None:
        avoid = taken | locals_of.get(key, set())
        numbered = (f"{wishes[-1]}_{number}" for number in range(2, 1000))
        name = next(wish for wish in (*wishes, *numbered) if wish not in avoid)
        taken.add(name)
        collection.names[key] = name

    for unit in collection.units:
        for use in collection.uses[id(unit)]:
            if isinstance(use.target, External) and use.target not in collection.names:
                allot(use.target, [use.reference.node.id])
    for unit in collection.units:
        for name in sorted(unit.binds):
            allot((id(unit), name), [name, _prefixed(unit.module.name, name)])


def _prefixed(module: str, name: str) -> str:
    """Return a name with its module's folder before it: `build` of resident/build.py is `resident_build`."""
    folder = module.split(".")[-2]
    return f"_{folder}{name}" if name.startswith("_") else f"{folder}_{name}"
