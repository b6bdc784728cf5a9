"""Checkpoints under DeepSpeed's calls: what a tag may be, what is removed beside it, and what
``latest`` may say.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.support.harness import run_ranks, spawn_ranks
from zeroshard.integrations import deepspeed

KEYS = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


@contextmanager
def made() -> Iterator[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=KEYS)
    yield engine
    engine.destroy()


def step(engine: Any) -> torch.Tensor:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    weight: torch.Tensor = engine.module_state_dict()["weight"]
    return weight


def _link(folder: Path) -> None:
    (folder / "latest").write_text("link")
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "mine")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "../elsewhere/mine' ": lambda at: (at / "latest").write_text("../elsewhere/mine"),
    "names '/": lambda at: (at / "latest").write_text(str(at.parent / "elsewhere" / "mine")),
    "names ''": lambda at: (at / "latest").write_text(" \n"),
    r"names '\.'": lambda at: (at / "latest").write_text("."),
    r"names '\.\.'": lambda at: (at / "latest").write_text(".."),
    "names 'link'": _link,
    "is not a file that holds a name": lambda at: (at / "latest").write_bytes(b"\xff"),
    "not a file that holds a name": lambda at: (at / "latest").write_text("a" * 5000),
    "a file that holds a name": lambda at: os.mkfifo(at / "latest"),
    "cannot be read|Is a directory|file that holds": lambda at: (at / "latest").mkdir(),
    "holds 'seven', not a number of steps": lambda at: (
        (at / "latest").write_text("mine"),
        (at / "mine").mkdir(),
        (at / "mine" / "saved_step").write_text("seven"),
    ),
    "holds no checkpoint": lambda at: (at / "latest").write_text("gone"),
}


def _hostile(rank: int, world: int, path: str) -> None:
    with made() as engine:
        engine.save_checkpoint(Path(path, "elsewhere"), tag="mine")
        for index, (complaint, damage) in enumerate(HOSTILE.items()):
            folder = Path(path, str(index))
            if rank == 0:
                folder.mkdir()
                damage(folder)
            dist.barrier()
            # rank 0 says what there is: another rank may see nothing
            seen = folder if rank == 0 else Path(path, "nothing")
            with pytest.raises(zs.CheckpointError, match=complaint.strip()):
                engine.load_checkpoint(seen)
        step(engine)  # after which it goes on


def test_latest_names_nothing_outside_of_its_directory(tmp_path: Path) -> None:
    run_ranks(2, _hostile, str(tmp_path))


def _beside(rank: int, world: int, path: str) -> None:
    tag = Path(path, "gpt")
    with made() as engine:
        before = step(engine)
        if rank == 0:
            (tag / "step-notes").mkdir(parents=True)
            (tag / "step-0000000005").mkdir()
        dist.barrier()
        zs.save(tag, engine.engine, step=7)  # the user's own, and newer by its number
        step(engine)
        assert engine.save_checkpoint(path, tag="gpt")
        third = step(engine)
        assert engine.save_checkpoint(path, tag="gpt")
        step(engine)
        engine.load_checkpoint(path)
        assert torch.equal(engine.module_state_dict()["weight"], third), "what the tag holds"
        assert engine.global_steps == 3 and not torch.equal(before, third)
        there = {one.name for one in tag.iterdir() if not one.name.startswith(".")}
        own = {"step-0000000003", "saved_step"}  # the one of step 2 is gone
        assert there == own | {"step-notes", "step-0000000005", "step-0000000007"}


def test_a_tag_replaces_its_own_checkpoint_and_nothing_beside_it(tmp_path: Path) -> None:
    run_ranks(2, _beside, str(tmp_path))


def test_the_script_of_a_folder_the_module_and_the_command_write_its_weights(
    tmp_path: Path,
) -> None:
    with made() as engine:
        weight = step(engine)
        engine.save_checkpoint(tmp_path / "saved")
    stands_in = ["-m", "zeroshard", "as-deepspeed", sys.executable, "-m"]
    lines = {
        "a": ["zero_to_fp32.py", "."],
        "b": [*stands_in, "deepspeed.utils.zero_to_fp32", ".", "--tag", "global_step1"],
        "c": ["-m", "zeroshard", "checkpoint", "export", "--to", "torch", "."],
        "e": ["-c", "import os, sys; os.execv('./zero_to_fp32.py', sys.argv)", "."],  # as a program
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, line in lines.items():
        command = [sys.executable, *line, str(tmp_path / name)]
        done = subprocess.run(
            command, cwd=tmp_path / "saved", env={**os.environ, "PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        [file] = (one for one in (tmp_path / name, *tmp_path.glob(f"{name}/*")) if one.is_file())
        state = torch.load(file, weights_only=True)
        assert torch.equal(state.get("model", state)["weight"], weight), name
    command = [sys.executable, "zero_to_fp32.py", str(tmp_path), str(tmp_path / "d")]
    done = subprocess.run(command, cwd=tmp_path / "saved", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("zero_to_fp32: ")


def _kill_in(name: str) -> None:
    """Kill this process once a file of an older step is removed, or before a name is there."""
    unlink, replace = os.unlink, Path.replace

    def removing(path: Any, *args: Any, **options: Any) -> None:
        unlink(path, *args, **options)
        if "manifest" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    def naming(self: Path, target: Any) -> Path:
        if self.name.startswith(f".{name}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    vars(os)["unlink"] = removing if name == "step" else unlink
    Path.replace = naming if name != "step" else replace  # type: ignore[method-assign]


def _one_tag(rank: int, world: int, path: str, name: str) -> None:
    with made() as engine:
        engine.load_checkpoint(path)
        for number in range(3):
            if number == 1 and name:
                _kill_in(name)
            step(engine)
            engine.save_checkpoint(path, tag="last")


def test_what_a_killed_save_of_a_fixed_tag_has_left_goes_with_the_next(tmp_path: Path) -> None:
    for name, steps in (("step", 2), ("saved_step", 3), ("latest", 5), ("", 8)):
        [ended] = spawn_ranks(1, _one_tag, str(tmp_path), name)
        assert ended.exitcode == (-signal.SIGKILL if name else 0), ended.stderr
        for found in (tmp_path / "last").glob("step-*"):  # none is seen in part
            assert (found / "manifest.json").is_file(), name
        assert (tmp_path / "last" / "saved_step").read_text() == str(steps)
    there = sorted(one.name for one in tmp_path.iterdir())
    assert there == ["last", "latest", "zero_to_fp32.py"]
    left = {one.name for one in (tmp_path / "last").iterdir()}
    assert left - {".lock"} == {"saved_step", "step-0000000008"}


def _tags(rank: int, world: int, path: str) -> None:
    with made() as engine:
        for tag in ("", ".", "..", "a/b", "/tmp/a", "../a", ".a", "latest", "a\n", "a" * 300):
            for call in (engine.save_checkpoint, engine.load_checkpoint):
                with pytest.raises(zs.ConfigError, match="is not the name of a directory inside"):
                    call(path, tag=tag)
        with pytest.raises(zs.PlanMismatch, match=r"different tags.*the same one on every rank"):
            engine.load_checkpoint(path, tag="a" if rank else None)
        assert list(Path(path).iterdir()) == []
        own = Path(path, f"clock-{rank}")
        with pytest.raises(zs.CheckpointError, match=r"different directories: .*k-0, .*k-1; give"):
            engine.save_checkpoint(own)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(own)
        # errors of rank 0 are those of every rank
        dist.barrier()
        if rank == 0:
            Path(path, "latest").mkdir()
            Path(path, "file").write_text("")
        dist.barrier()
        with pytest.raises(zs.CheckpointError, match=r"save_checkpoint\(\).*latest"):
            engine.save_checkpoint(path, tag="a")
        with pytest.raises(zs.CheckpointError, match=r"save_16bit_model\(\).*file"):
            engine.save_16bit_model(Path(path, "file"))
        there = sorted(one.name for one in Path(path).iterdir())
        assert there == ["a", "file", "latest", "zero_to_fp32.py"]


def test_a_tag_is_one_name_and_every_rank_hears_of_a_file_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    run_ranks(2, _tags, str(tmp_path))
