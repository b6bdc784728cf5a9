"""``zeroshard checkpoint``: what it prints, what it finds, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import batch, make_model, two_groups
from zeroshard.checkpoint.manifest import TensorEntry
from zeroshard.checkpoint.shard_files import ShardReader
from zeroshard.checkpoint.steps import list_steps, read_manifest
from zeroshard.commands import checkpoint_command
from zeroshard.errors import CheckpointError
from zeroshard.formats import READERS
from zeroshard.formats.export import FORMATS
from zeroshard.launch import cli

ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
}  # which measures subprocesses, at a cost


def _save(rank: int, world: int, folder: Path) -> None:
    model = make_model()
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine = zs.shard(model, optimizer, policy="zero3", precision="bf16")
    for step in (1, 2, 30):
        engine.backward(model(*batch(rank, step)))
        optimizer.step()
        optimizer.zero_grad()
        zs.save(folder, engine, step=step, states={"schedule": schedule})
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with steps 1, 2 and 30 of two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(2, _save, folder)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


class Answer:
    """What the program did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        capsys.readouterr()
        try:
            self.code = cli.main(["checkpoint", *map(str, argv)])
        except SystemExit as end:  # usage
            assert isinstance(end.code, int)
            self.code = end.code
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


# ------------------------------------------------------------------ show


def test_show_says_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(capsys, "show", saved)
    assert (answer.code, answer.err) == (0, "")
    model = make_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    for text in (
        "1, 2, 30",
        "2 rank(s), zero3",
        "compute=bf16",
        f"{numel:,} elements",
        "AdamW, 2 param group(s)",
        "state.exp_avg_sq",
        "schedule (alike",
    ):
        assert text in answer.out, text
    assert "rank-00001-of-00002.safetensors" in answer.out


