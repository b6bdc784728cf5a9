"""Names of the code: classes and files that share one, verbs for one idea, nouns for one thing.

Some rows cannot be counted by a rule, so they are lists, made by hand from the source: which
classes a gradient passes, which fields say why a weight is gathered, which classes are numbers at
rest or pools, which functions make an error of one rank one of all. Each name is looked up in the
source: one that is gone must be taken off its list (a row of its own, with limit 0), and the row
gets smaller. What the lists cannot see is a new class of the kind: whoever adds one adds it here.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeVar

N = TypeVar("N", bound=ast.AST)
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Trees = Mapping[str, ast.Module]  # by path in the package

# from autograd to the step, in this order
GRADIENT_HOLDERS = (
    "runtime/bucket.py Bucket",
    "runtime/grad.py Accumulator",
    "state/gradient.py Gradient",
    "optim/sealed.py SealedGrad",
)
GATHERED_BECAUSE = (
    "core/residency.py Residency.state",
    "core/residency.py Residency.counts",
    "core/schedule/__init__.py Schedule._idle",
    "runtime/weights.py Weights.shown",
)
NUMBERS_AT_REST = (
    "state/state.py State",
    "state/gradient.py Gradient",
    "runtime/segment.py Segment",
    "runtime/flat_weights.py FlatWeights",
    "runtime/bucket.py Bucket",
    "runtime/grad.py Accumulator",
    "runtime/rest.py Rest",
    "runtime/segment_states.py RestingPiece",
    "optim/tiles.py TileStates",
)
POOLS = (
    "memory/__init__.py Pool",
    "memory/__init__.py Pages",
    "memory/host_pages.py PinnedPages",
    "comm/cpu/slots.py SlotPool",
    "tier/transfer.py Staging",
    "optim/runner.py _Buffers",
    "planner/replay.py _PlannedPool",
)
# What fails, or differs, on one rank raises on all: the functions that see to it.
FAILS_ON_ALL = (
    "comm/ranks.py Ranks.agree",
    "comm/ranks.py Ranks.together",
    "comm/groups.py HandOver.meet",
    "runtime/context.py Faults.agree",
    "runtime/context.py Faults.noted",
    "runtime/context.py Faults.together",
)
NO_RANKS = ("commands/", "launch/", "planner/")  # where the same names mean other things
LET_GO = (  # verbs, as functions and methods begin with them
    *(
        "abandon",
        "clear",
        "close",
        "destroy",
        "detach",
        "discard",
        "disconnect",
        "drop",
        "end_loan",
    ),
    *("evict", "forget", "free", "give", "give_back", "give_up", "release", "reset"),
    *("return", "shutdown", "take_back", "trim", "unlink", "unregister", "untrack", "withdraw"),
)
WAIT = ("wait", "await", "synchronize", "drain")
PYTHONS_OWN = ("__init__.py", "__main__.py")  # the language wants these names


@functools.cache
def _by_kind(tree: ast.AST) -> Mapping[type[ast.AST], list[ast.AST]]:
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return found


def nodes(tree: ast.AST, *kinds: type[N]) -> Iterator[N]:
    """Yield the nodes of a module that are of these classes of ``ast``, one class after another."""
    for kind in kinds:
        for node in _by_kind(tree).get(kind, ()):
            assert isinstance(node, kind)
            yield node


def functions(tree: ast.AST) -> Iterator[FUNCTION]:
    """Yield every function and method of a module, those inside others included."""
    yield from nodes(tree, ast.FunctionDef)
    yield from nodes(tree, ast.AsyncFunctionDef)


def classes(trees: Trees) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with the path of its file, those inside others included."""
    for path, tree in trees.items():
        for node in nodes(tree, ast.ClassDef):
            yield path, node


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


def methods(cls: ast.ClassDef) -> set[str]:
    """Return the names of the methods and properties that a class itself defines."""
    return {node.name for node in cls.body if isinstance(node, FUNCTION)}


