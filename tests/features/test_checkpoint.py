"""What is saved beside the shards, what fits and what does not, and saving in the background."""

from __future__ import annotations

import io
import logging
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroshard as zs
import zeroshard.checkpoint.save as saving
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import (
    TRANSPORTS,
    Net,
    batch,
    equal,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard import CheckpointError, ConfigError
from zeroshard.checkpoint.shard_files import OpenShards, ShardReader
from zeroshard.checkpoint.steps import StepFiles, list_steps, saved_order


def _state(engine: zs.Engine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(rank0_only=False)


# ------------------------------------------------------------------------ what is beside the shards


class Loader:
    """A data loader's position, each rank's own."""

    def __init__(self, rank: int) -> None:
        self.position = {
            "epoch": 1,
            "seen": [10 * rank, (rank, None)],
            "shuffle": torch.arange(5) + rank,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state


def _draws() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


class Noisy(Net):
    """A model with batch norm, whose statistics are each rank's own, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(19)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.dropout(self.batch_norm(self.embed(x).transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def _beside(rank: int, world: int, folder: Path, precision: str) -> None:
    torch.manual_seed(0)
    made = make_sharded("zero3", model=Noisy(), precision=precision)
    torch.manual_seed(50 + rank)
    random.seed(rank)
    np.random.seed(rank)
    engine, ema, loader = made[2], zs.EMA(made[2], 0.9), Loader(rank)
    scaler = inside.loss_scaler(engine)
    if scaler is not None:
        # it moves between the save and the load
        scaler.scale, scaler.growth_interval = 256.0, 3
    for step in range(2):
        take_steps(rank, [step], *made)
        ema.update()
    states = {"ema": ema, "loader": loader}
    extra = {
        "best": float("inf"),
        "names": ("a", b"\x00"),
        "curve": torch.tensor([1.0, 2.0]),
        7: {1, 2},
    }
    zs.save(folder, engine, step=2, states=states, extra=extra)
    draws = _draws()
    expected = take_steps(rank, (2, 3), *made)
    with ema.swapped():
        averaged = _state(engine)
    buffers = {name: buffer.clone() for name, buffer in made[0].named_buffers()}
    scale = engine.loss_scale
    for step in (4, 5):  # elsewhere by now
        take_steps(rank, [step], *made)
        ema.update()
    loader.position = {}
    restored = zs.load(folder, engine, states=states)
    assert (
        restored.skipped == []
        and restored.extra["best"] == float("inf")
        and restored.extra["names"] == ("a", b"\x00")
    )
    assert torch.equal(restored.extra["curve"], torch.tensor([1.0, 2.0])) and restored.extra[7] == {
        1,
        2,
    }
    assert loader.position["seen"] == [10 * rank, (rank, None)] and torch.equal(
        loader.position["shuffle"], torch.arange(5) + rank
    )
    assert _draws() == draws
    assert take_steps(rank, (2, 3), *made) == expected, "losses, dropout and batch norm included"
    assert (
        all(torch.equal(buffer, buffers[name]) for name, buffer in made[0].named_buffers())
        and engine.loss_scale == scale
    )
    with ema.swapped():
        assert equal(_state(engine), averaged)
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_everything_beside_the_shards_comes_back_on_every_rank(
    tmp_path: Path, precision: str
) -> None:
    run_ranks(2, _beside, tmp_path, precision)


def _alone(rank: int, world: int, folder: Path) -> list[str]:
    made = make_sharded("zero1", model=Noisy())
    loader = Loader(0)
    restored = zs.load(folder, made[2], states={"loader": loader})
    assert loader.position["seen"] == [0, (0, None)], "left as it was"
    made[2].close()
    return restored.skipped


def test_what_ranks_held_differently_is_skipped_by_name_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(2, _beside, tmp_path, "fp32")
    (skipped,) = run_ranks(1, _alone, tmp_path)
    text = "; ".join(skipped)
    assert (
        "states['loader']: it differed between the 2 ranks" in text
        and "states['rng']" in text
        and "states['ema']: not asked for" in text
    )


class Position:
    """Where a rank is in its data."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "files": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def _save_own(rank: int, world: int, folder: Path, seed: int) -> list[float]:
    """Save what is each rank's own beside what is alike; return the next numbers of torch."""
    _, _, engine = make_sharded("zero2")
    torch.manual_seed(seed * rank)
    random.seed(7)
    own = torch.arange(3) + rank
    extra = {
        "epoch": 3,
        "position": 100 + rank,
        "data": {"files": ["a"], "curve": torch.ones(2), "own": own, "list": [1, own]},
        **({"only here": 1} if rank else {}),
    }
    zs.save(folder, engine, step=1, states={"position": Position(rank)}, extra=extra)
    engine.close()
    return [random.random(), torch.rand(()).item()]


def _load_own(rank: int, world: int, folder: Path) -> tuple[Any, list[str], int, list[float], str]:
    _, _, engine = make_sharded("zero3")
    position, lines = Position(-1), io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("zeroshard").addHandler(handler)
    restored = zs.load(folder, engine, states={"position": position})
    logging.getLogger("zeroshard").removeHandler(handler)
    engine.close()
    numbers = [random.random(), torch.rand(()).item()]
    return restored.extra, restored.skipped, position.place, numbers, lines.getvalue()


@pytest.mark.parametrize("seed", [0, 5], ids=["torch seeded alike", "torch seeded by rank"])
def test_on_another_number_of_ranks_extra_is_what_was_alike_and_the_rest_is_named(
    tmp_path: Path, seed: int
) -> None:
    saved = run_ranks(2, _save_own, tmp_path, seed)
    (alone,) = run_ranks(1, _load_own, tmp_path)
    three = run_ranks(3, _load_own, tmp_path)
    own = ["extra['position']", "extra['data']['own']", "extra['data']['list']"]
    own += ["extra['only here']", "states['position']"]
    own += ["states['rng']['torch']"] if seed else []
    for extra, skipped, place, numbers, _ in (alone, *three):
        assert extra.pop("data").pop("curve").tolist() == [1, 1] and extra == {"epoch": 3}
        theirs = [one.removesuffix(": it differed between the 2 ranks that saved it")
                  for one in skipped]  # fmt: skip
        assert {one for one in theirs if one != "states['rng']['numpy']"} == set(own)
        assert place == -1, "left as it was"
        assert numbers[0] == saved[0][0] and (numbers[1] == saved[0][1]) == (seed == 0)
    for *_, lines in (alone, three[0]):
        line = f"step 1 of {tmp_path}: not loaded, since the 2 ranks that saved it differed: "
        assert lines.startswith(line) and lines.count("\n") == 1
        assert all(one in lines for one in own)
        assert ("random generators go on from this script's seed" in lines) == bool(seed)
    assert [lines for *_, lines in three[1:]] == ["", ""]
    for rank, (extra, skipped, place, _, lines) in enumerate(run_ranks(2, _load_own, tmp_path)):
        assert (extra["position"], place, skipped, lines) == (100 + rank, rank, [], "")
        assert extra["data"]["list"][1].tolist() == [rank, rank + 1, rank + 2]


# ------------------------------------------------------------------------------ models of all kinds


class Tied(Net):
    def __init__(self, first: str) -> None:
        super().__init__()
        if first == "head":  # the other name comes first
            head, embed = self.head, self.embed
            del self.head, self.embed
            self.head, self.embed = head, embed
        self.embed.weight = self.head.weight


def _kinds(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3))
    conv.to(memory_format=torch.channels_last)
    frozen = make_model()
    frozen.blocks[1].requires_grad_(False)
    models: dict[str, tuple[nn.Module, nn.Module]] = {
        "tied": (Tied("embed"), Tied("head")),
        "channels_last": (conv, nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3))),
        "frozen": (frozen, make_model()),
    }
    models["frozen"][1].blocks[1].requires_grad_(False)
    for name, (first, second) in models.items():
        engine = zs.shard(
            first,
            two_groups(nn.ParameterList([p for p in first.parameters() if p.requires_grad])),
            sync_from=0,
        )
        zs.save(folder / name, engine, step=0)
        expected = _state(engine)
        engine.close()
        for row in ("zero3", "zero1"):
            engine = zs.shard(
                second,
                two_groups(nn.ParameterList([p for p in second.parameters() if p.requires_grad])),
                policy=row,
                sync_from=0,
            )
            zs.load(folder / name, engine)
            assert equal(_state(engine), expected), (name, row)
            engine.close()
    model = make_model()  # without an optimizer, for inference; values in another dtype
    engine = zs.shard(model.bfloat16(), precision="bf16")
    restored = zs.load(folder / "frozen", engine)
    assert restored.skipped == ["the optimizer's state: this engine has no optimizer"]
    expected = _state(engine)
    engine.close()
    with zs.deferred_init():
        torch.manual_seed(5)
        model = Net()
    engine = zs.shard(model, precision="bf16")
    zs.load(folder / "frozen", engine)
    assert equal(_state(engine), expected)
    engine.close()


