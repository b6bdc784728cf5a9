"""One rank of one contender: builds the model once, then does what it is told, and sleeps on a
pipe in between.

    python -m benchmarks.worker REPLY_FD SPECIFICATION

`leader` starts it, with RANK, WORLD_SIZE and MASTER_* in the environment.
Commands come as lines of JSON on stdin, replies go as lines of JSON to descriptor REPLY_FD, so that
what libraries print disturbs neither. Between two turns a rank blocks in a read: it takes no
processor time from the contender whose turn it is.

Every timed turn is [untimed step | barrier | timed steps | barrier]. The untimed one warms caches
that the other contenders have used, and hands a trainer that overlaps the end of one step with the
beginning of the next the same half-finished work that it leaves at the end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Builder, Missing, Setup, Trainee, adamw, builder_for
from benchmarks.fake_world import fake_group
from benchmarks.model import Batches, build
from benchmarks.plan import Size, fake_ranks
from zeroshard.nn.deferred import deferred_init

__all__ = ["Worker", "live_storage_bytes", "main"]

SEED = 1234


def live_storage_bytes() -> dict[str, int]:
    """Return the bytes of all tensor storages that Python can reach, the gradients of leaves
    included, each counted once, by device type.
    """
    storages: dict[tuple[str, int], int] = {}
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [
        tensor.grad
        for tensor in tensors
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None
    ]
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[tensor.device.type, storage.data_ptr()] = storage.nbytes()
        except RuntimeError:
            # a wrapper such as DTensor, which has no memory of its own: what it wraps is in the
            # list
            continue
    out: dict[str, int] = {}
    for (device, _), num_bytes in storages.items():
        out[device] = out.get(device, 0) + num_bytes
    return out


def import_lazily_imported() -> None:
    """Take one step of a tiny model, so that what torch imports at first use counts as imports,
    the same for every contender.
    """
    layer = torch.nn.Linear(8, 8)
    optimizer = adamw(layer.parameters())
    layer(torch.zeros(2, 8)).sum().backward()
    optimizer.step()


class Worker:
    """The commands: each method takes the command's arguments and returns its reply."""

    def __init__(self, specification: dict[str, Any]) -> None:
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.name: str = specification["contender"]
        self.cuda: bool = specification["device"] == "cuda"
        torch.set_num_threads(specification["threads"])
        device = (
            torch.device("cuda", self.rank % torch.cuda.device_count())
            if self.cuda
            else torch.device("cpu")
        )
        self.setup = Setup(
            Size(**specification["size"]),
            specification["precision"],
            device,
            specification["disk_path"],
            specification["max_norm"],
            specification["optimizer"],
        )
        self.deferred: bool = specification["deferred"]
        self.device_bytes: int | None = specification["device_bytes"]
        self.files: list[str] = specification["files"]
        self.steps_done = 0
        self._group = ExitStack()  # until the process ends
        self.trainee: Trainee
        self.builder: Builder = builder_for(self.name, self.setup.optimizer)
        import_lazily_imported()

    def build(self) -> dict[str, Any]:
        """Join the process group, make the model and hand it to the contender's library."""
        if self.cuda:
            torch.cuda.set_device(self.setup.device)
            if self.device_bytes is not None:
                total = torch.cuda.get_device_properties(self.setup.device).total_memory
                torch.cuda.set_per_process_memory_fraction(
                    min(1.0, self.device_bytes / total), self.setup.device
                )
        self._join_group()
        self.batches = Batches(
            self.setup.size,
            rank=self.rank,
            num_ranks=self.num_ranks,
            device=self.setup.device,
            files=self.files,
        )
        torch.manual_seed(SEED)
        with (
            deferred_init() if self.deferred else nullcontext(),
            self.setup.device,  # a large model's random numbers take minutes on a CPU
        ):
            model = build(self.setup.size)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert num_parameters == self.setup.size.num_parameters, (
            num_parameters,
            self.setup.size.num_parameters,
        )
        begin = time.perf_counter()
        self.trainee = self.builder(model, self.setup)
        reply = {
            "num_parameters": num_parameters,
            "build_s": time.perf_counter() - begin,
            **self.trainee.facts,
        }
        if self.trainee.engine is not None:
            reply["units"] = len(self.trainee.engine.units)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()  # what is counted is training, not building
        return reply

    def _join_group(self) -> None:
        size = fake_ranks(self.name)
        if size and self.num_ranks > 1:
            raise Missing(f"{self.name} is one process that pretends to be {size}: --nproc 1")
        if size:
            self._group.enter_context(fake_group(size))
            return
        enough = self.cuda and torch.cuda.device_count() >= self.num_ranks
        dist.init_process_group("cuda:nccl,cpu:gloo" if enough else "gloo")

    def _step(self) -> torch.Tensor:
        tokens, targets = self.batches[self.steps_done]
        self.steps_done += 1
        loss = self.trainee.forward(tokens, targets)
        self.trainee.backward(loss)
        self.trainee.update()
        return loss.detach()

    def _meet(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        if self.num_ranks > 1:
            dist.barrier()

    def end(self) -> None:
        """Leave the contexts in which the contender has trained."""
        if hasattr(self, "trainee"):
            self.trainee.contexts.close()

    def train(self, steps: int, settle: int = 1) -> dict[str, Any]:
        """Run `settle` untimed and `steps` timed steps."""
        losses = [self._step() for _ in range(settle)]
        if self.trainee.engine is not None:
            self.trainee.engine.reset_traffic()
        self._meet()
        begin = previous = time.perf_counter()
        step_s = []
        for _ in range(steps):
            losses.append(self._step())
            if self.cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            step_s.append(now - previous)
            previous = now
        self._meet()
        total_s = time.perf_counter() - begin
        reply: dict[str, Any] = {
            "total_s": total_s,
            "step_s": step_s,
            "losses": [float(loss) for loss in losses],
        }
        if self.trainee.engine is not None:
            reply["steps_skipped"] = self.trainee.engine.steps_skipped
            reply["payload_bytes"] = sum(self.trainee.engine.traffic().bytes.values()) / steps
        return reply

    def rest(self) -> dict[str, Any]:
        """Run one step and count what is held at the end of its backward and after its update."""
        tokens, targets = self.batches[self.steps_done]
        self.steps_done += 1
        loss = self.trainee.forward(tokens, targets)
        self.trainee.backward(loss)
        del loss
        live = {"after_backward": live_storage_bytes()}
        reply: dict[str, Any] = {}
        if self.trainee.engine is not None:
            reply["memory_after_backward"] = _memory(self.trainee.engine)
        self.trainee.update()
        live["after_update"] = live_storage_bytes()
        reply |= {f"live_{when}": sum(by_device.values()) for when, by_device in live.items()} | {
            "live_by_device": live
        }
        if self.trainee.engine is not None:
            reply["memory_after_update"] = _memory(self.trainee.engine)
        if self.cuda:
            reply["device_peak"] = torch.cuda.max_memory_allocated()
        return reply

    def profile(self, steps: int, trace: str = "", top: int = 12) -> dict[str, Any]:
        """Return the operators that take most of the time of the calling thread, ms per step and
        calls per step. `trace` is a file for all of it, as Chrome's trace viewer reads it.
        """
        activities = [torch.profiler.ProfilerActivity.CPU] + (
            [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
        )
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                self._step()
            self._meet()
        if trace and self.rank == 0:
            profile.export_chrome_trace(trace)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)[:top]
        return {
            "operators": [
                [event.key[:60], event.self_cpu_time_total / 1000 / steps, event.count / steps]
                for event in events
            ]
        }


def _memory(engine: Any) -> dict[str, Any]:
    report = engine.memory()
    return {
        "at_rest": dict(report.at_rest),
        "tiers": report.tiers,
        "temporary": report.temporary,
        "peak": report.peak,
    }


def main(arguments: list[str]) -> int:
    """Import, say so, and serve commands until stdin ends."""
    with os.fdopen(int(arguments[0]), "w") as replies:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        try:
            worker = Worker(json.loads(arguments[1]))
            reply(
                {
                    "versions": {
                        name: sys.modules[name].__version__
                        for name in ("torch", "zeroshard", "deepspeed")
                        if name in sys.modules
                    }
                }
            )
            for line in sys.stdin:
                command = json.loads(line)
                method: Callable[..., dict[str, Any]] = getattr(worker, command.pop("do"))
                reply(method(**command))
            worker.end()
        except Missing as missing:
            reply({"missing": str(missing)})
        except BaseException as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
            os._exit(1)  # a library's exit handlers may wait for ranks that wait for us
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
