"""DeepSpeed's engine on zeroshard: the arithmetic of plain data parallel training, and its calls.

Every case runs on two ranks beside DistributedDataParallel with the same accumulation, clipping
and schedule.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.harness import PLAIN, run_ranks
from tests.support.training import Net, batch, make_model
from zeroshard.comm.groups import on_cpu
from zeroshard.deepspeed import held_parameters as states
from zeroshard.deepspeed import (
    helpers,
    lr_schedules,
    optimizers,
    start,
    zero,
)
from zeroshard.deepspeed.answers import complete_batch
from zeroshard.integrations import deepspeed

EITHER = pytest.mark.parametrize("group", ["", PLAIN])
STAGES = (0, 1, 2, 3)
STEPS, MICRO = 4, 2
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3}}


def config(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": SCHEDULE,
        "zero_optimization": {"stage": stage},
    } | keys


def made(stage: int, **keys: Any) -> tuple[Net, Any]:
    model = make_model(layers=2)
    engine, *_ = deepspeed.initialize(model=model, config=config(stage, **keys))
    return model, engine


def one_step(engine: Any, rank: int, step: int) -> list[float]:
    losses = []
    for micro in range(MICRO):
        loss = engine(*batch(rank, step * MICRO + micro))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def by_ddp(rank: int, *, clip: float = 0.05) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training with torch alone."""
    model = make_model(layers=2)
    wrapped = DistributedDataParallel(model, process_group=on_cpu(_get_default_group()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = lr_schedules.make_schedule("WarmupLR", dict(SCHEDULE["params"]), optimizer)  # type: ignore[call-overload]
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO):
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = wrapped(*batch(rank, step * MICRO + micro))
                (loss / MICRO).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def _near(ours: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


def _equals_ddp(rank: int, world: int) -> None:
    expected, weights = by_ddp(rank)
    for stage in STAGES:
        model, engine = made(stage)
        losses = [loss for step in range(STEPS) for loss in one_step(engine, rank, step)]
        _near(losses, expected)
        for name, value in engine.module_state_dict().items():
            _near(value, weights[name])
        assert engine.global_steps == STEPS and engine.micro_steps == STEPS * MICRO
        assert engine.global_samples == STEPS * 4 * MICRO * world
        assert engine.zero_optimization_stage() == stage
        assert engine.was_step_applied() and engine.get_global_grad_norm() > 0.05
        engine.destroy()
        # plain again: the module trains by itself
        model(*batch(rank, 0)).backward()


@EITHER
def test_losses_and_weights_are_those_of_ddp_at_every_stage(group: str) -> None:
    run_ranks(2, _equals_ddp, device=group)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lamb": lambda parameters: optimizers.FusedLamb(parameters, lr=0.1, weight_decay=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, weight_decay=0.1),
}


def _owns_whole(rank: int, world: int) -> None:
    """Without a key that says so, of an optimizer of the file and of one that is given."""
    for kind, make in WHOLE.items():
        plain = make_model(layers=2)
        ddp = DistributedDataParallel(plain, process_group=on_cpu(_get_default_group()))
        optimizer = make(plain.parameters())
        for step in range(STEPS):
            ddp(*batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        section = {"type": kind, "params": {"lr": 0.1, "weight_decay": 0.1}}
        host = {"device": "cpu"}
        zeros: list[dict[str, Any]] = [{"stage": stage} for stage in STAGES]
        zeros += [{"stage": 2, "offload_optimizer": host}]
        zeros += [{"stage": 3, "offload_optimizer": host, "offload_param": host}]
        for zero_ in zeros:
            keys = config(0, gradient_accumulation_steps=1, gradient_clipping=0, optimizer=section)
            given: dict[str, Any] = {}
            if zero_["stage"] == 1:
                given, _ = {"optimizer": make}, keys.pop("optimizer")
            keys |= {"zero_optimization": zero_}
            del keys["scheduler"]
            model = make_model(layers=2)
            with mock.patch.object(helpers.logger, "log") as said:
                engine, *_ = deepspeed.initialize(model=model, config=keys, **given)
            told = [str(call.args[-1]) for call in said.call_args_list]
            owned = [line for line in told if "steps whole parameters" in line]
            assert len(owned) == (rank == 0), told
            for step in range(STEPS):
                engine.backward(engine(*batch(rank, step)))
                engine.step()
            full = engine.engine.full_state_dict(rank0_only=False)
            for name, value in plain.state_dict().items():
                assert torch.equal(full[name], value), (kind, zero_, name)
            engine.destroy()


@EITHER
def test_optimizers_of_whole_parameters_train_as_ddp_at_every_stage(group: str) -> None:
    run_ranks(2, _owns_whole, device=group)


def _draws_nothing(rank: int, world: int) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage in STAGES:
        model, before = make_model(layers=2), torch.get_rng_state()
        zero = {"stage": stage} | (offload if stage else {})
        engine, *_ = deepspeed.initialize(model=model, config=config(0, zero_optimization=zero))
        assert torch.equal(torch.get_rng_state(), before)  # of dropout and of the order of samples
        engine.destroy()


def test_initialize_leaves_the_scripts_random_numbers_as_they_are() -> None:
    run_ranks(2, _draws_nothing)


def _plain_backward(rank: int, world: int) -> None:
    expected, weights = by_ddp(rank)
    for stage in (1, 3):
        _, engine = made(stage)
        losses = []
        for step in range(STEPS):
            for micro in range(MICRO):
                loss = engine(*batch(rank, step * MICRO + micro))
                loss.backward()
                engine.step()
                losses.append(loss.item())
        _near(losses, expected)
        _near(engine.module_state_dict()["head.weight"], weights["head.weight"])
        engine.destroy()


def test_a_plain_backward_is_divided_by_the_accumulation_steps_too() -> None:
    run_ranks(2, _plain_backward)


def test_of_a_loss_and_its_logits_only_the_loss_is_divided() -> None:
    from zeroshard.deepspeed.deepspeed_engine import divided

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self) -> Any:
            logits = self.weight * 2
            return {"loss": logits.sum(), "logits": logits}, (logits * 1.5).sum()

    model = Twice()
    outputs, other = divided(model, 4, (), {})
    outputs["loss"].backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [0.5] * 3
    model.weight.grad = None
    outputs, other = divided(model, 4, (), {})
    (outputs["loss"] + other).backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [1.25] * 3


def _no_sync(rank: int, world: int) -> None:
    _, weights = by_ddp(rank)
    for stage in STAGES:
        _, engine = made(stage)
        for step in range(STEPS):
            for micro in range(MICRO):
                context = engine.no_sync() if micro + 1 < MICRO else contextlib.nullcontext()
                with context:
                    engine.backward(engine(*batch(rank, step * MICRO + micro)))
                    if micro + 1 < MICRO:
                        with pytest.raises(zs.StateError, match="no_sync"):
                            engine.step()
            engine.set_gradient_accumulation_boundary(True)
            assert engine.is_gradient_accumulation_boundary()
            engine.step()
            engine.set_gradient_accumulation_boundary(None)
        _near(engine.module_state_dict()["head.weight"], weights["head.weight"])
        engine.destroy()


def test_no_sync_sums_gradients_at_every_stage() -> None:
    run_ranks(2, _no_sync)


def _skips(rank: int, world: int) -> None:
    for stage, hysteresis in ((1, {"hysteresis": 1}), (3, {})):  # of 2: the first one is let pass
        half = {"fp16": {"enabled": True, **hysteresis}}
        _, engine = made(stage, gradient_accumulation_steps=1, **half)
        rates: list[float] = []
        norms: list[torch.Tensor] = []
        for step in range(4):
            loss = engine(*batch(rank, step))
            engine.backward(loss * (math.inf if step == 1 and rank == 0 else 1.0))
            before = engine.module_state_dict()
            engine.step()
            rates.append(engine.get_lr()[0])
            norms.append(engine.get_global_grad_norm())
            same = torch.equal(before["head.weight"], engine.module_state_dict()["head.weight"])
            skipped = step == 1
            assert engine.optimizer.overflow == skipped == (not engine.was_step_applied())
            assert same == (step < 3), step  # the warmup begins with two steps at rate 0
        assert engine.skipped_steps == 1 and engine.global_steps == 4
        assert all(norm.isfinite() for norm in norms) and norms[1] is norms[0] is not norms[2]
        with pytest.raises(AttributeError, match=r"loss scaler .*'cur_iter'.*dynamic_loss_scale_"):
            _ = engine.optimizer.loss_scaler.cur_iter
        assert rates[0] == rates[1] == 0.0 < rates[2] < rates[3]  # the schedule stood still
        assert engine.loss_scale == engine.optimizer.loss_scale == 2.0 ** (15 if hysteresis else 16)
        assert engine.scale(torch.ones(())).item() == engine.loss_scale
        with pytest.raises(zs.ConfigError, match=r"shape \(2,\): give it one number"):
            engine.scale(torch.ones(2))
        engine.destroy()


def test_an_overflow_moves_neither_the_weights_nor_the_schedule() -> None:
    run_ranks(2, _skips)


def _sets_gradients(rank: int, world: int, keys: dict[str, Any]) -> None:
    stage = keys["zero_optimization"]["stage"]
    _, engine = made(stage, gradient_accumulation_steps=1, **keys)
    inner, weight = engine.engine, engine.module.head.weight
    weights = [engine.module_state_dict()]
    for step, bad in enumerate((math.nan, None, "local", "mended", "clipped")):
        loss = engine(*batch(rank, step))
        engine.backward(loss * (math.inf if bad == "mended" and rank == 0 else 1.0))
        whole = torch.full(weight.shape, 1e-3)
        if bad == "mended":  # it was found, and is there no longer
            for parameter in engine.module.parameters():
                states.safe_set_full_grad(parameter, torch.full(parameter.shape, 1e-3))
        elif bad == "local":  # of one rank's part, in the last element of all
            part = states.safe_get_local_grad(weight)
            assert part is not None
            part[-1:] = math.inf if rank == world - 1 else part[-1:]
            states.safe_set_local_grad(weight, part)
        else:
            if bad == "clipped":
                inner.clip_grad_norm_(0.05)
            states.safe_set_full_grad(weight, whole * (1.0 if bad is None else math.nan))
            assert states.safe_get_full_grad(weight) is not None  # which does not look
        engine.step()
        weights.append(engine.module_state_dict())
        moved = not torch.equal(weights[-1]["head.weight"], weights[-2]["head.weight"])
        assert moved == engine.was_step_applied() == (bad in (None, "mended")), (bad, keys)
        assert all(one.isfinite().all() for one in weights[-1].values())
    assert engine.skipped_steps == inner.steps_skipped == 3 and engine.global_steps == 5
    for third in (False, True) if "bf16" in keys else ():
        engine.backward(engine(*batch(rank, 0)))
        states.safe_set_full_grad(weight, torch.full(weight.shape, math.nan))
        told = pytest.raises(zs.StateError, match=r"3 steps in a row.*'head.weight'")
        with told if third else contextlib.nullcontext():
            engine.step()
    engine.destroy()


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_step_is_skipped_where_a_gradient_is_set_that_is_not_finite(
    half: str, device: str
) -> None:
    for stage in (1, 2, 3):
        zero = {"stage": stage, "offload_optimizer": {"device": device}}
        precision = {half: {"enabled": True}}
        keys = {"zero_optimization": zero, **precision, "scheduler": None}
        run_ranks(2, _sets_gradients, keys)


def _saves(rank: int, world: int, path: str) -> None:
    _, engine = made(1)
    one_step(engine, rank, 0)
    one_step(engine, rank, 1)
    assert engine.save_checkpoint(path, client_state={"epoch": 3, "seen": [1, 2]})
    after = [one_step(engine, rank, 2), one_step(engine, rank, 3)]
    weights = engine.module_state_dict()
    engine.destroy()
    assert Path(path, "latest").read_text() == "global_step2"
    assert Path(path, "global_step2").is_dir()
    for stage in (1, 2, 3):  # another row, where it goes on as if nothing had been
        _, engine = made(stage)
        found, state = engine.load_checkpoint(path)
        assert found == str(Path(path, "global_step2")) and state == {"epoch": 3, "seen": [1, 2]}
        assert engine.global_steps == 2 and engine.lr_scheduler.last_batch_iteration == 1
        _near([one_step(engine, rank, 2), one_step(engine, rank, 3)], after)
        _near(engine.module_state_dict(), weights)
        engine.destroy()
    _, engine = made(3)
    assert engine.load_checkpoint(str(Path(path, "nothing"))) == (None, None)
    engine.load_checkpoint(path, tag="global_step2", load_module_only=True)
    assert engine.global_steps == 0 and engine.lr_scheduler.last_batch_iteration == -1
    head = engine.module.head.weight
    assert states.safe_get_full_optimizer_state(head, "exp_avg") is None
    assert engine.save_checkpoint(path, tag="model") and engine.save_checkpoint(path, tag="model")
    assert Path(path, "latest").read_text() == "model"
    engine.save_16bit_model(path, "weights.bin")
    saved = torch.load(Path(path, "weights.bin"), weights_only=True)
    _near(saved["head.weight"], engine.module_state_dict()["head.weight"])
    with pytest.raises(zs.ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(path, custom_load_fn=print)
    engine.destroy()


@EITHER
def test_a_checkpoint_resumes_under_another_stage(tmp_path: Path, group: str) -> None:
    run_ranks(2, _saves, str(tmp_path), device=group)


def _draws() -> list[Any]:
    """Return the next numbers of each generator."""
    return [random.random(), np.random.random(), torch.rand(3).tolist()]


def _draws_as_seeded(rank: int, world: int, path: str) -> None:
    _, engine = made(2)
    one_step(engine, rank, 0)
    engine.save_checkpoint(path)
    for load, expected in ((engine.load_checkpoint, False), (_loaded_by_zs(engine), True)):
        helpers.set_random_seed(7 + rank)
        seeded = _draws()
        helpers.set_random_seed(7 + rank)
        load(path)
        assert (_draws() != seeded) == expected


def _loaded_by_zs(engine: Any) -> Callable[[str], Any]:
    return lambda path: zs.load(Path(path, "global_step1"), engine.engine)


def test_a_loaded_checkpoint_leaves_the_scripts_random_numbers_as_they_are(tmp_path: Path) -> None:
    """As DeepSpeed does: a script that skips the batches of an epoch that it has seen counts on
    its seed. ``zs.load`` itself takes over the generators.
    """
    run_ranks(2, _draws_as_seeded, str(tmp_path))


def _logs_gradients(rank: int, world: int) -> None:
    for stage in STAGES:
        _, weights = by_ddp(rank)
        model, engine = made(stage)
        for step in range(STEPS):
            one_step_with_logs(engine, rank, step)
        _near(engine.module_state_dict()["head.weight"], weights["head.weight"])
        engine.backward(engine(*batch(rank, 0)))
        engine.zero_grad()  # which drops it
        assert states.safe_get_full_grad(model.head.weight) is None
        engine.backward(engine(*batch(rank, 0)))
        model.head.weight.grad = torch.ones_like(model.head.weight, dtype=torch.float32)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        engine.engine.repartition(stage=2 if stage == 3 else 3)
        engine.backward(engine(*batch(rank, 0)))
        assert model.head.weight.grad is None
        engine.step()
        engine.destroy()


def one_step_with_logs(engine: Any, rank: int, step: int) -> None:
    for micro in range(MICRO):
        engine.backward(engine(*batch(rank, step * MICRO + micro)))
        norms = [one.grad.norm() for one in engine.parameters() if one.grad is not None]
        assert norms == []
        engine.module.zero_grad()  # of which the engine's gradients know nothing
        engine.step()


def test_a_script_that_logs_gradients_finds_none_as_in_deepspeed() -> None:
    run_ranks(2, _logs_gradients)


def test_initialize_logs_the_line_of_versions_that_programs_look_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    helpers.logger.addHandler(caplog.handler)
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config(2))
    engine.destroy()
    helpers.logger.removeHandler(caplog.handler)
    told = [line for line in caplog.messages if "DeepSpeed info: version=" in line]
    git = "git-hash=zeroshard, git-branch=zeroshard"
    assert told == [f"[Rank 0] DeepSpeed info: version={deepspeed.__version__}, {git}"]
    assert deepspeed.__version__.endswith("+zeroshard"), "the line says whose it is"


def test_the_log_has_the_level_of_the_configuration() -> None:
    before = helpers.logger.level
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 1), config=config(2, log_level="error")
    )
    assert helpers.logger.level == logging.ERROR and engine.log_level() == "error"
    engine.destroy()
    helpers.logger.setLevel(before)


