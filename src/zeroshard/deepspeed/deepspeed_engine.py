"""The engine that ``initialize()`` returns: DeepSpeed's loop over zeroshard's engine.

    loss = engine(batch)        the sharded module
    engine.backward(loss)       divided by the accumulation steps; reduced as the stage says
    engine.step()               at a boundary: norm, clip, step, clear, scheduler; counts always

Invariant: at a boundary the weights equal DistributedDataParallel's with the same accumulation,
clipping and schedule. A skipped step (fp16's overflow, or any gradient that is not finite) moves
neither weights nor schedule. What it does not do: pipelines, tensor parallelism and inference
(shim.py says what to use).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import zeroshard as zs
from zeroshard.deepspeed import held_parameters
from zeroshard.deepspeed.answers import Answers, Batch, Client, Progress
from zeroshard.deepspeed.checkpoint_tags import TaggedCheckpoints
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.deepspeed.helpers import make_loader
from zeroshard.deepspeed.monitors import StepWatch
from zeroshard.deepspeed.optimizers import ZeROOptimizer
from zeroshard.deepspeed.shim import REFUSED, remedy

# ----------------------------------------------------------------------------------- plain backward
# A plain ``loss.backward()`` with gradient accumulation: the gradients of the model's parameters
# are divided by the number of micro-batches n, as ``engine.backward(loss)`` divides the loss.
#
#     forward     x ---------> model ---------> y
#     backward    x <-- * n -- model <-- / n -- y      both are left out inside engine.backward()
#
# Invariant: a gradient of a parameter is divided once, whatever lies between the parameter and the
# loss: other outputs of the same forward, other forwards of this engine, other engines. Gradients
# of tensors outside of the model equal plain torch's, also with ``create_graph=True``: a loss may
# contain them. Cost: no copies; one multiplication of each gradient at the edge of the model.
#
# Tensors are found in the containers of torch's pytree (Transformers' outputs among them),
# dictionaries and dataclasses, which are copied. A plain backward through the attributes of another
# object alone raises ConfigError.


_divided_losses: list[None] = []  # one for each engine.backward() under way, of any engine
Change = Callable[[torch.Tensor], torch.Tensor]


def divided(module: nn.Module, steps: int, args: Any, kwargs: Any) -> Any:
    """Return ``module(*args, **kwargs)``; a plain backward divides its parameters' gradients by
    `steps`.
    """
    if steps == 1 or not torch.is_grad_enabled():
        return module(*args, **kwargs)
    edge = _Edge(steps)
    args, kwargs = edge.changed((args, kwargs), edge.enter)
    return edge.changed(module(*args, **kwargs), edge.leave, inside=edge.refuse)


class _Edge:
    """The begin and the end of one forward's graph."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._arrived = -1  # the graph task in which a gradient has come to an output

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input with a gradient that is multiplied as it leaves the model."""
        out: torch.Tensor = _Alias.apply(tensor, lambda: self._steps)  # type: ignore[no-untyped-call]
        return out

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output with a gradient that is divided as it comes to the model."""

        def factor() -> float:
            self._arrived = torch._C._current_graph_task_id()
            return 1 / self._steps

        out: torch.Tensor = _Alias.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return out

    def refuse(self, holder: Any) -> None:
        """Have a plain backward that comes from `holder` alone raise ConfigError."""

        def arrived(grad: torch.Tensor) -> None:
            if not _divided_losses and self._arrived != torch._C._current_graph_task_id():
                raise zs.ConfigError(
                    f"the model returns tensors in a {type(holder).__name__}: a plain"
                    " loss.backward() cannot divide their gradients by gradient_accumulation_steps:"
                    " call engine.backward(loss)"
                )

        for one in tree_leaves(dict(getattr(holder, "__dict__", {}))):
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                one.register_hook(arrived)  # type: ignore[no-untyped-call]

    def changed(
        self, value: Any, change: Change, inside: Callable[[Any], None] | None = None
    ) -> Any:
        """Return `value` with its tensors that have a gradient changed; the same object where there
        is none. Other objects than containers go to `inside`.
        """
        leaves, structure = tree_flatten(value)
        made = [self._leaf(leaf, change, inside) for leaf in leaves]
        if all(one is other for one, other in zip(made, leaves, strict=True)):
            return value
        return tree_unflatten(made, structure)

    def _leaf(self, value: Any, change: Change, inside: Callable[[Any], None] | None) -> Any:
        if isinstance(value, torch.Tensor):
            differs = value.requires_grad and not isinstance(value, nn.Parameter)
            return change(value) if differs else value
        parts: dict[Any, Any] = {}
        if isinstance(value, dict):
            parts = dict(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif inside is not None:
            inside(value)
        made = {key: self.changed(part, change, inside) for key, part in parts.items()}
        if all(made[key] is part for key, part in parts.items()):
            return value
        out = copy.copy(value)
        for key, part in made.items():
            if isinstance(out, dict):
                out[key] = part
            else:
                object.__setattr__(out, key, part)  # also where it is frozen
        return out


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory; gradients are multiplied by ``factor()``."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return tensor.detach()  # no view, and one version counter: it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        factor = ctx.factor()
        return grad if _divided_losses else _Scaled.apply(grad, factor), None  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    """A gradient times `factor`. A plain backward through it goes on as it is: on that way the
    other edge of the model divides.
    """

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return grad * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad * ctx.factor if _divided_losses else grad), None


