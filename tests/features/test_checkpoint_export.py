"""Our checkpoints as others read them: Transformers, torch, torch.distributed.checkpoint; bit
for bit, and in little memory.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zeroshard as zs
from tests.support.broken_storage import file_limit
from tests.support.checkpoints import check_same
from tests.support.harness import run_ranks
from tests.support.training import make_model, take_steps, two_groups
from zeroshard import CheckpointError, ConfigError
from zeroshard.checkpoint.shard_files import published
from zeroshard.checkpoint.steps import list_steps, read_manifest
from zeroshard.formats import import_checkpoint
from zeroshard.formats.export import export

# Coverage measures our subprocesses: it needs memory, and writes a file of its own.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
}


class Odd(nn.Module):
    """Channels last, a tie, a scalar, nothing at all, a frozen weight, batch norm's buffers, one
    that is not saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 9, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(9)
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(9, 3).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(images)).relu().mean((2, 3))
        return (
            self.frozen(self.second(self.first(hidden))) * self.temperature
        ).square().mean() + self.nothing.sum()


def _odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def _save_odd(
    rank: int, world: int, folder: Path, row: str, precision: str
) -> dict[str, torch.Tensor]:
    """Train and save; return what a full-precision state_dict holds."""
    model = _odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = zs.shard(model, optimizer, policy=row, precision=precision)
    for step in range(2):
        images = torch.randn(2, 5, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(model(images))
        optimizer.step()
        optimizer.zero_grad()
    zs.save(folder, engine, step=2)
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


def _save_net(
    rank: int, world: int, folder: Path, row: str = "zero3"
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train two steps, save, train two more; return the saved weights and the last losses."""
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row)
    state: dict[str, torch.Tensor] = {}
    # rank 0's data on every rank, so that one process can follow
    take_steps(0, 2, model, optimizer, engine)
    zs.save(folder, engine, step=2)
    state = engine.full_state_dict(rank0_only=False)
    losses = take_steps(0, (2, 3), model, optimizer, engine)
    engine.close()
    return state, losses


@pytest.fixture(scope="module")
def net(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, torch.Tensor], list[float]]:
    """A step saved by two ranks of ZeRO-3, its weights, and the two losses after it."""
    folder = tmp_path_factory.mktemp("net")
    state, losses = run_ranks(2, _save_net, folder)[0]
    return list_steps(folder)[2], state, losses


# ------------------------------------------------------------------ Transformers


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
def test_hf_files_have_masters_in_row_order_each_tied_parameter_once_and_rank_0s_buffers(
    tmp_path: Path, row: str
) -> None:
    state = run_ranks(2, _save_odd, tmp_path / "run", row, "fp32")[0]
    export(list_steps(tmp_path / "run")[2], tmp_path / "out", "hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    del state["second.weight"]  # it is first.weight
    check_same(load_file(tmp_path / "out" / "model.safetensors"), state)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "Transformers refuses a file without it"
    model = _odd()
    report = zs.load_pretrained(model, tmp_path / "out")
    assert not report.missing and not report.unexpected
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) and torch.equal(
        model.conv.weight, state["conv.weight"]
    )


def test_hf_files_of_a_bf16_run_have_the_fp32_masters_not_the_rounded_weights(
    tmp_path: Path,
) -> None:
    rounded = run_ranks(2, _save_odd, tmp_path / "run", "zero3", "bf16")[0]
    export(list_steps(tmp_path / "run")[2], tmp_path / "out", "hf")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["conv.weight"].dtype is torch.float32 and not torch.equal(
        got["conv.weight"], got["conv.weight"].bfloat16().float()
    )
    assert torch.equal(got["conv.weight"].bfloat16(), rounded["conv.weight"].bfloat16())
    export(list_steps(tmp_path / "run")[2], tmp_path / "bf16", "hf", dtype=torch.bfloat16)
    got = load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.equal(got["conv.weight"], rounded["conv.weight"].bfloat16())
    assert (
        got["norm.running_mean"].dtype is torch.float32
        and got["norm.num_batches_tracked"].dtype is torch.int64
    ), "buffers keep their dtype"


@pytest.mark.parametrize("limit", [1, 3_000, 20_000])
def test_hf_files_hold_at_most_the_size_asked_for_unless_one_tensor_is_larger(
    tmp_path: Path, net: Any, limit: int
) -> None:
    step, state, _ = net
    export(step, tmp_path / "out", "hf", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [
        f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)
    ]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
        assert all(index["weight_map"][key] == name for key in tensors)
        found |= tensors
    check_same(found, state)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    model = make_model()
    zs.load_pretrained(model, tmp_path / "out")
    check_same(model.state_dict(), state)


def _tied(family: str) -> nn.Module:
    """Return a language model of Transformers' whose head is its embedding."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    if family == "llama":
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        return LlamaForCausalLM(LlamaConfig(vocab_size=61, tie_word_embeddings=True, **sizes))
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=8)
        )
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=61,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            tie_word_embeddings=True,
        )
    )


