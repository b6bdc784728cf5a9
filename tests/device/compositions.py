"""Programs on the pretended device that are more than a loop of steps: inference, experts with a
mesh of their own, ranks that leave and come back, memory that outlives ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.support.experts import NUM_EXPERTS, Mixture, Stacked, local_part, whole_mixture
from tests.support.programs import Program, Trained, _on_host
from tests.support.training import VOCABULARY, Run, final_state, take_steps, two_groups
from zeroshard.checkpoint import kept
from zeroshard.comm.groups import ranks_through
from zeroshard.system.keeper import KeeperServer


def _told(value: str) -> str:
    """Return the `value` of the first rank."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return str(ranks_through(group).share(value, "a test")[0])


def shared_folder() -> tuple[Any, str]:
    """Return a directory that all ranks know, and on its first rank who removes it."""
    owner = tempfile.TemporaryDirectory() if _is_first() else None
    return owner, _told("" if owner is None else owner.name)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _step(run: Trained, step: int) -> Tensor:
    """Take a step; return the loss, which nobody has read."""
    loss = run.model(*run.data(run.rank, step))
    run.engine.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    out: Tensor = loss.detach()
    return out


# --------------------------------------------------------------------------------------- inference


@dataclass(frozen=True)
class Inferred(Program):
    """Forwards of an engine without an optimizer, each with the tokens that the ones before have
    chosen; then `later` steps of training.
    """

    precision: str = "fp32"
    later: int = 0

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        model: Any = self._model(device).requires_grad_(self.later > 0)
        comm = zs.Comm.model_validate({"transport": transport, **self.comm})
        engine = zs.shard(
            model, None, policy=self.row, comm=comm, offload=zs.Offload(**self.offload),
        )  # fmt: skip
        data = self._data(device, rank)
        chosen, losses = self._chosen(model, data(rank, 0)[0]), []
        if self.later:
            optimizer = two_groups(model)
            engine.attach(optimizer)
            losses = take_steps(rank, self.later, model, optimizer, engine, data=data)
        state = chosen | final_state(model, engine)
        return Run(losses, _on_host(state), row=self.row)

    def train_plainly(self, device: str, *, rank: int = 0) -> Run:
        model = self._model(device)
        chosen = self._chosen(model, self._data(device, rank)(rank, 0)[0])
        return Run([], _on_host(chosen | model.state_dict()), row="plain")

    @torch.no_grad()
    def _chosen(self, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        """Return the logits of each forward."""
        out = {}
        for number in range(self.steps):
            logits = out[f"logits {number}"] = model(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return out


@dataclass(frozen=True)
class Generated(Program):
    """What Transformers' ``generate()`` makes of a prompt, with keys and values on both sides."""

    device_bytes: int | None = None

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        from zeroshard.integrations.kv_cache import KVCache

        model = self._llama(device)
        comm = zs.Comm.model_validate({"transport": transport, **self.comm})
        engine = zs.shard(
            model, None, policy=self.row, comm=comm, offload=zs.Offload(**self.offload)
        )
        cache = KVCache(model.config, device_bytes=self.device_bytes)
        made = self._made(model, device, past_key_values=cache)
        engine.close()
        return Run([], made, row=self.row)

    def train_plainly(self, device: str, *, rank: int = 0) -> Run:
        return Run([], self._made(self._llama(device), device), row="plain")

    def _made(self, model: Any, device: str, **options: Any) -> dict[str, Tensor]:
        made = model.generate(
            torch.arange(1, 9).view(2, 4).to(device), max_new_tokens=5, min_new_tokens=5,
            do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            **options,
        )  # fmt: skip
        return _on_host({"tokens": made.sequences, "logits": torch.stack(made.logits)})

    def _llama(self, device: str) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval().requires_grad_(False).to(device)


@dataclass(frozen=True)
class Decoded(Generated):
    """A token at a time, each chosen on the device: the host waits for none of them."""

    @torch.no_grad()
    def _made(self, model: Any, device: str, **options: Any) -> dict[str, Tensor]:
        from transformers import DynamicCache

        cache = options.get("past_key_values", DynamicCache(config=model.config))
        tokens, logits = torch.arange(1, 9).view(2, 4).to(device), []
        for _ in range(6):
            last = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:]
            logits.append(last)
            tokens = last.argmax(-1)
        return _on_host({"logits": torch.cat(logits, 1)})


# ----------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Divided(Program):
    """A mixture of experts that pairs of ranks divide."""

    kind: type[nn.Module] = Stacked

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=("dp", "ep"))
        model: Any = Mixture(self.kind, mesh.get_group("ep"))
        whole = whole_mixture(self.kind).state_dict()
        model.load_state_dict(local_part(whole, self.kind, mesh.get_local_rank("ep"), 2))
        optimizer = two_groups(model.to(device))
        engine = zs.shard(
            model, optimizer, policy=self.row, precision=self.precision,
            mesh_of={"*.experts": mesh}, offload=zs.Offload(**self.offload),
            comm=zs.Comm(**self.comm),
        )  # fmt: skip
        trained = Trained(model, optimizer, engine, rank, self._batches(device, rank))
        losses = self.take(trained)
        return Run(losses, _on_host(final_state(model, engine)), row=self.row)

    def _batches(self, device: str, rank: int) -> Callable[[int, int], list[Tensor]]:
        """Return what gives tokens, labels, and an expert per sequence that gets no tokens."""
        made = []
        for number in range(self.steps * self.micro_batches):
            generator = torch.Generator().manual_seed(100 * number + rank)
            tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
            banned = torch.full((2,), NUM_EXPERTS - 1 if rank < 2 or not number else 0)
            parts = tokens[:, :-1], tokens[:, 1:], banned
            made.append([part.to(device, non_blocking=True) for part in parts])
        return lambda _, number: made[number]


