"""Overlap is an order of events: what is on its way while something else computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import batch, make_model, make_sharded, take_steps, two_groups
from zeroshard.memory import Pages

LAYERS = 4


def _events(rank: int, world: int, policy: str = "zero3") -> list[tuple[str, str]]:
    """Return what happened in the third step over sockets, in order."""
    model = make_model(width=32, layers=LAYERS)
    optimizer = two_groups(model)
    comm = zs.Comm(transport="gloo")
    engine = zs.shard(model, optimizer, policy=policy, comm=comm)
    events: list[tuple[str, str]] = []
    for index, block in enumerate(model.blocks):
        block.down.register_forward_hook(
            lambda *_, index=index: events.append(("computed", f"blocks.{index}"))
        )

        def entered(module: torch.nn.Module, grads: object, index: int = index) -> None:
            flying = inside.reducing(engine)
            events.extend(
                (f"in flight while blocks.{index} runs backward", name) for name in flying
            )

        block.register_full_backward_pre_hook(entered)
        bias = block.down.bias
        bias.register_post_accumulate_grad_hook(
            lambda _, index=index: events.append(("first gradient", f"blocks.{index}"))
        )
    for step in range(3):
        events.clear()
        with inside.traced(engine, lambda what, name: events.append((what, name))):
            take_steps(rank, [step], model, optimizer)
    engine.close()
    return events


@pytest.mark.parametrize("policy", ["zero3", "zero3-keep"])
def test_the_next_gather_starts_before_the_current_unit_has_computed(policy: str) -> None:
    for events in run_ranks(2, _events, policy):
        forward = events[: events.index(("first gradient", f"blocks.{LAYERS - 1}"))]
        for index in range(LAYERS - 1):
            assert forward.index(("gather", f"blocks.{index + 1}")) < forward.index(
                ("computed", f"blocks.{index}")
            )


def test_the_next_gather_of_backward_starts_before_the_current_units_gradients() -> None:
    for events in run_ranks(2, _events):
        backward = events[events.index(("computed", f"blocks.{LAYERS - 1}")) :]
        for index in range(1, LAYERS):
            assert backward.index(("gather", f"blocks.{index - 1}")) < backward.index(
                ("first gradient", f"blocks.{index}")
            )


@pytest.mark.parametrize("policy", ["zero3", "zero3-keep"])
def test_reduces_are_in_flight_while_backward_goes_on(policy: str) -> None:
    for events in run_ranks(2, _events, policy):
        for index in range(LAYERS - 1):
            assert (
                f"in flight while blocks.{index} runs backward",
                f"blocks.{index + 1}",
            ) in events, events


@on_ranks(2)
def test_the_publish_of_replicated_weights_is_started_by_the_step_and_awaited_by_the_forward(
    rank: int,
) -> None:
    model = make_model(width=32, layers=LAYERS)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, stage=1, comm=zs.Comm(transport="gloo"))
    events: list[tuple[str, str]] = []
    with inside.traced(engine, lambda what, name: events.append((what, name))):
        model(*batch(rank, 0)).backward()
        optimizer.step()
        events.append(("stepped", ""))
        optimizer.zero_grad()
        model(*batch(rank, 1))
    engine.close()
    stepped = events.index(("stepped", ""))
    for index in range(LAYERS):
        assert (
            events.index(("gather", f"blocks.{index}"))
            < stepped
            < events.index(("use", f"blocks.{index}"))
        )


def _flipped(rank: int, world: int, row: str) -> str:
    """Flip one mantissa bit of a replicated weight on rank 1 and train on; return the error.

    Where every rank steps everything the damage stays; elsewhere the next publish would heal it, so
    it is done in the step that looks.
    """
    model, optimizer, engine = make_sharded(row, verify_every=3)
    for step in range(8):
        model(*batch(rank, step)).backward()
        if step == (3 if row == "ddp" else 5) and rank == 1:
            inside.full_weights(engine, "blocks.0").view(torch.int32)[0] ^= 1
        try:
            optimizer.step()
        except zs.PlanMismatch as error:
            return f"{step} {error}"
        optimizer.zero_grad()
    return "not found"


def test_a_flipped_bit_in_a_replicated_weight_is_found_within_verify_every_steps() -> None:
    for row in ("ddp", "zero1"):
        for found in run_ranks(2, _flipped, row):
            assert found.startswith("5 "), found
            assert "blocks.0" in found and "rank 1: weights of unit blocks.0 = " in found


@pytest.mark.parametrize(
    ("row", "options"), [("ddp", {}), ("mics", {"comm": zs.Comm(node_size=1)})], ids=["ddp", "mics"]
)
@on_ranks(2)
def test_replicas_are_alike_whatever_was_in_their_memory_before(
    rank: int, row: str, options: dict[str, Any]
) -> None:
    """Train with memory that is full of another number on each rank, replicas compared in every
    step.
    """
    make = Pages.empty

    def filled(self: Pages, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return make(self, numel, dtype, device).fill_(rank + 1)

    Pages.empty = filled  # type: ignore[method-assign]
    try:
        model, optimizer, engine = make_sharded(row, precision="bf16", verify_every=1, **options)
        take_steps(rank, 2, model, optimizer)
        engine.close()
    finally:
        Pages.empty = make  # type: ignore[method-assign]
