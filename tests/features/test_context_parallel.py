"""Context parallelism: ranks along 'cp' have parts of the same sequences, torch's
`context_parallel` lets them attend to each other, and the engine sums their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import VOCABULARY, State, two_groups

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextmanager
def in_parts(mesh: DeviceMesh, *tensors: tuple[torch.Tensor, int]) -> Iterator[None]:
    """Cut `tensors` along their sequence dimensions over `mesh` inside, and let attention go over
    all of its ranks; forward and backward run inside.
    """
    added = {_FORWARD: _forward, _BACKWARD: _backward}
    ring.custom_ops.update(added)
    try:
        with context_parallel(
            mesh, buffers=[one for one, _ in tensors], buffer_seq_dims=[dim for _, dim in tensors]
        ):
            yield
    finally:
        for operation in added:
            del ring.custom_ops[operation]


def _forward(operation: Any, args: Any, kwargs: Any) -> Any:
    query, key, value, dropout, is_causal = (*map(_local, args), *(0.0, False)[len(args) - 3 :])
    results = ring._templated_ring_attention(
        args[0].device_mesh.get_group(), 2, operation, query, key, value,
        is_causal=is_causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _wrapped(args[0].device_mesh, results[:2])


def _backward(operation: Any, args: Any, kwargs: Any) -> Any:
    grad, query, key, value, out, logsumexp, dropout, is_causal = map(_local, args)
    results = ring._templated_ring_attention_backward(
        args[0].device_mesh.get_group(), 2, operation, grad, "grad_out", query, key, value, out,
        logsumexp, is_causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _wrapped(args[0].device_mesh, results[:3])


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _wrapped(mesh: DeviceMesh, tensors: Any) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in tensors)


ROWS = ("ddp", "zero1", "zero2", "zero3")
LENGTH, WIDTH, STEPS = 16, 24, 3
SMALL = 0.3  # what clips every step
IGNORED = -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # no bias: the gradient of keys' is noise around 0
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """A language model whose positions are given: a rank has those of its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        h = self.tokens(x) + self.positions(at)
        for layer in self.layers:
            h = layer(h)
        return functional.cross_entropy(
            self.head(h).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction=reduction
        )


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def _batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sequences of one replica, their labels and the positions."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(LENGTH)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD: its weights differ from one process's as the gradients do, in their last bits, on every
    processor. Adam divides small gradients by themselves, and makes of these bits a whole step.
    """
    return two_groups(model, torch.optim.SGD, lr=0.3, momentum=0.9)


def _plain(clip: float | None, micro_batches: int) -> tuple[list[float], State]:
    """Train in one process on the sequences of both replicas."""
    model = _model()
    optimizer, losses = _optimizer(model), []
    for step in range(STEPS):
        for micro in range(micro_batches):
            number = step * micro_batches + micro
            both = [
                torch.cat(pair) for pair in zip(_batch(0, number), _batch(1, number), strict=True)
            ]
            loss = model(*both[:2], torch.arange(LENGTH)) / micro_batches
            loss.backward()
        losses.append(float(loss))
        if clip is not None:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def _in_row(
    mesh: DeviceMesh, row: str, clip: float | None, micro_batches: int
) -> tuple[list[float], State]:
    model = _model()
    optimizer, losses = _optimizer(model), []
    engine = zs.shard(model, optimizer, policy=row, mesh=mesh)
    assert engine.world == 4
    for step in range(STEPS):
        for micro in range(micro_batches):
            number = step * micro_batches + micro
            x, y, at = _batch(mesh.get_local_rank("dp"), number)
            last = micro == micro_batches - 1
            with in_parts(mesh["cp"], (x, 1), (y, 1), (at, 0)):
                assert x.shape == (2, LENGTH // 2)
                loss = model(x, y, at) / micro_batches  # the mean over this rank's own tokens
                if last:
                    engine.backward(loss)
                else:
                    with engine.no_sync():
                        engine.backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / 4)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: value.clone() for name, value in engine.full_state_dict(rank0_only=False).items()
    }
    engine.close()
    return losses, state


def _train(rank: int, world: int, clip: float | None, micro_batches: int) -> list[float]:
    mesh = _mesh()
    losses, expected = _plain(clip, micro_batches)
    runs = {row: _in_row(mesh, row, clip, micro_batches) for row in ROWS}
    for row, (seen, state) in runs.items():
        assert seen == pytest.approx(losses, rel=1e-6), row
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=2e-7, msg=row + name)
    for row in ROWS:
        # inside no_sync they add micro-batches before ranks, the others ranks before micro-batches
        adds_first = micro_batches > 1 and row in ("ddp", "zero1")
        other = runs["ddp" if adds_first else "zero3"]
        assert runs[row][0] == other[0], row
        assert all(torch.equal(value, other[1][name]) for name, value in runs[row][1].items()), row
    return runs["zero3"][0]


@pytest.mark.parametrize(
    ("clip", "micro_batches"), [(None, 1), (SMALL, 1), (None, 2)], ids=["plain", "clip", "no_sync"]
)
def test_parts_of_sequences_train_as_one_process_does(
    clip: float | None, micro_batches: int
) -> None:
    answers = run_ranks(4, _train, clip, micro_batches, timeout=100)
    assert all(losses == answers[0] for losses in answers)


@on_ranks(4, timeout=60)
def test_uneven_numbers_of_tokens_need_a_sum_over_all_ranks() -> None:
    """Ranks have different numbers of labelled tokens. See how far the weights are from one
    process's: with a mean over the own tokens, and with a sum over the tokens of all ranks.
    """
    mesh = _mesh()
    batches = [_batch(replica, 0) for replica in (0, 1)]
    for _, y, _ in batches:
        y[:, 5:] = IGNORED
    batches[1][1][:] = IGNORED
    batches[1][1][0, 0] = 3
    total = sum(int((y != IGNORED).sum()) for _, y, _ in batches)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = [torch.cat([one[index] for one in batches]) for index in (0, 1)]
    model(*both, torch.arange(LENGTH)).backward()
    optimizer.step()
    expected, distances = model.state_dict(), []
    for is_summed in (False, True):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, mesh=mesh)
        x, y, at = (one.clone() for one in batches[mesh.get_local_rank("dp")])
        with in_parts(mesh["cp"], (x, 1), (y, 1), (at, 0)):
            loss = model(x, y, at, "sum" if is_summed else "mean")
            engine.backward(loss * (engine.world / total) if is_summed else loss.nan_to_num())
        optimizer.step()
        state = engine.full_state_dict(rank0_only=False)
        distances.append(
            max(float((value - expected[name]).abs().max()) for name, value in state.items())
        )
        engine.close()
    with_means, with_sums = distances[0], distances[1]
    assert with_sums < 1e-6 and with_means > 1e-3


@on_ranks(4)
def test_cp_is_data_parallel_beside_any_name() -> None:
    """'cp' is data parallel beside 'dp' and alone, whatever else is named."""
    seen: dict[str, Any] = {}
    for names, dp in ((("cp", "dp"), None), (("rows", "cp"), "rows")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = _model()
        engine = zs.shard(model, mesh=mesh, dp=dp)
        seen[names[0]] = engine.world
        engine.close()
    assert seen == {"cp": 4, "rows": 4}
