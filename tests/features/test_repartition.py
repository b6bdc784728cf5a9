"""``engine.repartition()``: other rows, tiers and ranks between two steps, in the process, with the
bits of a run that was saved, sharded anew and loaded.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.support.broken_storage import Broken, patched
from tests.support.harness import ROOT, run_ranks, spawn_ranks
from tests.support.repartitions import Trained, loaded, made, rests
from tests.support.training import batch, make_model
from zeroshard.comm.groups import HandOver
from zeroshard.runtime.engine import parts_of
from zeroshard.runtime.relayout import Move

Change = dict[str, Any]


def _options(change: Change, before: Change) -> Change:
    """Return the options of shard() that say what a repartition with `change` asks for."""
    options = {**before, **change}
    if options.get("shares") == "equal":
        del options["shares"]
    if "node_size" in options:
        options["comm"] = zs.Comm(node_size=options.pop("node_size"))
    return options


def _check_against_loaded(
    rank: int, run: Trained, folder: Path, change: Change, fixed: Change, now: Change
) -> None:
    """Repartition `run`, and compare it with an engine that has loaded it, then and as both train
    on.
    """
    zs.save(folder, run.engine, step=1, states=run.states)
    parameters = [id(p) for p in run.model.parameters()]
    run.engine.repartition(**change)
    assert [id(p) for p in run.model.parameters()] == parameters
    generator = torch.get_rng_state()
    other = loaded(run, folder, **fixed, **_options(change, now))
    torch.set_rng_state(generator)
    found, expected = rests(run), rests(other)
    wrong = [name for name in expected if found.get(name) != expected[name]]
    assert not wrong and found.keys() == expected.keys(), (change, wrong[:5])
    mine, theirs = run.engine.memory(), other.engine.memory()
    assert (mine.at_rest, mine.tiers, mine.temporary) == (
        theirs.at_rest, theirs.tiers, theirs.temporary,
    ), change  # fmt: skip
    assert run.train(rank, range(20, 22)) == other.train(rank, range(20, 22)), change
    found, expected = rests(run), rests(other)
    wrong = [name for name in expected if found[name] != expected[name]]
    assert not wrong, (change, wrong[:5])
    other.engine.close()


def _chain(
    rank: int, world: int, path: str, changes: list[Change], fixed: Change, averaged: bool
) -> None:
    """Train, and go through `changes` one after another."""
    first, *others = changes
    now = dict(first)
    run = made(averaged=averaged, **fixed, **_options(first, {}))
    run.train(rank, range(3))
    for number, change in enumerate(others):
        folder = Path(path) / str(number)
        _check_against_loaded(rank, run, folder, change, fixed, now)
        now |= change
    run.engine.close()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def _row(name: str) -> Change:
    return {"policy": name}


def _away(path: Path | str = "", **tiers: str) -> Change:
    disk = {"disk_path": str(path)} if "disk" in tiers.values() else {}
    return {"offload": {**tiers, **disk}}


ON_HOST = {"weight": "host", "grad": "host", "optimizer": "host"}
NOWHERE: Change = {"offload": {}}


def test_stages_1_and_3_have_the_bits_of_saving_and_loading(tmp_path: Path) -> None:
    chain = [
        _row("zero1"), _row("zero3"), {"shares": [0.25, 0.75]},
        _row("zero1") | {"shares": "equal"},
    ]  # fmt: skip
    run_ranks(2, _chain, str(tmp_path), chain, {}, True)


def test_states_move_from_the_device_to_the_host_and_back(tmp_path: Path) -> None:
    chain = [
        _row("zero3"), _away(**ON_HOST), _row("zero1") | _away(optimizer="host"),
        _row("zero3") | NOWHERE,
    ]  # fmt: skip
    run_ranks(2, _chain, str(tmp_path), chain, {"precision": "bf16"}, False)


# ---------------------------------------------------------------------------- models and optimizers


def _adapters(model: nn.Module) -> None:
    """Freeze the weights, and train what else there is."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "weight" not in name or "norm" in name


