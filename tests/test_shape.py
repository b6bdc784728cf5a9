"""scripts/shape.py: what it counts, on code made for it; `make lint` runs it on ours."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.harness import ROOT

CODE = '''
class Base:
    """Documented."""

    size: int

    def __init__(self, a, b=1, *, c):
        self.first = a
        b.second = c

    def bare(self):
        def inner(x, /, y): ...


class Child(Base):
    def bare(self): ...


def _private(): ...
'''


PACKAGE = {
    "__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from made.api import shard
""",
    "api.py": "import made.loop.run",
    "loop/__init__.py": "",
    "loop/base.py": """
class Base:
    def wait(self): ...
    def close(self): ...
""",
    "loop/run.py": """
from typing import TYPE_CHECKING
from made.loop.base import Base as Parent
if TYPE_CHECKING:
    from made.other import far
else:
    import made.beside
class Run(Parent):
    def close(self): self.held = None
    def _wait_for(self): agree(self.ranks.agree())
    def give_back(self): ...
class _Run: ...
""",
    "beside.py": "def f():\n    import made.lazy",
    "lazy.py": "class Lost(Parent): ...",
    "other/far.py": "",
    "other/run.py": "def awaiting(): ...",
    "launch/run.py": "agree()",
}
TREES = {path: ast.parse(code) for path, code in PACKAGE.items()}


def _script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def shape() -> ModuleType:
    return _script("shape")


@pytest.fixture(scope="module")
def names() -> ModuleType:
    return _script("shape_names")


def test_functions_classes_and_stores_are_counted(shape: ModuleType) -> None:
    tree = ast.parse(CODE)
    counted = {node.name: shape.num_parameters(node) for node in shape.functions(tree)}
    assert counted == {"__init__": 3, "bare": 0, "inner": 2, "_private": 0}
    assert [shape.num_lines(node) for node in shape.functions(tree) if node.name == "inner"] == [1]
    (base, child) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert shape.attributes(base) == {"size", "first"} and shape.attributes(child) == set()
    assert [node.attr for node in shape.foreign_stores(tree)] == ["second"]
    assert list(shape.undocumented(tree)) == ["Base.bare", "Child"]
    assert list(shape.undocumented(tree, {"bare"})) == ["Child"]
    protocol = ast.parse("class P(Protocol):\n    def bare(self): ...")
    assert shape.protocol_methods(protocol) == {"bare"}


def test_conditions_on_the_table_are_counted(shape: ModuleType) -> None:
    code = """
a = 1 if cell.tier is Tier.HOST else 2
while queue: pass
if scope is other: pass
b = [x for x in xs if x.codec]
c = [x for x in xs if x]
"""
    assert sorted(ast.unparse(test) for test in shape.conditions(ast.parse(code))) == [
        "cell.tier is Tier.HOST",
        "scope is other",
        "x.codec",
    ]


def test_modules_that_import_one_another_are_one_group(shape: ModuleType) -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert shape.cycles(graph) == [["a", "b", "c"]]


def test_a_closure_follows_imports_in_functions_and_leaves_out_those_for_types() -> None:
    imports = _script("shape_imports")
    paths = imports.module_names(
        {Path("made", path): tree for path, tree in TREES.items()}, Path("made")
    )
    modules = {name: TREES[path.relative_to("made").as_posix()] for name, path in paths.items()}
    loop = {"made.loop.run", "made.loop", "made.loop.base", "made.beside", "made.lazy"}
    assert imports.closure("made.loop.run", modules, without="made") == loop
    assert imports.closure("made.loop.run", modules) == {*loop, "made"}
    assert imports.closure("made", modules) == {"made"}
    assert imports.closure("made", modules, typed=True) == {*loop, "made", "made.api"}


