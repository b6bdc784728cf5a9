"""The trail of a run: equal on any number of ranks, in any row and on any tier; and a fault of one
rank, leaf or unit is named by step, phase, unit and rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.features.test_leaves import Run, Training
from tests.support import inside
from tests.support.harness import RankError, run_ranks
from zeroshard.launch.cli import main
from zeroshard.runtime.segment import Segment

STEPS = 3
AT = 1  # the step with the fault
UNIT = "blocks.0"
LEAF = 5  # computed by rank 1 of 2, in the last round but one


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Flip a bit of the first element, the last one if no other is given."""
    with torch.no_grad():
        first = tensor.detach().view(-1)[:1]
        first.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).bitwise_xor_(1 << bit)


def segment_of(training: Training) -> Segment:
    return inside.unit(training.engine, UNIT).trainable[0]


def shard_of(training: Training) -> torch.Tensor:
    """What this rank steps of a parameter of UNIT: its part of the weights, in fp32."""
    shards = [one for one in inside.param_shards(training.engine) if one.name.startswith(UNIT)]
    return shards[0].tensor


# ------------------------------------------------------------------------------- deliberate faults
# each is a context around one step of one rank; those of a rest act before the step begins


@contextmanager
def weight_at_rest(training: Training) -> Iterator[None]:
    flip(shard_of(training))
    yield


@contextmanager
def moment_at_rest(training: Training, key: str = "exp_avg") -> Iterator[None]:
    flip(training.optimizer.state[shard_of(training)][key], 12)
    yield


@contextmanager
def step_count(training: Training) -> Iterator[None]:
    training.optimizer.state[shard_of(training)]["step"].add_(1)
    yield


@contextmanager
def copy_of_a_weight(training: Training) -> Iterator[None]:
    """Of a part that another rank steps."""
    flat = segment_of(training).flat
    with gathered_first(training, lambda: flip(flat.full[: flat.own_span[0]])):
        yield