def _kind(
    rank: int, world: int, path: str, kind: str, precision: str, changes: list[Change]
) -> None:
    def begin(change: Change, seed: int) -> Trained:
        model = make_model()
        if kind == "given in bf16":
            model = model.bfloat16()
        if kind in ("frozen", "frozen in int8"):
            _adapters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = {
            "sgd": lambda: torch.optim.SGD(trained, lr=0.1),
            "momentum": lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
            "amsgrad": lambda: torch.optim.Adam(trained, lr=1e-3, amsgrad=True, fused=True),
        }.get(kind, lambda: torch.optim.AdamW(trained, lr=1e-3))()
        options: Change = {"precision": precision, **change}
        if kind == "frozen in int8":
            options["comm"] = zs.Comm(frozen_codec="int8")
        stepped = None if kind == "no optimizer" else optimizer
        engine = zs.shard(model, stepped, **options)
        return Trained(model, optimizer, engine, None)

    now = dict(changes[0])
    run = begin(now, 0)
    assert {p.dtype for p in run.model.parameters()} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }
    for number, change in enumerate(changes[1:]):
        if kind != "no optimizer":
            run.train(rank, range(3 * number, 3 * number + 2))
        folder = Path(path) / str(number)
        zs.save(folder, run.engine, step=1)
        run.engine.repartition(**change)
        now |= change
        other = begin(now, 1)
        zs.load(folder, other.engine)
        assert rests(run) == rests(other), change
        assert run.engine.memory().tiers == other.engine.memory().tiers
        if kind == "no optimizer":
            for one in (run, other) if number == len(changes) - 2 else ():
                one.engine.attach(one.optimizer)
        if run.engine.optimizer is not None:
            assert run.train(rank, range(20, 22)) == other.train(rank, range(20, 22))
            assert rests(run) == rests(other)
        other.engine.close()
    given = torch.bfloat16 if kind == "given in bf16" else torch.float32
    run.engine.close()
    assert {p.dtype for p in run.model.parameters()} == {given}
    run.model(*batch(rank, 0)) if given is torch.float32 else None


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind",
    ["sgd", "momentum", "amsgrad", "frozen", "frozen in int8", "given in bf16", "no optimizer"],
)
def test_kinds_of_models_and_optimizers(tmp_path: Path, kind: str, precision: str) -> None:
    if kind == "given in bf16":
        precision = "bf16"
    chain = [
        _row("zero3"), _row("zero1"), _row("zero3") | _away(**ON_HOST), _row("zero2") | NOWHERE,
        _row("zero3"),
    ]  # fmt: skip
    if kind == "frozen in int8":
        chain = [_row("zero3"), {"shares": [0.25, 0.75]}, _away(optimizer="host"), NOWHERE]
    run_ranks(2, _kind, str(tmp_path), kind, precision, chain)


# -------------------------------------------------------------------------------- ranks come and go


def _meshes(*worlds: int) -> dict[int, DeviceMesh]:
    """Return a mesh of the first ranks for each of `worlds`; every rank makes all of them."""
    return {
        world: DeviceMesh("cpu", list(range(world)), mesh_dim_names=("dp",)) for world in worlds
    }


