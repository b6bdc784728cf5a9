"""Weights from safetensors files: every row, each rank its own bytes, and what does not fit is
named before anything changes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, TRANSPORTS, batch, make_model, take_steps, two_groups
from zeroshard import CheckpointError, ConfigError, PlanMismatch
from zeroshard.formats import import_checkpoint
from zeroshard.runtime.engine import states_of


class Conv(nn.Module):
    """Four dimensions, channels last; a leading dimension of one; a batch norm's buffers; a
    scalar; a tie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 9, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(9)
        self.positions = nn.Parameter(torch.randn(1, 21, 4))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 3))


def _write(directory: Path, state: dict[str, torch.Tensor], files: int) -> None:
    """Write `state` as Transformers does: one file, or several with an index."""
    tensors = {name: value.contiguous() for name, value in state.items()}
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {
        name: f"model-{index % files + 1:05d}-of-{files:05d}.safetensors"
        for index, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: value for name, value in tensors.items() if weight_map[name] == file},
            directory / file,
        )
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def _load(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> None:
    expected = _reseeded(64).state_dict()
    for case in cases:
        row, files, precision, transport = case.values()
        directory = f"{folder}/{files}"
        torch.manual_seed(0)
        model = make_model(width=64)
        for parameter in list(model.parameters())[:3]:
            parameter.requires_grad_(False)  # frozen: weights without a master
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        engine = zs.shard(
            model,
            optimizer,
            policy=row,
            precision=precision,
            comm=zs.Comm.model_validate({"transport": transport}),
        )
        report = zs.load_pretrained(engine, directory)
        assert not report.missing and not report.unexpected
        assert model(*batch(rank, 0)).isfinite()
        state = engine.full_state_dict(rank0_only=False)
        for name, value in expected.items():
            assert torch.equal(state[name], value.to(state[name].dtype)), (row, name)
        masters = {
            p.name: p for p in states_of(engine).resting_pieces() if p.parameter.requires_grad
        }
        for name, piece in masters.items():
            assert torch.equal(
                piece.tensor, expected[name].reshape(-1)[piece.start : piece.stop]
            ), "masters take the file's full precision"
        total = 4 * sum(value.numel() for value in expected.values())
        if row != "ddp":
            rows = sum(2 * 4 * value[0].numel() for value in expected.values())
            assert report.bytes_read <= total / world + rows + total * 0.02, (
                row,
                report.bytes_read,
                total,
            )
        take_steps(rank, 2, model, optimizer)
        saves = f"{directory}/{row}-{precision}-{transport}"
        zs.save(saves, engine, step=2)
        saved = engine.full_state_dict(rank0_only=False)
        with torch.no_grad(), engine.gathered(writeback=True):
            for parameter in model.parameters():
                parameter.zero_()
        zs.load(saves, engine)
        for name, value in engine.full_state_dict(rank0_only=False).items():
            assert torch.equal(value, saved[name]), (row, name)
        engine.close()


FACTORS: dict[str, Sequence[Any]] = {
    "row": ROWS,
    "files": (1, 3),
    "precision": ("fp32", "bf16"),
    "transport": TRANSPORTS,
}


@by_pairs(FACTORS, slow_by="files")
def test_every_row_loads_its_own_bytes_of_trained_and_frozen_weights(
    cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    for files in FACTORS["files"]:
        (tmp_path / str(files)).mkdir()
        _write(tmp_path / str(files), dict(_reseeded(64).state_dict()), files)
    run_ranks(2, _load, str(tmp_path), cases, timeout=120)


def _reseeded(width: int) -> nn.Module:
    """A model with other values than make_model() gives."""
    model = make_model(width=width)
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def _odd_shapes(rank: int, world: int, directory: str) -> None:
    torch.manual_seed(1)
    expected = {name: value.clone() for name, value in Conv().state_dict().items()}
    torch.manual_seed(2)
    model = Conv()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    zs.load_pretrained(engine, directory)
    state = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    engine.close()


@pytest.mark.parametrize("kept", ["first.weight", "second.weight"])
def test_odd_shapes_strides_buffers_and_ties(kept: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = dict(Conv().state_dict())
    del state["second.weight" if kept == "first.weight" else "first.weight"]
    _write(tmp_path, state, 1)
    run_ranks(2, _odd_shapes, str(tmp_path))
    torch.manual_seed(2)
    plain = Conv()
    report = zs.load_pretrained(plain, tmp_path)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in state.items())
    assert report.bytes_read == sum(
        value.numel() * value.element_size() for value in state.values()
    )


def test_half_precision_files_fill_fp32_masters_and_names_can_be_changed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = make_model()
    _write(
        tmp_path,
        {f"old.{name}": value.bfloat16() for name, value in source.state_dict().items()},
        2,
    )
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=3)
    zs.load_pretrained(engine, tmp_path, rename=lambda name: name.removeprefix("old."))
    state = engine.full_state_dict()
    assert all(
        torch.equal(state[name], value.bfloat16().float())
        for name, value in source.state_dict().items()
    )
    engine.close()


def test_a_deferred_model_is_filled_from_the_files(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = make_model(width=256)
    _write(tmp_path, dict(expected.state_dict()), 1)
    with zs.deferred_init():
        plain = make_model(width=256)
    with zs.deferred_init():
        model = make_model(width=256)
    zs.load_pretrained(plain, tmp_path)
    engine = zs.shard(model, two_groups(model), stage=3)
    zs.load_pretrained(engine, tmp_path)
    for state in (plain.state_dict(), engine.full_state_dict()):
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    engine.close()


def _built_by_each_rank(rank: int) -> nn.Module:
    """A deferred model whose values, large and small, are another rank's nowhere."""
    with zs.deferred_init():
        model = make_model(width=160)
        torch.manual_seed(100 + rank)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return model


def _other_values(rank: int, world: int, directory: str) -> None:
    expected = _reseeded(160).state_dict()
    for row in ROWS:
        model = _built_by_each_rank(rank)
        engine = zs.shard(model, two_groups(model), policy=row)
        with pytest.raises(
            PlanMismatch,
            match=r"first about 'initial value of .*load_pretrained\(\) before its first use",
        ):
            model(*batch(rank, 0))
        zs.load_pretrained(engine, directory)
        assert model(*batch(rank, 0)).isfinite()
        state = engine.full_state_dict(rank0_only=False)
        assert all(torch.equal(state[name], value) for name, value in expected.items()), row
        if row == "zero3":
            zs.save(f"{directory}/saved", engine, step=1)
        engine.close()
    model = _built_by_each_rank(rank)
    engine = zs.shard(model, two_groups(model))
    zs.load_pretrained(engine, f"{directory}/part", strict=False)
    save = functools.partial(zs.save, f"{directory}/unsaved", engine, step=1)
    for refused in (
        lambda: model(*batch(rank, 0)),
        engine.full_state_dict,
        lambda: engine.gathered().__enter__(),
        save,
    ):
        with pytest.raises(
            PlanMismatch,
            match=r"first about 'initial value of head\.weight': rank 0: .*; rank 1: .*same seed",
        ):
            refused()
    zs.load(f"{directory}/saved", engine)
    assert all(
        torch.equal(engine.full_state_dict(rank0_only=False)[name], value)
        for name, value in expected.items()
    )
    engine.close()


def test_deferred_values_may_differ_between_ranks_where_files_overwrite_them(
    tmp_path: Path,
) -> None:
    state = dict(_reseeded(160).state_dict())
    _write(tmp_path, state, 1)
    (tmp_path / "part").mkdir()
    _write(
        tmp_path / "part",
        {name: value for name, value in state.items() if name != "head.weight"},
        1,
    )
    run_ranks(2, _other_values, str(tmp_path))


@on_ranks(2)
def test_what_does_not_fit_is_named_before_anything_changes(rank: int, tmp_path: Path) -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=3)
    before = engine.full_state_dict(rank0_only=False)

    def told(message: str, state: dict[str, torch.Tensor], **options: Any) -> None:
        path = Path(tmp_path) / f"{rank}"
        path.mkdir(exist_ok=True)
        save_file(state, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            zs.load_pretrained(engine, path, **options)
        after = engine.full_state_dict(rank0_only=False)
        assert all(torch.equal(after[name], value) for name, value in before.items())

    state = {name: value + 1 for name, value in before.items()}
    told(
        r"missing 'head.weight'; strict=False",
        {name: value for name, value in state.items() if name != "head.weight"},
    )
    told(
        r"unexpected 'more', 'other'; strict=False",
        {**state, "more": torch.ones(2), "other": torch.ones(1)},
    )
    wrong = {**state, "norm.bias": torch.ones(4)}
    told(r"tensor 'norm.bias' is \[4\] in the files and \[19\] in the model", wrong)
    told(r"tensor 'norm.bias'", wrong, strict=False)
    path = Path(tmp_path) / f"{rank}" / "model.safetensors"
    del state["head.weight"]
    save_file({**state, "more": torch.ones(2)}, path)
    report = zs.load_pretrained(engine, path, strict=False)
    assert report.missing == ["head.weight"] and report.unexpected == ["more"]
    after = engine.full_state_dict(rank0_only=False)
    assert torch.equal(after["head.weight"], before["head.weight"]) and torch.equal(
        after["norm.weight"], before["norm.weight"] + 1
    )
    whole = Path(tmp_path) / "whole"
    if rank == 0:
        whole.mkdir()
        save_file(before, whole / "model.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        zs.load_pretrained(engine, path)
    with pytest.raises(CheckpointError, match=r"nowhere is not on this machine"):
        zs.load_pretrained(engine, Path(tmp_path) / "nowhere")
    with pytest.raises(
        CheckpointError if rank else PlanMismatch,
        match=r"nowhere" if rank else r"rank 1 refused: .*nowhere is not on",
    ):
        zs.load_pretrained(engine, Path(tmp_path) / "nowhere" if rank else Path(tmp_path) / "whole")
    (path.parent / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../etc/passwd"}})
    )
    with pytest.raises(CheckpointError, match="names a file outside its directory"):
        zs.load_pretrained(engine, path.parent)
    engine.close()


def _swapped_on_one_rank(rank: int, world: int, directory: str) -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=3)
    before = engine.full_state_dict(rank0_only=False)
    names = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"} if rank else {}
    with pytest.raises(PlanMismatch, match="first about 'names of the tensors, digest'"):
        zs.load_pretrained(engine, directory, rename=lambda name: names.get(name, name))
    after = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.close()


def test_ranks_whose_rename_gives_other_names_are_told(tmp_path: Path) -> None:
    _write(tmp_path, dict(_reseeded(19).state_dict()), 1)
    run_ranks(2, _swapped_on_one_rank, str(tmp_path))


def _files(directory: Path, weight_map: dict[str, str], **values: dict[str, float]) -> None:
    """Write ``NAME.safetensors`` with [2, 2] tensors of one number each, and an index."""
    for file, tensors in values.items():
        state = {name: torch.full((2, 2), value) for name, value in tensors.items()}
        save_file(state, directory / f"{file}.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in weight_map.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("strict", [True, False])
def test_two_tensors_that_get_one_name_are_refused_with_their_files(
    strict: bool, tmp_path: Path
) -> None:
    weights = {"a.weight": "one", "b.weight": "two"}
    _files(tmp_path, weights, one={"a.weight": 1.0}, two={"b.weight": 2.0})
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.clone()
    with pytest.raises(
        CheckpointError,
        match=r"two tensors are for 'weight': 'a\.weight' in .*one\.safetensors and 'b\.weight' in"
        r" .*two\.safetensors; give them different names with rename=",
    ):
        zs.load_pretrained(layer, tmp_path, rename=lambda name: name[2:], strict=strict)
    assert torch.equal(layer.weight, before)


def test_a_tensor_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    both: dict[str, dict[str, float]] = {"one": {"weight": 1.0}, "two": {"weight": 2.0}}
    for file, value in (("one", 1.0), ("two", 2.0)):
        _files(tmp_path, {"weight": file, "other": "one", "more": "two"}, **both)
        layer = nn.Linear(2, 2, bias=False)
        zs.load_pretrained(layer, tmp_path)
        assert torch.equal(layer.weight, torch.full((2, 2), value))
        import_checkpoint(tmp_path, tmp_path / f"imported-{file}", format="hf")
        zs.load(tmp_path / f"imported-{file}", engine := zs.shard(layer), strict=False)
        assert torch.equal(engine.full_state_dict()["weight"], torch.full((2, 2), value))
        engine.close()
    _files(tmp_path, {"other": "one", "more": "two"}, **both)  # which one nobody says
    with pytest.raises(CheckpointError, match=r"two tensors are for 'weight': .*one.*two"):
        zs.load_pretrained(nn.Linear(2, 2, bias=False), tmp_path)


def test_pipes_and_deep_indices_are_one_line_each(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2, bias=False)
    os.mkfifo(tmp_path / "one.safetensors")
    _files(tmp_path, {"weight": "one"})
    with pytest.raises(CheckpointError, match=r"one\.safetensors .*it is not a regular file"):
        zs.load_pretrained(layer, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"is not an index .*nested deeper than 100"):
        zs.load_pretrained(layer, tmp_path)


def test_a_tied_parameter_takes_both_of_its_tensors_only_where_they_are_equal(
    tmp_path: Path,
) -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2, False), "second": nn.Linear(2, 2, False)})
    model["second"].weight = model["first"].weight
    names = {"first.weight": "one", "second.weight": "two"}
    _files(tmp_path, names, one={"first.weight": 3.0}, two={"second.weight": 3.0})
    zs.load_pretrained(model, tmp_path)
    assert torch.equal(model["second"].weight, torch.full((2, 2), 3.0))
    _files(tmp_path, names, one={"first.weight": 3.0}, two={"second.weight": 4.0})
    with pytest.raises(
        CheckpointError,
        match=r"'first\.weight' in .*one\.safetensors and 'second\.weight' in .*two\.safetensors"
        r" differ, and are one tied parameter of the model: untie it",
    ):
        zs.load_pretrained(model, tmp_path)
    assert torch.equal(model["first"].weight, torch.full((2, 2), 3.0))


@on_ranks(2)
def test_names_of_the_hub_and_swapped_arguments_are_a_line_of_ours(tmp_path: Path) -> None:
    engine = zs.shard(make_model(), stage=3)
    hub = r"org/model is not on this machine, .* downloads nothing: .*--local-dir DIR` makes one"
    with pytest.raises(CheckpointError, match=hub):
        zs.load_pretrained(engine, "org/model")
    with pytest.raises(CheckpointError, match="downloads nothing: give it a directory of safe"):
        zs.load_pretrained(engine, "/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"not a str and a Engine \(target comes first"):
        zs.load_pretrained(str(tmp_path), engine)  # type: ignore[arg-type]
    engine.close()
