#!/usr/bin/env python3
"""Count the shape of the code: lines, functions, classes, imports. Nothing is imported or run.

    python scripts/shape.py            # a table
    python scripts/shape.py --json     # the same as one line of JSON
    python scripts/shape.py --check    # exit code 1 where a row is above its limit (`make lint`)

A limit is what a row may not exceed; it goes down as the code becomes smaller, never up.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
FOLDERS = ("src", "benchmarks", "tests", "scripts", "examples")
COLUMNS = 100
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# calls and a class whose parameters and fields the users' programs name: no limit holds there
PUBLIC = {
    "api.py shard",
    "config/native.py Config",
    "config/native.py ShardOptions",
    *(f"checkpoint/{name}" for name in ("save.py save", "save.py __init__", "load.py load")),
}
# what a condition asks for when it reads the table again: tier, codec, placement or transport
TABLE_WORDS = re.compile(
    "Scope|Tier|aliased|away|codec|coded_rest|device|is_coded|is_local|is_partial|is_sharded|keyed"
    "|master_is_weight|on_device|one_sided|replicated|rests_elsewhere|scope|sums_are_shared"
    "|sums_micro_batches|sums_nodes|tier|tiered"
)


@dataclass(frozen=True)
class Row:
    """One count, where its largest instance is, and what it may not exceed."""

    name: str
    value: int
    where: str = ""
    limit: int | None = None


def functions(tree: ast.AST) -> Iterator[FUNCTION]:
    """Yield every function and method of a module, those inside others included."""
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def num_lines(function: FUNCTION) -> int:
    """Return the lines of a function, from ``def`` to its last, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: FUNCTION) -> int:
    """Return how many parameters a caller may give, ``self`` and ``cls`` left out."""
    every = function.args
    names = [argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names of what the class's instances hold: fields, and what is assigned to self."""
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def foreign_stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each store to an attribute of an object other than self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                yield node


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions that ask where a state rests or how it travels."""
    for node in ast.walk(tree):
        asked = node.ifs if isinstance(node, ast.comprehension) else []
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            asked = [node.test]
        for test in asked:
            parts = list(ast.walk(test))
            names = {part.id for part in parts if isinstance(part, ast.Name)}
            names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
            if any(map(TABLE_WORDS.fullmatch, names)):
                yield test


def protocol_methods(tree: ast.Module) -> set[str]:
    """Return the methods that the Protocols of a module document: implementations need not."""
    return {
        method.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        for method in node.body
        if isinstance(method, FUNCTION)
    }


def undocumented(tree: ast.Module, implemented: Container[str] = ()) -> Iterator[str]:
    """Yield the public functions, classes and methods of a module that have no docstring.

    Methods called as one of those `implemented`, and those of a class with bases, are left out:
    they have their docstring in the Protocol or in the base.
    """

    def ending(decorator: ast.expr) -> str:
        return "." + ast.unparse(decorator).rpartition(".")[2]

    def public(body: list[ast.stmt]) -> list[FUNCTION | ast.ClassDef]:
        named = [node for node in body if isinstance(node, FUNCTION | ast.ClassDef)]
        setters = [node for node in named if ".setter" in map(ending, node.decorator_list)]
        return [node for node in named if node not in setters and not node.name.startswith("_")]

    for node in public(tree.body):
        if ast.get_docstring(node) is None:
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in public(node.body):
                if ast.get_docstring(method) is None and method.name not in implemented:
                    yield f"{node.name}.{method.name}"


def imports(tree: ast.AST) -> set[str]:
    """Return the modules that a module imports, those for type checking alone included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
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


def measure() -> list[Row]:
    """Return every row of the table."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    name = {path: str(path.relative_to(PACKAGE)) for path in trees}

    lines = sum(texts[path].count("\n") for path in texts)
    wide = Counter(
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().split("\n")
        if len(line.partition("  # type: ignore")[0].partition("  # noqa")[0]) > COLUMNS
    )

    every = [(node, path) for path, tree in trees.items() for node in functions(tree)]
    lengths = sorted((num_lines(node), f"{name[path]} {node.name}") for node, path in every)
    parameters = max(
        (num_parameters(node), where)
        for node, path in every
        if (where := f"{name[path]} {node.name}") not in PUBLIC
    )
    classes = [
        (node, f"{name[path]} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    held = max((len(attributes(node)), where) for node, where in classes if where not in PUBLIC)
    methods = max(
        (sum(isinstance(part, FUNCTION) for part in node.body), where) for node, where in classes
    )
    stores = Counter(
        f"{name[path]} .{node.attr}"
        for path, tree in trees.items()
        if name[path].startswith("runtime/")
        for node in foreign_stores(tree)
    )
    asking = Counter(
        name[path]
        for path, tree in trees.items()
        if name[path].startswith(("runtime/", "optim/", "buffer.py"))
        for _ in conditions(tree)
    )
    documented = set().union(*map(protocol_methods, trees.values()))
    bare = [
        f"{name[path]} {thing}"
        for path, tree in trees.items()
        for thing in undocumented(tree, documented)
    ]

    modules = {
        ".".join(("zeroshard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): tree
        for path, tree in trees.items()
    }
    graph = {
        module: (imports(tree) & modules.keys()) - {module} for module, tree in modules.items()
    }
    circles = cycles(graph)
    circled = "; ".join(" ".join(circle) for circle in circles)

    p95, longest = lengths[int(0.95 * len(lengths))][0], lengths[-1]
    return [
        Row("lines in the package", lines),
        Row(f"lines over {COLUMNS} columns", sum(wide.values()), ", ".join(wide), limit=0),
        Row("lines of a function: 95th percentile", p95, limit=27),
        Row("lines of a function: maximum", *longest, limit=59),
        Row("attributes of a class: maximum", *held, limit=15),
        Row("methods of a class: maximum", *methods, limit=30),
        Row("parameters of a function: maximum", *parameters, limit=7),
        Row("attributes stored from outside in runtime", len(stores), limit=7),
        Row(
            "conditions on tier, codec, placement (runtime, optim)",
            sum(asking.values()),
            f"{len(asking)} files: " + " ".join(f"{f} {n}" for f, n in asking.most_common(3)),
            limit=77,
        ),
        Row("public names without docstring", len(bare), ", ".join(bare), limit=0),
        Row("groups of modules that import one another", len(circles), circled, limit=0),
    ]


def main() -> int:
    """Print the rows; return 1 where --check finds one above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--check", action="store_true", help="say only which rows are too large")
    args = parser.parse_args()
    rows = measure()
    above = [row for row in rows if row.limit is not None and row.value > row.limit]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not args.check:
        for row in rows:
            limit = "" if row.limit is None else f"limit {row.limit}"
            print(f"{row.value:7d}  {limit:9}  {row.name:54}  {row.where[:60]}".rstrip())
    for row in above if args.check else ():
        print(f"{row.name}: {row.value}, limit {row.limit}: {row.where}", file=sys.stderr)
    return 1 if args.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
