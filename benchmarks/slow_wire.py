"""Step times over a slow wire: two hosts made of network namespaces, a veth pair between them
limited by `tc`, two ranks on each.

    # no limit, 1 Gbit/s and 100 Mbit/s, bf16
    sudo .venv/bin/python -m benchmarks.slow_wire
    sudo .venv/bin/python -m benchmarks.slow_wire --rates none,1gbit --precision fp32 --rounds 3 \\
        --rows zero3 zeropp-int4 --json

zeroshard finds two hosts, since network namespaces differ: their ranks share memory inside and meet
over gloo. The rows of a run are alive at once on the same four ranks and take turns (A B C A B C
...); a turn ends when the wire is quiet. Medians over rounds, ratios per round. What left a node is
counted three times: by its interface (headers and acknowledgements included), by
``engine.traffic()`` (payload), and by the closed form of core/wire.py. MB are 10^6 bytes.

Invariant: ranks and namespaces are gone at the end, whatever ends it but SIGKILL (then:
`ip netns del` what `ip netns` lists as zswire...). Tables and numbers go to stdout, progress to
stderr. Exit code 1 when a row failed, 3 where the machine lacks the rights for all this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from benchmarks import PATH, tables
from benchmarks.plan import Size
from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median, judge
from zeroshard.comm.codec import codec
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.wire import Wires
from zeroshard.terminal import JSON, Option, Table, count

MB = 1e6
MESH = Mesh(2, 2)
# of namespaces of our own: nothing to collide with
DEVICE, ADDRESSES, PORT = "wire0", ("10.201.0.1", "10.201.0.2"), "29500"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# what may pass at once: a packet as the kernel hands it over at least
BURST_S, MIN_BURST_BYTES = 0.002, 64 * 1024
PROBE_S, MAX_PROBE_BYTES = 0.5, 64 << 20
NO_RIGHTS = 3
REFERENCE = "zero3"
HEADER = (
    "row", "ms/step", f"times {REFERENCE}", "95% interval", "no limit", "MB out: counted", "engine",
    "closed form", "MB inside",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A contender: a row of the table, its lowering and its codecs."""

    name: str
    policy: str
    hierarchical: bool | None = None  # None: whichever moves fewer bytes between nodes
    weight_codec: str | None = None
    grad_codec: str | None = None

    def leaving_a_node(self, numel: int, precision: str) -> float:
        """Return the closed form: bytes that leave one node per step, all its ranks together."""
        weight, grad = (
            codec(name).stride / codec(name).block if name else None
            for name in (self.weight_codec, self.grad_codec)
        )
        wires = Wires.of(PRECISIONS[precision], weight=weight, grad=grad)
        return (
            policy_row(self.policy)
            .wire_bytes(numel=numel, mesh=MESH, wires=wires, two_level=self.hierarchical)
            .leaving_a_node(MESH)
        )


ROWS = {
    row.name: row
    for row in (
        Row("zero3", "zero3", hierarchical=False),
        Row("zero3-two-level", "zero3", hierarchical=True),
        Row("zero3-cheapest", "zero3"),
        Row("hpz", "hpz"),
        Row("mics", "mics"),
        Row("hfsdp", "hfsdp"),
        Row("zeropp-int8", "hpz", hierarchical=True, weight_codec="int8", grad_codec="int8"),
        Row("zeropp-int4", "hpz", hierarchical=True, weight_codec="int8", grad_codec="int4"),
    )
}


@dataclass
class Measured:
    """What one row did at one rate. Bytes are per step; what leaves a node is the mean of the
    two.
    """

    step_s: list[float] = field(default_factory=list)  # one per round: the slowest rank's
    sent_bytes: list[float] = field(default_factory=list)  # counted by the interface
    # counted by the engine; what one turn publishes may count as the next one's
    engine_bytes: list[float] = field(default_factory=list)
    formula_bytes: float = 0.0
    # of one node's ranks together, by link class; the mean over rounds
    link_bytes: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0


@dataclass
class AtRate:
    """One rate. `wire_mbit` is what bare transfers got through it, each way."""

    rate: str
    wire_mbit: float
    rows: dict[str, Measured]


