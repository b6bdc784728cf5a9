"""The rooms beside the engine (docs/design/rooms.md) are loaded by whoever asks for them alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = ("planner", "launch", "deepspeed", "formats", "integrations", "terminal")
_SHOW = f"""
import sys
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("zeroshard.")}}
print(*sorted(rooms & set({ROOMS})))
"""
_TRAIN = """
import sys, tempfile, torch, zeroshard as zs
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


def _loaded(program: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program + _SHOW],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


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
    options: str, rooms: list[str], tmp_path: Path
) -> None:
    program = _TRAIN.replace("**OPTIONS", options)
    assert _loaded(program, tmp_path) == rooms


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
def test_a_public_name_loads_its_own_room_alone(
    program: str, rooms: list[str], tmp_path: Path
) -> None:
    assert _loaded(program, tmp_path) == rooms
