"""Expert parallelism: `mesh_of` gives experts a data parallel mesh of their own, the ranks that
hold the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.support.experts import (
    NUM_EXPERTS,
    Listed,
    Mixture,
    Stacked,
    in_turn,
    local_part,
    whole_mixture,
)
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    VOCABULARY,
    State,
    differences,
    equal,
    final_state,
    muon_and_adamw,
    step_plainly,
    two_groups,
)
from zeroshard.errors import PlanMismatch

ROWS = ("ddp", "zero1", "zero2", "zero3")
KINDS: dict[str, type[nn.Module]] = {"stacked": Stacked, "listed": Listed}
PATTERN = "*.experts"
STEPS = 3
SMALL = 0.2  # what clips every step


def _mesh(ep: int = 2, world: int = 4) -> DeviceMesh:
    return init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels, and an expert per sequence that gets none of its tokens: the last
    expert gets none of ranks 0 and 1, and nobody's in the first batch.
    """
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    last = NUM_EXPERTS - 1
    return tokens[:, :-1], tokens[:, 1:], torch.full((2,), last if rank < 2 or not number else 0)


def _plain(
    kind: type[nn.Module], world: int, clip: float | None, micro_batches: int
) -> tuple[list[float], State]:
    """Train in one process with all experts on the batches of all ranks."""
    model = whole_mixture(kind)
    optimizer, losses = two_groups(model), []
    for step in range(STEPS):
        for micro in range(micro_batches):
            batches = [_batch(rank, step * micro_batches + micro) for rank in range(world)]
            loss = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
            (loss / micro_batches).backward()
        losses.append(float(loss))
        if clip is not None:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def _sharded(
    kind: type[nn.Module], experts: DeviceMesh, row: str, **options: Any
) -> tuple[Mixture, torch.optim.Optimizer, zs.Engine]:
    """Return this rank's part of the model, sharded."""
    model = Mixture(kind, experts.get_group("ep"))
    state = whole_mixture(kind).state_dict()
    place, num_ranks = experts.get_local_rank("ep"), experts.size(1)
    model.load_state_dict(local_part(state, kind, place, num_ranks))
    optimizer = options.pop("optimizer", two_groups)(model)
    options = {"policy": row, "mesh_of": {PATTERN: experts}, **options}
    return model, optimizer, zs.shard(model, optimizer, **options)


def _in_row(
    kind: type[nn.Module], mesh: DeviceMesh, row: str, clip: float | None, micro_batches: int,
    **options: Any,
) -> tuple[list[float], State]:  # fmt: skip
    model, optimizer, engine = _sharded(kind, mesh, row, **options)
    losses = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(*_batch(engine.rank, step * micro_batches + micro))
            if micro < micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss / micro_batches)
            else:
                engine.backward(loss / micro_batches)
        norm = 0.0 if clip is None else float(engine.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses += [float(mean) / engine.world, norm]
    full = final_state(model, engine)
    return losses, full


def _train(
    rank: int, world: int, kind_name: str, ep: int, clip: float | None, micro_batches: int,
    rows: tuple[str, ...], options: dict[str, Any],
) -> list[float]:  # fmt: skip
    kind, mesh = KINDS[kind_name], _mesh(ep, world)
    losses, whole = _plain(kind, world, clip, micro_batches)
    expected = local_part(whole, kind, mesh.get_local_rank("ep"), ep)
    runs = {row: _in_row(kind, mesh, row, clip, micro_batches, **options) for row in rows}
    for row, (seen, state) in runs.items():
        assert seen[::2] == pytest.approx(losses, rel=1e-5), row
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=row + name)
    for row in rows:
        # inside no_sync they add micro-batches before ranks, the others ranks before micro-batches
        adds_first = micro_batches > 1 and row in ("ddp", "zero1")
        other = runs["ddp" if adds_first else rows[-1]]
        assert runs[row][0] == other[0], row
        assert all(torch.equal(value, other[1][name]) for name, value in runs[row][1].items()), row
    return runs[rows[-1]][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("clip", "micro_batches"), [(None, 1), (SMALL, 1), (None, 2)], ids=["plain", "clip", "no_sync"]
)
def test_divided_experts_train_as_one_process_with_all_of_them(
    kind: str, clip: float | None, micro_batches: int
) -> None:
    answers = run_ranks(4, _train, kind, 2, clip, micro_batches, ROWS, {}, timeout=100)
    assert all(losses == answers[0] for losses in answers)


