"""Every exchange says which call of the program it belongs to, so that two calls that differ
never take each other's payloads.

The name of the call ("zs.save()") travels in front of the payload. Ranks that meet under different
names raise PlanMismatch at once, and so does a rank that waits for one that waits for it in another
call: neither would ever go on.

Cost: the bytes of the name, some twenty, per exchange and rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroshard.errors import PlanMismatch

__all__ = ["call_of", "different_calls", "framed", "unframed"]


def framed(call: str, payload: bytes) -> bytes:
    """Return `payload` with the name of its call in front."""
    name = call.encode()
    assert len(name) < 256, call
    return bytes([len(name)]) + name + payload


def unframed(frames: Sequence[bytes], members: Sequence[int]) -> list[bytes]:
    """Return the payloads of all ranks. Raises PlanMismatch where they are of different calls;
    `members` are the ranks' numbers.
    """
    calls = [call_of(frame) for frame in frames]
    if len(set(calls)) > 1:
        raise different_calls(dict(zip(members, calls, strict=True)))
    return [frame[1 + frame[0] :] for frame in frames]


def call_of(frame: bytes | bytearray) -> str:
    """Return the name of the call in the first bytes of a frame."""
    return bytes(frame[1 : 1 + frame[0]]).decode()


def different_calls(calls: Mapping[int, str]) -> PlanMismatch:
    """Return the error for ranks that wait for each other in different `calls`, by rank."""
    said = ", ".join(f"rank {rank} is in {call}" for rank, call in sorted(calls.items()))
    return PlanMismatch(
        f"the ranks wait for each other in different calls: {said}. Every rank has to make the same"
        " calls in the same order: make this one on all ranks, not under a condition that holds on"
        " some of them"
    )