def test_tied_channels_last_frozen_and_deferred_models(tmp_path: Path) -> None:
    run_ranks(2, _kinds, tmp_path)


# -------------------------------------------------------------------------------- what does not fit


def _misfits(rank: int, world: int, folder: Path) -> list[str]:
    made = make_sharded()
    take_steps(rank, [0], *made)
    zs.save(
        folder, made[2], step=1, states={"schedule": torch.optim.lr_scheduler.StepLR(made[1], 1)}
    )
    made[2].close()
    said = []
    renamed, reshaped = make_model(), make_model()
    renamed.extra = nn.Linear(3, 3)
    del renamed.norm.bias
    renamed.norm.bias = None
    reshaped.head = nn.Linear(19, 40, bias=False)
    sgd = make_model()
    grouped = make_model()
    cases = [
        (renamed, two_groups(renamed), {}),
        (reshaped, two_groups(reshaped), {}),
        (sgd, torch.optim.SGD(sgd.parameters(), lr=1.0), {}),
        (grouped, torch.optim.AdamW(grouped.parameters()), {}),
        (make_model(), None, {"states": {"sampler": Loader(rank)}}),
    ]
    for model, optimizer, options in cases:
        engine = zs.shard(model, optimizer)
        before = _state(engine)
        with pytest.raises(CheckpointError) as error:
            zs.load(folder, engine, **options)
        said.append(str(error.value))
        assert equal(_state(engine), before), "nothing has changed"
        restored = zs.load(folder, engine, strict=False, **options)
        assert restored.skipped
        dropped = any("no optimizer state is loaded" in one for one in restored.skipped)
        assert dropped == (model in (renamed, reshaped, grouped))
        assert torch.equal(_state(engine)["embed.weight"], _state(engine)["embed.weight"])
        engine.close()
    engine = zs.shard(make_model())
    for error_of, options in ((CheckpointError, {"step": 7}), (CheckpointError, {})):
        with pytest.raises(error_of) as missing:
            zs.load(folder if options else folder / "nowhere", engine, **options)
        said.append(str(missing.value))
    engine.close()
    return said


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    for said in run_ranks(2, _misfits, tmp_path):
        renamed, reshaped, sgd, grouped, states, step, nowhere = said
        assert (
            "parameter 'extra.weight' is not in the checkpoint" in renamed
            and "strict=False loads what fits" in renamed
        )
        assert (
            "'norm.bias' of the checkpoint is not in the model" in renamed
            or "(and 1 more)" in renamed
        )
        assert (
            "parameter 'head.weight' is [37, 19] in the checkpoint and [40, 19] in the model"
            in reshaped
        )
        assert (
            "the optimizer was AdamW and is SGD" in sgd
            and "optimizer param group 0 holds other parameters" in grouped
        )
        assert "states['sampler'] is not in the checkpoint" in states
        assert "holds no step 7; its newest is 1" in step and "holds no checkpoint" in nowhere


