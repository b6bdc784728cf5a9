"""Optimizer states of another shape than their parameter (Adafactor's factors, blocks of 8 bits)
under ``ownership="whole"``: whole with their parameter, wherever it goes.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

import zeroshard as zs
from tests.features.test_elastic import kept_at, servers
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import leaf_loss, plainly_trained, resumed
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.steps import summarize
from zeroshard.comm.groups import HandOver
from zeroshard.core.shares import BLOCKS
from zeroshard.formats.export import export
from zeroshard.optim.copies import cuts_blocks, plain_tensors
from zeroshard.runtime.engine import states_of

STEPS, LEAVES = 4, 6
BLOCK, FLOOR = 256, 4096


class Codes(torch.Tensor):
    """A tensor of bytes and of a scale per block, which reads as fp32 numbers."""

    codes: torch.Tensor
    absmax: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> Codes:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, codes.shape, dtype=torch.float32
        )

    def __init__(self, codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> None:
        self.codes, self.absmax, self.signed = codes, absmax, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "absmax"], (self.signed,)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Codes:
        assert inner["codes"].shape == torch.Size(shape)
        return cls(inner["codes"], inner["absmax"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].codes.clone(), args[0].absmax.clone(), args[0].signed)
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].absmax, args[0].signed)
        raise NotImplementedError(func)


def _encode(numbers: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = nn.functional.pad(numbers.flatten(), (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = blocks / absmax.clamp_min(1e-12)[:, None]
    codes = (scaled * 127 + 128 if signed else scaled.sqrt() * 255).round().to(torch.uint8)
    return codes.flatten()[: numbers.numel()].view(numbers.shape), absmax


def _decode(codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> torch.Tensor:
    numbers = codes.flatten().float()
    numbers = (numbers - 128) / 127 if signed else (numbers / 255).square()
    scale = absmax.repeat_interleave(BLOCK)[: numbers.numel()]
    return (numbers * scale).view(codes.shape)


class Adam8bit(torch.optim.Optimizer):
    """Adam with moments in blocks of 8 bits: codes of the parameter's shape, scales of another, and
    a table that all parameters share.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.arange(16.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group["lr"])

    def update(self, p: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        p.data = p.data.contiguous()  # as bitsandbytes does
        state["step"] = state.get("step", 0) + 1
        state["table"] = self.table
        moments = []
        for key, grad, weight in (("m", p.grad, 0.1), ("v", p.grad.square(), 0.01)):
            before = self.read(state, key) if key in state else torch.zeros_like(p)
            moments.append(before.lerp(grad, weight))
            self.write(state, key, moments[-1])
        p.sub_(lr * moments[0] / (moments[1].sqrt() + 1e-6))

    def read(self, state: dict[str, Any], key: str) -> torch.Tensor:
        is_coded = f"absmax {key}" in state
        return _decode(state[key], state[f"absmax {key}"], key == "m") if is_coded else state[key]

    def write(self, state: dict[str, Any], key: str, numbers: torch.Tensor) -> None:
        state[key] = numbers
        if numbers.numel() >= FLOOR:
            state[key], state[f"absmax {key}"] = _encode(numbers, key == "m")


class Subclassed8bit(Adam8bit):
    """The same with a tensor subclass for each moment."""

    def read(self, state: dict[str, Any], key: str) -> torch.Tensor:
        value = state[key]
        is_coded = isinstance(value, Codes)
        return _decode(value.codes, value.absmax, value.signed) if is_coded else value

    def write(self, state: dict[str, Any], key: str, numbers: torch.Tensor) -> None:
        is_large, signed = numbers.numel() >= FLOOR, key == "m"
        state[key] = Codes(*_encode(numbers, signed), signed) if is_large else numbers


class Odd(torch.optim.Optimizer):
    """Keeps states that look like others: of as many elements as the parameter, of its shape with
    other numbers, lists of tensors; all of them count in the step.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (one for one in group["params"] if one.grad is not None):
                state, n = self.state[p], p.numel()
                if not state:
                    state["line"], state["column"] = torch.zeros(n), torch.zeros(n, 1)
                    state["turned"] = torch.zeros(p.t().shape if p.dim() == 2 else (1, n))
                    state["half"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["both"] = [torch.zeros(3), {"sum": torch.zeros(2, dtype=torch.int32)}]
                    state["moment"] = torch.zeros_like(p)
                assert state["line"].shape == (n,) and state["column"].shape == (n, 1)
                assert state["half"].shape == state["moment"].shape == p.shape
                assert state["half"].stride() == p.stride()
                state["line"].add_(p.grad.flatten())
                state["column"].add_(p.grad.flatten()[:, None], alpha=2)
                state["turned"].add_(p.grad.t() if p.dim() == 2 else p.grad.view(1, n))
                state["half"].add_(p.grad)
                state["moment"].lerp_(p.grad, 0.1)
                state["both"][0].add_(1)
                state["both"][1]["sum"].add_(2)
                seen = state["line"] + state["column"].flatten() + state["turned"].flatten()
                seen = seen.view(p.shape) + state["half"] + state["moment"]
                p.sub_(group["lr"] * seen * state["both"][0][0] / state["both"][1]["sum"][1])


def _transformers_adafactor(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    options: Any = {"scale_parameter": True, "relative_step": True, "warmup_init": True}
    return Adafactor(params, lr=None, beta1=0.9, **options)


def _bitsandbytes(params: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(params, lr=0.01)  # type: ignore[no-any-return]


def _torchao(name: str, params: Any) -> torch.optim.Optimizer:
    return getattr(pytest.importorskip("torchao.optim"), name)(params, lr=0.01)  # type: ignore[no-any-return]


RULES: dict[str, Any] = {
    "torch": functools.partial(torch.optim.Adafactor, lr=0.01),
    "transformers": _transformers_adafactor,
    "8bit": Adam8bit,
    "subclass": Subclassed8bit,
    "odd": Odd,
}
OTHERS: dict[str, Any] = {
    "bitsandbytes": _bitsandbytes,
    "AdamW8bit": functools.partial(_torchao, "AdamW8bit"),
    "AdamW4bit": functools.partial(_torchao, "AdamW4bit"),
    "AdamWFp8": functools.partial(_torchao, "AdamWFp8"),
}


def _make(rule: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # a factor of [64, 1] has as many elements as its parameter, and as its flat shard
    model = nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64), nn.Linear(64, 1))
    model.append(nn.Linear(1, 64, bias=False))
    last = model[2].weight  # it lies column by column
    model[2].weight = nn.Parameter(last.detach().t().contiguous().t())
    optimizer = (RULES | OTHERS)[rule](model.parameters())
    return model, optimizer


def _batch(step: int) -> torch.Tensor:
    return torch.randn(LEAVES, 64, generator=torch.Generator().manual_seed(step))


_loss = functools.partial(leaf_loss, leaves=LEAVES, width=64)  # of these rows


def _copied(state: Any) -> Any:
    """Return a state in plain tensors."""
    if isinstance(state, torch.Tensor) and hasattr(state, "__tensor_flatten__"):
        names, context = state.__tensor_flatten__()
        return [{name: getattr(state, name).clone() for name in names}, str(context)]
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def _assert_same(one: Any, other: Any, place: str = "") -> None:
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and torch.equal(one, other), place
    elif isinstance(one, (dict, list)):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        assert len(one) == len(other), place
        for key in keys:
            _assert_same(one[key], other[key], f"{place} {key}")
    else:
        assert one == other, place


@functools.cache
def _plain(rule: str) -> list[torch.Tensor]:
    """Return the weights after all steps of torch alone, with the gradients of an engine's
    leaves.
    """
    (model, optimizer), (passes, _) = _make(rule), _make(rule)
    return plainly_trained(model, passes, STEPS, LEAVES, _loss, optimizer.step)


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: zs.Engine, first: int, last: int
) -> None:
    for step in range(first, last):
        for leaf in engine.leaves(step):
            engine.backward(_loss(model, step, leaf))
        optimizer.step()
        optimizer.zero_grad()


def _shard(rule: str, row: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer = _make(rule)
    options = {"units": [nn.Linear], "ownership": "whole", "leaves": LEAVES, **options}
    return model, optimizer, zs.shard(model, optimizer, policy=row, **options)


def _weights(engine: zs.Engine) -> list[torch.Tensor]:
    return [*engine.full_state_dict(rank0_only=False).values()]


def _train(
    rank: int,
    world: int,
    rule: str,
    row: str,
    steps: int = STEPS,
    folder: Path | None = None,
    comm: zs.Comm | None = None,
) -> list[torch.Tensor]:
    """Train from what `folder` holds, and save there; return all weights."""
    model, optimizer, engine = _shard(rule, row, comm=comm)
    _steps(model, optimizer, engine, resumed(folder, engine), steps)
    if folder is not None:
        zs.save(folder, engine, step=steps)
    full = _weights(engine)
    engine.close()
    return full


@pytest.mark.parametrize("rule", RULES)
def test_states_of_any_shape_have_the_bits_of_one_process(rule: str) -> None:
    for world, row in ((1, "zero3"), (2, "zero1"), (2, "ddp"), (3, "zero2"), (4, "zero3")):
        for found in run_ranks(world, _train, rule, row):
            assert all(map(torch.equal, found, _plain(rule))), (world, row)


def _held(rank: int, world: int, rule: str) -> tuple[list[tuple[str, int, int]], int]:
    """Return what this rank steps, and the elements in what its optimizer keeps."""
    model, optimizer, engine = _shard(rule, "zero3")
    _steps(model, optimizer, engine, 0, 1)
    shards, kept = [*states_of(engine).stepped_pieces()], 0
    for value in (value for one in shards for value in optimizer.state[one.tensor].values()):
        kept += sum(one.numel() for one in plain_tensors(value) if one.numel() > 16)
    engine.close()
    return [(one.name, one.piece.start, one.piece.stop) for one in shards], kept


@pytest.mark.parametrize("rule", ["8bit", "subclass", "odd"])
def test_states_of_blocks_are_cut_with_their_parameter_between_blocks(rule: str) -> None:
    sizes = {name: parameter.numel() for name, parameter in _make(rule)[0].named_parameters()}
    ranks = run_ranks(3, _held, rule)
    cut = {
        (name, place)
        for shards, _ in ranks
        for name, start, stop in shards
        for place in {start, stop} - {0, sizes[name]}
    }
    # not the rule of numbers that go by the parameter's shape, and not what lies column by column
    blocks = {("0.weight", BLOCKS), ("0.weight", 2 * BLOCKS)}
    assert cut and cut <= blocks if rule != "odd" else not cut
    if rule != "odd":
        for shards, kept in ranks:
            elements = sum(stop - start for _, start, stop in shards)
            assert 1.99 * elements <= kept <= 2.1 * elements


class Later(torch.optim.Optimizer):
    """SGD by elements, from the tenth step on by rows, with a state in bytes if `codes`."""

    def __init__(self, params: Any, codes: bool = False) -> None:
        super().__init__(params, {"lr": 0.01})
        self.codes = codes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (one for group in self.param_groups for one in group["params"]):
            if p.grad is not None:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if self.codes and p.dim() > 1:
                    state["seen"] = torch.zeros(p.numel(), dtype=torch.uint8)
                by_rows = state["step"] > 9 and p.dim() > 1
                p.sub_(0.01 * (p.grad / p.grad.norm(dim=1, keepdim=True) if by_rows else p.grad))


class From65536(Adam8bit):
    """Keeps bytes of larger parameters alone."""

    def write(self, state: dict[str, Any], key: str, numbers: torch.Tensor) -> None:
        state[key] = numbers
        if numbers.numel() >= 1 << 16:
            super().write(state, key, numbers)


class Stacked(Adam8bit):
    """Keeps both moments in one tensor, which has no rows of blocks."""

    def update(self, p: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        state["both"] = torch.zeros(2, p.numel(), dtype=torch.uint8)
        super().update(p, state, lr)


def test_blocks_are_cut_where_trials_of_other_shapes_and_sizes_are_alike() -> None:
    large = [nn.Parameter(torch.ones(512, 256))]
    assert cuts_blocks(Adam8bit(large), 0) and cuts_blocks(Subclassed8bit(large), 0)
    for other in (
        From65536(large),
        Stacked(large),
        Later(large),
        Later(large, codes=True),
        Odd(large),
    ):
        assert not cuts_blocks(other, 0), other
    assert not cuts_blocks(torch.optim.Muon(large), 0)


@pytest.mark.parametrize("rule", RULES)
def test_they_go_on_from_a_checkpoint_on_any_number_of_ranks(rule: str, tmp_path: Path) -> None:
    plan = ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS))
    for world, row, steps in plan:
        ranks = run_ranks(world, _train, rule, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0], _plain(rule)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["torch", "8bit"])
def test_they_do_in_every_row_with_nodes(rule: str) -> None:
    comm = zs.Comm(transport="gloo", node_size=2)
    for row in ("zero3-keep", "hpz", "mics", "hfsdp"):
        ranks = run_ranks(4, _train, rule, row, STEPS, None, comm)
        assert all(map(torch.equal, ranks[0], _plain(rule))), row


@pytest.mark.slow
@pytest.mark.parametrize("rule", OTHERS)
def test_other_libraries_optimizers_of_few_bits(rule: str, tmp_path: Path) -> None:
    _make(rule)  # may skip
    for row in ("zero1", "zero3"):
        for found in run_ranks(2, _train, rule, row):
            assert all(map(torch.equal, found, _plain(rule))), row
    for world, row, steps in ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS)):
        ranks = run_ranks(world, _train, rule, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0], _plain(rule)))


def _states(engine: zs.Engine) -> dict[str, Any]:
    """Return the states that rest on this rank, by parameter."""
    shards = states_of(engine).stepped_pieces()
    return {one.name: _copied(engine.optimizer.state[one.tensor]) for one in shards}


def _apart_bytes(states: dict[str, Any]) -> int:
    """Return the bytes of states that are not of their parameter's shape and fp32."""
    found = [one for one in tree_leaves(states) if isinstance(one, torch.Tensor) and one.dim()]
    return sum(one.numel() * one.element_size() for one in found)


@on_ranks(2)
@pytest.mark.parametrize("rule", RULES)
def test_an_engine_is_laid_out_anew_between_steps(
    rank: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, taken = HandOver.move, [0]

    def counted(self: HandOver, held: Any, wanted: Any, mine: Any, out: torch.Tensor) -> None:
        if out.dtype is torch.uint8:
            taken[0] += out.numel()
        move(self, held, wanted, mine, out)

    monkeypatch.setattr(HandOver, "move", counted)
    model, optimizer, engine = _shard(rule, "zero3")
    rows: tuple[Any, ...] = ({"stage": 1}, {"policy": "ddp"}, {"stage": 2}, {"stage": 3})
    for step, changes in enumerate(rows):
        _steps(model, optimizer, engine, step, step + 1)
        before, taken[0] = _states(engine), 0
        engine.repartition(**changes)
        after = _states(engine)
        for name in before.keys() & after.keys():
            _assert_same(after[name], before[name], name)
        # the bytes of what this rank owns now, and of no other's
        assert 0 < taken[0] <= _apart_bytes(after)
        assert (len(after) == len([*model.parameters()])) is (changes == {"policy": "ddp"})
    assert all(map(torch.equal, _weights(engine), _plain(rule)))
    engine.close()
    assert not optimizer.state


def _leave_and_come_back(rank: int, world: int, rule: str) -> None:
    meshes = [init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))]
    meshes.append(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    model, optimizer, engine = _shard(rule, "zero3", mesh=meshes[0])
    for step in range(STEPS):
        if rank < 2 or step != 2:
            _steps(model, optimizer, engine, step, step + 1)
        if step == 1:
            engine.repartition(mesh=meshes[1])
            assert rank < 2 or (engine.memory().total == 0 and not optimizer.state)
        elif step == 2:
            engine.repartition(mesh=meshes[0])
    assert all(map(torch.equal, _weights(engine), _plain(rule)))
    engine.close()


@pytest.mark.parametrize("rule", ["torch", "subclass", "odd"])
def test_they_come_and_go_with_ranks(rule: str) -> None:
    run_ranks(3, _leave_and_come_back, rule)


@on_ranks(2)
@pytest.mark.parametrize("rule", RULES)
def test_what_looks_at_states_and_moves_them_knows_these(
    rank: int, rule: str, tmp_path: Path
) -> None:
    model, optimizer, engine = _shard(rule, "ddp", verify_every=1)
    with engine.trail(tmp_path / "trail", every=1):
        _steps(model, optimizer, engine, 0, 2)
    before, memory = _states(engine), engine.memory().at_rest["optimizer"]
    is_counted = [one for one in tree_leaves(before) if isinstance(one, torch.Tensor)]
    numels = sum(one.numel() * one.element_size() for one in is_counted if one.numel() > 1)
    shared = 16 * 4 * (len(before) - 1) if rule in ("8bit", "subclass") else 0  # it counts once
    assert memory == numels - shared
    engine.offload_states()
    assert engine.memory().at_rest["optimizer"] == 0
    engine.reload_states()
    _assert_same(_states(engine), before)
    _steps(model, optimizer, engine, 2, STEPS)
    assert all(map(torch.equal, _weights(engine), _plain(rule)))
    engine.close()


@on_ranks(2)
@pytest.mark.parametrize("rule", ["torch", "transformers"])
def test_a_part_of_the_optimizer_goes_back_and_a_broken_step_is_given_up(
    rank: int, rule: str, tmp_path: Path
) -> None:
    model, optimizer, engine = _shard(rule, "zero2")
    _steps(model, optimizer, engine, 0, 2)
    before, part = _states(engine), copy.deepcopy(engine.optimizer_part())
    zs.save(tmp_path, engine, step=2)
    _steps(model, optimizer, engine, 2, 3)
    optimizer.load_state_dict(part)
    _assert_same(_states(engine), before)
    for leaf in engine.leaves(3):
        engine.backward(_loss(model, 3, leaf))
    optimizer.param_groups[0]["eps"] = None  # of a rank that has a shard, too
    with pytest.raises(TypeError):
        optimizer.step()
    engine.reset()
    assert all(one.dim() == 1 for group in optimizer.param_groups for one in group["params"])
    zs.load(tmp_path, engine)
    _assert_same(_states(engine), before)
    _steps(model, optimizer, engine, 2, STEPS)
    assert all(map(torch.equal, _weights(engine), _plain(rule)))
    engine.close()


def _keep(rank: int, world: int, home: str, folder: Path, steps: int) -> list[torch.Tensor]:
    with kept_at(home):
        model, optimizer, engine = _shard("subclass", "zero3")
        begin = 0
        with zs.Saver(folder, engine) as saver:
            if zs.latest_step(folder) is not None:
                restored = zs.load(folder, engine)
                assert restored.from_memory
                begin = restored.step
            _steps(model, optimizer, engine, begin, steps)
            assert saver.keep(steps)
        full = _weights(engine)
        engine.close()
    return full


def test_kept_steps_hold_them(tmp_path: Path) -> None:
    with servers(1) as (server,):
        run_ranks(2, _keep, server.address, tmp_path / "run", 2)
        server.whole = {str(tmp_path / "run"): [0, 2]}
        for found in run_ranks(3, _keep, server.address, tmp_path / "run", STEPS):
            assert all(map(torch.equal, found, _plain("subclass")))


def test_a_checkpoint_has_them_in_its_files_with_hashes(tmp_path: Path) -> None:
    model, optimizer, engine = _shard("8bit", "zero3")
    _steps(model, optimizer, engine, 0, 1)
    with zs.Saver(tmp_path, engine) as saver:
        path = saver.save(1)
        _steps(model, optimizer, engine, 1, 2)  # a copy of the states is being written
    manifest = json.loads((path / "manifest.json").read_text())
    (entry,) = [one for one in manifest["tensors"] if one["kind"] == "0.weight|state.m@0"]
    assert entry["dtype"] == "U8" and entry["shape"] == [12288] and len(entry["hashes"]) == 1
    parsed = Manifest.parse((path / "manifest.json").read_bytes(), "")
    kinds = {one["kind"] for one in summarize(parsed)["tensors"]}
    assert {"value", "state.m", "state.v", "state.absmax m", "state.table"} <= kinds
    zs.load(tmp_path, engine)
    export(path, tmp_path / "step.pt", "torch")
    content = torch.load(tmp_path / "step.pt")["optimizer"]["0.weight"]
    shown = _states(engine)["0.weight"]
    assert content["m"].shape == (192, 64) and "m@cut" not in content
    content["m"] = content["m"].flatten()
    for key in ("m", "absmax m", "step"):
        _assert_same(content[key], shown[key], key)
    file = path / manifest["files"][0]["name"]
    data = bytearray(file.read_bytes())
    data[manifest["files"][0]["header_bytes"] + entry["offset"]] ^= 1
    file.write_bytes(data)
    with pytest.raises(zs.CheckpointError, match=r"is damaged: .*0\.weight\|state\.m"):
        zs.load(tmp_path, engine)
    engine.close()


@on_ranks(2)
def test_states_that_are_older_than_shard_go_on(rank: int, tmp_path: Path) -> None:
    for rule in RULES:
        model, optimizer = _make(rule)
        expected, reference = _make(rule)
        for step in range(3):
            for one, stepped in ((model, optimizer), (expected, reference)):
                if one is model and step == 2:
                    continue
                stepped.zero_grad()
                one(_batch(step)).square().mean().backward()
                stepped.step()
        optimizer.zero_grad()
        engine = zs.shard(model, optimizer, stage=3, units=[nn.Linear], ownership="whole")
        before = [one.grad.clone() for one in expected.parameters() if one.grad is not None]
        engine.backward(model(_batch(2)).square().mean())
        found = [engine.full_grad(one) for one in model.parameters()]
        assert all(map(torch.equal, found, before))
        optimizer.step()
        weights = [parameter.detach() for parameter in expected.parameters()]
        assert all(map(torch.equal, _weights(engine), weights)), rule
        engine.close()


class Counted(torch.optim.SGD):
    """SGD with a moment of 16 bits, and with a count that it does not look at."""

    counts = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (one for group in self.param_groups for one in group["params"]):
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p, dtype=torch.bfloat16)).add_(p.grad)
                if self.counts:
                    state.setdefault("seen", torch.zeros(4, dtype=torch.int64)).add_(1)
                p.sub_(0.01 * state["sum"])


