"""Meshes of several dimensions: training over the data parallel ranks, agreement over all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.support.broken_storage import Broken
from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from tests.support.tensor_parallel import CASES, train
from tests.support.training import TRANSPORTS, Net, State, batch, two_groups
from zeroshard import ConfigError, PlanMismatch, StateError, StorageError
from zeroshard.runtime.engine import states_of

ROWS = ("ddp", "zero1", "zero2", "zero3")
SMALL = 0.05  # what clips every step


def _mesh(*names: str, sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _stage(number: int) -> Net:
    """Return the model of one of two independent stages: other sizes, other values."""
    torch.manual_seed(number)
    return Net(width=19 + 4 * number, layers=2 + number)


def _sharded(
    mesh: DeviceMesh, model: nn.Module, row: str = "zero3", **options: Any
) -> tuple[torch.optim.Optimizer, zs.Engine]:
    optimizer = two_groups(model)
    return optimizer, zs.shard(model, optimizer, policy=row, mesh=mesh, **options)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: zs.Engine,
    step: int,
    *,
    clip: float | None = None,
    times: float = 1.0,
) -> float:
    """Take a step on the batch of a data parallel rank; return the norm."""
    engine.backward(model(*batch(engine.rank, step)) * times)
    norm = -1.0 if clip is None else float(engine.clip_grad_norm_(clip))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _state(engine: zs.Engine) -> State:
    return {name: value.clone() for name, value in _full(engine).items()}


def _full(engine: zs.Engine) -> State:
    return engine.full_state_dict(rank0_only=False)


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("names", [("dp", "pp"), ("pp", "dp")])
@on_ranks(4, timeout=100)
def test_stages_train_beside_each_other_with_the_bits_of_training_alone(
    names: tuple[str, str],
) -> None:
    """Two stages beside each other have the bits that each has without the other."""
    mesh = _mesh(*names)
    number = mesh.get_local_rank("pp")
    for row in ROWS:
        states = []
        for used in (mesh, mesh["dp"]):
            model = _stage(number)
            optimizer, engine = _sharded(used, model, row)
            assert (engine.world, engine.rank) == (2, mesh.get_local_rank("dp"))
            assert (f"at pp={number}" in repr(engine)) == (used is mesh)
            for step in range(3):
                _step(model, optimizer, engine, step)
            states.append(_state(engine))
            engine.close()
        assert _equal(*states), row


# ------------------------------------------------------------------------------------ norm and clip


def _plain(steps: int) -> tuple[list[float], list[State]]:
    """Train both stages in one process, clipped by their common norm."""
    models = [_stage(number) for number in (0, 1)]
    optimizers = [two_groups(model) for model in models]
    norms = []
    for step in range(steps):
        for model in models:
            for rank in (0, 1):
                (model(*batch(rank, step)) / 2).backward()
        everything = [p for model in models for p in model.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(everything, SMALL)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, [dict(model.state_dict()) for model in models]


def _clipped(rank: int, world: int) -> dict[str, list[float]]:
    mesh = _mesh("pp", "dp")
    number = mesh.get_local_rank("pp")
    expected = _plain(3)[1][number]
    norms: dict[str, list[float]] = {}
    for row in ROWS:
        model = _stage(number)
        optimizer, engine = _sharded(mesh, model, row)
        norms[row] = [_step(model, optimizer, engine, step, clip=SMALL) for step in range(3)]
        for name, value in _full(engine).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        engine.close()
    return norms


def test_the_norm_is_that_of_all_stages_on_every_rank_and_in_every_row() -> None:
    expected = _plain(3)[0]
    answers = run_ranks(4, _clipped, timeout=100)
    assert all(norms == answers[0] for norms in answers)
    for norms in answers[0].values():
        assert norms == answers[0]["ddp"]
        assert norms == pytest.approx(expected, rel=1e-5)
    assert min(expected) > SMALL


@pytest.mark.parametrize("names", [("pp", "dp", "tp"), ("tp", "pp", "dp")])
@on_ranks(4)
def test_stages_add_to_the_norm_and_replicas_count_once(names: tuple[str, ...]) -> None:
    """Two stages of two replicas, each of one rank."""
    mesh = _mesh(*names, sizes=tuple(1 if name == "dp" else 2 for name in names))
    models = [_stage(number) for number in (0, 1)]
    for model in models:
        model(*batch(0, 0)).backward()
    expected = nn.utils.get_total_norm(
        [p.grad for model in models for p in model.parameters() if p.grad is not None]
    )
    model = _stage(mesh.get_local_rank("pp"))
    optimizer, engine = _sharded(mesh, model)
    assert _step(model, optimizer, engine, 0, clip=SMALL) == pytest.approx(float(expected), 1e-5)


@on_ranks(4)
def test_gradient_clipping_clips_by_the_same_norm() -> None:
    """The keyword clips as the call does."""
    mesh = _mesh("pp", "dp")
    number = mesh.get_local_rank("pp")
    states = []
    for clip, options in ((SMALL, {}), (None, {"gradient_clipping": SMALL})):
        model = _stage(number)
        optimizer, engine = _sharded(mesh, model, **options)
        _step(model, optimizer, engine, 0, clip=clip)
        states.append(_state(engine))
        engine.close()
    assert _equal(*states)


# --------------------------------------------------------------------------- steps that are skipped


def _infinite(rank: int, world: int, precision: str) -> tuple[int, float]:
    mesh = _mesh("pp", "dp")
    for row in ROWS:
        model = _stage(mesh.get_local_rank("pp"))
        optimizer, engine = _sharded(mesh, model, row, precision=precision)
        before, scale = _state(engine), engine.loss_scale
        # on one rank of the second stage alone
        _step(model, optimizer, engine, 0, times=float("inf") if rank == 3 else 1.0)
        assert _equal(before, _state(engine)) and engine.steps_skipped == 1, row
        assert engine.loss_scale == (scale / 2 if precision == "fp16" else 1.0)
        norm = _step(model, optimizer, engine, 1, clip=SMALL)
        assert not _equal(before, _state(engine)) and engine.steps_skipped == 1, row
        engine.close()
    return 1, norm


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_in_one_stage_is_skipped_in_all(precision: str) -> None:
    answers = run_ranks(4, _infinite, precision, timeout=100)
    assert len({norm for _, norm in answers}) == 1


def _infinite_for_ever(rank: int, world: int) -> str:
    mesh = _mesh("pp", "dp")
    model = _stage(mesh.get_local_rank("pp"))
    optimizer, engine = _sharded(mesh, model)
    with pytest.raises(StateError) as refused:
        for step in range(4):
            _step(model, optimizer, engine, step, times=float("inf") if rank == 3 else 1.0)
    return str(refused.value)


def test_three_such_steps_end_all_stages_and_name_the_parameter() -> None:
    (message,) = set(run_ranks(4, _infinite_for_ever))
    assert message.startswith("3 steps in a row") and "at pp=1'" in message


# ------------------------------------------------------------------------------ errors of one group


Deed = Callable[[int, Net, torch.optim.Optimizer, zs.Engine], None]


def _options(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    if rank == 0:
        optimizer.param_groups[0]["lr"] = 1e-4
    _step(model, optimizer, engine, 1)


def _max_norm(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    _step(model, optimizer, engine, 1, clip=0.5 if rank < 2 else 0.25)


def _no_gradient(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    if rank >= 2:
        engine.backward(model(*batch(rank, 1)))
    optimizer.step()


def _no_clip(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    """One stage clips; the other goes on to its next step."""
    for step in (1, 2):
        _step(model, optimizer, engine, step, clip=SMALL if rank < 2 else None)


DEEDS: dict[str, tuple[Deed, str]] = {
    "options": (_options, "option 'lr' of optimizer param group 0 differs between ranks"),
    "max_norm": (_max_norm, "max_norm of clip_grad_norm_() differs along the mesh"),
    "no gradient": (_no_gradient, "without a gradient on any rank"),
    "no clip": (_no_clip, "the norm of the gradient"),
}


@pytest.mark.parametrize("deed", DEEDS)
@on_ranks(4)
def test_an_error_of_one_group_ends_the_step_of_all(rank: int, deed: str) -> None:
    mesh = _mesh("pp", "dp")
    model = _stage(mesh.get_local_rank("pp"))
    optimizer, engine = _sharded(mesh, model, "zero2")
    _step(model, optimizer, engine, 0, clip=SMALL)
    with pytest.raises((PlanMismatch, StateError)) as refused:
        DEEDS[deed][0](rank, model, optimizer, engine)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    if deed != "no clip":  # else one stage has taken a step more
        engine.reset()
        _step(model, optimizer, engine, 2, clip=SMALL)
        engine.close()
    (kind, message) = type(refused.value).__name__, str(refused.value)
    assert DEEDS[deed][1] in message, (rank, message)
    if rank >= 2:
        assert kind == "PlanMismatch"
        assert message.startswith("at pp=0 of the mesh: ") == (deed in ("options", "no gradient"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_after_an_exception_in_one_stage_reset_brings_all_together(
    rank: int, transport: str
) -> None:
    mesh = _mesh("pp", "dp")
    model = _stage(mesh.get_local_rank("pp"))
    comm = zs.Comm.model_validate({"transport": transport})
    optimizer, engine = _sharded(mesh, model, comm=comm)
    _step(model, optimizer, engine, 0)
    told = "nothing"
    try:
        if rank < 2:
            raise ValueError("a bad batch")
        _step(model, optimizer, engine, 1)
    except (ValueError, StateError) as error:
        told = str(error)
    engine.reset()
    _step(model, optimizer, engine, 2, clip=SMALL)
    assert engine.steps_skipped == 0
    assert told == "a bad batch" if rank < 2 else "gave up this step" in told


def _disk_fails(rank: int, world: int, directory: str) -> str:
    """One stage cannot write a gradient; it is told at the step."""
    model = _stage(rank)
    mesh, offload = _mesh("pp", "dp", sizes=(2, 1)), zs.Offload(grad="disk", disk_path=directory)
    optimizer, engine = _sharded(mesh, model, offload=offload)
    broken = Broken("write", "blocks.1_fp32_gradient")
    with broken.installed(), pytest.raises((StorageError, PlanMismatch)) as refused:
        broken.armed = rank == 1
        _step(model, optimizer, engine, 0)
    engine.reset()
    _step(model, optimizer, engine, 1, clip=SMALL)
    engine.close()
    return f"{type(refused.value).__name__}: {refused.value}"


def test_a_failed_disk_of_one_stage_is_told_to_the_others(tmp_path: Path) -> None:
    other, own = run_ranks(2, _disk_fails, str(tmp_path))
    assert own.startswith("StorageError: ") and "Input/output error" in own
    assert other == own.replace("StorageError: ", "PlanMismatch: at pp=1 of the mesh: ")


def _stage_dies(rank: int, world: int) -> None:
    model = _stage(rank)
    optimizer, engine = _sharded(_mesh("pp", "dp", sizes=(2, 1)), model)
    _step(model, optimizer, engine, 0)
    if rank == 1:
        os._exit(9)
    _step(model, optimizer, engine, 1)


def test_a_stage_that_dies_ends_the_others_at_once() -> None:
    alive, dead = spawn_ranks(2, _stage_dies)
    assert dead.exitcode == 9
    assert alive.error is not None and alive.error.type_name == "PeerLostError"
    assert "rank(s) [1]" in alive.error.message and alive.seconds < 150


# ----------------------------------------------------------------------------------------- replicas


def _replicas(rank: int, world: int) -> list[float]:
    """Along tp plain parameters count once: clips are those of one group alone."""
    mesh = _mesh("dp", "tp")
    norms = []
    for row in ROWS:
        states = []
        for used in (mesh, mesh["dp"]):
            model = _stage(0)
            optimizer, engine = _sharded(used, model, row)
            norms.append([_step(model, optimizer, engine, step, clip=SMALL) for step in range(2)])
            states.append(_state(engine))
            engine.close()
        assert _equal(*states), row
    assert all(series == norms[0] for series in norms)
    return norms[0]


def test_replicas_count_once() -> None:
    answers = run_ranks(4, _replicas, timeout=100)
    assert all(norms == answers[0] for norms in answers)


@on_ranks(4)
def test_replicas_that_would_drift_apart_are_refused() -> None:
    mesh = _mesh("dp", "tp")
    at = mesh.get_local_rank("tp")
    told = []
    torch.manual_seed(at)  # Megatron's layers: each rank its own slice
    with pytest.raises(PlanMismatch) as refused:
        _sharded(mesh, Net())
    told.append(str(refused.value))
    with pytest.raises(ConfigError, match="sync_from=0 would copy inside"):
        _sharded(mesh, Net(), sync_from=0)
    for change in ("lr", "used"):
        model = _stage(0)
        optimizer, engine = _sharded(mesh, model, "zero2")
        if change == "lr":
            optimizer.param_groups[1]["lr"] = 1e-3 * (1 + at)
        loss = model(*batch(engine.rank, 0))
        if change == "used" and at:
            loss = model.embed(batch(engine.rank, 0)[0]).sum()
        with pytest.raises(PlanMismatch) as refused:
            loss.backward()
            optimizer.step()
        told.append(str(refused.value))
    for message, name in zip(
        told,
        ("initial value of embed.weight", "what was decided", "the parameters with gradients"),
        strict=True,
    ):
        assert message.startswith(name) and "differs between replicas" in message, message


# ---------------------------------------------------------------------------------- rows with nodes


@on_ranks(4, timeout=100)
def test_dp_replicate_and_dp_shard_are_the_nodes_of_rows_with_columns() -> None:
    """dp_replicate x dp_shard are the nodes; with an axis of one rank beside."""
    mesh = _mesh("dp_replicate", "pp", "dp_shard", sizes=(2, 1, 2))
    for row in ("mics", "hpz", "hfsdp"):
        states = []
        for options in ({"mesh": mesh}, {"comm": zs.Comm(node_size=2)}):
            model = _stage(0)
            optimizer = two_groups(model)
            engine = zs.shard(model, optimizer, policy=row, **options)
            for step in range(2):
                _step(model, optimizer, engine, step)
            states.append(_state(engine))
            engine.close()
        assert _equal(*states), row
    model = _stage(0)
    with pytest.raises(ConfigError, match="policy='zero3' does not shard over the inner data"):
        _sharded(mesh, model)
    with pytest.raises(ConfigError, match=r"comm.node_size=4 is not the mesh's nodes of 2"):
        _sharded(mesh, model, "mics", comm=zs.Comm(node_size=4))
    with pytest.raises(ConfigError, match="name the data parallel dimensions 'dp_replicate'"):
        _sharded(_mesh("dp", "pp"), model, "mics")
    turned = DeviceMesh(
        "cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    with pytest.raises(ConfigError, match=r"ranks \[0, 1, 3, 2\] out of order"):
        _sharded(turned, model, "mics")


@on_ranks(4)
def test_a_mesh_may_be_a_part_of_the_job(rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[1, 3]]), mesh_dim_names=("pp", "dp"))
    model = _stage(0)
    if rank % 2 == 0:
        told = rf"mesh does not contain rank {rank}: call shard\(\) on its ranks \[1, 3\] alone$"
        with pytest.raises(ConfigError, match=told):
            _sharded(mesh, model)
        return
    optimizer, engine = _sharded(mesh, model)
    _step(model, optimizer, engine, 0, clip=SMALL)
    assert (engine.rank, engine.world) == (rank // 2, 2)


def _part_of_the_job(rank: int, world: int) -> str:
    """A mesh of the first four of five ranks."""
    mesh = DeviceMesh(
        "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    model = _stage(0)
    try:
        optimizer, engine = _sharded(mesh, model, "mics")
    except ConfigError as refused:
        return str(refused)
    _step(model, optimizer, engine, 0)
    assert engine.world == 4
    return ""


@pytest.mark.slow
def test_nodes_may_be_a_part_of_the_job() -> None:
    told = run_ranks(5, _part_of_the_job, timeout=100)
    assert told == [""] * 4 + [
        "mesh does not contain rank 4: call shard() on its ranks [0, 1, 2, 3] alone"
    ]


# --------------------------------------------------------------------------------------- bad inputs


@on_ranks(2, timeout=100)
def test_dimensions_of_one_rank_are_nothing() -> None:
    for names, sizes in (
        (("pp", "dp"), (1, 2)),
        (("pp", "dp"), (2, 1)),
        (("tp", "dp_shard", "pp"), (1, 1, 2)),
        (("tp", "dp", "pp"), (1, 2, 1)),
    ):
        mesh = _mesh(*names, sizes=sizes)
        for row in ("ddp", "zero3"):
            model = _stage(0)
            optimizer, engine = _sharded(mesh, model, row)
            norm = _step(model, optimizer, engine, 0, clip=SMALL)
            assert norm > 0 and engine.steps_skipped == 0
            engine.close()


@on_ranks(2)
def test_a_mesh_that_does_not_say_what_it_is_is_refused() -> None:
    unnamed = init_device_mesh("cpu", (2, 1))
    for mesh, message in (
        (unnamed, "2 dimensions without names"),
        (_mesh("pp", "tp", sizes=(2, 1)), "no data parallel dimension"),
        (_mesh("dp", "ep", sizes=(2, 1)), "mesh dimension 'ep' is not known"),
        ([0, 1], "mesh is a list, not a DeviceMesh"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            zs.shard(_stage(0), mesh=mesh)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("precision", ("fp32", "bf16"), r"precision differs along the mesh \(pp=0: "),
        (
            "gradient_clipping",
            (1.0, 2.0),
            r"gradient_clipping differs along the mesh \(pp=0: 1.0; pp=1: 2.0\)",
        ),
        ("stage", (2, 7), "7"),
    ],
    ids=["precision", "gradient_clipping", "stage"],
)
@on_ranks(2)
def test_settings_are_the_same_along_the_mesh(
    rank: int, option: str, values: tuple[Any, Any], message: str
) -> None:
    mesh = _mesh("pp", "dp", sizes=(2, 1))
    with pytest.raises((ConfigError, PlanMismatch), match=message):
        _sharded(mesh, _stage(rank), row=None, **{option: values[rank]})


@on_ranks(2)
def test_join_refuses_other_axes(rank: int) -> None:
    model = _stage(rank)
    _, engine = _sharded(_mesh("pp", "dp", sizes=(2, 1)), model)
    with pytest.raises(ConfigError, match="join"), engine.join():
        pass
    assert _full(engine).keys() == _stage(rank).state_dict().keys()
    engine.close()


# ------------------------------------------------------------------------------ names of the user's


@on_ranks(4, timeout=100)
def test_dimensions_of_the_users_names_are_data_parallel() -> None:
    """dp= says which dimensions are data parallel, whatever they are called."""
    states = []
    for names, dp in (
        (("dp", "pp"), None),
        (("batch", "pp"), "batch"),
        (("batch", "pp"), ("batch",)),
    ):
        mesh = _mesh(*names)
        model = _stage(mesh.get_local_rank("pp"))
        optimizer, engine = _sharded(mesh, model, dp=dp)
        for step in range(2):
            _step(model, optimizer, engine, step)
        states.append(_state(engine))
        engine.close()
    assert all(_equal(states[0], state) for state in states)
    hosts = _mesh("hosts", "local")
    model = _stage(0)
    _, engine = _sharded(hosts, model, "mics", dp=("hosts", "local"))
    assert engine.world == 4
    engine.close()
    with pytest.raises(ConfigError, match=r"mesh has no dimension 'rows', only \['hosts'"):
        _sharded(hosts, _stage(0), dp="rows")
    with pytest.raises(ConfigError, match="dp='dp' names dimensions of a mesh, and there is none"):
        zs.shard(_stage(0), dp="dp")


@on_ranks(4, timeout=60)
def test_ranks_that_disagree_about_the_axes_are_told_before_they_meet(rank: int) -> None:
    """Ranks that name other axes are told before any group of the mesh is used."""
    told = []
    mesh, usual = _mesh("batch", "rows"), _mesh("dp", "tp")  # which all ranks make
    mine: list[dict[str, Any]] = [
        {"mesh": mesh, "dp": ("batch", "rows") if rank else "batch"},
        {"mesh": None if rank == 3 else usual},
        {"mesh": _mesh(*(("dp", "pp") if rank == 2 else ("pp", "dp")))},
        {"mesh": "dp, tp" if rank == 1 else usual},
        {"mesh_of": {} if rank == 1 else None},
    ]
    for options in mine:
        with pytest.raises((PlanMismatch, ConfigError)) as refused:
            zs.shard(_stage(0), **options)
        told.append(str(refused.value))
    assert "'rows' is not known" in told[0], (rank, told[0])
    assert "disagree, first about 'mesh'" in told[1], (rank, told[1])
    assert ("Pass the same mesh=" in told[1]) == (rank != 3)
    assert "disagree, first about 'mesh'" in told[2]
    assert ("rank 1 refused: " in told[3]) == ("rank 1 refused: " in told[4]) == (rank != 1)
    assert "mesh is a str, not a DeviceMesh" in told[3]
    assert "mesh_of is {}: give a dict" in told[4]
    assert not any("\n" in one for one in told)


# ------------------------------------------------------------------------------------ verify_every


def _flipped(rank: int, world: int, names: tuple[str, ...]) -> list[str]:
    """Flip one bit of a sharded weight, or of a moment, of the last rank; return the errors."""
    told = []
    for what in ("weight", "moment", "nothing"):
        mesh = _mesh(*names)
        model = _stage(0 if "tp" in names else mesh.get_local_rank("pp"))
        optimizer, engine = _sharded(mesh, model, verify_every=2)
        message = "not found"
        for step in range(4):
            engine.backward(model(*batch(engine.rank, step)))
            if step == 3 and rank == 3:
                shard = next(iter(states_of(engine).stepped_pieces()))
                moment = optimizer.state[shard.tensor]["exp_avg"]
                flipped = {"weight": shard.tensor.detach(), "moment": moment}.get(what)
                if flipped is not None:
                    flipped.view(torch.int32)[0] ^= 1
            try:
                optimizer.step()
            except PlanMismatch as error:
                message = f"{step} {error}"
                break
            optimizer.zero_grad()
        told.append(message)
        if message == "not found":
            engine.close()
    return told


def test_a_flipped_bit_of_a_shard_is_found_by_its_replica_along_tp() -> None:
    for weight, moment, nothing in run_ranks(4, _flipped, ("dp", "tp"), timeout=100):
        assert weight.startswith("3 weights of unit ") and "between tp=0 and tp=1" in weight
        assert moment.startswith("3 optimizer state of ") and "between tp=0 and tp=1" in moment
        assert nothing == "not found"
    for told in run_ranks(4, _flipped, ("pp", "dp"), timeout=100):  # no second copy of a shard
        assert told == ["not found"] * 3


@on_ranks(4, timeout=100)
def test_parts_of_dtensors_are_not_compared_along_tp() -> None:
    """Parts of DTensors differ, and plain parameters are cut elsewhere beside uneven ones."""
    for row in ("zero1", "zero3"):
        train(CASES["empty"], _mesh("dp", "tp"), 2, policy=row, verify_every=1)