def _refused(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except zs.ZeroshardError as refused:
        message = str(refused)
        assert "\n" not in message
        return f"{type(refused).__name__}: {message}"
    return "nothing was refused"


def _worlds(
    rank: int, world: int, path: str, worlds: list[int], fixed: Change, rows: list[str]
) -> None:
    """Go over `worlds` of ranks, one row after another; compare after each with an engine of these
    ranks that has loaded the state.
    """
    meshes = _meshes(*sorted({*worlds, world}))
    last = DeviceMesh("cpu", [world - 1], mesh_dim_names=("dp",))
    now: Change = {"mesh": meshes[world], **_row(rows[0])}
    averaged = "precision" not in fixed
    run = made(averaged=averaged, **fixed, **now)
    run.train(rank, range(3))
    size = world
    for number, (following, row) in enumerate(zip(worlds, rows[1:], strict=True)):
        folder = Path(path) / str(number)
        if rank < size:
            zs.save(folder, run.engine, step=1, states=run.states)
        if rank < max(size, following):
            run.engine.repartition(mesh=meshes[following], **_row(row))
        size, now = following, {"mesh": meshes[following], **_row(row)}
        if rank >= size:
            for use in (
                lambda: run.model(*batch(rank, 0)),
                run.engine.full_state_dict,
                run.optimizer.step,
                lambda: run.engine.repartition(policy="zero1"),
                *([run.average.update] if run.average is not None else []),
            ):
                assert "engine.repartition(mesh=...)" in _refused(use)
            assert run.engine.memory().total == 0
            if rank == world - 1:
                assert "holds the states" in _refused(run.engine.repartition, mesh=last)
            continue
        if size < world:
            assert "inside the other" in _refused(run.engine.repartition, mesh=last)
        generator = torch.get_rng_state()
        other = loaded(run, folder, **fixed, **now)
        torch.set_rng_state(generator)
        found, expected = rests(run), rests(other)
        wrong = [name for name in expected if found.get(name) != expected[name]]
        assert not wrong and found.keys() == expected.keys(), (size, row, wrong[:5])
        assert run.engine.memory().tiers == other.engine.memory().tiers
        assert run.train(rank, range(20, 22)) == other.train(rank, range(20, 22))
        found, expected = rests(run), rests(other)
        assert found == expected
        other.engine.close()
    if rank < size:
        run.engine.close()
    dist.barrier()


def test_a_rank_leaves_and_comes_back(tmp_path: Path) -> None:
    rows = ["zero3", "zero1", "zero3"]
    run_ranks(2, _worlds, str(tmp_path), [1, 2], {}, rows)


def _save_under_way(rank: int, world: int, path: str) -> None:
    """Go to one rank and back while a save in the background waits to be written."""
    meshes = _meshes(1, 2)
    run = made(policy="zero3", mesh=meshes[2])
    run.train(rank, range(1))
    expected = run.engine.full_state_dict(rank0_only=False)
    with zs.Saver(path, run.engine) as saver:
        write = saver._write

        def late(job: Any) -> Any:
            time.sleep(0.3)
            return write(job)

        saver._write = late  # type: ignore[method-assign]
        saver.save(1)
        run.engine.repartition(mesh=meshes[1])
        if rank == 0:
            saver.save(2)
        run.engine.repartition(mesh=meshes[2])
        saver.save(3)
    manifests = [
        json.loads((Path(path) / f"step-{step:010}" / "manifest.json").read_text())
        for step in (1, 2, 3)
    ]
    assert [manifest["world"] for manifest in manifests] == [2, 1, 2]
    run.train(rank, range(1, 2))
    zs.load(path, run.engine, step=1)
    found = run.engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    run.engine.close()


def test_a_save_under_way_ends_before_its_ranks_change(tmp_path: Path) -> None:
    run_ranks(2, _save_under_way, str(tmp_path))


def _failed_save(rank: int, world: int, path: str) -> None:
    run = made(policy="zero1")
    run.train(rank, range(1))
    saver, before = zs.Saver(path, run.engine), rests(run)
    write = saver._write

    def failing(job: Any) -> Any:
        raise zs.CheckpointError("planned")

    saver._write = failing if rank else write  # type: ignore[method-assign]
    saver.save(1)
    told = _refused(run.engine.repartition, policy="zero3")
    assert "planned" in told, told
    assert rests(run) == before
    run.engine.repartition(policy="zero3")
    saver._write = write  # type: ignore[method-assign]
    saver.save(2)
    saver.close()
    assert zs.latest_step(path) == 2
    run.engine.close()


def test_a_save_that_has_failed_is_told_before_states_move(tmp_path: Path) -> None:
    run_ranks(2, _failed_save, str(tmp_path))


# ----------------------------------------------------------------------------------------- refusals


def _refusals(rank: int, world: int, path: str) -> None:
    run = made(policy="zero1")
    engine = run.engine
    run.train(rank, range(1))
    before = rests(run)
    seen: dict[str, str] = {}

    def ask(name: str, **change: Any) -> None:
        seen[name] = _refused(engine.repartition, **change)

    ask("nothing")
    ask("a row that is none", policy="zero9")
    ask("a row that the planner finds", policy="auto")
    ask("one rank's row is none", policy=f"zero{3 + 6 * rank}")
    ask("both", policy="zero3", stage=3)
    ask("nodes", policy="hpz", node_size=3)
    ask("shares of three", shares=[0.2, 0.3, 0.5])
    ask("shares that do not sum", shares=[0.2, 0.3])
    ask("no mesh", mesh=[0, 1])
    ask("dp alone", dp="dp")
    ask("only one rank asks for a mesh", **({} if rank else {"mesh": _MESH}), policy="zero3")
    ask("ranks disagree", policy=f"zero{2 + rank}")
    ask("a disk that is not there", offload={"optimizer": "disk", "disk_path": "/nowhere"})
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    ask("another axis", mesh=other)
    run.model(*batch(rank, 0)).backward()
    ask("gradients", policy="zero3")
    run.optimizer.zero_grad()
    with engine.no_sync():
        ask("no_sync", policy="zero3")
    with engine.gathered():
        ask("gathered", policy="zero3")
    with engine.join():
        ask("join", policy="zero3")
    with engine.trace(path):
        ask("trace", policy="zero3")
    handle = run.model.head.register_forward_hook(lambda *_: ask("forward", policy="zero3"))
    with torch.no_grad():
        run.model(*batch(rank, 0))
    handle.remove()
    average = zs.EMA(engine)
    ask("an average", offload={"optimizer": "host"})
    with average.swapped():
        ask("swapped", policy="zero3")
    del average
    engine.offload_states()
    ask("offloaded", policy="zero3")
    engine.reload_states()
    for name, part in _MESSAGES.items():
        assert part in seen.pop(name), (name, part)
    assert not seen
    assert rests(run) == before
    engine.repartition(policy="zero3")
    run.train(rank, range(1, 2))
    engine.close()
    assert "closed" in _refused(engine.repartition, policy="zero1")


def _batches(rank: int, world: int) -> None:
    alone = _meshes(1)[1]
    for options, message in (
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": 2}, "train_batch_size=8 is not"),
        ({"batch_shares": (0.25, 0.75)}, "batch_shares has 2 numbers for 1"),
    ):  # fmt: skip
        run = made(policy="zero3", **options)
        run.train(rank, range(1))
        before = rests(run)
        told = _refused(run.engine.repartition, mesh=alone)
        assert message in told, told
        assert rests(run) == before
        run.engine.repartition(policy="zero1")
        run.train(rank, range(1, 2))
        run.engine.close()


def test_batches_that_do_not_fit_other_ranks_are_refused_before_anything_moves() -> None:
    run_ranks(2, _batches)


_MESH = "no mesh at all"
_MESSAGES = {
    "nothing": "without a change",
    "a row that is none": "zero9",
    "a row that the planner finds": "name a row",
    "one rank's row is none": "zero9",
    "both": "one of them decides",
    "nodes": "does not divide",
    "shares of three": "there are 2 data parallel ranks",
    "shares that do not sum": "sum to 0.5",
    "no mesh": "init_device_mesh",
    "dp alone": "pass mesh=",
    "only one rank asks for a mesh": "mesh",
    "ranks disagree": "'policy'",
    "a disk that is not there": "/nowhere",
    "another axis": "other dimensions",
    "gradients": "while gradients rest",
    "no_sync": "no_sync()",
    "gathered": "gathered()",
    "join": "join()",
    "trace": "engine.trace()",
    "forward": "inside a forward",
    "an average": "zs.EMA",
    "swapped": "EMA.swapped()",
    "offloaded": "reload_states()",
}


def test_what_cannot_be_done_is_refused_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _refusals, str(tmp_path))