def test_the_garbage_collector_is_off_while_an_engine_wants_it_so() -> None:
    def made() -> Any:
        keys = config(2, disable_python_gc=True)
        return deepspeed.initialize(model=torch.nn.Linear(2, 1), config=keys)[0]

    first, second = made(), made()
    assert not gc.isenabled() and first.collect_python_gc() >= 0
    first.destroy()
    assert not gc.isenabled(), "the second engine is open"
    second.destroy()
    second.destroy()
    assert gc.isenabled()
    gc.disable()
    made().destroy()
    assert not gc.isenabled(), "the script has switched it off"
    gc.enable()


class _Routed(Net):
    """A model with a routing bias of distances that bf16 has not, and a table."""

    _keep_in_fp32_modules_strict = ("first.bias_of_experts",)
    _keep_in_fp32_modules = ("table",)

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.first = torch.nn.Module()
        self.first.register_buffer("bias_of_experts", 5 + torch.arange(8) * 0.003)
        self.register_buffer("table", torch.arange(8) / 7)
        self.register_buffer("places", torch.arange(8))


@pytest.mark.parametrize(
    ("half", "types", "bias", "table"),
    [
        ("bf16", {}, "float32", "float32"),
        ("bf16", {"buffer_dtype": "bf16"}, "float32", "bfloat16"),
        ("fp16", {"buffer_dtype": "fp16"}, "float32", "float32"),
        ("bf16", {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}, "bfloat16", "bfloat16"),
        ("bf16", {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["t*le"]}, "bfloat16", "float32"),
        ("", {"buffer_dtype": "bf16"}, "float32", "float32"),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_have_the_dtypes_that_deepspeed_gives_them(
    stage: int, half: str, types: dict[str, Any], bias: str, table: str
) -> None:
    keys = config(stage, data_types=types) | ({half: {"enabled": True}} if half else {})
    model = _Routed()
    values = model.first.bias_of_experts.clone()
    engine, *_ = deepspeed.initialize(model=model, config=keys)
    found = {name: one.dtype for name, one in engine.module.named_buffers()}
    assert found["first.bias_of_experts"] == getattr(torch, bias)
    assert found["table"] == getattr(torch, table) and found["places"] == torch.int64
    if bias == "float32":
        assert torch.equal(model.first.bias_of_experts, values)
    engine.destroy()


def _changes_nothing(rank: int, world: int) -> None:
    for stage in (1, 2):
        trained = []
        for keys in ({}, {"parameter_alignment": True, "compute_grad_norm": False}):
            zero = {"stage": stage, **keys}
            _, engine = made(stage, zero_optimization=zero)
            losses = [one_step(engine, rank, step) for step in range(2)]
            trained.append((losses, engine.get_global_grad_norm(), engine.module_state_dict()))
            engine.destroy()
        assert trained[0][:2] == trained[1][:2]
        assert all(torch.equal(trained[0][2][name], one) for name, one in trained[1][2].items())


def test_aligned_parameters_and_a_norm_left_out_change_no_bit() -> None:
    run_ranks(2, _changes_nothing)


def test_a_warmup_of_no_steps_is_taken_as_the_shortest(caplog: pytest.LogCaptureFixture) -> None:
    helpers.logger.addHandler(caplog.handler)
    rates = []
    for steps in (0, 2):
        params = {"warmup_max_lr": 1.0, "warmup_num_steps": steps}
        model, keys = torch.nn.Linear(2, 1), config(2, gradient_accumulation_steps=1)
        keys["scheduler"] = {"type": "WarmupLR", "params": params}
        engine, *_ = deepspeed.initialize(model=model, config=keys)
        for _ in range(3):
            rates.append(engine.get_lr())
            engine.backward(engine(torch.ones(4, 2)).sum())
            engine.step()
        engine.destroy()
    helpers.logger.removeHandler(caplog.handler)
    assert rates[:3] == rates[3:]
    assert caplog.text.count("WarmupLR: warmup_num_steps=0 is taken as 2, the fewest") == 1


def test_a_refusal_of_no_single_key_begins_with_the_reason() -> None:
    with pytest.raises(zs.ConfigError, match=r"^the configuration names neither train_batch_size"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"zero_optimization": {}})


def _states(rank: int, world: int, keys: dict[str, Any]) -> None:
    for stage in STAGES if not keys else (2, 3):
        section = {"zero_optimization": {"stage": stage} | keys.get("zero_optimization", {})}
        others = {key: value for key, value in keys.items() if key != "zero_optimization"}
        _, engine = made(stage, gradient_accumulation_steps=1, **others, **section)
        weight = engine.module.blocks[0].up.weight
        assert states.safe_get_full_optimizer_state(weight, "exp_avg") is None
        engine.backward(engine(*batch(rank, 0)))
        grad = states.safe_get_full_grad(weight)
        assert grad is not None and grad.shape == weight.shape and grad.abs().sum() > 0
        local = states.safe_get_local_grad(weight)
        assert local is not None
        held = torch.tensor(local.numel())
        dist.all_reduce(held, group=on_cpu(_get_default_group()))
        assert held == weight.numel() * (world if stage == 0 else 1)
        beside = engine.module.blocks[0].norm.weight  # on the same rank
        untouched = states.safe_get_full_grad(beside)
        states.safe_set_full_grad(weight, grad * 0 + 1e-4)
        _near(states.safe_get_full_grad(beside), untouched, rtol=0, atol=0)
        _near(states.safe_get_full_grad(weight), grad * 0 + 1e-4)
        engine.step()
        assert states.safe_get_full_grad(weight) is None
        moment = states.safe_get_full_optimizer_state(weight, "exp_avg")
        assert moment is not None and moment.unique().numel() == 1  # of equal gradients
        value = torch.arange(weight.numel()).view(weight.shape) / 7.0
        states.safe_set_full_optimizer_state(weight, value, "exp_avg")
        _near(states.safe_get_full_optimizer_state(weight, "exp_avg"), value, rtol=0, atol=0)
        other = states.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        assert other is not None and other.unique().numel() == 1  # as it was
        states.safe_set_full_fp32_param(weight, value)
        _near(states.safe_get_full_fp32_param(weight), value, rtol=0, atol=0)
        part = states.safe_get_local_fp32_param(weight)
        assert part is not None
        states.safe_set_local_fp32_param(weight, part * 2)
        _near(states.safe_get_full_fp32_param(weight), value * 2, rtol=0, atol=0)
        whole = engine.module_state_dict()["blocks.0.up.weight"]
        _near(whole, (value * 2).to(whole.dtype), rtol=0, atol=0)
        with pytest.raises(zs.StateError, match="no state 'momentum'"):
            states.safe_set_full_optimizer_state(weight, value, "momentum")
        engine.destroy()


@EITHER
def test_masters_gradients_and_moments_are_read_and_set_whole(group: str) -> None:
    run_ranks(2, _states, {}, device=group)


def test_they_are_on_the_host_and_in_bf16_too() -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    run_ranks(2, _states, {"bf16": {"enabled": True}, "zero_optimization": offload})


def _gathered(rank: int, world: int) -> None:
    plain = torch.nn.Linear(3, 2)
    with torch.no_grad():
        plain.weight.fill_(rank)
    with zero.GatheredParameters(plain.parameters(), modifier_rank=1):
        pass
    assert plain.weight.unique().tolist() == [1.0]
    for stage in STAGES:
        _, engine = made(stage)
        ups = [block.up.weight for block in engine.module.blocks]
        # in another order on each rank, as the set that Transformers gathers
        with zero.GatheredParameters(ups[::-1] if rank else ups, modifier_rank=0), torch.no_grad():
            for place, up in enumerate(ups):
                up.data.fill_(place + rank / 2)
        for place, up in enumerate(ups):
            with zero.GatheredParameters(up):
                assert up.unique().tolist() == [place]
        weight = engine.module.head.weight
        assert hasattr(weight, "ds_id") == (stage == 3) and weight.shape == (37, 19)
        for modifier in (0, 1):
            with zero.GatheredParameters([weight], modifier_rank=modifier):
                if stage == 3:
                    assert weight.ds_status is zero.ZeroParamStatus.AVAILABLE
                if rank == modifier:
                    with torch.no_grad():
                        weight.data.fill_(5.0 + modifier)
            with zero.GatheredParameters(weight):
                assert weight.unique().tolist() == [5.0 + modifier]
            master = states.safe_get_full_fp32_param(weight)
            assert master is not None and master.unique().tolist() == [5.0 + modifier]
        if stage == 3:
            assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
        with zero.unwrap_model_for_generation(engine) as module, torch.no_grad():
            assert module(batch(rank, 0)[0]).shape[-1] == 37
        engine.destroy()
        assert not hasattr(weight, "ds_id")


@EITHER
def test_gathered_parameters_take_the_modifiers_edits(group: str) -> None:
    run_ranks(2, _gathered, device=group)


def _init(rank: int, world: int) -> None:
    torch.manual_seed(100 + rank)  # rank 0's values count
    with zero.Init(config_dict_or_path=config(3)):
        model = Net(width=160, layers=2)
    big = model.blocks[0].up.weight
    assert zs.nn.is_deferred(big)
    with zero.GatheredParameters([big]):
        assert not zs.nn.is_deferred(big)
    torch.manual_seed(100)
    expected = Net(width=160, layers=2).state_dict()
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    for name, value in engine.module_state_dict().items():
        _near(value, expected[name], rtol=0, atol=0)
    engine.destroy()
    with zero.Init(dtype=torch.bfloat16):
        assert torch.nn.Linear(2, 2).weight.dtype is torch.bfloat16
    assert torch.nn.Linear(2, 2).weight.dtype is torch.float32


@EITHER
def test_a_model_built_under_zero_init_has_rank_0s_values(group: str) -> None:
    run_ranks(2, _init, device=group)


def _arguments(rank: int, world: int) -> None:
    """What initialize() takes besides a configuration with everything in it."""
    data = [tuple(part[0] for part in batch(0, index)) for index in range(32)]
    keys = {key: value for key, value in config(2).items() if key not in ("optimizer", "scheduler")}
    made_rate: Callable[..., Any] = lambda opt: torch.optim.lr_scheduler.LambdaLR(  # noqa: E731
        opt, lambda step: 1.0 / (1 + step)
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parsed = start.add_config_arguments(parser).parse_args([])
    assert parsed.local_rank >= 0 and parsed.deepspeed_config is None
    parsed.deepspeed_config = keys
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=parsed,
        model=make_model(layers=1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        lr_scheduler=made_rate,
        training_data=data,
        distributed_port=29555,
    )
    assert len(loader) == 32 // (4 * world) and loader.batch_size == 4
    for inputs in loader:
        engine.backward(engine(*inputs))
        engine.step()
    assert schedule.get_last_lr() == [0.5 / (1 + len(loader) // MICRO)]
    assert optimizer.param_groups[0]["momentum"] == 0.9 and engine.get_mom() == [0.9]
    assert engine.train_batch_size() == 4 * MICRO * world
    engine.set_train_batch_size(4 * world)
    assert engine.gradient_accumulation_steps() == 1
    engine.set_train_micro_batch_size(6)
    assert engine.train_batch_size() == 6 * world
    assert not hasattr(engine, "nothing")
    assert engine.embed is engine.module.embed  # the module's attributes
    engine.offload_states()
    engine.reload_states()
    engine.destroy()
    for wrong, text in (
        ({"mpu": object()}, "mpu="),
        ({"mesh_param": (1, 2)}, "mesh_param="),
        ({"config": None}, "needs a configuration"),
        ({"config": keys | {"train_batch_size": 7}}, "train_batch_size=7"),
        ({"config": keys | {"zero_optimization": {"stag": 1}}}, "mean 'stage'"),
        ({"config": keys | {"optimizer": {"type": "OneBitAdam"}}}, "zero_quantized_gradients"),
        ({"config": keys | {"optimizer": {"type": "LBFGS"}}}, "line search"),
        ({"colour": 1}, "'colour'"),
    ):
        given: dict[str, Any] = {"config": keys} | wrong
        with pytest.raises(zs.ConfigError, match=text):
            deepspeed.initialize(model=make_model(layers=1), **given)
    dist.barrier()


def test_arguments_are_taken_or_refused_with_the_reason() -> None:
    run_ranks(2, _arguments)


# ---------------------------------------------------------------------- one process


def _rates(kind: str, count: int, /, group_lr: float = 0.1, **params: Any) -> list[float]:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=group_lr)
    schedule = lr_schedules.make_schedule(kind, params, optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == rates[-1:]
    return rates


def test_schedules_give_deepspeeds_numbers() -> None:
    """Worked by hand: the first number is the rate before the first step."""
    log4 = math.log(4)
    cases: list[tuple[str, dict[str, Any], list[float]]] = [
        ("WarmupLR", {"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"},
         [0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
        ("WarmupLR", {"warmup_max_lr": 0.8, "warmup_num_steps": 4},
         [0, 0, 0.8 * math.log(2) / log4, 0.8 * math.log(3) / log4, 0.8, 0.8]),
        ("WarmupLR", {"warmup_num_steps": 1, "warmup_min_lr": 0.02, "warmup_type": "linear"},
         [0.02, 0.02, 0.06, 0.1, 0.1]),
        ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": 0.8, "warmup_num_steps": 2,
                           "warmup_type": "linear"},
         [0, 0, 0.4, 0.8, 0.6, 0.4, 0.2, 0, 0]),
        ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 2, "cos_min_ratio": 0.5,
                            "warmup_type": "linear"},
         [0, 0, 0.05, 0.075, 0.05, 0.05]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
         [0.1, 0.15, 0.2, 0.25]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2,
                         "lr_range_test_staircase": True},
         [0.1, 0.1, 0.2, 0.2]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2,
                      "decay_step_size": 1, "decay_lr_rate": 1.0},
         [0.1, 0.3, 0.5, 0.3, 0.1, 0.05, 0.1 / 3]),
    ]  # fmt: skip
    for kind, params, expected in cases:
        # OneCycle's last point of the cycle is its start again, as DeepSpeed counts
        assert _rates(kind, len(expected) - 1, **params) == pytest.approx(expected), kind
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cycle = lr_schedules.OneCycle(optimizer, 0.1, 0.5, cycle_first_step_size=2)
    betas = [optimizer.param_groups[0]["betas"]]
    for _ in range(4):
        cycle.step()
        betas.append(optimizer.param_groups[0]["betas"])
    assert [pair[0] for pair in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    assert {pair[1] for pair in betas} == {0.99}


def _two_groups(**options: Any) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.Adam([{"params": [one]} for one in parameters], **options)


def test_one_cycle_takes_a_rate_and_a_momentum_for_each_group() -> None:
    """As DeepSpeed's own tests ask: a list was a TypeError of the first step."""
    optimizer = _two_groups()
    cycle = lr_schedules.OneCycle(
        optimizer, [0.1, 0.2], [0.5, 0.6], cycle_first_step_size=5,
        cycle_min_mom=[0.8, 0.85], cycle_max_mom=[0.9, 0.95],
    )  # fmt: skip

    def momenta() -> list[float]:
        return [group["betas"][0] for group in optimizer.param_groups]

    # before the first step the optimizer has the lowest, and get_mom() says the highest
    assert (cycle.get_last_lr(), momenta()) == ([0.1, 0.2], [0.8, 0.85])
    assert cycle.get_mom() == [(0.9, 0.99), (0.95, 0.99)]
    cycle.step(4)
    assert cycle.get_last_lr() == cycle.get_lr() == pytest.approx([0.5, 0.6])
    assert momenta() == pytest.approx([0.8, 0.85])
    cycle.step(9)
    assert cycle.get_last_lr() == pytest.approx([0.1, 0.2])
    assert momenta() == pytest.approx([0.9, 0.95])
    assert lr_schedules.OneCycle(optimizer, 0.1, 0.2, cycle_second_step_size=0).step_ratio == 1.0


def test_one_cycle_stands_on_every_one_of_its_stairs() -> None:
    """29 of 100 stairs, which 29 / 100 * 100 lies just below."""
    cycle = lr_schedules.OneCycle(
        _two_groups(), 0.0, 1.0, cycle_first_step_size=100, cycle_first_stair_count=100
    )
    cycle.step(28)
    assert cycle.get_lr() == [0.29, 0.29]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("OneCycle", {"cycle_first_step_size": 0}), ("OneCycle", {"cycle_second_step_size": -1}),
        ("OneCycle", {"cycle_min_lr": [0.1, 0.2, 0.3]}), ("OneCycle", {"cycle_max_mom": [0.9]}),
        ("LRRangeTest", {"lr_range_test_step_size": -5}), ("WarmupLR", {"warmup_max_lr": "1e-3"}),
    ],
)  # fmt: skip
def test_a_schedules_class_refuses_what_a_step_would_stumble_over(
    kind: str, wrong: dict[str, Any]
) -> None:
    """In a program's hands as in a configuration."""
    needed = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if kind == "OneCycle" else {}
    optimizer = _two_groups()
    for make in (lambda params: getattr(lr_schedules, kind)(optimizer, **params),
                 lambda params: lr_schedules.make_schedule(kind, params, optimizer)):  # fmt: skip
        with pytest.raises(zs.ConfigError, match=next(iter(wrong))):
            make(needed | wrong)


