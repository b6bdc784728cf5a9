"""Deferred initialisation: build a model without memory, and fill it later, unit by unit.

    with zs.deferred_init():
        model = GPT(config)                   # its own init code runs as it is
    engine = zs.shard(model, optimizer)       # each unit is computed, sharded and released

Inside the block every operation of this thread passes through the recorder (nn/recorder.py). New
tensors of 64 KiB or more become hollow (nn/hollow.py), and operations on them go on a tape
(nn/tape.py). Small tensors are real, so most code that looks at values simply runs. A random
operation runs on a temporary, so that the generator advances, and again from the generator's old
state when the tensor is filled.

Invariant: after the block the generators, and after filling every bit, are the same as without the
block. Uninitialised memory is zero. Cost: memory for the largest tensor during the block; random
operations run twice. At the end of the block large tensors that no parameter uses are filled.

It does not follow other threads, or code that reads memory behind torch's back (C++ extensions).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from zeroshard.errors import ConfigError
from zeroshard.nn.hollow import adopt_all, end_recording, fill, fingerprint_of, record_of
from zeroshard.nn.recorder import PointerReads, Recorder

__all__ = [
    "allocate", "deferred_init", "fingerprint_of", "is_deferred", "materialize", "refuse_inside",
]  # fmt: skip

_thread = threading.local()


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules in this context without memory; ``shard()`` or ``materialize()`` gives it.

    Parameters are the final objects, so an optimizer may be built from them at once; reading their
    values before they have any raises StateError. Their values, and the random generators after the
    block, are the same bits as without it. Meta tensors are left alone. Nests; applies to the
    thread that enters it.
    """
    if _current() is not None:
        yield
        return
    recorder = _thread.recorder = Recorder()
    complete = False
    try:
        adopt_all(recorder)
        with PointerReads(recorder), recorder:
            yield
        complete = True
    finally:
        _thread.recorder = None
        end_recording(recorder, compute=complete)


def materialize(*things: nn.Module | torch.Tensor) -> None:
    """Give deferred modules and tensors memory and values, in place; others are left alone.

    For a deferred model that is used without ``shard()``, which does this unit by unit.
    """
    tensors: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.Tensor):
            tensors.append(thing)
        else:
            raise ConfigError(
                f"materialize() takes modules and tensors, not {type(thing).__name__}"
            )
    _fill(tensors)


def allocate(*tensors: torch.Tensor) -> None:
    """Give deferred tensors memory without values, for a caller that overwrites them."""
    _fill(tensors, compute=False)


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory yet."""
    return record_of(tensor) is not None


def refuse_inside(what: str) -> None:
    """Raise ConfigError where a deferred_init() block is open in this thread."""
    if _current() is not None:
        raise ConfigError(f"{what} inside deferred_init(): end the block first")


def _current() -> Recorder | None:
    return getattr(_thread, "recorder", None)


def _fill(tensors: Iterable[torch.Tensor], *, compute: bool = True) -> None:
    recorder = _current()
    with nullcontext() if recorder is None else recorder.paused():
        fill(tensors, compute=compute)