@pytest.mark.slow
@on_ranks(4, timeout=300)
def test_any_division_of_experts_and_any_transport_train_alike(rank: int, world: int) -> None:
    """Every rank with its own experts, and all with the same; over gloo; away from the device; as
    one stage of two.
    """
    small = {"clip": SMALL, "micro_batches": 1, "rows": ("ddp", "zero3")}
    every: list[tuple[int, dict[str, Any]]] = [
        (4, {}),
        (1, {}),
        (2, {"comm": zs.Comm(transport="gloo")}),
        (4, {"comm": zs.Comm(transport="gloo")}),
        (2, {"comm": zs.Comm(node_size=2)}),
    ]
    for ep, options in every:
        _train(rank, world, "stacked", ep, options=options, **small)


@on_ranks(4)
def test_experts_are_loaded_by_their_holders_and_must_be_alike_there(rank: int) -> None:
    """Ranks load other experts where they hold others, and the same where they hold the same."""
    mesh = _mesh()
    model, _, engine = _sharded(Stacked, mesh, "zero2")
    state = local_part(whole_mixture(Stacked).state_dict(), Stacked, mesh.get_local_rank("ep"), 2)
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    loaded = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(loaded[name], 2 * value) for name, value in state.items())
    with pytest.raises(zs.PlanMismatch, match=r"'the numbers of .*experts"):
        model.load_state_dict({k: v + ("experts" in k and rank == 2) for k, v in state.items()})
    engine.close()


@pytest.mark.slow
@on_ranks(4, timeout=300)
def test_experts_go_with_tiers_codecs_and_rows_of_nodes(tmp_path: Path) -> None:
    """Tiers, codecs, half precision, rows of nodes and the comparison of replicas."""
    mesh = _mesh()
    away = zs.Offload(weight="host", grad="host", optimizer="host")
    disk = zs.Offload(optimizer="disk", disk_path=str(tmp_path))
    plain = _in_row(Stacked, mesh, "zero3", None, 1)
    for row, options in (
        ("zero3", {"offload": away}),
        ("zero2", {"offload": disk}),
        ("ddp", {"verify_every": 1}),
        ("mics", {"comm": zs.Comm(node_size=2), "verify_every": 1}),
        ("hpz", {"comm": zs.Comm(node_size=2)}),
        ("hfsdp", {"comm": zs.Comm(node_size=2), "verify_every": 1}),
    ):
        run = _in_row(Stacked, mesh, row, None, 1, **options)
        assert run[0] == pytest.approx(plain[0], rel=1e-5), (row, options)
    for options in ({"precision": "bf16"}, {"comm": zs.Comm(weight_codec="int8")}):
        run = _in_row(Stacked, mesh, "zero3", None, 1, **options)
        assert run[0] == pytest.approx(plain[0], rel=0.05), options


@pytest.mark.slow
@on_ranks(8, timeout=200)
def test_averages_of_experts_over_two_nodes_are_those_of_ddp(rank: int, world: int) -> None:
    """The experts of 8 ranks in pairs: their own mesh has two ranks on each of two nodes."""
    averages = {}
    for row, comm in (("ddp", {}), ("zero3", {"node_size": 4}), ("hfsdp", {"node_size": 4})):
        model, optimizer, engine = _sharded(Stacked, _mesh(2, world), row, comm=zs.Comm(**comm))
        ema = zs.EMA(engine, 0.5)
        for step in range(STEPS):
            engine.backward(model(*_batch(rank, step)))
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        trained = engine.full_state_dict(rank0_only=False)
        with ema.swapped():
            averages[row] = engine.full_state_dict(rank0_only=False)
        assert not any(torch.equal(value, trained[name]) for name, value in averages[row].items())
        engine.close()
    for row, state in averages.items():
        torch.testing.assert_close(state, averages["ddp"], rtol=1e-4, atol=2e-6, msg=row)