def test_a_warmup_without_a_rate_rises_to_that_of_each_group() -> None:
    """As in DeepSpeed from 0.19.5 on; before, all groups got the first one's."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [one], "lr": lr} for one, lr in zip(parameters, (0.1, 0.01), strict=True)]
    optimizer = torch.optim.SGD(groups)
    schedule = lr_schedules.make_schedule("WarmupLR", {"warmup_num_steps": 2}, optimizer)
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [0.1, 0.01]


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    first = lr_schedules.WarmupLR(optimizer, warmup_num_steps=9)
    first.step()
    first.step()
    second = lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=9)
    second.load_state_dict(first.state_dict())
    first.step()
    rate = optimizer.param_groups[0]["lr"]
    second.step()
    assert optimizer.param_groups[0]["lr"] == rate == second.get_lr()[0]
    for wrong in ({"warmup_num_steps": -1}, {"warmup_type": "cubic"}, {"speed": 1}):
        with pytest.raises(zs.ConfigError, match=next(iter(wrong))):
            lr_schedules.make_schedule("WarmupLR", wrong, optimizer)
    for kind, text in (("StepLR", "step_size"), ("Nothing", "WarmupDecayLR")):
        with pytest.raises(zs.ConfigError, match=text):
            lr_schedules.make_schedule(kind, {}, optimizer)


def test_optimizers_are_made_by_deepspeeds_names() -> None:
    def of(kind: str, **params: Any) -> torch.optim.Optimizer:
        return optimizers.make_optimizer(kind, params, [torch.nn.Parameter(torch.ones(4))])

    assert type(of("Adam", lr=1e-3, torch_adam=True)) is torch.optim.AdamW
    assert type(of("Adam", adam_w_mode=False)) is torch.optim.Adam
    assert of("AdamW").defaults["weight_decay"] == 0.0
    # torch_adam: torch's class with torch's own defaults
    for kind, decay in (("AdamW", 0.01), ("Adam", 0.01)):
        assert of(kind, torch_adam=True).defaults["weight_decay"] == decay
        assert of(kind, torch_adam=False).defaults["weight_decay"] == 0.0
    plain = of("Adam", torch_adam=True, adam_w_mode=False)
    assert type(plain) is torch.optim.Adam and plain.defaults["weight_decay"] == 0.0
    assert of("AdamW", torch_adam=True, weight_decay=0.5).defaults["weight_decay"] == 0.5
    assert type(of("SGD", lr=0.1)) is torch.optim.SGD
    assert type(of("adagrad")) is torch.optim.Adagrad
    assert type(of("RMSprop")) is torch.optim.RMSprop
    for kind, text in (("MuSGD", "mup"), ("Nothing", "torch.optim"), ("lr", "torch")):
        with pytest.raises(zs.ConfigError, match=text):
            of(kind)
    with pytest.raises(zs.ConfigError, match="gradient_clipping"):
        of("Adam", max_grad_norm=1.0)
    with pytest.raises(zs.ConfigError, match="speed"):
        of("SGD", speed=1)
    parameters: Any = [torch.nn.Parameter(torch.ones(4))]
    assert type(optimizers.DeepSpeedCPUAdam(parameters, adamw_mode=False)) is torch.optim.Adam
    lion = optimizers.Lion(parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    parameters[0].grad = torch.tensor([1.0, -2.0, 0.0, 3.0])
    lion.step()
    _near(parameters[0].detach(), torch.tensor([0.85, 1.05, 0.95, 0.85]))


def _lamb(values: list[float], grads: list[list[float]], **options: Any) -> list[float]:
    """The weights after DeepSpeed's kernel (csrc/lamb/fused_lamb_cuda_kernel.cu) in numbers."""
    (beta1, beta2), count = options["betas"], len(values)
    m, v = [0.0] * count, [0.0] * count
    for step, grad in enumerate(grads, 1):
        m = [beta1 * a + (1 - beta1) * g for a, g in zip(m, grad, strict=True)]
        v = [beta2 * a + (1 - beta2) * g * g for a, g in zip(v, grad, strict=True)]
        eps = options["eps"]
        scale = [(a + eps) ** 0.5 if options["eps_inside_sqrt"] else a**0.5 + eps for a in v]
        update = [
            a / b + options["weight_decay"] * w for a, b, w in zip(m, scale, values, strict=True)
        ]
        weights, change = math.hypot(*values), math.hypot(*update)
        ratio = 1.0
        if weights != 0 and change != 0:
            ratio = min(max(weights / change, options["min_coeff"]), options["max_coeff"])
        rate = options["lr"]
        if options["bias_correction"]:
            rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        values = [w - rate * ratio * u for w, u in zip(values, update, strict=True)]
    return values


