"""Other libraries' checkpoints as ours: bit for bit, named where something is left out, and
never by running what a file says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import zeroshard as zs
from tests.support import deepspeed_tree
from tests.support.checkpoints import check_same
from tests.support.deepspeed_tree import Tree
from tests.support.harness import run_ranks
from tests.support.training import Net, make_model, take_steps, two_groups
from zeroshard import CheckpointError, ConfigError
from zeroshard.checkpoint.step_reader import verify
from zeroshard.checkpoint.steps import list_steps, read_manifest
from zeroshard.formats import Imported, import_checkpoint
from zeroshard.formats.export import export
from zeroshard.formats.importer import read_restricted

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)


class Hostile:
    """An object whose pickle creates a file when it is opened without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _resume(
    rank: int, world: int, folder: Path, row: str, strict: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Load the newest step into another model and train on; return losses, the loaded weights,
    and what was skipped.
    """
    torch.manual_seed(99)
    model = Net()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row)
    restored = zs.load(folder, engine, strict=strict)
    state = engine.full_state_dict(rank0_only=False)
    losses = take_steps(0, (2, 3), model, optimizer, engine)
    engine.close()
    return losses, state, restored.skipped


def _plain() -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after two steps in plain torch."""
    model = make_model()
    optimizer = two_groups(model)
    take_steps(0, 2, model, optimizer)
    return model, optimizer


def _values(imported: Imported, tmp_path: Path) -> dict[str, Any]:
    """Return all that a step holds, by way of an export; see that it is whole."""
    assert verify(imported.path) == []
    out = tmp_path / f"values-{len(list(tmp_path.iterdir()))}.pt"
    export(imported.path, out, "torch")
    content: dict[str, Any] = torch.load(out, weights_only=True)
    return content


# ------------------------------------------------------------------ torch, Transformers, DCP


def _save(rank: int, world: int, folder: Path) -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy="zero3")
    take_steps(0, 2, model, optimizer, engine)
    zs.save(folder, engine, step=2)
    engine.close()


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_what_was_exported_comes_back_and_trains_on_to_the_same_bits(
    tmp_path: Path, to: Any
) -> None:
    run_ranks(2, _save, tmp_path / "run")
    losses, state, _ = run_ranks(2, _resume, tmp_path / "run", "zero3")[0]
    export(list_steps(tmp_path / "run")[2], tmp_path / "out", to)
    imported = import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert (imported.step, imported.format, imported.optimizer, imported.notes) == (
        2,
        to,
        "AdamW",
        [],
    )
    for row in ("zero1", "zero3"):
        again, loaded, skipped = run_ranks(2, _resume, tmp_path / "back", row)[0]
        assert skipped == []
        check_same(loaded, state)
        assert again == losses


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict", "module"])
def test_a_plain_state_dict_is_taken_without_an_optimizer(tmp_path: Path, wrapper: str) -> None:
    model, optimizer = _plain()
    content: Any = (
        {wrapper: model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 17}
        if wrapper
        else model.state_dict()
    )
    torch.save(content, tmp_path / "model.pt")
    imported = import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert (imported.step, imported.format, imported.optimizer) == (
        17 if wrapper else 0,
        "torch",
        None,
    )
    if wrapper:
        assert len(imported.notes) == 1 and "numbers its parameters" in imported.notes[0]
    check_same(_values(imported, tmp_path)["model"], dict(model.state_dict()))
    with pytest.raises(Exception, match="no optimizer state"):
        run_ranks(1, _resume, tmp_path / "run", "ddp")
    _, loaded, skipped = run_ranks(2, _resume, tmp_path / "run", "zero3", False)[0]
    check_same(loaded, dict(model.state_dict()))
    assert any("no optimizer state" in line for line in skipped)


def test_a_legacy_torch_file_is_read_too(tmp_path: Path) -> None:
    model, _ = _plain()
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check_same(
        _values(import_checkpoint(tmp_path / "old.pt", tmp_path / "run"), tmp_path)["model"],
        dict(model.state_dict()),
    )


def test_names_that_ddp_and_compile_lengthened_are_shortened(tmp_path: Path) -> None:
    model, optimizer = _plain()
    state = {
        f"module._orig_mod.{name}": value for name, value in get_model_state_dict(model).items()
    }
    named = get_optimizer_state_dict(model, optimizer)
    for group in named["param_groups"]:
        group["params"] = [f"module._orig_mod.{name}" for name in group["params"]]
    named["state"] = {f"module._orig_mod.{name}": value for name, value in named["state"].items()}
    torch.save({"model": state, "optimizer": named}, tmp_path / "model.pt")
    imported = import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert imported.optimizer == "AdamW" and [note.split("'")[1] for note in imported.notes] == [
        "module.",
        "_orig_mod.",
    ]
    losses, loaded, _ = run_ranks(2, _resume, tmp_path / "run", "zero3")[0]
    check_same(loaded, dict(model.state_dict()))
    assert losses == take_steps(0, (2, 3), model, optimizer)