@on_ranks(4, timeout=60)
def test_experts_lie_beside_stages(rank: int) -> None:
    """Two stages beside each other, whose two ranks divide the experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    experts = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    model = Mixture(Stacked, experts.get_group("ep"))
    state = local_part(whole_mixture(Stacked).state_dict(), Stacked, rank % 2, 2)
    model.load_state_dict(state)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, mesh=mesh, mesh_of={PATTERN: experts}, stage=2)
    whole = whole_mixture(Stacked)
    batches = [_batch(one, 0) for one in (0, 1)]
    whole(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
    expected = 2**0.5 * nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    engine.backward(model(*_batch(engine.rank, 0)))
    assert engine.world == 2
    assert float(engine.clip_grad_norm_(SMALL)) == pytest.approx(float(expected), rel=1e-5)
    optimizer.step()
    engine.close()


# ranks 0 and 2 hold the same experts, and 1 and 3; of the second orders, not all run
ORDERS: list[dict[int, tuple[int, ...]]] = [
    {0: (0, 1, 2), 1: (2, 0, 1), 2: (0, 1, 2), 3: (2, 0, 1)},
    {0: (0, 1), 1: (2, 0, 1), 2: (0, 1), 3: (2, 0, 1)},
]


@on_ranks(4, timeout=60)
def test_ranks_with_other_experts_may_run_them_in_another_order(rank: int) -> None:
    for orders in ORDERS:
        expected = in_turn(rank, "ddp", orders)
        for row, transport in (("zero3", "gloo"), ("zero2", "gloo"), ("zero3", "shared_memory")):
            comm = zs.Comm.model_validate({"transport": transport})
            assert equal(in_turn(rank, row, orders, comm=comm), expected), (row, transport, orders)


def _whole_after(rank: int, world: int, divided: bool) -> list[str]:
    """Train experts, some of which get no token, right after whole weights were brought together:
    `divided`, where the other rank that holds them has tokens for them; else on two ranks of which
    one has no batch.
    """

    def reload(engine: zs.Engine) -> None:
        engine.offload_states()
        engine.reload_states()

    def trained(row: str, before: Callable[[zs.Engine], None]) -> State:
        options = {"comm": zs.Comm(transport="gloo"), "units": [nn.Linear], "stall_timeout_s": 20}
        if divided:
            model, optimizer, engine = _sharded(Listed, _mesh(), row, **options)
        else:
            model = whole_mixture(Listed)
            optimizer = two_groups(model)
            engine = zs.shard(model, optimizer, policy=row, **options)
        for number in (1, 2):
            before(engine)
            with nullcontext() if divided else engine.join():
                for _ in range(divided or rank == 0):
                    engine.backward(model(*_batch(rank, number)))
                    optimizer.step()
                    optimizer.zero_grad()
        return final_state(model, engine)

    found = []
    for row in ("ddp", "zero1"):
        expected = trained(row, lambda engine: None)
        for before in (zs.Engine.reset, reload):
            found += differences(trained(row, before), expected, f"{row}, {before.__name__}()")
    return found


@pytest.mark.parametrize("divided", [True, False], ids=["divided", "in join()"])
def test_experts_without_a_token_are_not_gathered_in_a_step_after_a_reset(divided: bool) -> None:
    assert not any(run_ranks(4 if divided else 2, _whole_after, divided, timeout=90))


# ---------------------------------------------------------------------- owners of whole parameters


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return muon_and_adamw(model.named_parameters())


RULES: dict[str, Callable[[nn.Module], Any]] = {"muon": _muon, "adamw": two_groups}
Options = list[tuple[str, dict[str, Any]]]
WHOLE: dict[str, Any] = {"ownership": "whole"}
HALF = {"offload": {"optimizer": "host", "grad": "host", "fraction": 0.5}}
OWNED: Options = [("ddp", {}), ("zero1", {}), ("zero2", {}), ("zero3", {}), ("zero3", HALF)]
NODES = {"comm": zs.Comm(node_size=2)}
MORE: Options = [  # where experts may be without a token
    ("zero3-keep", {}),
    ("hpz", NODES),
    ("zero3", {"accumulation_budget": "10KiB"}),
    ("zero2", {"comm": zs.Comm(transport="gloo")}),
    ("zero2", {"offload": {"optimizer": "host", "delayed_update": 9}}),
]
BY_COST: Options = [(row, {"ownership": "whole_by_cost"}) for row in ("zero1", "zero3")]


def _stepped_plainly(rule: str, mesh: DeviceMesh) -> tuple[list[float], State]:
    """Step this rank's part of the model by plain torch, with the gradients of an engine."""
    passes, _, engine = _sharded(Listed, mesh, "ddp", optimizer=lambda model: None)
    model = Mixture(Listed, mesh.get_group("ep"))
    model.load_state_dict(engine.full_state_dict(rank0_only=False))
    made, losses = RULES[rule](model), []
    every = made if isinstance(made, list) else [made]
    pairs = [*zip(passes.parameters(), model.parameters(), strict=True)]
    for step in range(STEPS):
        loss = passes(*_batch(engine.rank, step))
        engine.backward(loss)
        norm = step_plainly(engine, pairs, lambda: [one.step() for one in every], clip=SMALL)
        losses += [float(loss), norm]
    return losses, final_state(passes, engine)


