"""The instruments of tests/gpu, on the CPU: lanes that start late, poisoned memory, the census of
waits, and the programs that plain PyTorch trains to the same bits.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.adversary import Poisoner, slow_compute, slow_lanes
from tests.support.harness import on_ranks
from tests.support.programs import PROGRAMS, Program
from tests.support.sync_census import REPORTED, census
from tests.support.training import ROWS
from zeroshard.runtime.streams import Streams

DISTURBED = ("codecs and no_sync", "no_sync of stage 2")


@pytest.mark.parametrize(
    "precision",
    ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16"))],
)
def test_plain_pytorch_trains_a_program_to_the_bits_of_every_row(precision: str) -> None:
    plain = Program(precision=precision).train_plainly("cpu")
    assert all(math.isfinite(loss) for loss in plain.losses)
    for row in ROWS:
        run = Program(row=row, precision=precision).train("cpu")
        assert not run.differs_from(plain), (row, run.differs_from(plain))


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if "codec" not in name and "compiled" not in name]
)
def test_so_it_does_with_the_options_of_a_program(name: str) -> None:
    program = PROGRAMS[name]
    run = program.train("cpu")
    assert not run.differs_from(program.train_plainly("cpu")), name


@on_ranks(2)
def test_neither_poison_nor_late_lanes_change_a_bit(rank: int) -> None:
    for name in DISTURBED:
        program = replace(PROGRAMS[name], steps=2)
        quiet = program.train("cpu", rank=rank, transport="gloo")
        poisoner, sleeps = Poisoner("cpu"), Counter[str]()
        with (
            poisoner.poisoning(),
            mock.patch.object(Streams, "has_lanes", True),
            slow_lanes(Streams, partial(sleeps.update, ["lane"])),
            slow_compute(partial(sleeps.update, ["compute"])),
        ):
            run = program.train("cpu", rank=rank, transport="gloo")
        assert not run.differs_from(quiet), (name, run.differs_from(quiet))
        assert poisoner.num_dropped > 10, name
        assert poisoner.num_released > 10 or program.row != "zero3", name
        assert min(sleeps["lane"], sleeps["compute"]) > 10, (name, sleeps)


def test_released_memory_is_overwritten_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[torch.Tensor] = []
    resize = torch.UntypedStorage.resize_

    def seen(storage: Any, num_bytes: int) -> Any:
        if not num_bytes and storage.nbytes():
            left.append(torch.empty(0).set_(storage).clone())
        return resize(storage, num_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", seen)
    poisoner, memory = Poisoner("cpu"), torch.ones(4096)
    with poisoner.poisoning():
        memory.untyped_storage().resize_(0)
    torch.ones(16).untyped_storage().resize_(0)
    assert poisoner.num_released == 1
    assert left[0].isnan().all() and left[1].eq(1).all()


@contextmanager
def _shown() -> Iterator[list[str]]:
    """What a user sees of warnings inside."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen  # type: ignore[misc]


def test_a_census_counts_waits_and_names_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with census() as found:
        for _ in range(2):
            warnings.warn(f"{REPORTED} (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.synchronize()
    with _shown() as seen:
        warnings.warn(REPORTED, stacklevel=1)
        torch.cuda.synchronize()
    assert len(seen) == 1
    assert len(found.waits) == 3
    assert all("test_adversary.py" in wait for wait in found.waits)
    assert str(found).startswith("2 x synchronises: test_adversary.py")
    assert "1 x torch.cuda.synchronize" in str(found)
