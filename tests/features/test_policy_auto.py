"""``zs.shard(policy="auto")``: the planner's row for the memory that is free, the same on every
rank.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import make_model, take_steps
from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS
from zeroshard.errors import ConfigError, PlanMismatch
from zeroshard.planner import PlannedRow, make_plan, modules
from zeroshard.planner.modules import shape_of_module
from zeroshard.system.this_host import HostMemory

GB = 10**9
UNREAD = "/no/such/cache"  # what the user's doctor has measured decides nothing here


@contextmanager
def _having(free: int) -> Iterator[None]:
    """Be on a host with `free` bytes of memory, of which no doctor knows."""
    memory = HostMemory(free, free, None)
    with (
        mock.patch.object(HostMemory, "now", lambda: memory),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": UNREAD}),
    ):
        yield


def _facts(device: int | None, host: int, *, ranks: int = 2, disk: int = 0) -> list[dict[str, Any]]:
    """Return what `ranks` ranks would say that have this much of each memory."""
    speeds = vars(zs.Machine.of("A100-80").speeds)
    one = {"device_memory": device, "host_memory": host, "disk": disk, "node_size": ranks}
    return [{**one, "machine": "preset A100-80", "speeds": speeds} for _ in range(ranks)]


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return 100 million parameters without memory, and Adam."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(100)))
        return model, torch.optim.AdamW(model.parameters())


def _decide(facts: list[dict[str, Any]], **settings: Any) -> tuple[zs.Config, str]:
    """Return what is decided for `_model`."""
    model, optimizer = _model()
    config = zs.Config(policy="auto", precision="bf16", **settings)
    return modules.decide(
        model, optimizer, config, facts, node_size=None, check=zs.Config.refuse_unsupported
    )


def test_a_fused_optimizer_is_planned_without_temporaries() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    for optimizer, kind in (
        (torch.optim.AdamW([weight]), "adam"),
        (torch.optim.AdamW([weight], fused=True), "adam-fused"),
        (torch.optim.Adam([{"params": [weight], "fused": True}]), "adam-fused"),
        (torch.optim.SGD([weight], fused=True), "sgd"),
    ):
        assert modules._training(optimizer, zs.Config()).optimizer == kind


def _planned(ranks: int) -> dict[str, PlannedRow]:
    """Return the rows on the device, planned with room for all, by name."""
    machine = zs.Machine.of("A100-80", gpus=ranks)
    training = zs.Training("bf16", "fp32")
    shape = replace(shape_of_module(_model()[0], training), decoder=None, tokenwise=True)
    rows = make_plan(shape, machine, training).rows
    return {row.row: row for row in rows if set(row.tiers.values()) == {"device"}}


@pytest.mark.parametrize("roomiest", ["ddp", "zero1", "zero2", "zero3"])
def test_the_fastest_row_that_fits_in_what_the_reserve_leaves_is_taken(roomiest: str) -> None:
    rows = _planned(8)
    peak = rows[roomiest].peak_bytes["device"]
    settings, told = _decide(_facts(int(peak * 1.01 / (1 - modules.RESERVE)), 64 * GB, ranks=8))
    fitting = [row for row in rows.values() if row.peak_bytes["device"] <= 1.01 * peak]
    assert settings.policy == min(fitting, key=lambda row: row.step_s).row
    assert settings.offload == zs.Offload()
    assert told.startswith(f"policy auto: {settings.policy} (needs ") and "A100-80" in told
    assert f"the fastest of {len(fitting)} that fit" in told and "70% of what is free" in told


def test_states_leave_the_device_only_where_no_row_fits_on_it() -> None:
    settings, told = _decide(_facts(2 * GB, 64 * GB))
    assert settings.offload.away and set(settings.offload.away.values()) == {Tier.HOST}
    assert "on host" in told
    assert not _decide(_facts(8 * GB, 64 * GB))[0].offload.away


def test_a_disk_is_taken_where_it_is_named_and_needed_and_else_forgotten(tmp_path: Path) -> None:
    offload = zs.Offload(disk_path=str(tmp_path))
    settings, _ = _decide(_facts(2 * GB, GB // 2, disk=64 * GB), offload=offload)
    assert "disk" in {settings.offload.weight, settings.offload.optimizer}
    settings.refuse_unsupported()
    settings, _ = _decide(_facts(8 * GB, 64 * GB, disk=64 * GB), offload=offload)
    assert settings.offload == zs.Offload()


def test_tiers_that_the_user_names_are_kept() -> None:
    settings, told = _decide(_facts(8 * GB, 64 * GB), offload=zs.Offload(optimizer="host"))
    assert settings.offload == zs.Offload(optimizer="host") and "optimizer on host" in told


def test_rows_that_cannot_be_run_are_passed_over() -> None:
    settings, _ = _decide(_facts(8 * GB, 64 * GB), comm=zs.Comm(weight_codec="int8"))
    assert settings.policy in ("zero3", "zero3-keep", "hpz")  # whose weights are gathered


def test_several_nodes_are_planned_and_run_as_such() -> None:
    facts = [{**one, "node_size": 2} for one in _facts(8 * GB, 64 * GB, ranks=4)]
    settings, _ = _decide(facts)
    assert settings.comm.node_size == 2


def test_the_rank_with_least_memory_decides() -> None:
    facts = _facts(64 * GB, 64 * GB, ranks=8)
    rich = _decide(facts)[0].policy
    least = _planned(8)["zero3"].peak_bytes["device"] / (1 - modules.RESERVE)
    facts[5]["device_memory"] = int(least * 1.01)
    assert rich in ("ddp", "zero1", "zero2") and _decide(facts)[0].policy not in ("ddp", rich)


def test_nothing_that_fits_is_refused_with_what_is_lacking_and_the_cheapest_change() -> None:
    lacking = r"policy='auto': nothing fits: .* needs .* GB of device memory a GPU and has"
    with pytest.raises(ConfigError, match=f"{lacking}.*The cheapest change: "):
        _decide(_facts(GB, GB // 10))
    with pytest.raises(ConfigError, match=r"3.2 TB of disk a node.*offload\.disk_path"):
        _decide(_facts(2 * GB, GB // 2))


def test_whole_gradients_that_a_budget_holds_are_planned() -> None:
    peak = _planned(8)["zero2"].peak_bytes["device"]
    facts = _facts(int(peak * 1.01 / (1 - modules.RESERVE)), 64 * GB, ranks=8)
    assert _decide(facts)[0].policy in ("zero1", "zero2")
    settings, _ = _decide(facts, accumulation_budget=facts[0]["device_memory"])  # all of them
    assert settings.policy == "zero3" or settings.offload.away
    in_host = zs.Offload(grad="host", optimizer="host")
    assert _decide(facts, offload=in_host, accumulation_budget=facts[0]["device_memory"])


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"optimizer": "host", "fraction": 0.5}, "does not plan offload.fraction"),
        ({"delayed_update": 3}, "offload.delayed_update with policy='auto' needs a tier"),
        ({"fraction": "auto"}, "offload.fraction with policy='auto' needs a tier"),
    ],
)
def test_what_is_not_planned_is_refused(offload: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=re.escape(message)):
        zs.shard(model, policy="auto", offload=zs.Offload(**offload))


def test_a_configuration_may_say_auto_and_names_no_row_by_itself() -> None:
    config = zs.Config.from_json(zs.Config(policy="auto").to_json())
    assert config.policy == "auto"
    with pytest.raises(ConfigError, match="names no row"):
        config.resolved_policy()


def test_one_process_trains_as_the_plan_says_and_the_log_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="zeroshard")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with _having(8 * GB):
        engine = zs.shard(model, optimizer, config={"policy": "auto"})
    (line,) = [one for one in caplog.messages if one.startswith("policy auto")]
    assert f"policy auto: {engine.policy.name} (needs" in line and "preset CPU" in line
    take_steps(0, 1, model, optimizer)
    engine.close()


@pytest.mark.slow
def test_no_one_else_pays_for_the_planner() -> None:
    program = (
        "import sys, torch, zeroshard as zs\n"
        "zs.shard(torch.nn.Linear(2, 2), stage=1).close()\n"
        "print([name for name in sys.modules if 'zeroshard.plan' in name])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout == "[]\n"


# ------------------------------------------------------------------ two ranks


def _chosen(rank: int, world: int, free: list[int], policies: list[str]) -> list[Any]:
    """Shard on a host with another amount of free memory on each rank; return the row, or the
    error, and how many bytes rest.
    """
    model = make_model(width=512, layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with _having(free[rank]):
        try:
            engine = zs.shard(model, optimizer, policy=policies[rank])
        except (ConfigError, PlanMismatch) as error:
            return [type(error).__name__, str(error)]
    name = engine.policy.name
    engine.close()
    return [name, 0]


def _states(name: str) -> int:
    """Return about the bytes that two ranks need together for the model of `_chosen`."""
    parameters = sum(p.numel() for p in make_model(width=512, layers=6).parameters())
    return parameters * {"ddp": 2 * 16, "zero3": 16}[name]


def test_ranks_choose_the_same_although_they_see_different_memory() -> None:
    plenty, both = 16 * _states("ddp"), ["auto", "auto"]
    for free in ([plenty, plenty], [plenty, int(1.6 * _states("zero3"))]):
        here, there = run_ranks(2, _chosen, free, both)
        assert here == there and here[0] in ROWS


def test_every_rank_refuses_what_fits_on_none_and_what_is_asked_for_on_one_alone() -> None:
    nothing = run_ranks(2, _chosen, [1 << 20, 64 * GB], ["auto", "auto"])
    assert nothing[0] == nothing[1] and nothing[0][0] == "ConfigError"
    assert "nothing fits" in nothing[0][1]
    mixed = run_ranks(2, _chosen, [64 * GB] * 2, ["auto", "zero2"])
    assert mixed[0] == mixed[1] and mixed[0][0] == "PlanMismatch"
    assert "disagree, first about 'policy'" in mixed[0][1]
