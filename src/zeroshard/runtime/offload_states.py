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
from collections.abc import Sequence

import torch

from zeroshard.comm.transport import Transport
from zeroshard.memory import placeholder
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit, UnitState
from zeroshard.runtime.weights import Weights
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.state import State
from zeroshard.tier.host import HostStore
from zeroshard.tier.store import Storage

__all__ = ["OffloadedStates"]

_PAGE = mmap.PAGESIZE


class OffloadedStates:
    """The states of one engine while they are off the device."""

    def __init__(
        self,
        weights: Weights,
        sharded: ShardedOptimizer | None,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._sharded = sharded
        self._transport = transport
        self._store = HostStore(device)
        # of our own: a view, the bytes of its memory, what it held
        self._memory: list[tuple[torch.Tensor, int, Storage]] = []
        self._tensors: list[tuple[torch.Tensor, Storage]] = []  # the user's to see: pieces' moments
        self._resting: list[tuple[RestingGradient, Storage]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self._store.account.live

    def begin(self) -> None:
        """Bring everything to the host. Collective: peers may read our memory until all have
        come here.
        """
        for unit in self._weights.units:
            _settle(unit, self._weights)
        self._transport.begin_write()
        for unit in self._weights.units:
            for segment in unit.segments:
                self._put_gradient(segment)
        if self._sharded is not None:
            for owned in self._sharded.pieces():
                for value in self._sharded.optimizer.state.get(owned.tensor, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim() and value.stride() != (0,):
                        self._tensors.append((value, self._copy_out(f"{owned.name} state", value)))
                        value.data = placeholder(value.shape, value.dtype, value.device)
                if not owned.taken.off_device:
                    piece = owned.tensor
                    piece.data = placeholder(piece.shape, piece.dtype, piece.device)
        for unit in self._weights.units:
            for segment in unit.segments:
                for tensor in _own_memory(segment):
                    self._put_memory(segment.key, tensor)

    def end(self) -> None:
        """Bring everything back. Collective."""
        for tensor, num_bytes, storage in reversed(self._memory):
            memory = tensor.untyped_storage()
            if memory.nbytes() < num_bytes:
                memory.resize_(num_bytes)
            storage.read(0, storage.numel, tensor).wait()
        for tensor, storage in self._tensors:
            back = torch.empty(storage.numel, dtype=storage.dtype, device=tensor.device)
            storage.read(0, storage.numel, back).wait()
            tensor.data = back
        for resting, storage in self._resting:
            device = resting.state.whole.device
            back = torch.empty(storage.numel, dtype=storage.dtype, device=device)
            storage.read(0, storage.numel, back).wait()
            resting.state = State.of(back)
        if self._sharded is not None:
            for owned in self._sharded.pieces():
                owned.repoint()
        for unit in self._weights.units:
            for segment in unit.segments:
                segment.flat.publish()
        self._store.close()

    def _copy_out(self, name: str, tensor: torch.Tensor) -> Storage:
        storage = self._store.allocate(name, tensor.numel(), tensor.dtype)
        storage.write(0, tensor.numel(), tensor.detach().reshape(-1)).wait()
        return storage

    def _put_memory(self, key: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        storage = self._copy_out(key, tensor)
        memory = tensor.untyped_storage()
        self._memory.append((tensor, memory.nbytes(), storage))
        if memory.resizable():
            memory.resize_(0)
        else:
            _give_back_pages(tensor)

    def _put_gradient(self, segment: Segment) -> None:
        resting = None if segment.grad is None else segment.grad.resting()
        if resting is not None and resting.on_device:
            held = resting.state.whole
            self._resting.append((resting, self._copy_out(f"{segment.key} gradient", held)))
            resting.state = State.of(placeholder(held.shape, held.dtype, held.device))


def _settle(unit: Unit, weights: Weights) -> None:
    """Bring a unit to rest, whatever row it is."""
    if unit.state is UnitState.GATHERING:
        weights.discard(unit)
    elif unit.state is UnitState.FULL:
        weights.release(unit)
    for segment in unit.segments:
        segment.flat.forget_column()
        segment.settle()


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


def _give_back_pages(tensor: torch.Tensor) -> None:
    """Let the system have the whole pages of a tensor that cannot be resized, a mapping: they
    read as zeros until they are written.
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
