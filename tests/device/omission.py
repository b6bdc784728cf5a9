"""Waits of the engine, named and counted, and left out one at a time.

    with Omission(["fork(gather)"]).active() as omission:
        ...
    omission.waits      # every wait that was met, in order

A name is what `Streams` is told ("fork(gather)", "join(reduce)", "drain"), or the function of
the library that waits, through whatever helpers: for an event ("Segment.wait_uploads"), for the
whole device ("drain"), or as the host, in a copy that is not ``non_blocking``, ``Tensor.cpu()``,
``Tensor.to()`` and ``Tensor.tolist()``. What the host reads without waiting is NaN, or the
largest integer, until it has arrived; in pageable memory, for which a driver would wait
nevertheless, it never does. A copy from pageable memory is no wait: a driver takes its numbers
before the call returns.

It patches torch and the engine's classes while a context is open. One process, any thread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import zeroshard
from zeroshard.memory import Mark
from zeroshard.runtime.streams import AcceleratorStreams

_LARGEST = {dtype: torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int32, torch.int64)}
_LARGEST |= {torch.bool: 1}
_PACKAGE = f"{Path(str(zeroshard.__file__)).parent}/"
_TESTS = f"{Path(__file__).parents[1]}/"
# whose frames do not say who waits
_BETWEEN = tuple(_PACKAGE + part for part in ("memory/", "core/work.py", "system/"))


def _site() -> str:
    """Return the function of the library that calls."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TESTS) and file != __file__:
            return "?"
        if file.startswith(_PACKAGE) and not file.startswith(_BETWEEN):
            return str(frame.f_code.co_qualname)
        frame = frame.f_back
    return "?"


class Omission:
    """Waits that are left out: those called `without`, or those whose numbers `drop` has."""

    def __init__(self, without: Collection[str] = (), *, drop: Collection[int] = ()) -> None:
        self.waits: list[str] = []
        self._without = without
        self._drop = drop
        self._lanes: dict[int, tuple[Any, str]] = {}  # of an event, which is kept: ids return

    def _leaves_out(self, site: str) -> bool:
        """Note a wait; return whether it is left out."""
        self.waits.append(site)
        return site in self._without or len(self.waits) - 1 in self._drop

    @contextmanager
    def active(self) -> Iterator[Omission]:
        """Leave them out inside."""
        module: Any = torch.get_device_module("zsim")
        streams, tensor = AcceleratorStreams, torch.Tensor
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (streams, "fork", self._fork),
            (streams, "mark", self._mark),
            (streams, "join", self._join),
            (streams, "drain", self._unless_left_out(lambda *_: "drain")),
            (Mark, "wait", self._unless_left_out()),
            (Mark, "synchronize", self._unless_left_out()),
            (module.Stream, "wait_event", self._unless_left_out()),
            (module.Stream, "wait_stream", self._unless_left_out()),
            (tensor, "copy_", self._copy),
            (tensor, "cpu", self._cpu),
            (tensor, "to", self._to),
            (tensor, "tolist", self._tolist),
        ]
        with ExitStack() as stack:
            for target, name, make in patches:
                original = getattr(target, name)
                stack.enter_context(mock.patch.object(target, name, _method(make, original)))
            current = module.current_stream
            patched = mock.patch.object(
                module, "current_stream", lambda device=None: _ours(module, current(device))
            )
            stack.enter_context(patched)
            yield self

    def _unless_left_out(self, name: Callable[..., str] | None = None) -> Callable[..., Any]:
        def call(original: Callable[..., Any], target: Any, *args: Any) -> Any:
            site = _site() if name is None else name(target, *args)
            inside_streams = site.startswith("AcceleratorStreams.")  # counted there
            if inside_streams or not self._leaves_out(site):
                return original(target, *args)
            return None

        return call

    def _fork(self, original: Callable[..., Any], streams: Any, lane: str) -> None:
        if not self._leaves_out(f"fork({lane})"):
            original(streams, lane)

    def _mark(self, original: Callable[..., Any], streams: Any, lane: str) -> Any:
        event = original(streams, lane)
        self._lanes[id(event)] = event, lane
        return event

    def _join(
        self, original: Callable[..., Any], streams: Any, event: Any, lane: str = "compute"
    ) -> None:
        _, of = self._lanes.get(id(event), (None, "?"))
        if not self._leaves_out(f"join({of})"):
            original(streams, event, lane)

    def _copy(
        self, original: Callable[..., Any], out: Any, source: Any, non_blocking: bool = False
    ) -> Any:
        host = out if out.device.type == "cpu" else source
        waits = out.device.type != source.device.type and not non_blocking
        if waits and (host is out or host.is_pinned()) and self._leaves_out(_site()):
            non_blocking = True
            if not host.is_pinned():
                return out.fill_(_nothing(out))
        return original(out, source, non_blocking)

    def _cpu(self, original: Callable[..., Any], tensor: Any) -> Any:
        if tensor.device.type == "cpu" or not self._leaves_out(_site()):
            return original(tensor)
        return _without_waiting(tensor)

    def _to(self, original: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
        named = (*args, options.get("device"))
        target = next(
            (torch.device(one) for one in named if isinstance(one, str | torch.device)), None
        )
        arrives = target is not None and target.type == "cpu" != tensor.device.type
        if not arrives or not self._leaves_out(_site()):
            return original(tensor, *args, **options)
        return original(_without_waiting(tensor), *args, **options)

    def _tolist(self, original: Callable[..., Any], tensor: Any) -> Any:
        if tensor.device.type == "cpu" or not self._leaves_out(_site()):
            return original(tensor)
        return original(_without_waiting(tensor))


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what may stand in for the method `original`."""

    def method(target: Any, *args: Any, **options: Any) -> Any:
        return stand_in(original, target, *args, **options)

    return method


def _ours(module: Any, stream: torch.Stream) -> Any:
    """Return `stream` as one whose methods can be patched."""
    return module.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _without_waiting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host that may arrive later."""
    out = torch.full(tensor.shape, _nothing(tensor), dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor.detach(), non_blocking=True)


def _nothing(tensor: torch.Tensor) -> float:
    """Return what memory of the dtype of `tensor` reads as before its numbers are there."""
    return math.nan if tensor.is_floating_point() else _LARGEST[tensor.dtype]
