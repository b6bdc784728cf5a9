"""Checkpoints and states that a load cannot take: refused by name on every rank before anything
has changed, or put back.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.checkpoints import make
from tests.support.harness import run_ranks
from tests.unit.checkpoint.test_manifest import sealed
from zeroshard import CheckpointError
from zeroshard.checkpoint.steps import MANIFEST


class Kept:
    """A state that may refuse what it is given, after it has taken it; or that may not take back
    what it gave.
    """

    def __init__(self, value: Any, *, refuses: str = "", gives: bool = True) -> None:
        self.value, self.refuses, self.gives = value, refuses, gives

    def state_dict(self) -> dict[str, Any]:
        if not self.gives:
            raise RuntimeError("not begun")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses == "always" or (self.refuses == "saved" and self.value == "saved"):
            raise KeyError("v2")


def _half(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Save, train on, and load while one state refuses on one rank."""
    training = make("zero3")
    training.step(rank, 0)
    states: dict[str, Any] = {name: Kept("saved") for name in ("a", "m", "z")}
    zs.save(folder, training.engine, step=1, states={"b_schedule": training.schedule, **states})
    training.step(rank, 1)
    said = {}
    refusals: dict[str, dict[str, Kept]] = {
        "saved": {"m": Kept(["now"], refuses="saved" if rank == 1 else "")},
        "always": {"m": Kept(["now"], refuses="always" if rank == 1 else "")},
        "gives nothing": {
            "z": Kept(["now"], refuses="saved" if rank == 1 else "", gives=rank == 0)
        },
    }
    for kind, refusing in refusals.items():
        given = {name: refusing.get(name, Kept(["now"])) for name in states}
        before, generator = training.fingerprint(), torch.get_rng_state()
        rate = training.schedule.get_last_lr()
        with pytest.raises(CheckpointError) as error:
            zs.load(folder, training.engine, states={"b_schedule": training.schedule, **given})
        assert training.fingerprint() == before and torch.equal(torch.get_rng_state(), generator), (
            "weights, optimizer, schedule, generators"
        )
        assert (
            training.schedule.get_last_lr() == rate
            and training.optimizer.param_groups[0]["lr"] == rate[0]
        )
        assert all(state.value == ["now"] for state in given.values() if state.gives), kind
        said[kind] = str(error.value)
    good = {name: Kept(["now"]) for name in states}
    zs.load(folder, training.engine, states={"b_schedule": training.schedule, **good})
    assert all(state.value == "saved" for state in good.values())
    training.step(rank, 2)
    training.engine.close()
    return said


def test_states_are_put_back_on_every_rank_where_one_refuses_on_one(tmp_path: Path) -> None:
    zero, one = run_ranks(2, _half, tmp_path)
    for said in (zero, one):
        assert "states['m'] does not take what was saved: KeyError: 'v2'" in said["saved"]
    assert "rank 1: " in zero["saved"] and "put back" not in zero["saved"] + one["saved"]
    assert "states['m'] could not be put back, the rest is as it was" in one["always"]
    assert "states['z'] could not be put back" in one["gives nothing"]


# ---------------------------------------------------------------------------- the optimizer's state


def _forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "step-0000000001" / MANIFEST
    raw = json.loads(path.read_bytes())
    del raw["hash"]
    change(raw)
    path.write_bytes(sealed(raw))


def _retype(kind: str, dtype: str) -> Callable[[dict[str, Any]], None]:
    """Have the moments `kind` of one parameter in another dtype of the same size."""

    def change(raw: dict[str, Any]) -> None:
        for entry in raw["tensors"]:
            if entry.get("parameter") == "head.weight" and entry["kind"] == kind:
                entry["dtype"] = dtype

    return change