@contextmanager
def gathered_first(training: Training, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, in the first forward of UNIT."""
    left = [act]
    block = training.model.get_submodule(UNIT)
    handle = block[0].register_forward_pre_hook(lambda *_: left.pop()() if left else None)
    yield
    handle.remove()
    assert not left


@contextmanager
def in_leaf(training: Training, change: Callable[[], Any]) -> Iterator[None]:
    """Call `change` before the loss of LEAF, on whichever rank computes it."""
    loss = training.loss

    def changed(step: int, leaf: int) -> torch.Tensor:
        undo = change() if leaf == LEAF else None
        try:
            return loss(step, leaf)
        finally:
            if undo is not None:
                undo()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "loss", changed)
        yield


def gradient_of_a_leaf(training: Training) -> AbstractContextManager[None]:
    weight = training.model.get_submodule(UNIT)[1].weight

    def scale() -> None:
        left = [1.0001]
        weight.register_hook(lambda grad: grad * (left.pop() if left else 1.0))

    return in_leaf(training, scale)


def seed_of_a_leaf(training: Training) -> AbstractContextManager[None]:
    return in_leaf(training, lambda: torch.manual_seed(1234) and None)


@contextmanager
def data_of_a_leaf(training: Training) -> Iterator[None]:
    loss = training.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "loss", lambda step, leaf: loss(step + 50 * (leaf == LEAF), leaf))
        yield


@contextmanager
def reduced_sum(training: Training) -> Iterator[None]:
    accumulator = segment_of(training).grad.accumulator  # type: ignore[union-attr]
    add, left = accumulator.add_leaves, [True]

    def wrong(spans: Any, sums: torch.Tensor) -> None:
        if left:
            left.pop()
            flip(sums, 20)  # the last one would be rounded away
        add(spans, sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulator, "add_leaves", wrong)
        yield


@contextmanager
def after_clip(training: Training) -> Iterator[None]:
    clip = training.engine.clip_grad_norm_

    def clipped(norm: float) -> torch.Tensor:
        out = clip(norm)
        accumulator = segment_of(training).grad.accumulator  # type: ignore[union-attr]
        gradient = accumulator.resting()
        assert gradient is not None
        flip(gradient.numbers.whole[accumulator.own[0] :])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.engine, "clip_grad_norm_", clipped)
        yield


@contextmanager
def learning_rate(training: Training) -> Iterator[None]:
    """Twice the rate, behind the back of the ranks' comparison."""
    group = training.optimizer.param_groups[0]
    rate = group["lr"]
    hooks = [
        training.optimizer.register_step_pre_hook(lambda *_: group.update(lr=2 * rate)),
        training.optimizer.register_step_post_hook(lambda *_: group.update(lr=rate)),
    ]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def publish(training: Training) -> Iterator[None]:
    segment = segment_of(training)
    send = segment.publish

    def wrong(*, everything: bool = True) -> None:
        send(everything=everything)
        flip(segment.weight.whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "publish", wrong)
        yield


@contextmanager
def other_option(training: Training) -> Iterator[None]:
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    yield


@contextmanager
def other_norm(training: Training) -> Iterator[None]:
    clip = training.engine.clip_grad_norm_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.engine, "clip_grad_norm_", lambda norm: clip(0.9 * norm))
        yield


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what `compare` is to say of it."""

    act: Callable[[Training], AbstractContextManager[None]]
    phase: str
    unit: str = UNIT
    leaf: int | None = None
    ranks: tuple[int, ...] = (1,)  # that the fault is on, and that are named
    options: dict[str, Any] = field(default_factory=lambda: {"stage": 3})


BF16 = {"stage": 3, "precision": "bf16"}
FAULTS = {
    "a flipped bit in the weights at rest": Fault(weight_at_rest, "weight"),
    "a flipped bit in a replicated weight": Fault(
        copy_of_a_weight, "gather", options={"stage": 1, "comm": {"transport": "gloo"}}
    ),
    "a scaled gradient of one leaf": Fault(gradient_of_a_leaf, "leaf", leaf=LEAF),
    "another dropout seed of one leaf": Fault(seed_of_a_leaf, "leaf", "head.weight", LEAF),
    "other data of one leaf": Fault(data_of_a_leaf, "leaf", "head.weight", LEAF),
    "a flipped bit in a reduced sum": Fault(reduced_sum, "sum"),
    "a flipped bit in a reduced sum, stage 1": Fault(reduced_sum, "sum", options={"stage": 1}),
    "a flipped bit in an averaged gradient": Fault(after_clip, "grad"),
    "another norm to clip to": Fault(other_norm, "grad", "embed.weight", ranks=(0, 1)),
    "another option": Fault(
        other_option, "option", "option 'weight_decay' of optimizer param group 0", ranks=(0, 1)
    ),
    "a wrong learning rate on one rank": Fault(learning_rate, "master", "embed.weight"),
    "a wrong learning rate, stage 0": Fault(
        learning_rate, "master", "embed.weight", options={"stage": 0}
    ),
    "a flipped bit in a moment": Fault(moment_at_rest, "state exp_avg", ranks=(0,)),
    "a flipped bit in the other moment": Fault(
        partial(moment_at_rest, key="exp_avg_sq"), "state exp_avg_sq"
    ),
    "a wrong count of steps": Fault(step_count, "state step", ranks=(0,)),
    "a wrong weight published": Fault(publish, "published", options=BF16),
}


def _write(rank: int, world: int, run: Run, path: Path, name: str) -> None:
    fault = FAULTS.get(name)
    training = Training(run.on(world))
    # a rank that does not compute LEAF does nothing
    there = fault is not None and (fault.leaf is not None or rank in fault.ranks)
    with training.engine.trail(path, every=1):
        for step in range(STEPS):
            if there and step == AT:
                assert fault is not None
                with fault.act(training):
                    training.step(step)
            else:
                training.step(step)
    training.engine.close()


def write(world: int, run: Run, path: Path, fault: str = "") -> Path:
    """Write the trail of `run` on `world` ranks."""
    run_ranks(world, _write, run, path, fault)
    return path


def compare(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what ``zeroshard compare --json`` says."""
    capsys.readouterr()
    code = main(["compare", str(first), str(second), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["equal"] else 1)
    return found


# ----------------------------------------------------------------------------------------- no fault


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trail of one rank."""
    return write(1, Run(), tmp_path_factory.mktemp("alone") / "trail")


def _runs(tmp_path: Path) -> dict[str, tuple[int, Run]]:
    away = dict.fromkeys(("weight", "grad", "optimizer"), "host")
    on_disk = dict.fromkeys(("weight", "grad", "optimizer"), "disk") | {"disk_path": str(tmp_path)}
    nodes = {"comm": {"node_size": 2, "transport": "gloo"}}
    return {
        "zero3, 2 ranks": (2, Run({"stage": 3})),
        "zero3, 3 ranks": (3, Run({"stage": 3})),
        "ddp, 3 ranks": (3, Run({"stage": 0})),
        "zero1, 2 ranks": (2, Run({"stage": 1})),
        "zero2, 3 ranks": (3, Run({"stage": 2})),
        "keep": (2, Run({"policy": "zero3-keep"})),
        **{row: (4, Run({"policy": row} | nodes)) for row in ("hpz", "mics", "hfsdp")},
        "host": (2, Run({"stage": 3, "offload": away})),
        "half on the host": (2, Run({"stage": 3, "offload": away | {"fraction": 0.5}})),
        "disk": (2, Run({"stage": 3, "offload": on_disk})),
        "uneven": (3, Run({"stage": 3}, uneven="shares", shares=(1, 2, 3))),
        "uneven leaves": (3, Run({"stage": 1}, uneven="batch_shares", shares=(1, 2, 3))),
    }


def test_trails_of_any_ranks_rows_and_tiers_are_equal(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (world, run) in _runs(tmp_path).items():
        found = compare(alone, write(world, run, tmp_path / name), capsys)
        assert found["equal"] and found["steps"] == [0, 1, 2], (name, found["first"])
    first, second = tmp_path / "zero3, 3 ranks", tmp_path / "hpz"
    assert compare(first, second, capsys)["equal"]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "weighted", "skips"])
def test_trails_of_other_precisions_weights_and_skipped_units_are_equal(
    kind: str, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {kind: True} if kind in ("weighted", "skips") else {}
    options = {} if more else {"precision": kind}
    one = write(1, Run(options, **more), tmp_path / "one")
    two = write(2, Run(options | {"stage": 3}, **more), tmp_path / "two")
    three = write(3, Run(options | {"stage": 1}, **more), tmp_path / "three")
    assert compare(one, two, capsys)["equal"]
    assert compare(one, three, capsys)["equal"]
    assert not compare(one, alone, capsys)["equal"], "it is another run"


# ------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, dict[str, Any]], Path]:
    """Return the trail of a run without a fault."""
    base, made = tmp_path_factory.mktemp("clean"), dict[str, Path]()

    def get(world: int, options: dict[str, Any]) -> Path:
        name = f"{world} {sorted(options)} {options.get('stage')}"
        if name not in made:
            made[name] = write(world, Run(options), base / str(len(made)))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_step_phase_unit_and_rank(
    name: str,
    clean: Callable[[int, dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[name]
    bad = write(2, Run(fault.options), tmp_path / "bad", name)
    others = {key: value for key, value in fault.options.items() if key != "comm"}
    for good in (clean(2, fault.options), clean(3, others | {"stage": 1})):
        first = compare(good, bad, capsys)["first"]
        phase = fault.phase.partition(" ")[0]
        told = [first[key] for key in ("step", "phase", "unit", "leaf")]
        assert told == [AT, phase, fault.unit, fault.leaf], first
        assert fault.phase.partition(" ")[2] in first["meaning"]
    first = compare(clean(2, fault.options), bad, capsys)["first"]
    if fault.leaf is not None:
        assert [one["ranks"] for one in first["holders"]] == [[1], [1]]
        return
    named = set(first["suspects"][str(bad)])
    assert named == set(fault.ranks), first


def test_a_trail_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def raised(options: dict[str, Any], directory: str, every: Any) -> str:
        try:
            run_ranks(1, _opened, options, tmp_path / directory, every)
        except RankError as error:
            return str(error)
        return ""

    assert "ConfigError: every=0" in raised({"leaves": 4}, "trail", 0)
    assert "ConfigError: engine.trail() needs" in raised({}, "trail", 1)
    assert "StorageError: trail" in raised({"leaves": 4}, "file/below", 1)


def _opened(rank: int, world: int, options: dict[str, Any], path: Path, every: int) -> None:
    with zs.shard(torch.nn.Linear(4, 4), **options).trail(path, every=every):
        pass