# ------------------------------------------------------------------- what was made before it


def _made_before(rank: int, world: int, path: str) -> None:
    """Savers, states of a parameter and averages serve the layouts that follow."""
    run = made(policy="zero1", averaged=True)
    run.train(rank, range(1))
    parameter = run.model.head.weight
    numbers = zs.ParameterStates(run.engine, parameter)
    saver = zs.Saver(path, run.engine, states=run.states)
    saver.save(1)  # the files are written while states move
    for step, change in enumerate((_row("zero3"), {"shares": [0.25, 0.75]}, _row("ddp")), 2):
        run.engine.repartition(**change | ({"shares": "equal"} if step > 3 else {}))
        run.train(rank, range(step, step + 1))
        saver.save(step)
        fresh = zs.ParameterStates(run.engine, parameter)
        assert torch.equal(numbers.master(), fresh.master())
        assert torch.equal(numbers.state("exp_avg"), fresh.state("exp_avg"))
    saver.close()
    assert zs.latest_step(path) == 4
    other = loaded(run, Path(path), policy="ddp")
    found, expected = rests(other), rests(run)
    assert found == expected
    other.engine.close()
    run.engine.close()


def test_savers_and_states_from_before_it_serve_the_layouts_that_follow(tmp_path: Path) -> None:
    run_ranks(2, _made_before, str(tmp_path))


