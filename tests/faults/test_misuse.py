"""Misuse is answered with one clear line that names the parameter or the option, on every rank,
before anything is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import ROWS, batch, make_model, make_sharded, take_steps, two_groups
from zeroshard.errors import ConfigError, PlanMismatch, StateError


def _refused(
    message: str, model: nn.Module | None = None, optimizer: Any = None, **options: Any
) -> None:
    """Expect ConfigError, one line, and a model that still trains."""
    model = make_model() if model is None else model
    with pytest.raises(ConfigError, match=message) as caught:
        zs.shard(model, optimizer, **options)
    assert "\n" not in str(caught.value), str(caught.value)


# ---------------------------------------------------------------------------------------- the model


def test_a_model_that_is_sharded_already() -> None:
    model = make_model()
    engine = zs.shard(model)
    _refused(r"Net is sharded already: call engine.close\(\)", model)
    _refused("submodule '0' is sharded already", nn.Sequential(model, nn.Linear(2, 2)))
    engine.close()
    zs.shard(model).close()


@on_ranks(2)
def test_a_model_wrapped_in_ddp() -> None:
    _refused(
        r"wrapped in DistributedDataParallel: .*model.module", DistributedDataParallel(make_model())
    )


def test_a_model_that_fsdp_manages() -> None:
    class Managed(nn.Linear):
        def _get_fsdp_state(self) -> None: ...

    _refused("module '0' is managed by FSDP", nn.Sequential(Managed(2, 2)))


def test_a_model_without_parameters() -> None:
    _refused("ReLU has no parameters", nn.ReLU())


def test_parameters_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    _refused(r"on 2 devices \('0.weight' on cpu, '1.weight' on meta\)", model)


def test_sparse_gradients_and_sparse_parameters() -> None:
    _refused(
        r"module '0' makes sparse gradients \(sparse=True\)",
        nn.Sequential(nn.Embedding(5, 3, sparse=True)),
    )
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    _refused("parameter 'weight' is sparse", model)
    model = nn.Module()
    model.table, model.scale = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(3))
    # not to be known from the modules; the gradient of the scale comes first
    model.forward = lambda x: (
        nn.functional.embedding(x, model.table, sparse=True) * model.scale
    ).sum()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), units=[nn.Module])
    with pytest.raises(
        ConfigError, match=r"parameter 'table' has a sparse gradient, .*sparse=False"
    ):
        model(torch.tensor([1, 2])).backward()
    engine.reset()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_of_a_dtype_that_is_not_served(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3)
    model.bias = nn.Parameter(torch.zeros(3).to(dtype))
    _refused("parameter 'bias' is (complex64|float8_e4m3fn|fp8), which is not supported", model)


def test_parameters_narrower_than_the_precision() -> None:
    _refused(
        r"parameter 'embed.weight' is bf16 but precision computes in fp32: pass precision='bf16'",
        make_model().bfloat16(),
    )


# ------------------------------------------------------------------------------------ the optimizer


def test_an_optimizer_of_another_model() -> None:
    _refused(
        "optimizer param group 0 holds a parameter of shape .* not one of this model's",
        optimizer=two_groups(make_model()),
    )


def test_an_optimizer_with_parameters_missing() -> None:
    model = make_model()
    _refused(
        r"parameter 'embed.weight' \(and 1 more\) is trainable but not in the optimizer",
        model,
        torch.optim.SGD(list(model.parameters())[1:-1], lr=1.0),
    )


def test_something_that_is_not_an_optimizer() -> None:
    model = make_model()
    _refused(
        "optimizer is a LambdaLR, not a torch.optim.Optimizer",
        model,
        torch.optim.lr_scheduler.LambdaLR(two_groups(model), lambda step: 1.0),
    )


class NormedStep(torch.optim.SGD):
    """Scales by the norm of the whole parameter, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad / p.grad.norm())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS cannot be sharded: .*dot products",
        ),
        (
            lambda model: torch.optim.Adafactor(model.parameters()),
            "Adafactor cannot be sharded: .*row and column",
        ),
        (
            lambda model: torch.optim.Muon(list(model.parameters())),
            "Muon cannot be sharded: it orthogonalises whole matrices",
        ),
        (
            lambda model: torch.optim.SparseAdam(model.parameters()),
            "SparseAdam cannot be sharded: .*sparse",
        ),
        (lambda model: NormedStep(model.parameters(), lr=0.1), "NormedStep .* is not elementwise"),
    ],
)
def test_optimizers_whose_step_is_not_elementwise(
    make: Callable[[nn.Module], Any], why: str
) -> None:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    _refused(f"optimizer {why}", model, make(model))
    engine = zs.shard(model)
    with pytest.raises(ConfigError, match=f"optimizer {why}"):
        engine.attach(make(model))
    engine.close()


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage=4 does not exist: 0 .*, 1, 2 or 3"),
        ({"stage": "three"}, "stage"),
        ({"policy": "zero4"}, "zero4"),
        ({"policy": "hpz"}, "policy='hpz' needs to know the nodes"),
        ({"stage": 2, "policy": "zero3"}, "stage=2 and policy='zero3' were both given"),
        ({"precision": "fp8"}, "precision='fp8' is not one of"),
        (
            {"prefetch_byte": 5},
            "'prefetch_byte' is not a keyword of shard.*did you mean 'prefetch_bytes'",
        ),
        ({"stall_timeout": 5}, "'stall_timeout' .* did you mean 'stall_timeout_s'"),
        ({"prefetch_bytes": -1}, "prefetch_bytes"),
        ({"stall_timeout_s": 0}, "stall_timeout_s"),
        (
            {"comm": {"transprt": "gloo"}},
            "'comm.transprt' is not a key of comm; did you mean 'transport'",
        ),
        ({"comm": {"transport": "mpi"}}, r"comm\.transport"),
        ({"comm": {"weight_codec": "int9"}}, "comm.weight_codec: codec .int9. is not one of"),
        (
            {"comm": zs.Comm(transport="gloo")},
            "'gloo' needs torch.distributed: call zeroshard.init_distributed",
        ),
        ({"offload": {"optimizer": "disk"}}, "offload.optimizer='disk' needs offload.disk_path"),
        (
            {"offload": {"optimizer": "cpu"}},
            r"offload.optimizer='cpu' is not a tier: 'device', 'host' .* or 'disk' \(NVMe\)",
        ),
        ({"offload": {"weight": "nvme"}}, "offload.weight='nvme' is not a tier"),
        (
            {"offload": {"optimiser": "host"}},
            "'offload.optimiser' is not a key of offload; did you mean 'optimizer'",
        ),
        ({"offload": zs.Offload(fraction=0.5)}, "offload.fraction has no effect"),
        ({"units": ["blocks.9"]}, "units: 'blocks.9' matches no module of Net"),
        ({"units": [nn.Conv2d]}, "units: 'Conv2d' matches no module"),
        (
            {"units": lambda name, module: isinstance(module, nn.Dropout)},
            "units: the callable chose no module of Net",
        ),
        ({"config": {"stagee": 3}}, "'stagee' .* did you mean 'stage'"),
        ({"config": {"stage": 7}}, "stage=7 does not exist"),
        ({"config": 3}, "config must be .*, not int"),
        ({"config": "/nowhere/config.json"}, "config='/nowhere/config.json' cannot be read"),
        ({"mesh": object()}, "mesh is a object, not a DeviceMesh"),
        ({"sync_from": 5}, "sync_from=5 is not a rank"),
    ],
    ids=lambda value: (
        re.sub(r"0x[0-9a-f]+|\W+", "-", str(value))[:40] if isinstance(value, dict) else ""
    ),
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    _refused(message, **options)