# --------------------------------------------------------------------------- ranks that come and go


def _meshes(run: Trained) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh of the first rank and one of both."""
    kind = next(run.model.parameters()).device.type
    one, both = (DeviceMesh(kind, list(range(n)), mesh_dim_names=("dp",)) for n in (1, 2))
    return one, both


@dataclass(frozen=True)
class Left(Program):
    """The second of two ranks leaves after the first step, and comes back after the second."""

    def take(self, run: Trained) -> list[float]:
        one, both = _meshes(run)
        losses = [_step(run, 0)]
        run.engine.repartition(mesh=one, policy="zero1")
        if run.rank == 0:
            losses.append(_step(run, 1))
        run.engine.repartition(mesh=both, policy=self.row)
        losses += [_step(run, step) for step in range(2, self.steps)]
        return [loss.item() for loss in losses]


@contextmanager
def _keeper(run: Trained, folder: str) -> Iterator[zs.Saver]:
    """Let ranks keep steps in memory, as those of ``zeroshard run --elastic`` do, and load them."""
    server = KeeperServer() if _is_first() else None
    address = _told("" if server is None else server.address)
    with mock.patch.object(kept, "keeper_address", lambda: address):
        with zs.Saver(folder, run.engine) as saver:
            yield saver
        if server is not None:
            server.close()


@dataclass(frozen=True)
class Kept(Program):
    """Keeps the first step in memory, and goes back there after the second."""

    def take(self, run: Trained) -> list[float]:
        owner, folder = shared_folder()
        losses = []
        with _keeper(run, folder) as saver:
            for step in range(self.steps):
                losses.append(_step(run, step))
                if step == 0:
                    assert saver.keep(1)
                elif step == 1:
                    assert zs.load(folder, run.engine).from_memory
        del owner
        return [loss.item() for loss in losses]


@dataclass(frozen=True)
class Shrunk(Program):
    """Two ranks keep a step in memory, and the first goes on alone from there."""

    def take(self, run: Trained) -> list[float]:
        owner, folder = shared_folder()
        one, _ = _meshes(run)
        losses = [_step(run, 0)]
        with _keeper(run, folder) as saver:
            assert saver.keep(1)
            losses.append(_step(run, 1))  # and that is lost
            if run.rank == 0:
                alone = self._alone(str(losses[0].device), one)
                assert zs.load(folder, alone.engine).from_memory
                alone = replace(alone, data=run.data)
                losses += [_step(alone, step) for step in range(1, self.steps)]
                whole = final_state(alone.model, alone.engine)
                run.extra += [value.double().sum() for value in whole.values()]
        del owner
        return [loss.item() for loss in losses]

    def _alone(self, device: str, mesh: DeviceMesh) -> Trained:
        model = self._model(device)
        optimizer = two_groups(model)
        engine = zs.shard(
            model, optimizer, policy="zero1", precision=self.precision, mesh=mesh,
        )  # fmt: skip
        return Trained(model, optimizer, engine, 0, lambda *_: [])
