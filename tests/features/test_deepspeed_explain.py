"""``zeroshard config explain`` and DeepSpeed's ``initialize()`` decide alike: what one refuses, the
other does, for every documented key with values of every kind, and for random files.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.deepspeed_files import FILES
from tests.support.harness import run_ranks
from zeroshard.commands.config import explained
from zeroshard.deepspeed.keys.table import KEYS
from zeroshard.integrations import deepspeed

ODD: tuple[Any, ...] = (
    True, False, None, 0, 1, -1, 2.5, 1e9, "auto", "text", [], [1], {}, {"enabled": True},
)  # fmt: skip
TYPES = (
    "Adam", "AdamW", "adamw", "SGD", "Adagrad", "Lion", "Lamb", "OneBitAdam", "ZeroOneAdam",
    "OneBitLamb", "Muon", "MuAdam", "RMSprop", "Rprop", "NAdam", "LBFGS", "SparseAdam", "Adafactor",
    "ASGD", "Optimizer", "lr_scheduler", "nothing", "auto", 3, None,
)  # fmt: skip
PARAMS: tuple[Any, ...] = (
    None, {}, [], "fast", {"lr": 0.01}, {"lr": "auto"}, {"lr": -1.0}, {"lr": "0.1"}, {"lr": None},
    {"betas": [0.9, 0.99]}, {"betas": [0.9]}, {"betas": 0.9}, {"eps": "small"}, {"speed": 3},
    {"weight_decay": 0.1}, {"momentum": 0.9}, {"torch_adam": True}, {"adam_w_mode": False},
    {"bias_correction": False}, {"max_grad_norm": 1.0}, {"amsgrad": True}, {"fused": True},
)  # fmt: skip
SCHEDULES: tuple[tuple[Any, Any], ...] = (
    ("WarmupLR", {}), ("WarmupLR", None), ("WarmupLR", []), ("WarmupLR", {"warmup_num_steps": 0}),
    ("WarmupLR", {"warmup_num_steps": 1e3}), ("WarmupLR", {"warmup_type": "cubic"}),
    ("WarmupLR", {"warmup_max_lr": "auto"}), ("WarmupLR", {"warmup_max_lr": "fast"}),
    ("WarmupLR", {"warmup_max_lr": [0.1]}), ("WarmupLR", {"speed": 1}),
    ("WarmupDecayLR", {}), ("WarmupDecayLR", {"total_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": "many"}), ("WarmupDecayLR", {"total_num_steps": None}),
    ("WarmupCosineLR", {"total_num_steps": 10}), ("WarmupCosineLR", {"total_num_steps": [1]}),
    ("OneCycle", {}), ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_step_size": "x"}),
    ("LRRangeTest", {}), ("LRRangeTest", {"lr_range_test_step_size": 0}),
    ("LRRangeTest", {"lr_range_test_staircase": True}), ("StepLR", {"step_size": 10}),
    ("nothing", {}), ("auto", {}), (None, {}), (7, {}),
)  # fmt: skip
SIZES: tuple[dict[str, Any], ...] = (
    {}, {"train_batch_size": 8}, {"train_batch_size": 0}, {"train_batch_size": 7.5},
    {"train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps": 2},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 7, "gradient_accumulation_steps": 2},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
)  # fmt: skip
# a file that says "auto" is for who fills it in; initialize() alone has nothing to begin with
LEFT_OPEN = ("train_batch_size",)


def _with(data: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(data)
    *sections, last = name.replace("*", "lr").split(".")
    within = out
    for section in sections:
        inner = within.setdefault(section, {})
        within = (
            inner if isinstance(inner, dict) else within.update({section: {}}) or within[section]
        )
    within[last] = value
    return out


def _values(name: str) -> list[Any]:
    """Its default, values of every kind, and of a number of ranks only those that one rank has."""
    own = {
        "device": ["none", "cpu"], "nvme_path": ["/nowhere"], "stage": [2, 3, 4],
        "communication_data_type": ["fp16", "bf16", "fp32"], "grad_accum_dtype": ["bf16", "fp32"],
    }.get(name.rpartition(".")[2], [])  # fmt: skip
    place = 2 * list(KEYS).index(name)
    odd = [ODD[(place + shift) % len(ODD)] for shift in range(2)]
    some = [KEYS[name].default, *odd, *own]
    many = {"zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"}
    if name in many:
        some = [one for one in some if one not in (2.5, 1e9)]
    return [one for one in some if not (one == "auto" and name in LEFT_OPEN)]


def every_key() -> Iterator[dict[str, Any]]:
    base = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    for name in KEYS:
        for value in _values(name):
            yield _with(base, name, value)


def sections() -> Iterator[dict[str, Any]]:
    base: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    for kind in TYPES:
        for params in ({"lr": 0.01}, None):
            yield base | {"optimizer": {"type": kind, "params": params}}
    for params in PARAMS:
        for kind in ("Adam", "Lion", "SGD"):
            yield base | {"optimizer": {"type": kind, "params": params}}
    for kind, params in SCHEDULES:
        for more in ({"optimizer": adam}, {}):
            yield base | more | {"scheduler": {"type": kind, "params": params}}
    for odd in ODD:
        yield base | {"optimizer": odd}
        yield base | {"scheduler": odd}
    for sizes in SIZES:
        yield {"zero_optimization": {"stage": 2}} | sizes
    yield {"zero_optimization.stage": 2, "train_batch_size": 8}
    yield {"zero_optimization": None, "zero_optimization.stage": 2, "train_batch_size": 8}
    yield {"zero_optimization": {}, "zero_optimization.stag": 2, "train_batch_size": 8}


def random_files(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    names = [name for name in KEYS if not name.startswith(("optimizer", "scheduler"))]
    for _ in range(count):
        data: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {}}
        data["zero_optimization"]["stage"] = draw.choice((0, 1, 2, 3))
        for name in draw.sample(names, draw.randint(2, 5)):
            # mostly values of the right kind: else each file is refused
            kinds = [one for one in _values(name) if not KEYS[name].kind(one)] or [None]
            data = _with(data, name, draw.choice(kinds))
        if draw.random() < 0.7:
            params = {"lr": 0.01, "weight_decay": 0.1}
            data["optimizer"] = {"type": draw.choice(TYPES[:6]), "params": params}
        yield data


def _refused_by_initialize(data: dict[str, Any]) -> bool:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)  # for codecs of frozen weights
    try:
        engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(data))
    except zs.ConfigError as error:
        assert str(error).strip(), data
        # and the model is the one that it was
        model(torch.ones(1, 4)).sum().backward()
        assert not hasattr(model[0].weight, "ds_id")
        return True
    engine.destroy()
    return False


def _disagreements(rank: int, world: int, files: list[dict[str, Any]]) -> list[str]:
    out = []
    for data in files:
        form, findings = explained(data)
        told = [one.line for one in findings if one.verdict == "refused"]
        try:
            refused = _refused_by_initialize(data)
        except Exception as error:  # a raw error is not a verdict
            out.append(f"{data}: {type(error).__name__}: {error}")
            continue
        if form == "deepspeed" and bool(told) != refused:
            out.append(f"{data}: explain {told}, initialize() {'refuses' if refused else 'takes'}")
    return out


@pytest.mark.parametrize("source", ["every_key", "sections", "random_files"])
def test_explain_refuses_what_initialize_refuses_and_nothing_else(source: str) -> None:
    made = random_files(150) if source == "random_files" else globals()[source]()
    files = list(made)
    assert len(files) >= 150
    [found] = run_ranks(1, _disagreements, files)
    assert found == [], f"{len(found)} of {len(files)}:\n" + "\n".join(found[:30])


def _refused_before_the_model_is_changed(rank: int, world: int) -> None:
    """Of a file that explain takes: rates for another number of param groups than there are."""
    data: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}},
    }
    assert not [one for one in explained(data)[1] if one.verdict == "refused"]
    model = torch.nn.Linear(4, 2)
    with pytest.raises(zs.ConfigError, match="has 2 rates, the optimizer 1 param groups"):
        deepspeed.initialize(model=model, config=data)
    zs.shard(model).close()  # refuses one that is sharded
    groups = [{"params": [one]} for one in model.parameters()]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=data)
    engine.destroy()
    # an object takes the place of its section, whatever that says
    data["optimizer"], data["scheduler"] = {"type": "MuAdam"}, {"type": "nothing"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=data
    )
    engine.destroy()


def test_what_is_known_only_with_the_model_is_refused_before_it_is_changed() -> None:
    run_ranks(1, _refused_before_the_model_is_changed)


def test_files_of_the_documentation_are_explained_as_initialize_takes_them() -> None:
    for name, data in FILES.items():
        form, findings = explained(data | {"train_batch_size": 16})
        assert form == "deepspeed"
        assert [one.line for one in findings if one.verdict == "refused"] == [], name


def test_a_number_that_only_a_later_step_needs_is_refused_never_stumbled_over() -> None:
    base = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    for name in ("total_num_steps", "warmup_num_steps", "cos_min_ratio"):
        for odd in ("many", [1, "a"], float("nan"), True):
            params = {"total_num_steps": 10, "warmup_num_steps": 2, name: odd}
            data = base | {"scheduler": {"type": "WarmupCosineLR", "params": params}}
            [told] = [one for one in explained(data)[1] if one.verdict == "refused"]
            assert told.key == "scheduler.type" and f"{name}=" in told.why


def test_batch_sizes_are_refused_only_where_no_number_of_ranks_has_them() -> None:
    steps = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
    for train, word in ((8, ""), (12, ""), (10, "is not train_micro"), ("auto", "")):
        data = {"zero_optimization": {"stage": 2}, "train_batch_size": train} | steps
        told = [one.why for one in explained(data)[1] if one.verdict == "refused"]
        assert len(told) == bool(word) and word in "".join(told), train


def test_what_initialize_makes_is_said_to_be_honoured() -> None:
    data = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR"},
    }
    said = {one.key: one for one in explained(data)[1]}
    assert said["optimizer.type"].verdict == said["scheduler.type"].verdict == "honoured"
    assert said["optimizer.type"].becomes == "torch.optim.adamw.AdamW"
    assert said["optimizer.params.lr"].verdict == "honoured"
    lamb = explained(data | {"optimizer": {"type": "Lamb"}})[1]
    [said_of] = [one for one in lamb if one.key == "optimizer.type"]
    assert said_of.becomes == "zeroshard.deepspeed.optimizers.FusedLamb, ownership='whole'"
    one_bit = explained(data | {"optimizer": {"type": "OneBitLamb"}})[1]
    [refused] = [one for one in one_bit if one.verdict == "refused"]
    assert refused.key == "optimizer.type"
    assert refused.line.startswith("optimizer.type='OneBitLamb': ")
