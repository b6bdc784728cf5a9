#!/usr/bin/env python3
"""Count the shape of the code: lines, functions, names, imports. Nothing of it is imported or run.

    python scripts/shape.py            # a table
    python scripts/shape.py --json     # the same as one line of JSON
    python scripts/shape.py --check    # exit code 1 where a row is above its limit (`make lint`)
    python scripts/shape.py --rooms main  # lines of code by room, and what is more than in `main`

A limit is what a row may not exceed; it goes down as the code becomes smaller, never up. An aim is
where a row is to go. Rows without a limit are information: the attributes and methods of one class
are, since a class that is split where a limit was met is not a smaller one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import shape_names
from shape_imports import closure, cycles, imports, module_names
from shape_names import FUNCTION, attributes, functions, nodes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
FOLDERS = ("src", "benchmarks", "tests", "scripts", "examples")
COLUMNS = 100
# calls and classes whose parameters, fields or methods the programs of users name: no limit holds
PUBLIC = {
    "sharding/api.py shard",
    "config/native.py Config",
    "config/native.py ShardOptions",
    "deepspeed/deepspeed_engine.py DeepSpeedEngine",
    *(f"checkpoint/{name}" for name in ("save.py save", "save.py __init__", "load.py load")),
}
# what a condition asks for when it reads the table again: tier, codec, placement or transport
TABLE_WORDS = re.compile(
    "Scope|Tier|aliased|away|codec|coded_rest|device|is_coded|is_local|is_partial|is_sharded|keyed"
    "|master_is_weight|on_device|one_sided|replicated|rests_elsewhere|scope|sums_are_shared"
    "|sums_micro_batches|sums_nodes|tier|tiered"
)


# how a docstring does not begin: it says what a thing is, or does ("Whether" of a property may)
INTERROGATIVES = re.compile(r"(How|What|When|Where|Which|Who|Whom|Whose|Why)\b")
# relative clauses that a reader has to turn round
TURNS = re.compile(r"\b(of (which|whom)|that of|those of|whose)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One count, where its largest instance is, what it may not exceed, and where it is to go."""

    name: str
    value: int
    where: str = ""
    limit: int | None = None
    aim: int | None = None


def after_docstring(function: FUNCTION) -> int:
    """Return the line before the first of a function's body, docstring left out."""
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return first.lineno - 1
    return first.end_lineno or first.lineno