def _fewer_ranks(rank: int, world: int, path: str) -> None:
    everyone, alone = _meshes(2, 1).values()
    run = made(policy="zero3", mesh=everyone)
    run.train(rank, range(1))
    saver = zs.Saver(path, run.engine)
    saver.save(1)
    run.engine.repartition(mesh=alone)
    if rank == 0:
        run.train(rank, range(1, 2))
        saver.save(2)
        saver.close()
        assert zs.latest_step(path) == 2
        assert zs.load(path, run.engine, step=1).step == 1  # of both ranks
    else:
        with pytest.raises(zs.StateError, match="has left the ranks of its engine"):
            saver.save(2)
        saver.close()
        assert not any(one.name == "zeroshard-save" for one in threading.enumerate())
    dist.barrier()
    run.engine.close()  # nothing is left of a rank that is away but to close it


def test_a_saver_serves_the_ranks_that_stay(tmp_path: Path) -> None:
    run_ranks(2, _fewer_ranks, str(tmp_path))


def test_nobody_keeps_the_parts_of_a_layout() -> None:
    """What holds an engine asks it when it needs them: a repartition replaces all of them."""
    kept = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                calls = {
                    one.func.id
                    for one in ast.walk(node.value)
                    if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
                }
                if calls & {"states_of", "parts_of"}:
                    names = [one.attr for one in targets if isinstance(one, ast.Attribute)]
                    kept += [f"{path.name} {name}" for name in names]
    # a repartition replaces its own; averages are clones, which it moves
    assert kept == ["repartition.py _parts"]


def _scheduled(rank: int, world: int) -> list[str]:
    """Return what is logged on a rank that comes back to an optimizer with a scheduler."""
    everyone, alone = _meshes(2, 1).values()
    run = made(policy="zero1", mesh=everyone)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    run.train(rank, range(1))
    scheduler.step()
    run.engine.repartition(mesh=alone)
    if rank == 0:
        run.train(rank, range(1, 2))
        scheduler.step()
    run.engine.repartition(mesh=everyone)
    told = [scheduler.state_dict()] if rank == 0 else [None]
    dist.broadcast_object_list(told)
    if rank == 1:
        assert scheduler.last_epoch == 1
        scheduler.load_state_dict(told[0])
    run.train(rank, range(2, 3))
    scheduler.step()
    run.train(rank, range(3, 4))
    run.engine.close()
    logging.getLogger("zeroshard").removeHandler(handler)
    return lines


def test_a_rank_that_comes_back_says_that_its_scheduler_stood_still() -> None:
    stayed, returned = run_ranks(2, _scheduled)
    assert not [line for line in stayed if "scheduler" in line]
    (line,) = [line for line in returned if "scheduler" in line]
    assert "rank 1 comes back" in line and "load the state_dict()" in line


# ------------------------------------------------------------------------- exceptions on the way


