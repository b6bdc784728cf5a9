"""The snippets of README.md and of docs/ run: Python on two CPU ranks, console blocks as they are.

The comment on the line before a block says what is special about it:

    <!-- not run: REASON -->     counted, and limited below
    <!-- needs: MODULE -->       runs where the module is installed
    <!-- continues -->           goes on from the block before
    <!-- file: train.py -->      is written to that file, which a console block of the page uses
    <!-- after the diff -->      runs in test_extending.py, on a copy with the page's diff

A Python block finds the names of a training script there: ``torch``, ``nn``, ``F``, ``dist``,
``zs``, a small GPT as ``model``, its ``optimizer``, a ``loader``, ``data`` (rows, the same on every
rank), and ``engine`` where it makes none. ``wandb`` and TensorBoard are replaced by objects that
take every call.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard as zs
from examples.train_gpt import GPT, GPTConfig
from scripts.docs_site.markdown import Block, blocks
from tests.support.harness import ROOT, run_ranks
from zeroshard.runtime.engine import open_engines

MAX_NOT_RUN = 12
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NVME = "/mnt/nvme"  # a directory of the documentation; each test has its own


def _snippets(page: Path) -> list[tuple[int, str]]:
    """Return the Python programs of a page with their lines; continued blocks are joined."""
    found: list[tuple[int, str]] = []
    for block in blocks(page.read_text()):
        if block.language != "python" or not block.is_run or block.mark.startswith("file: "):
            continue
        if block.mark == "continues":
            line, text = found.pop()
            found.append((line, text + block.text))
        else:
            found.append((block.line, block.text))
    return found


def _cases() -> Iterator[Any]:
    for page in PAGES:
        for line, text in _snippets(page):
            name = page.relative_to(ROOT).as_posix()
            yield pytest.param(text, id=f"{name}:{line}")


def _gpt() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, context=16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Rows:
    """Rows of data, the same on every rank; notes which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(256, (8, 2, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(number)
        x, y = self.rows[number]
        return x, y


def _namespace(text: str) -> dict[str, Any]:
    """Return the names that `text` may use."""
    model, optimizer = _gpt()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(256, (2, 2, 16), generator=generator) for _ in range(4)]
    names: dict[str, Any] = {
        "__name__": "snippet", "torch": torch, "nn": nn, "F": F, "dist": dist, "zs": zs,
        "GPT": GPT, "config": model.config, "model": model, "optimizer": optimizer,
        "loader": [(x, y) for x, y in batches], "x": batches[0][0], "y": batches[0][1],
        "data": Rows(), "rank": dist.get_rank(), "seed": 0,
    }  # fmt: skip
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    if "engine" in {node.id for node in nodes} - stored:
        names["engine"] = zs.shard(model, optimizer, stage=3)
    return names


def _stand_ins(text: str) -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        if name.rpartition(".")[2] in text:
            found[name] = MagicMock(name=name)
    return found


def _run(rank: int, world_size: int, text: str, folder: str) -> None:
    before, modules = Path.cwd(), dict(sys.modules)
    others = open_engines()  # tests before may have left some, on one rank or on both
    os.chdir(folder)
    stand_ins = _stand_ins(text)
    sys.modules.update(stand_ins)
    try:
        exec(compile(text, "snippet", "exec"), _namespace(text))
        for engine in open_engines():
            if engine not in others:
                engine.close()
    finally:
        os.chdir(before)
        for name in stand_ins:
            sys.modules.pop(name, None)
            if name in modules:
                sys.modules[name] = modules[name]


@pytest.mark.parametrize("text", list(_cases()))
def test_a_python_block_runs_on_two_ranks(text: str, tmp_path: Path) -> None:
    run_ranks(2, _run, text.replace(NVME, str(tmp_path)), str(tmp_path))


def _elastic(rank: int, world_size: int, folder: str, last: int) -> dict[int, list[int]]:
    """Run the loop of docs/elastic.md to step `last`, saving every second step; return the rows
    that this rank has read, by step.
    """
    ((_, text), *_) = _snippets(ROOT / "docs" / "elastic.md")
    assert "= 0, 6, 4" in text and "step % 100" in text
    text = text.replace("= 0, 6, 4", f"= 0, {last}, 4").replace("step % 100", "step % 2")
    names, before = _namespace(text), Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(text, "snippet", "exec"), names)
    finally:
        os.chdir(before)
    names["engine"].close()
    read = iter(names["data"].read)
    return {step: [next(read) for _ in names["rows_of"](step)] for step in names["steps"]}