def _by_owners(rank: int, world: int, rule: str, ep: int, options: Options) -> list[str]:
    """Return the differences from plain torch of runs with owners in rows with `options`."""
    mesh, found = _mesh(ep, world), list[str]()
    expected, state = _stepped_plainly(rule, mesh)
    sizes = {value.numel() for value in state.values()}
    every = sum(p.numel() for p in whole_mixture(Listed).parameters())
    for row, more in options:
        given: dict[str, Any] = WHOLE | {"optimizer": RULES[rule]} | more
        model, _, engine = _sharded(Listed, mesh, row, **given)
        assert engine.optimizer is not None
        losses = []
        for step in range(STEPS):
            loss = model(*_batch(rank, step))
            engine.backward(loss)
            losses += [float(loss), float(engine.clip_grad_norm_(SMALL))]
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        groups = engine.optimizer.param_groups
        told = engine.explain_optimizer().groups
        if "offload" not in more:  # else pieces rest elsewhere
            owned = [[p.numel() for p in group["params"]] for group in groups]
            assert [one.elements[rank] for one in told] == [sum(sizes) for sizes in owned], row
            assert rule == "adamw" or {*owned[0]} <= {0, *sizes}, (row, owned)
        assert (row != "ddp") is (sum(sum(one.elements) for one in told) == every), row
        label = f"{row} {more}"
        found += differences(final_state(model, engine), state, label)
        found += [] if losses == expected else [f"{label}: {losses} and {expected}"]
    return found


@pytest.mark.parametrize("rule", RULES)
def test_experts_of_owners_are_stepped_as_by_plain_torch(rule: str) -> None:
    options = OWNED + (BY_COST if rule == "muon" else [])
    assert not any(run_ranks(4, _by_owners, rule, 2, options, timeout=100))


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_experts_of_owners_are_in_every_row_and_division(rule: str, ep: int) -> None:
    assert not any(run_ranks(4, _by_owners, rule, ep, OWNED + MORE, timeout=200))


# ------------------------------------------------------------------------------ what an engine says


