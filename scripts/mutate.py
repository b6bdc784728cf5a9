"""Put deliberate faults into the code, one at a time, and see which of them the nearest tests find.

    python scripts/mutate.py                       every fault of mutations.toml: a table, and the
                                                   share that is found
    python scripts/mutate.py --only residual       those whose name holds a word
    python scripts/mutate.py --jobs 2 --json OUT   two at a time; the results as JSON, too
    python scripts/mutate.py --check               only see that every fault's text still stands in
                                                   the code, which is Python with the fault, too

Each fault is put into a copy of the tree in a temporary folder, never into this one, and the tests
named beside it run there until the first one fails. A fault is *found* when a test fails or does
not end, and *survives* when all pass. Without a fault these tests must pass, or a fault would seem
found: the tests of the faults that are asked for run once without any (``--trust`` leaves that
out).

Exit codes: 0 all found, 1 some survive, 2 a text that does not stand in the code exactly once, a
fault with which the code is not Python, or tests that fail without a fault. Cost: from 5 to 60
seconds a fault, most of it imports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_name("mutations.toml")
COPIED = (
    "src",
    "benchmarks",
    "tests",
    "examples",
    "scripts",
    "docs",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
)
PYTEST = (
    "-m",
    "pytest",
    "-x",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-o",
    "skip_budget=99",
)
NOT_RUN = (4, 5)  # exit codes of pytest: the tests are not there, none is chosen


@dataclass(frozen=True)
class Fault:
    """One deliberate fault."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self, root: Path) -> str | None:
        """Return why it cannot be put into the code under `root`, if so."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(self.old)) != 1:
            return f"{self.name}: its text stands {count} times in {self.file}, not once"
        try:
            if path.suffix == ".py":
                compile(text.replace(self.old, self.new), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:  # any test fails then
            return f"{self.name}: with it this is not Python: {error}"
        return None


@dataclass(frozen=True)
class Result:
    """What came of one fault."""

    name: str
    file: str
    found: bool
    by: str  # the test that failed
    seconds: float


class Tree:
    """A copy of the working tree in a temporary folder, in which one fault at a time stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)

    def run(self, fault: Fault, timeout_s: float) -> Result:
        """Put `fault` in, run its tests, and take it out again."""
        path = self.folder / fault.file
        text = path.read_text(encoding="utf-8")
        begin = time.monotonic()
        try:
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            code, shown = self.pytest(fault.tests, timeout_s)
        finally:
            path.write_text(text, encoding="utf-8")
        found = code not in (0, *NOT_RUN)
        by = _who(shown) if found else "(no test is chosen)" if code else ""
        return Result(fault.name, fault.file, found, by, round(time.monotonic() - begin, 1))

    def pytest(self, tests: str, timeout_s: float, *, stop: bool = True) -> tuple[int, str]:
        """Run `tests`; return pytest's exit code and its output. Whatever it has started ends
        with it.
        """
        options = [option for option in PYTEST if stop or option != "-x"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, *options, *shlex.split(tests)],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks follow: tests/support/harness.py
                code = process.wait()
            output.seek(0)
            return code, output.read()


def _who(shown: str) -> str:
    """Return the test that failed, of what pytest has printed."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", shown, re.MULTILINE)
    return found[1] if found else "(no end in time)"


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return the faults of `path`."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


def chosen(faults: list[Fault], words: list[str], part: str) -> list[Fault]:
    """Return the faults whose name or file holds one of `words` (none: all), of these the `part`
    "k/n".
    """
    fits = [
        fault
        for fault in faults
        if not words or any(word in fault.name or word in fault.file for word in words)
    ]
    number, parts = map(int, part.split("/"))
    return fits[number - 1 :: parts]


def failing_without(faults: list[Fault], timeout_s: float) -> list[str]:
    """Return the tests of `faults` that fail without any."""
    failing = []
    with tempfile.TemporaryDirectory(prefix="zeroshard-mutate-") as folder:
        tree = Tree(Path(folder))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            code, shown = tree.pytest(tests, timeout_s, stop=False)
            if code:
                failing.append(f"{tests}: {_who(shown)}")
    return failing


def run_all(faults: list[Fault], *, jobs: int, timeout_s: float) -> list[Result]:
    """Return what came of each of `faults`, `jobs` at a time, and print it as it comes."""
    trees: SimpleQueue[Tree] = SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="zeroshard-mutate-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number)))

        def one(fault: Fault) -> Result:
            tree = trees.get()
            try:
                result = tree.run(fault, timeout_s)
            finally:
                trees.put(tree)
            print(
                f"{'found   ' if result.found else 'SURVIVES'} {result.seconds:6.1f} s "
                f" {result.name}: {result.by}",
                flush=True,
            )
            return result

        return list(pool.map(one, faults))


def report(results: list[Result]) -> str:
    """Return the share per package, and the faults that survive."""
    packages: dict[str, list[bool]] = {}
    for result in results:
        package = result.file.removeprefix("src/zeroshard/").split("/")[0]
        packages.setdefault(package, []).append(result.found)
    lines = [
        f"{name:<16} {sum(found):3d} of {len(found):3d}" for name, found in sorted(packages.items())
    ]
    found = sum(result.found for result in results)
    lines.append(
        f"{'all':<16} {found:3d} of {len(results):3d}, {100 * found / max(len(results), 1):.1f}%"
    )
    return "\n".join(lines + [f"survives: {result.name}" for result in results if not result.found])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="faults whose name or file holds one of these words",
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    parser.add_argument(
        "--timeout", type=float, default=400.0, metavar="SECONDS", help="for the tests of one fault"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only see that every fault can be put into the code",
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a fault first"
    )
    options = parser.parse_args()
    faults = chosen(read_faults(), options.only, options.part)
    problems = [problem for fault in faults if (problem := fault.problem(ROOT)) is not None]
    if not problems and not (options.check or options.trust):
        problems = [
            f"fails without a fault: {test}"
            for test in failing_without(faults, 4 * options.timeout)
        ]
    if problems or options.check:
        print("\n".join(problems) or f"{len(faults)} faults can be put into the code")
        return 2 if problems else 0
    results = run_all(faults, jobs=options.jobs, timeout_s=options.timeout)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(report(results))
    return 0 if all(result.found for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
