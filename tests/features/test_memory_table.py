"""The memory table: an engine's rows are ``engine.memory()`` to the byte, its units add up to them,
and beside them stands what the process has.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import ROOT, on_ranks
from tests.support.training import batch, make_model, take_steps
from zeroshard.runtime import ledger

STATES = ["weight", "master", "grad", "residual", "optimizer"]


def _sum_of_units(units: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    sums: dict[str, Counter[str]] = {state: Counter() for state in STATES}
    for states in units.values():
        for state, by_tier in states.items():
            sums[state].update(by_tier)
    return {state: dict(by_tier) for state, by_tier in sums.items()}


@on_ranks(2)
def test_the_rows_are_engine_memory_and_the_units_add_up_to_them(rank: int, tmp_path: Path) -> None:
    out = []
    for row, precision, offload in (
        ("zero1", "bf16", None),
        ("zero2", "fp32", zs.Offload(grad="host", optimizer="host", fraction=0.5)),
        ("zero3", "fp32", zs.Offload(optimizer="disk", disk_path=str(tmp_path))),
    ):
        model = make_model(width=48)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        comm = zs.Comm(transport="gloo")  # where gathered weights take memory
        engine = zs.shard(
            model, optimizer, policy=row, precision=precision, offload=offload, comm=comm
        )
        take_steps(rank, 1, model, optimizer)
        with engine.no_sync():
            model(*batch(rank, 9)).backward()
        with engine.gathered():
            memory = engine.memory()
            table = zs.memory_table(engine, by_unit=True).to_dict()
        out.append({"memory": memory, "table": table, "units": list(engine.units)})
        engine.reset()
        engine.close()
        out[-1]["closed"] = zs.memory_table(engine).to_dict()["engines"][0]["unreleased"]
    assert out[-1]["memory"].temporary > 0
    for case in out:
        memory, (row,) = case["memory"], case["table"]["engines"]
        assert row["tiers"] == memory.tiers and row["at_rest"] == memory.at_rest
        assert (row["temporary"], row["peak"]) == (memory.temporary, memory.peak)
        assert row["total"] == memory.total > 0 and row["tier_peaks"] == memory.tier_peaks
        assert list(row["units"]) == case["units"]
        assert _sum_of_units(row["units"]) == memory.tiers, rank
        assert memory.at_rest["grad"] and memory.at_rest["optimizer"]
        tiers = [by_tier.get("host", 0) for by_tier in memory.tiers.values()]
        accounted = sum(tiers) + memory.temporary
        accounted += sum(by_tier.get("device", 0) for by_tier in memory.tiers.values())
        assert case["table"]["accounted"] == {"host": accounted, "device": 0}
        assert case["closed"] == {}


def test_several_engines_stand_in_one_table_beside_the_process() -> None:
    gc.collect()
    others = zs.memory_table().engines  # of other tests
    policy, reference = make_model(width=32), make_model()
    first, second = zs.shard(policy, torch.optim.AdamW(policy.parameters())), zs.shard(reference)
    table = zs.memory_table()
    assert json.loads(json.dumps(table.to_dict())) == table.to_dict()
    totals = [row["total"] for row in table.to_dict()["engines"][len(others) :]]
    assert totals == [first.memory().total, second.memory().total]
    process = table.process
    assert process.rss is not None and process.pss is not None
    assert process.rss >= process.pss > table.accounted["host"] > 0
    assert table.unaccounted["host"] == process.pss - table.accounted["host"]
    text = str(zs.memory_table(first, second))
    assert text.count("Net, zero") == 2 and "torch and its libraries" in text
    assert [len(line) for line in text.splitlines() if len(line) > 100] == []
    second.close()
    assert len(zs.memory_table().engines) == len(others) + 1
    first.close()
    assert zs.memory_table().engines == others


def test_units_are_rows_on_request() -> None:
    model = make_model()
    engine = zs.shard(model, stage=3)
    assert "blocks.2" not in str(zs.memory_table(engine))
    assert "blocks.2" in str(zs.memory_table(engine, by_unit=True))
    engine.close()


def test_what_a_closed_engine_holds_is_zero_or_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zs.shard(model, optimizer, stage=3, offload=zs.Offload(optimizer="host"))
    take_steps(0, 1, model, optimizer)
    engine.close()
    assert caplog.text == ""
    (note,) = [one for one in zs.memory_table(engine).notes if "closed" in one]
    assert note.endswith("closed, its buffers and stores have given everything back.")
    assert engine.memory().tiers["weight"] == {}
    assert zs.memory_table(engine).accounted == {"host": 0, "device": 0}
    del engine
    gc.collect()


def test_a_counter_that_is_not_back_at_zero_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    engine = zs.shard(model, stage=3)
    inside.buffer_counter(engine).add(4096)
    engine.close()
    assert "rank 0: close() has not given everything back: 4,096 bytes of temp" in caplog.text
    assert "4,096 bytes of temporary" in str(zs.memory_table(engine))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        zs.StorageError("blocks.0 master: no 10 bytes of host memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_memory_that_ran_out_carries_the_table(error: Exception) -> None:
    model = make_model()
    engine = zs.shard(model, stage=3)
    ledger.explain(error)
    other = RuntimeError("shapes differ")
    ledger.explain(other)
    engine.close()
    assert "blocks.2" in error.__notes__[0] and "this process" in error.__notes__[0]
    assert not hasattr(other, "__notes__")


def test_units_gathered_ahead_of_a_forward_that_never_comes_are_no_leak() -> None:
    model = make_model()
    engine = zs.shard(model, stage=3, offload=zs.Offload(weight="host"))
    for step in range(3):
        with torch.no_grad():
            model(*batch(0, step))
    assert engine.memory().temporary > 0, "nothing is gathered ahead here"
    assert ledger.leaks() == []
    engine.close()
    assert ledger.leaks() == []


def test_leaks_are_what_engines_hold_between_steps_and_once_closed() -> None:
    model, other = make_model(), make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zs.shard(model, optimizer, stage=3, offload=zs.Offload(optimizer="host"))
    second = zs.shard(other, stage=2)
    take_steps(0, 2, model, optimizer)
    with engine.no_sync():
        model(*batch(0, 3)).backward()  # in the middle of a step
    assert ledger.leaks() == []
    inside.buffer_counter(engine).add(4096)
    inside.buffer_counter(second).add(64)
    assert ledger.leaks() == ["Net, zero2, rank 0: between steps, and still has 64 bytes of"
                              " temporary"]  # fmt: skip
    optimizer.step()
    optimizer.zero_grad()
    engine.close()
    second.close()
    lines = ledger.leaks()
    assert len(lines) == 2 and all("closed, and still has" in line for line in lines)
    assert lines[0].startswith("Net, zero3, rank 0: closed, and still has 4,096 bytes")


SCRIPT = """
import torch
import zeroshard as zs

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
model(torch.ones(2, 8)).sum().backward()
raise torch.OutOfMemoryError("nothing left")
"""


def _run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeroshard", "run", "--nproc", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


def test_the_launcher_shows_the_table_of_a_rank_that_ran_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = _run(script)
    assert ended.returncode == 1
    assert "nothing left" in ended.stderr and "gathered and in buffers, at peak" in ended.stderr


LEAKING = """
import sys

import torch
import zeroshard as zs

sys.path.append(".")
from tests.support import inside

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
inside.buffer_counter(engine).add(4096)
"""


@pytest.mark.slow
def test_the_launcher_tells_what_a_script_that_ends_well_has_not_given_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAKING)
    ended = _run(script)
    assert ended.returncode == 0
    assert "zeroshard: leak: Sequential, zero3, rank 0: between steps, and still" in ended.stderr
