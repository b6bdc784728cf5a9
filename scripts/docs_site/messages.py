"""Collect the messages of our errors from the source, by class. Nothing is imported or run.

A message is the literal text of the error's first argument; an expression in it is shown as {...}.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ERRORS", "Message", "messages", "messages_page"]

PACKAGE = Path(__file__).parents[2] / "src" / "zeroshard"
ERRORS = (
    "ConfigError",
    "PlanMismatch",
    "StateError",
    "StallError",
    "PeerLostError",
    "StorageError",
    "CheckpointError",
)
# what the configuration and the table raise so becomes ConfigError on its way out
BECOMES_CONFIG_ERROR = ("config/", "core/policy.py", "core/placement.py", "core/precision.py")
MIN_LETTERS = 12  # of literal text: below that a line would say nothing


@dataclass(frozen=True, order=True)
class Message:
    """One message: the error's class, its text, and the module that raises it."""

    error: str
    text: str
    module: str


@cache
def messages() -> tuple[Message, ...]:
    """Return the messages of the package, sorted by class and text, each once."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    public = {name: name for name in ERRORS}
    for tree in trees.values():
        public |= dict(_derived(tree))
    found = set()
    for path, tree in trees.items():
        module = path.relative_to(PACKAGE).as_posix()
        classes = dict(public)
        if module.startswith(BECOMES_CONFIG_ERROR):
            classes["ValueError"] = "ConfigError"
        found |= set(_of(tree, module, classes))
    return tuple(sorted(found))


def _derived(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield private subclasses of our errors with the public class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.startswith("_"):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            yield from ((node.name, base) for base in bases if base in ERRORS)


def _of(tree: ast.Module, module: str, classes: dict[str, str]) -> Iterator[Message]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            text = _literal(node.args[0])
            if node.func.id in classes and sum(map(str.isalpha, text)) >= MIN_LETTERS:
                yield Message(classes[node.func.id], " ".join(text.split()), module)


def _literal(node: ast.expr) -> str:
    """Return the literal text of an expression; "" where it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _literal(part) if isinstance(part, ast.Constant) else "{...}" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""


def messages_page() -> str:
    """Return the page that lists all of them."""
    every = messages()
    out = [
        "# Every error message",
        "",
        "Collected from the source when the site is built; `{...}` stands for a name or a number."
        " [Errors and exit codes](../errors.md) explains each kind. The search finds a message by"
        " any of its words.",
    ]
    for error in ERRORS:
        mine = [message for message in every if message.error == error]
        out += ["", f"## {error}", ""]
        out += [f"- `{one.text.replace('`', chr(39))}` ({one.module})" for one in mine]
    return "\n".join(out) + "\n"
