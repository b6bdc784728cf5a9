"""The memory ledger: the bytes that engines count beside those that the process has.

    print(zs.memory_table())                      every open engine of this process
    print(zs.memory_table(policy, reference))     these
    json.dumps(zs.memory_table().to_dict())       the same numbers, in bytes

An engine counts to the byte where its states rest. The process has more: torch itself, activations,
what allocators keep, memory of the user's. The table shows both and names the difference; it does
not divide it, since nobody can.

Invariant: the rows of an engine are ``engine.memory()``, and its units add up to them. Cost: one
walk over the segments and one read of /proc; nothing is counted between calls.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeroshard.comm.groups import connection_bytes
from zeroshard.core.placement import Tier
from zeroshard.errors import StorageError
from zeroshard.runtime.engine import Engine, living_engines, open_engines, states_of
from zeroshard.runtime.reports import MemoryReport, describe_bytes
from zeroshard.system.device import Device
from zeroshard.system.this_host import numbers_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_TIERS = tuple(tier.value for tier in Tier)
_WIDTH = 100
_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
_CPU_NOTE = (
    "The difference in host memory is Python, torch and its libraries, activations and other"
    " tensors of the program, pages that the ranks of this host map together (PSS divides them,"
    " RSS counts them on every rank), and what allocators keep or round up."
)
_DEVICE_NOTE = (
    "The difference on the device is activations and other tensors of the program, and 512-byte"
    " rounding; reserved above allocated is what torch's allocator keeps for reuse."
)
_NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch's own RuntimeErrors on CPU


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine on this rank."""

    name: str
    device: str  # its type
    report: MemoryReport
    # by unit, state and tier: bytes at rest; empty unless asked for
    units: dict[str, dict[str, dict[str, int]]]
    # of a closed engine: what its counters and stores have not given back ("temporary", "host",
    # "disk"); None of an open one
    unreleased: dict[str, int] | None


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of this process as the system and torch's allocator count it, in bytes; None
    where nobody does.
    """

    rss: int | None  # resident
    pss: int | None  # resident, pages that n processes map divided by n
    device_allocated: int | None  # in tensors on the current device of the accelerator
    device_reserved: int | None  # by torch's allocator there
    # that connecting process groups took there, beside torch's allocator
    device_connections: int | None = None

    @classmethod
    def now(cls) -> ProcessMemory:
        """Ask the system, and torch where an accelerator is in use; nothing is initialized."""
        accelerator = Device.accelerator()
        usage = None if accelerator is None else accelerator.usage()
        allocated, reserved = (None, None) if usage is None else usage
        lines = (numbers_of(_STATUS).get("VmRSS:"), numbers_of(_ROLLUP).get("Pss:"))
        rss, pss = (None if kilobytes is None else kilobytes << 10 for kilobytes in lines)
        return cls(
            rss=rss,
            pss=pss,
            device_allocated=allocated,
            device_reserved=reserved,
            device_connections=connection_bytes(),
        )


@dataclass(frozen=True)
class MemoryTable:
    """Made by :func:`memory_table`. ``str()`` and rich print it; ``to_dict()`` is for programs."""

    engines: tuple[EngineMemory, ...]
    process: ProcessMemory

    @property
    def accounted(self) -> dict[str, int]:
        """Bytes that the open engines count in this process's host memory and on its accelerator,
        at rest or in use now.
        """
        counted = {"host": 0, "device": 0}
        for engine in self.engines:
            if engine.unreleased is None:
                sums = engine.report.by_tier
                counted["host"] += sums["host"]
                near = {"cpu": "host"}.get(engine.device, "device")
                counted[near] += sums["device"] + engine.report.temporary
        return counted

    @property
    def unaccounted(self) -> dict[str, int | None]:
        """Bytes of the process beyond `accounted`: its PSS (RSS where there is none), and what is
        allocated on the device; None where there is no figure. Below zero where memory that is
        counted has not been touched, or is another process's share.
        """
        process, counted = self.process, self.accounted
        resident = process.rss if process.pss is None else process.pss
        allocated = process.device_allocated
        return {
            "host": None if resident is None else resident - counted["host"],
            "device": None if allocated is None else allocated - counted["device"],
        }

    @property
    def notes(self) -> list[str]:
        """Sentences: what the difference is made of, and what closed engines still hold."""
        notes = []
        for engine in self.engines:
            counted = "its buffers and stores have given everything back"
            if engine.unreleased:
                counted = f"its counters still have {describe_bytes(engine.unreleased)}"
            if engine.unreleased is not None:
                notes.append(f"{engine.name}: closed, {counted}.")
        if self.unaccounted["host"] is not None:
            notes.append(_CPU_NOTE)
        if self.unaccounted["device"] is not None:
            notes.append(_DEVICE_NOTE)
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, bytes throughout."""
        return {
            "engines": [
                {
                    "name": engine.name,
                    "device": engine.device,
                    **asdict(engine.report),
                    "total": engine.report.total,
                    "units": engine.units,
                    "unreleased": engine.unreleased,
                }
                for engine in self.engines
            ],
            "process": asdict(self.process),
            "accounted": self.accounted,
            "unaccounted": self.unaccounted,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue().rstrip("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for engine in self.engines:
            if engine.unreleased is None:
                yield _grid(engine)
        yield self._process_grid()
        for note in self.notes:
            yield Text(note)

    def _process_grid(self) -> Table:
        from rich.filesize import decimal

        process, over = self.process, self.unaccounted
        rows = {
            "host: resident (RSS)": process.rss,
            "host: resident, shared pages divided (PSS)": process.pss,
            "host: counted by the engines above": self.accounted["host"],
            "host: difference": over["host"],
            "device: reserved by torch's allocator": process.device_reserved,
            "device: allocated in tensors": process.device_allocated,
            "device: counted by the engines above": self.accounted["device"],
            "device: difference": over["device"],
            "device: connections of process groups, beside the allocator's": (
                process.device_connections
            ),
        }
        if process.device_allocated is None:
            rows = {name: size for name, size in rows.items() if not name.startswith("device")}
        table = _table("this process", "bytes")
        for name, size in rows.items():
            sign = "-" if size is not None and size < 0 else ""
            table.add_row(name, "unknown" if size is None else f"{sign}{decimal(abs(size))}")
        return table


def memory_table(*engines: Engine, by_unit: bool = False) -> MemoryTable:
    """Return the memory of `engines` on this rank (none: of all open engines of this process)
    beside the process's own.

    Print the result, or take ``to_dict()`` of it. `by_unit` adds a row per unit and state. Of an
    engine that was closed it says whether everything was given back. Not collective.
    """
    counted = []
    for engine in engines or open_engines():
        states, accounts = states_of(engine), states_of(engine).accounts
        report = engine.memory()  # first: it takes note of gradients that the user has cleared
        name = _name(engine)
        units = accounts.by_unit() if by_unit and not states.is_closed else {}
        left = accounts.unreleased() if states.is_closed else None
        counted.append(EngineMemory(name, accounts.device_type, report, units, left))
    return MemoryTable(tuple(counted), ProcessMemory.now())


def explain(error: BaseException) -> None:
    """Add the table of all open engines to an `error` that says that memory, or a tier of it, has
    run out; leave other errors alone.

    ``zeroshard run`` calls it with the error that ends a rank.
    """
    ran_out = isinstance(error, (torch.OutOfMemoryError, MemoryError, StorageError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )
    if ran_out and open_engines():
        error.add_note(f"\n{memory_table(by_unit=True)}")


def leaks() -> list[str]:
    """Return a sentence for each engine of this process that holds memory which it should have
    given back: a closed one whatever it counts, an open one the gathered weights and buffers that
    are in use between two steps.

    ``zeroshard run`` calls it when a script ends well. An engine in the middle of a step (a
    backward without its step) is passed over. Not collective.
    """
    found = []
    for engine in living_engines():
        accounts = states_of(engine).accounts
        if states_of(engine).is_closed:
            where, held = "closed", accounts.unreleased()
        elif states_of(engine).has_pending_gradients:
            continue
        else:
            where, held = "between steps", {"temporary": states_of(engine).bytes_in_use}
        if any(held.values()):
            found.append(f"{_name(engine)}: {where}, and still has {describe_bytes(held)}")
    return found


# ------------------------------------------------------------------------------------------ helpers


def _name(engine: Engine) -> str:
    return f"{type(engine.module).__name__}, {engine.policy.name}, rank {engine.rank}"


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("memory", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _grid(engine: EngineMemory) -> Table:
    report = engine.report
    table = _table(f"{engine.name} ({engine.device})", *_TIERS, "together")
    for state, by_tier in report.tiers.items():
        _add(table, state, by_tier)
        for unit, states in engine.units.items():
            if states[state]:
                _add(table, f"  {unit}", states[state])
    table.add_section()
    _add(table, "at rest", report.by_tier)
    if report.tier_peaks:
        _add(table, "at rest, at peak", report.tier_peaks)
    _add(table, "gathered and in buffers", {"device": report.temporary})
    _add(table, "gathered and in buffers, at peak", {"device": report.peak})
    return table


def _add(table: Table, name: str, by_tier: dict[str, int]) -> None:
    from rich.filesize import decimal
    from rich.text import Text

    sizes = [by_tier.get(tier, 0) for tier in _TIERS]
    cells = [decimal(size) if size else "" for size in sizes]
    table.add_row(Text(name), *cells, decimal(sum(sizes)))