def test_lamb_has_the_numbers_of_deepspeeds_kernel_and_the_papers_direction() -> None:
    values, grads = [0.5, -2.0, 0.1, 3.0], [[0.3, -0.1, 2.0, 0.0], [1.0, 0.2, -0.5, 4.0]]
    plain: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}
    plain |= {"bias_correction": True, "eps_inside_sqrt": False}
    plain |= {"max_coeff": 10.0, "min_coeff": 0.01}
    changes: list[tuple[dict[str, Any], list[float]]] = [
        ({}, values), ({"weight_decay": 0.3}, values), ({"bias_correction": False}, values),
        ({"eps": 0.1}, values), ({"eps": 0.1, "eps_inside_sqrt": True}, values),
        ({"max_coeff": 0.5}, values), ({"min_coeff": 3.0}, values), ({}, [0.0] * 4),
    ]  # fmt: skip
    for change, start_ in changes:
        options = plain | change
        weights: Any = torch.nn.Parameter(torch.tensor(start_, dtype=torch.float64))
        lamb = optimizers.FusedLamb([weights], **options)
        for grad in grads:
            weights.grad = torch.tensor(grad, dtype=torch.float64)
            lamb.step()
        exact = torch.tensor(_lamb(start_, grads, **options), dtype=torch.float64)
        _near(weights.detach(), exact, rtol=1e-12, atol=1e-14)
        assert not torch.equal(weights.detach(), torch.tensor(start_, dtype=torch.float64))
    # algorithm 2 without decay: the first step goes lr |w| along m / sqrt(v), both corrected; here
    # the correction of the averages scales the rate, as in the kernel
    weights = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    before, weights.grad = weights.detach().clone(), torch.tensor([1.0, -2, 3, -4]).double()
    optimizers.FusedLamb([weights], lr=0.1, betas=(0.8, 0.9), eps=0.0).step()
    towards = weights.grad.sign() / 4**0.5
    factor = 0.1**0.5 / 0.2  # sqrt(1 - beta2) / (1 - beta1)
    expected = before - 0.1 * factor * before.norm() * towards
    _near(weights.detach(), expected, rtol=1e-12, atol=0)


