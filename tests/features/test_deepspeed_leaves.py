"""``zeroshard.leaves`` in a DeepSpeed configuration: the same weights on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import PLAIN, run_ranks
from zeroshard.core.digest import digest_of
from zeroshard.deepspeed.answers import complete_batch
from zeroshard.deepspeed.helpers import RepeatingLoader
from zeroshard.integrations import deepspeed

SIZE, STEPS = 2, 5


class Model(nn.Module):
    """A block with dropout around an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.block = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 50), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(50, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _config(stage: int, leaves: int | str, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3},
        },
        "zero_optimization": {"stage": stage},
        "zeroshard": {"leaves": leaves},
    } | keys


def _made(rank: int, *options: Any, **keys: Any) -> tuple[Any, Any]:
    torch.manual_seed(rank)  # rank 0's weights and seed count
    tokens = torch.randint(31, (50, 7), generator=torch.Generator().manual_seed(1))
    config = _config(*options, **keys)
    engine, _, loader, _ = deepspeed.initialize(model=Model(), training_data=tokens, config=config)
    assert loader is not None
    return engine, RepeatingLoader(loader)


def _backward(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)


def _plain(engine: Any, loss: torch.Tensor) -> None:
    loss.backward()


def _divided(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss / engine.gradient_accumulation_steps(), scale_wrt_gas=False)


WAYS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "backward": _backward, "plain": _plain, "divided": _divided,
}  # fmt: skip


def _step(engine: Any, loader: Any, way: str) -> None:
    batch, before = next(loader), torch.get_rng_state()  # a new iterator draws a seed
    for number in range(engine.gradient_accumulation_steps()):
        WAYS[way](engine, engine(next(loader) if number else batch))
        engine.step()
    assert torch.equal(torch.get_rng_state(), before)
    engine.eval()
    engine(torch.arange(4)[None])  # which is no leaf
    engine.train()


def _ended(engine: Any) -> str:
    state = engine.module_state_dict()
    found = digest_of(*(state[name] for name in sorted(state)))
    assert engine.global_samples == engine.global_steps * engine.train_batch_size()
    engine.destroy()
    return found


def _trained(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Train every run; return the hashes of the weights."""
    out = {}
    for stage, leaves in ((1, 8), (2, 8), (3, 8), (3, "7"), (1, "7")):
        even = int(leaves) % world == 0
        for way in WAYS if even and stage > 1 else ("backward",):
            engine, loader = _made(rank, stage, leaves)
            for _ in range(STEPS):
                _step(engine, loader, way)
            assert engine.train_batch_size() == SIZE * int(leaves)
            out[f"{leaves}, stage {stage}, {way}"] = _ended(engine)
    for precision in ("bf16", "fp16"):
        engine, loader = _made(rank, 3, 7, **{precision: {"enabled": True}})
        for _ in range(STEPS):
            _step(engine, loader, "backward")
        out[precision] = _ended(engine)
    engine, loader = _made(rank, world % 3, 8)
    if world < 3:
        engine.load_checkpoint(folder / str(world + 1))
    else:
        for _ in range(2):
            _step(engine, loader, "backward")
    _step(engine, loader, "backward")
    engine.save_checkpoint(folder / str(world))
    found = _ended(engine)
    return out | ({"8, resumed": found} if world == 1 else {})


def test_leaves_train_to_one_hash_on_any_number_of_ranks(tmp_path: Path) -> None:
    """With dropout, clipping and a schedule, whichever backward is called; and from a checkpoint of
    other ranks on.
    """
    hashes: dict[str, set[str]] = {}
    for world in (3, 2, 1):
        for of_rank in run_ranks(world, _trained, tmp_path, device=PLAIN if world == 2 else ""):
            for name, found in of_rank.items():
                hashes.setdefault(name.partition(",")[0], set()).add(found)
    assert hashes.keys() == {"8", "7", "bf16", "fp16"}
    assert all(len(each) == 1 for each in hashes.values()), hashes


def _raised(act: Callable[[], object]) -> str:
    try:
        act()
    except zs.ZeroshardError as error:
        return str(error)
    return "nothing"


def _refused(rank: int, world: int) -> dict[str, str]:
    out = {}
    engine, loader = _made(rank, 2, 7)
    loss = engine(next(loader))
    out["divided"] = _raised(lambda: engine.backward(loss, scale_wrt_gas=False))
    out["batch"] = _raised(lambda: engine.set_train_batch_size(8))
    engine.backward(loss)
    out["twice"] = _raised(lambda: engine.backward(engine.module(next(loader))))
    engine.engine.reset()
    engine.destroy()

    engine, loader = _made(rank, 2, 8)
    engine.backward(engine(next(loader)))
    engine.set_gradient_accumulation_boundary(True)
    out["early"] = _raised(engine.step)
    engine.engine.reset()
    engine.destroy()

    engine, loader = _made(rank, 2, 4)
    for _ in range(2):
        engine.backward(engine(next(loader)))
    out["more"] = _raised(lambda: engine(next(loader)))
    engine.engine.reset()
    engine.destroy()

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    def initialize(**options: Any) -> Callable[[], object]:
        given = {"model": Model(), "config": _config(1, 8)} | options
        return lambda: deepspeed.initialize(**given)

    out["stream"] = _raised(initialize(training_data=Stream()))
    out["steps"] = _raised(initialize(config=_config(1, 8, gradient_accumulation_steps=3)))
    out["sizes"] = _raised(initialize(config=_config(1, 8, train_batch_size=12)))
    out["levels"] = _raised(initialize(config=_config(1, "3x")))
    out["kind"] = _raised(initialize(config=_config(1, 0.5)))  # type: ignore[arg-type]
    return out


def test_what_leaves_cannot_do_is_refused_in_one_line() -> None:
    wanted = {
        "divided": "backward(scale_wrt_gas=False) with leaves=7 on 2 ranks",
        "batch": "train_batch_size=8 would be another number of leaves than 7",
        "twice": "a second backward inside one leaf",
        "early": "engine.step() at a boundary before all leaves of this rank have run",
        "more": "this step has had all leaves of this rank",
        "stream": "leaves=8 takes the samples of a leaf by its number, and training_data has none",
        "steps": "gradient_accumulation_steps=3 contradicts leaves=8 on 2 ranks, which",
        "sizes": "train_batch_size=12 is not train_micro_batch_size_per_gpu=2 x leaves=8",
        "levels": "zeroshard.leaves='3x' is neither a number of leaves nor levels",
        "kind": "zeroshard.leaves=0.5 is neither a number of leaves nor levels",
    }
    for found in run_ranks(2, _refused):
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found[name] and "\n" not in found[name], (name, found[name])


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [
        (2, {"train_micro_batch_size_per_gpu": 4}, [(32, 4, 4)] * 2),
        (3, {"train_batch_size": 32}, [(32, 4, 3), (32, 4, 3), (32, 4, 2)]),
        (4, {"train_batch_size": 32, "gradient_accumulation_steps": 2}, [(32, 4, 2)] * 4),
    ],
)
def test_a_step_has_the_same_samples_on_any_number_of_ranks(
    ranks: int, given: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    settings = zs.read_deepspeed(given | {"zeroshard": {"leaves": 8}}).config()
    assert settings.leaves == 8
    batches = [complete_batch(settings, ranks, rank) for rank in range(ranks)]
    assert [(one.train, one.micro, one.steps) for one in batches] == expected