def test_configuration_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{stage: 3}")
    _refused(rf"config='{path}' is not JSON", config=str(path))
    path.write_text("[3]")
    _refused("config must be .* a JSON object, not list", config=path)
    path.write_text(json.dumps({"stage": 2, "comm": {"trnsport": "gloo"}}))
    _refused("'comm.trnsport' .* did you mean 'transport'", config=path)


def test_configurations_survive_json_and_keywords_go_before_them(tmp_path: Path) -> None:
    config = zs.Config(
        stage=2,
        precision=zs.Precision(torch.bfloat16, torch.float32),
        comm=zs.Comm(transport="gloo"),
        units=["blocks.1"],
        prefetch_bytes=99,
    )
    assert zs.Config.from_json(config.to_json()) == config
    path = tmp_path / "config.json"
    path.write_text(zs.Config(stage=2).to_json())
    for source in (
        path,
        str(path),
        json.loads(path.read_text()),
        zs.Config.from_json(path.read_text()),
    ):
        engine = zs.shard(make_model(), config=source)
        assert engine.policy.name == "zero2"
        engine.close()
        engine = zs.shard(make_model(), config=source, policy="zero1")
        assert engine.policy.name == "zero1"
        engine.close()
    with pytest.raises(ConfigError, match="no JSON form"):
        zs.Config(units=[nn.Linear]).to_json()
    with pytest.raises(ConfigError, match="is not JSON"):
        zs.Config.from_json("{")