def _unsaveable(rank: int, world: int, folder: Path) -> None:
    made = make_sharded()
    engine = made[2]
    for extra, message in (
        ({"fn": [print]}, r"extra\.fn\[0\] is a builtin_function_or_method, which has no form"),
        ({"deep": {"er": object()}}, r"extra\.deep\.er is a object"),
    ):
        with pytest.raises(CheckpointError, match=message):
            zs.save(folder, engine, step=0, extra=extra)
    only_one = {"broken": object()} if rank == 1 else {"fine": 1}
    with pytest.raises(CheckpointError, match=r"extra\.broken is a object"):
        zs.save(folder, engine, step=0, extra=only_one)
    for bad in (
        {"step": -1},
        {"step": 1.0},
        {"step": 1, "keep_last": 0},
        {"step": 1, "keep_every": 5},
    ):
        with pytest.raises(ConfigError):
            zs.save(folder, engine, **bad)
    with pytest.raises(CheckpointError, match="the name 'rng' cannot be used"):
        zs.save(folder, engine, step=0, states={"rng": Loader(0)})
    for clip in (False, True):
        made[0](*batch(rank, 0)).backward()
        if clip:
            engine.clip_grad_norm_(1.0)
        with pytest.raises(
            CheckpointError,
            match=r"gradients that no step has taken.*save after optimizer.step\(\)",
        ):
            zs.save(folder, engine, step=0)
        made[1].zero_grad()
    assert not list(folder.iterdir())
    made[0](*batch(rank, 0)).backward()
    made[1].step()
    zs.save(folder, engine, step=1)  # before zero_grad()
    engine.close()


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    run_ranks(2, _unsaveable, tmp_path)


