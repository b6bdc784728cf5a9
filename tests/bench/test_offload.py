"""``zeroshard bench offload``: what it compares, every contender trained, every part run on tiny
sizes, and what it says of what it leaves out.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from benchmarks import commands, contenders, offload
from benchmarks.contenders import Missing, Setup, builder_for
from benchmarks.disk import step_row
from benchmarks.driver import ContenderError, Options
from benchmarks.model import GPT, Batches
from benchmarks.offload import BACKWARD_TARGET, backward_step, copies, disk_step, host_step, largest
from benchmarks.plan import (
    LARGEST,
    LARGEST_SIZE,
    OFFLOAD_ALIVE,
    OFFLOAD_COMPARISONS,
    OFFLOAD_CONTENDERS,
    OFFLOADS,
    SIZES,
    blocks,
    comparisons_for,
)
from benchmarks.raw_disk import Options as DiskOptions
from benchmarks.results import ComparisonResult, ContenderResult, Largest, Report, Run
from benchmarks.tables import markdown
from tests.bench.test_command import MACHINE
from tests.support.harness import run_ranks
from zeroshard.config import build_config
from zeroshard.launch.cli import main

OURS = [name for name in OFFLOAD_CONTENDERS if name.startswith("zero")]
RUNNABLE = [*OURS, "fsdp2+host"]


# ---------------------------------------------------------------------- the plan


def test_the_plan_names_known_contenders_once_and_all_of_them() -> None:
    pairs = [(c.contender, c.reference) for c in OFFLOAD_COMPARISONS]
    assert len(set(pairs)) == len(pairs)
    assert {name for pair in pairs for name in pair} == set(OFFLOAD_CONTENDERS)
    assert set(LARGEST.values()) <= set(OFFLOAD_CONTENDERS)


@pytest.mark.parametrize("name", OFFLOADS)
def test_every_row_stands_beside_itself_without_offload_beside_fsdp2_and_beside_deepspeed(
    name: str,
) -> None:
    references = {c.reference for c in OFFLOAD_COMPARISONS if c.contender == name}
    assert {name.partition("+")[0], "fsdp2+host"} <= references
    assert any(reference.startswith("deepspeed") for reference in references)


@pytest.mark.parametrize("name", OFFLOADS)
def test_every_offload_is_one_that_shard_takes(name: str) -> None:
    path = "/somewhere" if "disk" in OFFLOADS[name].values() else None
    build_config(
        None, policy=name.partition("+")[0], offload=zs.Offload(disk_path=path, **OFFLOADS[name])
    ).refuse_unsupported()


def test_contenders_chosen_by_name_keep_their_comparisons() -> None:
    chosen = comparisons_for(["zero2", "zero2+host", "fsdp2+host"], OFFLOAD_COMPARISONS)
    assert [(c.contender, c.reference) for c in chosen] == [
        ("zero2+host", "zero2"),
        ("zero2+host", "fsdp2+host"),
    ]


def test_all_but_deepspeed_are_one_block() -> None:
    ours = [c for c in OFFLOAD_COMPARISONS if not c.reference.startswith("deepspeed")]
    ((members, inside),) = blocks(ours, alive=OFFLOAD_ALIVE)
    assert set(members) == set(RUNNABLE) and inside and len(inside) == len(ours)


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, 4), ({"contenders": ["zero2"]}, 0), ({"deepspeed_python": "python"}, 0)],
)
def test_deepspeed_that_is_not_installed_is_left_out_aloud_unless_it_was_asked_for(
    given: dict[str, Any],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    result = Report("offload", [], "now", {})
    arguments = argparse.Namespace(**{"contenders": None, "deepspeed_python": None, **given})
    left = {c.reference for c in OFFLOAD_COMPARISONS} - {
        c.reference for c in commands._runnable(result, arguments)
    }
    said = capsys.readouterr().err
    assert len(left) == count and all(name in said and name in result.left_out[0] for name in left)
    assert said.startswith("bench: skipped") is bool(count)


# ---------------------------------------------------------------------- the contenders


def losses(rank: int, world_size: int, path: str) -> dict[str, list[float]]:
    """Train the tiny model for a few steps as every contender that can run here."""
    size, device, seen = SIZES["tiny"], torch.device("cpu"), {}
    for name in RUNNABLE:
        torch.manual_seed(0)
        trainee = builder_for(name)(GPT(size), Setup(size, "fp32", device, path))
        batches = Batches(size, rank=rank, num_ranks=world_size, device=device)
        seen[name] = []
        for step in range(4):
            loss = trainee.forward(*batches[step])
            trainee.backward(loss)
            trainee.update()
            seen[name].append(loss.item())
        if trainee.engine is not None:
            trainee.engine.close()
    return seen


def test_every_contender_trains_and_tiers_change_no_bit(tmp_path: Path) -> None:
    for seen in run_ranks(2, losses, str(tmp_path)):
        late = seen.pop("zero2+late")
        assert late[:2] != seen["zero2"][:2] or late[2:] != seen["zero2"][2:]
        assert late == pytest.approx(seen["zero2"], abs=0.1)
        assert seen.pop("fsdp2+host") == pytest.approx(seen["zero2"], abs=1e-4)
        assert all(each == seen["zero2"] for each in seen.values()), seen
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Report]:
    """One run of every part, with processes of their own for a few contenders."""
    folder = tmp_path_factory.mktemp("offload")
    names = "zero3,zero3+disk,deepspeed2+host"
    small = (
        "--sizes",
        "tiny",
        "--pairs",
        "1",
        "--steps",
        "1",
        "--nproc",
        "1",
        "--threads",
        "1",
        "--elements",
        "5000",
        "--json",
    )
    arguments = [
        "bench",
        "offload",
        *small,
        "--contenders",
        names,
        "--disk-path",
        str(folder),
        "--out",
        str(folder / "tiny.json"),
    ]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)  # here: another process would first have to import torch
    done = subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["tiny.json"], (
        "something was left on the disk"
    )
    return done, Report.load(folder / "tiny.json")


@pytest.mark.slow
def test_every_part_is_measured_and_printed_as_json(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    done, result = tiny
    assert json.loads(done.stdout)["kind"] == result.kind == "offload"
    assert [run.size for run in result.runs] == [
        "tiny",
        "host step",
        "disk step, gradient on the device",
        "disk step, gradient on disk",
    ]
    compared = {(c.contender, c.reference): len(c.pairs) for c in result.runs[0].comparisons}
    assert compared[("zero3+disk", "zero3")] == 1
    assert all(
        len(c.pairs) == 1 and min(c.pairs[0]) > 0 for run in result.runs for c in run.comparisons
    )


@pytest.mark.slow
def test_bytes_rest_on_the_tiers_that_were_asked_for(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    run = tiny[1].runs[0]
    disk, device = run.contender("zero3+disk"), run.contender("zero3")
    assert disk is not None and device is not None
    for record, tier in ((disk, "disk"), (device, "device")):
        states = record.memory["after_update"]["tiers"]
        assert {
            tier for state in states.values() for tier, num_bytes in state.items() if num_bytes
        } == {tier}
    assert disk.losses == device.losses and len(disk.losses) == 8


@pytest.mark.slow
def test_what_is_not_measured_is_said_on_stderr_and_in_the_result(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    done, result = tiny
    record = next(c for c in result.runs[0].contenders if c.name == "deepspeed2+host")
    if record.skipped:
        assert (
            not record.failed
            and "skipped deepspeed2+host: DeepSpeed cannot be imported" in done.stderr
        )
    assert "skipped largest model" in done.stderr and "--device cuda" in done.stderr
    assert "Skipped: largest model" in markdown(result)


@pytest.mark.slow
def test_the_tables_show_tiers_speeds_and_targets(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    text = markdown(tiny[1])
    assert "device B/param" in text and "host B/param" in text and "disk B/param" in text
    row = next(line for line in text.splitlines() if line.startswith("| zero3+disk | "))
    assert [cell.strip() for cell in row.split("|")][4:6] == ["0", "0"] and "equal" in row
    for shown in (
        "host step / torch AdamW",
        "disk step / raw",
        "disk step / max(raw, compute)",
        ">= 0.85",
        ">= 0.9",
        "M elements/s",
    ):
        assert shown in text, shown
    assert "tokens per rank and step" not in text.split("host step,")[1].splitlines()[0]


def test_a_disk_path_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    assert (
        main(["bench", "offload", "--parts", "host-step", "--disk-path", str(tmp_path / "none")])
        == 3
    )


@pytest.mark.parametrize(
    "arguments", [["--parts", "everything"], ["--contenders", "zero1+host"], ["--elements", "0"]]
)
def test_wrong_arguments_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "offload", *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_peer_without_its_operator_is_missing_and_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Builder:
        def is_compatible(self) -> bool:
            return False

    class Accelerator:
        def create_op_builder(self, name: str) -> Builder:
            return Builder()

    class Module:
        accelerator = Accelerator
        get_accelerator = Accelerator

    fake = type("deepspeed", (), {"accelerator": Module})
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", fake)
    with pytest.raises(Missing, match="libaio"):
        contenders.builder_for("deepspeed3+disk")
    assert callable(contenders.builder_for("deepspeed3+weights"))


# ---------------------------------------------------------------------- a step by itself


def test_a_step_alone_is_measured_turn_by_turn_and_the_bound_is_the_slower_of_two(
    tmp_path: Path,
) -> None:
    run = disk_step(70_000, 3, tmp_path, grad="disk")
    seconds = {c.name: c.step_s for c in run.contenders}
    assert seconds["max(raw, compute)"] == [
        max(pair) for pair in zip(seconds["raw"], seconds["compute"], strict=True)
    ]
    assert {len(taken) for taken in seconds.values()} == {3}
    assert {
        c.name: c.facts["bytes"] / run.num_parameters for c in run.contenders if c.facts["bytes"]
    } == {"disk step": 28, "raw": 28}
    assert list(tmp_path.iterdir()) == []
    assert [c.name for c in host_step(5000, 1).contenders][:2] == ["host step", "torch AdamW"]
    run = backward_step(5000, 1)
    assert [c.name for c in run.contenders] == [
        f"{what}, {when}"
        for what in ("optimizer.step()", "iteration")
        for when in ("after the backward", "in it")
    ]
    assert [one.target for one in run.comparisons] == [BACKWARD_TARGET, None]


def test_the_step_is_a_row_of_the_disk_benchmark(tmp_path: Path) -> None:
    row = step_row(
        DiskOptions(path=tmp_path, num_bytes=12 * 5000, rounds=2, queue_depth=8, verify=True),
        tmp_path,
    )
    assert (
        row.what == "step" and len(row.raw) == len(row.store) == 2 and min(row.raw + row.store) > 0
    )
    assert len(row.cells()) == 6


# ---------------------------------------------------------------------- the largest model


def attempts(
    monkeypatch: pytest.MonkeyPatch,
    *,
    fits: int,
    why: str = "rank 0: OutOfMemoryError: CUDA out of memory",
) -> list[int]:
    """Pretend that models of up to `fits` layers train."""
    tried: list[int] = []

    def attempt(contender: str, size: Any, precision: str, options: Options) -> tuple[float, int]:
        tried.append(size.layers)
        if size.layers > fits:
            raise ContenderError(why + "\n    | and more", failed=True)
        return 0.5, size.layers * 100

    monkeypatch.setattr(offload, "_attempt", attempt)
    return tried


def test_layers_double_until_the_card_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attempts(monkeypatch, fits=5)
    found = largest("device", "bf16", Options(device_bytes=10**9), seconds=60)
    assert tried == [1, 2, 4, 8]
    expected = replace(LARGEST_SIZE, layers=4).num_parameters
    assert found == Largest(
        "device",
        "zero3",
        expected,
        4,
        0.5,
        400,
        10**9,
        "rank 0: OutOfMemoryError: CUDA out of memory",
    )


def test_the_search_ends_when_its_time_is_up_or_when_another_memory_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = attempts(monkeypatch, fits=1000)
    assert (
        largest("device", "bf16", Options(), seconds=0).stopped.startswith("time: 0 s")
        and tried == []
    )
    monkeypatch.setattr(
        offload, "_free_memory", lambda: 24 * replace(LARGEST_SIZE, layers=2).num_parameters
    )
    found = largest("host", "bf16", Options(), seconds=60)
    assert (found.layers, found.stopped.split(":")[0]) == (2, "host memory")
    found = largest("disk", "bf16", Options(disk_path=str(tmp_path)), seconds=60, max_layers=2)
    assert found.layers <= 2 and found.stopped


@pytest.mark.slow
def test_a_model_without_memory_of_its_own_trains_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = Options(num_ranks=1, threads=1, disk_path=str(tmp_path), deferred=True)
    found = largest("disk", "bf16", options, seconds=60, size=SIZES["tiny"], max_layers=2)
    assert (found.layers, found.num_parameters) == (
        2,
        SIZES["tiny"].num_parameters,
    ) and found.step_s > 0, found
    assert list(tmp_path.iterdir()) == []


def test_rows_of_the_largest_model_survive_saving_and_are_shown(tmp_path: Path) -> None:
    machine = {"load_before": [0.0], **dict.fromkeys(MACHINE, "")}
    run = Run(
        "tiny",
        "fp32",
        1,
        1,
        "cuda",
        10,
        4,
        [ContenderResult("fsdp2+host", step_s=[1.0], device_peak_bytes=5_000_000)],
    )
    run.contenders[0].live_by_device = {
        "after_backward": {"cuda": 40, "cpu": 120},
        "after_update": {"cpu": 120},
    }
    run.comparisons = [ComparisonResult("a", "b", None, 1, [[1.0, 2.0]])]
    found = Largest("host", "zero3+host", 3 * 10**9, 16, 1.5, 2**34, 2**35, "CUDA out of memory")
    result = Report(
        "offload", ["zeroshard"], "now", machine, [run], [found], ["something: not here"]
    )
    result.save(tmp_path / "result.json")
    assert Report.load(tmp_path / "result.json") == result
    text = markdown(result)
    assert "| host | zero3+host | 16 | 3.00 | 1.50 | 16.0 | 32.0 | CUDA out of memory |" in text
    assert "| fsdp2+host | 1000.0 | 4 | 4.0 / 0.0 | 12.0 / 12.0 |  | 0 | 5 |" in text
    assert "- Skipped: something: not here" in text


def test_copies_are_timed_each_way_in_both_kinds_of_memory() -> None:
    run = copies(1 << 12, 2, device="cpu")
    assert [c.name for c in run.contenders] == [
        f"to the {where}, {kind}" for where in ("host", "device") for kind in ("pinned", "pageable")
    ]
    assert all(len(c.step_s) == 2 and c.facts["bytes"] == 1 << 12 for c in run.contenders)