def test_shard_before_a_process_group_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    _refused(
        r"WORLD_SIZE is set but there is no process group: call zeroshard.init_distributed\(\)"
        r" before shard\(\)"
    )


def test_shard_before_a_process_group_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    _refused(r"mpirun's, Slurm's or SkyPilot's is set but there is no process group: call")


# -------------------------------------------------------------------------------- ranks that differ


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@on_ranks(2)
def test_ranks_that_differ_are_told_the_first_difference_before_anything_is_changed(
    rank: int, transport: str
) -> None:
    def told(message: str, *, make: Callable[[], nn.Module] = make_model, **options: Any) -> None:
        model = make()
        with pytest.raises(PlanMismatch, match=message) as caught:
            zs.shard(model, two_groups(model), **{"comm": zs.Comm(transport=transport), **options})
        assert "\n" not in str(caught.value)

    both = r"rank 0: .*; rank 1: .*"
    told(r"first about 'policy': rank 0: policy = zero2; rank 1: policy = zero3", stage=2 + rank)
    told(rf"first about 'precision': {both}", precision=("fp32", "bf16")[rank])
    told(rf"first about 'prefetch_bytes': {both}", prefetch_bytes=1000 + rank)
    told(r"first about 'unit blocks.1[^']*'|first about 'unit", units=[f"blocks.{rank + 1}"])
    told(
        r"parameter embed.weight = \(37, 19\).*parameter embed.weight = \(37, 20\)",
        make=lambda: make_model(width=19 + rank),
    )
    told(r"blocks.2.norm.weight", make=lambda: make_model(layers=2 + rank))

    def with_lr(lr: float, make: Any = torch.optim.AdamW) -> None:
        model = make_model()
        zs.shard(model, make(model.parameters(), lr=lr), comm=zs.Comm(transport=transport))

    with pytest.raises(
        PlanMismatch,
        match=r"optimizer param group 0: lr = 0\.1; rank 1: optimizer param group 0: lr = 0\.2",
    ):
        with_lr(0.1 * (1 + rank))
    with pytest.raises(PlanMismatch, match="rank 0: optimizer = SGD; rank 1: optimizer = Adam"):
        with_lr(0.1, (torch.optim.SGD, torch.optim.Adam)[rank])

    def seeded() -> nn.Module:
        model = make_model()
        with torch.no_grad():
            model.norm.weight[3] += rank
        return model

    told(r"first about 'initial value of norm.weight': .*same seed.*sync_from=0", make=seeded)

    def frozen() -> nn.Module:
        model = make_model()
        model.blocks[2].up.bias.requires_grad_(rank == 0)
        return model

    told(r"blocks.2.up.bias = \(76,\) fp32 trained; rank 1: .* frozen", make=frozen)
    model = make_model()
    if rank == 1:  # one rank's own mistake is everybody's error
        _refused("'stagee' is not a keyword", model, stagee=3)
    else:
        with pytest.raises(PlanMismatch, match="rank 1 refused: 'stagee' is not a keyword"):
            zs.shard(model)
    engine = zs.shard(model, comm=zs.Comm(transport=transport))  # nothing was changed
    engine.close()


# --------------------------------------------------------------------------------- the wrong moment


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_step_without_backward(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    before = engine.full_state_dict(rank0_only=False)
    told = r"nothing to clip or to step, without a gradient on any rank: call loss.backward\(\)"
    for call in (optimizer.step, optimizer.step, lambda: engine.clip_grad_norm_(1.0)):
        with pytest.raises(StateError, match=told):
            call()
    model(*batch(rank, 0)).backward()
    optimizer.zero_grad()
    with pytest.raises(StateError, match="without a gradient"):  # thrown away before the step
        optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model(*batch(rank, 0)).backward()
    optimizer.step()
    engine.close()


def test_fp16_needs_the_engines_backward() -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, precision="fp16")
    model(*batch(0, 0)).backward()
    with pytest.raises(
        StateError, match=r"'fp16' needs a scaled loss: call engine.backward\(loss\)"
    ):
        optimizer.step()
    with pytest.raises(StateError, match="scaled otherwise than an earlier one's"):
        engine.backward(model(*batch(0, 0)))
    engine.reset()
    engine.backward(model(*batch(0, 0)))
    optimizer.step()
    engine.close()


