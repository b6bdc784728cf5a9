"""The names that tour, engine note, glossary and tests/README.md give are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"tour.md": 40, "design/engine.md": 40, "glossary.md": 15}  # names at least
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_is_there(page: str) -> None:
    references = REFERENCE.findall(" ".join((ROOT / "docs" / page).read_text().split()))
    assert len(references) > PAGES[page]
    assert page == "glossary.md" or len({file for file, _ in references}) >= 20
    for file, name in references:
        assert name in _names(ROOT / "src" / "zeroshard" / file), (file, name)


def test_the_tours_files_are_there() -> None:
    files = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / "tour.md").read_text()))
    assert files
    for file in files:
        assert any((place / file).is_file() for place in (ROOT / "src" / "zeroshard", ROOT)), file


def test_the_tables_of_tests_name_what_is_there_and_every_folder() -> None:
    tests = ROOT / "tests"
    text = (tests / "README.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*(?:[a-z0-9_]+\.py)?)`", text))
    assert [name for name in named if not any((at / name).exists() for at in (tests, ROOT))] == []
    folders = {f"{path.parent.name}/" for path in tests.glob("*/*.py")}
    assert len(named) > 30 and sorted(folders - named) == []