# ------------------------------------------------------------------------------------------- leaves
# Leaves in DeepSpeed's loop: the key ``zeroshard.leaves`` (docs/one-curve.md).
#
#     loss = engine(batch)        begins this rank's next leaf: generators are seeded
#     engine.backward(loss)       ends it
#     engine.step()               ends it, too; at a boundary it waits for ranks that have more
#
# Invariant: between two steps a rank runs as many micro-batches as it has leaves.


class LeafWalk:
    """This rank's leaves of the step under way."""

    def __init__(self, engine: zs.Engine, seed: int) -> None:
        """Random numbers of a leaf follow from `seed`, the step and its number."""
        self._engine, self._seed = engine, seed
        self._leaves: Iterator[int] | None = None
        self._is_open = False

    def begin(self, step: int) -> None:
        """Begin the next leaf of `step`, unless one has begun. Raises StateError after the last."""
        if self._is_open:
            return
        if self._leaves is None:
            self._leaves = self._engine.leaves(step, seed=self._seed)
        if next(self._leaves, None) is None:
            raise zs.StateError(
                "this step has had all leaves of this rank: engine.step() has to follow its last"
                " micro-batch"
            )
        self._is_open = True

    def end(self) -> None:
        """End the leaf that has begun, if any: a forward begins the next one."""
        self._is_open = False

    def finish(self) -> None:
        """Wait for the other ranks' leaves. Raises StateError where some are left here."""
        leaves, self._leaves = self._leaves, None
        self.end()
        if leaves is not None and next(leaves, None) is not None:
            raise zs.StateError(
                "engine.step() at a boundary before all leaves of this rank have run:"
                " gradient_accumulation_steps() says how many it has"
            )


# --------------------------------------------------------------------------------- deepspeed engine

_NO_CLIENT = Client()
_pausing: list[None] = []  # one for each open engine with disable_python_gc


def _resume() -> None:
    """Switch the garbage collector on after the last engine with disable_python_gc."""
    _pausing.pop()
    if not _pausing:
        gc.enable()


