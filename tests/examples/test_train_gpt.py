"""examples/train_gpt.py: its data, its unigram model, whole runs on real ranks, and its
checkpoints (tests/faults/test_preemption.py: signals).
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

import zeroshard as zs
from tests.support.harness import ROOT
from tests.support.launched import run_script
from zeroshard.launch.cli import main

SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = shlex.split("--layers 2 --width 32 --heads 2 --context 32 --batch 4 --sample 8")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["train_gpt"] = module
    specification.loader.exec_module(module)
    return module


def run_example(*arguments: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(ranks), str(SCRIPT)]
    command += [*SMALL, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("steps", [1, 10, 39, 600])
def test_a_run_of_few_steps_warms_up_too(example: ModuleType, steps: int) -> None:
    rates = [example.rate(step, steps) for step in range(steps)]
    assert rates[0] <= 0.1 and max(rates) <= 1 and (steps < 600 or rates[29] > 0.99)
    assert all(after - before <= 0.1 + 1e-9 for before, after in itertools.pairwise(rates))


def test_the_unigram_loss_is_the_entropy_of_the_bytes(example: ModuleType) -> None:
    text = torch.tensor([0, 1] * 50_000, dtype=torch.uint8)
    assert example.unigram_loss(text, text) == pytest.approx(math.log(2), abs=0.01)
    # never seen
    assert example.unigram_loss(text, torch.tensor([7], dtype=torch.uint8)) == pytest.approx(
        math.log(100_256), abs=0.01
    )


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
    inputs, targets = example.windows(
        torch.arange(100, dtype=torch.uint8), torch.tensor([0, 10]), 4, torch.device("cpu")
    )
    assert inputs.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert targets.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_the_model_sees_no_later_byte(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(example.GPTConfig(layers=2, width=16, heads=2, context=8))
    one, other = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)
    other[0, 5:] = 9
    first, second = model(one), model(other)
    assert torch.equal(first[0, :5], second[0, :5]) and not torch.equal(first[0, 5:], second[0, 5:])


@pytest.mark.slow
def test_all_stages_have_equal_losses_on_two_ranks(tmp_path: Path) -> None:
    shown = run_example("--compare", "--steps", "8", "--json", str(tmp_path / "out.json"))
    assert "losses of all stages are equal, bit for bit" in shown
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["stage"] for result in results] == [0, 1, 2, 3]
    assert all(result["losses"] == results[0]["losses"] for result in results)
    held = [sum(result["memory"].values()) for result in results]
    assert held[3] < held[0] / 1.8 and held == sorted(held, reverse=True)


@pytest.mark.slow
def test_a_log_has_a_line_per_step_and_is_drawn(tmp_path: Path) -> None:
    log, picture = tmp_path / "log.jsonl", tmp_path / "loss.png"
    run_example("--steps", "4", "--precision", "fp16", "--log", str(log), ranks=1)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["loss_scale"] > 1 and line["memory/master"] > 0 for line in lines)
    assert all(line["steps_skipped"] or line["grad_norm"] > 0 for line in lines)
    draw = [sys.executable, str(ROOT / "examples" / "plot_log.py"), str(log), str(picture)]
    subprocess.run(draw, check=True, timeout=300)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stage_3_learns_and_shows_what_it_took_on_two_ranks(optimizer: str) -> None:
    shown = run_example("--steps", "60", "--lr", "1e-2", "--optimizer", optimizer)
    for expected in (
        "ZeRO-3",
        "plain data parallel",
        "held at the end of a backward",
        "received per step",
        "generated",
        "unigram model",
    ):
        assert expected in shown
    assert max(len(line) for line in shown.splitlines()) <= 100
    last = shown.splitlines()[-1]
    assert float(last.split()[-1]) < 3.6  # from 5.5 at the start
    (row,) = [line for line in shown.splitlines() if line.startswith("│ optimizer")]
    assert float(row.split("│")[-2]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_micro_batches_are_equal_within_each_class_and_close_between() -> None:
    shown = run_example("--compare", "--steps", "4", "--accumulate", "2")
    assert "losses of stages 0 and 1, and of stages 2 and 3, are equal, bit for bit" in shown
    assert float(shown.split("Largest difference from stage 0: ")[1].split()[0]) < 1e-3


@pytest.mark.slow
def test_one_process_needs_no_launcher() -> None:
    command = [sys.executable, str(SCRIPT), *SMALL, "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 rank(s)" in done.stdout and "this model" in done.stdout


# ---- checkpoints
# --------------------------------------------------------------------------------------------------


def train_here(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str, terminal: bool = False
) -> tuple[Any, str]:
    """Run the training of the example in this process, one rank; return its result and what it
    printed (to a `terminal`?).
    """
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *SMALL, *arguments])
    monkeypatch.setattr(example, "VALIDATION_WINDOWS", 16)
    args, shown = example.parse(), io.StringIO()
    text = torch.arange(50_000).remainder(251).to(torch.uint8)
    result = example.train(
        args, args.stage, text, text[:5000], Console(file=shown, width=200, force_terminal=terminal)
    )
    return result, shown.getvalue()


def test_a_pipe_and_a_terminal_show_the_mean_loss_of_all_ranks(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    across = example.across_ranks
    # as if a rank were worse by 1
    monkeypatch.setattr(
        example, "across_ranks", lambda *values: torch.cat([across(*values), across(*values) + 1.0])
    )
    result, piped = train_here(example, monkeypatch, "--steps", "2")
    mean = f"loss {result.losses[-1]:.3f}"
    assert mean in piped and f"loss {result.losses[-1] - 0.5:.3f}" not in piped
    assert mean in train_here(example, monkeypatch, "--steps", "2", terminal=True)[1]


def test_a_line_comes_with_the_first_step_and_says_what_a_rank_holds(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, piped = train_here(example, monkeypatch, "--steps", "30")
    lines = [line for line in piped.splitlines() if "  step " in line]
    assert "step    1/30" in lines[0] and "step   30/30" in lines[-1] and len(lines) == 16
    held = sum(result.memory.values()) / 1e6
    # the first comes before Adam's moments
    assert all(f"holds {held:.1f} MB/rank" in line for line in lines[1:])
    assert "MB/rank" in train_here(example, monkeypatch, "--steps", "2", "--compare")[1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_encoded_weights_and_gradients_learn_as_much_in_300_steps(tmp_path: Path) -> None:
    """ZeRO++ on two nodes of two ranks: within 1% of the exact run's validation loss, and closer
    with error feedback than without.

    At the example's own learning rate three seeds of the exact run end 4% apart, and nothing can be
    told; at a third of it the runs stay together.
    """
    plus = {
        "policy": "hpz",
        "comm": {
            "transport": "gloo",
            "node_size": 2,
            "hierarchical": True,
            "weight_codec": "int8",
            "grad_codec": "int4",
        },
    }
    configs = {
        "exact": {"policy": "zero3", "comm": {"node_size": 2}},
        "encoded": plus,
        "loco": {**plus, "comm": {**plus["comm"], "error_feedback": True}},  # type: ignore[dict-item]
    }
    validation = {}
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "zeroshard", "run", "--nproc", "4", str(SCRIPT)]
        command += shlex.split("--steps 300 --lr 1e-3 --batch 4 --sample 8")
        command += ["--config", str(tmp_path / f"{name}.json")]
        command += ["--json", str(tmp_path / f"{name}-result.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
        assert done.returncode == 0, done.stderr
        validation[name] = json.loads((tmp_path / f"{name}-result.json").read_text())["results"][0][
            "validation"
        ]
    print(validation)
    for name in ("encoded", "loco"):
        assert abs(validation[name] / validation["exact"] - 1) < 0.01, validation
    assert abs(validation["loco"] - validation["exact"]) < abs(
        validation["encoded"] - validation["exact"]
    ), validation


@pytest.mark.slow
def test_ten_steps_are_five_and_five_more_and_another_layout_goes_on_from_there(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory, arguments = (
        tmp_path / "run",
        ["--steps", "10", "--checkpoint", str(tmp_path / "run"), "--save-every", "5"],
    )
    run_example(*arguments, "--json", str(tmp_path / "straight.json"))
    assert sorted(path.name for path in directory.glob("step-*")) == [
        "step-0000000005",
        "step-0000000010",
    ]
    shutil.rmtree(directory / "step-0000000010")
    shown = run_example(*arguments, "--resume", "--json", str(tmp_path / "resumed.json"))
    assert "Resumed after step 5 of 10\n" in shown
    straight, resumed = (
        json.loads((tmp_path / f"{name}.json").read_text())["results"][0]
        for name in ("straight", "resumed")
    )
    for name in ("losses", "validation", "sample"):
        assert straight[name] == resumed[name]
    another = [
        "--steps",
        "12",
        "--stage",
        "1",
        "--precision",
        "bf16",
        "--checkpoint",
        str(directory),
        "--resume",
    ]
    result, shown = train_here(example, monkeypatch, *another)
    assert (
        "Resumed after step 10 of 12; stage was 3 and is 1; precision was fp32 and is bf16; steps"
        " was 10 and is 12; " in shown
    )
    assert "states['position']: it differed between the 2 ranks that saved it" in shown
    assert len(result.losses) == 12 and result.losses[:10] == straight["losses"]


def test_a_signal_finishes_the_step_and_saves_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--steps", "9", "--checkpoint", str(tmp_path / "run"), "--resume"]
    straight, _ = train_here(example, monkeypatch, "--steps", "9")
    windows, steps = example.windows, []

    def told_in_between(text: torch.Tensor, starts: torch.Tensor, *more: Any) -> Any:
        if len(starts) == 4:  # not those of the validation
            steps.append(len(steps) + 1)
            if steps[-1] in (3, 5):
                os.kill(os.getpid(), signal.SIGTERM if steps[-1] == 3 else signal.SIGINT)
        return windows(text, starts, *more)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(example, "windows", told_in_between)
        for code in (example.PREEMPTED, 130):
            with pytest.raises(SystemExit) as ended:
                train_here(example, monkeypatch, *arguments)
            assert ended.value.code == code
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert zs.latest_step(tmp_path / "run") == 5
    result, shown = train_here(example, monkeypatch, *arguments)
    assert shown.startswith("Resumed after step 5 of 9\n")
    assert (result.losses, result.validation) == (straight.losses, straight.validation)


def test_a_training_that_was_done_is_done_again_without_a_step(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--steps", "3", "--checkpoint", str(tmp_path), "--resume"]
    first, _ = train_here(example, monkeypatch, *arguments)
    again, _ = train_here(example, monkeypatch, *arguments)
    assert (again.losses, again.validation, again.sample) == (
        first.losses,
        first.validation,
        first.sample,
    )


def test_a_directory_that_holds_a_training_is_not_mixed_with_another(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train_here(example, monkeypatch, "--steps", "2", "--checkpoint", str(tmp_path))
    with pytest.raises(
        SystemExit, match="holds step 2 already: add --resume, or name another directory"
    ):
        train_here(example, monkeypatch, "--steps", "2", "--checkpoint", str(tmp_path))


def test_only_the_last_steps_are_kept(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train_here(
        example,
        monkeypatch,
        "--steps",
        "7",
        "--checkpoint",
        str(tmp_path),
        "--save-every",
        "2",
        "--keep-last",
        "2",
    )
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-0000000006",
        "step-0000000007",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--compare", "--checkpoint", "here"],
            "--compare trains four models one after another, and --checkpoint saves one",
        ),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (
            ["--checkpoint", "here", "--save-every", "0"],
            "--save-every and --keep-last take a number of at least 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_together_are_refused(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        example.parse()
    assert message in capsys.readouterr().err


def test_a_second_ctrl_c_interrupts(example: ModuleType) -> None:
    signals = example.Signals()
    with signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.of_any_rank() == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.of_any_rank() == signal.SIGTERM
    again = example.Signals()
    with again, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_usage_error_is_said_by_one_rank() -> None:
    said = []
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--save-every", "0"],
            env={**os.environ, "RANK": rank},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 2
        said.append(done.stderr)
    assert "--save-every" in said[0] and said[1] == ""


def test_trails_of_other_ranks_are_equal_and_a_step_is_replayed_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else two ranks have half as many as one
    more = [*SMALL, "--leaves", "4", "--steps", "8", "--trail-every", "3"]
    first, second, saved = (str(tmp_path / name) for name in ("first", "second", "saved"))
    checkpoint = ["--checkpoint", saved, "--save-every", "4"]
    run_script(SCRIPT, *more, "--trail", first, *checkpoint, ranks=1)
    run_script(SCRIPT, *more, "--trail", second, "--stage", "1", ranks=2)
    assert main(["compare", first, second]) == 0
    assert "equal: every hash of 3 step(s), 0 to 6" in capsys.readouterr().out
    script = [str(SCRIPT), *more, "--trail", first, *checkpoint, "--resume"]
    assert main(["replay", first, "--step", "6", "--checkpoint", saved, "--", *script]) == 0
    said = capsys.readouterr().out
    assert f"from step 4 of {saved}" in said and "equal: every hash of 1 step(s), 6 to 6" in said