def _whole(rank: int, world: int) -> tuple[int, int]:
    """Whole parameters, gradients and edits are those of the ranks with the same experts. Return
    what this rank holds, and what it got from rank 0 alone.
    """
    mesh = _mesh()
    place = mesh.get_local_rank("ep")
    model, optimizer, engine = _sharded(Stacked, mesh, "zero3")
    whole = whole_mixture(Stacked)
    expected = local_part(whole.state_dict(), Stacked, place, 2)
    assert engine.units["layers.0.experts"] == engine.units["layers.1.experts"]
    state = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    batches = [_batch(one, 1) for one in range(world)]
    whole(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
    engine.backward(model(*_batch(rank, 1)))
    grad = engine.full_grad(model.layers[0].experts.up)
    full = whole.layers[0].experts.up.grad
    assert grad is not None and full is not None
    torch.testing.assert_close(grad, full[2 * place : 2 * place + 2], rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    up = model.layers[1].experts.up
    with engine.gathered(up, writeback=True):
        if rank < 2:  # the first rank with these experts
            up.data.fill_(float(place))
    with engine.gathered():
        assert (up == place).all()
    differently = pytest.raises(zs.StateError, match=r"edited differently on ranks 0 and \[2\]")
    with differently, engine.gathered(up, writeback=True):
        up.data.fill_(float(rank))
    with pytest.raises(zs.ConfigError, match="mesh_of"), engine.join():
        pass
    held = sum(engine.memory().at_rest.values())
    assert engine.traffic().bytes["reduce_scatter"] > 0
    kept = len(engine.full_state_dict())
    engine.close()
    return held, kept


def test_whole_parameters_are_those_of_the_ranks_with_the_same_experts() -> None:
    answers = run_ranks(4, _whole, timeout=60)
    kept = [kept for _, kept in answers]
    assert kept[0] == kept[1] > 0 and kept[2:] == [0, 0]


@on_ranks(4, timeout=60)
def test_after_an_exception_reset_brings_both_meshes_together(rank: int) -> None:
    """After an exception on one rank all come together again, over both meshes."""
    mesh = _mesh()
    model, optimizer, engine = _sharded(Stacked, mesh, "zero2")
    told = ""
    try:
        loss = model(*_batch(rank, 0))
        if rank == 3:
            raise ValueError("a bad batch")
        engine.backward(loss) if rank < 0 else optimizer.step()
    except (ValueError, zs.StateError) as error:
        told = str(error)
    engine.reset()
    engine.backward(model(*_batch(rank, 1)))
    optimizer.step()
    engine.close()
    assert told == "a bad batch" if rank == 3 else "engine.reset()" in told


# --------------------------------------------------------------------------------------- bad inputs


@on_ranks(4, timeout=60)
def test_wrong_meshes_of_experts_are_refused_in_one_line_on_every_rank(rank: int) -> None:
    mesh, told = _mesh(), []
    whole, halves = _mesh(1), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    wrong: list[dict[str, Any]] = [
        {"mesh_of": {"*.expert": mesh}},
        {"mesh_of": {"*.experts": mesh, "layers.?.experts": mesh}},
        {"mesh_of": {"*.experts": flat}},
        {"mesh": halves},
        {"mesh_of": {"*.experts": None}},
        {"mesh_of": {}},
        {"sync_from": 0},
        {"policy": "auto"},
        {"mesh_of": {"*.experts": mesh if rank else whole}},
    ]
    for options in wrong:
        with pytest.raises((zs.ConfigError, zs.PlanMismatch)) as refused:
            _sharded(Stacked, mesh, "zero2", **options)
        told.append(str(refused.value))
    model = Mixture(Stacked, mesh.get_group("ep"))
    model.layers[0].experts.up = nn.Parameter(torch.zeros(2, 12, 20))
    model.tied = model.layers[0].experts.up
    with pytest.raises(zs.ConfigError) as refused:
        zs.shard(model, mesh_of={PATTERN: mesh})
    told.append(str(refused.value))
    torch.manual_seed(rank)  # ranks 0 and 2 have the same experts, and other numbers
    model = Mixture(Stacked, mesh.get_group("ep"))
    state = local_part(whole_mixture(Stacked).state_dict(), Stacked, 0, 2)
    model.load_state_dict({k: v for k, v in state.items() if "experts" not in k}, strict=False)
    with pytest.raises(zs.PlanMismatch) as differs:
        zs.shard(model, mesh_of={PATTERN: mesh})
    told.append(str(differs.value))
    messages = (
        "mesh_of: '*.expert' matches no module of Mixture that holds parameters",
        "module 'layers.0.experts' belongs to '*.experts' and to 'layers.?.experts'",
        "mesh_of['*.experts']: the mesh has no data parallel dimension, only ['ep']",
        "mesh_of['*.experts'] has rank(s) ",
        "mesh_of['*.experts'] is a NoneType, not a DeviceMesh",
        "mesh_of is {}: give a dict",
        "sync_from=0 would copy one rank's experts",
        "policy='auto' plans data parallel ranks alone",
        "about 'mesh_of'",
        "are one tensor, which would lie over two meshes",
        "about 'initial value of layers.0.experts.up': rank 0",
    )
    for message, text in zip(messages, told, strict=True):
        assert message in text and "\n" not in text, (message, text)


# ---------------------------------------------------------------------------- .grad by hand


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.125)


def _values(engine: zs.Engine, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    with engine.gathered(parameters):
        return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3"])
@on_ranks(4)
def test_a_gradient_assigned_to_an_expert_is_that_of_the_ranks_that_hold_it(
    rank: int, row: str
) -> None:
    mesh = _mesh()
    place = mesh.get_local_rank("ep")
    model, optimizer, engine = _sharded(Stacked, mesh, row, optimizer=_plain_sgd)
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    before = _values(engine, experts)
    for step in range(2):
        engine.backward(model(*_batch(rank, step)))
        for parameter in experts:
            parameter.grad = torch.full_like(parameter, 1.0 + place)  # other experts, others
        optimizer.step()
        optimizer.zero_grad()
    for old, new in zip(before, _values(engine, experts), strict=True):
        torch.testing.assert_close(old - new, torch.full_like(old, 2 * 0.125 * (1.0 + place)))
    engine.backward(model(*_batch(rank, 0)))
    experts[0].grad = torch.full_like(experts[0], 1.0 + (rank == 3))  # as its replica has not
    with pytest.raises(PlanMismatch, match=r"assigned to 'layers.*differs between ranks"):
        optimizer.step()
    engine.reset()
    engine.close()
