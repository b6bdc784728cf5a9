"""The API reference: signature and docstring of every public name, read from the source.

Nothing is imported, so that the page is made without the packages that integrations need.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["api_page", "public_names"]

SOURCE = Path(__file__).parents[2] / "src"
SECTIONS = {  # the modules whose public names a section has; other names come under "More"
    "Start": ("zeroshard.sharding.api",),
    "Configuration": ("zeroshard.config", "zeroshard.core", "zeroshard.deepspeed"),
    "The engine": ("zeroshard.runtime",),
    "Checkpoints": ("zeroshard.checkpoint", "zeroshard.formats"),
    "zeroshard.nn": ("zeroshard.nn",),
    "Planner": ("zeroshard.planner",),
    "Errors": ("zeroshard.errors",),
    "More": ("",),
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def public_names() -> dict[str, str]:
    """Return the public names of ``zeroshard`` and ``zeroshard.nn`` with the module of each."""
    tree = ast.parse((SOURCE / "zeroshard" / "__init__.py").read_text())
    homes = next(ast.literal_eval(value) for name, value in _assigned(tree) if name == "_HOMES")
    found = {name: home for home, names in homes.items() for name in names}
    nn = ast.parse((SOURCE / "zeroshard" / "nn" / "__init__.py").read_text())
    found |= {f"nn.{name}": "zeroshard.nn" for name in _declared(nn)}
    return found


def api_page() -> str:
    """Return the page: sections, then names, each with signature, docstring and members."""
    homes = public_names()
    out = [
        "# API reference",
        "",
        "`import zeroshard as zs`. Made from the docstrings when the site is built. Methods and"
        " functions that are *collective* must be called on every rank.",
    ]
    for section, modules in SECTIONS.items():
        names = [name for name, home in homes.items() if home.startswith(modules)]
        out += ["", f"## {section}"] if names else []
        for name in names:
            out += _described(_definition(homes.pop(name), name.rpartition(".")[2]), name)
    out += ["", "## Integrations"]
    folder = SOURCE / "zeroshard" / "integrations"
    for path in sorted([*folder.glob("[a-z]*.py"), *folder.glob("[a-z]*/__init__.py")]):
        stem = path.parent.name if path.name == "__init__.py" else path.stem
        module, tree = f"zeroshard.integrations.{stem}", ast.parse(path.read_text())
        out += ["", f"### {module}", "", *_docstring(tree)]
        for name in _declared(tree):
            node = _definition(module, name)
            out += [] if node is None else _described(node, name)
    return "\n".join(out) + "\n"


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _declared(tree: ast.Module) -> list[str]:
    """Return the module's ``__all__``."""
    named = (ast.literal_eval(value) for name, value in _assigned(tree) if name == "__all__")
    return list(next(named, []))


def _file(module: str) -> Path:
    path = SOURCE / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _definition(module: str, name: str) -> ast.AST | None:
    """Return the definition of `name`, which `module` has or imports; None where it has none."""
    tree = _parsed(_file(module))
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zeroshard"):
            found = [one.name for one in node.names if (one.asname or one.name) == name]
            if found:
                return _definition(str(node.module), found[0])
    named = (value for assigned, value in _assigned(tree) if assigned == name)
    return next(named, None)


def _described(node: ast.AST | None, name: str, level: int = 3) -> list[str]:
    """Return heading, signature, docstring, and of a class its fields and public methods."""
    out = ["", f"{'#' * level} {name}", ""]
    if isinstance(node, FUNCTION):
        return [*out, *_signature(node, name), *_docstring(node)]
    if not isinstance(node, ast.ClassDef):
        return out
    out += _constructor(node, name) + _docstring(node)
    fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
    shown = [f for f in fields if not ast.unparse(f.target).startswith("_")]
    if shown:
        out += ["```python", *(ast.unparse(line) for line in shown), "```", ""]
    for method in node.body:
        if isinstance(method, FUNCTION) and not method.name.startswith("_"):
            out += _described(method, f"{name}.{method.name}", 4)
    return out


def _constructor(node: ast.ClassDef, name: str) -> list[str]:
    for method in node.body:
        if isinstance(method, FUNCTION) and method.name == "__init__":
            by_shard = name == "Engine"  # made by shard(), whose parameters are the ones to give
            return [] if by_shard else _signature(method, name)
    bases = ", ".join(ast.unparse(base) for base in node.bases if "_" not in ast.unparse(base))
    return ["```python", f"class {name}({bases})" if bases else f"class {name}", "```", ""]


def _signature(node: FUNCTION, name: str) -> list[str]:
    """Return the call as code: one line, or a parameter per line where it is long."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    result = (
        "" if node.name == "__init__" else f" -> {ast.unparse(node.returns or ast.Name('None'))}"
    )
    if "property" in decorators:
        return ["```python", f"{name}{result.replace(' ->', ':')}  # property", "```", ""]
    if any(found.endswith("contextmanager") for found in decorators):
        result = "  # context manager"
    every = node.args
    parts = [_parameter(arg, default) for arg, default in _positional(every)]
    if every.vararg or every.kwonlyargs:
        parts.append(f"*{every.vararg.arg}" if every.vararg else "*")
    pairs = zip(every.kwonlyargs, every.kw_defaults, strict=True)
    parts += [_parameter(arg, default) for arg, default in pairs]
    parts += [f"**{every.kwarg.arg}"] if every.kwarg else []
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return ["```python", line, "```", ""]


def _positional(every: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    given = [*every.posonlyargs, *every.args]
    defaults = [None] * (len(given) - len(every.defaults)) + every.defaults
    for arg, default in zip(given, defaults, strict=True):
        if arg.arg not in ("self", "cls"):
            yield arg, default


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg if arg.annotation is None else f"{arg.arg}: {ast.unparse(arg.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _docstring(node: ast.AST) -> list[str]:
    """Return the docstring as Markdown: roles and single backquotes of a name become code."""
    assert isinstance(node, FUNCTION | ast.ClassDef | ast.Module)
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
    return [*text.splitlines(), ""]
