"""What ``zeroshard bench step``, ``overhead``, ``offload`` and ``report`` do, from parsed
arguments to the exit code.

Tables go to stdout, progress and everything said on the way to stderr. Exit code 70 when a
contender broke, 0 otherwise, whatever the verdicts; a contender that is merely not installed is
said and skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.driver import Options, measure
from benchmarks.plan import (
    COMPARISONS,
    LARGEST,
    MUON_COMPARISONS,
    NAMED_COMPARISONS,
    OFFLOAD_ALIVE,
    OFFLOAD_COMPARISONS,
    OFFLOAD_CONTENDERS,
    OVERHEAD_SIZE,
    SIZES,
    Comparison,
    Size,
    blocks,
    comparisons_for,
)
from benchmarks.results import Report, Run, machine_facts
from benchmarks.stats import MIN_PAIRS
from benchmarks.tables import grids, markdown, notes, show, summary
from zeroshard.errors import ConfigError
from zeroshard.terminal import print_json, progress

__all__ = ["offload", "overhead", "report", "step"]

EXIT_BROKEN = 70


def step(arguments: argparse.Namespace, *, threads: int) -> int:
    """Every contender beside its references, at every size and precision asked for."""
    known = [*COMPARISONS, *(NAMED_COMPARISONS if arguments.contenders else ())]
    if arguments.optimizer == "muon":
        known = [*MUON_COMPARISONS]
    comparisons = _chosen(arguments.contenders, known)
    result = _new_report("step")
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    with _one_text(arguments.data) as text:
        _run_sizes(result, comparisons, arguments, threads=threads, text=text)
    return _finish(result, arguments)


def offload(arguments: argparse.Namespace, *, threads: int) -> int:
    """States on host and disk: whole steps, the host step and the disk step by themselves, and
    on CUDA the largest model.
    """
    result = _new_report("offload")
    comparisons: list[Comparison] = []
    if "steps" in arguments.parts:
        comparisons = _chosen(arguments.contenders, _runnable(result, arguments))
    with _scratch(arguments.disk_path) as path:
        _run_sizes(result, comparisons, arguments, threads=threads, disk_path=str(path))
        _run_alone(result, arguments, path)
        if "largest" in arguments.parts:
            _run_largest(result, arguments, threads=threads, disk_path=str(path))
    return _finish(result, arguments)


def _runnable(result: Report, arguments: argparse.Namespace) -> list[Comparison]:
    """Return the comparisons of `offload`, by default without DeepSpeed's where it is not
    installed: they would only take the others' places.
    """
    if arguments.contenders or arguments.deepspeed_python or find_spec("deepspeed") is not None:
        return list(OFFLOAD_COMPARISONS)
    names = [name for name in OFFLOAD_CONTENDERS if name.startswith("deepspeed")]
    _leave_out(
        result,
        f"{', '.join(names)}: DeepSpeed is not installed; pip install 'zeroshard[bench]', or"
        " --deepspeed-python",
    )
    return [c for c in OFFLOAD_COMPARISONS if c.reference not in names]


def _leave_out(result: Report, what: str) -> None:
    result.left_out.append(what)
    sys.stderr.write(f"bench: skipped {what}\n")


def _chosen(contenders: Sequence[str] | None, known: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons among the `contenders` asked for, by default all that are `known`."""
    contenders = contenders or list(
        dict.fromkeys(name for c in known for name in (c.contender, c.reference))
    )
    comparisons = comparisons_for(contenders, known)
    if not comparisons:
        raise ConfigError(f"--contenders {','.join(contenders)}: a comparison needs at least two")
    return comparisons


def _run_sizes(
    result: Report,
    comparisons: Sequence[Comparison],
    arguments: argparse.Namespace,
    *,
    threads: int,
    text: tuple[str, ...] = (),
    disk_path: str | None = None,
) -> None:
    for size in (SIZES[name] for name in arguments.sizes if comparisons):
        for precision in arguments.precision:
            options = Options(
                num_ranks=arguments.nproc,
                threads=threads,
                steps=arguments.steps,
                warmup=arguments.warmup,
                pairs=arguments.pairs,
                alive=arguments.alive
                or (OFFLOAD_ALIVE if result.kind == "offload" and size.alive > 2 else size.alive),
                device=arguments.device,
                files=text,
                deepspeed_python=arguments.deepspeed_python or sys.executable,
                profile=arguments.profile,
                traces=None if arguments.traces is None else str(arguments.traces),
                disk_path=disk_path,
                max_norm=arguments.max_norm,
                optimizer=arguments.optimizer,
            )
            keep = partial(_keep, result, arguments.out, len(result.runs))
            _measured(f"{size.name} {precision}", size, precision, comparisons, options, keep)


def _measured(
    title: str,
    size: Size,
    precision: str,
    comparisons: Sequence[Comparison],
    options: Options,
    keep: Callable[[Run], None],
) -> None:
    """Measure beside a progress bar; what is measured goes to `keep`."""
    with progress(title, _num_turns(comparisons, options)) as bar:

        def say(line: str) -> None:
            bar.say(f"bench: {line}")

        measure(size, precision, comparisons, options, say=say, advance=bar.step, keep=keep)


