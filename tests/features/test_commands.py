"""What the engine does, in order: gathers, uses, releases, reduces, with their bytes, of every row,
tier, codec and schedule, beside golden files.

A change that is meant: ``python -m tests.features.test_commands --write [GROUP ...]``, and read the
difference. After a bar: the bytes in use from then on.
"""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.support.commands import CASES, lists
from tests.support.harness import close_pools

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "commands"
PAIRS = [
    pytest.param(group, slow, marks=[pytest.mark.slow] if slow else [], id=f"{group}-{slow}")
    for group, cases in CASES.items()
    for slow in sorted({case.slow for case in cases.values()})
]


def _path(group: str, slow: bool) -> Path:
    return GOLDEN / f"{group}{'_slow' if slow else ''}.txt"


@pytest.mark.parametrize(("group", "slow"), PAIRS)
def test_commands_are_those_of_the_golden_file(group: str, slow: bool) -> None:
    path = _path(group, slow)
    expected, told = path.read_text().splitlines(), lists(group, slow=slow).splitlines()
    difference = unified_diff(expected, told, path.name, "this engine", lineterm="", n=8)
    assert expected == told, "\n".join(difference)


def main(args: list[str]) -> None:
    if args[:1] != ["--write"]:
        raise SystemExit("usage: python -m tests.features.test_commands --write [GROUP ...]")
    for group, cases in CASES.items():
        if args[1:] and group not in args[1:]:
            continue
        for slow in sorted({case.slow for case in cases.values()}):
            path = _path(group, slow)
            path.write_text(lists(group, slow=slow))
            print(f"{path.name}: {path.stat().st_size} bytes", flush=True)
    close_pools()


if __name__ == "__main__":
    main(sys.argv[1:])
