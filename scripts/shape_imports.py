"""What a module imports, what that comes to, and which modules import one another; from the source.

Imports inside functions count like others: a closure that shrinks by moving an import into a
function would have shrunk by nothing. Those for type checking alone do not count in a closure,
since nothing is loaded; they count where modules import one another.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Mapping
from pathlib import Path

from shape_names import nodes


def module_names(trees: Mapping[Path, ast.Module], package: Path) -> dict[str, Path]:
    """Return the files of a package by the module's full name."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in trees
    }


@functools.cache
def imports(tree: ast.AST, *, for_types: bool = True) -> frozenset[str]:
    """Return what a module imports by absolute name, modules and names in them alike.

    Not `for_types`: without the bodies of ``if TYPE_CHECKING``.
    """
    hidden = {
        node
        for test in nodes(tree, ast.If)
        if not for_types and ast.unparse(test.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in test.body
        for node in ast.walk(statement)
    }
    found = set()
    for plain in nodes(tree, ast.Import):
        if plain not in hidden:
            found |= {alias.name for alias in plain.names}
    for node in nodes(tree, ast.ImportFrom):
        if node.module and node not in hidden:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def closure(
    start: str, modules: Mapping[str, ast.Module], *, typed: bool = False, without: str = ""
) -> set[str]:
    """Return `start` and the `modules` that it imports, and those import, the packages around each
    included.

    `typed`: what `start` itself imports for type checking counts (a package that looks its names up
    when they are first used lists them there). `without`: a module that is left out.
    """
    seen: set[str] = set()
    todo = {start}
    while todo:
        name = todo.pop()
        seen.add(name)
        found = set(imports(modules[name], for_types=typed and name == start) & modules.keys())
        if (around := name.rpartition(".")[0]) in modules:
            found.add(around)
        todo |= found - seen - {without}
    return seen


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another (strongly connected components)."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for target in graph[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph
    }
    return [list(group) for group in sorted(groups) if group]
