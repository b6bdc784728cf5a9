"""Saving and loading together with something else: delayed updates, encoded gradients, ranks
that look at different storage, gaps behind overlaps.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zeroshard as zs
from tests.support.checkpoints import make
from tests.support.harness import run_ranks
from tests.support.training import batch, equal, make_sharded, take_steps
from zeroshard import CheckpointError
from zeroshard.checkpoint.manifest import Manifest, ParameterEntry, ShardEntry, TensorEntry
from zeroshard.runtime.engine import states_of

# ---------------------------------------------------------------------------------- delayed updates

START = 2  # the first step that is applied late


def _delayed(rank: int, world: int, folder: Path, cut: int) -> None:
    """Save after `cut` steps and go on; do the same from the checkpoint. A run that counts its
    steps from the load is late at another step.
    """
    offload = zs.Offload(grad="host", optimizer="host", delayed_update=START)
    ends = []
    for loads in (False, True):
        model, optimizer, engine = make_sharded("zero2", offload=offload)
        if loads:
            zs.load(folder, engine)
        else:
            take_steps(rank, cut, model, optimizer)
            zs.save(folder, engine, step=cut)
        losses = take_steps(rank, range(cut, cut + 3), model, optimizer)
        states_of(engine).finish_step()
        ends.append((losses, engine.full_state_dict(rank0_only=False)))
        engine.close()
    (losses, saved), (again, loaded) = ends
    assert again == losses, (again, losses)
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_run_whose_updates_are_late_from_its_second_step_resumes_to_the_same_bits(
    tmp_path: Path, cut: int
) -> None:
    run_ranks(2, _delayed, tmp_path, cut)


# ---------------------------------------------------------------------------- between micro-batches

HOST = {"grad": "host", "optimizer": "host"}
BETWEEN: dict[str, dict[str, Any]] = {
    "zero1": {"row": "zero1"},
    "zero3": {"row": "zero3"},
    "no_sync": {"row": "zero2", "no_sync": True},
    "budget": {"row": "zero3", "no_sync": True, "accumulation_budget": 40_000},
    "gradients on the host": {"row": "zero2", "offload": HOST},
    "gradients on disk": {"row": "zero3", "offload": {**HOST, "grad": "disk"}},
}


def _between(rank: int, world: int, folder: Path, name: str) -> None:
    """Save between two micro-batches: the step takes both, and what is loaded has neither."""
    options = dict(BETWEEN[name])
    row, no_sync = options.pop("row"), options.pop("no_sync", False)
    if "disk" in options.get("offload", {}).values():
        options["offload"] = options["offload"] | {"disk_path": str(folder.parent)}

    def step(number: int, *, saves: bool = False) -> None:
        for micro in (2 * number, 2 * number + 1):
            with engine.no_sync() if no_sync and micro % 2 == 0 else nullcontext():
                engine.backward(model(*batch(rank, micro)))
            if saves and micro % 2 == 0:
                with pytest.raises(CheckpointError, match="drop_gradients=True"):
                    zs.save(folder, engine, step=number)
                zs.save(folder, engine, step=number, drop_gradients=True)
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    states = []
    for how in ("plainly", "saves", "loads"):
        model, optimizer, engine = make_sharded(row, **options)
        for number in (0, 1, 2):
            if how == "loads" and number == 0:
                zs.load(folder, engine)
            elif how != "loads" or number > 0:
                step(number, saves=how == "saves" and number == 1)
        states.append(engine.full_state_dict(rank0_only=False))
        engine.close()
    for state in states[1:]:
        assert equal(state, states[0])


@pytest.mark.parametrize("name", BETWEEN)
def test_a_save_between_micro_batches_leaves_their_sums_and_saves_none(
    tmp_path: Path, name: str
) -> None:
    run_ranks(2, _between, tmp_path, name)


# -------------------------------------------------------------------------------- encoded gradients


def _encoded(rank: int, world: int, folder: Path) -> None:
    """Go back to a checkpoint after more steps, or load it into a run that has none behind it:
    the same numbers follow.
    """
    comm = zs.Comm(grad_codec="int4", error_feedback=True)
    ends = []
    model, optimizer, engine = make_sharded("zero2", comm=comm)
    take_steps(rank, 2, model, optimizer)
    zs.save(folder, engine, step=2)
    take_steps(rank, range(2, 5), model, optimizer)
    for fresh in (False, True):
        if fresh:
            engine.close()
            model, optimizer, engine = make_sharded("zero2", comm=comm)
        zs.load(folder, engine)
        losses = take_steps(rank, range(5, 8), model, optimizer)
        ends.append((losses, engine.full_state_dict(rank0_only=False)))
    engine.close()
    (losses, back), (again, loaded) = ends
    assert losses == again
    for name, value in back.items():
        assert torch.equal(loaded[name], value), name


def test_a_load_forgets_what_encoding_the_gradients_before_it_lost(tmp_path: Path) -> None:
    run_ranks(2, _encoded, tmp_path)


# --------------------------------------------------------------------- ranks that see other storage


def _apart(rank: int, world: int, folder: Path) -> str:
    """Save two checkpoints of the same step; each rank loads another."""
    training = make("zero2")
    for number in range(world):
        training.step(rank, number)
        training.save(folder / str(number), 1)
    before = training.fingerprint()
    with pytest.raises(CheckpointError) as error:
        training.load(folder / str(rank))
    assert training.fingerprint() == before
    training.load(folder / "0")
    training.engine.close()
    return str(error.value)


def test_ranks_that_see_different_checkpoints_of_one_step_are_told(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(2, _apart, tmp_path)):
        assert (
            "the ranks see different checkpoints under" in text
            and str(tmp_path / str(rank)) in text
        )


# --------------------------------------------------------------------------------------------- gaps


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data())
def test_a_gap_that_an_overlap_makes_up_for_is_found(sizes: list[int], data: st.DataObject) -> None:
    """As many elements as the parameter has, and as many bytes as the file: only their places
    are wrong.
    """
    moved = data.draw(st.integers(0, len(sizes) - 1))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    shifts = [
        shift
        for shift in range(-starts[moved], sum(sizes) - sizes[moved] - starts[moved] + 1)
        if shift
    ]
    shift = data.draw(st.sampled_from(shifts))

    def manifest(in_parameter: int, in_file: int) -> bytes:
        tensors = []
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            at = start + in_parameter * (index == moved)
            offset = 4 * (start + in_file * (index == moved))
            tensors.append(
                TensorEntry(0, offset, "F32", (size,), ("0" * 32,), "value", "w", at, at + size)
            )
        file = ShardEntry("rank-00000-of-00001.safetensors", 8 + 4 * sum(sizes), 8, "0" * 32)
        parameters = {"w": ParameterEntry((sum(sizes),), (1,), True)}
        return Manifest(
            1, 1, "a test", "ddp", "fp32", (file,), parameters, tuple(tensors), None
        ).dump()

    assert len(Manifest.parse(manifest(0, 0), "there").tensors) == len(sizes)
    with pytest.raises(CheckpointError, match="pieces of value of 'w' overlap at"):
        Manifest.parse(manifest(shift, 0), "there")
    with pytest.raises(
        CheckpointError, match=r"lies at byte .* of the data, and the tensor before it ends at"
    ):
        Manifest.parse(manifest(0, shift), "there")