@dataclass
class Report:
    """Everything measured."""

    command: list[str]
    machine: dict[str, Any]
    size: dict[str, Any]
    num_parameters: int
    compute_s: float  # of a forward and a backward without zeroshard, on all ranks at once
    precision: str
    steps: int  # per turn
    rates: list[AtRate]
    refused: dict[str, str]  # row -> why this version does not have it
    failed: dict[str, str]


class RowError(Exception):
    """A row broke; the ranks are of no use any more."""

    def __init__(self, row: str, reason: str) -> None:
        super().__init__(f"{row}: {reason}")
        self.row, self.reason = row, reason


# ----------------------------------------------------------------------------------------- the wire


def missing(
    which: Callable[[str], str | None] = shutil.which, user: int | None = None
) -> list[str]:
    """Return what this machine lacks to make namespaces, in words."""
    lacks = [f"the program {name!r} (of iproute2)" for name in ("ip", "tc") if which(name) is None]
    return lacks + (["root rights"] if (os.geteuid() if user is None else user) != 0 else [])


def bits_per_s(rate: str) -> float:
    """Return "100mbit" in bits per second, infinity for "none"; ValueError for anything else."""
    if rate == "none":
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"rate {rate!r} is not like 1gbit, 100mbit or none")
    return float(found[1]) * UNITS[found[2]]


def limit_words(rate: str) -> list[str]:
    """Return the words of ``tc qdisc replace dev ... root`` that hold `rate`: a token bucket,
    and room for what waits.
    """
    burst = max(int(bits_per_s(rate) / 8 * BURST_S), MIN_BURST_BYTES)
    return ["tbf", "rate", rate, "burst", f"{burst}b", "latency", "200ms"]


