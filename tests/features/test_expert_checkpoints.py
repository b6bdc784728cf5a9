"""Checkpoints of experts that ranks divide: one count of experts, read under any other division."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.support.experts import Listed, Mixture, Stacked, local_part, whole_mixture
from tests.support.harness import run_ranks
from tests.support.mesh_checkpoints import exported
from tests.support.training import VOCABULARY, State, muon_and_adamw, two_groups
from zeroshard import CheckpointError

KINDS: dict[str, type[nn.Module]] = {"stacked": Stacked, "listed": Listed}


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return muon_and_adamw(model.named_parameters())


RULES: dict[str, Any] = {
    "adamw": two_groups,
    "adafactor": partial(two_groups, make=torch.optim.Adafactor),
    "muon": _muon,
}


class Run:
    """A mixture over all ranks, whose experts `ep` of them divide; 0: each has all."""

    def __init__(self, kind: str, ep: int, row: str, values: State | None, **options: Any) -> None:
        make = RULES[options.pop("rule", "adamw")]
        world, place, group = dist.get_world_size(), 0, None
        if ep:
            mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
            place, group = mesh.get_local_rank("ep"), mesh.get_group("ep")
            options["mesh_of"] = {"*.experts": mesh}
        self.kind, self.ep, self.place = KINDS[kind], ep or 1, place
        self.model = Mixture(self.kind, group)
        if values is None:  # what a load brings is seen
            named = whole_mixture(self.kind).named_parameters()
            values = {name: torch.zeros_like(value) for name, value in named}
        self.model.load_state_dict(local_part(values, self.kind, place, self.ep))
        self.engine = zs.shard(self.model, make(self.model), policy=row, **options)
        assert self.engine.optimizer is not None
        self.optimizer = self.engine.optimizer

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.engine.rank)
            tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
            loss = self.model(tokens[:, :-1], tokens[:, 1:], torch.full((2,), step % 2))
            self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self) -> State:
        return self.engine.full_state_dict(rank0_only=False)


def _started(kind: str) -> State:
    return dict(whole_mixture(KINDS[kind]).state_dict())


def _write(
    rank: int, world: int, kind: str, ep: int, row: str, folder: Path, options: dict[str, Any]
) -> None:
    run = Run(kind, ep, row, _started(kind), **options)
    run.train(range(2))
    zs.save(folder, run.engine, step=1)
    run.train(range(2, 4))
    expected = run.whole()
    run.engine.close()
    again = Run(kind, ep, row, None, **options)
    zs.load(folder, again.engine)
    again.train(range(2, 4))
    found = again.whole()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    again.engine.close()


def _pass_on(
    rank: int, world: int, kind: str, ep: int, row: str, source: Path, folder: Path,
    options: dict[str, Any],
) -> None:  # fmt: skip
    run = Run(kind, ep, row, None, **options)
    restored = zs.load(source, run.engine)
    assert all("'rng'" in one for one in restored.skipped)  # of other ranks than there were
    zs.save(folder, run.engine, step=1)
    run.train(range(2, 3))
    run.engine.close()


def _chain(
    kind: str, others: list[tuple[int, int, str, dict[str, Any]]], folder: Path, **options: Any
) -> None:
    """Save under ep 2 over four ranks, with `options`; pass it from one layout (ranks, ep, row) to
    the next.
    """
    run_ranks(4, _write, kind, 2, "zero3", folder / "0", options)
    expected = exported(folder / "0", 1, folder / "0.pt")
    whole = whole_mixture(KINDS[kind])
    assert all(expected[name].shape == p.shape for name, p in whole.named_parameters())
    assert any("exp_avg" in name or "row_var" in name for name in expected)
    assert any("momentum" in name for name in expected) is (options.get("rule") == "muon")
    for number, (world, ep, row, options) in enumerate(others, 1):
        source, here = folder / str(number - 1), folder / str(number)
        run_ranks(world, _pass_on, kind, ep, row, source, here, options, timeout=100)
        found = exported(here, 1, folder / f"{number}.pt")
        assert found.keys() == expected.keys(), (world, ep, row)
        wrong = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert not wrong, (world, ep, row, wrong[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_with_all_experts_and_ranks_that_divide_them_read_each_others(
    kind: str, tmp_path: Path
) -> None:
    _chain(kind, [(1, 0, "zero1", {}), (4, 4, "zero1", {}), (2, 2, "ddp", {})], tmp_path)


def test_experts_of_owners_are_read_by_other_owners_and_in_equal_parts(tmp_path: Path) -> None:
    owned: dict[str, Any] = {"ownership": "whole"}
    muon, factors = ({**owned, "rule": rule} for rule in ("muon", "adafactor"))
    half = {"offload": zs.Offload(optimizer="host", weight="host", fraction=0.5)}
    others = [(2, 2, "zero1", muon), (1, 0, "zero3", muon), (4, 2, "zero3", muon | half)]
    _chain("listed", others, tmp_path / "muon", **muon)
    equal = [(4, 2, "zero3", {}), (3, 0, "zero2", owned), (4, 2, "zero1", owned)]
    _chain("listed", equal, tmp_path / "adamw", **owned)
    parts = [(2, 2, "zero1", factors), (1, 0, "zero3", factors)]
    _chain("listed", parts, tmp_path / "adafactor", **factors)


def _joined(rank: int, world: int, folder: Path) -> str:
    run = Run("stacked", 0 if world == 1 else 2, "zero1", None, ownership="whole", rule="adafactor")
    with contextlib.ExitStack() as stack:
        stack.callback(run.engine.close)
        if world > 1:
            with pytest.raises(CheckpointError, match="whole there and cannot be cut into parts"):
                zs.load(folder, run.engine)
        run.train(range(1))
        refused = pytest.raises(zs.ZeroshardError) if world > 1 else contextlib.nullcontext()
        with refused as told:
            zs.save(folder, run.engine, step=1)
        return str(told.value) if told else ""


def test_states_of_another_shape_of_experts_in_one_parameter_are_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, _joined, tmp_path) == [""]
    for told in run_ranks(2, _joined, tmp_path):
        assert "one with the experts of other ranks" in told and "\n" not in told


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_tier_and_division_of_experts_keeps_the_bits(kind: str, tmp_path: Path) -> None:
    disk = zs.Offload(weight="disk", optimizer="disk", disk_path=str(tmp_path))
    nodes = {"comm": zs.Comm(node_size=2)}
    layouts: list[tuple[int, int, str, dict[str, Any]]] = [
        (4, 2, "ddp", {}), (4, 4, "zero2", {}), (4, 1, "zero3", {}), (3, 0, "zero3", {}),
        (4, 2, "zero3", {"offload": disk}), (2, 1, "zero2", {}), (4, 2, "hpz", nodes),
        (4, 2, "zero3", {"offload": zs.Offload(optimizer="host")}), (4, 2, "zero1", nodes),
    ]  # fmt: skip
    _chain(kind, layouts, tmp_path)


def _pretrained(rank: int, world: int, kind: str, folder: Path) -> int:
    run = Run(kind, 2, "zero3", None)
    report = zs.load_pretrained(run.engine, folder)
    assert not report.missing and not report.unexpected
    expected = local_part(_started(kind), run.kind, run.place, 2)
    assert all(torch.equal(value, expected[name]) for name, value in run.whole().items())
    with pytest.raises((zs.CheckpointError, zs.PlanMismatch)) as refused:
        zs.load_pretrained(run.engine, folder / "less")
    assert "experts" in str(refused.value), refused.value
    report = zs.load_pretrained(run.engine, folder / "less", strict=False)
    run.engine.close()
    return len(report.missing)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_reads_its_own_experts_of_a_pretrained_model(kind: str, tmp_path: Path) -> None:
    state = _started(kind)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "less").mkdir()
    lacking = next(reversed([name for name in state if "experts" in name]))
    save_file({k: v for k, v in state.items() if k != lacking},
              tmp_path / "less" / "model.safetensors")  # fmt: skip
    missing = run_ranks(4, _pretrained, kind, tmp_path)
    assert missing == ([1] * 4 if kind == "stacked" else [0, 1, 0, 1])


def _scalar(rank: int, world: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = nn.ModuleDict({"router": nn.Linear(2, 2, bias=False), "expert": nn.Module()})
    model["router"].weight.data.fill_(1.0)
    model["expert"].gain = nn.Parameter(torch.tensor(float(rank)))
    engine = zs.shard(model, stage=1, mesh_of={"expert": mesh})
    try:
        zs.save(folder, engine, step=1)
    except zs.ZeroshardError as refused:
        return str(refused)
    finally:
        engine.close()
    return ""


def test_a_parameter_of_experts_without_a_dimension_is_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    for told in run_ranks(2, _scalar, tmp_path):
        assert "'expert.gain' of experts (mesh_of) has no dimension" in told and "\n" not in told
