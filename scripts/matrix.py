"""Run the tests on every Python from 3.11 that this machine has, on the oldest torch that
pyproject.toml allows, and with the kernels of other processors; each Python and torch in a virtual
environment of its own.

    make test-matrix                            all of them, one after another; a table at the end
    python3 scripts/matrix.py --list            only say which they are
    make test-matrix ARGS='tests/unit/core'     with arguments for pytest
    make test-matrix ARGS='--torch 2.11.0 --'   every Python, on this torch alone
    make test-matrix ARGS='--kernels --'        only the other kernels, on the oldest Python

Every Python gets `make test` with the Makefile's torch; the oldest one also `make suite`, the same
without lint and types, with the oldest torch. A torch may have no CPU build for a Python in your
package index: what is then installed has its CUDA libraries, some gigabytes (TORCH_BUILD=any).

Processors round differently: torch, oneDNN and MKL choose kernels by the instructions that they
find. The oldest Python also gets `make suite` under each setting of `KERNELS`, which chooses as an
older processor would.

Interpreters are looked for as ``python3.11`` and newer in the directories of PATH, in /usr/bin and
/usr/local/bin, and among pyenv's versions. Two builds of one version count as two: distributions
change theirs, and enums, for instance, were pickled otherwise in 3.11.2 than in 3.11.7. Names that
lead to the same build, and names that do not start (a shim whose version is not chosen), are passed
over.

Exit codes: 0 all passed, 1 some failed, also for want of a torch, 2 no interpreter was found.
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
# what only the CPU build of torch passes, which an older torch need not have
CPU_BUILD_ONLY = "tests/test_installation.py::test_a_machine_without_a_gpu_gets_no_nvidia_packages"
# environment variables by which torch, oneDNN and MKL choose the kernels of other processors
KERNELS = (
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_CBWR=COMPATIBLE",
)
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


@dataclass(frozen=True)
class Pair:
    """A Python and a torch to test with."""

    interpreter: Interpreter
    environment: str  # the directory of its virtual environment
    torch: str | None = None  # a version; None: the Makefile's
    kernels: str | None = None  # one of `KERNELS`; None: those that the processor has

    def __str__(self) -> str:
        with_torch = "the default torch" if self.torch is None else self.name
        return ", ".join(filter(None, [str(self.interpreter), with_torch, self.kernels]))

    @property
    def name(self) -> str:
        """The torch by name."""
        return f"torch {self.torch}"

    def run(self, arguments: Sequence[str]) -> str:
        """Test with `arguments` for pytest; return "passed" or why not."""
        make = ["make", f"PYTHON={self.interpreter.path}", f"VENV={self.environment}"]
        make += ["TORCH_BUILD=any"]
        words = " ".join([f"--deselect {CPU_BUILD_ONLY}", *arguments])
        if self.kernels is not None:
            variables = ["env", self.kernels]
            return self._outcome([*variables, *make, "suite", f"ARGS={' '.join(arguments)}"])
        if self.torch is None:
            return self._outcome([*make, "test", f"ARGS={words}"])
        make += [f"TORCH_VERSION={self.torch}"]
        if subprocess.run([*make, f"{self.environment}/.ready-torch"], cwd=ROOT).returncode:
            return f"FAILED: no {self.name} for this Python in the package index"
        return self._outcome([*make, "suite", f"ARGS={words}"])

    def _outcome(self, command: Sequence[str]) -> str:
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return "FAILED" if code else "passed"


def oldest_torch() -> str:
    """Return the lowest torch that pyproject.toml allows, as a whole version."""
    match = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert match is not None, "pyproject.toml names no lowest torch"
    parts = match[1].split(".")
    return ".".join([*parts, "0", "0"][:3])


def pairs(interpreters: Sequence[Interpreter], torches: Sequence[str]) -> list[Pair]:
    """Return what to test: every interpreter on each of `torches`; where none is named, every
    interpreter on the Makefile's, and the oldest one also on the oldest torch and with other
    kernels.
    """
    named = list(zip(interpreters, environments(interpreters), strict=True))
    chosen = [Pair(*one) for one in named if not torches]
    old = [(one, torch) for one in named for torch in torches] or [(named[0], oldest_torch())]
    chosen += [
        Pair(interpreter, f"{environment}-torch-{torch}", torch)
        for (interpreter, environment), torch in old
    ]
    return chosen if torches else chosen + with_other_kernels(interpreters)


def with_other_kernels(interpreters: Sequence[Interpreter]) -> list[Pair]:
    """Return the oldest interpreter with each choice of `KERNELS`."""
    oldest, environment = interpreters[0], environments(interpreters)[0]
    return [Pair(oldest, environment, kernels=kernels) for kernels in KERNELS]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only list what would be tested")
    parser.add_argument(
        "--torch",
        action="append",
        default=[],
        metavar="VERSION",
        help="on this version alone, with every Python; may be given several times",
    )
    parser.add_argument("--kernels", action="store_true", help="only with other kernels")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    interpreters = find(places())
    if not interpreters:
        print("no Python 3.11 or newer was found", file=sys.stderr)
        return 2
    results = []
    chosen = pairs(interpreters, options.torch)
    for pair in with_other_kernels(interpreters) if options.kernels else chosen:
        print(f"{pair}: {pair.environment}", flush=True)
        if not options.list:
            results.append((pair, pair.run(options.pytest)))
    for pair, outcome in results:
        print(f"{outcome}  {pair}")
    return 1 if any(outcome != "passed" for _, outcome in results) else 0


if __name__ == "__main__":
    sys.exit(main())