class Wire:
    """Two namespaces, and a veth pair that is the only way from one to the other. A context
    manager.
    """

    def __init__(self) -> None:
        self.hosts = tuple(f"zswire{os.getpid()}{letter}" for letter in "ab")
        self.rate = "none"

    def __enter__(self) -> Wire:
        try:
            for host in self.hosts:
                _run("ip", "netns", "add", host)
            first, second = self.hosts
            _run(
                "ip",
                "link",
                "add",
                DEVICE,
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                DEVICE,
                "netns",
                second,
            )
            for host, address in zip(self.hosts, ADDRESSES, strict=True):
                _run("ip", "-n", host, "address", "add", f"{address}/30", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _run("ip", "-n", host, "link", "set", device, "up")
            self.limit("1gbit")
            self.limit("none")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limit(self, rate: str) -> None:
        """Let `rate` through, each way. "none": as much as the kernel can."""
        for host in self.hosts:
            if rate != "none":
                _run(
                    "tc", "-n", host, "qdisc", "replace", "dev", DEVICE, "root", *limit_words(rate)
                )
            elif self.rate != "none":
                _run("tc", "-n", host, "qdisc", "delete", "dev", DEVICE, "root")
        self.rate = rate

    def close(self) -> None:
        """Remove both namespaces, and with them the pair. Whoever runs in them must have ended."""
        with _undisturbed():
            for host in self.hosts:
                subprocess.run(["ip", "netns", "delete", host], capture_output=True)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and its like until what has begun is done."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*words: str) -> None:
    """Run a command; its own words are the error."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(
            f"`{' '.join(words)}`: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )


# ---------------------------------------------------------------------------------------- the ranks


class Ranks:
    """Four processes (slow_wire_worker.py), two on each host. A context manager."""

    def __init__(
        self, wire: Wire, size: Size, precision: str, *, timeout_s: float, logs: Path
    ) -> None:
        self._timeout_s = timeout_s
        self._answers: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._logs = [logs / f"rank{rank}" for rank in range(MESH.size)]
        self._processes: list[subprocess.Popen[str]] = []
        words = [
            sys.executable,
            "-m",
            "benchmarks.slow_wire_worker",
            json.dumps(asdict(size)),
            precision,
            DEVICE,
        ]
        try:
            for rank in range(MESH.size):
                self._start(rank, wire.hosts[rank // MESH.node_size], words)
            self._collect("start")
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, host: str, words: list[str]) -> None:
        settings: dict[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": MESH.size,
            "LOCAL_RANK": rank % MESH.node_size,
            "LOCAL_WORLD_SIZE": MESH.node_size,
        }
        settings |= {
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": 1,
        }
        path = os.pathsep.join(filter(None, (*PATH, os.environ.get("PYTHONPATH"))))
        environment = (
            os.environ
            | {name: str(value) for name, value in settings.items()}
            | {"PYTHONPATH": path}
        )
        with self._logs[rank].open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *words],  # it replaces itself: the pid is the rank's
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put((rank, line))
        self._answers.put((rank, None))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, row: str, **command: Any) -> list[dict[str, Any]]:
        """Give every rank a command on behalf of `row`; return their answers, by rank. RowError
        when one of them ends or takes too long.
        """
        for process in self._processes:
            assert process.stdin is not None
            # it has ended, which the end of its answers tells
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
        return self._collect(row)

    def _collect(self, row: str) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < MESH.size:
            try:
                rank, line = self._answers.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                silent = [rank for rank in range(MESH.size) if rank not in answers]
                raise RowError(
                    row, f"no answer from rank(s) {silent} within {self._timeout_s:g} s"
                ) from None
            if line is None:
                raise RowError(row, f"rank {rank} ended: {_last_words(self._logs[rank])}")
            answers[rank] = json.loads(line)
        return [answers[rank] for rank in range(MESH.size)]

    def close(self) -> None:
        """End every rank, and wait for it."""
        with _undisturbed():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Mismatch|Exception)\b", line)]
    return (errors or lines or ["it said nothing"])[-1][:400]


# ---------------------------------------------------------------------------------------- measuring


def measure(
    ranks: Ranks,
    wire: Wire,
    names: Sequence[str],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Report:
    """Make an engine per row, then take turns at every rate. RowError when a row breaks."""
    refused: dict[str, str] = {}
    num_parameters = 0
    for name in names:
        answer = ranks.ask(name, make=asdict(ROWS[name]))[0]
        if "refused" in answer:
            refused[name] = answer["refused"]
            say(f"NOT IN THIS VERSION: {name}: {answer['refused']}")
        else:
            num_parameters = answer["numel"]
    alive = [name for name in names if name not in refused]
    wire.limit("none")
    compute_s = max(answer["seconds"] for answer in ranks.ask("compute", compute=10)) / 10
    say(f"forward and backward alone: {compute_s * 1000:.0f} ms")
    rates = []
    for rate in options.rates:
        wire.limit(rate)
        wire_mbit = _probe(ranks, rate)
        say(f"{rate}: bare transfers get {wire_mbit:.0f} Mbit/s each way")
        at = AtRate(rate, wire_mbit, {name: Measured() for name in alive})
        for number in range(1 - options.warmup, options.rounds + 1):
            for name in alive:
                _turn(ranks, name, at.rows[name], options.steps, counts=number > 0)
            times = ", ".join(
                f"{name} {row.step_s[-1] * 1000:.0f}" for name, row in at.rows.items() if row.step_s
            )
            say(
                f"{rate}: round {number} of {options.rounds}: "
                + (f"{times} ms" if number > 0 else "warm-up")
            )
        for name, row in at.rows.items():
            row.formula_bytes = ROWS[name].leaving_a_node(num_parameters, options.precision)
            row.link_bytes = {
                link: num_bytes / options.rounds for link, num_bytes in row.link_bytes.items()
            }
        rates.append(at)
    size = asdict(options.size)
    return Report(
        options.command,
        machine_facts(),
        size,
        num_parameters,
        compute_s,
        options.precision,
        options.steps,
        rates,
        refused,
        {},
    )


def _probe(ranks: Ranks, rate: str) -> float:
    """Return the Mbit/s that bare transfers get each way, all ranks at once."""
    num_bytes = int(min(bits_per_s(rate) / 8 * PROBE_S / MESH.node_size, MAX_PROBE_BYTES))
    seconds: float = max(answer["seconds"] for answer in ranks.ask("probe", probe=num_bytes))
    return MESH.node_size * num_bytes * 8 / seconds / 1e6


def _turn(ranks: Ranks, name: str, row: Measured, steps: int, *, counts: bool) -> None:
    """Let `name` take its turn, and write down what it did."""
    answers = ranks.ask(name, turn=name, steps=steps)
    if not counts:
        return
    row.step_s.append(max(answer["seconds"] for answer in answers) / steps)
    row.sent_bytes.append(
        sum(answer["sent"] for answer in answers[:: MESH.node_size]) / MESH.num_nodes / steps
    )
    row.engine_bytes.append(sum(answer["between"] for answer in answers) / MESH.num_nodes / steps)
    for answer in answers:
        for link, num_bytes in answer["links"].items():
            row.link_bytes[link] = (
                row.link_bytes.get(link, 0.0) + num_bytes / MESH.num_nodes / steps
            )
    row.loss = answers[0]["loss"]


def run(names: Sequence[str], options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure `names`; rows that break are left out, said aloud, and the others start again."""
    failed: dict[str, str] = {}
    left = list(names)
    with Wire() as wire, tempfile.TemporaryDirectory() as logs:
        while True:
            try:
                with Ranks(
                    wire,
                    options.size,
                    options.precision,
                    timeout_s=options.timeout,
                    logs=Path(logs),
                ) as ranks:
                    report = measure(ranks, wire, left, options, say)
            except RowError as error:
                say(f"FAILED: {error}")
                failed[error.row] = error.reason
                if error.row not in left or len(left) == 1:
                    raise
                left.remove(error.row)
            else:
                report.failed = failed
                return report


# ------------------------------------------------------------------------------------------- tables


def cells(name: str, at: AtRate, free: AtRate | None) -> tuple[str, ...]:
    """Return one line of the table, as text."""
    row, reference = at.rows[name], at.rows.get(REFERENCE)
    step_s = median(row.step_s)
    ratio, interval = "", ""
    if reference is not None:
        found = bootstrap_median([a / b for a, b in zip(reference.step_s, row.step_s, strict=True)])
        ratio, interval = f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}"
    without = (
        f"{median(free.rows[name].step_s) * 1000:.0f} ms" if free and name in free.rows else ""
    )
    inside = sum(num_bytes for link, num_bytes in row.link_bytes.items() if link != "gloo")
    counted = (median(row.sent_bytes), median(row.engine_bytes), row.formula_bytes, inside)
    return (
        name,
        f"{step_s * 1000:.0f}",
        ratio,
        interval,
        without,
        *(f"{num_bytes / MB:.1f}" for num_bytes in counted),
    )


