"""Checkpoints know the axes of a mesh: what any layout of (dp, tp, pp) saves, any other loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from tests.support.broken_storage import file_limit
from tests.support.harness import RankError, run_ranks, spawn_ranks
from tests.support.mesh_checkpoints import Layout, begin, exported
from tests.support.tensor_parallel import CASES, mesh_of
from tests.support.training import Block, two_groups
from zeroshard import CheckpointError, PeerLostError, PlanMismatch, StallError
from zeroshard.checkpoint.step_reader import verify
from zeroshard.checkpoint.steps import list_steps, read_manifest, step_path

SEQUENCE = "sequence and loss"  # matrices cut by rows and by columns, norms replicated

# ------------------------------------------------------------------------------ any layout to any


def _stages(model: Any, stage: int, count: int) -> None:
    """Leave one of two stages, which keeps the names of the model."""
    each = len(model.blocks) // count
    kept = range(stage * each, stage * each + each)
    model.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in kept})
    for name in ("norm", "head") if stage == 0 else ("embed",):
        delattr(model, name)


def _write(rank: int, world: int, name: str, layout: Layout, folder: Path) -> None:
    run = begin(CASES[name], layout)
    run.train(range(2))
    run.save(folder, 1)
    run.engine.close()


def _pass_on(rank: int, world: int, name: str, layout: Layout, source: Path, folder: Path) -> None:
    """Load into a run of zeros, and save."""
    run = begin(CASES[name], layout, _stages, zeros=True)
    restored = run.load(source)
    assert not [what for what in restored.skipped if not what.startswith("states['rng']")]
    assert run.schedule.last_epoch == 2 and run.optimizer.param_groups[0]["lr"] == 1e-2 * 0.81
    run.save(folder, 1)
    run.engine.close()


def _chain(name: str, first: Layout, others: list[Layout], folder: Path) -> None:
    """Save under the first layout, load and save under each of the others, one after another; all
    of these checkpoints are the same.
    """
    run_ranks(4, _write, name, first, folder / "0", timeout=100)
    expected = exported(folder / "0", 1, folder / "0.pt")
    assert any(key.endswith("|exp_avg_sq") for key in expected)
    for number, layout in enumerate(others, 1):
        source, target = folder / f"{number - 1}", folder / f"{number}"
        run_ranks(4, _pass_on, name, layout, source, target, timeout=100)
        assert verify(step_path(target, 1)) == []
        found = exported(target, 1, folder / f"{number}.pt")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (layout, key)


def test_a_checkpoint_goes_from_tensor_to_data_to_pipeline_parallel_and_back(
    tmp_path: Path,
) -> None:
    first = Layout.of(dp=2, tp=2)
    others = [
        Layout.of(dp=4),
        Layout.of("zero1", pp=2, dp=2),
        Layout.of("zero2", pp=2, dp=1, tp=2),
        first,
    ]
    _chain(SEQUENCE, first, others, tmp_path)


LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "dp 4": {"dp": 4},
    "tp 4": {"dp": 1, "tp": 4},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
}
OFFLOADED = {"offload": zs.Offload(optimizer="host")}


# every layout once from every other
EACH = [
    "dp 4",
    "tp 4",
    "pp 2, dp 2",
    "dp 2, tp 2",
    "tp 4",
    "dp 4",
    "pp 2, dp 2",
    "dp 4",
    "dp 2, tp 2",
    "pp 2, dp 2",
    "tp 4",
    "dp 2, tp 2",
]
ONCE = ["dp 4", "tp 4", "pp 2, dp 2", "dp 2, tp 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "options", "names"),
    [("zero1", {}, EACH), ("zero3", {}, EACH), ("zero3", OFFLOADED, ONCE)],
    ids=["zero1", "zero3", "on the host"],
)
def test_every_layout_of_a_llama_reads_every_other(
    tmp_path: Path, row: str, options: dict[str, Any], names: list[str]
) -> None:
    first, *others = [Layout.of(row, options, **LAYOUTS[name]) for name in ("dp 2, tp 2", *names)]
    _chain("llama", first, others, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "empty"])
def test_uneven_and_empty_parts_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    layouts = [Layout.of(dp=4), Layout.of(dp=1, tp=4), Layout.of("zero1", dp=2, tp=2)]
    _chain(name, Layout.of("zero1", dp=2, tp=2), layouts, tmp_path)


# ---------------------------------------------------------------------------- all ranks of a mesh


class Stack(nn.Module):
    """Blocks of one width, of which a stage has some; with a buffer of each block."""

    def __init__(self, kept: range, *, shared: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {str(number): Block(10) for number in range(4)}
        self.blocks = nn.ModuleDict({name: blocks[name] for name in blocks if int(name) in kept})
        for block in self.blocks.values():
            block.register_buffer("seen", torch.zeros(2))
        if shared is not None:
            self.shared = nn.Parameter(torch.full((7, 3), shared), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            block.seen += x.sum()
            x = block(x)
        return x.square().mean()


class Stage:
    """One stage of a Stack, in training, over a mesh."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        names = mesh.mesh_dim_names or ()
        stages = mesh["pp"].size() if "pp" in names else 1
        stage = mesh.get_local_rank("pp") if "pp" in names else 0
        shared = options.pop("shared", None)
        each = 4 // stages
        self.model = Stack(range(stage * each, stage * each + each), shared=shared)
        self.optimizer = two_groups(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        row = options.pop("policy", "zero3")
        self.engine = zs.shard(self.model, self.optimizer, policy=row, mesh=mesh, **options)
        self.states: dict[str, Any] = {"schedule": self.schedule}

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(10 * number + self.engine.rank)
        loss = self.model(torch.randn(3, 10, generator=generator) + torch.rand(()))
        self.engine.backward(loss)
        self.engine.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss)


