"""scripts/shape.py: what it counts, on code made for it; `make lint` runs it on ours."""

from __future__ import annotations

import ast
import importlib.util
import sys
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


@pytest.fixture(scope="module")
def shape() -> ModuleType:
    path = ROOT / "scripts" / "shape.py"
    specification = importlib.util.spec_from_file_location("shape", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["shape"] = module
    specification.loader.exec_module(module)
    return module


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


def test_a_row_above_its_limit_fails_the_check_and_is_named(
    shape: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shape.py", "--check"])
    monkeypatch.setattr(shape, "measure", lambda: [shape.Row("lines", 3, "here", limit=3)])
    assert shape.main() == 0
    monkeypatch.setattr(shape, "measure", lambda: [shape.Row("lines", 4, "here", limit=3)])
    assert shape.main() == 1
    assert capsys.readouterr().err == "lines: 4, limit 3: here\n"
