"""Checkpoints across tiers: saved from any, loaded into any other, and training goes on with the
same bits.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import Net, batch, make_model, take_steps, two_groups
from zeroshard import CheckpointError, ConfigError
from zeroshard.runtime.engine import states_of

CUT, MORE = 2, 2  # steps before the checkpoint, and after it

TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"grad": "host", "optimizer": "host"},
    "all host": {"weight": "host", "grad": "host", "optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "all disk": {"weight": "disk", "grad": "disk", "optimizer": "disk"},
    "mixed": {"weight": "host", "grad": "disk", "optimizer": "disk"},
    "half host": {"grad": "host", "optimizer": "host", "fraction": 0.5},
    "half disk": {"optimizer": "disk", "fraction": {"optimizer": 0.4}},
    "checked": {"weight": "disk", "optimizer": "disk", "verify": True},
    "late": {"grad": "host", "optimizer": "host", "delayed_update": 1},
}


@dataclass(frozen=True)
class Layout:
    """How a run is laid out."""

    tiers: str
    row: str
    world: int
    precision: str = "fp32"

    def made(self, path: Path, tiers: str | None = None, **options: Any) -> Made:
        """Return a run that begins; `tiers` instead of its own."""
        chosen = TIERS[self.tiers if tiers is None else tiers]
        disk = {"disk_path": str(path)} if "disk" in chosen.values() else {}
        model = make_model(layers=2)
        optimizer = two_groups(model)
        offload = zs.Offload(**chosen, **disk)
        return Made(
            model,
            optimizer,
            zs.shard(
                model,
                optimizer,
                policy=self.row,
                precision=self.precision,
                offload=offload,
            ),
        )


@dataclass
class Made:
    """A model, its optimizer and its engine."""

    model: Net
    optimizer: torch.optim.Optimizer
    engine: zs.Engine
    losses: list[float] = field(default_factory=list)

    def train(self, rank: int, steps: range) -> None:
        self.losses = take_steps(rank, steps, self.model, self.optimizer, self.engine, clip=0.5)

    def state(self) -> dict[str, torch.Tensor]:
        states_of(self.engine).finish_step()
        return self.engine.full_state_dict(rank0_only=False)

    def differs_from(self, other: Made) -> list[str]:
        mine, theirs = self.state(), other.state()
        return [name for name in mine if not torch.equal(mine[name], theirs[name])] + (
            ["losses"] if self.losses != other.losses else []
        )

    def close(self) -> None:
        inside.exchange(self.engine, b"")
        self.engine.close()


# -------------------------------------------------------------------------- any tier into any other


@dataclass
class Written:
    """What the run that saved has come to on one rank."""

    at_cut: dict[str, torch.Tensor]
    losses: list[float]  # after the cut
    at_end: dict[str, torch.Tensor]


def _write(rank: int, world: int, layout: Layout, folder: Path, swap: Path) -> Written:
    """Train to the cut, save, train on."""
    run = layout.made(swap)
    run.train(rank, range(CUT))
    zs.save(folder, run.engine, step=CUT, extra={"tiers": layout.tiers})
    at_cut = run.state()
    run.train(rank, range(CUT, CUT + MORE))
    written = Written(at_cut, run.losses, run.state())
    run.close()
    return written


def _read(
    rank: int,
    world: int,
    layout: Layout,
    folder: Path,
    swap: Path,
    saved: list[Written],
    same: bool,
) -> dict[str, list[str]]:
    """Load into a run that has trained something else before, and into one on the device; train
    both on.
    """
    out = {}
    runs = [layout.made(swap), layout.made(swap, "device" if layout.tiers != "late" else "late")]
    for run in runs:
        run.train(rank, range(20, 21))  # masters and moments are another run's until load() comes
        restored = zs.load(folder, run.engine)
        assert restored.step == CUT and not restored.damaged
        # of another number of ranks
        assert all("rng" in what for what in restored.skipped), restored.skipped
    written = saved[rank if same else 0]
    out["at the cut"] = [
        name
        for name, value in runs[0].state().items()
        if not torch.equal(value, written.at_cut[name])
    ]
    for run in runs:
        run.train(rank, range(CUT, CUT + MORE))
    out["beside the device"] = runs[0].differs_from(runs[1])
    if same:
        out["beside the run that saved"] = [
            name
            for name, value in runs[0].state().items()
            if not torch.equal(value, written.at_end[name])
        ]
        out["beside the run that saved"] += ["losses"] if runs[0].losses != written.losses else []
    for run in runs:
        run.close()
    return out


PAIRS = [
    (Layout("device", "zero3", 2), Layout("all disk", "zero3", 2)),
    (Layout("all disk", "zero3", 2), Layout("device", "zero3", 2)),
    (Layout("all disk", "zero3", 2), Layout("all host", "zero3", 2)),
    (Layout("all host", "zero3", 2), Layout("mixed", "zero3", 1)),
    (Layout("host", "zero1", 2, "bf16"), Layout("half disk", "zero2", 2, "bf16")),
    (Layout("half host", "zero2", 1), Layout("checked", "zero3", 2)),
    (Layout("half disk", "zero3", 2), Layout("half host", "ddp", 2)),
    (Layout("disk", "ddp", 1), Layout("disk", "zero1", 1)),
    (Layout("mixed", "zero3", 2, "bf16"), Layout("host", "ddp", 1, "bf16")),
    (Layout("checked", "zero3", 1), Layout("disk", "zero2", 2)),
    (Layout("disk", "zero2", 2), Layout("half disk", "zero1", 1)),
    (Layout("late", "zero2", 2), Layout("late", "zero2", 2)),
    (Layout("late", "zero1", 2), Layout("all disk", "zero3", 2)),
]


def test_the_pairs_cover() -> None:
    def at(layout: Layout) -> str:
        return str(TIERS[layout.tiers].get("optimizer", "device"))

    met = {(at(a), at(b)) for a, b in PAIRS}
    assert met >= set(itertools.product(("host", "disk"), ("host", "disk"))) | {
        ("device", "disk"),
        ("disk", "device"),
    }
    assert {layout.tiers for pair in PAIRS for layout in pair} == set(TIERS)
    assert (
        {layout.row for _, layout in PAIRS}
        == {layout.row for layout, _ in PAIRS}
        == {"ddp", "zero1", "zero2", "zero3"}
    )
    assert {(a.world, b.world) for a, b in PAIRS} == set(itertools.product((1, 2), (1, 2)))


@pytest.mark.parametrize(
    ("source", "target"), PAIRS, ids=lambda layout: f"{layout.tiers}-{layout.row}-{layout.world}"
)
def test_a_checkpoint_of_any_tier_loads_into_any_other_and_training_goes_on_with_the_same_bits(
    source: Layout, target: Layout, tmp_path: Path
) -> None:
    folder, swap = tmp_path / "checkpoints", tmp_path / "swap"
    swap.mkdir()
    saved = run_ranks(source.world, _write, source, folder, swap)
    same = (source.world, source.precision, source.tiers == "late") == (
        target.world,
        target.precision,
        target.tiers == "late",
    )
    for rank, differences in enumerate(
        run_ranks(target.world, _read, target, folder, swap, saved, same)
    ):
        assert not any(differences.values()), (rank, differences)
        assert len(differences) == 2 + same


# ------------------------------------------------------------------------------------------- savers


def _saver(
    rank: int, world: int, tiers: str, folder: Path, swap: Path
) -> tuple[bool, bool, list[str], list[str]]:
    """Save twice through a Saver while training goes on; return whether the file was there when
    save() returned.
    """
    layout = Layout(tiers, "zero3", world)
    run, reference = layout.made(swap), layout.made(swap, "device")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeroshard")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    in_memory, there = False, True
    try:
        with zs.Saver(folder, run.engine) as saver:
            for step in range(3):
                run.train(rank, range(step, step + 1))
                path = saver.save(step)
                there = there and path.exists()
                in_memory = in_memory or bool(saver._staging)
            run.train(rank, range(3, 4))  # the state moves on while the last step is being written
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    zs.load(folder, reference.engine, step=2)
    reference.train(rank, range(3, 4))
    differs = run.differs_from(reference)
    run.close()
    reference.close()
    return (
        there,
        in_memory,
        [record for record in records if "in the foreground" in record],
        differs,
    )


@pytest.mark.parametrize("tiers", ["host", "all disk"])
def test_a_background_saver_copies_from_the_host_and_writes_from_disk_in_the_foreground(
    tiers: str, tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    for rank, (there, in_memory, said, differs) in enumerate(
        run_ranks(2, _saver, tiers, tmp_path / "checkpoints", swap)
    ):
        assert in_memory is (tiers == "host")
        assert there or tiers == "host"
        assert len(said) == (rank == 0 and tiers != "host"), said  # once, for three saves
        assert differs == []


# ---------------------------------------------------------------------- state_dict of the optimizer


def _state_dicts(
    rank: int, world: int, row: str, names: list[str], swap: Path
) -> dict[str, list[str]]:
    """Take the optimizer's state_dict() of every rank and the model's on each tier, give them to
    new ones on the next, and train on.
    """
    out = {}
    reference = Layout("device", row, world).made(swap)
    reference.train(rank, range(CUT + MORE))
    for name, other in itertools.pairwise([*names, names[0]]):
        run = Layout(name, row, world).made(swap)
        run.train(rank, range(CUT))
        weights, states = run.state(), run.engine.optimizer_part()
        numbers = [
            value
            for state in states["state"].values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        out[f"{name} nan"] = ["nan" for value in numbers if bool(value.isnan().any())]
        run.close()
        following = Layout(
            other if TIERS[other].get("fraction") == TIERS[name].get("fraction") else name,
            row,
            world,
        ).made(swap)
        following.model.load_state_dict(weights)
        following.optimizer.load_state_dict(states)
        following.train(rank, range(CUT, CUT + MORE))
        reference.losses = following.losses
        out[name] = following.differs_from(reference)
        following.close()
    reference.close()
    return out


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("zero1", ["device", "host", "disk", "half host"]),
        ("zero3", ["all host", "all disk", "mixed", "half disk"]),
    ],
)
def test_the_optimizers_state_dict_goes_round_on_every_tier(
    row: str, names: list[str], tmp_path: Path
) -> None:
    for differences in run_ranks(2, _state_dicts, row, names, tmp_path):
        assert not any(differences.values()), differences


# --------------------------------------------------------------------------------- whole parameters


def _whole(rank: int, world: int, name: str, swap: Path) -> dict[str, list[str]]:
    """Everything that reads or writes whole parameters and gradients, beside the same on the
    device.
    """
    layout, out = Layout(name, "zero3", world), {}
    runs = [layout.made(swap), layout.made(swap, "device")]

    def compare(what: str, action: Callable[[Made], dict[str, torch.Tensor]]) -> None:
        one, two = (action(run) for run in runs)
        out[what] = [key for key in two if not torch.equal(one[key], two[key])]

    def trained(run: Made) -> dict[str, torch.Tensor]:
        run.train(rank, range(2))
        return run.state()

    def gradients(run: Made) -> dict[str, torch.Tensor]:
        run.model(*batch(rank, 7)).backward()
        run.engine.clip_grad_norm_(0.1)
        found = {
            key: run.engine.full_grad(parameter) for key, parameter in run.model.named_parameters()
        }
        run.optimizer.zero_grad()
        return {key: value for key, value in found.items() if value is not None}

    def gathered(run: Made) -> dict[str, torch.Tensor]:
        with run.engine.gathered():
            return {key: value.detach().clone() for key, value in run.model.named_parameters()}

    def edited(run: Made) -> dict[str, torch.Tensor]:
        block = run.model.blocks[1]
        with (
            run.engine.gathered([block.up.weight, block.norm.bias], writeback=True),
            torch.no_grad(),
        ):
            block.up.weight.mul_(0.5)
            block.norm.bias.add_(1.0)
        return trained(run)

    def loaded(run: Made) -> dict[str, torch.Tensor]:
        state = {key: value + 0.01 for key, value in run.state().items()}
        run.model.load_state_dict(state)
        run.train(rank, range(3, 5))
        return run.state()

    for what, action in {
        "trained": trained,
        "gradients": gradients,
        "gathered": gathered,
        "edited": edited,
        "loaded": loaded,
    }.items():
        compare(what, action)
    try:
        zs.EMA(runs[0].engine)
        out["ema"] = ["taken"] if TIERS[name].get("optimizer", "device") != "device" else []
    except ConfigError as error:
        out["ema"] = [] if "offload.optimizer" in str(error) else [str(error)]
    models = [run.model for run in runs]
    for run in runs:
        run.close()
    out["closed"] = [
        key
        for key, value in models[0].state_dict().items()
        if not torch.equal(value, models[1].state_dict()[key])
    ]
    return out


@pytest.mark.parametrize(
    "name", ["host", "all host", "disk", "all disk", "mixed", "half host", "checked"]
)
def test_whole_parameters_and_gradients_are_the_devices_on_every_tier(
    name: str, tmp_path: Path
) -> None:
    for differences in run_ranks(2, _whole, name, tmp_path):
        assert not any(differences.values()), differences


def _pretrained(rank: int, world: int, name: str, folder: Path, swap: Path) -> list[str]:
    expected = {
        key: torch.randn(value.shape, generator=torch.Generator().manual_seed(len(key)))
        for key, value in make_model(layers=2).state_dict().items()
    }
    if rank == 0:
        save_file(expected, folder / "model.safetensors")
    layout = Layout(name, "zero3", world)
    run, reference = layout.made(swap), layout.made(swap, "device")
    inside.exchange(run.engine, b"")
    wrong = []
    for made in (run, reference):
        report = zs.load_pretrained(made.engine, folder)
        wrong += [*report.missing, *report.unexpected]
        wrong += [
            key for key, value in made.state().items() if not torch.equal(value, expected[key])
        ]
        made.train(rank, range(2))
    wrong += run.differs_from(reference)
    run.close()
    reference.close()
    return wrong


@pytest.mark.parametrize("name", ["all disk", "mixed", "checked"])
def test_pretrained_weights_are_read_into_weights_on_other_tiers(name: str, tmp_path: Path) -> None:
    assert run_ranks(2, _pretrained, name, tmp_path, tmp_path) == [[], []]


# ------------------------------------------------------------------------------------------- damage


def _damaged(rank: int, world: int, folder: Path, swap: Path) -> tuple[str, list[str]]:
    """Load a step that is damaged into states on disk, which are written a piece at a time:
    nothing may change.
    """
    layout = Layout("all disk", "zero3", world)
    run, reference = layout.made(swap), layout.made(swap, "device")
    for made in (run, reference):
        made.train(rank, range(1))
    path = zs.save(folder, run.engine, step=1)
    for made in (run, reference):
        made.train(rank, range(1, 2))
    if rank == 0:
        file = path / f"rank-{world - 1:05d}-of-{world:05d}.safetensors"
        with file.open("r+b") as opened:  # in the last tensor
            opened.seek(file.stat().st_size - 8)
            opened.write(b"\x55" * 4)
    inside.exchange(run.engine, b"")
    with pytest.raises(CheckpointError) as caught:
        zs.load(folder, run.engine)
    for made in (run, reference):
        made.train(rank, range(2, 4))
    differs = run.differs_from(reference)
    run.close()
    reference.close()
    return str(caught.value), differs


def test_a_damaged_checkpoint_is_found_before_anything_on_disk_has_changed(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    for error, differs in run_ranks(2, _damaged, tmp_path / "checkpoints", swap):
        assert "is damaged" in error and differs == []
