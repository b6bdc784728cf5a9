"""What a step may cost the host, in the order of a CUDA run: how often it waits for the device, how
many operations it gives the device, and how many calls of Python that takes.

One process of a fake process group of 8 on CPU tensors, seen by the lane sanitizer
(tests/support/lane_sanitizer.py): a wait is an ``.item()``, a ``.tolist()``, a ``.cpu()``, a copy
between host and device that is not ``non_blocking``, an event or a collective that the host waits
for. Nothing is timed: all of it is counted, and the same on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.lane_sanitizer import LaneSanitizer
from tests.support.python_calls import count_calls
from zeroshard.core.precision import parse_dtype
from zeroshard.core.schedule import Reduces, Schedule
from zeroshard.runtime.engine import states_of

WORLD = 8
UNITS = 6
WIDTH = 16
DEVICE = torch.device("cpu")  # named as such: the sanitizer's device
ROWS: dict[str, dict[str, Any]] = {
    **{row: {} for row in ("ddp", "zero1", "zero2", "zero3", "zero3-keep")},
    **{row: {"node_size": 4} for row in ("hpz", "mics", "hfsdp")},
}
# What a step waits for where the optimizer cannot leave it out by itself, and in fp16: whether each
# unit's gradient is finite (runtime/late_finalize.py).
WAITS = ["tolist in LateFinalizer._named"]
# Operations per unit of eight parameters, zero3 less plain PyTorch. FSDP2 of torch 2.13 beside it:
# 3, 5, 0. Of the backward's 12, eight are a copy of each gradient, one zeroes the padding.
MOST_LAUNCHES = {"forward": 1.0, "backward": 12.0, "step": 1.5}
if torch.__version__ < (2, 13):
    MOST_LAUNCHES["backward"] += 1
# Calls of Python functions per unit and step, zero3 less plain PyTorch (FSDP2: 1,500).
MOST_CALLS = 266
MOST_CALLS_OF_LLAMA = 375  # of a decoder layer of Transformers', whose norm is not torch.nn's


class _Block(nn.Module):
    """Eight parameters in four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=DEVICE)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual, hidden = hidden, self.norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return residual + hidden


class _Training:
    """A model of `UNITS` blocks under one contender, and the parts of its step."""

    def __init__(
        self,
        contender: str,
        comm: dict[str, Any],
        precision: str = "fp32",
        *,
        fused: bool = True,
        offload: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(_Block() for _ in range(UNITS)))
        if contender == "fsdp2":
            for part in (*self.model, self.model):
                fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)))
        how = {"fused": True} if fused else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **how)  # type: ignore[arg-type]
        self.engine: zs.Engine | None = None
        if contender not in ("fsdp2", "plain"):
            self.engine = zs.shard(
                self.model,
                self.optimizer,
                policy=contender,
                units=[_Block],
                comm=zs.Comm(transport="nccl", **comm),
                precision=precision,
                offload=offload,
            )
        self.data = torch.randn(4, WIDTH, device=DEVICE)

    def forward(self) -> torch.Tensor:
        return self.model(self.data).pow(2).mean() * 1e-3  # finite in fp16 with its loss scale

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward(self.forward())
        self.update()


@contextmanager
def _watched() -> Iterator[LaneSanitizer]:
    sanitizer = LaneSanitizer()
    with fake_world(WORLD), sanitizer.watching():
        yield sanitizer


# ------------------------------------------------------------------------------ waits of the host


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", list(ROWS))
def test_the_host_waits_for_nothing_but_the_next_scale_of_fp16(row: str, precision: str) -> None:
    with _watched() as sanitizer:
        training = _Training(row, ROWS[row], precision)
        assert training.engine is not None
        training.step()
        for clips in (False, True):
            sanitizer.host_waits.clear()
            loss = training.forward()
            training.backward(loss)
            assert sanitizer.host_waits == []
            if clips:
                training.engine.clip_grad_norm_(1e-3)
            assert sanitizer.host_waits == []
            training.update()
            assert sanitizer.host_waits == (WAITS if precision == "fp16" else [])


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_the_norm_of_weighted_losses_is_no_wait(row: str) -> None:
    with _watched() as sanitizer:
        training = _Training(row, ROWS[row], "fp32")
        assert training.engine is not None
        for clips in (False, True):
            training.engine.backward(training.forward(), weight=3)
            sanitizer.host_waits.clear()
            if clips:
                training.engine.clip_grad_norm_(1e-3)
            training.update()
            assert sanitizer.host_waits == []


