"""Which names of a statement mean the module's own, and which are local: Python's scoping over the syntax tree."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__"}


@dataclass(frozen=True)
class Reference:
    """A use of a name that no function around it binds, or that one binds by importing it.

    `imported` is that import inside a function; `taken` are the names local to the functions around the use, `fstring`
    the outermost f-string it stands in. `attribute` is the node `name.x` when the use is one.
    """

    node: ast.Name
    taken: frozenset[str]
    imported: tuple[str, str] | None
    fstring: ast.JoinedStr | None
    attribute: ast.Attribute | None


@dataclass(frozen=True)
class _Scope:
    """Names of the functions around a node, and which of them an import inside a function bound to what."""

    local: frozenset[str] = frozenset()
    imports: tuple[tuple[str, tuple[str, str]], ...] = ()

    def inside(self, names: set[str], imports: dict[str, tuple[str, str]]) -> _Scope:
        kept = tuple((name, target) for name, target in self.imports if name not in names)
        return _Scope(self.local | names, kept + tuple(imports.items()))


def references(node: ast.AST) -> Iterator[Reference]:
    """Yield every reference of a top-level statement to a name outside its functions."""
    yield from _visit(node, _Scope(), None, None)


def bound_names(statements: list[ast.stmt]) -> set[str]:
    """Return the names a block binds in its own scope: assigned, defined, imported, caught, deleted."""
    names: set[str] = set()
    for statement in statements:
        for node in _own_nodes(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                names.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                names.add(node.name)
    return names


def _visit(
    node: ast.AST, scope: _Scope, fstring: ast.JoinedStr | None, attribute: ast.Attribute | None
) -> Iterator[Reference]:
    if isinstance(node, ast.Name):
        imported = dict(scope.imports).get(node.id)
        if imported or node.id not in scope.local:
            yield Reference(node, scope.local, imported, fstring, attribute)
        return
    if isinstance(node, Function):
        yield from _visit_function(node, scope, scope, fstring)
        return
    if isinstance(node, ast.ClassDef):
        yield from _visit_class(node, scope)
        return
    if isinstance(node, COMPREHENSIONS):
        targets = {name.id for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name)}
        scope = scope.inside(targets, {})
    fstring = fstring or (node if isinstance(node, ast.JoinedStr) else None)
    for child in ast.iter_child_nodes(node):
        around = node if isinstance(node, ast.Attribute) and child is node.value else None
        yield from _visit(child, scope, fstring, around)


def _visit_class(node: ast.ClassDef, scope: _Scope) -> Iterator[Reference]:
    """Visit a class: its own names are seen by its statements, and not inside its methods."""
    for part in (*node.decorator_list, *node.bases, *node.keywords):
        yield from _visit(part, scope, None, None)
    own = scope.inside(bound_names(node.body), {})
    for statement in node.body:
        if isinstance(statement, Function):
            yield from _visit_function(statement, own, scope, None)
        else:
            yield from _visit(statement, own, None, None)


def _visit_function(
    node: Function, around: _Scope, scope: _Scope, fstring: ast.JoinedStr | None
) -> Iterator[Reference]:
    """Visit what is evaluated around the function, then its body with its own names."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    outside: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults, *(a.annotation for a in every)]
    if not isinstance(node, ast.Lambda):
        outside += [*node.decorator_list, node.returns]
    for part in outside:
        if part is not None:
            yield from _visit(part, around, fstring, None)
    body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
    globals_ = {name for child in ast.walk(node) if isinstance(child, ast.Global) for name in child.names}
    names = {argument.arg for argument in every} | (bound_names(body) - globals_)
    imports = {
        alias.asname or alias.name: (child.module or "", alias.name)
        for statement in body
        for child in _own_nodes(statement)
        if isinstance(child, ast.ImportFrom)
        for alias in child.names
    }
    inner = scope.inside(names, imports)
    for statement in body:
        yield from _visit(statement, inner, fstring, None)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that stand in its own scope: not the insides of functions and classes."""
    yield node
    if isinstance(node, COMPREHENSIONS):
        # A walrus inside a comprehension binds outside it.
        yield from (child.target for child in ast.walk(node) if isinstance(child, ast.NamedExpr))
        return
    if isinstance(node, Function | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child)
