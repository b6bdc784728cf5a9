"""Every name that docs/tour.md gives stands in the file that it gives with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOUR = " ".join((ROOT / "docs" / "tour.md").read_text().split())
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


def test_the_tour_names_what_is_there() -> None:
    references = REFERENCE.findall(TOUR)
    assert len(references) > 25
    for file, name in references:
        assert name in _names(ROOT / "src" / "zeroshard" / file), (file, name)


def test_the_tours_files_are_there() -> None:
    files = set(re.findall(r"`([a-z_/]+\.py)`", TOUR))
    assert len(files) >= 6
    for file in files:
        assert any((place / file).is_file() for place in (ROOT / "src" / "zeroshard", ROOT)), file