def num_lines(function: FUNCTION) -> int:
    """Return the lines of a function, from ``def`` to its last, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: FUNCTION) -> int:
    """Return how many parameters a caller may give, ``self`` and ``cls`` left out."""
    every = function.args
    names = [argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def foreign_stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each store to an attribute of an object other than self."""
    for node in nodes(tree, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if isinstance(node.ctx, ast.Store) and not is_own:
            yield node


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions that ask where a state rests or how it travels."""
    tests = [test for node in nodes(tree, ast.comprehension) for test in node.ifs]
    tests += [node.test for node in nodes(tree, ast.If)]
    tests += [node.test for node in nodes(tree, ast.IfExp)]
    tests += [node.test for node in nodes(tree, ast.While)]
    for test in tests:
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


def code_lines(text: str) -> int:
    """Return the lines of code in `text`: docstrings, comments and blank lines are none."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    begins = True  # whether a statement begins: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and not (begins and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = token.type in skipped if token.type != tokenize.NL else begins
    return len(lines) - 1  # the end of the file is a token


def rooms(texts: Mapping[str, str]) -> Counter[str]:
    """Return the lines of code by room, of `texts` by path in the package."""
    counted: Counter[str] = Counter()
    for path, text in texts.items():
        counted[path.partition("/")[0] if "/" in path else "."] += code_lines(text)
    return counted


def texts_of(base: str) -> dict[str, str]:
    """Return the texts of the package by path, as commit `base` of git has them ("": as they lie
    here).
    """
    if not base:
        return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", ROOT, *words], stdout=subprocess.PIPE, check=True)
        return run.stdout.decode()

    package = f"{PACKAGE.relative_to(ROOT)}/"
    names = git("ls-tree", "-r", "--name-only", base, package).splitlines()
    return {
        name.removeprefix(package): git("show", f"{base}:{name}")
        for name in names
        if name.endswith(".py")
    }


def tell_rooms(base: str) -> None:
    """Print the lines of code by room, and the difference to commit `base`."""
    now, before = rooms(texts_of("")), rooms(texts_of(base))
    for room in sorted(now | before, key=lambda room: -now[room]):
        print(f"{now[room]:7} {now[room] - before[room]:+7}  {room}")
    print(f"{now.total():7} {now.total() - before.total():+7}  all")


def reading(root: Path, package: Path) -> list[Path]:
    """Return the files of the package that README and the tour, but for its last section, name."""
    tour = (root / "docs" / "tour.md").read_text().partition("\n## And elsewhere")[0]
    named = re.findall(r"`([a-z_/0-9]*\.py)", (root / "README.md").read_text() + tour)
    return [path for name in sorted(set(named)) if (path := package / name).is_file()]


def measure() -> list[Row]:
    """Return every row of the table."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {path: text.count("\n") for path, text in texts.items()}
    parsed = {path: ast.parse(text) for path, text in texts.items()}
    trees = {str(path.relative_to(PACKAGE)): tree for path, tree in parsed.items()}
    return [
        *line_rows(sum(lines.values()), len(lines), sum(map(code_lines, texts.values()))),
        *word_rows(trees, texts),
        *function_rows(trees),
        *class_rows(trees),
        *condition_rows(trees),
        *import_rows(parsed, lines),
        *name_rows(trees),
    ]


def line_rows(lines: int, num_files: int, code: int) -> Iterator[Row]:
    """Yield the rows about lines, tests and scripts included where it says so."""
    wide = Counter(
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().split("\n")
        if len(line.partition("  # type: ignore")[0].partition("  # noqa")[0]) > COLUMNS
    )
    files = reading(ROOT, PACKAGE)
    read = sum(path.read_text().count("\n") for path in files)
    yield Row("lines in the package", lines, aim=51000)
    yield Row("of these, lines of code: no docstring, comment or blank line", code)
    yield Row("files of the package", num_files, aim=180)
    yield Row(f"lines over {COLUMNS} columns", sum(wide.values()), ", ".join(wide), limit=0)
    yield Row(
        "lines that README and tour ask to read", read, f"{len(files)} files", limit=9310, aim=5000
    )


def word_rows(trees: shape_names.Trees, texts: Mapping[Path, str]) -> Iterator[Row]:
    """Yield the rows about sentences."""
    asking = [
        f"{path} {getattr(node, 'name', '')}".strip()
        for path, tree in trees.items()
        for node in (tree, *nodes(tree, ast.ClassDef), *functions(tree))
        if INTERROGATIVES.match(ast.get_docstring(node) or "")
    ]
    turns = sum(len(TURNS.findall(text)) for text in texts.values())
    where = ", ".join(asking)
    yield Row("docstrings that begin with an interrogative", len(asking), where, limit=0)
    yield Row('"of which", "that of", "those of", "whose"', turns, limit=20)


def function_rows(trees: shape_names.Trees) -> Iterator[Row]:
    """Yield the rows about single functions."""
    every = [(node, path) for path, tree in trees.items() for node in functions(tree)]
    lengths = sorted((num_lines(node), f"{path} {node.name}") for node, path in every)
    parameters = max(
        (num_parameters(node), where)
        for node, path in every
        if (where := f"{path} {node.name}") not in PUBLIC
    )
    documented = set().union(*map(protocol_methods, trees.values()))
    bare = [
        f"{path} {thing}"
        for path, tree in trees.items()
        for thing in undocumented(tree, documented)
    ]
    bodies = [node.end_lineno - after_docstring(node) for node, _ in every if node.end_lineno]
    yield Row("functions", len(every), aim=3600)
    yield Row("lines of ten functions' bodies: mean", round(10 * sum(bodies) / len(every)), aim=100)
    yield Row(
        "lines of a function: 95th percentile", lengths[int(0.95 * len(lengths))][0], limit=40
    )
    yield Row("lines of a function: maximum", *lengths[-1], limit=100)
    yield Row("parameters of a function: maximum", *parameters, limit=7)
    yield Row("public names without docstring", len(bare), ", ".join(bare), limit=0)


def class_rows(trees: shape_names.Trees) -> Iterator[Row]:
    """Yield the rows about single classes."""
    classes = [(f"{path} {node.name}", node) for path, node in shape_names.classes(trees)]
    held = max((len(attributes(node)), where) for where, node in classes if where not in PUBLIC)
    own = max((len(shape_names.methods(node)), where) for where, node in classes)
    interfaces = shape_names.interfaces(trees, PACKAGE.name)
    whole = max((count, where) for where, count in interfaces.items() if where not in PUBLIC)
    stores = Counter(
        f"{path} .{node.attr}"
        for path, tree in trees.items()
        if path.startswith("runtime/")
        for node in foreign_stores(tree)
    )
    waiting = [where for where, node in classes if "wait" in shape_names.methods(node)]
    yield Row("attributes of a class: maximum", *held)
    yield Row("methods of a class: maximum", *own)
    yield Row("methods of a class with its bases: maximum", *whole, limit=43)
    yield Row("attributes stored from outside in runtime", len(stores), limit=13)
    yield Row("classes with wait()", len(waiting), " ".join(waiting), limit=17, aim=2)


def condition_rows(trees: shape_names.Trees) -> Iterator[Row]:
    """Yield the row about conditions that read the table again."""
    asking = Counter(
        path
        for path, tree in trees.items()
        if path.startswith(("runtime/", "optim/", "buffer.py"))
        for _ in conditions(tree)
    )
    where = f"{len(asking)} files: {numbered(asking)}"
    name = "conditions on tier, codec, placement (runtime, optim)"
    yield Row(name, sum(asking.values()), where, limit=67, aim=10)


def import_rows(parsed: dict[Path, ast.Module], lines: dict[Path, int]) -> Iterator[Row]:
    """Yield the rows about what a module imports."""
    paths = module_names(parsed, PACKAGE)
    modules = {module: parsed[path] for module, path in paths.items()}
    top = PACKAGE.name

    def size(closed: set[str]) -> tuple[int, str]:
        return sum(lines[paths[module]] for module in closed), f"{len(closed)} modules"

    # the package itself names what sharding/api.py offers, and looks it up when it is used
    loop = closure(f"{top}.runtime.loop", modules, without=top)
    graph = {name: (imports(tree) & modules.keys()) - {name} for name, tree in modules.items()}
    circles = cycles(graph)
    yield Row("modules that runtime/loop.py imports, transitively", len(loop), limit=59)
    yield Row("their lines", *size(loop), limit=14995, aim=9000)
    yield Row(
        "lines that the public names of zeroshard load", *size(closure(top, modules, typed=True))
    )
    yield Row(
        "groups of modules that import one another",
        len(circles),
        "; ".join(" ".join(circle) for circle in circles),
        limit=0,
    )


def name_rows(trees: shape_names.Trees) -> Iterator[Row]:
    """Yield the rows about one word for one thing, and one thing for one word."""
    listed = {
        "holders that a gradient passes": (shape_names.GRADIENT_HOLDERS, 4, 3),
        "fields that say why a weight is gathered": (shape_names.GATHERED_BECAUSE, 4, 1),
        "nouns for numbers at rest": (shape_names.NUMBERS_AT_REST, 9, 1),
        "pools": (shape_names.POOLS, 7, 1),
        'ways to say "what fails on one rank fails on all"': (shape_names.FAILS_ON_ALL, 6, 1),
    }
    for name, (nouns, limit, aim) in listed.items():
        yield Row(name, len(nouns), shape_names.spread(nouns), limit=limit, aim=aim)
    missing = shape_names.gone([noun for nouns, *_ in listed.values() for noun in nouns], trees)
    yield Row("names of these lists that are gone", len(missing), ", ".join(missing), limit=0)

    agreeing = {re.split("[ .]", name)[-1] for name in shape_names.FAILS_ON_ALL}
    calls = shape_names.calls(trees, agreeing)
    raw = shape_names.calls(trees, {"exchange", "share"}).total()
    yield Row("calls of these ways, by name", calls.total(), numbered(calls), limit=88)
    yield Row("calls of exchange(): the caller reads all answers", raw, limit=52)

    spoken = shape_names.function_names(trees)
    released = shape_names.verbs(spoken, shape_names.LET_GO)
    waits = shape_names.saying(spoken, shape_names.WAIT)
    yield Row('verbs for "let go"', len(released), " ".join(sorted(released)), limit=21, aim=3)
    yield Row('names for "wait"', len(waits), " ".join(sorted(waits)), limit=15, aim=1)
    classes, files = shape_names.named_twice(trees), shape_names.files_twice(trees)
    name = "class names that two or more classes have"
    yield Row(name, len(classes), numbered(classes), limit=0)
    yield Row("file names that stand twice", len(files), numbered(files), limit=0)


def numbered(counted: Mapping[str, int]) -> str:
    """Return names with how many there are of each, most first."""
    return " ".join(f"{name} {count}" for name, count in Counter(counted).most_common())


def main() -> int:
    """Print the rows; return 1 where --check finds one above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--check", action="store_true", help="say only which rows are too large")
    parser.add_argument("--rooms", metavar="COMMIT", help="code by room, and more than there")
    args = parser.parse_args()
    if args.rooms:
        tell_rooms(args.rooms)
        return 0
    rows = measure()
    above = [row for row in rows if row.limit is not None and row.value > row.limit]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not args.check:
        print(f"{'value':>7} {'limit':>7} {'aim':>7}")
        for row in rows:
            limit, aim = ("" if number is None else number for number in (row.limit, row.aim))
            print(f"{row.value:7} {limit:>7} {aim:>7}  {row.name:53}  {row.where[:60]}".rstrip())
    for row in above if args.check else ():
        print(f"{row.name}: {row.value}, limit {row.limit}: {row.where}", file=sys.stderr)
    return 1 if args.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