def notes(report: Report) -> list[str]:
    """Say what a reader of the tables has to know: what is missing, how far the wire binds, what
    became of the target.
    """
    free = next((at for at in report.rates if at.rate == "none"), None)
    lines = [f"NOT IN THIS VERSION: {name}: {why}" for name, why in report.refused.items()]
    lines += [f"FAILED: {name}: {why}" for name, why in report.failed.items()]
    for at in report.rates:
        for name, row in at.rows.items():
            between = fmean(row.engine_bytes)
            if abs(row.link_bytes.get("gloo", 0.0) - between) > 0.01 * between:
                links = ", ".join(
                    f"{num_bytes / MB:.1f} MB {link}" for link, num_bytes in row.link_bytes.items()
                )
                lines.append(
                    f"NOT TWO HOSTS: {name} at {at.rate} moved {between / MB:.1f} MB between nodes"
                    f" by {links}"
                )
    for at in report.rates:
        if REFERENCE not in at.rows or at.rate == "none":
            continue
        reference = at.rows[REFERENCE]
        step_s = median(reference.step_s)
        wire_s = median(reference.engine_bytes) * 8 / bits_per_s(at.rate)
        line = (
            f"{at.rate}: bare transfers got {at.wire_mbit:.0f} Mbit/s each way; of a {REFERENCE}"
            f" step {wire_s / step_s:.0%} is payload at that rate"
        )
        line += f", {report.compute_s / step_s:.0%} is forward and backward alone"
        if free is not None:
            line += (
                f", and without a limit it takes {median(free.rows[REFERENCE].step_s) / step_s:.0%}"
                " of the time"
            )
        lines.append(line)
        for name in (name for name in at.rows if name.startswith("zeropp")):
            ratio = bootstrap_median(
                [a / b for a, b in zip(reference.step_s, at.rows[name].step_s, strict=True)]
            )
            verdict = judge(ratio, 2.0, num_pairs=len(reference.step_s))
            lines.append(
                f"{at.rate}: {name} at least 2x as fast as {REFERENCE}: {ratio.median:.2f},"
                f" {verdict}"
            )
    return lines


