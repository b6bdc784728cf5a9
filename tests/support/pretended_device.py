"""A device that is not there, and the host beside it, as far as the order of what they do goes.

What `torch.get_device_module` returns for a device (streams and events), the thread of the
optimizer's step, and the events by which threads wait for one another: each moves the vector clocks
of a `Timeline`. A stream is a lane; each thread of the host is one more, in the order of its
program. What a lane is given comes after everything that the thread has done, or waited for; the
thread comes after what a lane does only once it has waited for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

import zeroshard
from zeroshard.runtime.streams import LANES, Event, Lane

Clock = Counter[str]  # per lane: how many of its accesses are known to have finished


class LaneClocks:
    """The order of lanes: fork, mark and join copy clocks as events do.

    `drop` leaves out one of these: forks and joins are counted together from 0 in the order of
    their calls.
    """

    def __init__(self, drop: int | None) -> None:
        self.clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self.syncs: list[str] = []  # what each synchronisation operation was, dropped or not
        self.drop = drop
        self._thread = threading.local()

    @property
    def lane(self) -> str:
        """The one in force in this thread."""
        return getattr(self._thread, "lane", "compute")

    def fork(self, lane: Lane) -> None:
        """Let `lane` come after everything on compute so far."""
        self._synchronise(f"fork({lane})", lane, self.reached("compute"))

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        """Run the body on `lane`."""
        outer, self._thread.lane = self.lane, lane
        try:
            yield
        finally:
            self._thread.lane = outer

    def reached(self, lane: str) -> Clock:
        """Return what comes before whatever `lane` is given next."""
        return self.clocks[lane].copy()

    def mark(self, lane: Lane) -> Event:
        """Return where `lane` is."""
        return lane, self.reached(lane)

    def join(self, event: Event, lane: Lane = "compute") -> None:
        """Let `lane` come after `event`."""
        of, clock = event
        self._synchronise(f"join({of})", lane, clock)

    def drain(self) -> None:
        """The host waits for all lanes."""
        for lane in LANES:
            for other in LANES:
                self.order(lane, self.clocks[other])

    def is_idle(self) -> bool:
        """Whether nothing is under way: it never is, since operations run as they are enqueued."""
        return True

    def order(self, lane: str, clock: Clock) -> None:
        """Let `lane` come after `clock`."""
        self.clocks[lane] |= clock

    def _synchronise(self, name: str, waiter: str, clock: Clock) -> None:
        dropped = len(self.syncs) == self.drop
        self.syncs.append(name)
        if not dropped:
            self.order(waiter, clock)


# whose frames do not say who waits
_PACKAGE, _TORCH = (Path(str(module.__file__)).parent for module in (zeroshard, torch))
_BETWEEN = (
    *(f"{folder}/" for folder in (Path(__file__).parent, _PACKAGE / "memory", _TORCH)),
    *(str(_PACKAGE / "core" / "work.py"), contextlib.__file__),
)


def site_of_caller() -> str:
    """Return the function of the library that calls, through whatever helpers."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_BETWEEN):
            return str(frame.f_code.co_qualname)
        frame = frame.f_back
    return "?"


class Timeline(LaneClocks):
    """The clocks of lanes and of the host's threads.

    `without` leaves out every wait for an event that these functions of the library make, by their
    qualified names; `waits` names those that were met.
    """

    def __init__(self, drop: int | None = None, without: Collection[str] = ()) -> None:
        super().__init__(drop)
        self.without = without
        self.waits: set[str] = set()
        self.host_waits: list[str] = []  # where the host has waited for the device

    @property
    def program(self) -> str:
        """The lane of this thread of the host."""
        return getattr(self._thread, "program", "host")

    def reached(self, lane: str) -> Clock:
        return self.clocks[lane] | self.clocks[self.program]

    def drain(self) -> None:
        self.host_waits.append(f"drain in {site_of_caller()}")
        for lane in list(self.clocks):
            self.order(self.program, self.clocks[lane])

    def wait(self, waiter: str, clock: Clock) -> None:
        """Let `waiter` come after `clock`."""
        site = site_of_caller()
        self.waits.add(site)
        if site not in self.without:
            self.order(waiter, clock)

    def host_waits_for(self, clock: Clock, why: str = "wait") -> None:
        """Let this thread come after what the device has done."""
        self.host_waits.append(f"{why} in {site_of_caller()}")
        self.wait(self.program, clock)

    @contextmanager
    def running(self, program: str) -> Iterator[None]:
        """Be a thread of the host of that name."""
        self._thread.program = program
        yield