def test_a_tensor_that_is_no_parameter_of_this_model() -> None:
    engine = zs.shard(make_model())
    with pytest.raises(
        ConfigError, match=r"a parameter of shape \(2,\) is not one of this model's"
    ):
        engine.full_grad(nn.Parameter(torch.zeros(2)))
    with (
        pytest.raises(ConfigError, match=r"a parameter of shape \(2,\) is not one of this model's"),
        engine.gathered([nn.Parameter(torch.zeros(2))]),
    ):
        pass


# -------------------------------------------------------------------- writes to released parameters


def _assign(parameter: nn.Parameter) -> None:
    parameter[0] = 1.0


def _half(parameter: nn.Parameter) -> None:
    parameter[:1].fill_(2.0)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1.0),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.constant_": lambda p: nn.init.constant_(p, 3.0),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "mul_": lambda p: p.mul_(2.0),
    "add_": lambda p: p.add_(torch.ones(p.shape)),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.uniform_": lambda p: nn.init.uniform_(p),
    "assignment": _assign,
    "part": _half,
    "a detached view": lambda p: (
        p.detach().view(-1)[:1].fill_(0.0) if p.numel() == 1 else p.detach().fill_(0.0)
    ),
    "data replaced": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "copy_ of one": lambda p: p.copy_(torch.tensor(1.0)),
}
STRICT: dict[str, Callable[[nn.Parameter], object]] = {
    "data.fill_": lambda p: p.data.fill_(1.0),
    "data.zero_": lambda p: p.data.zero_(),
    "data assignment": lambda p: _assign(p.data),
    "data.numpy": lambda p: p.data.numpy().fill(1.0) if p.numel() == 1 else p.data.fill_(3.0),
}