# -------------------------------------------------------------------------------- in the background


def _background(rank: int, world: int, folder: Path, row: str, transport: str) -> None:
    made = make_sharded(row, transport)
    engine = made[2]
    gate = threading.Event()
    real = saving.write_shard

    def slow(*args: Any, **options: Any) -> Any:
        assert gate.wait(300)
        return real(*args, **options)

    saving.write_shard = slow
    try:
        with zs.Saver(folder, engine, keep_last=2) as saver:
            take_steps(rank, 2, *made)
            states = [_state(engine)]
            saver.save(2)
            for step in range(2, 4):  # training goes on while nothing is on disk
                take_steps(rank, [step], *made)
            assert zs.latest_step(folder) is None
            states.append(_state(engine))
            gate.set()
            saver.save(4)
            assert zs.latest_step(folder) in (2, 4)
            saver.wait()
            assert zs.latest_step(folder) == 4
            for step, state in zip((2, 4), states, strict=True):
                zs.load(folder, engine, step=step)
                assert equal(_state(engine), state), step
            memory = {key: tensor.data_ptr() for key, tensor in saver._staging.items()}
            take_steps(rank, [4], *made)
            saver.save(5)
            assert {key: tensor.data_ptr() for key, tensor in saver._staging.items()} == memory, (
                "staged where it was before"
            )
        assert sorted(path.name for path in folder.glob("step-*")) == [
            "step-0000000004",
            "step-0000000005",
        ]
        zs.load(folder, engine, step=4)
        assert equal(_state(engine), states[1])
    finally:
        saving.write_shard = real
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_save_in_the_background_holds_the_state_of_its_moment(
    tmp_path: Path, row: str, transport: str
) -> None:
    run_ranks(2, _background, tmp_path, row, transport)


def _failing(rank: int, world: int, folder: Path, background: bool) -> None:
    made = make_sharded()
    engine = made[2]
    zs.save(folder, engine, step=1)
    real = saving.write_shard

    for failure in (CheckpointError("the disk is on fire"), ZeroDivisionError("a bug")):

        def broken(*args: Any, failure: Exception = failure, **options: Any) -> Any:
            raise failure

        saver = zs.Saver(folder, engine, background=background)
        saving.write_shard = broken if rank == 1 else real
        try:
            with pytest.raises(CheckpointError, match=r"the disk is on fire|a bug"):
                saver.save(2)
                take_steps(rank, [0], *made)
                saver.save(3)
        finally:
            saving.write_shard = real
        assert zs.latest_step(folder) == 1
        assert not [path for path in folder.iterdir() if path.name.startswith(".saving")]
        saver.save(4)
        saver.close()
        assert zs.latest_step(folder) == 4
        inside.exchange(engine, b"")
        if rank == 0:
            for path in (folder / "step-0000000004").iterdir():
                path.unlink()
            (folder / "step-0000000004").rmdir()
        inside.exchange(engine, b"")
    take_steps(rank, [1], *made)
    engine.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    tmp_path: Path, background: bool
) -> None:
    run_ranks(2, _failing, tmp_path, background)


def _from_one(rank: int, world: int, folder: Path) -> tuple[list[str], tuple[Any, ...]]:
    engine = make_sharded()[2]
    torch.manual_seed(rank)
    restored = zs.load(folder, engine)
    drawn = _draws()
    assert not zs.load(folder, engine, generators=False).skipped
    engine.close()
    return restored.skipped, drawn


def test_generators_of_one_rank_are_those_of_all_that_load_them_which_is_said(
    tmp_path: Path,
) -> None:
    engine = make_sharded()[2]
    zs.save(tmp_path, engine, step=1)
    expected = _draws()
    assert not zs.load(tmp_path, engine).skipped and _draws() == expected
    engine.close()
    for skipped, drawn in run_ranks(2, _from_one, tmp_path):
        assert drawn == expected
        assert len(skipped) == 1 and "states['rng']: one rank saved them, and all 2" in skipped[0]


