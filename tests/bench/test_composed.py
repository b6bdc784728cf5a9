"""``python -m benchmarks.composed``: its decoder, its stages, its table, and the command."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.composed import CONTENDERS, Decoder, main, read, stages_of, table
from benchmarks.plan import SIZES
from benchmarks.results import ComparisonResult, ContenderResult, Run
from tests.support.harness import ROOT

TINY = SIZES["tiny"]


def _run(pairs: int) -> Run:
    both = [[0.2, 0.3]] * pairs
    contenders = [
        ContenderResult("zero3+tp", step_s=[0.1] * pairs, losses=[5.5]),
        ContenderResult("fsdp2+tp", step_s=[0.15] * pairs, losses=[5.5]),
    ]
    return Run(
        "tiny", "fp32", 4, 1, "cpu", 1000, 50, contenders,
        [ComparisonResult("zero3+tp", "fsdp2+tp", 1.0, 2, both)],
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2])
def test_stages_one_after_another_are_the_whole_decoder(num_stages: int) -> None:
    tokens = torch.randint(TINY.vocabulary, (2, TINY.context))
    torch.manual_seed(0)
    whole = Decoder(TINY)
    x, count = tokens, 0
    for number in range(num_stages):
        torch.manual_seed(0)
        stage = stages_of(TINY, number, num_stages)
        x, count = stage(x), count + sum(p.numel() for p in stage.parameters())
    assert torch.equal(x, whole(tokens))
    assert count == sum(p.numel() for p in whole.parameters())


def test_the_halves_of_the_heads_add_up_to_the_attention_of_all() -> None:
    """As tensor parallelism cuts a block: by rows of q, k and v, and columns of what follows."""
    torch.manual_seed(0)
    whole, x = Decoder(TINY).blocks[0], torch.randn(2, TINY.context, TINY.width)
    whole.down.weight.data.zero_()  # attention alone
    halves = []
    for rank in range(2):
        half = copy.deepcopy(whole)
        for name in ("q", "k", "v"):
            layer = half.get_submodule(name)
            layer.weight = torch.nn.Parameter(layer.weight.chunk(2)[rank])
        half.out.weight = torch.nn.Parameter(half.out.weight.chunk(2, dim=1)[rank])
        halves.append(half(x) - x)
    torch.testing.assert_close(halves[0] + halves[1], whole(x) - x, rtol=1e-4, atol=1e-6)


def test_the_table_says_speed_and_how_sure_it_is() -> None:
    text = table(_run(12))
    assert "| zero3+tp | 100.0 (100.0 to 100.0) | 2,000 | 5.50000 |" in text
    assert "| zero3+tp / fsdp2+tp | 1.500 | 1.500 to 1.500 | holds |" in text
    assert "too few pairs" in table(_run(2))


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(asdict(_run(3))))
    assert read(file) == _run(3)


def test_an_unknown_contender_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--contenders", "zero3+cp"])
    assert ended.value.code == 2
    assert "'zero3+cp' is not one of zero3+tp, fsdp2+tp, zero3+pp" in capsys.readouterr().err


@pytest.mark.slow
def test_all_contenders_train_in_turn_from_one_loss() -> None:
    line = [sys.executable, "-m", "benchmarks.composed", "--size", "tiny", "--json"]
    done = subprocess.run(
        [*line, "--pairs", "2", "--steps", "1"], cwd=ROOT, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    losses = {one["name"]: one["losses"][0] for one in run["contenders"]}
    assert tuple(losses) == CONTENDERS
    assert list(losses.values()) == pytest.approx([losses["fsdp2+tp"]] * 4, rel=1e-5)
    pairs = {(one["contender"], one["reference"]): one["pairs"] for one in run["comparisons"]}
    assert list(pairs) == [("zero3+tp", "fsdp2+tp"), ("zero3+pp", "fsdp2+pp")]
    assert all(len(one) == 2 and min(map(min, one)) > 0 for one in pairs.values())