def _fails_on_the_way(rank: int, world: int, transport: str, at: int) -> str:
    """Raise on rank 1 at its copy number `at` since states began to move; return what this rank is
    told.
    """
    comm = zs.Comm.model_validate({"transport": transport})
    run = made(policy="zero1", averaged=True, comm=comm)
    run.train(rank, range(2))
    real, begin, count = torch.Tensor.copy_, Move.begin, -1

    def begun(self: Move, told: Any) -> None:
        nonlocal count
        count = 0
        begin(self, told)

    def failing(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += count >= 0
        if rank == 1 and count == at:
            raise MemoryError("no room for a copy")
        return real(self, *args, **kwargs)

    torch.Tensor.copy_ = failing  # type: ignore[method-assign, assignment]
    try:
        with patched(Move, "begin", begun):  # elements go from rank to rank
            run.engine.repartition(policy="zero3", shares=[0.25, 0.75])
        told = ""
    except (MemoryError, zs.StateError) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        torch.Tensor.copy_ = real  # type: ignore[method-assign]
    with pytest.raises(zs.StateError, match="make model and engine anew"):
        run.model(*batch(rank, 0))
    run.engine.close()
    assert not hasattr(run.model, "_zeroshard_engine")
    again = made(policy="zero3")  # in the same process
    again.train(rank, range(1))
    again.engine.close()
    return told


@pytest.mark.parametrize("at", [1, 5, 12])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_an_exception_while_states_move_is_told_to_every_rank_at_once(
    transport: str, at: int
) -> None:
    first, second = run_ranks(2, _fails_on_the_way, transport, at, timeout=40)
    assert second == "MemoryError: no room for a copy"
    assert "rank 1 ended while states moved (MemoryError: no room for a copy)" in first


# ------------------------------------------------------------------------------- nothing is left


def _held(folder: Path) -> dict[str, Any]:
    """Return what this process holds of the system."""
    gc.collect()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in _open_files()]
    return {
        "files": sorted(name.split(":")[0] for name in files),
        "threads": threading.active_count(),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "swap": sum(1 for _ in folder.rglob("*.storage")),
    }


def _mapped() -> set[str]:
    """Return the inodes of the memory and files of ours that are mapped here."""
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "memfd" in line or "storage" in line}


def _open_files() -> list[str]:
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        names.append(name)
    return names


def _nothing_left(rank: int, world: int, path: str) -> None:
    folder, others = Path(path), _mapped()  # of engines of other tests
    row = {"policy": "zero3"}
    disk = _away(folder, weight="disk", grad="disk", optimizer="disk")
    run = made(**row, **disk)
    run.train(rank, range(1))
    seen, mapped, before = [], [], []
    for _ in range(3):
        before.append(parts_of(run.engine).context)  # closed, not only dropped
        run.engine.repartition(policy="zero1", offload={})
        run.train(rank, range(1))
        seen.append(_held(folder))
        mapped.append(_mapped() - others)
        run.engine.repartition(**row, **disk)
        run.train(rank, range(1))
    dist.barrier()
    assert seen[0]["swap"] == 0
    assert seen[1] == seen[2], seen[1:]
    assert mapped[1] and not mapped[1] & mapped[2]  # each layout maps memory of its own alone
    run.engine.close()
    fresh = made(policy="zero1")
    fresh.train(rank, range(1))
    expected = _held(folder)
    fresh.engine.close()
    assert seen[2] == expected, (seen[2], expected)


def test_nothing_of_the_old_layout_is_left(tmp_path: Path) -> None:
    run_ranks(2, _nothing_left, str(tmp_path))


# ---------------------------------------------------------------------------------- the whole table

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep", "hpz", "mics", "hfsdp")