def _save_tied(rank: int, world: int, folder: Path, family: str) -> None:
    model = _tied(family)
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), policy="zero3")
    zs.save(folder, engine, step=1)
    engine.close()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_from_pretrained_takes_a_tied_model_whole(tmp_path: Path, family: str) -> None:
    run_ranks(2, _save_tied, tmp_path / "run", family, timeout=120)
    export(list_steps(tmp_path / "run")[1], tmp_path / "out", "hf", max_shard_bytes=2_000)
    expected: Any = _tied(family)
    expected.config.save_pretrained(tmp_path / "out")
    model, info = type(expected).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in info), info
    check_same(model.state_dict(), expected.state_dict())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected.save_pretrained(tmp_path / "theirs")
    ours = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(tmp_path / "theirs" / "model.safetensors", framework="pt") as theirs:
        assert sorted(ours) == sorted(theirs.keys()), "the names that Transformers itself writes"
    other: Any = type(expected)(expected.config)
    zs.load_pretrained(other, tmp_path / "out")
    check_same(other.state_dict(), expected.state_dict())


# ------------------------------------------------------------------ torch and DCP


def test_a_torch_file_opens_with_weights_only_and_continues_the_run_in_plain_torch(
    tmp_path: Path, net: Any
) -> None:
    step, state, losses = net
    export(step, tmp_path / "out.pt", "torch")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert content["step"] == 2
    check_same(content["model"], state)
    model = make_model()
    model.load_state_dict(content["model"])
    optimizer = two_groups(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group, saved in zip(optimizer.param_groups, content["param_groups"], strict=True):
        assert (
            sorted(names[p] for p in group["params"]) == sorted(saved["params"])
            and group["weight_decay"] == saved["weight_decay"]
        )
    for parameter, name in names.items():
        optimizer.state[parameter] = content["optimizer"][name]
    assert take_steps(0, (2, 3), model, optimizer) == losses


def test_the_names_of_a_tied_parameter_share_one_storage_in_a_torch_file(tmp_path: Path) -> None:
    state = run_ranks(2, _save_odd, tmp_path / "run", "zero3", "fp32")[0]
    export(list_steps(tmp_path / "run")[2], tmp_path / "out.pt", "torch")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    check_same(content["model"], state)
    assert (
        content["model"]["first.weight"].data_ptr() == content["model"]["second.weight"].data_ptr()
    )
    assert "frozen.weight" not in content["optimizer"] and content["optimizer"]["conv.weight"][
        "exp_avg"
    ].shape == (9, 5, 3, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_what_was_exported_and_continues_the_run(tmp_path: Path, net: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    step, state, losses = net
    export(step, tmp_path / "out", "dcp")
    model = make_model()
    optimizer = two_groups(model)
    content = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 0,
    }
    dcp.load(content, checkpoint_id=tmp_path / "out", no_dist=True)
    set_optimizer_state_dict(model, optimizer, content["optimizer"])
    assert content["step"] == 2
    check_same(model.state_dict(), state)
    assert take_steps(0, (2, 3), model, optimizer) == losses


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_what_is_there_is_never_written_over(tmp_path: Path, net: Any, to: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, complaint in (("full", "not empty"), ("file", "exists"), ("link", "exists")):
        with pytest.raises(ConfigError, match=complaint):
            export(net[0], tmp_path / name, to)
    assert (
        (tmp_path / "full" / "notes.txt").read_text() == "mine" == (tmp_path / "file").read_text()
    )
    (tmp_path / "empty").mkdir()
    export(net[0], tmp_path / "empty", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "link"]


def _copy_of(step: Path, target: Path) -> Path:
    copy = target / step.name
    copy.mkdir(parents=True)
    for file in step.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def _flip(step: Path, kind: str) -> None:
    """Change one bit of the first tensor of this kind."""
    manifest = read_manifest(step)
    entry = next(entry for entry in manifest.tensors if entry.kind.startswith(kind))
    file = manifest.files[entry.file]
    data = bytearray((step / file.name).read_bytes())
    data[file.header_bytes + entry.offset] ^= 1
    (step / file.name).write_bytes(data)


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_left_behind(
    tmp_path: Path, net: Any, to: Any
) -> None:
    for kind in ("value",) if to == "hf" else ("value", "state."):
        broken = _copy_of(net[0], tmp_path / "broken" / kind)
        _flip(broken, kind)
        with pytest.raises(
            CheckpointError, match=rf"rank-.*is damaged: {kind}.* of parameter '.*', elements"
        ):
            export(broken, tmp_path / "out", to)
    missing = _copy_of(net[0], tmp_path / "broken" / "missing")
    min(missing.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000.*No such file"):
        export(missing, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_parameter_of_which_a_piece_is_missing_is_not_exported(tmp_path: Path, net: Any) -> None:
    step = _copy_of(net[0], tmp_path / "broken")
    manifest = read_manifest(step)
    pieces = manifest.pieces()["head.weight", "value"]
    renamed = tuple(
        replace(entry, kind="other") if entry == pieces[0] else entry for entry in manifest.tensors
    )
    (step / "manifest.json").write_bytes(replace(manifest, tensors=renamed).dump())
    with pytest.raises(
        CheckpointError,
        match=rf"lacks elements 0 to {pieces[0].stop} of value of parameter 'head.weight'",
    ):
        export(step, tmp_path / "out", "hf")


def test_fp16_refuses_a_value_that_it_cannot_hold(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.tensor([1.0, 1e5]), "other": torch.ones(2)}, tmp_path / "large.safetensors"
    )
    save_file({"weight": torch.tensor([1.0, float("inf")])}, tmp_path / "infinite.safetensors")
    large = import_checkpoint(tmp_path / "large.safetensors", tmp_path / "run", step=1).path
    with pytest.raises(
        CheckpointError,
        match=r"parameter 'weight' has a value of 100000, more than torch.float16 holds",
    ):
        export(large, tmp_path / "out", "hf", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    infinite = import_checkpoint(tmp_path / "infinite.safetensors", tmp_path / "run", step=2).path
    export(infinite, tmp_path / "out", "hf", dtype=torch.float16)
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["weight"],
        torch.tensor([1.0, float("inf")]).half(),
    )


@pytest.mark.parametrize(
    "to", ["hf", *(pytest.param(to, marks=pytest.mark.slow) for to in ("torch", "dcp"))]
)
def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, net: Any, to: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with file_limit(20_000), pytest.raises(CheckpointError, match=r"too large|no space") as caught:
        export(net[0], tmp_path / "out", to)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_ctrl_c_in_the_middle_of_an_export_is_no_failing_disk_and_leaves_nothing(
    tmp_path: Path, net: Any, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's writer makes an error of its own of an exception that comes while it writes."""

    class Interrupted(io.BytesIO):
        writes = 0

        def write(self, data: Any) -> int:
            self.writes += 1
            if self.writes == 3:
                raise KeyboardInterrupt
            return super().write(data)

    really = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: really(content, Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        export(net[0], tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_has_left_is_removed_by_the_next_and_not_by_one_beside(
    tmp_path: Path,
) -> None:
    out, script = (
        tmp_path / "out",
        (
            "import os, pathlib, sys\n"
            "from zeroshard.checkpoint.shard_files import published\n"
            "with published(pathlib.Path(sys.argv[1]), 10) as working:\n"
            "    working.write_text('half')\n"
            "    os.kill(os.getpid(), 9)\n"
        ),
    )
    for name in ("out", "out-2"):
        killed = [sys.executable, "-c", script, str(tmp_path / name)]
        assert subprocess.run(killed, env=ENVIRONMENT, check=False).returncode == -9
    [left] = tmp_path.glob(".exporting-out-????????")
    assert (left / "out").read_text() == "half"
    with published(out, 10) as working:
        assert not left.exists()
        working.write_text("whole")
        with pytest.raises(ZeroDivisionError), published(out, 10) as other:
            other.write_text("beside")
            raise ZeroDivisionError
        assert working.read_text() == "whole"
    assert out.read_text() == "whole"
    assert len(list(tmp_path.iterdir())) == 2, "that of another name is not ours to remove"


# ------------------------------------------------------------------ memory

_MEASURED = """
import sys
from pathlib import Path
from zeroshard.formats.export import export
def memory(field):  # not ru_maxrss, which begins with what the parent had
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
before = memory("VmRSS")
export(Path(sys.argv[1]), Path(sys.argv[2]), "hf")
print(memory("VmHWM") - before)
"""
_MB = 10**6


def _export_growth(tmp_path: Path, sizes: list[int]) -> int:
    """Export a model of parameters of these bytes in a fresh process; return by how many bytes
    its memory grew beyond the imports.
    """
    tensors = {
        f"layers.{number}.weight": torch.full((size // 4,), float(number))
        for number, size in enumerate(sizes)
    }
    save_file(tensors, tmp_path / "big.safetensors")
    del tensors
    step = import_checkpoint(tmp_path / "big.safetensors", tmp_path / "run").path
    (tmp_path / "big.safetensors").unlink()
    command = [sys.executable, "-c", _MEASURED, str(step), str(tmp_path / "out")]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env=ENVIRONMENT
    )
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        last = file.get_slice(f"layers.{len(sizes) - 1}.weight")
        assert last.get_shape() == [sizes[-1] // 4] and last[-1:].item() == len(sizes) - 1
    return int(answer.stdout)


def test_exporting_takes_the_memory_of_chunks_not_of_parameters(tmp_path: Path) -> None:
    # 150 or more, if one parameter were held
    assert _export_growth(tmp_path, [150 * _MB, 75 * _MB, 75 * _MB]) < 60 * _MB


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exporting_2_gb_grows_by_less_than_500_mb(tmp_path: Path) -> None:
    # in fact by that of chunks
    assert _export_growth(tmp_path, [1000 * _MB, 500 * _MB, 250 * _MB, 250 * _MB]) < 100 * _MB