def test_a_class_has_the_methods_of_its_bases_in_the_package_too(names: ModuleType) -> None:
    assert names.interfaces(TREES, "made") == {
        "loop/base.py Base": 2,
        "loop/run.py Run": 4,  # close() once
        "loop/run.py _Run": 0,
        "lazy.py Lost": 0,  # its base is not imported: not of the package
    }


def test_names_that_stand_twice_are_counted(names: ModuleType) -> None:
    assert names.named_twice(TREES) == {"Run": 2}
    assert names.files_twice(TREES) == {"run.py": 3}


def test_verbs_are_the_first_words_of_functions(names: ModuleType) -> None:
    spoken = names.function_names(TREES)
    assert spoken == {"wait", "close", "wait_for", "give_back", "f", "awaiting"}
    assert names.verbs(spoken, names.LET_GO) == {"close", "give_back"}
    assert names.saying(spoken, names.WAIT) == {"wait", "wait_for"}


def test_calls_are_counted_by_name_where_ranks_are_meant(names: ModuleType) -> None:
    assert names.calls(TREES, {"agree", "wait"}) == {"agree": 2}


def test_a_listed_name_that_is_gone_is_found(names: ModuleType) -> None:
    there = ["loop/run.py Run", "loop/run.py Run.held", "loop/base.py Base.wait", "beside.py f"]
    away = ["loop/base.py Run", "loop/run.py Run.size", "gone.py f"]
    assert names.gone(there + away, TREES) == away
    assert names.spread(there[1:3]) == "in 2 classes" and names.spread(there) == "in 3 files"


def test_the_files_to_read_are_those_that_readme_and_tour_name(
    shape: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "made"
    for name in ("a.py", "loop/b.py", "c.py", "d.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("`a.py`, [`a.py`](made/a.py) and `examples/train.py`")
    (tmp_path / "docs" / "tour.md").write_text("`loop/b.py: B`\n\n## And elsewhere\n`c.py`\n")
    assert shape.reading(tmp_path, package) == [package / "a.py", package / "loop/b.py"]


def test_a_row_above_its_limit_fails_the_check_and_is_named(
    shape: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shape.py", "--check"])
    monkeypatch.setattr(shape, "measure", lambda: [shape.Row("lines", 3, "here", limit=3)])
    assert shape.main() == 0
    monkeypatch.setattr(shape, "measure", lambda: [shape.Row("lines", 4, "here", limit=3)])
    assert shape.main() == 1
    assert capsys.readouterr().err == "lines: 4, limit 3: here\n"


def test_lines_of_code_are_those_without_docstrings_comments_and_blank_lines(
    shape: ModuleType,
) -> None:
    text = '"""A module.\n\nOf two paragraphs."""\n\nimport os  # why\n\n# a comment\n'
    text += (
        'def f(\n    a,\n):\n    """It says."""\n    text = """of\n    two"""\n    return text\n'
    )
    assert shape.code_lines(text) == 7
    rooms = shape.rooms({"core/a.py": text, "core/b/c.py": text, "d.py": "import os\n"})
    assert rooms == {"core": 14, ".": 1}


def test_a_body_begins_after_its_docstring(shape: ModuleType) -> None:
    functions = ast.parse(
        'def f():\n    """It\n    says."""\n    a = 1\n    return a\ndef g(): ...'
    ).body
    lengths = [node.end_lineno - shape.after_docstring(node) for node in functions]  # type: ignore[attr-defined]
    assert lengths == [2, 1]


def test_docstrings_that_ask_and_clauses_to_turn_round_are_counted(shape: ModuleType) -> None:
    text = '''
"""What a module does."""


class Good:
    """The place of a unit."""

    def which(self):
        """Which rank holds it, the name of which is known, and whose."""

    @property
    def is_here(self):
        """Whether it is here."""
'''
    asking, turns = shape.word_rows({"made.py": ast.parse(text)}, {Path("made.py"): text})
    assert (asking.value, asking.where) == (2, "made.py, made.py which")
    assert turns.value == 2
