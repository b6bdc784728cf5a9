"""docs/checkpoint-format.md is right: its own reader reads what we write; and golden checkpoints
of released versions load to their numbers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zeroshard as zs
from tests.support.checkpoints import check_everything, make
from tests.support.golden.make import HERE, STEP, Golden, pieces_of, whole
from tests.support.golden.make import make as make_golden
from tests.support.harness import run_ranks
from zeroshard.checkpoint.manifest import FORMAT, ITEMSIZE, VERSION, Manifest, digest
from zeroshard.checkpoint.steps import list_steps, read_manifest, step_path
from zeroshard.runtime.engine import states_of

DOCUMENT = (
    Path(__file__).resolve().parent.parent.parent / "docs" / "checkpoint-format.md"
).read_text()
PROSE = " ".join(DOCUMENT.split())  # however its lines are wrapped
GOLDEN = sorted(HERE.glob("format-*"), key=lambda path: int(path.name.removeprefix("format-")))


@pytest.fixture(scope="module")
def documented() -> Callable[..., np.ndarray[Any, Any]]:
    """The reader in the document, as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert (
        f"a function of {len(code[code.index('def ') :].splitlines())} lines" in PROSE
        and "import zeroshard" not in code
    )
    return names["read"]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- the document


def _saved(
    rank: int, world: int, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Train and save; return the weights, and this rank's pieces of the moments by name, with
    where they begin.
    """
    training = make("zero3")
    for step in range(2):
        training.step(rank, step)
    training.save(folder, 2)
    moments = {
        owned.name: {"start": owned.piece.start} | training.optimizer.state[owned.tensor]
        for owned in states_of(training.engine).stepped_pieces()
    }
    state = training.engine.full_state_dict(rank0_only=False)
    training.engine.close()
    return state, moments


def test_the_documents_reader_reads_every_parameter_and_moment(
    tmp_path: Path, documented: Callable[..., Any]
) -> None:
    ranks = run_ranks(2, _saved, tmp_path)
    step = tmp_path / "step-0000000002"
    state, moments = ranks[0]
    for name, value in state.items():
        if name != "seen":
            found = documented(step, name)
            assert (
                found.dtype == np.float32
                and found.shape == tuple(value.shape)
                and np.array_equal(found, value.numpy())
            ), name
    read = 0
    for _, moments in ranks:
        for name, moment in moments.items():
            start, own = moment["start"], moment["exp_avg"].numpy()
            assert np.array_equal(
                documented(step, name, "state.exp_avg").reshape(-1)[start : start + own.size], own
            ), name
            read += own.size
    assert read == sum(value.numel() for name, value in state.items() if name != "seen")


def test_the_documents_reader_says_what_it_cannot_read(
    tmp_path: Path, documented: Callable[..., Any]
) -> None:
    run_ranks(2, _saved, tmp_path)
    step = tmp_path / "step-0000000002"
    with pytest.raises(ValueError, match=r"state\.nothing of norm\.weight lacks 19 elements"):
        documented(step, "norm.weight", "state.nothing")
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest | {"version": 3}))
    with pytest.raises(ValueError, match="is no checkpoint of version 1 or 2"):
        documented(step, "norm.weight")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_the_documents_reader_puts_boxes_together(
    path: Path, documented: Callable[..., Any]
) -> None:
    for name, kinds in _expected(path)["parameters"].items():
        for kind, values in kinds.items():
            if kind == "value" or kind.startswith("state.exp"):
                found = documented(step_path(path, STEP), name, kind)
                dims = (0, 2, 3, 1) if found.ndim == 4 else range(found.ndim)  # as memory has it
                assert found.transpose(tuple(dims)).reshape(-1).tolist() == values, (name, kind)


def test_what_the_document_says_is_so() -> None:
    assert (
        f'"format": "{FORMAT}"' in PROSE and f"# The checkpoint format, version {VERSION}" in PROSE
    )
    assert f"`{digest(b'')}`" in PROSE
    assert f"`dtype` is safetensors' name: {' '.join(ITEMSIZE)}." in PROSE
    text = Manifest(1, 1, "", "", "", (), {}, (), None).dump()
    assert (
        json.loads(text)["hash"] == digest(text[:-47]) and "all its bytes but the last 47" in PROSE
    )
    assert list(json.loads(text))[:2] == ["format", "version"]
    for form in (
        "tensor",
        "array",
        "scalar",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "float",
        "complex",
        "bytes",
        "dtype",
    ):
        assert f'{{"${form}": ' in PROSE, form
    example = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)[0]
    assert set(json.loads(re.sub(r" //.*", "", example))) == set(json.loads(text)), (
        "all fields are in the example"
    )


# ------------------------------------------------------------------------------------- golden files


def test_there_is_a_golden_checkpoint_of_this_version() -> None:
    assert [path.name for path in GOLDEN][-1] == f"format-{VERSION}"
    assert sum(file.stat().st_size for path in GOLDEN for file in path.rglob("*")) < 100_000 * len(
        GOLDEN
    )


def _expected(path: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((path / "expected.json").read_text())
    return expected


def _load_golden(rank: int, world: int, path: Path, row: str) -> list[Any]:
    """Load, and return this rank's pieces as `golden.make.write` returned them; what is not in
    pieces is compared here.
    """
    model, optimizer, schedule, engine = make_golden(row)
    ema = zs.EMA(engine, 0.5)
    restored = zs.load(path, engine, states={"schedule": schedule, "average": ema})
    expected = _expected(path)["ranks"]
    # where all ranks were data parallel, too
    same = world == 2 and not read_manifest(step_path(path, STEP)).places
    assert restored.step == STEP and (restored.skipped == []) == same
    assert (
        schedule.last_epoch == expected[0]["last_epoch"]
        and [group["lr"] for group in optimizer.param_groups] == expected[0]["lr"]
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert model.seen.tolist() == expected[rank if same else 0]["seen"]
    if same:
        assert [random.random(), float(np.random.rand()), torch.rand(1).item()] == expected[rank][
            "draws"
        ]
        extra = restored.extra
        assert (
            extra["best"] == float("inf")
            and extra["position"] == {"epoch": 1, "seen": [3, (rank, None)]}
            and extra[7] == b"\x00\xff"
        )
        assert extra["curve"].tolist() == [0.25, 0.0] and extra["curve"][1].signbit()
    pieces = pieces_of(engine, optimizer, ema)
    engine.close()
    return pieces


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize(("row", "world"), [("zero3", 2), ("zero1", 2), ("zero2", 1)])
def test_a_golden_checkpoint_loads_to_its_numbers(path: Path, row: str, world: int) -> None:
    ranks = run_ranks(world, _load_golden, path, row)
    assert whole([{"pieces": pieces} for pieces in ranks]) == _expected(path)["parameters"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_whole_and_the_documents_reader_reads_it(
    path: Path, documented: Callable[..., Any]
) -> None:
    assert check_everything(path) == [] and list(list_steps(path)) == [STEP]
    model, expected = Golden(), _expected(path)["parameters"]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kinds = expected.get("embed.weight" if name == "head.weight" else name, {})
        for kind, numbers in kinds.items():
            if kind != "state.step":
                found = documented(path / f"step-{STEP:010d}", name, kind)
                in_memory = (
                    torch.tensor(numbers).as_strided(parameter.shape, parameter.stride()).numpy()
                )
                assert found.shape == tuple(parameter.shape) and np.array_equal(found, in_memory), (
                    name,
                    kind,
                )
    assert documented(path / f"step-{STEP:010d}", "nothing").shape == (0, 4)