class DeepSpeedEngine(Answers, TaggedCheckpoints, nn.Module):
    """A sharded module with its optimizer and schedule. Made by `initialize`; attributes that it
    does not have are the module's.
    """

    def __init__(
        self,
        engine: zs.Engine,
        config: dict[str, Any],
        batch: Batch,
        clipping: float,
        leaves: LeafWalk | None = None,
        client: Client = _NO_CLIENT,
    ) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine  # zeroshard's
        is_static = bool((config.get("fp16") or {}).get("loss_scale"))
        self.optimizer: Any = None
        if engine.optimizer is not None:
            self.optimizer = ZeROOptimizer(engine, is_static=is_static)
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.config = config
        self.batch = batch
        self.clipping = clipping
        self._leaves = leaves  # of the step under way, in a run with leaves
        self.progress = Progress()
        self._client = client
        self._watch = StepWatch(config, engine, batch.train)
        self._boundary: bool | None = None  # as set_gradient_accumulation_boundary() says
        self._collecting = False  # inside no_sync()
        self._stepping = False  # inside step()
        self._end_pause: Any = None
        if config.get("disable_python_gc") is True and (_pausing or gc.isenabled()):
            if not _pausing:
                gc.collect()
                gc.disable()
            _pausing.append(None)
            self._end_pause = weakref.finalize(self, _resume)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                otherwise = "its module has none either; engine.engine is zeroshard's own"
                raise AttributeError(remedy("the engine", name, REFUSED, otherwise)) from None
            found = getattr(module, name)
            shards = name == "save_pretrained" and self.zero_optimization_stage() == 3
            return partial(self._save_pretrained, found) if shards else found

    # ------------------------------------------------------------------ a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self.tput_timer.start()
        with self._watch.part("forward", self.progress.global_steps):
            if self._leaves is None:
                return divided(self.module, self.batch.steps, args, kwargs)
            if self.module.training and torch.is_grad_enabled():
                self._leaves.begin(self.progress.global_steps)
            return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward of `loss`, divided by the accumulation steps where `scale_wrt_gas`;
        return that loss.
        """
        self._trained("backward()")
        self._watch.saw(loss)
        with self._watch.part("backward", self.progress.global_steps), ExitStack() as stack:
            if self._leaves is not None:
                return self._leaf_backward(self._leaves, loss, retain_graph, scale_wrt_gas)
            if scale_wrt_gas and self.batch.steps > 1:
                loss = loss / self.batch.steps
            _divided_losses.append(None)  # this backward's loss is divided already
            stack.callback(_divided_losses.pop)
            if self.zero_optimization_stage() < 2 and not self.is_gradient_accumulation_boundary():
                stack.enter_context(self.engine.no_sync())
            self.engine.backward(loss, retain_graph=retain_graph)
            self.progress.backwards += 1
            return loss

    def _leaf_backward(
        self, leaves: LeafWalk, loss: torch.Tensor, retain_graph: bool, scale_wrt_gas: bool
    ) -> torch.Tensor:
        """The same of a leaf. zeroshard's engine divides by the leaves of all ranks."""
        batch = self.batch
        assert batch.leaves is not None
        if not scale_wrt_gas and batch.leaves % batch.ranks:
            raise zs.ConfigError(
                f"backward(scale_wrt_gas=False) with leaves={batch.leaves} on {batch.ranks} ranks,"
                " which accumulate differently often: leave the division to the engine, or take a"
                " number of ranks that divides the leaves"
            )
        whole = loss if scale_wrt_gas else loss * batch.steps
        self.engine.backward(whole, retain_graph=retain_graph)
        leaves.end()
        self.progress.backwards += 1
        return loss / batch.steps if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times fp16's scale, for a plain ``.backward()`` of what is returned: that
        of a further tensor made of it raises in fp16, as a plain backward does. Raises ConfigError
        for a loss with dimensions.
        """
        self._trained("scale()")
        if loss.ndim:
            raise zs.ConfigError(
                f"engine.scale() of a loss of shape {tuple(loss.shape)}: give it one number, such"
                " as loss.mean()"
            )
        if not self.engine.precision.needs_loss_scaling:
            return loss
        scaled = loss.float() * self.engine.loss_scale

        def backward(gradient: Any = None, retain_graph: bool = False, **_: Any) -> None:
            self.engine.backward(loss, retain_graph=retain_graph)
            self.progress.backwards += 1

        scaled.backward = backward  # type: ignore[assignment]
        return scaled

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last before a step. Without
        `managed_gradient_accumulation` only ``step()`` is a boundary.
        """
        if not self.managed_gradient_accumulation():
            return self._stepping
        if self._boundary is not None:
            return self._boundary
        return (self.progress.micro_steps + 1) % self.batch.steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batches from here on are at a boundary; None: count them. Raises
        ConfigError where every ``step()`` is one.
        """
        self._managed("set_gradient_accumulation_boundary()")
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary take the optimizer's step, else count. Raises StateError in no_sync()."""
        self._trained("step()")
        if self._collecting:
            raise zs.StateError("engine.step() inside no_sync(): call it after the context")
        progress = self.progress
        progress.applied = False
        if self._leaves is not None:
            self._leaves.end()
        self._stepping = True
        steps = progress.global_steps
        try:
            if self.is_gradient_accumulation_boundary():
                with self._watch.part("step", steps):
                    self._take_step(lr_kwargs or {})
        finally:
            self._stepping = False
        progress.micro_steps += 1
        self.tput_timer.stop(global_step=progress.global_steps > steps)
        if progress.global_steps > steps:
            self._watch.end_step(progress.global_steps, progress.global_samples, self.get_lr())

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer, progress = self.optimizer, self.progress
        assert optimizer is not None
        if self._leaves is not None:
            self._leaves.finish()
        norm = self.engine.clip_grad_norm_(self.clipping or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        progress.applied = not optimizer.overflow
        if optimizer.overflow:
            progress.skipped_steps += 1
        else:
            progress.norm = norm
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        progress.global_steps += 1
        batch, forwards = self.batch, self.batch.leaves
        if forwards is None:
            managed = self.managed_gradient_accumulation()
            forwards = batch.ranks * (batch.steps if managed else progress.backwards)
        progress.global_samples += batch.micro * forwards
        progress.backwards = 0
        every: Any = self.config.get("steps_per_print")
        is_given = isinstance(every, (int, float)) and every  # neither left out, nor "auto"
        if is_given and progress.global_steps % every == 0 and self.engine.rank == 0:
            counts = progress.global_steps, progress.skipped_steps, self.get_lr()
            _log.info("step=%d, skipped=%d, lr=%s", *counts)

    def _managed(self, call: str) -> None:
        if not self.managed_gradient_accumulation():
            raise zs.ConfigError(
                f"engine.{call} with managed_gradient_accumulation=false: every engine.step() is a"
                " boundary, so call it where the step is"
            )

    def _trained(self, call: str) -> None:
        if self.optimizer is None:
            raise zs.StateError(
                f"engine.{call} without an optimizer: give initialize() one, or an optimizer"
                " section"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum up the gradients of backwards inside without reducing them, at every stage; what a
        rank keeps meanwhile is what its stage's row says.
        """
        before, self._collecting = self._collecting, True
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._collecting = before

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """The same: what is left is reduced once, by the step. Raises ConfigError where every
        ``step()`` is a boundary.
        """
        self._managed("coalesce_grad_reduction()")
        return self.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if self.optimizer is None:
            super().zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad()

    # ------------------------------------------------------------------ the rest of its life

    def compile(
        self, backend: Any = None, compile_kwargs: Any = None, schedule: Any = None
    ) -> None:
        """Compile the forward of each unit below the root; gathers stay between them. Raises
        ConfigError for a `schedule` of passes.
        """
        if schedule is not None:
            raise zs.ConfigError("compile(schedule=): DeepCompile's passes are not supported")
        options = dict(compile_kwargs or {}) | ({} if backend is None else {"backend": backend})
        blocks: dict[str, Any] = dict(self.module.named_modules())
        for block in (blocks.get(name) for name in self.engine.units):
            if block is not None and block is not self.module:
                block.forward = torch.compile(block.forward, **options)

    def offload_states(self, include: Any = None, **_: Any) -> None:
        """Bring every state to the host until `reload_states`: all of them also where `include`
        names some, but the weights among them. Raises ConfigError for states without the weights.
        """
        kinds = {getattr(one, "value", one) for one in include or ("lp_params",)}
        if not kinds - {"lp_grads", "contiguous_grad_buffer"}:
            return  # buffers hold nothing between steps
        if "lp_params" not in kinds:
            raise zs.ConfigError(
                f"offload_states(include={sorted(kinds)}): states go together with the weights;"
                " leave include out, or let them rest on the host with offload_optimizer"
            )
        self.engine.offload_states()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took away."""
        self.engine.reload_states()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group."""
        self._trained("set_lr()")
        self.optimizer.set_lr(lr)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are reduced as they are made."""

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Any:
        """Return a DataLoader of this rank's part of `dataset`. `options` are the DataLoader's,
        `data_sampler`, `num_local_io_workers` and `route` among them as DeepSpeed calls them.
        """
        return make_loader(dataset, self, batch_size=batch_size, **options)

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, **_: Any
    ) -> None:
        """Load ``checkpoint["module"]``, whole weights, the same on every rank. Collective."""
        if custom_load_fn is not None:
            raise zs.ConfigError("custom_load_fn: load them into engine.module in engine.gathered")
        with self.engine.gathered(writeback=True):
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    def collect_python_gc(self) -> int:
        """Run the garbage collector, which ``disable_python_gc`` has switched off."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Do nothing: no gathered parameter outlives its use."""

    def destroy(self) -> None:
        """Give back a plain module and a plain optimizer. Collective."""
        held_parameters.unmark(self.module.parameters())
        held_parameters.end_state_dicts(self.module)
        held_parameters.release(self.engine)
        self.engine.close()
        for parameter in self._client.left_out:
            parameter.requires_grad_(True)
        if self._end_pause is not None:
            self._end_pause()
