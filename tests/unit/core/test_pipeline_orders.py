"""The orders of pipeline schedules are torch's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from zeroshard.core.pipeline_orders import PipelineOrder, most_in_flight
from zeroshard.errors import ConfigError
from zeroshard.runtime.pipeline import from_torch

_COMPUTED = ("F", "B", "I", "W")


def _torchs(schedule: PipelineOrder, ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Return torch's order, without a process group: only sizes are read of the stages."""
    if schedule.name in ("gpipe", "1f1b"):
        kind = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}[schedule.name]
        bare = SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
        return getattr(torch_schedules, kind)._get_pipeline_order(bare)  # type: ignore[no-any-return]
    kind = {"interleaved": "ScheduleInterleaved1F1B", "zb": "ScheduleInterleavedZeroBubble"}
    made = getattr(torch_schedules, kind[schedule.name])
    bare = SimpleNamespace(
        n_local_stages=schedule.chunks,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )
    return {rank: made._calculate_single_rank_operations(bare, rank) for rank in range(ranks)}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 10),
                                                      (8, 32)])  # fmt: skip
@pytest.mark.parametrize(
    "text", ["gpipe", "1f1b", "interleaved", "interleaved:1", "interleaved:4", "zb", "zb:2"]
)
def test_every_schedule_computes_in_the_order_of_torchs(
    text: str, ranks: int, micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    schedule = PipelineOrder.parse(text)
    schedule.check(ranks, micro_batches)
    for rank, actions in _torchs(schedule, ranks, micro_batches).items():
        theirs = [
            action
            for one in actions
            if one is not None and (action := from_torch(one)).kind in _COMPUTED
        ]
        if text == "1f1b" and rank == ranks - 1:  # torch's list numbers its forwards from 1
            theirs = [one._replace(micro_batch=one.micro_batch - (one.kind == "F"))
                      for one in theirs]  # fmt: skip
        assert schedule.order(rank, ranks, micro_batches) == theirs


def test_the_micro_batches_in_flight_are_all_in_gpipe_and_the_stages_left_in_1f1b() -> None:
    for rank in range(4):
        assert most_in_flight(PipelineOrder("gpipe").order(rank, 4, 16)) == 16
        assert most_in_flight(PipelineOrder("1f1b").order(rank, 4, 16)) == 4 - rank
        # of the zero bubble, weights of `rank` micro-batches wait for their backward
        assert most_in_flight(PipelineOrder("zb").order(rank, 4, 16)) == 4


def test_interleaving_holds_more_micro_batches_of_smaller_stages() -> None:
    order = PipelineOrder.parse("interleaved").order(0, 4, 16)
    assert most_in_flight(order) == 4 + 2 * 3 + 1
    assert most_in_flight(order, [10, 10]) == 110


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2f2b", "schedule='2f2b' is not one of 1f1b, gpipe, interleaved, zb"),
        ("1f1b:2", "1f1b has one stage on each rank"),
        ("interleaved:0", "'0' is not a number of stages"),
        ("zb:many", "'many' is not a number of stages"),
    ],
)
def test_a_schedule_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineOrder.parse(text)


def test_micro_batches_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many micro-batches as stages"):
        PipelineOrder().check(4, 2)
    with pytest.raises(ConfigError, match="take a multiple of 4"):
        PipelineOrder.parse("interleaved").check(4, 11)
    PipelineOrder("gpipe").check(4, 1)