@pytest.mark.parametrize("comm", [{"ordered": True}, {"grad_codec": "int8"}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_nor_with_a_codec_or_an_order_and_once_without_a_fused_optimizer(
    comm: dict[str, Any], fused: bool
) -> None:
    with _watched() as sanitizer:
        training = _Training("zero3", comm, "bf16", fused=fused)
        training.step()
        sanitizer.host_waits.clear()
        training.step()
        assert sanitizer.host_waits == ([] if fused else WAITS)


@pytest.mark.parametrize("tier", [{"optimizer": "host"}, {"optimizer": "host", "grad": "host"}])
def test_updated_weights_leave_the_host_without_a_wait(tier: dict[str, Any]) -> None:
    with _watched() as sanitizer:
        training = _Training("zero3", {}, "bf16", offload=tier)
        training.step()
        sanitizer.host_waits.clear()
        training.step()
        assert training.engine is not None
        states_of(training.engine).join_step()
        assert [wait for wait in sanitizer.host_waits if wait.startswith("aten.copy_")] == []
        # of the step itself, which has to know, and of its thread, for gradients
        assert {"tolist in read_squares"} < set(sanitizer.host_waits)


def test_what_asks_the_device_is_counted() -> None:
    with _watched() as sanitizer:
        there = torch.ones(4, device=DEVICE)
        here = torch.ones(4)
        asked: dict[str, Callable[[], object]] = {
            "item": there[0].item,
            "tolist": there.tolist,
            "cpu": there.cpu,
            "copy": lambda: there.copy_(here),
            "bool": lambda: bool(there.sum() > 0),
        }
        for name, ask in asked.items():
            before = len(sanitizer.host_waits)
            ask()
            assert len(sanitizer.host_waits) == before + 1, name
        there.copy_(here, non_blocking=True)
        here.tolist()
        assert len(sanitizer.host_waits) == len(asked)


# ---------------------------------------------------------------------------- operations per unit


def _launches(contender: str) -> dict[str, Counter[str]]:
    """Return the operations of each part of the third step, by name; allocations are none."""
    with _watched() as sanitizer:
        training = _Training(contender, {}, "fp32")
        out = {}
        for _ in range(3):
            loss = None
            for part in MOST_LAUNCHES:
                sanitizer.launches.clear()
                if part == "forward":
                    loss = training.forward()
                elif part == "backward":
                    assert loss is not None
                    training.backward(loss)
                else:
                    training.update()
                out[part] = Counter(
                    name
                    for name in sanitizer.launches
                    if not name.startswith(("aten.empty", "aten.new_empty"))
                )
        return out


def test_a_unit_takes_no_more_operations_than_today_and_a_forward_fewer_than_fsdp2() -> None:
    counts = {name: _launches(name) for name in ("plain", "zero3", "fsdp2")}
    per_unit = {
        name: {
            part: (counts[name][part].total() - counts["plain"][part].total()) / UNITS
            for part in MOST_LAUNCHES
        }
        for name in ("zero3", "fsdp2")
    }
    own = per_unit["zero3"]
    assert all(own[part] <= most for part, most in MOST_LAUNCHES.items()), (per_unit, counts)
    assert own["forward"] < per_unit["fsdp2"]["forward"]


class _Operands(TorchDispatchMode):
    """Counts operations, and the bytes of the tensors that they are given."""

    count = num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.count += 1
            given = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.num_bytes += sum(one.nbytes for one in given)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "operand_bytes"), [("fp32", 8), ("bf16", 6), ("fp16", 6)])