def _count(
    rank: int, world: int, folder: Path, counts: bool, steps: int, ownership: Any
) -> list[torch.Tensor]:
    model, _ = _make("8bit")
    optimizer = Counted(model.parameters(), lr=0.1)
    optimizer.counts = counts
    options: Any = {"units": [nn.Linear], "leaves": LEAVES, "ownership": ownership}
    engine = zs.shard(model, optimizer, **options)
    _steps(model, optimizer, engine, resumed(folder, engine), steps)
    zs.save(folder, engine, step=steps)
    full = _weights(engine)
    engine.close()
    return full


def _count_in_parts(rank: int, world: int, folder: Path) -> None:
    with pytest.raises(
        zs.CheckpointError, match=r"state 'seen' of parameter '.*' is whole"
    ) as told:
        _count(rank, world, folder, True, 2, None)
    assert "ownership='whole'" in str(told.value) and "\n" not in str(told.value)
    model, _ = _make("8bit")
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), ownership="whole")
    with pytest.raises(zs.CheckpointError, match="was Counted and is AdamW"):
        zs.load(folder, engine)
    engine.close()


def test_what_cannot_be_cut_is_refused_in_equal_parts(tmp_path: Path) -> None:
    run_ranks(2, _count, tmp_path / "counted", True, 1, "whole")
    run_ranks(2, _count_in_parts, tmp_path / "counted")
    with pytest.raises(zs.CheckpointError, match=r"'seen' of parameter .* with shard\(ownership"):
        _count(0, 1, tmp_path / "parts", True, 1, None)


def test_moments_of_other_dtypes_go_to_equal_parts_and_back(tmp_path: Path) -> None:
    expected = _count(0, 1, tmp_path / "one", False, STEPS, None)
    for steps, ownership in ((1, "whole"), (2, None), (3, "whole"), (STEPS, None)):
        found = run_ranks(2, _count, tmp_path / "run", False, steps, ownership)
    assert all(map(torch.equal, found[0], expected))


def test_states_of_another_shape_are_none_of_parameter_states() -> None:
    model, optimizer, engine = _shard("torch", "zero3")
    _steps(model, optimizer, engine, 0, 1)
    states = zs.ParameterStates(engine, model[0].weight)
    assert states.state("row_var") is None
    with pytest.raises(zs.StateError, match="'row_var' of this parameter has another shape"):
        states.set_state("row_var", torch.zeros(192, 64))
    engine.close()
