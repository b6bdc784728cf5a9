"""Deliberate faults of one step of a run with leaves: what goes wrong, on which rank, and what
``zeroshard compare`` and ``zeroshard replay`` are to say of it.

Each is a context around one step of one rank; those of a rest act before the step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.test_leaves import Run, Training
from tests.support import inside
from tests.support.harness import run_ranks
from zeroshard.runtime.segment import Segment

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


# ------------------------------------------------------------------ states at rest


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
def master_at_rest(training: Training) -> Iterator[None]:
    master = segment_of(training).own_master
    assert master is not None
    flip(master.whole, 12)
    yield


# ------------------------------------------------------------------ gathers


@contextmanager
def kept_bytes(training: Training) -> Iterator[None]:
    """Keep what the step before has gathered."""
    flat = segment_of(training).flat

    def keep() -> None:
        training.stale = flat.full.clone()  # type: ignore[attr-defined]

    with gathered_first(training, keep):
        yield


@contextmanager
def stale_gather(training: Training) -> Iterator[None]:
    flat = segment_of(training).flat
    stale = training.stale  # type: ignore[attr-defined]

    def deliver() -> None:
        flat.full.copy_(stale)

    with gathered_first(training, deliver):
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


def scale_of_a_leaf(training: Training) -> AbstractContextManager[None]:
    backward = training.engine.backward

    def scale() -> Callable[[], None]:
        def once(loss: torch.Tensor, **options: Any) -> None:
            del training.engine.backward
            backward(loss * 1.001, **options)

        training.engine.backward = once  # type: ignore[method-assign]
        return lambda: None

    return in_leaf(training, scale)


@contextmanager
def doubled_leaf(training: Training) -> Iterator[None]:
    """The leaf that the rank had before, once more."""
    loss = training.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "loss", lambda step, leaf: loss(step, leaf - 2 * (leaf == LEAF)))
        yield


class _OtherGradient(torch.autograd.Function):
    """Hands its input on, and another gradient back."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grads[0] * 1.0001


def kernel(training: Training) -> AbstractContextManager[None]:
    """A forward that computes something else."""
    module = training.model.get_submodule(UNIT)[1]
    handle = []

    def wrong() -> Callable[[], None]:
        handle.append(module.register_forward_hook(lambda _, args, out: out * 1.0001))
        return lambda: handle.pop().remove()

    return in_leaf(training, wrong)


def gradient_of_inputs(training: Training) -> AbstractContextManager[None]:
    """A backward whose gradients of weights are right."""
    module = training.model.get_submodule(UNIT)[0]
    handle = []

    def wrong() -> Callable[[], None]:
        hook = lambda _, args: (_OtherGradient.apply(args[0]),)  # noqa: E731
        handle.append(module.register_forward_pre_hook(hook))
        return lambda: handle.pop().remove()

    return in_leaf(training, wrong)


# ------------------------------------------------------------------ reduces


def lost_leaf(training: Training) -> AbstractContextManager[None]:
    """What UNIT has of LEAF is not sent."""
    return inside.lost_leaf(training.engine, UNIT, LEAF)