def gone(names: Iterable[str], trees: Trees) -> list[str]:
    """Return those of ``path Class``, ``path Class.member``, ``path function`` that are not in the
    source.
    """
    known = set()
    for path, tree in trees.items():
        known |= {f"{path} {node.name}" for node in tree.body if isinstance(node, FUNCTION)}
    for path, cls in classes(trees):
        known.add(f"{path} {cls.name}")
        known |= {f"{path} {cls.name}.{member}" for member in attributes(cls) | methods(cls)}
    return [name for name in dict.fromkeys(names) if name not in known]


def spread(names: Sequence[str]) -> str:
    """Say in how many classes the members of a list are, or in how many files its other names."""
    if all("." in name.partition(" ")[2] for name in names):
        return f"in {len({name.rpartition('.')[0] for name in names})} classes"
    return f"in {len({name.partition(' ')[0] for name in names})} files"


def calls(trees: Trees, names: Container[str]) -> Counter[str]:
    """Count the calls of functions and methods of these names, whosever they are, by name;
    `NO_RANKS` left out.
    """
    found: Counter[str] = Counter()
    for path, tree in trees.items():
        for node in () if path.startswith(NO_RANKS) else nodes(tree, ast.Call):
            target = node.func
            called = target.attr if isinstance(target, ast.Attribute) else None
            called = target.id if isinstance(target, ast.Name) else called
            if called is not None and called in names:
                found[called] += 1
    return found


def named_twice(trees: Trees) -> dict[str, int]:
    """Return how many classes have each name that two or more have: ``_Place`` and ``Place`` are
    one.
    """
    counted = Counter(cls.name.lstrip("_") for _, cls in classes(trees))
    return {name: count for name, count in sorted(counted.items()) if count > 1}


def files_twice(trees: Trees) -> dict[str, int]:
    """Return how many files have each name that two or more have, `PYTHONS_OWN` left out."""
    counted = Counter(path.rpartition("/")[2] for path in trees)
    return {
        name: count
        for name, count in sorted(counted.items())
        if count > 1 and name not in PYTHONS_OWN
    }


def function_names(trees: Trees) -> set[str]:
    """Return the names of all functions and methods, without leading underscores."""
    return {node.name.lstrip("_") for tree in trees.values() for node in functions(tree)}


def verbs(names: Iterable[str], vocabulary: Sequence[str]) -> set[str]:
    """Return which verbs of a vocabulary `names` begin with, the longest that fits each."""
    return {
        max((verb for verb in vocabulary if f"{name}_".startswith(f"{verb}_")), key=len)
        for name in saying(names, vocabulary)
    }


def saying(names: Iterable[str], vocabulary: Sequence[str]) -> set[str]:
    """Return the `names` that begin with a verb of a vocabulary: ``wait_for``, not ``waiting``."""
    starts = tuple(f"{verb}_" for verb in vocabulary)
    return {name for name in names if f"{name}_".startswith(starts)}


def interfaces(trees: Trees, package: str) -> dict[str, int]:
    """Return, by ``path Class``, how many methods a class and its bases in the package have
    together, those that it overrides once. A base is found by where its name is imported from.
    """
    known = {(path, cls.name): cls for path, cls in classes(trees)}
    homes: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for path, tree in trees.items():
        for node in nodes(tree, ast.ImportFrom):
            top, _, below = (node.module or "").partition(".")
            stem = below.replace(".", "/")
            for alias, end in product(node.names, (".py", "/__init__.py")):
                if top == package and (f"{stem}{end}", alias.name) in known:
                    homes[path][alias.asname or alias.name] = (f"{stem}{end}", alias.name)

    def whole(path: str, name: str, below: frozenset[tuple[str, str]]) -> set[str]:
        found = methods(known[path, name])
        for base in known[path, name].bases:
            called = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            home = homes[path].get(called, (path, called))
            if home in known and home not in below:
                found |= whole(*home, below | {home})
        return found

    return {
        f"{path} {name}": len(whole(path, name, frozenset({(path, name)}))) for path, name in known
    }
