"""The rooms beside the engine (docs/design/README.md) are loaded by whoever asks for them alone."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.harness import spawn_ranks
from tests.support.launched import forget_package

ROOMS = ("planner", "launch", "commands", "deepspeed", "formats", "integrations", "terminal")
_TRAIN = """
import tempfile, torch, zeroshard as zs
zs.init_distributed()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
engine = zs.shard(model, optimizer, **OPTIONS)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    zs.save(folder, engine, step=1)
    zs.load(folder, engine)
"""


def _rooms(rank: int, world: int, program: str) -> list[str]:
    """Run `program` as one process without a launcher; return the rooms that it has loaded."""
    forget_package()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    exec(program, {})
    ours = [name for name in sys.modules if name.startswith("zeroshard.")]
    return sorted({name.split(".")[1] for name in ours} & set(ROOMS))


def _loaded(program: str) -> list[str]:
    (done,) = spawn_ranks(1, _rooms, program, init_group=False)
    assert done.error is None, done.stderr
    found: list[str] = done.result
    return found


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ("stage=3", []),
        ("config={'stage': 2, 'precision': 'bf16'}", []),
        ("policy='auto'", ["planner"]),
        ("config={'zero_optimization': {'stage': 3}}", ["deepspeed"]),
    ],
)
def test_training_loads_no_room_beside_the_engine_that_it_does_not_ask_for(
    options: str, rooms: list[str]
) -> None:
    program = _TRAIN.replace("**OPTIONS", options)
    assert _loaded(program) == rooms


@pytest.mark.parametrize(
    ("program", "rooms"),
    [
        ("import zeroshard", []),
        ("import zeroshard as zs; zs.Config, zs.Engine, zs.save, zs.nn", []),
        ("import zeroshard as zs; zs.plan", ["planner"]),
        ("import zeroshard as zs; zs.read_deepspeed", ["deepspeed"]),
        ("import zeroshard as zs; zs.load_pretrained", ["formats"]),
        ("import zeroshard.integrations.deepspeed", ["integrations"]),
        (
            "from zeroshard.integrations.deepspeed import initialize, zero, optimizers\n"
            "import zeroshard.deepspeed\n"
            "assert zeroshard.deepspeed.zero is zero\n"
            "assert zeroshard.deepspeed.initialize is initialize",
            ["deepspeed", "integrations"],
        ),
    ],
)
def test_a_public_name_loads_its_own_room_alone(program: str, rooms: list[str]) -> None:
    assert _loaded(program) == rooms
