"""Paired sends and receives over an existing gloo process group, matched by key instead of by order of arrival.

Two ranks that gather different units at the same time would mix them silently if messages were matched by order alone, so every message
carries a tag made of (generation, key, operation). Gloo keeps the messages of one tag in order (tried: 50 receives posted before 50
sends), so the n-th operation of a key meets the n-th of the same key without a sequence number. Gloo takes tags of 31 bits and keeps no
state per tag (3000 tags cost what one does)::

    bit 30: ours | 29..26: generation | 25..2: key | 1..0: operation

Windows' keys are numbered in the order of their (collective) making. Another key is hashed into the upper half of the 24 bits; two that
meet there are refused with ConfigError. The generation grows with every `abandon`, so that what was left under way meets nothing later.

Cost: one message per slice that is not empty; tensors on an accelerator are staged through one host copy each way.

[Note: gloo stalls] A gloo receive that times out closes its connection, and a paired work can only be asked whether it is complete by
waiting for it (both tried on torch 2.13). So `done` of a paired transfer is True only after `wait`, and a StallError is final.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from zeroshard.errors import ConfigError, PeerLostError, StallError

__all__ = ["ALL_GATHER", "CONTROL", "REDUCE_SCATTER", "GlooPeers", "Transfer"]

ALL_GATHER, REDUCE_SCATTER, CONTROL = 0, 1, 2

_KEY_BITS = 24
_HASHED = 1 << (_KEY_BITS - 1)
_GENERATIONS = 16
_INLINE = 248  # payload bytes that travel with the length in one message


class Transfer:
    """The sends and receives of one operation of one key."""

    def __init__(self, what: str, stall_timeout_s: float) -> None:
        self._what = what
        self._stall_timeout_s = stall_timeout_s
        self._works: list[tuple[int, str, Any]] = []  # (peer, "send" | "receive", dist.Work)
        self._alive: list[torch.Tensor] = []  # gloo reads and writes these until the works are done
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []  # (device tensor, host copy)

    def send(self, group: dist.ProcessGroup, peer: int, tensor: torch.Tensor, tag: int) -> None:
        host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        self._alive.append(host)
        self._works.append((peer, "send", _post(group.send, host, peer, tag, self._what)))

    def receive(self, group: dist.ProcessGroup, peer: int, tensor: torch.Tensor, tag: int) -> None:
        host = tensor
        if tensor.device.type != "cpu":
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._arrivals.append((tensor, host))
        self._alive.append(host)
        self._works.append((peer, "receive", _post(group.recv, host, peer, tag, self._what)))

    def done(self) -> bool:
        """Whether everything has been waited for ([Note: gloo stalls])."""
        return not self._works

    def wait(self) -> None:
        """Return when everything sent has left and everything awaited has come; raise StallError or PeerLostError."""
        deadline = time.monotonic() + self._stall_timeout_s
        late: set[int] = set()
        for peer, _, work in self._works:
            left = max(deadline - time.monotonic(), 0.001)
            if not self._wait_one(peer, work, 0.001 if late else left):
                late.add(peer)
        if late:
            raise StallError(
                f"{self._what}: rank(s) {sorted(late)} did not come within {self._stall_timeout_s:g} s; see what they are doing, or raise "
                f"stall_timeout_s if they are only slow"
            )
        for tensor, host in self._arrivals:
            tensor.copy_(host)
        self._works, self._alive, self._arrivals = [], [], []

    def _wait_one(self, peer: int, work: Any, timeout_s: float) -> bool:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                return False
            raise PeerLostError(f"{self._what}: rank {peer} has ended or given up ({_first_line(error)})") from error
        return True


def _post(call: Any, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Any:
    try:
        return call([tensor], peer, tag)
    except RuntimeError as error:
        raise PeerLostError(f"{what}: rank {peer} has ended or given up ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split("] ")[-1][:120]


class GlooPeers:
    """Tags, transfers and small exchanges over one process group. Ranks are ranks of the group."""

    def __init__(self, group: dist.ProcessGroup, *, stall_timeout_s: float) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.stall_timeout_s = stall_timeout_s
        self._generation = 0
        self._key_ids: dict[str, int] = {}
        self._hashed: dict[int, str] = {}
        self._abandoned: list[Transfer] = []  # gloo may still write into their tensors

    def register(self, key: str) -> None:
        """Number `key`; collective, in the same order on every rank."""
        if key not in self._key_ids:
            assert len(self._key_ids) + 1 < _HASHED, len(self._key_ids)
            self._key_ids[key] = len(self._key_ids) + 1  # 0 is CONTROL's

    def tag(self, key: str, operation: int) -> int:
        """Return the tag of `operation` of `key`."""
        number = self._key_ids.get(key)
        if number is None:
            number = _HASHED | (zlib.crc32(key.encode()) & (_HASHED - 1))
            other = self._hashed.setdefault(number, key)
            if other != key:
                raise ConfigError(f"keys {other!r} and {key!r} share one message tag; make a window of either name first")
        return self._tag(number, operation)

    def _tag(self, number: int, operation: int) -> int:
        return 1 << 30 | self._generation << (_KEY_BITS + 2) | number << 2 | operation

    def post(self, what: str, tag: int, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Transfer:
        """Start sending and receiving contiguous tensors to and from peers. Empty ones are left out, on both sides."""
        transfer = Transfer(what, self.stall_timeout_s)
        for peer, tensor in receives.items():
            if tensor.numel():
                transfer.receive(self.group, peer, tensor, tag)
        for peer, tensor in sends.items():
            if tensor.numel():
                transfer.send(self.group, peer, tensor, tag)
        return transfer

    def exchange(self, payload: bytes, peers: list[int] | None = None) -> dict[int, bytes]:
        """Give `payload` to `peers` (default: all others) and return theirs. Blocking; two rounds when a payload exceeds 248 bytes."""
        peers = [r for r in range(self.size) if r != self.rank] if peers is None else peers
        tag = self._tag(0, CONTROL)
        head = torch.zeros(8 + _INLINE, dtype=torch.uint8)
        head[:8] = torch.frombuffer(bytearray(len(payload).to_bytes(8, "little")), dtype=torch.uint8)
        if payload:
            whole = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            head[8 : 8 + min(len(payload), _INLINE)] = whole[:_INLINE]
        heads = {peer: torch.empty_like(head) for peer in peers}
        self.post("exchange", tag, {peer: head for peer in peers}, heads).wait()
        sizes = {peer: int.from_bytes(heads[peer][:8].numpy().tobytes(), "little") for peer in peers}
        rests = {peer: torch.empty(max(sizes[peer] - _INLINE, 0), dtype=torch.uint8) for peer in peers}
        rest = whole[_INLINE:] if len(payload) > _INLINE else torch.empty(0, dtype=torch.uint8)
        self.post("exchange", tag, {peer: rest for peer in peers}, rests).wait()
        return {peer: heads[peer][8 : 8 + min(sizes[peer], _INLINE)].numpy().tobytes() + rests[peer].numpy().tobytes() for peer in peers}

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy `tensor` from `source` into everyone's, in place. Blocking."""
        tag, others = self._tag(0, CONTROL), [r for r in range(self.size) if r != source]
        flat = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        sends = {peer: flat for peer in others} if self.rank == source else {}
        self.post("broadcast", tag, sends, {} if self.rank == source else {source: flat}).wait()
        if self.rank != source and not tensor.is_contiguous():
            tensor.detach().copy_(flat)

    def abandon(self, transfers: list[Transfer]) -> None:
        """Leave `transfers` behind and meet all ranks under fresh tags."""
        self._abandoned.extend(transfers)
        self._generation = (self._generation + 1) % _GENERATIONS
        self.exchange(b"")
