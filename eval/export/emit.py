"""Write kept statements as they stand in their files, names changed where two modules used one."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from rooflane.eval.export.collect import PLANNING_METHODS, Collection
from rooflane.eval.export.scopes import BUILTINS, bound_names, references
from rooflane.eval.export.sources import ExportError, Sources, Unit

# (line, first byte, last line, byte behind, new text); lines from 1.
Edit = tuple[int, int, int, int, str]


def emit_imports(collection: Collection) -> str:
    """Return the import lines of every library name."""
    plain: list[str] = []
    froms: dict[str, list[str]] = {}
    for target, name in collection.externals():
        if target.attribute is None:
            plain.append(f"import {target.module}" + ("" if name == target.module else f" as {name}"))
        else:
            alias = "" if name == target.attribute else f" as {name}"
            froms.setdefault(target.module, []).append(target.attribute + alias)
    return "\n".join(
        sorted(plain) + [f"from {module} import {', '.join(sorted(froms[module]))}" for module in sorted(froms)]
    )


def emit_units(collection: Collection, sources: Sources, specs: set[tuple[str, str]]) -> str:
    """Return the kept statements, each module under a heading with its own words."""
    parts: list[str] = []
    module = before = None
    for unit in collection.units:
        block = isinstance(unit.node, ast.FunctionDef | ast.ClassDef)
        if unit.module is not module:
            module = unit.module
            parts.append(f"\n\n\n{_heading(unit.module.name, unit.module.docstring)}")
            before = True
        parts.append("\n\n\n" if block or before else "\n")
        parts.append(_emit_unit(unit, collection, sources, specs))
        before = block
    return "".join(parts)


def undefined_names(text: str) -> list[str]:
    """Return the global names a text uses and does not bind."""
    tree = ast.parse(text)
    bound = bound_names(tree.body) | BUILTINS
    used = {reference.node.id for node in tree.body for reference in references(node) if not reference.imported}
    return sorted(used - bound)


def _emit_unit(unit: Unit, collection: Collection, sources: Sources, specs: set[tuple[str, str]]) -> str:
    """Return one statement's text with its edits made."""
    edits = list(_renames(unit, collection))
    is_spec = isinstance(unit.node, ast.ClassDef) and (unit.module.name, unit.node.name) in specs
    removed: list[tuple[int, int]] = []
    if is_spec:
        removed += [
            (min([item.lineno, *(mark.lineno for mark in item.decorator_list)]), item.end_lineno)
            for item in unit.node.body
            if isinstance(item, ast.FunctionDef) and item.name in PLANNING_METHODS
        ]
    for node, alone in _inner_imports(unit.node):
        if isinstance(node, ast.ImportFrom) and sources.ours(node.module or ""):
            if alone:
                edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, "pass"))
            else:
                removed.append((node.lineno, node.end_lineno))
        elif isinstance(node, ast.Import) and any(sources.ours(alias.name) for alias in node.names):
            raise ExportError(f"{unit.module.where(node)}: write `from ... import ...` to be exportable")
    lines = [line.encode() for line in unit.module.lines]
    for first, begin, last, end, text in sorted(edits, reverse=True):
        lines[first - 1] = lines[first - 1][:begin] + text.encode() + lines[last - 1][end:]
        for number in range(first, last):
            lines[number] = b"\0"
    for first, last in removed:
        for number in range(first - 1, last):
            lines[number] = b"\0"
        # The blank line behind what is taken out goes with it.
        before = lines[first - 2].strip()
        if last < unit.end and not lines[last].strip() and (before in (b"", b"\0") or before.endswith(b":")):
            lines[last] = b"\0"
    kept = [line.decode() for line in lines[unit.start - 1 : unit.end] if line != b"\0"]
    while kept and not kept[-1].strip():
        kept.pop()
    # What stood in a TYPE_CHECKING block stands at the margin here.
    return textwrap.dedent("\n".join(kept)) if unit.node.col_offset else "\n".join(kept)


def _renames(unit: Unit, collection: Collection) -> Iterator[Edit]:
    """Yield the edits that give every use, and the statement's own name, the export's names."""
    strings: dict[int, ast.JoinedStr] = {}
    for use in collection.uses[id(unit)]:
        name = collection.name_of(use.target)
        reference = use.reference
        node: ast.expr = reference.node
        if use.through:
            node = reference.attribute
        if ast.unparse(node) == name:
            continue
        if reference.fstring is not None:
            # Positions inside an f-string are not to be relied on before Python 3.12: the whole is written anew.
            reference.node.id = name
            strings[id(reference.fstring)] = reference.fstring
            continue
        yield node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, name
    for string in strings.values():
        yield string.lineno, string.col_offset, string.end_lineno, string.end_col_offset, ast.unparse(string)
    yield from _own_renames(unit, collection)


def _own_renames(unit: Unit, collection: Collection) -> Iterator[Edit]:
    """Yield the edits of a renamed function's or class's own name, and of `global` lines."""
    new = {name: collection.names[id(unit), name] for name in unit.binds}
    node = unit.node
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and new[node.name] != node.name:
        line = unit.module.lines[node.lineno - 1]
        found = re.search(rf"\b(?:def|class)\s+({re.escape(node.name)})\b", line)
        begin, end = (len(line[:place].encode()) for place in found.span(1))
        yield node.lineno, begin, node.lineno, end, new[node.name]
    for child in ast.walk(node):
        if not isinstance(child, ast.Global):
            continue
        renamed = []
        for name in child.names:
            owner = next((other for other in unit.module.units if name in other.binds), None)
            renamed.append(collection.names.get((id(owner), name), name))
        yield child.lineno, child.col_offset, child.end_lineno, child.end_col_offset, f"global {', '.join(renamed)}"


def _inner_imports(node: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports inside a statement, and whether one stands alone in its block."""
    for parent in ast.walk(node):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(parent, block, None)
            if isinstance(statements, list):
                for child in statements:
                    if isinstance(child, ast.Import | ast.ImportFrom):
                        yield child, len(statements) == 1


def _heading(module: str, docstring: str) -> str:
    """Return a module's name and docstring as comments."""
    rule = "# " + "-" * 100
    words = "\n".join(f"# {line}".rstrip() for line in docstring.splitlines())
    return f"{rule}\n# {module}\n{words}".rstrip()