MESHES = {
    "pp x dp": (("pp", 2), ("dp", 2)),
    "dp x tp": (("dp", 2), ("tp", 2)),
    "pp x dp x tp": (("pp", 2), ("dp", 1), ("tp", 2)),
}


def _goes_on(rank: int, world: int, folder: Path, names: list[str]) -> None:
    for name in names:
        axes = dict(MESHES[name])
        mesh, here = mesh_of(**axes), folder / name
        run = Stage(mesh, policy="zero1")
        place = mesh.get_local_rank("dp") + 10 * (mesh.get_local_rank("pp") if "pp" in axes else 0)
        torch.manual_seed(place)  # ranks along 'tp' draw the same
        with zs.Saver(here, run.engine, states=run.states, keep_last=2) as saver:
            for step in range(3):
                run.step(step)
                saver.save(step, extra=place)
        expected = [run.step(step) for step in (3, 4)]
        seen = {key: value.clone() for key, value in run.model.named_buffers()}
        state = run.engine.full_state_dict(rank0_only=False)
        run.engine.close()
        assert list(list_steps(here)) == [1, 2]

        again = Stage(mesh, policy="zero3")
        again.step(9)
        restored = zs.load(here, again.engine, states=again.states)
        assert (restored.extra, restored.skipped) == (place, [])
        assert [again.step(step) for step in (3, 4)] == expected
        for key, value in again.engine.full_state_dict(rank0_only=False).items():
            assert torch.equal(value, state[key]), key
        assert all(torch.equal(value, seen[key]) for key, value in again.model.named_buffers())
        again.engine.close()


def _one_rank_loads_the_pipeline(rank: int, world: int, folder: Path) -> list[str]:
    run = Stage(mesh_of(dp=1))
    restored = zs.load(folder, run.engine, states=run.states)
    assert all(float(block.seen.abs().sum()) > 0 for block in run.model.blocks.values())
    assert run.schedule.last_epoch == 3
    return restored.skipped


def test_training_goes_on_where_it_was_saved_in_the_background_on_every_mesh(
    tmp_path: Path,
) -> None:
    run_ranks(4, _goes_on, tmp_path, list(MESHES), timeout=100)
    for name in MESHES:
        assert verify(step_path(tmp_path / name, 2)) == []
        manifest = read_manifest(step_path(tmp_path / name, 2))
        assert len(manifest.places) == manifest.world == 4
        assert len(manifest.parameters) == 24
        for (parameter, kind), pieces in manifest.pieces().items():
            numel = sum(piece.numel for piece in pieces)
            assert numel == manifest.parameters[parameter].numel, kind
        assert manifest.optimizer is not None
        assert [len(group["params"]) for group in manifest.optimizer["groups"]] == [8, 16]
    # ranks of another layout take what was alike, and say what was not
    (skipped,) = run_ranks(1, _one_rank_loads_the_pipeline, tmp_path / "pp x dp")
    differed = ": it differed between the 4 ranks that saved it"
    assert {f"states['rng']['torch']{differed}", f"extra{differed}"} <= set(skipped)
    assert all(one.startswith(("states['rng']['", "extra:")) for one in skipped)


# --------------------------------------------------------------------------- names of two stages


