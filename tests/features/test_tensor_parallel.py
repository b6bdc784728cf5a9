"""Tensor parallelism first, sharding after: the same training as in one process, and the same
bits in every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import zeroshard as zs
from tests.fuzz.optimizers import Lamb
from tests.support.harness import on_ranks, run_ranks
from tests.support.tensor_parallel import (
    CASES,
    Case,
    alone,
    difference,
    llama_plan,
    mesh_of,
    micro_batches,
    train,
)
from tests.support.training import (
    differences,
    final_state,
    muon_and_adamw,
    step_plainly,
    two_groups,
)
from zeroshard import ConfigError, PlanMismatch, StateError
from zeroshard.state.local import local_of

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
SMALL = 0.05  # what clips every step

# ------------------------------------------------------------------------------------ the same bits


def _as_alone(rank: int, world: int, name: str, rows: tuple[str, ...], dp: int, steps: int) -> None:
    mesh = mesh_of(dp=dp, tp=world // dp)
    case = CASES[name]
    expected = alone(case, dp, steps, clip=SMALL)[mesh.get_local_rank("dp")]
    first = None
    for row in rows:
        run = train(case, mesh, steps, clip=SMALL, policy=row)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5), row
        assert run.norms == pytest.approx(expected.norms, rel=1e-5), row
        assert difference(run.state, expected.state) < 1e-5, row
        first = first or run
        assert not run.same_bits(first), (row, run.same_bits(first))


@pytest.mark.parametrize("name", ["llama", "uneven", "sequence and loss", "empty"])
def test_training_is_that_of_one_process_and_rows_have_the_same_bits(name: str) -> None:
    rows = ("ddp", "zero2", "zero3") if name == "llama" else ("ddp", "zero3")
    run_ranks(4, _as_alone, name, rows, 2, 3, timeout=100)


def test_tensor_parallelism_alone_trains_as_one_process_does() -> None:
    run_ranks(2, _as_alone, "sequence and loss", ("ddp", "zero3"), 1, 3, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_in_every_row_have_the_same_bits(name: str) -> None:
    run_ranks(4, _as_alone, name, ROWS, 2, 50, timeout=500)


@on_ranks(4, timeout=100)
def test_uneven_micro_batches_are_accumulated_as_in_one_process() -> None:
    """One or two micro-batches of different sizes: added before the ranks' at ddp and zero1, after
    them at zero2 and zero3.
    """
    mesh, case = mesh_of(dp=2, tp=2), CASES["llama"]
    expected = alone(case, 2, 3, most=2, clip=SMALL)[mesh.get_local_rank("dp")]
    for rows in (("ddp", "zero1"), ("zero2", "zero3")):
        runs = [train(case, mesh, 3, most=2, clip=SMALL, policy=row) for row in rows]
        for run in runs:
            assert run.losses == pytest.approx(expected.losses, rel=1e-5), rows
            assert difference(run.state, expected.state) < 1e-5, rows
        assert not runs[0].same_bits(runs[1]), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "uneven", "empty"])
@on_ranks(8, timeout=400)
def test_rows_with_nodes_train_beside_tp_with_the_same_bits(name: str) -> None:
    mesh, case = mesh_of(dp_replicate=2, dp_shard=2, tp=2), CASES[name]
    place = 2 * mesh.get_local_rank("dp_replicate") + mesh.get_local_rank("dp_shard")
    expected = alone(case, 4, 4, clip=SMALL)[place]
    runs = [train(case, mesh, 4, clip=SMALL, policy=row) for row in ("mics", "hpz", "hfsdp")]
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert difference(run.state, expected.state) < 1e-5
        assert not run.same_bits(runs[0])


@on_ranks(4, timeout=100)
def test_discarded_gradients_leave_no_trace() -> None:
    """Discard the gradients of a backward before each step, in every way inside and outside
    no_sync(): the bits of training without it.
    """
    mesh, case = mesh_of(dp=2, tp=2), CASES["uneven"]
    place = mesh.get_local_rank("dp")

    def trained(row: str, ways: Sequence[str]) -> list[torch.Tensor]:
        model = case.model()
        parallelize_module(model, mesh["tp"], case.plan())
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy=row, mesh=mesh)
        told: list[torch.Tensor] = []
        for step, discard in enumerate(ways):
            if discard:
                with engine.no_sync() if step % 2 else nullcontext():
                    model(*next(micro_batches(place, step + 50, case.vocabulary))).backward()
            if discard == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=discard != "zeros")
            model(*next(micro_batches(place, step, case.vocabulary))).backward()
            told.append(engine.clip_grad_norm_(SMALL))
            optimizer.step()
            optimizer.zero_grad()
        told += engine.full_state_dict(rank0_only=False).values()
        engine.close()
        return told

    expected = trained("zero3", [""] * 6)
    for row in ("ddp", "zero2", "zero3"):
        told = trained(row, ["optimizer", "zeros", "by hand"] * 2)
        assert all(torch.equal(*pair) for pair in zip(told, expected, strict=True)), row


# ---------------------------------------------------------------------- owners of whole parameters


@on_ranks(4, timeout=100)
def test_owners_step_parts_by_an_elementwise_optimizer_with_the_bits_of_equal_parts() -> None:
    mesh = mesh_of(dp=2, tp=2)
    for name in ("llama", "uneven", "empty"):
        equal = train(CASES[name], mesh, 3, clip=SMALL)
        for row in ("zero1", "zero3"):
            run = train(CASES[name], mesh, 3, clip=SMALL, policy=row, ownership="whole")
            assert not run.same_bits(equal), (name, row, run.same_bits(equal))


def _attention_alone() -> Mapping[str, ParallelStyle]:
    return {name: style for name, style in llama_plan().items() if "attention" in name}


def _lamb_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Return LAMB of norms, which are whole DTensors, and AdamW of the rest."""
    norms, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        (norms if "norm" in name else rest).append(parameter)
    return [Lamb(norms, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


BESIDE: dict[str, tuple[Case, Any]] = {
    "plain matrices": (replace(CASES["llama"], plan=_attention_alone), muon_and_adamw),
    "whole DTensors": (CASES["sequence and loss"], _lamb_and_adamw),
}


def _step_on(case: Case, model: nn.Module, engine: zs.Engine, step: int) -> float:
    ((x, y),) = micro_batches(engine.rank, step, case.vocabulary)
    with case.around_loss():
        loss = model(x, y)
        engine.backward(loss)
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def _by_owners(rank: int, world: int, name: str, folder: Path) -> list[str]:
    """Return the differences between owners of whole parameters, in another row from a checkpoint
    on, and plain torch with the gradients of an engine.
    """
    mesh, found = mesh_of(dp=2, tp=2), list[str]()
    case, make = BESIDE[name]
    passes = parallelize_module(case.model(), mesh["tp"], case.plan())
    named, told = dict(passes.named_parameters()), list[float]()
    assert any(isinstance(p, DTensor) for p in named.values())
    parts = {id(p): nn.Parameter(local_of(p).detach().clone()) for p in named.values()}
    optimizers: list[Any] = [
        type(one)([parts[id(p)] for p in group["params"]], lr=group["lr"])
        for one in make(named.items())
        for group in one.param_groups
    ]
    engine = zs.shard(passes, policy="ddp", mesh=mesh)
    pairs = [(p, parts[id(p)]) for p in named.values()]
    for step in range(3):
        loss = _step_on(case, passes, engine, step)
        told += [
            loss,
            step_plainly(engine, pairs, lambda: [o.step() for o in optimizers], clip=SMALL),
        ]
    expected = final_state(passes, engine)
    for row, first, ownership in (("zero3", 0, "whole"), ("zero1", 2, "whole_by_cost")):
        model = parallelize_module(case.model(), mesh["tp"], case.plan())
        made = make(model.named_parameters())
        owned: Any = {"ownership": ownership}
        engine = zs.shard(model, made, policy=row, mesh=mesh, **owned)
        if first:
            zs.load(folder, engine)
        losses = []
        for step in range(first, 3):
            losses += [_step_on(case, model, engine, step), float(engine.clip_grad_norm_(SMALL))]
            for one in made:
                one.step()
            for one in made:
                one.zero_grad()
            if step == 1:
                zs.save(folder, engine, step=2)
        found += differences(final_state(model, engine), expected, row)
        found += [] if losses == told[2 * first :] else [f"{row}: {losses} and {told}"]
    return found


@pytest.mark.parametrize("name", BESIDE)
def test_owners_step_what_is_whole_beside_parts_as_plain_torch(name: str, tmp_path: Path) -> None:
    assert not any(run_ranks(4, _by_owners, name, tmp_path, timeout=100))


@on_ranks(4)
def test_a_part_of_a_matrix_is_not_stepped_as_a_matrix() -> None:
    mesh = mesh_of(dp=2, tp=2)
    model = parallelize_module(CASES["llama"].model(), mesh["tp"], llama_plan())
    named = dict(model.named_parameters())
    matrices = [p for one, p in named.items() if p.ndim == 2 and "blocks.1" in one]
    rest = [p for p in named.values() if not any(p is one for one in matrices)]
    made = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    with pytest.raises(ConfigError) as refused:
        zs.shard(model, made, mesh=mesh, ownership="whole")
    engine = zs.shard(model, mesh=mesh, ownership="whole")
    with pytest.raises(ConfigError) as later:
        engine.attach(made)
    engine.close()
    told = str(refused.value)
    assert "'blocks.1.attention.q_proj.weight' is a DTensor" in told and "Muon goes by" in told
    assert "\n" not in told and str(later.value) == told


# ------------------------------------------------------------------- precisions, tiers, codecs, ...


@on_ranks(4, timeout=110)
def test_precisions_tiers_and_codecs_work_beside_tp(tmp_path: Path) -> None:
    mesh, case = mesh_of(dp=2, tp=2), CASES["uneven"]
    plain = train(case, mesh, 2, clip=SMALL)
    host = zs.Offload(optimizer="host", grad="host", weight="host")
    assert not train(case, mesh, 2, clip=SMALL, offload=host).same_bits(plain)
    disk = zs.Offload(optimizer="disk", weight="disk", disk_path=str(tmp_path))
    assert not train(case, mesh, 2, clip=SMALL, offload=disk).same_bits(plain)
    coded = train(case, mesh, 2, comm=zs.Comm(weight_codec="int8", grad_codec="int8"))
    assert 0 < difference(coded.state, plain.state) < 0.1
    for precision in ("bf16", "fp16"):
        runs = [train(case, mesh, 2, policy=row, precision=precision) for row in ("ddp", "zero3")]
        assert not runs[0].same_bits(runs[1]), precision
        assert runs[0].losses == pytest.approx(plain.losses, rel=0.02), precision


def _sharded(
    mesh: DeviceMesh, row: str = "zero3", name: str = "llama", **options: Any
) -> tuple[nn.Module, zs.Engine]:
    model = parallelize_module(CASES[name].model(), mesh["tp"], CASES[name].plan())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return model, zs.shard(model, optimizer, policy=row, mesh=mesh, **options)


def _step(model: nn.Module, engine: zs.Engine, step: int) -> None:
    engine.backward(model(*next(micro_batches(engine.rank, step, 37))))
    assert engine.optimizer is not None
    engine.optimizer.step()
    engine.optimizer.zero_grad()


@on_ranks(4, timeout=100)
def test_frozen_parameters_and_averages_work_beside_tp() -> None:
    """Frozen DTensors stay, and an average is that of one process."""
    mesh, states = mesh_of(dp=2, tp=2), []
    for row in ("ddp", "zero3"):
        model = parallelize_module(CASES["llama"].model(), mesh["tp"], llama_plan())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gate" not in name)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        engine = zs.shard(model, optimizer, policy=row, mesh=mesh)
        ema = zs.EMA(engine, 0.5)
        for step in range(2):
            _step(model, engine, step)
            ema.update()
        with ema.swapped():
            states.append(engine.full_state_dict(rank0_only=False))
        states.append(final_state(model, engine))
    before = CASES["llama"].model().state_dict()
    for averaged, state in (states[:2], states[2:]):
        for name, value in state.items():
            assert torch.equal(value, states[1][name])
            assert torch.equal(averaged[name], states[0][name])
            assert torch.equal(value, before[name]) == ("gate" in name), name
            if "gate" not in name:
                assert not torch.equal(value, averaged[name]), name


@on_ranks(4, timeout=100)
def test_join_works_beside_tp() -> None:
    """Ranks along tp end together; others go on, shadowed."""
    mesh, states = mesh_of(dp=2, tp=2), []
    for row in ("ddp", "zero3"):
        model, engine = _sharded(mesh, row)
        with engine.join():
            for step in range(1 + 2 * engine.rank):
                _step(model, engine, step)
        states.append(engine.full_state_dict(rank0_only=False))
        engine.close()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@on_ranks(2, timeout=100)
def test_the_state_of_an_optimizer_that_has_begun_is_cut_with_its_dtensors() -> None:
    """An optimizer that has stepped DTensors before shard() brings its state along."""
    mesh, states = mesh_of(dp=1, tp=2), []
    for begun in (False, True):
        model = parallelize_module(CASES["uneven"].model(), mesh["tp"], llama_plan())
        # torch's foreach steps refuse DTensors beside plain parameters
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)
        if begun:
            model(*next(micro_batches(0, 0, 37))).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine = zs.shard(model, optimizer, mesh=mesh)
        for step in range(begun, 2):
            _step(model, engine, step)
        states.append(final_state(model, engine))
    assert difference(states[0], states[1]) < 1e-6


# ------------------------------------------------------------------------------------ whole tensors


def _without_row(model: nn.Module, row: int) -> torch.Tensor:
    value = model.get_submodule("embed").weight.detach().clone()
    value[row] = 0
    return value


def _holds(engine: zs.Engine, expected: Mapping[str, torch.Tensor]) -> None:
    state = engine.full_state_dict(rank0_only=False)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@on_ranks(4, timeout=100)
def test_parameters_and_gradients_are_read_edited_and_loaded_whole(rank: int, row: str) -> None:
    mesh, case = mesh_of(dp=2, tp=2), CASES["uneven"]
    original, (model, engine) = case.model(), _sharded(mesh, row, "uneven")
    parameters = dict(model.named_parameters())
    for number in (0, 1):
        (original(*next(micro_batches(number, 0, 37))) / 2).backward()
    engine.backward(model(*next(micro_batches(engine.rank, 0, 37))))
    for name, parameter in original.named_parameters():
        grad = engine.full_grad(parameters[name])
        assert grad is not None and not isinstance(grad, DTensor)
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    state = engine.full_state_dict()
    assert (rank == 0) == bool(state)
    with engine.gathered():
        for name, value in original.state_dict().items():
            here = parameters[name]
            if isinstance(here, DTensor):
                assert here.shape == value.shape
                here = here.full_tensor()
            assert torch.equal(here, value), name
            assert rank != 0 or torch.equal(state[name], value)
    with engine.gathered(writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    twice = {name: value * 2 for name, value in original.state_dict().items()}
    _holds(engine, twice)
    model.load_state_dict(original.state_dict())  # whole tensors
    _holds(engine, original.state_dict())
    with (
        pytest.raises(PlanMismatch, match=r"parameter norm.weight differs between replicas"),
        engine.gathered(writeback=True),
        torch.no_grad(),
    ):
        if rank == 0:  # and not its replica along tp
            model.get_submodule("norm").weight.zero_()
    _holds(engine, original.state_dict())
    with (
        pytest.raises(StateError, match=r"'head.weight' is a DTensor and was edited on one rank"),
        engine.gathered(writeback=True),
        torch.no_grad(),
    ):
        if rank == 0:  # which has half of it
            parameters["head.weight"].zero_()
    with engine.gathered(writeback=True), torch.no_grad():
        embed = parameters["embed.weight"]
        assert isinstance(embed, DTensor)
        whole = embed.full_tensor()
        whole[1] = 0  # which lies on one rank along tp
        embed.copy_(distribute_tensor(whole, embed.device_mesh, embed.placements))
    _holds(engine, original.state_dict() | {"embed.weight": _without_row(original, 1)})
    other = {name: value + (name == "norm.weight") for name, value in original.state_dict().items()}
    with pytest.raises(PlanMismatch, match=r"the numbers of norm.weight differs between replicas"):
        model.load_state_dict(other if rank % 2 else original.state_dict())
    model.load_state_dict(original.state_dict())
    model.to("cpu")  # changes nothing, and so is allowed
    with pytest.raises(StateError, match="cannot be changed"):
        model.half()
    engine.close()
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    for name, value in original.state_dict().items():
        here = parameters[name]
        assert torch.equal(here.full_tensor() if isinstance(here, DTensor) else here, value)


@on_ranks(4, timeout=100)
def test_the_states_of_a_parameter_are_whole() -> None:
    """ParameterStates reads and sets whole masters, gradients and optimizer state."""
    model, engine = _sharded(mesh_of(dp=2, tp=2), "zero2", "uneven")
    parameter = model.get_submodule("blocks.0").down_proj.weight
    states = zs.ParameterStates(engine, parameter)
    before = CASES["uneven"].model().get_submodule("blocks.0").down_proj.weight.detach()
    assert torch.equal(states.master(), before)
    engine.backward(model(*next(micro_batches(engine.rank, 0, 37))))
    assert torch.equal(states.grad(), engine.full_grad(parameter))
    states.set_grad(torch.ones_like(before))
    assert torch.equal(engine.full_grad(parameter), torch.ones_like(before))
    engine.optimizer.step()
    torch.testing.assert_close(states.state("exp_avg"), torch.full_like(before, 0.1))
    states.set_master(before * 3)
    assert torch.equal(
        engine.full_state_dict(rank0_only=False)["blocks.0.down_proj.weight"], before * 3
    )


def _loaded(rank: int, world: int, directory: str) -> int:
    """Each rank reads its own part of what tensor parallelism cuts, and of it its own shard."""
    model, engine = _sharded(mesh_of(dp=2, tp=2), "zero3", "uneven")
    with engine.gathered(writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = zs.load_pretrained(engine, directory)
    _holds(engine, load_file(f"{directory}/model.safetensors"))
    engine.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    whole = zs.load_pretrained(model, directory)
    for name, value in load_file(f"{directory}/model.safetensors").items():
        here = model.get_parameter(name)
        assert torch.equal(here.full_tensor() if isinstance(here, DTensor) else here, value)
    assert whole.bytes_read == sum(4 * local_of(p).numel() for p in model.parameters())
    return report.bytes_read


def test_load_pretrained_reads_the_bytes_of_this_rank_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    state = {
        name: torch.randn_like(value)
        for name, value in CASES["uneven"].model().state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    read = run_ranks(4, _loaded, str(tmp_path), timeout=100)
    everything = 4 * sum(value.numel() for value in state.values())
    norms = 4 * sum(value.numel() for name, value in state.items() if "norm" in name)
    # the norms are read by both ranks along tp; a shard's first and last row are read whole
    assert everything + norms <= sum(read) < 1.2 * everything
    assert max(read) < 0.4 * everything


@on_ranks(2, timeout=100)
def test_a_deferred_model_may_be_cut_before_it_has_values() -> None:
    states = []
    mesh = mesh_of(dp=1, tp=2)
    for deferred in (False, True):
        with zs.deferred_init() if deferred else nullcontext():
            model = CASES["llama"].model()
        parallelize_module(model, mesh["tp"], llama_plan())
        optimizer = torch.optim.AdamW(model.parameters())
        engine = zs.shard(model, optimizer, mesh=mesh)
        _step(model, engine, 0)
        states.append(final_state(model, engine))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# ----------------------------------------------------------------------------------- bytes, and use


@on_ranks(4, timeout=100)
def test_memory_and_traffic_are_those_of_the_local_tensors() -> None:
    """Memory and traffic are those of a model of the local tensors."""
    mesh = mesh_of(dp=2, tp=2)
    reports = []
    for local in (False, True):
        model = parallelize_module(CASES["uneven"].model(), mesh["tp"], llama_plan())
        if local:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if isinstance(parameter, DTensor):
                        module._parameters[name] = nn.Parameter(parameter.to_local().detach())
        optimizer = torch.optim.AdamW(model.parameters())
        used = mesh["dp"] if local else mesh
        engine = zs.shard(model, optimizer, units=["blocks.0", "blocks.1"], mesh=used)
        engine.reset_traffic()
        with engine.gathered():
            inside = engine.memory()
        reports.append((engine.memory(), inside, engine.traffic(), engine.units))
        engine.close()
    assert reports[0] == reports[1]


@on_ranks(4, timeout=100)
def test_a_dtensor_is_gathered_where_it_is_used_and_refused_where_it_cannot_be() -> None:
    """A released DTensor answers for itself."""
    mesh, states = mesh_of(dp=2, tp=2), []
    for row in ("ddp", "zero3"):
        model, engine = _sharded(mesh, row)
        head = model.get_submodule("head").weight
        for step in range(2):
            loss = model(*next(micro_batches(engine.rank, step, 37)))
            engine.backward(loss + head.to_local().square().sum())
            assert engine.optimizer is not None
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if row == "zero3":
            assert type(head).__name__ == "ReleasedDTensor" and head.shape == (48, 32)
            for look in (head.full_tensor, head.to_local, lambda head=head: head + 1):
                with pytest.raises(StateError, match="rests sharded"), torch.no_grad():
                    look()
        states.append(engine.full_state_dict(rank0_only=False))
        engine.close()
        assert type(head) is DTensor
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# ----------------------------------------------------------------------------------- Transformers


def _tokens(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 48, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def _from_transformers(directory: str, mesh: DeviceMesh) -> nn.Module:
    """Return a model that Transformers has cut. By itself it takes all ranks of the job as 'tp'."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if mesh.size() == mesh["tp"].size():
        return AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(directory)
    plan = model._expand_parallel_plan(dict(model.tp_plan))
    return apply_tensor_parallelism(model, mesh["tp"], plan)


def _tp_plan(rank: int, world: int, directory: str, dp: int) -> None:
    from transformers import AutoModelForCausalLM

    mesh = mesh_of(dp=dp, tp=world // dp)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        for number in range(dp):
            (plain(**_tokens(number, step)).loss / dp).backward()
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), SMALL))
        optimizer.step()
        optimizer.zero_grad()
    states = []
    for row in ("ddp", "zero3"):
        model = _from_transformers(directory, mesh)
        model(**_tokens(0, 0))  # Transformers hangs its own hooks on gradients in the first forward
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        engine = zs.shard(model, optimizer, policy=row, mesh=mesh)
        for step in range(3):
            engine.backward(model(**_tokens(engine.rank, step)).loss)
            norm = float(engine.clip_grad_norm_(SMALL))
            optimizer.step()
            optimizer.zero_grad()
        assert norm == pytest.approx(expected, rel=1e-5), row
        with torch.no_grad():
            loss = float(model(**_tokens(0, 0)).loss)
        states.append(final_state(model, engine))
        assert loss == pytest.approx(float(plain(**_tokens(0, 0)).loss), rel=1e-5), row
        assert difference(states[-1], plain.state_dict()) < 1e-5, row
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


_SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_tp_plan_of_transformers_trains_as_one_process_does(
    family: str, dp: int, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    run_ranks(2 * dp, _tp_plan, str(tmp_path), dp, timeout=300)


# --------------------------------------------------------------------------------------- bad inputs


@on_ranks(4)
def test_dtensors_that_do_not_fit_the_mesh_are_refused_in_one_line(rank: int) -> None:
    """Parameters that shard() cannot take, each with what it says of them."""
    mesh = mesh_of(dp=2, tp=2)
    unnamed = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp"))
    given: list[tuple[DeviceMesh, Placement, DeviceMesh | None]] = [
        (mesh["tp"], Shard(0), mesh["dp"]),
        (mesh["tp"], Shard(0), None),
        (mesh["dp"], Shard(0), mesh),
        (unnamed, Shard(0), mesh),
        (mesh["tp"], Partial(), mesh),
        (mesh["tp"], _StridedShard(0, split_factor=2), mesh),
        (turned["tp"], Shard(0), mesh),
    ]
    told = []
    for where, placement, over in given:
        model = nn.Linear(4, 4)
        local = torch.full((4 if placement.is_partial() else 2, 4), 7.0)
        tensor = DTensor.from_local(local, where, [placement], run_check=False)
        model.weight = nn.Parameter(tensor)
        with pytest.raises(ConfigError) as refused:
            zs.shard(model, torch.optim.AdamW(model.parameters()), mesh=over)
        assert model.weight.to_local()[0, 0] == 7 and type(model.bias) is nn.Parameter
        told.append(str(refused.value))
    assert [one.removeprefix("parameter 'weight' is a DTensor ") for one in told] == [
        "along 'tp', and shard() was given a mesh of ['dp']: pass mesh= with that axis, too",
        "along 'tp', and shard() was given no mesh: pass mesh= with that axis, too",
        "along 'dp', a data parallel axis of the mesh given to shard(), which cuts parameters"
        " along it itself: give it the model before fully_shard() or distribute_tensor()",
        "on a mesh without names: make it with mesh_dim_names",
        "placed as P(sum): give shard() parameters that are Shard or Replicate, as"
        " parallelize_module() makes them",
        "placed as _S(0, 2): give shard() parameters that are Shard or Replicate, as"
        " parallelize_module() makes them",
        f"along 'tp', there over the ranks {[rank % 2, rank % 2 + 2]}, and in the mesh given to"
        f" shard() over {[rank // 2 * 2, rank // 2 * 2 + 1]}: use one mesh for both",
    ]


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@on_ranks(4)
def test_tensor_parallelism_after_shard_is_refused_and_changes_nothing(row: str) -> None:
    """Tensor parallelism after shard() changes nothing, and training goes on."""
    mesh, case = mesh_of(dp=2, tp=2), CASES["llama"]
    model = case.model()
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), policy=row, mesh=mesh)
    kinds = [type(parameter) for parameter in model.parameters()]
    for module, plan in ((model, llama_plan()), (model.get_submodule("head"), ColwiseParallel())):
        with pytest.raises(StateError, match=r"call parallelize_module\(\) before shard\(\)"):
            parallelize_module(module, mesh["tp"], plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    engine.backward(model(*next(micro_batches(engine.rank, 0, case.vocabulary))))
    assert engine.optimizer is not None
    engine.optimizer.step()
    assert [type(parameter) for parameter in model.parameters()] == kinds