class _Watch(Protocol):
    """What watches a thread."""

    def __call__(self) -> AbstractContextManager[None]: ...


class PretendedDevice:
    """The module of a device, and what the step's thread is made of; `watch` is entered in that
    thread, too.
    """

    def __init__(self, time: Timeline, watch: _Watch) -> None:
        self._time = time
        self._watch = watch
        self._num_streams = 0

    # ------------------------------------------------------------------ torch.get_device_module

    def Stream(self, device: Any) -> _Stream:  # noqa: N802 - torch's name
        self._num_streams += 1
        return _Stream(self._time, f"stream {self._num_streams}")

    def Event(self, *, enable_timing: bool = False) -> _Event:  # noqa: N802 - torch's name
        return _Event(self._time)

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream(self._time, self._time.lane)

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        return self._time.on(stream.lane)

    def empty_cache(self) -> None: ...

    def is_available(self) -> bool:
        """No: torch.accelerator asks for the machine's own, and captures no graph here."""
        return False

    # ------------------------------------------------------------------ threads of the host

    def pool(self, workers: int, *, thread_name_prefix: str) -> _Pool:
        return _Pool(self._time, self._watch, workers, thread_name_prefix)

    def thread_event(self) -> _ThreadEvent:
        return _ThreadEvent(self._time)


class _Stream:
    def __init__(self, time: Timeline, lane: str) -> None:
        self.lane = lane
        self._time = time

    def wait_event(self, event: _Event) -> None:
        self._time.wait(self.lane, event.clock)

    def wait_stream(self, other: _Stream) -> None:
        self._time.wait(self.lane, self._time.reached(other.lane))


class _Event:
    def __init__(self, time: Timeline) -> None:
        self.clock = Clock()
        self._time = time

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = self._time.reached(self._time.lane if stream is None else stream.lane)

    def wait(self, stream: _Stream | None = None) -> None:
        self._time.wait(self._time.lane if stream is None else stream.lane, self.clock)

    def query(self) -> bool:
        """Whether the host knows that it is reached: a device is as slow as it may be."""
        return self.clock <= self._time.clocks[self._time.program]

    def synchronize(self) -> None:
        self._time.host_waits_for(self.clock)


class _ThreadEvent(threading.Event):
    """Whoever sees it set comes after whoever has set it, not after who does so once more."""

    def __init__(self, time: Timeline) -> None:
        super().__init__()
        self._time = time
        self._clock = Clock()

    def set(self) -> None:
        if not super().is_set():
            self._clock = self._clock | self._time.clocks[self._time.program]
        super().set()

    def is_set(self) -> bool:
        found = super().is_set()
        if found:
            self._time.order(self._time.program, self._clock)
        return found

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self._time.wait(self._time.program, self._clock)
        return found


class _Pool(ThreadPoolExecutor):
    """One thread, whose program begins after `submit` and ends before `result`."""

    def __init__(self, time: Timeline, watch: _Watch, workers: int, prefix: str) -> None:
        super().__init__(workers, thread_name_prefix=prefix)
        self._time = time
        self._watched = watch
        self._prefix = prefix

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        time, program = self._time, self._prefix
        submitted = time.clocks[time.program].copy()
        ended = Clock()

        def watched() -> Any:
            with time.running(program), self._watched():
                time.order(program, submitted)
                try:
                    return call(*args, **options)
                finally:
                    ended.update(time.clocks[program])

        future = super().submit(watched)
        result = future.result

        def joined(timeout: float | None = None) -> Any:
            value = result(timeout)
            time.wait(time.program, ended)
            return value

        future.result = joined  # type: ignore[method-assign]
        return future