def _keep(result: Report, out: Path | None, index: int, run: Run) -> None:
    """Save `run`, as far as it has come, as run number `index`: nothing measured is lost to a
    later failure.
    """
    result.runs[index:] = [run]
    _save(result, out)


def _run_alone(result: Report, arguments: argparse.Namespace, path: Path) -> None:
    """Copies, the host step and the disk step, nothing else running."""
    alone = ("copies", "host-step", "backward-step", "disk-step")
    parts = [part for part in alone if part in arguments.parts]
    if not parts:
        return
    from benchmarks.offload import backward_step, copies, disk_step, host_step  # they import torch

    runs: dict[str, tuple[int, Callable[..., Run]]] = {}
    if "copies" in parts and arguments.device == "cuda":
        runs["copies"] = (arguments.pairs or MIN_PAIRS, partial(copies, 8 * arguments.elements))
    elif "copies" in parts:
        _leave_out(result, "copies between host and device: this run is on the CPU (--device cuda)")
    if "host-step" in parts:
        runs["host step"] = (arguments.pairs or 30, partial(host_step, arguments.elements))
    if "backward-step" in parts:
        step = partial(backward_step, arguments.elements)
        runs["step in the backward"] = (arguments.pairs or 30, step)
    for grad in ("device", "disk") if "disk-step" in parts else ():
        runs[f"disk step, gradient on {grad}"] = (
            arguments.pairs or MIN_PAIRS,
            partial(disk_step, arguments.elements, path=path, grad=grad),
        )
    for title, (pairs, run) in runs.items():
        with progress(title, pairs + 1) as bar:
            result.runs.append(run(pairs=pairs, advance=bar.step))
        _save(result, arguments.out)


def _run_largest(
    result: Report, arguments: argparse.Namespace, *, threads: int, disk_path: str
) -> None:
    """The largest model per tier; only where there is a card to fill."""
    if arguments.device != "cuda":
        _leave_out(
            result,
            "largest model: it fills a GPU's memory, and this run is on the CPU (--device cuda"
            " measures it)",
        )
        _save(result, arguments.out)
        return
    from benchmarks.offload import largest

    card = None if arguments.card_gib is None else int(arguments.card_gib * 2**30)
    options = Options(
        num_ranks=1,
        threads=threads,
        device="cuda",
        disk_path=disk_path,
        deferred=True,
        device_bytes=card,
    )
    for tier in LARGEST:
        with progress(f"largest model, states on {tier}") as bar:
            limit_s, precision = arguments.largest_s, arguments.precision[0]
            found = largest(tier, precision, options, seconds=limit_s, advance=bar.step)
            result.largest.append(found)
            bar.say(
                f"bench: largest model, states on {tier}: {found.num_parameters / 1e9:.2f} billion"
                f" parameters; then {found.stopped}"
            )
        _save(result, arguments.out)


def overhead(arguments: argparse.Namespace, *, threads: int) -> int:
    """Stage 3 in one process beside plain PyTorch: on a model with next to no arithmetic, then
    on real sizes.
    """
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
        keep = partial(_keep, result, arguments.out, len(result.runs))
        _measured(f"{size.name} fp32, one process", size, "fp32", comparisons, options, keep)
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
        print_json([summary(r) for r in reports])
    else:
        print("\n".join(markdown(r) for r in reports))
    return 0


def _new_report(kind: str) -> Report:
    # where a file lies is nobody's business
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return Report(
        kind,
        ["zeroshard", *words],
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine_facts(),
    )


def _save(result: Report, path: Path | None) -> None:
    result.machine["load_after"] = list(os.getloadavg())
    if path is not None:
        result.save(path)


def _finish(result: Report, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(result.to_json())
    else:
        show(grids(result), notes(result))
    return EXIT_BROKEN if any(c.failed for run in result.runs for c in run.contenders) else 0


@contextmanager
def _one_text(files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Copy `files` into one, so that contenders started an hour apart read the same bytes;
    yields its name, or nothing.
    """
    if not files:
        yield ()
        return
    with tempfile.NamedTemporaryFile(prefix="zeroshard-bench-") as copy:
        copy.write(b"\n".join(Path(file).read_bytes() for file in files))
        copy.flush()
        yield (copy.name,)


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """A directory below `folder` (default: the temporary one) for what rests on disk; it is gone
    afterwards, whatever was left there.
    """
    try:
        scratch = tempfile.TemporaryDirectory(
            dir=folder, prefix="zeroshard-bench-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(
            f"--disk-path {folder}: {error.strerror}: name a directory on the disk to measure"
        ) from error
    with scratch as name:
        yield Path(name)


def _num_turns(comparisons: Sequence[Comparison], options: Options) -> int:
    """Return how often `measure` will say that it goes ahead."""
    total = 0
    for members, inside in blocks(comparisons, alive=options.alive):
        wanted = {c: options.pairs or c.pairs for c in inside}
        total += sum(
            1 + max(n for c, n in wanted.items() if name in (c.contender, c.reference))
            for name in members
        )
    return total
