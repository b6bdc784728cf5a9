"""Builds the pretended device before the tests of this folder, outside their time limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.build import build, compiler_missing

FOLDER = Path(__file__).parent


def _own(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if FOLDER in item.path.parents]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, against the budget, where no compiler is."""
    if (missing := compiler_missing()) is not None:
        for item in _own(items):
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = _own(session.items) and not session.config.option.collectonly
    if wanted and compiler_missing() is None:
        build()