def test_one_process_copies_or_adds_each_gradient_once_to_where_it_rests(
    precision: str, operand_bytes: int
) -> None:
    seen = {}
    for policy in (None, "ddp", "zero3"):
        torch.manual_seed(0)
        model, data = nn.Sequential(*(_Block() for _ in range(UNITS))), torch.randn(4, WIDTH)
        if policy is None:
            dtype = parse_dtype(precision)
            model, data = model.to(dtype), data.to(dtype)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            engine = zs.shard(model, optimizer, policy=policy, units=[_Block], precision=precision)
        for micro in range(2):  # the first rests, the second is added to it
            loss = model(data).float().pow(2).mean()
            with _Operands() as operands:
                loss.backward()
            seen[policy, micro] = operands.count, operands.num_bytes
            if policy is None:
                model.zero_grad()
        if policy is not None:
            assert "reduce_scatter" not in engine.traffic().calls
            engine.close()
    sizes = [parameter.numel() for parameter in _Block().parameters()]
    count, num_bytes = seen[None, 1]
    for row in ("ddp", "zero3"):
        (first, _), (second, of_second) = seen[row, 0], seen[row, 1]
        assert (first - count) / UNITS == len(sizes) + 1, seen  # padding is set to zero
        assert (second - count) / UNITS == len(sizes), seen
        assert (of_second - num_bytes) / UNITS / sum(sizes) == operand_bytes, seen


# -------------------------------------------------------------------------------- calls of Python


def _calls(contender: str) -> int:
    """Return how many Python functions the third step calls."""
    with fake_world(WORLD):
        training = _Training(contender, {})
        training.step()
        training.step()
        return count_calls(training.step)


def test_a_unit_takes_no_more_calls_of_python_than_today() -> None:
    calls = {name: _calls(name) for name in ("plain", "zero3")}
    per_unit = (calls["zero3"] - calls["plain"]) / UNITS
    assert per_unit <= MOST_CALLS, f"{per_unit:.0f} calls per unit and step"


def test_a_layer_of_llama_takes_no_more_calls_of_python_than_today() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "use_cache": False}
    heads = {"num_hidden_layers": UNITS, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids, calls = torch.randint(0, 64, (2, 8)), []
    with fake_world(WORLD):
        for sharded in (False, True):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            units = [type(model.model.layers[0])]
            if sharded:
                zs.shard(model, optimizer, units=units, comm=zs.Comm(transport="nccl"))

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            step()
            calls.append(count_calls(step))
    per_layer = (calls[1] - calls[0]) / UNITS
    assert per_layer <= MOST_CALLS_OF_LLAMA, f"{per_layer:.0f} calls per layer and step"


@pytest.mark.parametrize(("row", "most"), [("zero3", 0), ("hfsdp", UNITS)])
def test_a_step_brings_slices_of_other_nodes_where_a_column_rests_and_nothing_elsewhere(
    row: str, most: int
) -> None:
    with fake_world(WORLD):
        training = _Training(row, ROWS[row])
        assert training.engine is not None
        training.step()
        training.backward(training.forward())
        before = training.engine.traffic().calls
        training.update()
        after = training.engine.traffic().calls
        assert after["all_gather"] - before["all_gather"] == most
        training.engine.close()


# -------------------------------------------------------------------------------- what is repeated


def _decided(log: list[Any], kind: type, name: str) -> mock._patch[Any]:
    """Write down each call of a generator of commands, and what it has yielded."""
    original = getattr(kind, name)

    def call(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        event = [name, *map(str, args), str(options)]
        log.append(event)
        for command in original(self, *args, **options) or ():
            event.append(str(command))
            yield command

    return mock.patch.object(kind, name, call)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("row", ROWS)
def test_from_the_third_step_on_a_step_is_the_one_before(row: str, micro_batches: int) -> None:
    """Every event and every command: what a recorded step can stand for."""
    log: list[Any] = []
    names = {
        Schedule: "begin end_pass leave end_backward end_step need after_forward after_backward"
        " publish release_unused drop_ahead release_idle",
        Reduces: "make_room before handed_over finish",
    }
    with fake_world(WORLD), ExitStack() as stack:
        for kind, methods in names.items():
            for name in methods.split():
                stack.enter_context(_decided(log, kind, name))
        training = _Training(row, ROWS[row], "bf16")
        assert training.engine is not None
        steps = []
        for _ in range(5):
            log.clear()
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                with nullcontext() if last else training.engine.no_sync():
                    training.backward(training.forward())
            training.update()
            steps.append([list(event) for event in log])
        training.engine.close()
    assert steps[2] and steps[2] == steps[3] == steps[4]
