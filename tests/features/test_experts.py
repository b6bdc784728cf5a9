"""Expert parallelism: `mesh_of` gives experts a data parallel mesh of their own, the ranks that
hold the same ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.support.experts import NUM_EXPERTS, Listed, Mixture, Stacked, local_part, whole_mixture
from tests.support.harness import run_ranks
from tests.support.training import VOCABULARY, State, two_groups

ROWS = ("ddp", "zero1", "zero2", "zero3")
KINDS: dict[str, type[nn.Module]] = {"stacked": Stacked, "listed": Listed}
PATTERN = "*.experts"
STEPS = 3
SMALL = 0.2  # what clips every step


def _mesh(ep: int = 2, world: int = 4) -> DeviceMesh:
    return init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels, and an expert per sequence that gets none of its tokens: the last
    expert gets none of ranks 0 and 1, and nobody's in the first batch.
    """
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    last = NUM_EXPERTS - 1
    return tokens[:, :-1], tokens[:, 1:], torch.full((2,), last if rank < 2 or not number else 0)


def _plain(
    kind: type[nn.Module], world: int, clip: float | None, micro_batches: int
) -> tuple[list[float], State]:
    """Train in one process with all experts on the batches of all ranks."""
    model = whole_mixture(kind)
    optimizer, losses = two_groups(model), []
    for step in range(STEPS):
        for micro in range(micro_batches):
            batches = [_batch(rank, step * micro_batches + micro) for rank in range(world)]
            loss = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
            (loss / micro_batches).backward()
        losses.append(float(loss))
        if clip is not None:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def _sharded(
    kind: type[nn.Module], mesh: DeviceMesh, row: str, **options: Any
) -> tuple[Mixture, torch.optim.Optimizer, zs.Engine]:
    """Return this rank's part of the model, sharded."""
    model = Mixture(kind, mesh.get_group("ep"))
    place = mesh.get_local_rank("ep")
    state = whole_mixture(kind).state_dict()
    model.load_state_dict(local_part(state, kind, place, mesh.size(1)))
    optimizer = two_groups(model)
    options = {"policy": row, "stall_timeout_s": 20, "mesh_of": {PATTERN: mesh}, **options}
    return model, optimizer, zs.shard(model, optimizer, **options)


def _in_row(
    kind: type[nn.Module], mesh: DeviceMesh, row: str, clip: float | None, micro_batches: int,
    **options: Any,
) -> tuple[list[float], State]:  # fmt: skip
    model, optimizer, engine = _sharded(kind, mesh, row, **options)
    losses = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(*_batch(engine.rank, step * micro_batches + micro))
            if micro < micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss / micro_batches)
            else:
                engine.backward(loss / micro_batches)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / engine.world)
        if clip is not None:
            losses.append(float(engine.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    return losses, full


def _train(
    rank: int, world: int, kind_name: str, ep: int, clip: float | None, micro_batches: int,
    rows: tuple[str, ...], options: dict[str, Any],
) -> list[float]:  # fmt: skip
    kind, mesh = KINDS[kind_name], _mesh(ep, world)
    losses, whole = _plain(kind, world, clip, micro_batches)
    expected = local_part(whole, kind, mesh.get_local_rank("ep"), ep)
    runs = {row: _in_row(kind, mesh, row, clip, micro_batches, **options) for row in rows}
    for row, (seen, state) in runs.items():
        assert seen[:: 1 if clip is None else 2] == pytest.approx(losses, rel=1e-5), row
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=row + name)
    for row in rows:
        # inside no_sync they add micro-batches before ranks, the others ranks before micro-batches
        adds_first = micro_batches > 1 and row in ("ddp", "zero1")
        other = runs["ddp" if adds_first else rows[-1]]
        assert runs[row][0] == other[0], row
        assert all(torch.equal(value, other[1][name]) for name, value in runs[row][1].items()), row
    return runs[rows[-1]][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("clip", "micro_batches"), [(None, 1), (SMALL, 1), (None, 2)], ids=["plain", "clip", "no_sync"]
)
def test_divided_experts_train_as_one_process_with_all_of_them(
    kind: str, clip: float | None, micro_batches: int
) -> None:
    answers = run_ranks(4, _train, kind, 2, clip, micro_batches, ROWS, {}, timeout=100)
    assert all(losses == answers[0] for losses in answers)
