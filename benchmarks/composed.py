"""ZeRO-3 beside FSDP2 where other axes of the mesh are torch's: tensor and pipeline parallelism.

    python -m benchmarks.composed --size small --pairs 12 --steps 3
    python -m benchmarks.composed --contenders zero3+tp,fsdp2+tp --json

    zero3+tp, fsdp2+tp    parallelize_module over tp 2, then sharded over dp 2
    zero3+pp, fsdp2+pp    two stages under 1F1B, each sharded over dp 2

Every contender trains the same decoder from the same weights on the same tokens: its first loss is
that of the others. All are built in one job of four ranks and take turns (A B A B ...); a turn is
timed between two barriers, after an untimed step. The speed of a pair of turns is one ratio, of
which the median and its bootstrap interval are shown (stats.py).

The decoder is model.GPT with queries, keys and values of their own, since tensor parallelism cuts
each by heads. Four micro-batches to a step of a pipeline; a step of the others takes as many
sequences at once.

What it does not do: clip (torch's own knows no norm over several meshes), measure memory or bytes
on the wire, or GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.contenders import adamw
from benchmarks.model import Batches
from benchmarks.plan import SIZES, Size
from benchmarks.ranks import start, timed
from benchmarks.results import ComparisonResult, ContenderResult, Report, Run, machine_facts
from benchmarks.stats import bootstrap_median, judge
from benchmarks.tables import grid
from zeroshard.terminal import Option, listed, one_of

__all__ = ["CONTENDERS", "Decoder", "main", "stages_of", "table"]

RANKS, WAYS = 4, 2  # ranks, and how many of them tensor or pipeline parallelism takes
MICRO_BATCHES = 4
TARGET = 1.0  # times as fast as FSDP2
CONTENDERS = ("zero3+tp", "fsdp2+tp", "zero3+pp", "fsdp2+pp")


# ------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    """model.Block, whose attention takes as many heads as its own projections have."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.head_width = width // size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        normed = self.norm1(x)
        heads = (*x.shape[:2], -1, self.head_width)
        q, k, v = (one(normed).view(heads).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class Decoder(nn.Module):
    """Tokens to logits, or one pipeline stage's part of that: only the first has embeddings, and
    only the last a head.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token: nn.Embedding | None = nn.Embedding(size.vocabulary, size.width)
        self.position: nn.Embedding | None = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head: nn.Module | None = nn.Sequential(
            nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        )
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time] tokens, or hidden states [batch, time, width] of the stage before."""
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def stages_of(size: Size, number: int, num_stages: int) -> Decoder:
    """Return stage `number` of the decoder, with the weights that it has in the whole."""
    stage = Decoder(size)
    first, last = (size.layers * end // num_stages for end in (number, number + 1))
    stage.blocks = nn.ModuleList(list(stage.blocks)[first:last])
    if number > 0:
        stage.token = stage.position = None
    if number < num_stages - 1:
        stage.head = None
    return stage


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------ contenders

Step = Callable[[Tensor, Tensor], float]  # inputs and targets -> this rank's loss, 0.0 without one
Take = Callable[[int], float]  # the same, by the number of the step


def _fsdp2(module: Decoder, mesh: DeviceMesh) -> torch.optim.AdamW:
    """Shard `module` over the "dp" of `mesh`, a group per block and one for the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh["dp"])
    return adamw(module.parameters())


def _tensor(size: Size, name: str) -> Step:
    """Each block cut by heads and by its inner width, as torch's tutorial does."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    import zeroshard as zs

    mesh = init_device_mesh("cpu", (RANKS // WAYS, WAYS), mesh_dim_names=("dp", "tp"))
    model = Decoder(size)
    for block in model.blocks:
        ways: dict[str, ParallelStyle] = {one: ColwiseParallel() for one in ("q", "k", "v", "up")}
        parallelize_module(
            block, mesh["tp"], ways | {"out": RowwiseParallel(), "down": RowwiseParallel()}
        )
    ours = name.startswith("zero3")
    optimizer = adamw(model.parameters()) if ours else _fsdp2(model, mesh)
    if ours:
        zs.shard(model, optimizer, stage=3, mesh=mesh)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = _loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _pipeline(size: Size, name: str) -> Step:
    """Two stages under 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import zeroshard as zs

    mesh = init_device_mesh("cpu", (WAYS, RANKS // WAYS), mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    module = stages_of(size, number, WAYS)
    stage = PipelineStage(module, number, WAYS, torch.device("cpu"), group=mesh.get_group("pp"))
    ours = name.startswith("zero3")
    optimizer = adamw(module.parameters()) if ours else _fsdp2(module, mesh)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    if ours:
        engine = zs.shard(stage, optimizer, stage=3, mesh=mesh)  # type: ignore[arg-type,unused-ignore]
        follow = engine.follow  # type: ignore[attr-defined,unused-ignore]
        follow(schedule, budget="64GiB")  # weights stay gathered over micro-batches

    def step(inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / MICRO_BATCHES

    return step


def _built(size: Size, name: str) -> Take:
    """Return a step of contender `name` on this rank's part of the global batch."""
    torch.manual_seed(0)
    is_pipeline = name.endswith("+pp")
    step = (_pipeline if is_pipeline else _tensor)(size, name)
    rank = dist.get_rank()
    place = rank % (RANKS // WAYS) if is_pipeline else rank // WAYS  # along dp
    batches = Batches(size, rank=place, num_ranks=RANKS // WAYS, device=torch.device("cpu"))

    def take(number: int) -> float:
        drawn = [batches[MICRO_BATCHES * number + index] for index in range(MICRO_BATCHES)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
        return step(inputs, targets)

    return take


# ------------------------------------------------------------------------------------ turns


def _measure(size: Size, names: Sequence[str], pairs: int, steps: int) -> Run:
    takes = {name: _built(size, name) for name in names}
    parameters = sum(parameter.numel() for parameter in Decoder(size).parameters())
    tokens = MICRO_BATCHES * size.tokens // WAYS  # of a rank, where two share a batch
    run = Run(size.name, "fp32", RANKS, 1, "cpu", parameters, tokens)
    for name, take in takes.items():
        first = torch.tensor([take(0)])
        dist.all_reduce(first)  # of a pipeline, the ranks of the last stage have one
        sharing = RANKS // WAYS if name.endswith("+pp") else RANKS
        run.contenders.append(ContenderResult(name, losses=[first.item() / sharing]))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(pairs):
        for name, take in takes.items():
            seconds[name].append(steps * timed(take, steps))
    for result in run.contenders:
        result.step_s = [one / steps for one in seconds[result.name]]
    for name in names:
        other = name.replace("zero3", "fsdp2")
        if name.startswith("zero3") and other in names:
            both = [list(pair) for pair in zip(seconds[name], seconds[other], strict=True)]
            run.comparisons.append(ComparisonResult(name, other, TARGET, steps, both))
    return run


def table(run: Run) -> str:
    """Return medians of every contender, and how they compare, as markdown."""
    head = f"{run.num_parameters:,} parameters, {run.num_ranks} ranks, {run.tokens} tokens a rank"
    speeds, ratios = [], []
    for one in run.contenders:
        step_s = bootstrap_median(one.step_s)
        rate = run.num_ranks * run.tokens / step_s.median
        milliseconds = " to ".join(f"{1e3 * value:.1f}" for value in (step_s.low, step_s.high))
        took = f"{1e3 * step_s.median:.1f} ({milliseconds})"
        speeds.append((one.name, took, f"{rate:,.0f}", f"{one.losses[0]:.5f}"))
    for pair in run.comparisons:
        ratio, verdict = pair.ratio, judge(pair.ratio, TARGET, num_pairs=len(pair.pairs))
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        name = f"{pair.contender} / {pair.reference}"
        ratios.append((name, f"{ratio.median:.3f}", interval, verdict))
    times = grid("", ("", "ms/step", "tokens/s of all ranks", "first loss"), speeds)
    against = grid("", ("", "times as fast", "95% interval", "at least 1.00"), ratios)
    return f"{head} and step\n\n{times.markdown()}\n{against.markdown()}"


# ------------------------------------------------------------------------------------ command line


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.composed", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--size", choices=("tiny", "small", "medium"), default="small")
    named = Option("--contenders NAME,NAME", None, listed(one_of(CONTENDERS)), CONTENDERS)
    named.add_to(parser)
    parser.add_argument("--pairs", type=int, default=12, help="turns of every contender")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--json", action="store_true", help="all raw numbers")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    return parser


def main(arguments: list[str]) -> int:
    """Start the ranks, and print what rank 0 has written."""
    given = _parser().parse_args(arguments)
    if given.out is None:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        facts = machine_facts()
        with tempfile.TemporaryDirectory(prefix="zeroshard-composed-") as directory:
            out = Path(directory, "run.json")
            code = start(__file__, RANKS, [*arguments, "--out", str(out)])
            if code:
                return code
            run = read(out)
        report = Report("composed", arguments, started, facts, [run])
        print(report.to_json() if given.json else table(run))
        return 0
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run = _measure(SIZES[given.size], given.contenders, given.pairs, given.steps)
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(asdict(run)), encoding="utf-8")
    dist.destroy_process_group()
    return 0


def read(file: Path) -> Run:
    """Return the run that rank 0 has written."""
    data = json.loads(file.read_text(encoding="utf-8"))
    contenders = [ContenderResult(**one) for one in data.pop("contenders")]
    comparisons = [ComparisonResult(**one) for one in data.pop("comparisons")]
    return Run(**data, contenders=contenders, comparisons=comparisons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