def _scalar(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["optimizer"]["scalars"]["head.weight"].update(step=value)


def _option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["optimizer"]["groups"][0]["options"].update({name: value})


def _rename(raw: dict[str, Any]) -> None:
    for entry in raw["tensors"]:
        if entry.get("parameter") == "head.weight" and entry["kind"] == "state.exp_avg_sq":
            entry["kind"] = "state.exp_avg_qs"


def _forget(raw: dict[str, Any]) -> None:
    del raw["optimizer"]["scalars"]["head.weight"]["step"]


def _scaler(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["states"].update(scaler={"same": value})


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "whole numbers for moments": (
        "parameter 'head.weight': 'exp_avg' is a tensor of int32, not a tensor of floating point",
        _retype("state.exp_avg", "I32"),
    ),
    "missing moments": ("parameter 'head.weight': 'exp_avg_sq' is missing", _rename),
    "no number of steps": ("parameter 'head.weight': 'step' is missing", _forget),
    "text for a number of steps": (
        "parameter 'head.weight': 'step' is a str, not a tensor of one number",
        _scalar("3"),
    ),
    "a plain number of steps": (
        "parameter 'head.weight': 'step' is a plain number, not a tensor of one number",
        _scalar(3),
    ),
    "a list of steps": ("parameter 'head.weight': 'step' is a list", _scalar([1])),
    "text for a rate": ("cannot step with the options of param group 0", _option("lr", "fast")),
    "one beta": ("cannot step with the options of param group 0", _option("betas", 0.9)),
    "no betas": ("cannot step with the options of param group 0", _option("betas", None)),
    "a scaler of text": ("the loss scaler does not take what was saved", _scaler({"scale": "big"})),
    "a scaler of nothing": ("the loss scaler does not take what was saved", _scaler([1])),
    "steps in text": (
        "the loss scaler does not take what was saved",
        _scaler({"delayed_steps": "2"}),
    ),
}


def _forgeries(
    rank: int, world: int, folder: Path, precision: str, offload: dict[str, Any]
) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.Linear(40, 33), head=nn.Linear(33, 20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, stage=3, precision=precision, offload=zs.Offload(**offload))

    def step() -> None:
        engine.backward(model(torch.randn(4, 40)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        return copy.deepcopy(
            engine.full_state_dict(rank0_only=False)
            | {"lr": torch.tensor(optimizer.param_groups[0]["lr"])}
        )

    step()
    zs.save(folder, engine, step=1)
    said = {}
    kept = (folder / "step-0000000001" / MANIFEST).read_bytes()
    for name, (_, change) in FORGED.items():
        inside.exchange(engine, b"")
        if rank == 0:
            _forge(folder, change)
        inside.exchange(engine, b"")
        before = state()
        with pytest.raises(CheckpointError) as error:
            zs.load(folder, engine)
        said[name] = str(error.value)
        after = state()
        assert all(torch.equal(before[key], after[key]) for key in before), name
        step()  # goes on
        inside.exchange(engine, b"")
        if rank == 0:
            (folder / "step-0000000001" / MANIFEST).write_bytes(kept)
    inside.exchange(engine, b"")
    zs.load(folder, engine)
    step()
    engine.close()
    return said


@pytest.mark.parametrize(
    ("precision", "tiers"),
    [
        ("fp16", {}),
        ("fp16", {"optimizer": "host"}),
        pytest.param("fp16", {"optimizer": "disk"}, marks=pytest.mark.slow),
    ],
    ids=["device", "host", "disk"],
)
def test_optimizer_state_with_which_no_step_can_be_taken_is_refused(
    tmp_path: Path, precision: str, tiers: dict[str, Any]
) -> None:
    offload = tiers | ({"disk_path": str(tmp_path)} if "disk" in tiers.values() else {})
    for said in run_ranks(2, _forgeries, tmp_path / "run", precision, offload):
        for name, (message, _) in FORGED.items():
            assert message in said[name], name


def test_moments_saved_in_another_floating_dtype_are_taken_as_the_optimizer_keeps_them(
    tmp_path: Path,
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zs.shard(model, optimizer)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    zs.save(tmp_path, engine, step=1)
    zs.load(tmp_path, engine)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    optimizer.zero_grad()
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    engine.close()