def _tour(names: Sequence[str]) -> list[str]:
    """Return a walk over `names` that goes from every one to every other one once."""
    left = {name: [other for other in names if other != name] for name in names}
    stack, walk = [names[0]], []
    while stack:  # Hierholzer
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_row_goes_to_every_other_row(tmp_path: Path, precision: str) -> None:
    chain = [{"policy": row, "node_size": 2} for row in _tour(ROWS)]
    assert len(chain) == len(ROWS) * (len(ROWS) - 1) + 1
    run_ranks(4, _chain, str(tmp_path), chain, {"precision": precision}, True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_tier_goes_to_every_other_tier(tmp_path: Path, precision: str) -> None:
    every = {"weight": "disk", "grad": "disk", "optimizer": "disk"}
    places = {
        "device": NOWHERE | _row("zero3"),
        "host": _away(**ON_HOST) | _row("zero3"),
        "disk": _away(tmp_path, **every) | _row("zero3"),
        "optimizer on host": _away(optimizer="host") | _row("zero1"),
        "optimizer on disk": _away(tmp_path, grad="host", optimizer="disk") | _row("zero2"),
        "half": {"offload": {**ON_HOST, "fraction": 0.5}, "policy": "zero3"},
    }
    chain = [places[name] for name in _tour(list(places))]
    run_ranks(2, _chain, str(tmp_path), chain, {"precision": precision}, False, timeout=500)


@pytest.mark.slow
def test_shares_go_to_other_shares_in_every_row_and_on_tiers(tmp_path: Path) -> None:
    uneven = [{"shares": shares} for shares in ([0.5, 0, 0.3, 0.2], [0, 0.1, 0.9, 0], "equal")]
    chain = [_row("zero3"), *uneven]
    for row in ("zero1", "zero2", "hpz", "hfsdp", "mics"):
        chain += [{"policy": row, "node_size": 2}, *uneven]
    tiers = ("device", "host", "disk", "device")  # of each rank
    chain += [_row("zero1"), {"offload": {"optimizer": list(tiers), "disk_path": str(tmp_path)}}]
    chain += [uneven[0], NOWHERE, uneven[2]]
    run_ranks(4, _chain, str(tmp_path), chain, {}, False, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_number_of_ranks_goes_to_every_other(tmp_path: Path, precision: str) -> None:
    worlds = [int(name) for name in _tour(["4", "3", "2", "1"])][1:]
    walk = _tour(ROWS[:5])
    rows = [walk[index % len(walk)] for index in range(len(worlds) + 1)]
    fixed = {} if precision == "fp32" else {"precision": precision}
    run_ranks(4, _worlds, str(tmp_path), worlds, fixed, rows, timeout=500)


# ---------------------------------------------------------------------------------- peak of memory

MIB = 1 << 20
WIDTH, DEPTH = 1024, 16


def _resident() -> dict[str, int]:
    with open("/proc/self/status") as lines:
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return {name: 1024 * int(rest[0]) for name, rest in fields.items() if rest and rest[-1] == "kB"}


def _peaks(rank: int, world: int, changes: list[Change]) -> list[dict[str, int]]:
    """Return, per change, the bytes at rest before and after it, and the peak of resident memory
    beyond that before.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    model = torch.nn.Sequential(*layers)
    del layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    comm = zs.Comm(transport="gloo")  # no rank maps another's memory
    engine = zs.shard(model, optimizer, units=[torch.nn.Linear], comm=comm, **changes[0])
    out = []
    for change in [{}, *changes[1:]]:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        if not change:
            continue
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = engine.memory().total
        Path("/proc/self/clear_refs").write_text("5")
        base = _resident()["VmRSS"]
        dist.barrier()
        engine.repartition(**change)
        peak = _resident()["VmHWM"] - base
        out.append({"before": before, "after": engine.memory().total, "peak": peak})
    engine.close()
    return out


@pytest.mark.slow
def test_the_peak_is_the_larger_rest_and_two_units() -> None:
    changes = [
        _row("zero1"), _row("zero3"), _row("ddp"), _row("zero3") | _away(**ON_HOST),
        _row("zero2") | _away(optimizer="host"), _row("zero3") | NOWHERE,
    ]  # fmt: skip
    unit = 4 * WIDTH * WIDTH
    for result in spawn_ranks(2, _peaks, changes, timeout=250):
        assert result.error is None, result.stderr
        print(result.result)
        for change, seen in zip(changes[1:], result.result, strict=True):
            allowed = max(0, seen["after"] - seen["before"]) + 2 * unit
            assert seen["peak"] <= allowed + 4 * MIB, (change, seen, allowed)
            assert seen["before"] > 8 * unit


# ------------------------------------------------------------------------------- a tier that fails


def _failing(rank: int, world: int, path: str, verb: str, key: str, before: Change) -> None:
    folder = Path(path)
    disk = _away(folder, weight="disk", grad="disk", optimizer="disk")
    run = made(policy="zero3", **(disk if before else NOWHERE))
    run.train(rank, range(2))
    expected = rests(run)
    zs.save(folder / "saved", run.engine, step=1)
    broken = Broken(verb, key)
    with broken.installed():
        broken.armed = rank == 1
        change = NOWHERE | _row("zero1") if before else disk
        message = _refused(run.engine.repartition, **change)
        broken.armed = False
    assert message.startswith("StorageError" if rank or verb != "create" else ""), message
    if key == " weights" and not before:  # before anything has moved
        assert rests(run) == expected
        run.train(rank, range(2, 3))
    else:
        assert "StateError" in _refused(run.model, *batch(rank, 0))
        assert run.engine.policy.name == change.get("policy", "zero3")
        zs.load(folder / "saved", run.engine)
        run.train(rank, range(2, 3))
    run.engine.close()


@pytest.mark.slow
def test_a_disk_without_room_for_the_new_layout_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _failing, str(tmp_path), "create", " weights", {})


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "key"), [("create", "exp_avg"), ("write", "exp_avg")])
def test_a_tier_that_fails_on_the_way_is_told_on_every_rank(
    tmp_path: Path, verb: str, key: str
) -> None:
    run_ranks(2, _failing, str(tmp_path), verb, key, {})


@pytest.mark.slow
def test_a_state_that_cannot_be_read_is_told_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _failing, str(tmp_path), "read", "weights", {"disk": True})


def _cut_off(rank: int, world: int) -> None:
    run = made(policy="zero1")
    run.train(rank, range(1))
    calls = 0

    def move(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError("no memory for what comes")
        real(*args)

    real = HandOver.move
    with patched(HandOver, "move", move), pytest.raises(MemoryError):
        run.engine.repartition(policy="zero3")
    for use in (
        lambda: run.model(*batch(rank, 0)),
        run.optimizer.step,
        lambda: run.engine.repartition(policy="zero1"),
        *(weight.norm for weight in run.model.parameters()),
    ):
        assert "was cut off" in _refused(use)
    run.engine.close()
    assert all(weight.isnan().all() for weight in run.model.parameters())


def test_a_repartition_that_is_cut_off_leaves_an_engine_that_says_so() -> None:
    run_ranks(2, _cut_off)


def _reads(run: Trained) -> list[str]:
    """Read the weights in a thread; return what it is told of those that are not here."""
    told = []

    def read() -> None:
        for weight in run.model.parameters():
            try:
                float(weight.detach().norm())
            except zs.StateError as error:
                told.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return told


def _read_meanwhile(rank: int, world: int) -> None:
    """A thread reads weights at every part of two repartitions, and the run goes on."""
    losses, told, real = [], list[str](), HandOver.move
    for reads in (False, True):
        run = made(policy="zero1")
        losses.append(run.train(rank, range(1)))

        def move(*args: Any, run: Trained = run, reads: bool = reads) -> None:
            real(*args)
            told.extend(_reads(run) if reads else [])

        with patched(HandOver, "move", move):
            for row in ("zero3", "zero1"):
                run.engine.repartition(policy=row)
                losses[-1] += run.train(rank, range(1, 3))
        assert all("not the thread of the training loop" in line for line in told)
        assert bool(told) == reads
        run.engine.close()
    assert losses[0] == losses[1]


def test_a_thread_that_reads_weights_while_they_move_is_told_and_the_run_goes_on() -> None:
    run_ranks(2, _read_meanwhile)