def test_what_a_state_dict_does_not_say_is_guessed_and_can_be_said(tmp_path: Path) -> None:
    linear = nn.Linear(3, 3)
    state = {"norm." + name: value for name, value in nn.BatchNorm1d(3).state_dict().items()}
    state |= {
        "a.weight": linear.weight.detach(),
        "b.weight": linear.weight.detach(),
        "rotary.inv_freq": torch.ones(3),
        "extra": {"no": "tensor"},
    }
    state["turned"] = torch.arange(6.0).view(2, 3).t()
    torch.save(state, tmp_path / "model.pt")
    imported = import_checkpoint(tmp_path / "model.pt", tmp_path / "run", buffers=["*.inv_freq"])
    manifest = read_manifest(imported.path)
    assert list(manifest.parameters) == ["norm.weight", "norm.bias", "a.weight", "turned"]
    assert sorted(key for key in manifest.loose()) == [
        f"buffer/{name}@0"
        for name in (
            "norm.num_batches_tracked",
            "norm.running_mean",
            "norm.running_var",
            "rotary.inv_freq",
        )
    ]
    assert manifest.parameters["a.weight"].aliases == ("b.weight",) and all(
        entry.trained for entry in manifest.parameters.values()
    )
    assert manifest.parameters["turned"].shape == (3, 2) and manifest.parameters[
        "turned"
    ].stride == (2, 1)
    assert imported.notes == ["'extra' is not taken: it is a dict, not a tensor"]
    del state["extra"]
    check_same(_values(imported, tmp_path)["model"], state)