# ------------------------------------------------------------------------ a run that has gone back


def _went_back(rank: int, world: int, folder: Path, background: bool) -> list[str]:
    """Save steps 1 to 6, go back to 2, and save 3 to 5 again."""
    made = make_sharded()
    engine = made[2]
    options: Any = {"background": background, "keep_last": 3, "keep_every": 2}
    with capture() as lines:
        with zs.Saver(folder, engine, **options) as saver:
            for number in range(1, 7):
                take_steps(rank, [number], *made)
                saver.save(number)
        assert not lines, "a run that goes on says nothing"
        zs.load(folder, engine, step=2)
        with zs.Saver(folder, engine, **options) as saver:
            for number in (3, 4, 5):
                take_steps(rank, [number + 10], *made)
                saver.save(number)
    saved_last = _state(engine)
    assert list(list_steps(folder)) == [2, 3, 4, 5, 6], "what is divided stays, and the newest"
    assert zs.latest_step(folder) == 5
    take_steps(rank, [20], *made)
    assert zs.load(folder, engine).step == 5 and equal(_state(engine), saved_last)
    assert zs.load(folder, engine, step=6).step == 6 and not equal(_state(engine), saved_last)
    if rank == 0:
        (folder / "step-0000000005" / "manifest.json").write_text("torn")
    inside.exchange(engine, b"")
    with pytest.raises(CheckpointError, match=r"5/manifest\.json is damaged"):
        zs.load(folder, engine)
    assert zs.load(folder, engine, fallback="previous").step == 4, "not 6, of the other branch"
    zs.save(folder, engine, step=1, keep_last=1)  # back again
    assert zs.latest_step(folder) == 1 and list(list_steps(folder)) == [1]
    zs.save(folder, engine, step=1)
    zs.save(folder, engine, step=2)
    assert zs.latest_step(folder) == 2
    engine.close()
    return lines


@contextmanager
def capture() -> Iterator[list[str]]:
    """Yield the lines that are logged inside."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)


@pytest.mark.parametrize("background", [True, False])
def test_a_run_that_has_gone_back_resumes_what_it_has_saved_last(
    tmp_path: Path, background: bool
) -> None:
    (line,), others = run_ranks(2, _went_back, tmp_path / "run", background)
    assert "step 3 is saved after step 6" in line and "what was saved last" in line
    assert not others, "rank 0 says it"


def test_steps_from_before_there_were_branches_are_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    engine = make_sharded()[2]
    for number in (1, 2, 10):
        path = zs.save(tmp_path, engine, step=number)
        assert b"branch" not in (path / "manifest.json").read_bytes(), "as it was before"
    assert zs.latest_step(tmp_path) == 10
    zs.save(tmp_path, engine, step=3)
    assert saved_order(tmp_path) == [(0, 1), (0, 2), (0, 10), (1, 3)]
    engine.close()


# ------------------------------------------------------------------------ a reader beside a writer


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize(
    "when", ["before the manifest", "before the list", "before the pieces", "between pieces"]
)
def test_a_step_that_changes_while_it_is_read_is_one_save_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, change: str, verify: bool
) -> None:
    model, optimizer, engine = make_sharded()
    zs.save(tmp_path, engine, step=1)
    first = _state(engine)
    take_steps(0, [0], model, optimizer, engine)
    second = _state(engine)
    names = {
        "before the manifest": ("manifest", StepFiles),
        "before the list": ("check", StepFiles),
        "before the pieces": ("read", OpenShards),
        "between pieces": ("read", ShardReader),
    }
    name, owner = names[when]
    really, calls = getattr(owner, name), []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(self)
        if len(calls) == (3 if when == "between pieces" else 1):
            if change == "replaced":
                with engine.gathered(writeback=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(second[names_of[id(parameter)]])
                zs.save(tmp_path, engine, step=1)
            else:
                shutil.rmtree(tmp_path / "step-0000000001")
        return really(self, *args)

    names_of = {id(parameter): key for key, parameter in model.named_parameters()}
    monkeypatch.setattr(owner, name, interrupted)
    try:
        zs.load(tmp_path, engine, verify=verify)
    except CheckpointError as error:
        assert f"was {change}" in str(error) and "damaged" not in str(error)
        assert when != "between pieces", "the file is open"
    else:
        assert equal(_state(engine), first), "one save, whole"
        assert when == "between pieces"
    engine.close()
