"""Empty the device between phases: every state to the host and back, bit for bit.

    engine.offload_states()     weights, masters, moments, gradients --> host memory; nothing of
                                them is left on the device
    ... another model generates, evaluates, trains ...
    engine.reload_states()      back to where they were, the same bits

Whoever needs a state in between gets a StateError that says so. Views stay views: weights and
masters come back into the storages that they left, so that what refers to them (peers' mappings,
views of a flat buffer) is right again; pieces, moments and gradients stand as one NaN meanwhile.

Cost: the bytes at rest on the device, once each way, and as many on the host meanwhile. What rests
on another tier already is not touched.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zeroshard.comm.levels import Transports
from zeroshard.memory import placeholder
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.state import State, move
from zeroshard.tier.stores import HostStore

_PAGE = mmap.PAGESIZE


class OffloadedStates:
    """The states of one engine while they are off the device."""

    def __init__(
        self,
        weights: Weights,
        sharded: ShardedOptimizer | None,
        transports: Transports,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._sharded = sharded
        self._transports = transports
        self._store = HostStore(device)
        self._returns: list[Callable[[], object]] = []  # each brings one state back

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self._store.account.live

    def begin(self) -> None:
        """Bring everything to the host. Collective: peers may read our memory until all have
        come here.
        """
        for unit in self._weights.units:
            bring_to_rest(unit, self._weights)
        self._transports.begin_write()
        for segment in self._weights.segments:
            self._put_gradient(segment)
        if self._sharded is not None:
            for shard in self._sharded.pieces():
                for value in self._sharded.states.of(shard).values():
                    if isinstance(value, torch.Tensor) and value.dim() and value.stride() != (0,):
                        self._put(f"{shard.name} state", value, partial(setattr, value, "data"))
                shard.leave_memory()
        for segment in self._weights.segments:
            for tensor in _own_memory(segment):
                if tensor.numel():
                    self._put_memory(segment.key, tensor)
        self._weights.availability.offloaded(True)

    def end(self) -> None:
        """Bring everything back. Collective."""
        for bring_back in reversed(self._returns):
            bring_back()
        if self._sharded is not None:
            for shard in self._sharded.pieces():
                shard.repoint()
        for segment in self._weights.segments:
            segment.flat.publish_everywhere()
        self._store.close()
        self._weights.availability.offloaded(False)
        self._weights.run(self._weights.schedule.publish())

    def _copy_out(self, name: str, tensor: torch.Tensor) -> State:
        out = State(self._store.allocate(name, tensor.numel(), tensor.dtype))
        move(State.of(tensor.detach().reshape(-1)), out)
        return out

    def _put_gradient(self, segment: Segment) -> None:
        resting = None if segment.grad is None else segment.grad.accumulator.resting()
        if resting is None or not resting.on_device:
            return
        self._put(f"{segment.key} gradient", resting.numbers.whole, resting.replace)

    def _put(
        self, name: str, tensor: torch.Tensor, replace: Callable[[torch.Tensor], object]
    ) -> None:
        """Take away a tensor that the user may see: a placeholder is put in its place."""
        away, device = self._copy_out(name, tensor), tensor.device
        replace(placeholder(tensor.shape, tensor.dtype, device))
        self._returns.append(lambda: replace(_on_device(away, device)))

    def _put_memory(self, key: str, tensor: torch.Tensor) -> None:
        """Take away the memory of a tensor, which stays where it is: views refer to it."""
        away, memory = self._copy_out(key, tensor), tensor.untyped_storage()
        num_bytes = memory.nbytes()

        def bring_back() -> None:
            if memory.nbytes() < num_bytes:
                memory.resize_(num_bytes)
            move(away, State.of(tensor))

        memory.resize_(0) if memory.resizable() else _release_pages(tensor)
        self._returns.append(bring_back)


def _on_device(state: State, device: torch.device) -> torch.Tensor:
    """Return the numbers of a state as a tensor of their own on `device`."""
    out = torch.empty(state.numel, dtype=state.dtype, device=device)
    move(state, State.of(out))
    return out


def bring_to_rest(unit: Unit, weights: Weights) -> None:
    """Bring a unit to rest, whatever row it is."""
    weights.bring_to_rest(unit)
    for segment in unit.segments:
        segment.flat.release_column()
        segment.wait_uploads()


def _own_memory(segment: Segment) -> Sequence[torch.Tensor]:
    """Return this rank's device memory of a segment's weights and master, each once."""
    flat, found = segment.flat, []
    if flat.window is not None:
        whole = flat.window.full is not None and flat.window.full.untyped_storage().resizable()
        found.append(
            flat.window.full if whole and flat.window.full is not None else flat.rest.whole
        )
    elif flat.coded_rest is not None:
        found.append(flat.coded_rest.encoded)
    elif flat.rest.tensor is not None:
        found.append(flat.rest.tensor)
    master = segment.master
    if master is not None and master.tensor is not None and segment.aliased < master.split:
        found.append(master.tensor)
    return found


def _release_pages(tensor: torch.Tensor) -> None:
    """Let the system have the whole pages of a tensor that cannot be resized, a mapping or one
    that numpy has seen: they read as zeros until they are written.
    """
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE * _PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    if stop > start:
        # of a shared mapping, of a private one
        advice = (getattr(mmap, "MADV_REMOVE", 9), mmap.MADV_DONTNEED)
        any(
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), how) == 0
            for how in advice
        )