@contextmanager
def first_sum(training: Training, change: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Change what the first reduce of the step leaves in the gradient."""
    bucket = segment_of(training).bucket
    assert bucket is not None
    wait, left = bucket.wait, [True]

    def changed(*, block: bool = True) -> None:
        coming = bucket.reduction
        wait(block=block)
        if left and coming is not None and bucket.reduction is None:
            left.clear()
            gradient = bucket.accumulator.resting()
            assert gradient is not None
            change(gradient.fetch(*bucket.accumulator.own))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "wait", changed)
        yield


def skipped_reduce(training: Training) -> AbstractContextManager[None]:
    return first_sum(training, torch.Tensor.zero_)


def reduced_sum(training: Training) -> AbstractContextManager[None]:
    return first_sum(training, partial(flip, bit=20))  # the last one would be rounded away


# ------------------------------------------------------------------ norm, step and publish


def norm_of_a_rank(training: Training) -> AbstractContextManager[None]:
    """A norm whose last bit is another on this rank, behind the back of the others."""
    return inside.other_norm(training.engine, 1 + 2**-23)


@contextmanager
def after_clip(training: Training) -> Iterator[None]:
    clip = training.engine.clip_grad_norm_

    def clipped(norm: float) -> torch.Tensor:
        out = clip(norm)
        accumulator = segment_of(training).bucket.accumulator  # type: ignore[union-attr]
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
def no_publish(training: Training) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_of(training), "follow", lambda *, everything: [])
        yield


@contextmanager
def publish(training: Training) -> Iterator[None]:
    segment = segment_of(training)
    send = segment.publish

    def wrong() -> None:
        flip(segment.weight.whole)
        send()

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
    """What goes wrong, and what is said of it."""

    act: Callable[[Training], AbstractContextManager[None]]
    phase: str
    unit: str = UNIT
    leaf: int | None = None
    ranks: tuple[int, ...] = (1,)  # that are named
    on: tuple[int, ...] = ()  # where it acts, if elsewhere
    before: Callable[[Training], AbstractContextManager[None]] = lambda _: nullcontext()
    options: dict[str, Any] = field(default_factory=lambda: {"stage": 3})


BF16 = {"stage": 3, "precision": "bf16"}
FAULTS = {
    "a flipped bit in the weights at rest": Fault(weight_at_rest, "weight"),
    "a flipped bit in a replicated weight": Fault(
        copy_of_a_weight, "gather forward", options={"stage": 1, "comm": {"transport": "gloo"}}
    ),
    # not in shared memory: what is gathered there may be another rank's
    "a stale gather": Fault(
        stale_gather,
        "gather forward",
        before=kept_bytes,
        options={"stage": 3, "comm": {"transport": "gloo"}},
    ),
    "a wrong kernel in the forward of one module": Fault(kernel, "forward", leaf=LEAF),
    "a wrong scale of one leaf": Fault(scale_of_a_leaf, "leaf", "head.weight", LEAF),
    "a wrong gradient of a module's inputs": Fault(gradient_of_inputs, "backward", leaf=LEAF),
    "a leaf computed twice": Fault(doubled_leaf, "forward", "embed.weight", LEAF),
    "a lost leaf": Fault(lost_leaf, "sum", ranks=(0, 1), on=(1,)),
    "a skipped reduce": Fault(skipped_reduce, "sum"),
    "a wrong norm on one rank": Fault(norm_of_a_rank, "norm", ""),
    "a scaled gradient of one leaf": Fault(gradient_of_a_leaf, "leaf", leaf=LEAF),
    "another dropout mask of one leaf": Fault(seed_of_a_leaf, "forward", "blocks.1", LEAF),
    "other data of one leaf": Fault(data_of_a_leaf, "forward", "embed.weight", LEAF),
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
    "a flipped bit in a master": Fault(master_at_rest, "master", options=BF16),
    "a publish left out": Fault(no_publish, "published", options=BF16),
    "a wrong weight published": Fault(publish, "published", options=BF16),
}


def _write(rank: int, world: int, run: Run, path: Path, name: str) -> None:
    fault = FAULTS.get(name)
    training = Training(run.on(world))
    # a rank that does not compute LEAF does nothing
    there = fault is not None and (fault.leaf is not None or rank in (fault.on or fault.ranks))
    with training.engine.trail(path, every=1):
        for step in range(run.steps):
            if fault is None or not there or step > AT:
                around: AbstractContextManager[None] = nullcontext()
            else:
                around = fault.act(training) if step == AT else fault.before(training)
            with around:
                training.step(step)
    training.engine.close()


def write(world: int, run: Run, path: Path, fault: str = "", *, timeout: float = 60) -> Path:
    """Write the trail of `run` on `world` ranks."""
    run_ranks(world, _write, run, path, fault, timeout=timeout)
    return path
