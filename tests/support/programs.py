"""Programs: small trainings with the options under which a device may go wrong, each run by an
engine or by plain PyTorch, on any device.

    run = PROGRAMS["no_sync"].train("cuda:0", transport="nccl")
    assert not run.differs_from(PROGRAMS["no_sync"].train_plainly("cuda:0"))

Plain PyTorch holds fp32 masters beside weights in the precision of the program, adds gradients in
fp32, and scales the loss in fp16, as the engine does; over several ranks each micro-batch's
gradients are summed in the precision of the program, as a native reduce does.

All batches are on the device before the first step, and losses are read after the last: between
them the host waits where the engine makes it wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.training import Net, Run, batch, final_state, take_steps, two_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**16  # what the engine begins with
WIDTH, LAYERS = 64, 4


def leave_as_it_is(model: Net) -> None:
    """Change nothing."""


def compile_blocks(model: Net) -> None:
    """Compile the forward of every block."""
    for block in model.blocks:
        forward: Any = torch.compile(block.forward)
        block.forward = forward


def checkpoint_on_host(model: Net) -> None:
    """Recompute every block in the backward, with its inputs on the host meanwhile."""
    zs.nn.checkpoint_blocks(model, tier="host")


@dataclass
class Trained:
    """What a program trains, for those who do something between two steps."""

    model: Net
    optimizer: torch.optim.Optimizer
    engine: zs.Engine
    rank: int
    data: Callable[[int, int], list[torch.Tensor]]
    extra: list[torch.Tensor] = field(default_factory=list)  # numbers to compare beside the losses
    kept: dict[str, Any] = field(default_factory=dict)  # from one step to a later one


@dataclass(frozen=True)
class Program:
    """What to train, and how."""

    row: str = "zero3"
    precision: str = "bf16"
    steps: int = 4
    layers: int = LAYERS
    micro_batches: int = 1
    no_sync: bool = False
    clip: float | None = None
    fused: bool = False  # the optimizer, which a step then waits for nothing with
    comm: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # others of shard()
    prepare: Callable[[Net], None] = leave_as_it_is  # before it is sharded
    after: Callable[[Trained, int], None] | None = None  # called with the number of each step taken

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        """Train in the row."""
        model = self._model(device)
        optimizer = two_groups(model, **self._way)
        engine = zs.shard(
            model,
            optimizer,
            policy=self.row,
            precision=self.precision,
            comm=zs.Comm.model_validate({"transport": transport, **self.comm}),
            offload=zs.Offload(**self.offload),
            **self.options,
        )
        if "nccl" in (transport, self.comm.get("transport")):  # in one process, too
            inside.send_all_gradients(engine)
        data = self._data(device, rank)
        trained = Trained(model, optimizer, engine, rank, data)
        losses = self.take(trained)
        losses += [number.item() for number in trained.extra]
        return Run(losses, _on_host(self.end(trained)), row=self.row)

    @property
    def _way(self) -> dict[str, Any]:
        return {"fused": True} if self.fused else {}

    def take(self, run: Trained) -> list[float]:
        """Take all steps; return the losses."""
        return take_steps(
            run.rank,
            self.steps,
            run.model,
            run.optimizer,
            run.engine,
            micro_batches=self.micro_batches,
            no_sync=self.no_sync,
            clip=self.clip,
            data=run.data,
            after=None if self.after is None else partial(self.after, run),
        )

    def end(self, run: Trained) -> dict[str, torch.Tensor]:
        """Return the model's state, and close the engine."""
        return final_state(run.model, run.engine)

    def train_plainly(self, device: str, *, rank: int = 0) -> Run:
        """Train without an engine."""
        model = self._model(device)
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        model.to(DTYPES[self.precision])
        shapes = nn.ParameterList(masters)
        optimizer = two_groups(shapes, **self._way)
        scale = FP16_SCALE if self.precision == "fp16" else 1.0
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        data, losses = self._data(device, rank), []
        for step in range(self.steps):
            for micro in range(self.micro_batches):
                loss = model(*data(rank, step * self.micro_batches + micro))
                (loss * scale).backward()
                losses.append(loss.detach())
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    unused = parameter.grad is None  # by this rank
                    grad = torch.zeros_like(parameter) if unused else parameter.grad
                    if ranks > 1:
                        dist.all_reduce(grad)
                    grad = grad.float()
                    master.grad = grad if master.grad is None else master.grad + grad
                    parameter.grad = None
            for master in masters:
                assert master.grad is not None
                master.grad /= scale * ranks
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        numbers = [loss.item() for loss in losses]
        return Run(numbers, _on_host(final_state(model, None)), row="plain")

    def _model(self, device: str) -> Net:
        torch.manual_seed(0)
        model = Net(width=WIDTH, layers=self.layers).to(device)
        self.prepare(model)
        return model

    def _data(self, device: str, rank: int) -> Callable[[int, int], list[torch.Tensor]]:
        """Return what gives the batch of a number: those of `rank` and of this training are there
        already.
        """
        load = cache(lambda rank, number: [_sent(tokens, device) for tokens in batch(rank, number)])
        for number in range(self.steps * self.micro_batches):
            load(rank, number)
        return load


def _sent(tokens: torch.Tensor, device: str) -> torch.Tensor:
    """Return a copy on `device`, for which the host does not wait: pageable memory is taken by
    value.
    """
    return tokens.to(device, non_blocking=True)


def _on_host(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


_PLAIN = Program()
PROGRAMS: dict[str, Program] = {
    "micro-batches": replace(_PLAIN, micro_batches=2),
    "micro-batches of stage 1": replace(_PLAIN, row="zero1", micro_batches=2),
    "no_sync": replace(_PLAIN, micro_batches=2, no_sync=True),
    "no_sync of stage 2": replace(_PLAIN, row="zero2", micro_batches=2, no_sync=True),
    "checkpointed on the host": replace(_PLAIN, prepare=checkpoint_on_host),
    "compiled blocks": replace(_PLAIN, prepare=compile_blocks),
    "gradient codec": replace(_PLAIN, comm={"grad_codec": "int4", "error_feedback": True}),
    "weight codec": replace(_PLAIN, comm={"weight_codec": "int8"}),
    "codecs and no_sync": replace(
        _PLAIN, micro_batches=2, no_sync=True, comm={"weight_codec": "int8", "grad_codec": "int4"}
    ),
    "a fraction on the host": replace(
        _PLAIN,
        row="zero2",
        micro_batches=2,
        offload={"grad": "host", "optimizer": "host", "fraction": 0.4},
    ),
    "everything on the host": replace(
        _PLAIN, offload={"weight": "host", "grad": "host", "optimizer": "host"}
    ),
}
"""By name; in bf16, where a reduce and a codec are not left out at world size 1."""
