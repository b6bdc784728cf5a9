"""What offload takes, what it refuses and why: before anything is touched, on every rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import ROWS, make_model, two_groups
from zeroshard import ConfigError, PlanMismatch
from zeroshard.config import build_config
from zeroshard.core.placement import Cell, Cells, Placement, Tier
from zeroshard.core.policy import row as policy_row

HOST = {"optimizer": "host"}
DISK = {"optimizer": "disk", "disk_path": "/swap"}


def refused(stage: Any = 2, **offload: Any) -> str:
    """Return why a configuration with this offload is refused."""
    with pytest.raises(ConfigError) as caught:
        build_config(
            None,
            policy=stage if isinstance(stage, str) else None,
            stage=stage if isinstance(stage, int) else None,
            offload=offload,
        ).refuse_unsupported()
    return str(caught.value)


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        (
            {**HOST, "fraction": 1.5},
            "offload.fraction=1.5 is not in [0, 1]: it is the share that leaves the device",
        ),
        ({**HOST, "fraction": -0.1}, "offload.fraction=-0.1 is not in [0, 1]"),
        ({**HOST, "fraction": float("nan")}, "offload.fraction=nan is not in [0, 1]"),
        (
            {**HOST, "fraction": {"optimizer": 2.0}},
            "offload.fraction['optimizer']=2.0 is not in [0, 1]",
        ),
        (
            {**HOST, "fraction": {"optimizer": 0.5, "weight": -1.0}},
            "offload.fraction['weight']=-1.0 is not in [0, 1]",
        ),
        ({**HOST, "fraction": "half"}, "offload.fraction"),
        ({**HOST, "fraction": {"moments": 0.5}}, "offload.fraction"),
        (
            {"optimiser": "host"},
            "'offload.optimiser' is not a key of offload; did you mean 'optimizer'?",
        ),
        ({**HOST, "diskpath": "/swap"}, "did you mean 'disk_path'?"),
        ({**HOST, "delay_update": 3}, "did you mean 'delayed_update'?"),
        (
            {"optimizer": "cpu"},
            (
                "offload.optimizer='cpu' is not a tier: 'device', 'host' (the memory of the CPU) or"
                " 'disk' (NVMe)"
            ),
        ),
        ({**HOST, "staging_bytes": 10}, "offload.staging_bytes"),
        ({**HOST, "delayed_update": -1}, "offload.delayed_update"),
    ],
)
def test_wrong_keys_and_values_are_refused_in_one_line(offload: dict[str, Any], words: str) -> None:
    reason = refused(**offload)
    assert words in reason and "\n" not in reason, reason


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({"fraction": 0.5}, "offload.fraction has no effect while every state rests on the device"),
        (
            {"disk_path": "/swap"},
            "offload.disk_path has no effect while every state rests on the device",
        ),
        (
            {"staging_bytes": 1 << 20},
            "offload.staging_bytes has no effect while every state rests on the device",
        ),
        (
            {"delayed_update": 0},
            "offload.delayed_update has no effect while every state rests on the device",
        ),
        ({"verify": True}, "offload.verify has no effect while every state rests on the device"),
        (
            {**HOST, "disk_path": "/swap"},
            "offload.disk_path has no effect while no state rests on disk",
        ),
        ({**HOST, "verify": True}, "offload.verify has no effect while no state rests on disk"),
        ({"optimizer": "disk"}, "offload.optimizer='disk' needs offload.disk_path"),
        (
            {**HOST, "fraction": {"optimizer": 0.5, "grad": 0.5}},
            "offload.fraction['grad'] has no effect: that state rests on the device",
        ),
        (
            {"grad": "host", "delayed_update": 0},
            "offload.delayed_update has no effect while the optimizer's state rests on the device",
        ),
        (
            {**HOST, "delayed_update": 0, "fraction": 0.5},
            "offload.delayed_update needs the whole optimizer state off the device",
        ),
        (
            {**HOST, "delayed_update": 0, "fraction": {"optimizer": 0.5}},
            "offload.delayed_update needs the whole optimizer state off the device",
        ),
        (
            {**HOST, "delayed_update": 0, "fraction": "auto"},
            "offload.delayed_update needs the whole optimizer state off the device",
        ),
        (
            {**DISK, "fraction": "auto"},
            (
                "offload.fraction='auto' balances the steps of device and host: it needs"
                " offload.optimizer='host', not 'disk'"
            ),
        ),
        ({"grad": "host", "fraction": "auto"}, "it needs offload.optimizer='host', not 'device'"),
        (
            {"step_in_backward": True},
            "offload.step_in_backward has no effect while every state rests on the device",
        ),
        (
            {**DISK, "step_in_backward": True},
            (
                "offload.step_in_backward steps states in host memory ahead: it needs"
                " offload.optimizer='host', not 'disk'"
            ),
        ),
        (
            {**HOST, "step_in_backward": True, "delayed_update": 2},
            "offload.step_in_backward and offload.delayed_update both decide when the host steps",
        ),
        (
            {**HOST, "step_in_backward": True, "fraction": "auto"},
            "offload.step_in_backward and offload.fraction='auto' both decide",
        ),
    ],
)
def test_what_has_no_effect_or_makes_no_sense_is_refused_with_the_reason(
    offload: dict[str, Any], words: str
) -> None:
    assert words in refused(**offload)


WHOLE = "every rank would keep and move the whole model"
PARTIAL = "a partial sum changes at every micro-batch and cannot rest on disk"


@pytest.mark.parametrize("row", ROWS)
def test_every_row_says_which_tiers_make_no_sense(row: str) -> None:
    sharded = row.startswith("zero3")
    partial = row in ("ddp", "zero1")
    for weight, grad, optimizer in itertools.product(("device", "host", "disk"), repeat=3):
        offload = {"weight": weight, "grad": grad, "optimizer": optimizer}
        if "disk" in offload.values():
            offload["disk_path"] = "/swap"
        if weight != "device" and not sharded:
            assert WHOLE in refused(row, **offload) and f"policy={row!r}" in refused(row, **offload)
        elif grad == "disk" and partial:
            assert PARTIAL in refused(row, **offload) and f"policy={row!r}" in refused(
                row, **offload
            )
        else:
            policy = build_config(None, policy=row, offload=offload).resolved_policy()
            cells = policy.cells()
            assert (cells.weight.tier.value, cells.grad.tier.value, cells.optim.tier.value) == (
                weight,
                grad,
                optimizer,
            )
            assert policy.weights_leave_the_device is (weight != "device")


def test_a_policy_that_makes_no_sense_cannot_be_built() -> None:
    shard, whole = Cell.parse("S S"), Cell.parse("R R")
    with pytest.raises(ValueError, match=WHOLE):
        Cells(Cell.parse("R R", Tier.HOST), whole, Cell.parse("P P"), shard)
    with pytest.raises(ValueError, match=PARTIAL):
        Cells(whole, whole, Cell(Placement.PARTIAL, Placement.PARTIAL, Tier.DISK), shard)
    with pytest.raises(ValueError, match=WHOLE):
        policy_row("zero2").tiered(Tier.DISK, Tier.DEVICE, Tier.DEVICE)


@pytest.mark.parametrize(
    "offload",
    [
        {},
        {"grad": "host", "optimizer": "host", "fraction": 0.25},
        {"grad": "host", "optimizer": "host", "fraction": "auto"},
        {
            "weight": "disk",
            "grad": "disk",
            "optimizer": "disk",
            "disk_path": "/swap",
            "verify": True,
            "staging_bytes": 1 << 20,
        },
        {**HOST, "fraction": {"optimizer": 0.4}},
        {**HOST, "delayed_update": 7},
    ],
)
def test_a_configuration_with_offload_goes_through_json_and_back(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    config = zs.Config(stage=3, offload=zs.Offload(**offload))
    text = config.to_json()
    assert zs.Config.from_json(text) == config
    assert "link" not in json.loads(text)["offload"]
    (tmp_path / "config.json").write_text(text)
    assert build_config(tmp_path / "config.json").offload == zs.Offload(**offload)
    assert build_config({"stage": 3, "offload": offload}).offload == config.offload


def _shard(rank: int, world: int, offloads: list[dict[str, Any]], path: str) -> str:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offload = dict(offloads[rank])
    if "disk" in offload.values():
        offload["disk_path"] = f"{path}/{rank}"  # each rank its own: that may differ
        Path(offload["disk_path"]).mkdir(exist_ok=True)
    try:
        zs.shard(model, two_groups(model), stage=2, offload=offload).close()
    except (ConfigError, PlanMismatch) as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("offloads", "words"),
    [
        ([HOST, {}], '"optimizer":"device"'),
        ([{**HOST, "fraction": 0.5}, {**HOST, "fraction": 0.25}], '"fraction":0.25'),
        ([{**HOST, "delayed_update": 1}, HOST], '"delayed_update":1'),
        ([{"optimizer": "disk"}, {"optimizer": "disk", "verify": True}], '"verify":true'),
    ],
)
def test_ranks_that_disagree_about_offload_are_told_where(
    offloads: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    for error in run_ranks(2, _shard, offloads, str(tmp_path)):
        assert (
            error.startswith("PlanMismatch: the ranks disagree, first about 'offload'")
            and words in error
        ), error


def test_one_rank_that_refuses_is_heard_by_all_and_disk_paths_may_differ(tmp_path: Path) -> None:
    first, second = run_ranks(
        2, _shard, [HOST, {"optimizer": "host", "verify": True}], str(tmp_path)
    )
    assert first.startswith(
        "PlanMismatch: rank 1 refused: offload.verify has no effect"
    ) and second.startswith("ConfigError: offload.verify")
    assert run_ranks(2, _shard, [{"optimizer": "disk"}] * 2, str(tmp_path)) == ["", ""]


class Normed(torch.optim.SGD):
    """Scales each update by the norm of the whole parameter, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * float(parameter.norm()))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: Normed(parameters, lr=0.1),
        lambda parameters: torch.optim.Adafactor(list(parameters)),
    ],
)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_optimizer_whose_step_is_not_elementwise_is_refused_by_name(
    make: Any, tier: str, tmp_path: Path
) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    offload = zs.Offload(optimizer=tier, **({"disk_path": str(tmp_path)} if tier == "disk" else {}))
    with pytest.raises(
        ConfigError, match=rf"optimizer {type(optimizer).__name__}\b.*use an elementwise optimizer"
    ):
        zs.shard(model, optimizer, stage=1, offload=offload)
    assert list(tmp_path.iterdir()) == []
    engine = zs.shard(model, two_groups(model), stage=1, offload=offload)  # nothing was changed
    engine.close()