@pytest.mark.parametrize("files", [0, 1, 3])
def test_safetensors_are_read_from_one_file_or_many(tmp_path: Path, files: int) -> None:
    model, _ = _plain()
    state = dict(model.state_dict())
    source = tmp_path / "hf"
    source.mkdir()
    if files == 3:
        weight_map = {
            name: f"model-{index % 3 + 1:05d}-of-00003.safetensors"
            for index, name in enumerate(state)
        }
        for file in set(weight_map.values()):
            save_file(
                {name: value for name, value in state.items() if weight_map[name] == file},
                source / file,
            )
        (source / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    else:
        save_file(state, source / "model.safetensors")
    imported = import_checkpoint(
        source if files else source / "model.safetensors", tmp_path / "run", step=5
    )
    assert (imported.step, imported.format, imported.optimizer) == (5, "hf", None)
    check_same(_values(imported, tmp_path)["model"], state)


def _fsdp(rank: int, world: int, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps with FSDP2, save with DCP, train two more."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.fsdp import fully_shard

    model: Any = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = two_groups(model)
    take_steps(0, 2, model, optimizer)
    content = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "step": 2,
    }
    dcp.save(content, checkpoint_id=folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return take_steps(0, (2, 3), model, optimizer), state


def test_a_sharded_dcp_checkpoint_of_fsdp_continues_here(tmp_path: Path) -> None:
    losses, state = run_ranks(2, _fsdp, tmp_path / "dcp")[0]
    imported = import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    assert (imported.step, imported.format, imported.optimizer, imported.notes) == (
        2,
        "dcp",
        "AdamW",
        [],
    )
    again, loaded, _ = run_ranks(2, _resume, tmp_path / "run", "zero3")[0]
    check_same(loaded, dict(state))
    assert again == pytest.approx(losses, rel=1e-6)


def test_a_flat_dcp_checkpoint_is_a_state_dict(tmp_path: Path) -> None:
    model, _ = _plain()
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_same(
        _values(import_checkpoint(tmp_path / "dcp", tmp_path / "run"), tmp_path)["model"],
        dict(model.state_dict()),
    )


def _by_getattr(value: Any, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a pickle in which enums are members that ``builtins.getattr`` gives, as early
    Pythons 3.11 write them.
    """
    encoding = dcp.metadata._MEM_FORMAT_ENCODING  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(
            encoding, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_))
        )
        return pickle.dumps(value)


def test_a_dcp_checkpoint_whose_enums_are_pickled_by_getattr_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So early Pythons 3.11 write it, 3.11.2 of Debian 12 for one."""
    model, _ = _plain()
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    path.write_bytes(_by_getattr(pickle.loads(path.read_bytes()), monkeypatch))
    assert b"getattr" in path.read_bytes()
    check_same(
        _values(import_checkpoint(tmp_path / "dcp", tmp_path / "run"), tmp_path)["model"],
        dict(model.state_dict()),
    )


class Attribute:
    """An object whose pickle asks for an attribute of something."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


_ENCODING = dcp.metadata._MEM_FORMAT_ENCODING  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "of",
    [
        (_ENCODING, "__class__"),
        (_ENCODING, "mro"),
        (_ENCODING, 0),
        (_ENCODING, "TORCH_CHANNELS_LAST", 1),
        (torch.Size, "numel"),
        ("text", "format"),
        (),
    ],
    ids=[
        "a class of classes",
        "a method",
        "a number",
        "a default",
        "another class",
        "text",
        "nothing",
    ],
)
def test_getattr_in_dcp_metadata_gives_members_of_known_enums_only(
    tmp_path: Path, of: tuple[Any, ...]
) -> None:
    source = _dcp(tmp_path)
    _metadata(source, lambda metadata: setattr(metadata, "planner_data", Attribute(*of)))
    with pytest.raises(
        CheckpointError, match=r"\.metadata asks for .*refused, and nothing of it was run"
    ):
        import_checkpoint(source, tmp_path / "run")


# ------------------------------------------------------------------ DeepSpeed

TREES = [Tree(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3, 5)] + [
    Tree(3, 2, sub_groups=3),
    Tree(3, 2, enums_by_getattr=True),
    Tree(2, 2, padding=3),
    Tree(1, 3, native=True),
    Tree(3, 3, native=True, sub_groups=2),
    Tree(1, 40),  # more ranks than the small group has elements
]


@pytest.mark.parametrize(
    "tree",
    TREES,
    ids=lambda tree: (
        f"stage{tree.stage}-world{tree.world}-sub{tree.sub_groups}-pad{tree.padding}-{tree.native}"
        f"{'-getattr' * tree.enums_by_getattr}"
    ),
)
def test_deepspeeds_masters_and_moments_come_back_by_name(tmp_path: Path, tree: Tree) -> None:
    model = deepspeed_tree.make()
    expected = deepspeed_tree.write(tmp_path / "ds", tree, model)
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert (imported.step, imported.format, imported.optimizer, imported.notes) == (
        3,
        "deepspeed",
        "AdamW",
        [],
    )
    content = _values(imported, tmp_path)
    frozen = {
        "frozen.weight": model.frozen.weight.detach().bfloat16(),
        "scale": model.scale,
        "seen": torch.tensor(3),
    }
    check_same(
        content["model"],
        expected.masters | frozen | {"head.weight": expected.masters["embed.weight"]},
    )
    assert sorted(content["optimizer"]) == sorted(expected.moments)
    for name, moments in expected.moments.items():
        check_same(content["optimizer"][name], moments | {"step": torch.tensor(3.0)})
    assert [sorted(group["params"]) for group in content["param_groups"]] == [
        sorted(group) for group in expected.groups
    ]
    assert [group["weight_decay"] for group in content["param_groups"]] == [0.1, 0.0]
    assert all(
        group["betas"] == (0.8, 0.9) and "bias_correction" not in group
        for group in content["param_groups"]
    )
    trained = {
        name: entry.trained for name, entry in read_manifest(imported.path).parameters.items()
    }
    assert not trained.pop("frozen.weight") and all(trained.values())


def _make_universal(tag: Path, expected: Any, *, flat: bool) -> None:
    """Rewrite a tag as DeepSpeed's ds_to_universal does; `flat`: as of stage 3, with padding."""
    [first, *_] = sorted(tag.glob("*_optim_states.pt"))
    with deepspeed_tree.stand_ins():
        held = torch.load(first, weights_only=False)["optimizer_state_dict"]
    base = held["optimizer_state_dict"] if flat else held["base_optimizer_state"]
    for name, master in expected.masters.items():
        folder = tag / "zero" / name
        folder.mkdir(parents=True)
        tensors = {"fp32": master} | dict(expected.moments[name])
        for key, value in tensors.items():
            padded = torch.cat([value.reshape(-1), torch.zeros(3)])
            torch.save(padded if flat else {"param": value, "cat_dim": 0}, folder / f"{key}.pt")
        if not flat:
            torch.save(torch.tensor(3.0), folder / "step.pt")
    if not flat:  # and what has no state: buffers, the frozen weight, the head that is tied
        for name in deepspeed_tree.make().state_dict().keys() - expected.masters.keys():
            (tag / "zero" / name).mkdir()
            torch.save({"param": torch.tensor(0.0)}, tag / "zero" / name / "fp32.pt")
    torch.save({"param_groups": base["param_groups"]}, tag / "zero" / "optimizer_state.pt")
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()


@pytest.mark.parametrize("tree", [Tree(1, 1), Tree(2, 2), Tree(3, 2)], ids=["1", "2", "3"])
def test_a_universal_checkpoint_of_deepspeed_comes_back_by_name(tmp_path: Path, tree: Tree) -> None:
    expected = deepspeed_tree.write(tmp_path / "ds", tree, deepspeed_tree.make())
    [tag] = (tmp_path / "ds").glob("global_step*")
    usual = _values(import_checkpoint(tmp_path / "ds", tmp_path / "usual"), tmp_path)
    _make_universal(tag, expected, flat=tree.stage == 3)
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert (imported.step, imported.optimizer) == (3, "AdamW")
    content = _values(imported, tmp_path)
    check_same(content["model"], usual["model"])
    assert content["optimizer"].keys() == usual["optimizer"].keys()
    for name, moments in usual["optimizer"].items():
        check_same(content["optimizer"][name], moments)
    assert content["param_groups"] == usual["param_groups"]
    (tag / "zero" / "stranger").mkdir()
    with pytest.raises(zs.CheckpointError, match="has 'stranger', and the model's file has not"):
        import_checkpoint(tmp_path / "ds", tmp_path / "more")
    (tag / "zero" / "stranger").rmdir()
    lacking = tag / "zero" / next(iter(expected.masters)) / "fp32.pt"
    lacking.unlink()
    with pytest.raises(zs.CheckpointError, match=r"lacks fp32\.pt"):
        import_checkpoint(tmp_path / "ds", tmp_path / "less")


def _universal(folder: Path) -> Path:
    """Write a universal checkpoint; return its tag."""
    expected = deepspeed_tree.write(folder, Tree(2, 2), deepspeed_tree.make())
    [tag] = folder.glob("global_step*")
    _make_universal(tag, expected, flat=False)
    return tag


def _flip(path: Path) -> None:
    """Flip a bit of the numbers of a torch file."""
    with zipfile.ZipFile(path) as archive:
        [record] = [one for one in archive.infolist() if one.filename.endswith("data/0")]
    data, header = bytearray(path.read_bytes()), record.header_offset
    name, more = int.from_bytes(data[header + 26 : header + 28], "little"), header + 28
    start = header + 30 + name + int.from_bytes(data[more : more + 2], "little")
    data[start + 3] ^= 0x40
    path.write_bytes(data)


def _rename(tag: Path, name: str, new: str) -> None:
    """Give a parameter another name in the model's files."""
    for path in tag.glob("*_model_states.pt"):
        with deepspeed_tree.stand_ins():
            content = torch.load(path, weights_only=False)
            content["param_shapes"] = [
                {new if key == name else key: shape for key, shape in group.items()}
                for group in content["param_shapes"]
            ]
            torch.save(content, path)
    shutil.rmtree(tag / "zero" / name)


def _link(path: Path, target: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


_FIRST = "first.weight"
_DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a moment": (
        lambda tag, secret: (tag / "zero" / _FIRST / "exp_avg.pt").unlink(),
        r"first\.weight lacks exp_avg\.pt",
    ),
    "all moments": (
        lambda tag, secret: [
            (tag / "zero" / _FIRST / f"{key}.pt").unlink() for key in ("exp_avg", "exp_avg_sq")
        ],
        r"first\.weight lacks exp_avg\.pt",
    ),
    "a number for a moment": (
        lambda tag, secret: torch.save({"param": 0.5}, tag / "zero" / _FIRST / "exp_avg.pt"),
        r"lacks exp_avg\.pt, or a tensor in it",
    ),
    "a number for a master": (
        lambda tag, secret: torch.save({"param": -1}, tag / "zero" / _FIRST / "fp32.pt"),
        r"lacks fp32\.pt, or a tensor in it",
    ),
    "a bit": (
        lambda tag, secret: _flip(tag / "zero" / _FIRST / "fp32.pt"),
        "it is damaged: the checksum of 'fp32/data/0' does not fit",
    ),
    "a path in a name": (
        lambda tag, secret: _rename(tag, _FIRST, "../../../secret"),
        r"has no folder for parameter '\.\./\.\./\.\./secret'",
    ),
    "a whole path": (lambda tag, secret: _rename(tag, _FIRST, str(secret)), "has no folder for"),
    "a link of a folder": (
        lambda tag, secret: _link(tag / "zero" / _FIRST, secret),
        "has no folder for parameter 'first.weight'",
    ),
    "a link of a file": (
        lambda tag, secret: _link(tag / "zero" / _FIRST / "fp32.pt", secret / "fp32.pt"),
        r"fp32\.pt cannot be read: it is a symbolic link",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_universal_checkpoint_with_a_hole_or_a_way_out_is_refused(
    tmp_path: Path, damage: str
) -> None:
    change, message = _DAMAGE[damage]
    tag = _universal(tmp_path / "ds")
    (tmp_path / "secret").mkdir()
    torch.save({"param": torch.full((35,), 42.0)}, tmp_path / "secret" / "fp32.pt")
    change(tag, tmp_path / "secret")
    with pytest.raises(zs.CheckpointError, match=message):
        import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_universal_checkpoint_without_options_says_so(tmp_path: Path) -> None:
    (_universal(tmp_path / "ds") / "zero" / "optimizer_state.pt").unlink()
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert any("options of the param groups (lr, ...) are not taken" in n for n in imported.notes)


@pytest.mark.parametrize("sums", [True, False])
def test_a_flipped_bit_of_a_torch_file_is_found_by_its_checksum_if_it_has_one(
    tmp_path: Path, sums: bool
) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save({"weight": torch.arange(1.0, 9.0), "none": torch.empty(0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    import_checkpoint(tmp_path / "a.pt", tmp_path / "whole")
    _flip(tmp_path / "a.pt")
    if sums:
        with pytest.raises(zs.CheckpointError, match=r"the checksum of 'a/data/0' does not fit"):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    else:
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run")


def test_a_flipped_bit_of_a_block_of_dcp_is_found(tmp_path: Path) -> None:
    state = {"weight": torch.arange(1.0, 9.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    [path] = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(state["weight"].numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(zs.CheckpointError, match=r"checksum of .* does not fit"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")


def test_a_tensor_that_claims_more_than_the_disk_has_is_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    torch.save({"weight": torch.zeros(1).expand(1 << 50)}, tmp_path / "a.pt")
    with pytest.raises(zs.CheckpointError, match="no space for step 0"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "some" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_deepspeeds_elastic_state_is_read_though_its_param_groups_are_not_there(
    tmp_path: Path,
) -> None:
    expected = deepspeed_tree.write(
        tmp_path / "ds", Tree(2, 3, elastic=True), deepspeed_tree.make()
    )
    content = _values(import_checkpoint(tmp_path / "ds", tmp_path / "run"), tmp_path)
    for name, moments in expected.moments.items():
        check_same(content["optimizer"][name], moments | {"step": torch.tensor(3.0)})


def _continue_tied(rank: int, world: int, folder: Path, row: str) -> list[str]:
    """Load into the model that DeepSpeed had, and step; return what was skipped."""
    torch.manual_seed(99)
    model = deepspeed_tree.Tied()
    optimizer = torch.optim.AdamW(deepspeed_tree.param_groups(model), lr=1.0)
    engine = zs.shard(model, optimizer, policy=row, precision="bf16")
    restored = zs.load(folder, engine)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    engine.backward(model(deepspeed_tree.tokens(3, rank)))
    optimizer.step()
    engine.close()
    return restored.skipped


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_a_run_of_deepspeed_continues_here(tmp_path: Path, row: str) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(3, 2), deepspeed_tree.make())
    import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert run_ranks(2, _continue_tied, tmp_path / "run", row)[0] == []


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        ({"type": "AdamW"}, {}, "AdamW"),
        ({"type": "Adam"}, {}, "AdamW"),  # as DeepSpeed means it
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {}, "Adam"),
        (None, {"decoupled_weight_decay": False}, "Adam"),
        (None, {}, "AdamW"),
    ],
)
def test_the_optimizers_class_is_the_one_that_deepspeed_ran(
    tmp_path: Path, config: Any, options: dict[str, Any], name: str
) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(2, 2, native=True), deepspeed_tree.make())

    def change(content: Any) -> None:
        content["ds_config"]["optimizer"] = config
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(options)

    _edit(
        tmp_path / "ds" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", change
    )
    assert import_checkpoint(tmp_path / "ds", tmp_path / "run").optimizer == name
    assert (
        import_checkpoint(tmp_path / "ds", tmp_path / "run", step=9, optimizer="Mine").optimizer
        == "Mine"
    )


def test_an_optimizer_that_is_not_known_keeps_its_state_and_is_said(tmp_path: Path) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(2, 1), deepspeed_tree.make())

    def change(content: Any) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["trace"] = state.pop("exp_avg")
            del state["exp_avg_sq"]

    _edit(
        tmp_path / "ds" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", change
    )
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert imported.optimizer == "unknown" and imported.notes == [
        "the optimizer's class is not known from its state (step, trace): --optimizer says it"
    ]
    assert ("first.weight", "state.trace") in read_manifest(imported.path).pieces()


def test_without_zeros_files_the_models_own_weights_are_taken_where_they_are_whole(
    tmp_path: Path,
) -> None:
    model = deepspeed_tree.make()
    for stage in (1, 3):
        source = tmp_path / str(stage)
        deepspeed_tree.write(source, Tree(stage, 2), model)
        for path in source.glob("global_step3/*_optim_states.pt"):
            path.unlink()
    imported = import_checkpoint(tmp_path / "1", tmp_path / "run")
    assert imported.optimizer is None and "no optimizer's state" in imported.notes[0]
    assert torch.equal(
        _values(imported, tmp_path)["model"]["first.weight"], model.first.weight.bfloat16()
    )
    with pytest.raises(
        CheckpointError,
        match=r"lacks the files \*_optim_states.pt, in which parameter 'embed.weight' lies",
    ):
        import_checkpoint(tmp_path / "3", tmp_path / "run")


def test_a_parameter_that_deepspeeds_optimizer_did_not_have_is_said_to_be_lost(
    tmp_path: Path,
) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(3, 2), deepspeed_tree.make())
    path = tmp_path / "ds" / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    _edit(path, lambda content: content["module"].update({"lost.weight": torch.empty(0)}))
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert "lost.weight" not in read_manifest(imported.path).parameters and imported.notes[
        0
    ].startswith("'lost.weight' is not taken")


def _edit(path: Path, change: Any) -> None:
    """Change what a file of a hand-made tree holds."""
    with deepspeed_tree.stand_ins():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def _damage_cases() -> dict[str, tuple[int, str, Any]]:
    """By name: stage, complaint, and what is done to the directory of the tag."""
    optim = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def shorten(content: Any) -> None:
        held = content["optimizer_state_dict"]
        held["single_partition_of_fp32_groups"][0] = held["single_partition_of_fp32_groups"][0][:-9]

    return {
        "a rank's file is missing": (
            2,
            "2 ranks, and 3 wrote it",
            lambda tag: (tag / optim.replace("rank_1", "rank_2")).unlink(),
        ),
        "a rank in between is missing": (
            2,
            "lacks the files of rank 1",
            lambda tag: (tag / optim).unlink(),
        ),
        "no model states": (
            2,
            "no DeepSpeed checkpoint|lacks a file of model",
            lambda tag: (tag / "mp_rank_00_model_states.pt").unlink(),
        ),
        "cut short": (
            2,
            "refused",
            lambda tag: (tag / optim).write_bytes((tag / optim).read_bytes()[:900]),
        ),
        "elements are missing": (
            1,
            "lacks elements of value",
            lambda tag: _edit(tag / optim, shorten),
        ),
        "a shape is larger": (
            3,
            "its share of the parameters is",
            lambda tag: _edit(
                tag / "zero_pp_rank_0_mp_rank_00_model_states.pt",
                lambda content: content["param_shapes"][0].update({"first.weight": (5, 70)}),
            ),
        ),
        "a key is missing": (
            1,
            "not as DeepSpeed writes it",
            lambda tag: _edit(tag / optim, lambda content: content.clear()),
        ),
        "tensor parallel": (
            1,
            "tensor parallel rank 1",
            lambda tag: (tag / "mp_rank_01_model_states.pt").write_bytes(b""),
        ),
        "pipeline": (
            1,
            "pipeline or a mixture of experts",
            lambda tag: (tag / "layer_00-model_00-model_states.pt").write_bytes(b""),
        ),
        "universal": (1, "holds no parameter", lambda tag: (tag / "zero").mkdir()),
    }


@pytest.mark.parametrize("case", _damage_cases())
def test_what_is_no_whole_deepspeed_checkpoint_is_refused_and_nothing_is_written(
    tmp_path: Path, case: str
) -> None:
    stage, complaint, damage = _damage_cases()[case]
    deepspeed_tree.write(tmp_path / "ds", Tree(stage, 3), deepspeed_tree.make())
    damage(tmp_path / "ds" / "global_step3")
    with pytest.raises((CheckpointError, ConfigError), match=complaint):
        import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("torch", "weights.pt"),
        ("dcp", ".metadata"),
        ("deepspeed", "global_step1/mp_rank_00_model_states.pt"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, format: str, name: str
) -> None:
    (tmp_path / "in" / name).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / "in" / name)
    source = tmp_path / "in" / (name if format == "torch" else "")
    with pytest.raises(CheckpointError, match="it is not a file"):
        import_checkpoint(source, tmp_path / "out", format=format)


def test_bytes_that_are_no_text_in_latest_name_no_tag(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff" * 1000)
    with pytest.raises(CheckpointError, match="its file 'latest' names"):
        import_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("latest", [None, "", "global_step9", "../elsewhere", "/etc"])
def test_the_newest_tag_is_taken_where_latest_names_none(
    tmp_path: Path, latest: str | None
) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(1, 2, steps=3), deepspeed_tree.make())
    deepspeed_tree.write(tmp_path / "ds", Tree(1, 2, steps=12), deepspeed_tree.make())
    (tmp_path / "elsewhere").mkdir()
    (
        (tmp_path / "ds" / "latest").unlink()
        if latest is None
        else (tmp_path / "ds" / "latest").write_text(latest)
    )
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert imported.step == 12 and "global_step12 is taken" in imported.notes[0]
    assert import_checkpoint(tmp_path / "ds" / "global_step3", tmp_path / "run").step == 3
    assert sorted(list_steps(tmp_path / "run")) == [3, 12]


def _by_deepspeed(python: str, *line: str) -> None:
    """Run ``python -m ...`` where DeepSpeed is."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
    }
    subprocess.run([python, "-m", *line], check=True, timeout=800, env=environment)


def _trained_by_deepspeed(
    python: str, folder: Path, stage: int, world: int, precision: str, optimizer: str, *flags: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Have DeepSpeed train and save into `folder`; return its masters and moments, by name."""
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    _by_deepspeed(
        python, *ranks, deepspeed_tree.__file__, str(stage), str(folder), precision, optimizer,
        *flags,
    )  # fmt: skip
    expected: dict[str, dict[str, torch.Tensor]] = torch.load(
        folder / "expected.pt", weights_only=True
    )
    return expected


def _check_bits(content: dict[str, Any], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """An import has DeepSpeed's masters and moments after three steps."""
    assert sorted(content["optimizer"]) == sorted(expected)
    for name, values in expected.items():
        assert torch.equal(content["model"][name], values["value"]), name
        moments = {key: values[key] for key in ("exp_avg", "exp_avg_sq")}
        check_same(content["optimizer"][name], moments | {"step": torch.tensor(3.0)})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "world", "precision", "optimizer", "flags"),
    [
        (1, 2, "bf16", "torch", []),
        (1, 2, "bf16", "native", []),
        (2, 2, "fp32", "torch", []),
        (2, 3, "bf16", "torch", ["round_robin_gradients"]),
        (3, 2, "bf16", "torch", []),
        (3, 3, "fp32", "torch", ["sub_group_size=40"]),
        (3, 2, "bf16", "native", []),
    ],
)
def test_what_deepspeed_itself_wrote_comes_back_to_its_bits(
    tmp_path: Path,
    deepspeed_python: str,
    stage: int,
    world: int,
    precision: str,
    optimizer: str,
    flags: list[str],
) -> None:
    expected = _trained_by_deepspeed(
        deepspeed_python, tmp_path / "ds", stage, world, precision, optimizer, *flags
    )
    imported = import_checkpoint(tmp_path / "ds", tmp_path / "run")
    assert (imported.step, imported.optimizer, imported.notes) == (3, "AdamW", [])
    _check_bits(_values(imported, tmp_path), expected)
    if optimizer == "torch":
        assert run_ranks(2, _continue_tied, tmp_path / "run", "zero3")[0] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    [(1, 2, "bf16"), (2, 3, "fp32"), (3, 2, "bf16"), (3, 3, "bf16")],
)
def test_what_deepspeeds_converter_made_universal_comes_back_to_its_bits(
    tmp_path: Path, deepspeed_python: str, stage: int, world: int, precision: str
) -> None:
    source = tmp_path / "ds" / "global_step3"
    expected = _trained_by_deepspeed(
        deepspeed_python, tmp_path / "ds", stage, world, precision, "torch"
    )
    usual = _values(import_checkpoint(source, tmp_path / "usual"), tmp_path)
    out = str(tmp_path / "universal")
    line = ["--input_folder", str(source), "--output_folder", out, "--inject_missing_state"]
    _by_deepspeed(deepspeed_python, "deepspeed.checkpoint.ds_to_universal", *line)
    imported = import_checkpoint(Path(out), tmp_path / "run")
    assert (imported.step, imported.optimizer, imported.notes) == (3, "AdamW", [])
    content = _values(imported, tmp_path)
    _check_bits(content, expected)
    check_same(content["model"], usual["model"])  # buffers and the frozen weight, too
    assert content["param_groups"] == usual["param_groups"]
    assert run_ranks(2, _continue_tied, tmp_path / "run", "zero3")[0] == []


# ------------------------------------------------------------- what is already there, or is nothing


def test_a_step_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    first = import_checkpoint(tmp_path / "model.pt", tmp_path / "run", step=4)
    before = (first.path / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match="already holds step 4"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run", step=4)
    assert (first.path / "manifest.json").read_bytes() == before


def test_an_import_that_fails_halfway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise CheckpointError("no space")

    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    monkeypatch.setattr("zeroshard.formats.conversion.write_new", full)
    with pytest.raises(CheckpointError, match="no space"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    torch.save({"args": {"lr": 1.0}}, tmp_path / "args.pt")
    torch.save({"weight": torch.ones(3).to_sparse()}, tmp_path / "sparse.pt")
    torch.save(
        {"weight": torch.ones(3, device="meta"), "other": torch.ones(3, device="meta")},
        tmp_path / "meta.pt",
    )
    cases = {
        "empty": (ConfigError, "no checkpoint that is known"),
        "text.pt": (CheckpointError, r"text\.pt is refused"),
        "list.pt": (CheckpointError, "holds a list"),
        "args.pt": (CheckpointError, "it has 'args'"),
        "sparse.pt": (CheckpointError, "is a torch.sparse_coo tensor"),
        "meta.pt": (CheckpointError, "is a meta tensor"),
        "nowhere": (FileNotFoundError, "nowhere"),
    }
    for name, (kind, complaint) in cases.items():
        with pytest.raises(kind, match=complaint):
            import_checkpoint(tmp_path / name, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ what would run


def test_a_torch_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save({"model": {"weight": torch.ones(3)}, "args": Hostile(trap)}, tmp_path / "model.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Hostile(trap)))
    for name in ("model.pt", "raw.pt"):
        with pytest.raises(
            CheckpointError, match=r"refused, and nothing of it was run: .+"
        ) as caught:
            import_checkpoint(tmp_path / name, tmp_path / "run")
        assert "\n" not in str(caught.value)
    assert not trap.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_file_that_would_run_something_is_refused(tmp_path: Path, stage: int) -> None:
    trap = tmp_path / "trap"
    deepspeed_tree.write(tmp_path / "ds", Tree(stage, 2), deepspeed_tree.make())
    for path in sorted((tmp_path / "ds" / "global_step3").iterdir()):
        kept = path.read_bytes()
        _edit(path, lambda content: content.update(client=Hostile(trap)))
        with pytest.raises(
            CheckpointError, match=rf"{path.name} is refused.*asks for posix\.system"
        ):
            import_checkpoint(tmp_path / "ds", tmp_path / "run")
        path.write_bytes(kept)
    assert not trap.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "of",
    [("__class__",), ("__init__",), ("weights", 1), (0,)],
    ids=["class", "method", "default", "number"],
)
def test_getattr_in_a_deepspeed_file_gives_members_of_known_enums_only(
    tmp_path: Path, of: tuple[Any, ...]
) -> None:
    deepspeed_tree.write(tmp_path / "ds", Tree(2, 2), deepspeed_tree.make())
    path = tmp_path / "ds" / "global_step3" / "mp_rank_00_model_states.pt"
    with deepspeed_tree.stand_ins() as classes:
        content = torch.load(path, weights_only=False)
        torch.save(content | {"client": Attribute(classes["ZeroStageEnum"], *of)}, path)
    with pytest.raises(
        CheckpointError,
        match=(
            r"model_states\.pt is refused, and nothing of it was run: it asks for"
            r" (attribute|getattr with 3)"
        ),
    ):
        import_checkpoint(tmp_path / "ds", tmp_path / "run")


def _dcp(tmp_path: Path, content: dict[str, Any] | None = None) -> Path:
    dcp.save(
        content or {"model": {"weight": torch.arange(12.0).view(4, 3)}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    return tmp_path / "dcp"


def _metadata(directory: Path, change: Any) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_dcp_checkpoint_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    source = _dcp(tmp_path)
    kept = (source / ".metadata").read_bytes()
    for where in ("planner_data", "storage_meta", "version"):
        _metadata(source, lambda metadata, where=where: setattr(metadata, where, Hostile(trap)))
        with pytest.raises(
            CheckpointError, match=r"\.metadata asks for posix\.system.*nothing of it was run"
        ):
            import_checkpoint(source, tmp_path / "run")
        (source / ".metadata").write_bytes(kept)
    (source / ".metadata").write_bytes(pickle.dumps(Hostile(trap)))
    with pytest.raises(CheckpointError, match="posix"):
        import_checkpoint(source, tmp_path / "run")
    shutil.rmtree(source)
    _dcp(tmp_path, {"model": {"weight": torch.ones(3), "extra": Hostile(trap)}})
    with pytest.raises(CheckpointError, match="is refused, and nothing of it was run"):
        import_checkpoint(source, tmp_path / "run")
    assert not trap.exists() and not (tmp_path / "run").exists()


def _dcp_cases() -> dict[str, tuple[str, Any]]:
    def place(**fields: Any) -> Any:
        return lambda metadata: [
            item.__dict__.update(fields) for item in metadata.storage_data.values()
        ]

    def size(*sizes: int) -> Any:
        return lambda metadata: setattr(
            metadata.state_dict_metadata["model.weight"], "size", torch.Size(sizes)
        )

    def chunks(*blocks: tuple[tuple[int, int], tuple[int, int]]) -> Any:
        made = [
            dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in blocks
        ]
        return lambda metadata: setattr(
            metadata.state_dict_metadata["model.weight"], "chunks", made
        )

    return {
        "a file outside": ("outside the directory: '../secret'", place(relative_path="../secret")),
        "an absolute file": (
            "outside the directory: '/etc/passwd'",
            place(relative_path="/etc/passwd"),
        ),
        "a file that is not there": (
            "is missing or was cut short",
            place(relative_path="__9_0.distcp"),
        ),
        "behind the end": ("is missing or was cut short", place(offset=1 << 40)),
        "negative": ("makes no sense", place(offset=-1)),
        "compressed": ("is stored through", place(transform_descriptors=["zstd"])),
        "a huge shape": ("do not fill a tensor", size(1 << 40, 3)),
        "a negative shape": ("makes no sense", size(-4, -3)),
        "a huge block": (
            "larger than its place in the file",
            lambda metadata: (size(1 << 40, 3)(metadata), chunks(((0, 0), (1 << 40, 3)))(metadata)),
        ),
        "overlapping blocks": ("do not fill a tensor", chunks(((0, 0), (2, 3)), ((1, 0), (2, 3)))),
        "crossing blocks": ("do not fill a tensor", chunks(((0, 0), (4, 2)), ((2, 1), (2, 2)))),
        "a block of another shape": (
            "is not what .metadata says",
            lambda metadata: (size(2, 3)(metadata), chunks(((0, 0), (2, 3)))(metadata)),
        ),
        "no places": ("does not say where", lambda metadata: metadata.storage_data.clear()),
        "another object": (
            "makes no sense",
            lambda metadata: setattr(
                metadata, "state_dict_metadata", {"model.weight": metadata.storage_meta}
            ),
        ),
    }


@pytest.mark.parametrize("case", _dcp_cases())
def test_dcp_metadata_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    complaint, change = _dcp_cases()[case]
    source = _dcp(tmp_path)
    (tmp_path / "secret").write_bytes(min(source.glob("*.distcp")).read_bytes())
    _metadata(source, change)
    with pytest.raises(CheckpointError, match=complaint):
        import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dcp_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    source = _dcp(tmp_path)
    file = min(source.glob("*.distcp"))
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the directory"):
        import_checkpoint(source, tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/secret.safetensors", "sub/secret.safetensors", ".."]
)
def test_an_index_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": name}})
    )
    with pytest.raises(CheckpointError, match=r"outside its directory|cannot be read"):
        import_checkpoint(tmp_path / "hf", tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {"weight": 5}}',
        '{"weight_map": {"weight": null, "b": "c"}}',
        "[" * 9000,
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        import_checkpoint(tmp_path, tmp_path / "run")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_but_never_run(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        read_restricted(data, frozenset(), "noise")


@given(st.data())
def test_a_pickle_with_changed_bytes_is_a_value_or_an_error(data: st.DataObject) -> None:
    buffer = io.BytesIO()
    pickle.dump(
        {"a": [1, 2.5, None, True, ("x", b"y")], "b": {3, 4}, "c": {"d": (1, 2, 3, 4)}}, buffer
    )
    text = bytearray(buffer.getvalue())
    for position in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=4)):
        text[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        read_restricted(bytes(text), frozenset(), "noise")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner)
            | st.tuples(inner, inner, inner, inner)
            | st.dictionaries(st.text(), inner)
        ),
        max_leaves=20,
    ),
    st.integers(3, 5),  # before that bytes were the call of a function
)
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read_restricted(pickle.dumps(value, protocol=protocol), frozenset(), "plain") == value
