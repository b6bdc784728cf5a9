"""``zeroshard plan`` in this process."""

from __future__ import annotations

from zeroshard.launch import cli


def run_plan(*argv: str) -> int:
    """Run ``zeroshard plan``; return its exit code."""
    try:
        return cli.main(["plan", *argv])
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
