"""Train a small GPT, byte by byte, on the source of Python's own standard library, sharded with
ZeRO.

    # ZeRO-3 on two processes, a few minutes
    zeroshard run --nproc 2 examples/train_gpt.py
    zeroshard run --nproc 2 examples/train_gpt.py --stage 2 --precision bf16
    # stages 0, 1, 2, 3 one after another, one table
    zeroshard run --nproc 2 examples/train_gpt.py --compare
    zeroshard run --nproc 2 examples/train_gpt.py --data my.txt more/*.txt --layers 8 --width 384
    # saves as it goes; the same line again goes on from there
    zeroshard run --nproc 2 examples/train_gpt.py --checkpoint DIR --resume
    # three steps, lane by lane: what waits for what
    zeroshard run --nproc 2 examples/train_gpt.py --steps 100 --trace traces
    zeroshard report traces/ZeRO-3
    # Muon for the matrices of the blocks, each stepped whole by one rank, and AdamW for the rest
    zeroshard run --nproc 2 examples/train_gpt.py --optimizer muon
    # a line of numbers per step, and a picture of them
    zeroshard run --nproc 2 examples/train_gpt.py --log log.jsonl
    python examples/plot_log.py log.jsonl loss.png
    # a hash of all that a step reads and writes: zeroshard compare says where two runs part
    zeroshard run --nproc 2 examples/train_gpt.py --leaves 8 --trail trails/a
    # one process needs no launcher
    python examples/train_gpt.py --steps 50

Everything but the lines marked `# zeroshard` is plain PyTorch: five that train, and as many that
save and resume. The text is on every machine already (``--data`` takes any files instead), one file
in ten is kept for validation, and the loss is in nats per byte, beside that of a unigram model,
which knows how often each byte occurs and nothing else.

With ``--checkpoint``, SIGTERM and Ctrl-C finish the step under way, save it and leave with exit
code 75 (preempted: please requeue) or 130. A run that resumes has the same losses, bit for bit, as
one that was never interrupted; on another number of processes, under another stage or in another
precision it goes on from the same state, too. When a rank dies, the steps since the last save are
lost. With ``--resume`` no step is: under ``zeroshard run --max-restarts 1`` (or torchrun's) all
ranks start again and go on by themselves, under ``zeroshard run --elastic`` the other ranks do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import statistics
import sysconfig
import time
import zlib
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor, nn

import zeroshard as zs

VALIDATION_WINDOWS = 64
TRACED = range(3, 6)  # the steps of --trace, counted from the first: after the warm-up
MB = 1e6
PREEMPTED = 75  # the exit code that asks a scheduler to queue the job again
# what does not change the numbers of a training
NOT_SETTINGS = (
    "data", "json", "log", "trace", "trail", "trail_every", "checkpoint", "save_every", "keep_last",
    "resume",
)  # fmt: skip


# ---- the model: a decoder-only transformer
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 192
    heads: int = 6
    context: int = 128
    vocabulary: int = 256  # bytes


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, time, width / heads] each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02
                )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats, or without `targets` the logits [batch, time,
        vocabulary].
        """
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )

    @torch.no_grad()
    def generate(
        self, prompt: bytes, num_bytes: int, temperature: float = 0.7, seed: int = 0
    ) -> bytes:
        """Continue `prompt`. Every rank calls it with the same arguments, so that all run the
        same forwards in step.
        """
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.config.context :])[:, -1] / temperature
            tokens = torch.cat(
                [tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1
            )
        return bytes(tokens[0].tolist())


# ---- the data
# --------------------------------------------------------------------------------------------------


def load_text(files: list[Path] | None) -> tuple[Tensor, Tensor]:
    """Return the bytes of the training files and of the validation files: one file in ten,
    chosen by its name.
    """
    if files:  # few files are cut, each into nine tenths and one
        texts = [path.read_bytes() for path in files]
        train = b"\n".join(text[: len(text) * 9 // 10] for text in texts)
        validation = b"\n".join(text[len(text) * 9 // 10 :] for text in texts)
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        names = [
            name
            for name in names
            if not {"site-packages", "dist-packages", "test", "tests"} & set(name.split("/"))
        ]
        held_out = [name for name in names if zlib.crc32(name.encode()) % 10 == 0]
        train = b"\n".join((root / name).read_bytes() for name in names if name not in held_out)
        validation = b"\n".join((root / name).read_bytes() for name in held_out)
    if len(validation) < 1000:
        raise SystemExit(
            f"train_gpt: only {len(validation)} bytes of validation text, at least 1000 are needed;"
            " give more with --data"
        )
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(validation), dtype=torch.uint8
    )


def windows(
    text: Tensor, starts: Tensor, context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cut inputs and targets [len(starts), context] out of `text`."""
    both = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return both[:, :-1], both[:, 1:]


def unigram_loss(train: Tensor, validation: Tensor) -> float:
    """Return the nats per byte that byte frequencies alone reach on `validation`."""
    counts = torch.bincount(train.long(), minlength=256).double() + 1
    return float(-(counts / counts.sum()).log()[validation.long()].mean())


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a launcher."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def across_ranks(*values: float) -> Tensor:
    """Return every rank's values [ranks, values]."""
    mine = torch.tensor([values], dtype=torch.float64)
    everyone = [mine] * rank_and_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return torch.cat(everyone)


@torch.no_grad()
def validate(model: GPT, text: Tensor, device: torch.device) -> float:
    """Return the mean loss over fixed windows, shared out among the ranks so that each runs the
    same number of forwards.
    """
    (rank, ranks), context = rank_and_size(), model.config.context
    starts = torch.linspace(0, len(text) - context - 1, VALIDATION_WINDOWS).long()
    mine = [
        (rank + ranks * i) % VALIDATION_WINDOWS
        for i in range(math.ceil(VALIDATION_WINDOWS / ranks))
    ]
    losses = [
        float(model(*windows(text, starts[part], context, device)))
        for part in torch.tensor(mine).split(8)
    ]
    return float(across_ranks(sum(losses) / len(losses)).mean())


# ---- checkpoints
# --------------------------------------------------------------------------------------------------


class Position:
    """Where this rank is in the data: the step it is at, and the generator that chooses its
    windows.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.step = 1000 * seed + rank, 0
        self.generator = torch.Generator().manual_seed(self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.generator.set_state(state["generator"])

    def start_anew(self, step: int) -> None:
        """Go to `step` with other windows than before: where the number of ranks has changed, no
        saved position is this rank's.
        """
        self.step = step
        self.generator.manual_seed(self.seed + 1_000_003 * step)


class Signals:
    """In this context SIGTERM and SIGINT (Ctrl-C) are remembered, so that the step under way can
    be finished; a second Ctrl-C interrupts.
    """

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> None:
        self.before = {
            number: signal.signal(number, self.remember)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT == self.received:
            raise KeyboardInterrupt
        self.received = max(self.received, number)

    def of_any_rank(self) -> int:
        """Return the signal that a rank has received, or 0. All ranks get one answer, and so
        stop at the same step.
        """
        received = torch.tensor(self.received)
        if dist.is_initialized():
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return int(received)


class Checkpoints:
    """What --checkpoint asks for, as a context around the training: saves every so many steps
    and when a signal says stop; resumes.
    """

    def __init__(
        self, args: argparse.Namespace, engine: zs.Engine, console: Console, **states: Any
    ) -> None:
        self.args, self.engine, self.console, self.states = args, engine, console, states
        self.signals = Signals()
        # zeroshard
        self.saver = zs.Saver(args.checkpoint, engine, states=states, keep_last=args.keep_last)
        self.losses: list[float] = []  # of all steps so far, mean over ranks

    def resume(self, position: Position) -> None:
        """Go on from the newest step that is whole; start at step 0 where there is none yet."""
        newest = zs.latest_step(self.args.checkpoint)  # zeroshard
        newest = int(across_ranks(-1 if newest is None else newest)[0])  # what rank 0 sees decides
        if newest < 0:
            return
        if not self.args.resume:
            raise SystemExit(
                f"train_gpt: {self.args.checkpoint} holds step {newest} already: add --resume, or"
                " name another directory"
            )
        # zeroshard
        restored = zs.load(
            self.args.checkpoint, self.engine, states=self.states, fallback="previous"
        )
        if position.step != restored.step:
            position.start_anew(restored.step)
        self.losses, then = restored.extra["losses"], restored.extra["settings"]
        changed = [
            f"{name} was {then.get(name)} and is {now}"
            for name, now in settings(self.args).items()
            if then.get(name) != now
        ]
        self.console.print(
            "; ".join(
                [
                    f"Resumed after step {restored.step} of {self.args.steps}",
                    *changed,
                    *restored.skipped,
                ]
            )
        )

    def after_step(self, step: int, loss: float) -> None:
        """Keep `step` in memory and save it where it is time to; leave where any rank was told to.
        `loss` is this rank's.
        """
        stop = self.signals.of_any_rank()
        self.losses.append(float(across_ranks(loss).mean()))
        extra = {"losses": self.losses, "settings": settings(self.args)}
        # zeroshard: into memory that outlives this process, where ranks are started again
        self.saver.keep(step, extra=extra)
        if stop or step % self.args.save_every == 0 or step == self.args.steps:
            # zeroshard: copies the state; it is written while the training goes on
            self.saver.save(step, extra=extra)
        if stop:
            self.saver.close()  # zeroshard: now it is on disk
            self.console.print(
                f"{signal.Signals(stop).name}: step {step} of {self.args.steps} is saved in"
                f" {self.args.checkpoint}"
            )
            self.engine.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            raise SystemExit(PREEMPTED if stop == signal.SIGTERM else 128 + stop)

    def __enter__(self) -> None:
        self.signals.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.saver.__exit__(kind, error, traceback)
        self.signals.__exit__()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that change the numbers."""
    found = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    return found | {"precision": dtype(args)}


# ---- training
# --------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one training did; the same on every rank."""

    stage: int
    name: str
    losses: list[float]  # nats per byte, mean over ranks, one per step
    validation: float
    tokens_per_s: float
    # bytes per rank and state at the end of a backward, where everything is held
    memory: dict[str, int]
    temporary: int  # bytes of gathered weights and gradient buffers per rank, at their peak
    traffic: dict[str, int]  # bytes that a rank receives in one step, by collective
    sample: str
    weights: str  # with --leaves, their hash: the same on any number of ranks


def leaf_generator(seed: int, step: int, leaf: int) -> torch.Generator:
    """Return what chooses the windows of a leaf."""
    text = f"{seed} {step} {leaf}".encode()
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    )


def digest(state: dict[str, Tensor]) -> str:
    """Return a hash of all numbers, of rank 0; elsewhere `state` is empty."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(state[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def numbers_of(engine: zs.Engine, loss: float, norm: float) -> dict[str, float]:
    """Return what a tracker draws of a step: ``wandb.log(numbers, step=step)``, or for TensorBoard
    ``writer.add_scalar(name, number, step)`` of each. Not collective: any rank may call it alone.
    """
    memory = engine.memory()  # zeroshard
    return {
        "loss": loss,  # this rank's
        "grad_norm": norm,  # before clipping, of all ranks
        "loss_scale": engine.loss_scale,
        "steps_skipped": engine.steps_skipped,
        "memory/peak": memory.peak,
        **{f"memory/{state}": num_bytes for state, num_bytes in memory.at_rest.items()},
    }


def rate(step: int, steps: int) -> float:
    """Return the part of --lr at `step`: a warm-up of ten steps or more, then a cosine to 5%."""
    return min(
        (step + 1) / max(10, steps // 20),
        0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2,
    )


def make_optimizers(args: argparse.Namespace, model: GPT) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters; with --optimizer muon for those that Muon does not step."""
    muon = []
    if args.optimizer == "muon":
        muon = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is one for one in muon)]
    matrices, vectors = ([p for p in rest if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    if not muon:
        return [adamw]
    # its steps as large as those of AdamW
    return [adamw, torch.optim.Muon(muon, lr=args.lr, adjust_lr_fn="match_rms_adamw")]


def train(
    args: argparse.Namespace, stage: int, text: Tensor, held_out: Tensor, console: Console
) -> Result:
    """Train one model: from the seed on, or from where the checkpoint is."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(args.layers, args.width, args.heads, args.context)).to(device)
    optimizers = make_optimizers(args, model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda s: rate(s, args.steps)) for one in optimizers
    ]
    # zeroshard
    engine = zs.shard(
        model,
        optimizers,
        stage=None if args.config else stage,
        config=args.config,
        precision=args.precision,
        leaves=args.leaves,
        ownership="whole" if args.optimizer == "muon" else None,
    )
    name = Path(args.config).stem if args.config else f"ZeRO-{stage}"

    rank, ranks = rank_and_size()
    position = Position(args.seed, rank)
    states = {f"schedule{index or ''}": one for index, one in enumerate(schedules)}
    checkpoints = (
        Checkpoints(args, engine, console, position=position, **states) if args.checkpoint else None
    )
    if checkpoints:
        checkpoints.resume(position)
        engine.reset_traffic()
    per_rank = args.leaves / ranks if args.leaves else args.accumulate  # micro-batches
    tokens_per_step = per_rank * args.batch * args.context * ranks
    losses, seconds, traffic, memory, speed = [], [], Counter(), engine.memory(), math.nan
    line = TextColumn(
        "{task.completed}/{task.total} loss {task.fields[loss]:.3f}{task.fields[status]}"
    )
    columns = (
        TextColumn(f"[bold]{name}"),
        BarColumn(bar_width=10),
        line,
        TimeRemainingColumn(compact=True),
    )
    with (
        Progress(
            *columns, console=console, disable=not console.is_terminal or rank != 0
        ) as progress,
        checkpoints or nullcontext(),
        # zeroshard
        engine.trail(args.trail, every=args.trail_every) if args.trail else nullcontext(),
        ExitStack() as tracing,
    ):
        first = position.step
        task = progress.add_task(
            "training", total=args.steps, completed=position.step, loss=math.nan, status=""
        )
        for step in range(first, args.steps):
            if args.trace and step - first == TRACED.start:
                tracing.enter_context(engine.trace(args.trace / name))  # zeroshard
            started = time.perf_counter()
            losses.append(0.0)
            # zeroshard: with leaves, numbers of micro-batches whose sum is that of any ranks
            leaves = engine.leaves(step, seed=args.seed) if args.leaves else range(args.accumulate)
            for micro in leaves:
                generator = position.generator
                if args.leaves:  # whoever computes it
                    generator = leaf_generator(args.seed, step, micro)
                starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
                inputs, targets = windows(text, starts, args.context, device)
                more = not args.leaves and micro + 1 < args.accumulate
                with engine.no_sync() if more else nullcontext():  # zeroshard
                    # with leaves, the engine divides by their number
                    loss = model(inputs, targets) / (1 if args.leaves else args.accumulate)
                    engine.backward(loss)  # zeroshard: loss.backward(), scaled under fp16
                losses[-1] += loss.item() / (per_rank if args.leaves else 1)
            norm = engine.clip_grad_norm_(1.0)  # zeroshard
            memory = engine.memory()
            if args.log and rank == 0:
                numbers = {"run": name, "step": step + 1, "lr": schedules[0].get_last_lr()[0]}
                numbers |= numbers_of(engine, losses[-1], norm.item())
                with args.log.open("a") as log:
                    print(json.dumps(numbers), file=log)
            for one in optimizers:
                one.step()
            for one in optimizers:
                one.zero_grad()
            for one in schedules:
                one.step()
            position.step += 1
            seconds.append(time.perf_counter() - started)
            if step - first == TRACED[-1]:
                tracing.close()
            if checkpoints:
                checkpoints.after_step(step + 1, losses[-1])
            # at the first step, too: whoever watches a pipe sees that it goes
            period = max(1, args.steps // (4 if args.compare else 12))
            if (step + 1) % period == 0 or step in (first, args.steps - 1):
                # of the training steps alone, not of the validation
                traffic.update(engine.traffic().bytes)
                validation = validate(model, held_out, device)
                engine.reset_traffic()
                now = across_ranks(losses[-1], memory.total / MB)
                speed = tokens_per_step / statistics.median(seconds)
                status = f"  val {validation:.3f}  {speed:5.0f} tok/s"
                status += f"  holds {now[:, 1].max():.1f} MB/rank"
                progress.update(task, status=status, loss=float(now[:, 0].mean()))
                if not console.is_terminal:
                    console.print(
                        f"{name}  step {step + 1:4d}/{args.steps}  loss"
                        f" {now[:, 0].mean():.3f}{status}"
                    )
            progress.update(task, advance=1)
    if not losses:  # resumed where nothing was left to do
        validation = validate(model, held_out, device)
    # every rank, in step: each forward gathers the weights
    sample = model.generate(b"def ", args.sample).decode(errors="replace")
    per_step = {name: count // len(losses) for name, count in traffic.items()}
    weights = digest(engine.full_state_dict()) if args.leaves else ""  # zeroshard
    engine.close()
    mean_losses = checkpoints.losses if checkpoints else across_ranks(*losses).mean(0).tolist()
    return Result(
        stage,
        name,
        mean_losses,
        validation,
        speed,
        dict(memory.at_rest),
        memory.peak,
        per_step,
        sample,
        weights,
    )


# ---- what is printed
# --------------------------------------------------------------------------------------------------


def closing_table(result: Result, model: GPT, args: argparse.Namespace) -> Table:
    """Bytes per rank by state and traffic per step, beside plain data parallel training, where
    every rank holds everything.
    """
    (_, ranks), weight = rank_and_size(), 4 if dtype(args) == "fp32" else 2
    num_parameters = sum(p.numel() for p in model.parameters())
    per_parameter = {"weight": weight, "master": 0 if weight == 4 else 4, "grad": 4, "optimizer": 8}
    held = {state: width * num_parameters for state, width in per_parameter.items()}
    if args.optimizer == "muon":  # it keeps one number where AdamW keeps two
        held["optimizer"] -= 4 * sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    # a ring all-reduce of the gradients
    received = 2 * weight * num_parameters * (ranks - 1) // ranks
    table = Table(title=f"One of {ranks} ranks, MB", title_justify="left")
    for name in ("", result.name, "plain data parallel", "ratio"):
        table.add_column(name, justify="right" if name else "left")

    def row(name: str, ours: int, plain: int) -> None:
        table.add_row(
            name, f"{ours / MB:.2f}", f"{plain / MB:.2f}", f"{ours / plain:.2f}" if plain else ""
        )

    for state in held | result.memory:
        if held.get(state, 0) or result.memory.get(state, 0):
            row(state, result.memory.get(state, 0), held.get(state, 0))
    table.add_section()
    row("held at the end of a backward", sum(result.memory.values()), sum(held.values()))
    table.add_row(
        "gathered weights, gradient buffers (peak)",
        f"{result.temporary / MB:.2f}",
        end_section=True,
    )
    for name, count in result.traffic.items():
        table.add_row(f"received per step: {name}", f"{count / MB:.2f}")
    row("received per step", sum(result.traffic.values()), received)
    return table


def comparison_table(results: list[Result]) -> Table:
    """One row for each stage."""
    table = Table(
        title=f"The same training under each stage, {rank_and_size()[1]} ranks",
        title_justify="left",
    )
    for name in (
        "stage",
        "last loss",
        "validation",
        "held MB/rank",
        "gathered, peak",
        "received MB/step",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    for r in results:
        sizes = [
            f"{value / MB:.2f}"
            for value in (sum(r.memory.values()), r.temporary, sum(r.traffic.values()))
        ]
        table.add_row(
            r.name, f"{r.losses[-1]:.6f}", f"{r.validation:.6f}", *sizes, f"{r.tokens_per_s:.0f}"
        )
    return table


def verdict(args: argparse.Namespace, results: list[Result]) -> str:
    """Say whether all losses of all steps are equal.

    Micro-batches under ``no_sync`` are added before the ranks where gradients rest whole (stages 0
    and 1) and after them where they rest in shards (2 and 3): two orders of one sum, so with
    --accumulate the losses are equal within each pair and close between them.
    """
    pairs = [results] if args.accumulate == 1 else [results[:2], results[2:]]
    equal = all(
        r.losses == pair[0].losses and r.validation == pair[0].validation
        for pair in pairs
        for r in pair
    )
    which = "of all stages" if len(pairs) == 1 else "of stages 0 and 1, and of stages 2 and 3,"
    apart = max(
        abs(a - b) for r in results for a, b in zip(r.losses, results[0].losses, strict=True)
    )
    said = "[bold green]equal[/], bit for bit," if equal else "[bold red]NOT equal[/]"
    return (
        f"The losses {which} are {said} over {args.steps} steps. Largest difference from stage 0:"
        f" {apart:.1g}"
    )


class OneVoice(argparse.ArgumentParser):
    """A parser that is run on every rank, and speaks on the first."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def parse() -> argparse.Namespace:
    parser = OneVoice(
        description="Train a small GPT on Python's standard library, sharded with ZeRO."
    )
    parser.add_argument(
        "--stage",
        type=int,
        default=3,
        choices=range(4),
        help="ZeRO stage; 0 is plain data parallel (default: 3)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON of zeroshard's options (policy, comm, offload, ...), in place of --stage",
    )
    parser.add_argument(
        "--compare", action="store_true", help="train with stages 0, 1, 2 and 3, one after another"
    )
    found = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    parser.add_argument(
        "--device", metavar="TYPE", default=found.type, help=f"default here: {found.type}"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument(
        "--leaves",
        metavar="V",
        type=int,
        help="micro-batches per step of all ranks together, in place of --accumulate: the same"
        " weights, to the bit, on any number of ranks (the hash is printed)",
    )
    parser.add_argument("--steps", type=int, help="default: 600, or 60 with --compare")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the matrices of the blocks, AdamW for the rest (default: adamw)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sample", type=int, default=300, help="bytes of text to generate at the end"
    )
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text to train on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="add a line of JSON to it at every step"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="trace three steps into DIR/ZeRO-3, ...: zeroshard report DIR/ZeRO-3 reads them",
    )
    parser.add_argument(
        "--trail",
        type=Path,
        metavar="DIR",
        help="with --leaves, write hashes of every few steps there: zeroshard compare and zeroshard"
        " replay read them",
    )
    parser.add_argument(
        "--trail-every", type=int, default=10, metavar="N", help="of --trail (default: 10)"
    )
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save there while training, and on SIGTERM (exit code 75) and Ctrl-C (130)",
    )
    group.add_argument(
        "--save-every",
        type=int,
        default=50,
        metavar="N",
        help="steps from one save to the next (default: 50)",
    )
    group.add_argument(
        "--keep-last",
        type=int,
        default=3,
        metavar="K",
        help="how many of the saved steps stay (default: 3)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest step in --checkpoint, where there is one",
    )
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint DIR: where to resume from")
    if args.leaves and args.accumulate > 1:
        parser.error(
            "--leaves counts the micro-batches of all ranks, --accumulate those of each: leave out"
            " one of the two"
        )
    if args.trail and (args.compare or not args.leaves):
        parser.error("--trail writes the trail of one training with --leaves V: not of --compare")
    if args.compare and args.config:
        parser.error(
            "--compare trains with stages 0 to 3, and --config says how to train: leave out one of"
            " the two"
        )
    if args.compare and args.checkpoint:
        parser.error(
            "--compare trains four models one after another, and --checkpoint saves one: leave out"
            " one of the two"
        )
    if args.save_every < 1 or args.keep_last < 1:
        parser.error("--save-every and --keep-last take a number of at least 1")
    args.steps = args.steps or (60 if args.compare else 600)
    return args


def dtype(args: argparse.Namespace) -> str:
    """Return the precision that the command line or the configuration names."""
    compute = zs.Config.read(args.config).resolved_precision().compute
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return str(args.precision or names[compute])


def main() -> None:
    args = parse()
    zs.init_distributed()  # zeroshard
    rank, ranks = rank_and_size()
    console = Console(quiet=rank != 0, highlight=False)
    console.width = min(console.width, 100) if console.is_terminal else 96
    text, held_out = load_text(args.data)
    unigram = unigram_loss(text, held_out)
    with torch.device("meta"):
        model = GPT(GPTConfig(args.layers, args.width, args.heads, args.context))
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]GPT[/], {num_parameters / 1e6:.2f} M parameters, {dtype(args)}, {ranks} rank(s);"
        f" {len(text) / MB:.1f} MB of text to train on, {len(held_out) / MB:.1f} MB held out"
    )
    results = [
        train(args, stage, text, held_out, console)
        for stage in (range(4) if args.compare else [args.stage])
    ]
    last = results[-1]
    console.print(
        Panel(
            Syntax(last.sample, "python", theme="ansi_dark", word_wrap=True),
            title="generated",
            title_align="left",
        )
    )
    if args.compare:
        console.print(comparison_table(results), verdict(args, results), sep="\n")
    else:
        console.print(closing_table(last, model, args))
    if args.leaves:
        found = ", ".join(sorted({result.weights for result in results}))
        console.print(f"Weights after {args.steps} steps of {args.leaves} leaves: {found}")
    console.print(
        f"Nats per byte on text never seen: unigram model {unigram:.3f}, [bold]this model"
        f" {last.validation:.3f}[/]"
    )
    if args.json and rank == 0:
        args.json.write_text(
            json.dumps(
                {
                    "settings": settings(args),
                    "unigram": unigram,
                    "results": [asdict(r) for r in results],
                },
                indent=1,
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
