"""Write the golden checkpoint of the current format version: two ranks, every kind of content, a
few numbers, and beside it what it must load to.

    # writes tests/support/golden/format-2/
    python -c 'from tests.support.golden.make import main; main()'

That of version 2 is that of version 1 as ranks save it that have parts of its parameters.

Made once, when a format version is released, and never again for that version: later versions must
read what this one wrote. `expected.json` has the numbers as the engine held them when it saved, not
as a reader found them.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zeroshard as zs
from tests.support.harness import close_pools, run_ranks
from zeroshard.checkpoint.manifest import VERSION
from zeroshard.runtime.engine import states_of

HERE = Path(__file__).resolve().parent
STEP = 300


class Golden(nn.Module):
    """A tie, channels last, a parameter without dimensions, an empty one, a frozen one, and a
    buffer that differs between ranks.
    """

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.LayerNorm(3)
        self.norm.requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.sum()
        h = self.norm(self.embed(tokens))  # [4, 4, 3]
        logits = self.head(h) / self.temperature + self.nothing.sum()
        return logits.float().square().mean() + self.conv(h.permute(2, 0, 1)[None]).float().mean()


def make(
    policy: str = "zero3", precision: str = "fp32"
) -> tuple[Golden, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, zs.Engine]:
    torch.manual_seed(0)
    model = Golden()
    optimizer, schedule = _optimizer(model)
    return (
        model,
        optimizer,
        schedule,
        zs.shard(model, optimizer, policy=policy, precision=precision),
    )


def _optimizer(model: Golden) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": trained[:1], "weight_decay": 0.1}, {"params": trained[1:]}], lr=0.05
    )
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def write(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train two steps, save, and return what this rank holds: [[name, kind, start, values], ...]
    and what is no piece.
    """
    model, optimizer, schedule, engine = make(precision="bf16")
    ema = zs.EMA(engine, 0.5)
    for step in range(2):
        torch.manual_seed(100 * step + rank)
        engine.backward(model(torch.randint(0, 5, (4, 4))))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ema.update()
    random.seed(rank)
    np.random.seed(7)
    torch.manual_seed(rank)
    extra = {
        "best": float("inf"),
        "curve": torch.tensor([0.25, -0.0]),
        "position": {"epoch": 1, "seen": [3, (rank, None)]},
        7: b"\x00\xff",
    }
    zs.save(folder, engine, step=STEP, states={"schedule": schedule, "average": ema}, extra=extra)
    pieces = pieces_of(engine, optimizer, ema)
    draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    rest = {
        "seen": model.seen.tolist(),
        "draws": draws,
        "lr": schedule.get_last_lr(),
        "last_epoch": schedule.last_epoch,
    }
    engine.close()
    return {"pieces": pieces, **rest}


def pieces_of(engine: zs.Engine, optimizer: torch.optim.Optimizer, ema: zs.EMA) -> list[Any]:
    """Return what rests on this rank: [[name, kind, start, values], ...]."""
    pieces: list[Any] = []
    for table in states_of(engine).tables({"average": ema.averages}):
        for piece in table.pieces(("value", "average"), share=True):
            pieces.append([piece.name, piece.kind, piece.start, piece.tensor.float().tolist()])
    for owned in states_of(engine).stepped_pieces():
        for key, value in optimizer.state.get(owned.tensor, {}).items():
            pieces.append([owned.name, f"state.{key}", owned.piece.start, value.tolist()])
    return pieces


def whole(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Put the pieces of all ranks together: values by parameter and kind, in the order of
    memory; numbers without a range as they are.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, kind, _, values in sorted(
        (piece for rank in ranks for piece in rank["pieces"] if piece[3] != []),
        key=lambda piece: piece[:3],
    ):
        kinds = out.setdefault(name, {})
        kinds[kind] = [*kinds.get(kind, []), *values] if isinstance(values, list) else values
    return out


def _cut(model: Golden, mesh: DeviceMesh) -> None:
    """Cut a tied matrix by rows, unevenly, and a convolution by channels, which lie last."""
    tied = nn.Parameter(distribute_tensor(model.embed.weight.detach(), mesh, [Shard(0)]))
    model.embed.weight = model.head.weight = tied
    conv = model.conv.weight.detach()
    first, last = ((0, 2), (2, 3))[mesh.get_local_rank()]
    local = conv[:, first:last].contiguous(memory_format=torch.channels_last)
    model.conv.weight = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(1)], shape=conv.shape, stride=conv.stride())
    )


def pass_on(rank: int, world: int, source: Path, folder: Path) -> None:
    """Load a golden checkpoint into ranks with parts, and save it."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Golden()
    _cut(model, mesh["tp"])
    optimizer, schedule = _optimizer(model)
    engine = zs.shard(model, optimizer, policy="zero3", precision="fp32", mesh=mesh)
    ema = zs.EMA(engine, 0.5)
    states = {"schedule": schedule, "average": ema}
    extra = zs.load(source, engine, states=states).extra
    zs.save(folder, engine, step=STEP, states=states, extra=extra)
    engine.close()


def main() -> None:
    folder, before = (HERE / f"format-{version}" for version in (VERSION, VERSION - 1))
    shutil.rmtree(folder, ignore_errors=True)
    run_ranks(2, pass_on, before, folder)
    (folder / ".lock").unlink()
    shutil.copy(before / "expected.json", folder)
    close_pools()