def test_names_in_a_manifest_are_shown_as_they_are_written_and_move_no_cursor(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "[/red] \x1b[31m\u202e"
    step = list_steps(run)[30]
    manifest = read_manifest(step)
    tensors = tuple(
        replace(one, kind=one.kind.replace("exp_avg_sq", name)) for one in manifest.tensors
    )
    hostile = replace(manifest, written_by=name, policy=name, tensors=tensors)
    (step / "manifest.json").write_bytes(hostile.dump())
    out = Answer(capsys, "show", run).out
    assert out.count("[/red] \\x1b[31m\\u202e") == 3 and "\x1b" not in out and "\u202e" not in out


def test_show_as_json_has_the_sizes_of_everything(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Answer(capsys, "show", saved, "--json").json
    assert (shown["step"], shown["steps"], shown["world"], shown["policy"]) == (
        30,
        [1, 2, 30],
        2,
        "zero3",
    )
    model = make_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert shown["parameters"] == {
        "count": len(list(model.parameters())),
        "trained": len(list(model.parameters())),
        "tied": 0,
        "elements": numel,
    }
    kinds = {(row["kind"], row["dtype"]): row["bytes"] for row in shown["tensors"]}
    assert (
        kinds["value", "F32"]
        == kinds["state.exp_avg", "F32"]
        == kinds["state.exp_avg_sq", "F32"]
        == 4 * numel
    )
    assert shown["bytes"] == sum(
        path.stat().st_size for path in (saved / "step-0000000030").glob("*.safetensors")
    )
    assert [group["options"]["weight_decay"] for group in shown["optimizer"]["groups"]] == [
        0.1,
        0.0,
    ]
    assert shown["optimizer"]["groups"][0]["options"]["betas"] == [0.9, 0.999]
    assert shown["optimizer"]["class"] == "AdamW" and "schedule" in shown["states"]


def test_one_step_can_be_named_by_its_number_or_by_its_directory(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (
        Answer(capsys, "show", saved, "--step", 2, "--json").json,
        Answer(capsys, "show", saved / "step-0000000002", "--json").json,
    )
    assert one.pop("steps") == [1, 2, 30] and other.pop("steps") == []
    assert one == other and one["step"] == 2


def test_show_and_help_do_not_import_torch(saved: Path) -> None:
    for argv in (["checkpoint", "show", str(saved), "--json"], ["checkpoint", "export", "--help"]):
        code = (
            f"import sys; from zeroshard.launch.cli import main\ntry: main({argv!r})\nexcept"
            " SystemExit: pass\nassert 'torch' not in sys.modules"
        )
        answer = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        assert ("example:" if "--help" in argv else '"step"') in answer.stdout


# ------------------------------------------------------------------ verify


def test_a_whole_checkpoint_is_verified(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(capsys, "verify", saved)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("\n") == 1 and "step-0000000030: every byte is right" in answer.out
    everything = Answer(capsys, "verify", saved, "--all", "--json").json["checkpoints"]
    assert [Path(result["path"]).name for result in everything] == [
        f"step-{step:010d}" for step in (1, 2, 30)
    ]
    assert all(result["damage"] == [] and result["bytes"] > 0 for result in everything)


def _entries(step: Path) -> dict[str, tuple[Path, int, TensorEntry]]:
    """Return, for a tensor of each sort, its file, the place of its first byte there, and
    itself.
    """
    manifest = read_manifest(step)
    found = {}
    for sort in ("value", "state.exp_avg", "rng"):
        entry = next(
            entry for entry in manifest.tensors if entry.kind.startswith(sort) and entry.num_bytes
        )
        file = manifest.files[entry.file]
        found[sort] = step / file.name, file.header_bytes + entry.offset, entry
    return found


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_all_damage_is_listed_by_file_parameter_and_elements(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = list_steps(run)[30]
    entries = _entries(step)
    for path, position, entry in entries.values():
        _flip(path, position + entry.num_bytes - 1)
    _flip(step / "rank-00001-of-00002.safetensors", 20)  # in the header
    (step / "notes.txt").write_text("mine")
    answer = Answer(capsys, "verify", run)
    assert answer.code == 73
    assert (
        answer.err.count("\n") == 1
        and "damaged in 5 place(s)" in answer.err
        and str(step) in answer.err
    )
    lines = answer.out.splitlines()
    assert len(lines) == 5
    for sort in ("value", "state.exp_avg"):
        path, _, entry = entries[sort]
        assert any(
            path.name in line
            and f"{sort} of parameter {entry.parameter!r}, elements {entry.start} to {entry.stop}"
            in line
            for line in lines
        )
    assert any("rank-00001-of-00002.safetensors is damaged in its header" in line for line in lines)
    assert any("tensor rng" in line for line in lines) and any(
        "notes.txt does not belong" in line for line in lines
    )
    found = Answer(capsys, "verify", run, "--json")
    assert found.code == 73
    damage = found.json["checkpoints"][0]["damage"]
    assert {(one["file"], one["parameter"], one["kind"]) for one in damage} >= {
        (entries[sort][0].name, entries[sort][2].parameter, entries[sort][2].kind)
        for sort in entries
    }


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 0.5, -1])
def test_a_file_that_was_cut_short_names_every_tensor_that_lost_bytes(
    run: Path, capsys: pytest.CaptureFixture[str], keep: float
) -> None:
    step = list_steps(run)[30]
    path = step / "rank-00000-of-00002.safetensors"
    data = path.read_bytes()
    size = int(len(data) * keep) if isinstance(keep, float) else keep % len(data)
    path.write_bytes(data[:size])
    manifest = read_manifest(step)
    cut = [
        e
        for e in manifest.tensors
        if e.file == 0
        and e.num_bytes
        and manifest.files[0].header_bytes + e.offset + e.num_bytes > size
    ]
    damage = Answer(capsys, "verify", run, "--json").json["checkpoints"][0]["damage"]
    assert f"{size} bytes and should have {len(data)}" in damage[0]["what"]
    assert {(one["parameter"], one["kind"]) for one in damage[1:]} >= {
        (entry.parameter, entry.kind) for entry in cut
    }
    assert all("ends before the end" in one["what"] for one in damage[1:])


def _link_away(step: Path) -> None:
    path = step / "rank-00001-of-00002.safetensors"
    path.rename(step.parent / "elsewhere")
    path.symlink_to(step.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda step: (step / "rank-00001-of-00002.safetensors").unlink(),
            "rank-00001-of-00002.safetensors cannot be read: No such file",
        ),
        (
            lambda step: (step / "manifest.json").unlink(),
            "manifest.json cannot be read: No such file",
        ),
        (lambda step: (step / "manifest.json").write_text("{}"), "manifest.json is damaged"),
        (lambda step: _flip(step / "manifest.json", 300), "manifest.json is damaged"),
        (_link_away, "rank-00001-of-00002.safetensors cannot be read: it is a symbolic link"),
        (
            lambda step: os.rename(step, step.with_name("step-0000000031")),
            "belongs to step 30, and its directory says 31",
        ),
    ],
    ids=[
        "missing file",
        "missing manifest",
        "empty manifest",
        "flipped manifest",
        "link",
        "another number",
    ],
)
def test_what_is_not_as_it_was_written_is_found(
    run: Path, capsys: pytest.CaptureFixture[str], change: Any, complaint: str
) -> None:
    change(list_steps(run)[30])
    answer = Answer(capsys, "verify", run)
    assert answer.code == 73 and complaint in answer.out and answer.err.count("\n") == 1
    assert Answer(capsys, "verify", run, "--step", 2).code == 0
    everything = Answer(capsys, "verify", run, "--all", "--json")
    assert everything.code == 73 and [
        len(result["damage"]) for result in everything.json["checkpoints"]
    ] == [0, 0, 1]


def test_swapped_files_are_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = sorted(list_steps(run)[30].glob("*.safetensors"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert Answer(capsys, "verify", run).code == 73


@pytest.mark.parametrize("seed", range(20))
def test_one_flipped_bit_anywhere_is_found(
    run: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    files = sorted(list_steps(run)[30].iterdir())
    path = files[seed % len(files)]
    _flip(path, int(torch.randint(path.stat().st_size, (1,), generator=generator)))
    answer = Answer(capsys, "verify", run)
    assert answer.code == 73 and path.name in answer.out


def test_what_the_disk_does_not_give_is_an_error_of_the_disks(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ShardReader, entry: TensorEntry) -> list[str]:
        raise CheckpointError(
            f"{self.path} cannot be read at byte 5: Input/output error"
        ) from OSError(5, "Input/output error")

    monkeypatch.setattr(ShardReader, "check", refuse)
    answer = Answer(capsys, "verify", run)
    assert (
        answer.code == 74
        and "could not be read" in answer.err
        and "Input/output error" in answer.out
    )
    (list_steps(run)[30] / "notes.txt").write_text("mine")
    assert Answer(capsys, "verify", run).code == 73, "beside real damage, that counts"


# ------------------------------------------------------------------ export and import


def test_export_and_import_go_round(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Answer(
        capsys,
        "export",
        saved,
        tmp_path / "hf",
        "--to",
        "hf",
        "--dtype",
        "bf16",
        "--max-shard-size",
        "5KB",
        "--json",
    )
    assert (out.code, out.err) == (0, "")
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert (
        out.json["files"] == names
        and out.json["step"] == 30
        and "model.safetensors.index.json" in names
        and len(names) > 3
    )
    assert all(
        t.dtype is torch.bfloat16
        for t in load_file(
            tmp_path / "hf" / f"model-00001-of-{len(names) - 1:05d}.safetensors"
        ).values()
    )
    for to in ("torch", "dcp"):
        exported = Answer(capsys, "export", saved, tmp_path / to, "--to", to, "--step", 2)
        assert (exported.code, exported.err) == (0, "") and "step 2 of" in exported.out
        back = Answer(capsys, "import", tmp_path / to, tmp_path / f"back-{to}", "--json")
        assert (back.code, back.err) == (0, "")
        assert (
            back.json["step"] == 2
            and back.json["format"] == to
            and back.json["optimizer"] == "AdamW"
            and back.json["notes"] == []
        )
        assert Answer(capsys, "verify", tmp_path / f"back-{to}").code == 0
        one = Answer(capsys, "show", saved, "--step", 2, "--json").json
        other = Answer(capsys, "show", tmp_path / f"back-{to}", "--json").json
        assert one["parameters"] == other["parameters"]
        for key in ("lr", "betas", "weight_decay"):
            assert [g["options"][key] for g in one["optimizer"]["groups"]] == [
                g["options"][key] for g in other["optimizer"]["groups"]
            ]


def test_what_is_left_out_is_said_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=1.0).state_dict(),
        },
        tmp_path / "model.pt",
    )
    answer = Answer(capsys, "import", tmp_path / "model.pt", tmp_path / "run", "--step", 7)
    assert answer.code == 0 and "step-0000000007" in answer.out and "strict=False" in answer.out
    assert answer.err.count("\n") == 1 and "numbers its parameters" in answer.err


def test_the_choices_are_the_formats_that_exist() -> None:
    assert (
        checkpoint_command.EXPORTS == FORMATS and ("auto", *READERS) == checkpoint_command.IMPORTS
    )


# ------------------------------------------------------------------ errors


def test_errors_are_one_line_and_their_code_says_which(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "x.safetensors").write_text("x")
    step = saved / "step-0000000002"
    cases: list[tuple[int, str, list[object]]] = [
        (2, "required", ["show"]),
        (2, "is not a whole number", ["show", saved, "--step", "two"]),
        (2, "is one step already", ["show", step, "--step", 2]),
        (2, "is a file", ["verify", tmp_path / "file"]),
        (2, "--all means every step", ["verify", saved, "--all", "--step", 2]),
        (2, "--all means every step", ["verify", step, "--all"]),
        (2, "invalid choice: 'onnx'", ["export", saved, tmp_path / "x", "--to", "onnx"]),
        (
            2,
            "'much' is not a size",
            ["export", saved, tmp_path / "x", "--to", "hf", "--max-shard-size", "much"],
        ),
        (
            2,
            "is not a size",
            ["export", saved, tmp_path / "x", "--to", "hf", "--max-shard-size", "0.1"],
        ),
        (3, "is not empty", ["export", saved, saved, "--to", "hf"]),
        (3, "no checkpoint that is known", ["import", tmp_path / "empty", tmp_path / "x"]),
        (73, "holds no checkpoint", ["show", tmp_path / "empty"]),
        (2, "holds no step 5; it has 1, 2, 30", ["verify", saved, "--step", 5]),
        (
            73,
            "cannot be read as safetensors",
            ["import", tmp_path / "x.safetensors", tmp_path / "x"],
        ),
        (
            73,
            "neither model.safetensors nor",
            ["import", tmp_path / "empty", tmp_path / "x", "--from", "hf"],
        ),
        (74, "No such file or directory", ["show", tmp_path / "nowhere"]),
        (74, "No such file or directory", ["import", tmp_path / "nowhere", tmp_path / "x"]),
    ]
    for code, complaint, argv in cases:
        answer = Answer(capsys, *argv)
        assert (answer.code, answer.out) == (code, ""), (argv, answer.code, answer.out, answer.err)
        assert complaint in answer.err and answer.err.count("\n") == 1, (argv, answer.err)
    assert not (tmp_path / "x").exists()
