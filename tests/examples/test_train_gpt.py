"""examples/train_gpt.py: its data, its unigram model, and whole runs on real ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import ROOT

SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--sample", "8"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["train_gpt"] = module
    specification.loader.exec_module(module)
    return module


def run_example(*arguments: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(ranks), str(SCRIPT), *SMALL, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_unigram_loss_is_the_entropy_of_the_bytes(example: ModuleType) -> None:
    text = torch.tensor([0, 1] * 50_000, dtype=torch.uint8)
    assert example.unigram_loss(text, text) == pytest.approx(math.log(2), abs=0.01)
    assert example.unigram_loss(text, torch.tensor([7], dtype=torch.uint8)) == pytest.approx(math.log(100_256), abs=0.01)  # never seen


def test_the_standard_library_is_split_by_file_and_always_the_same(example: ModuleType) -> None:
    train, held_out = example.load_text(None)
    again, held_out_again = example.load_text(None)
    assert torch.equal(train, again) and torch.equal(held_out, held_out_again)
    assert len(train) > 2e6 and 0.03 < len(held_out) / len(train) < 0.3
    assert 2.5 < example.unigram_loss(train, held_out) < 4.0


def test_given_files_are_cut_in_two(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 9000 + b"b" * 1000)
    train, held_out = example.load_text([tmp_path / "text"])
    assert bytes(train.tolist()) == b"a" * 9000 and bytes(held_out.tolist()) == b"b" * 1000
    (tmp_path / "short").write_bytes(b"a")
    with pytest.raises(SystemExit, match="1000 are needed"):
        example.load_text([tmp_path / "short"])


def test_targets_are_the_inputs_one_byte_later(example: ModuleType) -> None:
    inputs, targets = example.windows(torch.arange(100, dtype=torch.uint8), torch.tensor([0, 10]), 4, torch.device("cpu"))
    assert inputs.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert targets.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_the_model_sees_no_later_byte(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(example.GPTConfig(layers=2, width=16, heads=2, context=8))
    one, other = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)
    other[0, 5:] = 9
    first, second = model(one), model(other)
    assert torch.equal(first[0, :5], second[0, :5]) and not torch.equal(first[0, 5:], second[0, 5:])


def test_all_stages_have_equal_losses_on_two_ranks(tmp_path: Path) -> None:
    shown = run_example("--compare", "--steps", "8", "--json", str(tmp_path / "out.json"))
    assert "losses of all stages are equal, bit for bit" in shown
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["stage"] for result in results] == [0, 1, 2, 3]
    assert all(result["losses"] == results[0]["losses"] for result in results)
    held = [sum(result["memory"].values()) for result in results]
    assert held[3] < held[0] / 1.8 and held == sorted(held, reverse=True)


def test_stage_3_learns_and_shows_what_it_took_on_two_ranks() -> None:
    shown = run_example("--steps", "60", "--lr", "1e-2")
    for expected in ("ZeRO-3", "plain data parallel", "held at the end of a backward", "received per step", "generated", "unigram model"):
        assert expected in shown
    assert max(len(line) for line in shown.splitlines()) <= 100
    last = shown.splitlines()[-1]
    assert float(last.split()[-1]) < 3.6  # from 5.5 at the start


def test_micro_batches_are_equal_within_each_class_and_close_between() -> None:
    shown = run_example("--compare", "--steps", "4", "--accumulate", "2")
    assert "losses of stages 0 and 1, and of stages 2 and 3, are equal, bit for bit" in shown
    assert float(shown.split("Largest difference from stage 0: ")[1].split()[0]) < 1e-3


def test_one_process_needs_no_launcher() -> None:
    command = [sys.executable, str(SCRIPT), *SMALL, "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout and "this model" in done.stdout
