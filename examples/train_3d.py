"""Train a small Llama, byte by byte, on data x tensor x pipeline parallel ranks.

    zeroshard run --nproc 8 examples/train_3d.py --dp 2 --tp 2 --pp 2
    zeroshard run --nproc 4 examples/train_3d.py --dp 2 --pp 2 --policy zero2 --schedule gpipe
    # weights stay gathered over the micro-batches of a stage, as far as they fit
    zeroshard run --nproc 4 examples/train_3d.py --dp 2 --pp 2 --budget 64MiB
    # saves, and goes on from there on any other axes
    zeroshard run --nproc 4 examples/train_3d.py --dp 2 --tp 2 --checkpoint DIR
    zeroshard run --nproc 4 examples/train_3d.py --dp 2 --pp 2 --checkpoint DIR --steps 80

Tensor parallelism and pipelines are torch's own: ``parallelize_module`` cuts the layers, a schedule
of ``torch.distributed.pipelining`` runs the stages. The lines marked `# zeroshard` shard what is
left on each rank over its data parallel ranks. Every axis may be 1, and the losses are the same for
all of them, up to rounding.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zeroshard as zs

BYTES = 256  # the vocabulary
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


# ---- the model


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        y = self.norm1(x)
        # as many heads as this rank has columns of
        q, k, v = (
            one(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The layers ``[first, last)`` of a model of `layers`: a stage of a pipeline, or all of it."""

    def __init__(self, args: argparse.Namespace, stage: int) -> None:
        super().__init__()
        width, per_stage = args.width, args.layers // args.pp
        numbers = range(stage * per_stage, (stage + 1) * per_stage)
        # every parameter has a seed of its own, so that it is the same in whatever stage it is
        self.embed = nn.Embedding(BYTES, width) if stage == 0 else None
        self.layers = nn.ModuleDict({str(number): Layer(width, args.heads) for number in numbers})
        is_last = stage == args.pp - 1
        self.norm = nn.RMSNorm(width) if is_last else None
        self.head = nn.Linear(width, BYTES, bias=False) if is_last else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                nn.init.normal_(parameter, std=0.05, generator=seeded)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [batch, time, 256] of bytes [batch, time], or go on from the stage
        before with its output [batch, time, width].
        """
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def cut(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism: cut the linear layers by columns, then by rows, Megatron-LM's way."""
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    rows = dict.fromkeys(("o", "down"), RowwiseParallel())
    for layer in model.layers.values():
        parallelize_module(layer, mesh, columns | rows)
    if model.embed is not None:
        parallelize_module(model.embed, mesh, RowwiseParallel(input_layouts=Replicate()))
    if model.head is not None:
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the data: the source of Python's standard library


def text(num_bytes: int = 4_000_000) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"".join(file.read_bytes() for file in files)[:num_bytes]
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


def batch_of(data: Tensor, args: argparse.Namespace, step: int, dp: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets [batch, time] of one data parallel rank: the batch of a step
    is the same on any number of them.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - args.time - 1, (args.batch,), generator=generator)
    share = starts.chunk(args.dp)[dp]
    windows = torch.stack([data[start : start + args.time + 1] for start in share.tolist()])
    return windows[:, :-1], windows[:, 1:]


# ---- the training


def main() -> None:
    args = arguments()
    zs.init_distributed()  # zeroshard
    mesh = init_device_mesh("cpu", (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = Llama(args, pp)
    if args.tp > 1:
        cut(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    policy = {"policy": args.policy, "mesh": mesh}
    schedule = None
    if args.pp > 1:
        device = torch.device("cpu")
        stage = PipelineStage(model, pp, args.pp, device, group=mesh.get_group("pp"))
        schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=loss_of)
        engine = zs.shard(stage, optimizer, **policy)  # zeroshard
        engine.follow(schedule, budget=args.budget)  # zeroshard
    else:
        engine = zs.shard(model, optimizer, **policy)  # zeroshard
    first = 0
    if args.checkpoint is not None and zs.latest_step(args.checkpoint) is not None:
        first = zs.load(args.checkpoint, engine).step  # zeroshard

    data, begin = text(), time.perf_counter()
    for step in range(first, args.steps):
        inputs, targets = batch_of(data, args, step, dp)
        losses: list[Tensor] = []
        if schedule is None:
            losses.append(loss_of(model(inputs), targets))
            losses[0].backward()
        elif pp == 0:
            schedule.step(inputs)
        elif pp == args.pp - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        engine.clip_grad_norm_(1.0)  # zeroshard
        optimizer.step()
        optimizer.zero_grad()
        loss = average(losses)
        if dist.get_rank() == 0 and (step % 10 == 9 or step == first):
            seconds = time.perf_counter() - begin
            rate = (step + 1 - first) * args.batch * args.time / seconds
            print(f"step {step + 1:4d}   loss {loss:.4f} nats/byte   {rate:7.0f} bytes/s")
    if args.checkpoint is not None:
        zs.save(args.checkpoint, engine, step=args.steps)  # zeroshard
    if dist.get_rank() == 0:
        print(f"at rest on each rank: {engine.memory().total / 1e6:.1f} MB of states")
    engine.close()
    dist.destroy_process_group()


def average(losses: list[Tensor]) -> float:
    """Return the mean of the losses of those ranks that have any, on every rank."""
    total = torch.tensor([sum(one.item() for one in losses), float(len(losses))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks along this axis")
    parser.add_argument("--policy", default="zero3", help="a row of the table: ddp to zero3")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline's step")
    parser.add_argument("--budget", help="bytes of weights gathered in a pipeline: 64MiB")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences, of all ranks together")
    parser.add_argument("--time", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint", type=Path, help="a directory to load from and save to")
    args = parser.parse_args()
    if args.layers % args.pp or args.batch % (args.dp * args.micro_batches):
        parser.error("--layers are divided by --pp, --batch by --dp and --micro-batches")
    return args


if __name__ == "__main__":
    main()