def test_the_loop_of_elastic_runs_goes_on_with_the_rows_of_the_next_step(tmp_path: Path) -> None:
    taken: list[dict[int, list[int]]] = []
    for world, last in ((2, 3), (1, 5), (3, 6)):  # it ends one step after the last that is saved
        parts = run_ranks(world, _elastic, str(tmp_path), last)
        taken.append({step: sorted(chain(*(one[step] for one in parts))) for step in parts[0]})
    assert [list(one) for one in taken] == [[1, 2, 3], [3, 4, 5], [5, 6]]
    assert taken[0][3] == taken[1][3] and taken[1][5] == taken[2][5]
    rows = taken[0] | taken[1] | taken[2]
    for step in (1, 3, 5):  # an epoch has two steps, and reads each row once
        assert sorted(rows[step] + rows[step + 1]) == list(range(8))


def _resumed(rank: int, world_size: int, folder: str, last: int) -> tuple[list[list[int]], Any]:
    """Run the loop of "The first hour" in `folder`, saving every step, and leave it after
    step `last` as one that is killed does; return the rows that this rank has read in each step,
    and the weights at the end.
    """
    (text,) = [text for _, text in _snippets(ROOT / "docs/first-hour.md") if "latest_step" in text]
    ending = "    zs.save(", "        saved("
    assert text.count(ending[0]) == 1 and "while step < 3 * " in text
    names, before, steps = _namespace(text), Path.cwd(), [0]
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)

    def saved(directory: str, engine: zs.Engine, *, step: int) -> None:
        zs.save(directory, engine, step=step)
        steps.append(len(names["data"].read))
        if step == last:
            raise InterruptedError

    os.chdir(folder)
    try:
        exec(compile(text.replace(*ending), "snippet", "exec"), names | {"saved": saved})
    except InterruptedError:
        pass
    finally:
        os.chdir(before)
    (engine,) = open_engines()
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    read = names["data"].read
    return [read[start:end] for start, end in pairwise(steps)], weights


def test_the_loop_of_the_readme_resumes_in_an_epoch_on_other_ranks_and_ends_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "alone").mkdir()
    ((alone, ends),) = run_ranks(1, _resumed, str(tmp_path / "alone"), 0)
    assert len(alone) == 6
    taken: list[list[int]] = []
    for world, last in ((2, 1), (3, 3), (4, 5), (1, 0), (2, 0)):  # the fifth finds it complete
        parts = run_ranks(world, _resumed, str(tmp_path), last)
        taken += [sorted(chain(*step)) for step in zip(*(rows for rows, _ in parts), strict=True)]
    assert taken == [sorted(rows) for rows in alone]
    for epoch in range(3):
        assert sorted(chain(*taken[2 * epoch : 2 * epoch + 2])) == list(range(8))
    torch.testing.assert_close(parts[0][1], ends)


def _consoles() -> Iterator[Any]:
    for page in PAGES:
        found = blocks(page.read_text())
        files = [block for block in found if block.mark.startswith("file: ")]
        for block in found:
            if block.language == "console" and block.is_run:
                name = page.relative_to(ROOT).as_posix()
                launches = "zeroshard run" in block.text and name != "docs/index.md"
                marks = [pytest.mark.slow] if launches else []
                yield pytest.param(block, files, id=f"{name}:{block.line}", marks=marks)


@pytest.mark.parametrize(("block", "files"), list(_consoles()))
def test_a_console_block_prints_what_it_shows(
    block: Block, files: list[Block], tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for file in files:
        (tmp_path / file.mark.removeprefix("file: ")).write_text(file.text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    printed, shown = "", []
    for line in block.text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            done = subprocess.run(
                line[2:], shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{line}\n{printed}"
        else:
            shown = [re.escape(part) for part in line.split("...")]
            assert re.search(".*".join(shown), printed), f"{line!r} is not in\n{printed}"


def test_every_file_of_a_page_is_used_by_a_command_of_it() -> None:
    for page in PAGES:
        found = blocks(page.read_text())
        consoles = " ".join(block.text for block in found if block.language == "console")
        files = {b.mark.removeprefix("file: "): b for b in found if b.mark.startswith("file: ")}
        imports = " ".join(
            re.findall(r"^from \w+", "\n".join(b.text for b in files.values()), re.M)
        )
        used = [n for n in files if n in consoles or f"from {Path(n).stem}" in imports]
        assert used == list(files), page


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    marks = [block.mark for page in PAGES for block in blocks(page.read_text())]
    kept = [mark for mark in marks if mark.startswith("not run")]
    assert all(re.fullmatch(r"not run: \w.{10,}", mark) for mark in kept), kept
    assert len(kept) <= MAX_NOT_RUN
    known = re.compile(r"(not run: .*|after the diff|continues|needs: [\w.]+|file: [\w.]+)?$")
    unknown = [m for m in marks if not known.match(m) and "models table" not in m]
    assert unknown == []


def test_a_block_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no_such_name"):
        run_ranks(2, _run, "engine = zs.shard(model)\nno_such_name()\n", str(tmp_path))
