"""``state_dict()`` of a model at stage 3, as programs of DeepSpeed's ask for it: on one rank alone,
before they write over what it lacks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from zeroshard.deepspeed import zero
from zeroshard.deepspeed.helpers import logger
from zeroshard.integrations import deepspeed


class _Norm(nn.BatchNorm1d):
    """A layer with a state of its own."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([3])

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.tolist() == [3]


class Counted(nn.Module):
    """Two layers, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), _Norm(7), nn.Linear(7, 3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def _made(stage: int) -> Any:
    torch.manual_seed(0)
    model = Counted()
    keys = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=keys)
    generator = torch.Generator().manual_seed(engine.global_rank)
    engine.backward(engine(torch.randn(4, 5, generator=generator)))
    engine.step()
    return engine


def _saves_as_deepspeed_chat(rank: int, world: int, folder: str) -> list[str]:
    engine, path, told = _made(3), Path(folder) / "pytorch_model.bin", list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    whole, model = engine.module_state_dict(), engine.module
    if rank == 0:  # save_hf_format()
        first = model.state_dict()
        assert list(first) == list(whole) == list(Counted().state_dict())
        for name, value in first.items():
            is_parameter = name in dict(model.named_parameters())
            assert value.shape == whole[name].shape and value.dtype == whole[name].dtype
            assert value.is_meta == is_parameter, name
            assert is_parameter or torch.equal(value, whole[name])
        torch.save(first, path)
        read = torch.load(path, weights_only=True)
        with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
            Counted().load_state_dict(read)
        prefixed = engine.state_dict()
        assert list(prefixed) == [f"module.{name}" for name in whole]
        assert list(model.first.state_dict(prefix="x.")) == ["x.weight", "x.bias"]
    out = {}
    for name, parameter in model.named_parameters():  # save_zero_three_model()
        with zero.GatheredParameters([parameter]):
            out[name] = parameter.data.cpu()
    if rank == 0:
        torch.save(out, path)
        for name, value in torch.load(path, weights_only=True).items():
            assert torch.equal(value, whole[name]), name
    with zero.GatheredParameters(model.parameters()):
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole[name]), name
    logger.removeHandler(handler)
    engine.destroy()
    assert not any("state_dict" in vars(module) for module in model.modules())
    assert torch.equal(model.state_dict()["first.weight"], whole["first.weight"])
    return [line for line in told if "meta" in line]


def test_one_rank_alone_may_ask_and_writes_over_what_has_no_numbers(tmp_path: Path) -> None:
    first, second = run_ranks(2, _saves_as_deepspeed_chat, str(tmp_path))
    assert second == [] and len(first) == 1, "told once, on the rank that asked"
    assert "save_16bit_model(DIRECTORY) on every rank" in first[0]


def _saves_an_adapter(rank: int, world: int, folder: str) -> None:
    import peft

    saved = []
    for stage in (2, 3):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, target_modules=["first"], modules_to_save=["second"])
        model = peft.get_peft_model(Counted(), lora)
        trained = [one for one in model.parameters() if one.requires_grad]
        keys = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.SGD(trained, lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=keys)
        engine.backward(engine(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))))
        engine.step()
        path = Path(folder, str(stage))
        if rank == 0 and stage == 3:
            with pytest.raises(
                zs.StateError, match=r"call engine\.save_pretrained\(DIRECTORY\) on"
            ):
                engine.module.save_pretrained(path)
            assert not path.exists()
        elif stage == 3:  # as Accelerate calls it elsewhere
            engine.module.save_pretrained(f"{path}-none", is_main_process=False)
        engine.save_pretrained(path)
        saved.append(load_file(path / "adapter_model.safetensors"))
        with zero.GatheredParameters(model.parameters()):
            if rank == 0:
                engine.module.save_pretrained(path / "gathered")
        if rank == 0:
            saved.append(load_file(path / "gathered" / "adapter_model.safetensors"))
        engine.destroy()
        assert not any("save_pretrained" in vars(module) for module in model.modules())
    first, *others = saved
    for other in others:
        assert first.keys() == other.keys() and len(first) == 4
        for name, value in first.items():
            torch.testing.assert_close(other[name], value)


def test_an_adapter_saves_itself_at_stage_3(tmp_path: Path) -> None:
    run_ranks(2, _saves_an_adapter, str(tmp_path))


def _below_stage_3(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        engine = _made(stage)
        found, whole = engine.module.state_dict(), engine.module_state_dict()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        if stage:  # torch's own optimizer, of which a rank has a part
            with pytest.raises(zs.StateError, match=r"save_checkpoint\(\), or every rank's own"):
                engine.optimizer.optimizer.state_dict()
            assert engine.optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        engine.destroy()


def test_below_stage_3_it_has_the_weights() -> None:
    run_ranks(2, _below_stage_3)


def _native(rank: int, world: int) -> None:
    model = Counted()
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    model.state_dict()


def test_an_engine_of_shard_refuses_it_as_before() -> None:
    with pytest.raises(AssertionError, match=r"engine\.full_state_dict\(\) on every rank"):
        run_ranks(2, _native)