def title(report: Report, at: AtRate) -> str:
    """Say what one table is about."""
    size = Size(**report.size)
    speed = "no limit" if at.rate == "none" else at.rate
    shape = (
        f"{report.num_parameters / 1e6:.1f}M parameters, {report.precision}, 2 hosts x 2 ranks x 1"
        f" thread, {size.tokens} tokens per rank"
    )
    rounds = max((len(row.step_s) for row in at.rows.values()), default=0)
    return f"{speed}: {shape}; {rounds} rounds of {report.steps} steps"


def grids(report: Report) -> list[Table]:
    """Return every table."""
    free = next((at for at in report.rates if at.rate == "none"), None)
    return [
        tables.grid(title(report, at), HEADER, [cells(name, at, free) for name in at.rows])
        for at in report.rates
    ]


def show(report: Report, console: Console | None = None) -> None:
    """Print every table."""
    tables.show(grids(report), notes(report), console)


def markdown(report: Report) -> str:
    """Return every table as markdown, for docs/zeropp.md."""
    machine = report.machine
    text = [
        (
            f"`{' '.join(report.command)}`; {machine['processor']}, {machine['cores']} cores, Linux"
            f" {machine['kernel']}."
        ),
        "",
    ]
    text += [table.markdown() for table in grids(report)]
    return "\n".join(text + [f"- {note}" for note in notes(report)]) + "\n"


# -------------------------------------------------------------------------------------- the command


OPTIONS = (
    Option("--rows ROW ...", f"default: all of {', '.join(ROWS)}", choices=list(ROWS),
           default=list(ROWS)),
    Option("--rates RATE,...", "none is no limit (default: none,1gbit,100mbit)",
           default="none,1gbit,100mbit"),
    Option("--precision", choices=("bf16", "fp32"), default="bf16"),
    Option("--rounds N", "turns of each row that count (default: 12, the fewest that decide)",
           count(1), 12),
    Option("--steps N", "steps per turn (default: 2)", count(1), 2),
    Option("--warmup N", "turns of each row at each rate that do not count (default: 1)", count(0),
           1),
    Option("--layers N", type=count(1), default=3),
    Option("--width N", type=int, default=768),
    Option("--tokens N", "per rank and step (default: 16)", count(1), 16),
    Option("--timeout S", "seconds for a turn, after which a row has failed (default: 120)", float,
           120.0),
    replace(JSON, help="print raw numbers as JSON instead of tables"),
    Option("--out FILE", "write them to this file too: tables where it ends in .md, else JSON",
           Path),
)  # fmt: skip


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; `size` and `rates` are ready to use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option in OPTIONS:
        option.add_to(parser)
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    # where a file lies is nobody's business
    shown = [Path(word).name if os.path.isabs(word) else word for word in words]
    options.command = ["python", "-m", "benchmarks.slow_wire", *shown]
    options.rates = options.rates.split(",")
    if options.width < 64 or options.width % 64:
        parser.error("--width must be a multiple of 64, a head's")
    try:
        for rate in options.rates:
            bits_per_s(rate)
    except ValueError as error:
        parser.error(str(error))
    options.size = Size(
        "wire",
        options.layers,
        options.width,
        options.width // 64,
        vocabulary=256,
        context=options.tokens,
    )
    return options


def refuse(reason: str) -> int:
    """Say loudly that nothing was measured."""
    print(
        "SKIPPED, NOTHING MEASURED: benchmarks/slow_wire.py makes network namespaces and limits a"
        f" veth pair, and lacks {reason}",
        file=sys.stderr,
    )
    return NO_RIGHTS


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if lacks := missing():
        return refuse(" and ".join(lacks))
    try:
        with Wire():
            pass
    except OSError as error:
        return refuse(f"the right to: {error}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # ends like Ctrl-C: through every `with`
    try:
        report = run(options.rows, options, partial(print, file=sys.stderr))
    except RowError:
        return 1
    except KeyboardInterrupt:
        print("interrupted: ranks and namespaces are gone", file=sys.stderr)
        return 130
    report.machine["load_after"] = list(os.getloadavg())
    raw = json.dumps(asdict(report), indent=1)
    if options.out:
        options.out.write_text(
            markdown(report) if options.out.suffix == ".md" else raw, encoding="utf-8"
        )
    if options.json:
        print(raw)
    else:
        show(report)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