class Gained(nn.Module):
    """A parameter of one element, one of integers, one of several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(7, 3)
        self.levels = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * self.linear(x)).sum() + self.levels.sum()


@pytest.mark.parametrize("row", ["zero3"])
@on_ranks(2)
def test_writing_to_a_released_parameter_by_any_way_is_an_error(row: str) -> None:
    torch.manual_seed(0)
    model = Gained()
    x = torch.ones(2, 7)
    engine = zs.shard(model, policy=row, strict=True)
    expected = model(x).item()
    for how, write in {**WRITES, **STRICT}.items():
        for name in ("gain", "linear.weight", "linear.bias", "levels"):
            parameter = model.get_parameter(name)
            if "init" in how and name == "levels":
                continue
            with (
                torch.no_grad(),
                pytest.raises(
                    StateError,
                    match=(
                        rf"parameter '{name}' (was written to while it was released|rests sharded)"
                    ),
                ),
            ):
                write(parameter)
            assert model(x).item() == expected, (how, name)
            # as code in C++ would, past the parameter's own guard
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                try:
                    write(parameter)
                except RuntimeError:
                    # torch refuses: more than one element refers to a single memory location
                    assert parameter.numel() > 1, (how, name)
                    continue
            with pytest.raises(
                StateError,
                match=(
                    rf"parameter '{name}' was written to while it was released, and the write is"
                    r" lost: .*gathered\(writeback=True\)"
                ),
            ):
                model(x)
            engine.reset()
            assert model(x).item() == expected, (how, name)
    engine.close()


def test_a_released_parameter_has_its_metadata_and_reads_as_nan_past_its_guard() -> None:
    model = Gained()
    like = {
        name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()
    }
    engine = zs.shard(model)
    assert {
        name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()
    } == like
    with torch._C.DisableTorchFunctionSubclass():
        assert (
            model.linear.weight.isnan().all()
            and (model.levels == torch.iinfo(torch.int64).max).all()
        )
    engine.close()
    assert torch.equal(model.levels, torch.arange(5))


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_writing_to_a_gathered_parameter_is_kept_or_an_error(rank: int, row: str) -> None:
    """Edits without writeback are kept (rows that step everything everywhere) or are an error:
    never lost in silence.
    """
    model, optimizer, engine = make_sharded(row)
    take_steps(rank, 1, model, optimizer)

    def edit() -> None:
        with engine.gathered(model.head.weight), torch.no_grad():
            model.head.weight.mul_(0.5)

    if row in ("zero3", "zero3-keep"):
        with pytest.raises(
            StateError, match=r"parameter 'head.weight' was written to while it was gathered"
        ):
            edit()
        engine.reset()
    else:
        value = engine.full_state_dict(rank0_only=False)["head.weight"]
        edit()
        assert torch.equal(engine.full_state_dict(rank0_only=False)["head.weight"], value * 0.5)
    model(*batch(rank, 0)).backward()
    model.embed.weight.data = torch.zeros_like(model.embed.weight)
    with pytest.raises(StateError, match=r"parameter 'embed.weight' was written to"):
        optimizer.step()
        model(*batch(rank, 0))
    engine.reset()
    engine.close()


# ----------------------------------------------------------------------- modules that are not plain


def test_something_that_is_not_a_module() -> None:
    for thing, kind in (
        ([make_model()], "list"),
        (make_model().parameters(), "generator"),
        (make_model().forward, "method"),
    ):
        _refused(f"model is a {kind}, not a torch.nn.Module", thing)  # type: ignore[arg-type]


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = make_model()
    _refused(r"on the meta device and has no values: .*deferred_init\(\)", model)


def test_a_lazy_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
    _refused(
        r"parameter '1.weight' belongs to a lazy module .*run the model once",
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    model(torch.ones(2, 3))
    zs.shard(model).close()


def test_a_tensor_subclass_that_wraps_others_is_refused_by_name() -> None:
    wrapped = TwoTensor(torch.ones(3, 3), torch.ones(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(wrapped)
    _refused(r"parameter '1\.weight' is a TwoTensor, .*put a plain tensor in its place", model)
    model[1] = nn.Linear(3, 3)
    model.register_buffer("table", wrapped)
    _refused(r"buffer 'table' is a TwoTensor, .*put a plain tensor in its place", model)
    model.table = torch.ones(3, 3)
    plain = torch.ones(3, 3).as_subclass(type("Named", (torch.Tensor,), {}))
    model[1].weight = nn.Parameter(plain)  # has memory of its own
    zs.shard(model).close()


def test_a_traced_or_scripted_module() -> None:
    for make in (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 3))):
        _refused(
            "module '0' is traced or scripted",
            nn.Sequential(make(nn.Linear(3, 3)), nn.Linear(3, 3)),
        )
        zs.shard(nn.Sequential(make(nn.ReLU()), nn.Linear(3, 3))).close()


def test_a_model_wrapped_in_data_parallel() -> None:
    _refused(r"wrapped in DataParallel: .*model.module", nn.DataParallel(nn.Linear(3, 3)))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@on_ranks(2)
def test_ddp_and_data_parallel_around_a_sharded_model(row: str) -> None:
    model, _, engine = make_sharded(row)
    for wrap in (DistributedDataParallel, lambda model: model._replicate_for_data_parallel()):
        with pytest.raises(
            StateError,
            match="Net is sharded and cannot be wrapped in DistributedDataParallel or DataParallel",
        ):
            wrap(model)
    engine.close()
    DistributedDataParallel(model)


# --------------------------------------------------------------------------------------- one memory


def test_two_parameters_over_one_memory_are_refused_by_name() -> None:
    for view in (lambda weight: weight, lambda weight: weight.t(), lambda weight: weight[1:]):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(view(model[0].weight.data))
        _refused(
            "parameter '1.weight' lies in the memory of parameter '0.weight', .*use one"
            " nn.Parameter in both places",
            model,
        )
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("table", model[0].weight.detach()[2])
    _refused("buffer 'table' lies in the memory of parameter '0.weight'", model)
    with zs.deferred_init():
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        model[1].weight = nn.Parameter(model[0].weight.data.t())
    _refused("parameter '1.weight' lies in the memory of parameter '0.weight'", model)


def test_parameters_that_lie_side_by_side_in_one_memory_are_not_tied() -> None:
    flat = torch.arange(24.0)
    model = nn.Module()
    model.columns = nn.ParameterList([flat[:16].view(4, 4)[:, :2], flat[:16].view(4, 4)[:, 2:]])
    model.rest = nn.Parameter(flat[16:])
    model.tied = model.rest
    zs.shard(model).close()
    assert (
        torch.equal(model.columns[1], torch.arange(16.0).view(4, 4)[:, 2:])
        and model.tied is model.rest
    )
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen[1].weight = nn.Parameter(frozen[0].weight.data)
    zs.shard(frozen.requires_grad_(False)).close()


# -------------------------------------------------------------------- models that change afterwards


def _append(model: nn.Module) -> None:
    model.blocks.append(nn.LayerNorm(19))


def _replace_module(model: nn.Module) -> None:
    model.head = nn.Linear(19, 37, bias=False)


def _replace_parameter(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.zeros(37, 19))


def _adapt(model: nn.Module) -> None:
    model.head.register_parameter("lora", nn.Parameter(torch.zeros(3)))


def _take_out(model: nn.Module) -> None:
    model.head = nn.Identity()


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@on_ranks(2)
def test_a_model_that_changed_after_shard_is_refused_by_name_at_the_next_step(
    rank: int, row: str
) -> None:
    for change, name in (
        (_append, "'blocks.4.weight' came into the model after shard"),
        (_replace_module, "'head.weight' came into the model after shard"),
        (_replace_parameter, "'head.weight' came into the model after shard"),
        (_adapt, "'head.lora' came into the model after shard"),
        (_take_out, "'head.weight' was taken out of the model after shard"),
    ):
        model, optimizer, engine = make_sharded(row)
        model(*batch(rank, 0)).backward()
        change(model)
        with pytest.raises(StateError, match=f"parameter {name}.*engine.close") as caught:
            optimizer.step()
        assert "\n" not in str(caught.value)
        engine.reset()
        engine.close()
    model, optimizer, engine = make_sharded(row)
    model.head.register_parameter("shift", nn.Parameter(torch.zeros(3), requires_grad=False))
    for step in range(2):
        model(*batch(rank, step)).backward()
        optimizer.step()  # a frozen parameter that came later is nobody's to train
    engine.close()


def test_stepping_an_optimizer_made_after_shard_names_attach() -> None:
    for stage in (1, 3):
        model = make_model()
        zs.shard(model, stage=stage)
        model(*batch(0, 0)).backward()
        for make in (torch.optim.AdamW, torch.optim.SGD):
            with pytest.raises(StateError, match=r"engine.attach\("):
                make(model.parameters()).step()


def test_configurations_that_are_built_by_hand_are_refused_in_one_line_too() -> None:
    for make, message in (
        (
            lambda: zs.Offload(optimizer="cpu"),
            "offload.optimizer='cpu' is not a tier: 'device', 'host' .* or 'disk'",
        ),
        (
            lambda: zs.Offload(optimiser="host"),
            "'offload.optimiser' is not a key of offload; did you mean 'optimizer'",
        ),
        (lambda: zs.Comm(transport="mpi"), "comm.transport: Input should be"),
        (lambda: zs.Config(stage=7), "stage=7 does not exist"),
        (lambda: zs.Config(offload={"weight": "nvme"}), "offload.weight='nvme' is not a tier"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_arguments_of_save_and_load_that_are_no_such_thing_are_named(tmp_path: Path) -> None:
    model = make_model()
    engine = zs.shard(model)
    for call, message in (
        (
            lambda: zs.save(engine, tmp_path, step=0),
            (
                r"engine is a PosixPath, not the zeroshard.Engine .*\(directory comes first, then"
                r" engine\)"
            ),
        ),
        (lambda: zs.load(tmp_path, model), "engine is a Net, not the zeroshard.Engine"),
        (lambda: zs.save(3, engine, step=0), "directory is a int, not a path"),
        (
            lambda: zs.save(tmp_path, engine, step=0, states={"lr": 3}),
            r"states\['lr'\] is a int, which has no state_dict\(\) .*extra=",
        ),
        (lambda: zs.load(tmp_path, engine, states=[3]), "states is a list, not a dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    engine.close()


@on_ranks(2)
def test_in_bf16_torchs_error_about_a_module_that_came_later_names_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    model.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(2, 4))
    engine.reset()
    del model[2]
    engine.backward(model(torch.ones(2, 4)).sum())
    engine.close()
    note = "".join(caught.value.__notes__)
    assert "'2.weight' came into the model after shard()" in note and "\n" not in note
