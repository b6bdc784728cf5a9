"""The names that docs/tour.md, docs/design/engine.md and tests/README.md give are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOUR, ENGINE = (
    " ".join((ROOT / "docs" / page).read_text().split()) for page in ("tour.md", "design/engine.md")
)
REFERENCE = re.compile(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`")


def _names(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module: "Unit", "Unit.release"."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            methods = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{m.name}" for m in methods if isinstance(m, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", [TOUR, ENGINE], ids=["tour", "engine"])
def test_a_walk_by_hand_names_what_is_there(page: str) -> None:
    references = REFERENCE.findall(page)
    assert len(references) > 40 and len({file for file, _ in references}) >= 20
    for file, name in references:
        assert name in _names(ROOT / "src" / "zeroshard" / file), (file, name)


def test_the_tours_files_are_there() -> None:
    files = set(re.findall(r"`([a-z_/]+\.py)`", TOUR))
    assert files
    for file in files:
        assert any((place / file).is_file() for place in (ROOT / "src" / "zeroshard", ROOT)), file


def test_the_table_of_tests_names_every_test_and_what_is_there() -> None:
    tests = ROOT / "tests"
    named = set(
        re.findall(r"`((?:[a-z_]+/)*(?:[a-z0-9_]+\.py)?)`", (tests / "README.md").read_text())
    )
    assert [name for name in named if not any((at / name).exists() for at in (tests, ROOT))] == []
    files = [path.relative_to(tests).as_posix() for path in tests.rglob("*/test_*.py")]
    folders = tuple(name for name in named if name.endswith("/"))
    missing = [name for name in files if name not in named and not name.startswith(folders)]
    assert len(files) > 80 and sorted(missing) == []
