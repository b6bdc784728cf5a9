"""Run `make test` on every Python from 3.11 that this machine has, each in a virtual environment
of its own.

    make test-matrix                          all of them, one after another; a table at the end
    python3 scripts/matrix.py --list          only say which they are
    make test-matrix ARGS='tests/unit/core'   with arguments for pytest

Interpreters are looked for as ``python3.11`` and newer in the directories of PATH, in /usr/bin and
/usr/local/bin, and among pyenv's versions. Two builds of one version count as two: distributions
change theirs, and enums, for instance, were pickled otherwise in 3.11.2 than in 3.11.7. Names that
lead to the same build, and names that do not start (a shim whose version is not chosen), are passed
over.

Exit codes: 0 all passed, 1 some failed, 2 no interpreter was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
ASK = (
    "import json, platform, sys; print(json.dumps([sys.version_info[:3], sys.version,"
    " sys.base_prefix, platform.python_implementation()]))"
)


@dataclass(frozen=True)
class Interpreter:
    """One build of Python."""

    path: Path
    version: tuple[int, ...]
    build: tuple[str, str]  # what it says of itself, and where it is installed

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))} at {self.path}"


def ask(path: Path) -> Interpreter | None:
    """Return what the interpreter at `path` is, or None where it does not start, is too old or
    is not CPython.
    """
    try:
        answer = subprocess.run(
            [path, "-I", "-c", ASK], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        version, text, prefix, implementation = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if implementation != "CPython" or tuple(version) < OLDEST:
        return None
    return Interpreter(path, tuple(version), (text, os.path.realpath(prefix)))


def candidates(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield every ``python3.N`` in `directories`, N from 11 on."""
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            match = re.fullmatch(r"python3\.(\d+)", name)
            if match and int(match[1]) >= OLDEST[1]:
                yield directory / name


def places() -> list[Path]:
    """Return the directories to look in."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    return [*found, Path("/usr/bin"), Path("/usr/local/bin"), *sorted(pyenv.glob("versions/*/bin"))]


def find(directories: Sequence[Path]) -> list[Interpreter]:
    """Return every build in `directories` once, the oldest first."""
    builds: dict[tuple[str, str], Interpreter] = {}
    for path in candidates(directories):
        interpreter = ask(path)
        if interpreter is not None:
            builds.setdefault(interpreter.build, interpreter)
    return sorted(builds.values(), key=lambda interpreter: interpreter.version)


def environments(interpreters: Sequence[Interpreter]) -> list[str]:
    """Return a name for the virtual environment of each: its version, with a number behind it
    where two builds share one.
    """
    names: list[str] = []
    for interpreter in interpreters:
        name = f".venv-{'.'.join(map(str, interpreter.version))}"
        count = sum(other == name or other.startswith(f"{name}-") for other in names)
        names.append(f"{name}-{count + 1}" if count else name)
    return names


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only list the interpreters")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    interpreters = find(places())
    if not interpreters:
        print("no Python 3.11 or newer was found", file=sys.stderr)
        return 2
    results = []
    for interpreter, environment in zip(interpreters, environments(interpreters), strict=True):
        print(f"{interpreter}: {environment}", flush=True)
        if not options.list:
            command = [
                "make",
                "test",
                f"PYTHON={interpreter.path}",
                f"VENV={environment}",
                f"ARGS={' '.join(options.pytest)}",
            ]
            results.append((interpreter, subprocess.run(command, cwd=ROOT, check=False).returncode))
    for interpreter, code in results:
        print(f"{'passed' if code == 0 else 'FAILED'}  {interpreter}")
    return 1 if any(code for _, code in results) else 0


if __name__ == "__main__":
    sys.exit(main())
