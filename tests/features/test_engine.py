"""The engine as an object: its public names, and what its reports print."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.filesize import decimal

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import make_model, make_sharded, take_steps

NAMES = {
    "it is": "module optimizer policy precision rank world units",
    "messages": "exchange",
    "a step": "accumulate attach backward clip_grad_norm_ follow join leaves loss_scale no_sync"
    " steps_skipped",
    "parameters, gradients, state": "gathered full_state_dict full_grad hide_gradients"
    " optimizer_part",
    "reports": "explain_optimizer memory traffic reset_traffic trace trail offload_fraction"
    " tiles_ahead",
    "phases and the end": "offload_states reload_states repartition reset close",
}


def test_dir_of_an_engine_shows_the_users_names() -> None:
    engine = zs.shard(make_model())
    expected = {name for names in NAMES.values() for name in names.split()}
    assert {name for name in dir(engine) if not name.startswith("_")} == expected
    engine.close()


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (lambda engine: engine.step(), "use optimizer.step()"),
        (lambda engine: engine.train(), "use model.train()"),
        (lambda engine: engine.zero_grad(), "use optimizer.zero_grad()"),
        (lambda engine: engine.state_dict(), "use engine.full_state_dict() for weights, zs.save()"),
        (lambda engine: engine.module_state_dict(), "use engine.full_state_dict()"),
        (lambda engine: engine.save_checkpoint("x"), "use zs.save(directory, engine, step=n)"),
        (lambda engine: engine.load_checkpoint("x"), "use zs.load(directory, engine)"),
        (lambda engine: engine.unshard(), "use with engine.gathered(params)"),
        (lambda _: zs.initialize, "zs.shard(model, optimizer, config='ds_config.json')"),
        (lambda _: zs.fully_shard, "zs.shard(model, optimizer, stage=3), once"),
        (lambda _: zs.save_checkpoint, "zs.save(directory, engine, step=n)"),
        (lambda _: zs.zero.Init(), "zs.deferred_init() for zero.Init()"),
    ],
)
def test_a_name_of_deepspeed_or_fsdp_says_what_to_call_here(
    typed: Callable[[Any], object], remedy: str
) -> None:
    engine = zs.shard(make_model())
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        typed(engine)
    with pytest.raises(TypeError, match=re.escape("call the model, model(...)")):
        engine(torch.ones(1))
    with pytest.raises(AttributeError, match=r"has no attribute 'stepp'$"):
        engine.stepp  # noqa: B018
    engine.close()


def test_the_stage_may_be_the_third_argument() -> None:
    model = make_model()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert engine.policy.name == "zero2"
    engine.close()


def _printed(rank: int, world: int) -> tuple[list[str], list[str], zs.MemoryReport, int]:
    model, optimizer, engine = make_sharded("zero3", offload=zs.Offload(optimizer="host"))
    take_steps(rank, 1, model, optimizer)
    memory, traffic = engine.memory(), engine.traffic()
    engine.close()
    return str(memory).splitlines(), str(traffic).splitlines(), memory, traffic.total


def test_reports_of_memory_and_traffic_print_as_tables() -> None:
    memory, traffic, report, total = run_ranks(2, _printed)[0]
    assert memory[0].split() == ["memory", "of", "this", "rank", "device", "host", "total"]
    rows = {line[:24].strip(): re.split(r" {2,}", line[24:].strip()) for line in memory[1:]}
    weight = decimal(report.at_rest["weight"])
    assert "kB" in weight and rows["weight"] == [weight, "0 bytes", weight]
    assert rows["optimizer"][1] == decimal(report.tiers["optimizer"]["host"])
    assert rows["at rest"][-1] == decimal(report.total)
    assert rows["the most of that"] == [decimal(report.peak)]
    assert len({len(line) for line in memory}) == 1, "the columns are aligned"
    assert traffic[0].split() == ["collective", "calls", "received", "between", "nodes"]
    (last,) = (line for line in traffic if line.startswith("total"))
    assert re.split(r" {2,}", last)[2] == decimal(total)
    assert re.fullmatch(r"over \w+: [\d.]+ (bytes|kB|MB)", traffic[-1])
