"""What ``zeroshard bench step``, ``overhead`` and ``report`` do, from parsed arguments to the exit code.

Tables go to stdout, progress and everything said on the way to stderr. Exit code 70 when a contender broke, 0 otherwise, whatever the
verdicts; a contender that is merely not installed is said and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zeroshard.errors import ConfigError
from zeroshard.launch.bench.driver import Options, measure
from zeroshard.launch.bench.plan import COMPARISONS, OVERHEAD_SIZE, SIZES, Comparison, blocks, comparisons_for
from zeroshard.launch.bench.results import Report, machine_facts
from zeroshard.launch.bench.tables import markdown, show, summary

__all__ = ["overhead", "report", "step"]

EXIT_BROKEN = 70


def step(arguments: argparse.Namespace, *, threads: int) -> int:
    """Every contender beside its references, at every size and precision asked for."""
    contenders = arguments.contenders or list(dict.fromkeys(name for c in COMPARISONS for name in (c.contender, c.reference)))
    comparisons = comparisons_for(contenders)
    if not comparisons:
        raise ConfigError(f"--contenders {','.join(contenders)}: a comparison needs at least two")
    result = _new_report("step")
    with _one_text(arguments.data) as text:
        _run_sizes(result, comparisons, arguments, threads=threads, text=text)
    return _finish(result, arguments)


def _run_sizes(
    result: Report, comparisons: Sequence[Comparison], arguments: argparse.Namespace, *, threads: int, text: tuple[str, ...]
) -> None:
    for size in (SIZES[name] for name in arguments.sizes):
        for precision in arguments.precision:
            options = Options(
                num_ranks=arguments.nproc,
                threads=threads,
                steps=arguments.steps,
                warmup=arguments.warmup,
                pairs=arguments.pairs,
                alive=arguments.alive or size.alive,
                device=arguments.device,
                files=text,
                deepspeed_python=arguments.deepspeed_python or sys.executable,
                profile=arguments.profile,
            )
            with _progress(f"{size.name} {precision}", comparisons, options) as (say, advance):
                result.runs.append(measure(size, precision, comparisons, options, say=say, advance=advance))
            _save(result, arguments.out)  # after every run: hours of measuring are not lost to a later failure


def overhead(arguments: argparse.Namespace, *, threads: int) -> int:
    """Stage 3 in one process beside plain PyTorch: on a model with next to no arithmetic, then on real sizes."""
    result = _new_report("overhead")
    for size in (OVERHEAD_SIZE, *(SIZES[name] for name in arguments.sizes)):
        narrow = size is OVERHEAD_SIZE
        options = Options(
            num_ranks=1,
            threads=1 if narrow else threads,
            steps=arguments.steps if narrow else min(arguments.steps, 5),
            pairs=arguments.pairs,
        )
        comparisons = [Comparison("zero3", "plain", None if narrow else 1 / 1.03, pairs=30)]
        with _progress(f"{size.name} fp32, one process", comparisons, options) as (say, advance):
            result.runs.append(measure(size, "fp32", comparisons, options, say=say, advance=advance))
        _save(result, arguments.out)
    return _finish(result, arguments)


def report(files: Sequence[Path], *, as_json: bool) -> int:
    """Print saved results as markdown tables."""
    reports = []
    for file in files:
        try:
            reports.append(Report.load(file))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}: {error}") from error
    if as_json:
        print(json.dumps([summary(r) for r in reports], indent=1))
    else:
        print("\n".join(markdown(r) for r in reports))
    return 0


def _new_report(kind: str) -> Report:
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]  # where a file lies is nobody's business
    return Report(kind, ["zeroshard", *words], datetime.now(UTC).isoformat(timespec="seconds"), machine_facts())


def _save(result: Report, path: Path | None) -> None:
    result.machine["load_after"] = list(os.getloadavg())
    if path is not None:
        result.save(path)


def _finish(result: Report, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(result.to_json())
    else:
        console = Console()
        show(result, console if console.is_terminal else Console(width=140))
    return EXIT_BROKEN if any(c.failed for run in result.runs for c in run.contenders) else 0


@contextmanager
def _one_text(files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Copy `files` into one, so that contenders started an hour apart read the same bytes; yields its name, or nothing."""
    if not files:
        yield ()
        return
    with tempfile.NamedTemporaryFile(prefix="zeroshard-bench-") as copy:
        copy.write(b"\n".join(Path(file).read_bytes() for file in files))
        copy.flush()
        yield (copy.name,)


@contextmanager
def _progress(
    title: str, comparisons: Sequence[Comparison], options: Options
) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A bar on stderr; yields (say a line, go one turn ahead)."""
    total = 0
    for members, inside in blocks(comparisons, alive=options.alive):
        wanted = {c: options.pairs or c.pairs for c in inside}
        total += sum(1 + max(n for c, n in wanted.items() if name in (c.contender, c.reference)) for name in members)
    console = Console(stderr=True)
    columns = (
        TextColumn("[bold]" + title),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield lambda message: console.print(f"bench: {message}", markup=False, highlight=False, soft_wrap=True), advance