def _shared(rank: int, world: int, folder: Path) -> None:
    """A frozen parameter of both stages: once in the checkpoint if it is the same."""
    mesh = mesh_of(pp=2, dp=2)
    run = Stage(mesh, shared=2.5)
    run.step(0)
    path = zs.save(folder, run.engine, step=1)
    pieces = read_manifest(path).pieces()["shared", "value"]
    assert sum(piece.numel for piece in pieces) == 21
    run.engine.close()
    zeros = Stage(mesh, shared=0.0)
    zs.load(folder, zeros.engine)
    with zeros.engine.gathered():
        assert bool((zeros.model.shared == 2.5).all())
    zeros.engine.close()

    other = Stage(mesh, shared=float(mesh.get_local_rank("pp")))
    with pytest.raises(CheckpointError) as refused:
        zs.save(folder, other.engine, step=2)
    assert str(refused.value).startswith(
        "parameter 'shared' is at pp=0 and at pp=1 of the mesh, with other numbers: give each stage"
    )
    zs.save(folder, other.engine, step=3, frozen=False)  # the engine goes on
    other.engine.close()


def test_a_parameter_of_two_stages_is_saved_once_if_it_is_the_same_and_else_refused(
    tmp_path: Path,
) -> None:
    run_ranks(4, _shared, tmp_path, timeout=100)
    assert list(list_steps(tmp_path)) == [1, 3]


def _other_shapes(rank: int, world: int, folder: Path) -> None:
    mesh = mesh_of(pp=2, dp=1)
    model = nn.Linear(3, 4 + mesh.get_local_rank("pp"))
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), mesh=mesh)
    zs.save(folder, engine, step=1)


def test_other_parameters_under_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        run_ranks(2, _other_shapes, tmp_path)
    for error in failed.value.errors.values():
        assert "parameter 'weight' is [4, 3] (trained" in error.message
        assert "give parameters of stages names of their own" in error.message
    assert len(failed.value.errors) == 2


def _groups(rank: int, world: int, folder: Path) -> None:
    """Stages whose optimizers have other options keep them; one optimizer of all cannot."""
    mesh = mesh_of(pp=2, dp=1)
    stage = mesh.get_local_rank("pp")
    run = Stage(mesh)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1 + stage
    zs.save(folder, run.engine, step=1)
    for group in run.optimizer.param_groups:
        group["lr"] = 7.0
    zs.load(folder, run.engine)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.1 + stage] * 2
    run.engine.close()
    whole = Stage(mesh_of(dp=2))
    with pytest.raises(CheckpointError, match="param group 0 holds other parameters here"):
        zs.load(folder, whole.engine)
    restored = zs.load(folder, whole.engine, strict=False)
    assert any("param group 0" in skipped for skipped in restored.skipped)
    whole.engine.close()


def test_options_of_the_param_groups_are_those_of_each_stage(tmp_path: Path) -> None:
    run_ranks(2, _groups, tmp_path, timeout=100)


# --------------------------------------------------------------------------------------- failures


def _fails(rank: int, world: int, folder: Path, background: bool) -> str:
    """A rank of the second stage cannot write."""
    run = Stage(mesh_of(pp=2, dp=2))
    zs.save(folder, run.engine, step=1)
    saver = zs.Saver(folder, run.engine, background=background)
    told = ""
    try:
        with file_limit(100 if rank == 3 else 1 << 40):
            saver.save(2)
            saver.wait()
    except CheckpointError as error:
        told = str(error)
    run.engine.reset()
    saver.save(3)
    saver.close()
    run.engine.close()
    return told


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_save_that_fails_on_a_rank_of_another_stage_fails_on_all(
    tmp_path: Path, background: bool
) -> None:
    told = run_ranks(4, _fails, tmp_path, background, timeout=100)
    assert all("rank-00003-of-00004.safetensors" in one for one in told), told
    assert list(list_steps(tmp_path)) == [1, 3]
    assert verify(step_path(tmp_path, 1)) == verify(step_path(tmp_path, 3)) == []


def _dies(rank: int, world: int, folder: Path) -> str:
    run = Stage(mesh_of(pp=2, dp=2), stall_timeout_s=10)
    run.step(0)
    zs.save(folder, run.engine, step=1)
    run.step(1)
    if rank == 3:
        os.fsync = lambda fd: os._exit(9)  # its file is written, and not on disk
    try:
        zs.save(folder, run.engine, step=2)
    except (CheckpointError, PeerLostError, StallError, PlanMismatch) as error:
        return type(error).__name__
    return "saved"


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    ended = spawn_ranks(4, _dies, tmp_path, timeout=90)
    assert [result.exitcode for result in ended] == [0, 0, 0, 9], [r.stderr for r in ended]
    assert all(result.result != "saved" for result in ended[:3])
    assert list(list_steps(tmp_path)) == [1] and verify(step_path(tmp_path, 1)) == []
    run_ranks(1, _load_one, tmp_path)


def _load_one(rank: int, world: int, folder: Path) -> None:
    run = Stage(mesh_of(dp=1))
    assert zs.load(folder, run.engine).step == 1
    run.engine.close()