def test_two_batch_sizes_give_the_third() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, expected in (
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 4), (32, 2, 4)),
        ((None, 4, 3), (48, 4, 3)),
        ((32, None, None), (32, 8, 1)),
        ((None, 4, "auto"), (16, 4, 1)),
    ):
        settings = zs.read_deepspeed(dict(zip(names, given, strict=True))).config()
        batch_ = complete_batch(settings, 4)
        assert (batch_.train, batch_.micro, batch_.steps) == expected, given
    for wrong in ((None, None, 2), (33, 4, None), (2, None, None), (0, 4, 1)):
        with pytest.raises(zs.ConfigError, match="batch"):
            complete_batch(zs.read_deepspeed(dict(zip(names, wrong, strict=True))).config(), 4)


def test_the_small_modules_do_what_their_names_say() -> None:
    loader = helpers.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    nested = {"a": [torch.ones(2)[:1]], "b": 3}
    copied = helpers.clone_tensors_for_torch_save(nested)
    assert copied["b"] == 3 and copied["a"][0].untyped_storage().nbytes() == 4
    weight = torch.ones(2)
    tied = helpers.clone_tensors_for_torch_save({"a": weight, "b": weight})
    assert tied["a"] is tied["b"] is not weight
    assert torch.device(helpers.get_accelerator().current_device_name()).type in ("cpu", "cuda")
    value = torch.ones(3, requires_grad=True)
    helpers.configure(checkpoint_in_cpu=True)
    assert helpers.is_configured()
    helpers.checkpoint(lambda x: x.exp().sum(), value).backward()
    assert value.grad is not None
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    assert start.set_z3_leaf_modules(module, [torch.nn.ReLU, "Linear"]) == list(module)
    tiled = zero.TiledLinear(6, 4, in_splits=2, out_splits=2, init_linear=torch.nn.Linear(6, 4))
    assert tiled(torch.ones(1, 6)).shape == (1, 4)
