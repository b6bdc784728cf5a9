"""Transformers' Trainer on zeroshard: ``ZeroTrainer`` replaces ``Trainer``.

    trainer = ZeroTrainer(model=model, args=arguments, train_dataset=data, zero="zero.json")
    # or zero=zs.Config(stage=3), zero={"stage": 2}
    trainer.train()

    class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer): ...       # any subclass of Trainer

The Trainer lets a subclass wrap the model (``_wrap_model``) and then leaves its preparation alone.
The model is sharded in place; the loop calls a thin module around it that has ``no_sync``, which
Accelerate looks for. Accelerate is told of no precision, so that it neither casts nor scales the
loss: the engine does. Clipping, saving and resuming go through the engine.

A Trainer checkpoint holds the whole weights in Transformers' format, and in ``zeroshard/`` one of
ours (masters, optimizer, schedule), which resumes on any number of ranks and any stage. Of a peft
model both hold the adapter alone. Evaluation before any training runs the plain model.

With ``leaves=V`` in the configuration, a step has V micro-batches of
``per_device_train_batch_size`` samples on any number of ranks, and the same weights, bit for bit
(docs/one-curve.md): the trainer deals them, evenly or not, and sets its
``gradient_accumulation_steps`` itself; samples, and what the dataset, the collator and the model
draw, follow from (seed, step, leaf). Samples that make no whole step are left out of an epoch.
"""

from __future__ import annotations

import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer

import zeroshard as zs

__all__ = ["ZeroTrainer", "ZeroTrainerMixin"]

_OURS = "zeroshard"  # the directory of our checkpoint within the Trainer's
_log = logging.getLogger("zeroshard")

# training arguments that cannot act on a model that the engine shards
_REFUSED = {
    "fsdp": "which shards the model itself: leave it out, and say how in zero=",
    "deepspeed": "which shards the model itself: leave it out, and say how in zero=",
    "torch_compile": (
        "since the engine's model is not the one that Accelerate compiles: leave it out, and call"
        " model.compile() before"
    ),
    "auto_find_batch_size": (
        "since one rank that retries a step is alone in it: leave it out, and choose the batch"
        " size (zeroshard plan predicts the memory)"
    ),
    "fp16_full_eval": "which does not convert a sharded model: leave it out, and use fp16=True",
    "bf16_full_eval": "which does not convert a sharded model: leave it out, and use bf16=True",
}


# engines of trainers: each has its model until another trainer takes it
_ENGINES: weakref.WeakSet[zs.Engine] = weakref.WeakSet()


def _close_engines_of(model: Any) -> None:
    """Give `model` back to a further trainer, where an earlier one has sharded it, or a model that
    holds it (an adapter's).
    """
    for engine in list(_ENGINES):
        if any(module is model for module in engine.module.modules()):
            _ENGINES.discard(engine)
            engine.close()


class _Wrapped(nn.Module):
    """The module that the training loop calls: the sharded model and ``no_sync``."""

    def __init__(self, model: nn.Module, engine: zs.Engine) -> None:
        super().__init__()
        self.module = model
        self.no_sync = engine.no_sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # config, is_gradient_checkpointing, generate, ...: TRL asks for them
            return getattr(super().__getattr__("module"), name)


def _unwrap(unwrap: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    """Accelerate's unwrap_model, which knows our wrapper, too: the Trainer looks at the class."""
    return unwrap(model.module if isinstance(model, _Wrapped) else model, **options)


class _Steps:
    """Tells Accelerate whether the last step was skipped, and with it the scheduler's."""

    def __init__(self, engine: zs.Engine) -> None:
        self._engine = engine
        self._seen = engine.steps_skipped

    @property
    def step_was_skipped(self) -> bool:
        before, self._seen = self._seen, self._engine.steps_skipped
        return self._seen > before


class _Samples(list[int]):
    """The samples of one leaf, and the seed of the random numbers with which they are made."""

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class _EpochSampler(zs.LeafSampler):
    """The samples of leaves, epoch by epoch as the Trainer counts them."""

    def __init__(self, data: Any, leaves: int, size: int, *, own: int, seeds: tuple[Any, int]):
        """This rank computes `own` of the leaves; `seeds`: of the order, and of random numbers."""
        self._num_own, self._random_seed = own, seeds[1]
        super().__init__(data, leaves, size, seed=seeds[0])

    def __len__(self) -> int:
        return self.num_steps * self._num_own

    def set_epoch(self, epoch: int) -> None:
        self.set_step(epoch * self.num_steps)

    def __getitem__(self, place: tuple[int, int]) -> list[int]:
        seed = random.Random(f"{self._random_seed} {place}").getrandbits(32)
        return _Samples(super().__getitem__(place), seed)


class _Batches(Dataset[Any]):
    """The batch of each leaf; what the dataset and the collator draw follows from the leaf."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._data, self._collate = data, collate

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, samples: _Samples) -> Any:
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(samples.seed)
            random.seed(samples.seed)
            np.random.seed(samples.seed)
            try:
                fetch = getattr(self._data, "__getitems__", None)
                every = fetch(list(samples)) if fetch else [self._data[i] for i in samples]
                return self._collate(every)
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])


def _collated(batch: Any) -> Any:
    return batch


class _LeafSteps:
    """The leaves of every step: which of them this rank's micro-steps are."""

    def __init__(self, counts: list[int], args: Any) -> None:
        """Rank r computes ``counts[r]`` of each step's leaves."""
        self.number, self.own = sum(counts), counts[args.process_index]
        self.sampler: _EpochSampler | None = None
        self._args = args
        self._walk: Iterator[int] | None = None  # of the step under way

    @contextmanager
    def micro_step(self, engine: zs.Engine, step: int, *, is_last: bool) -> Iterator[None]:
        """Run the next leaf of `step` inside; `is_last`: this rank's last one."""
        walk, self._walk = self._walk, None
        if walk is None:
            walk = engine.leaves(step, seed=self._args.seed)
        if next(walk, None) is None:
            raise zs.StateError("the Trainer runs more micro-steps than this rank has leaves")
        yield
        if not is_last:
            self._walk = walk
        elif next(walk, None) is not None:
            raise zs.StateError("the Trainer ended a step before all of its leaves had run")

    def dealt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader like the Trainer's, but of this rank's leaves."""
        args = self._args
        seed = args.seed if args.data_seed is None else args.data_seed
        seeds = (seed if _strategy(args) == "random" else None), seed
        sampler = _EpochSampler(
            loader.dataset, self.number, args.train_batch_size, own=self.own, seeds=seeds
        )
        self.sampler = sampler
        kept = (
            "num_workers", "pin_memory", "persistent_workers", "prefetch_factor",
            "multiprocessing_context",
        )  # fmt: skip
        options: dict[str, Any] = {name: getattr(loader, name) for name in kept}
        batches = _Batches(loader.dataset, loader.collate_fn)
        made = DataLoader(batches, batch_sampler=sampler, collate_fn=_collated, **options)
        made.set_epoch = sampler.set_epoch
        return made


def _strategy(args: Any) -> str:
    """Return how the Trainer orders samples; "random" is its default."""
    if getattr(args, "group_by_length", False):  # Transformers 4
        return "group_by_length"
    return str(getattr(args, "train_sampling_strategy", "random"))


_Base: Any = object  # it stands before a subclass of Trainer: super() finds its methods


class ZeroTrainerMixin(_Base):  # type: ignore[misc]
    """Makes a subclass of Trainer train sharded; it stands before that class.

    `zero` says how: a ``zeroshard.Config``, a dict of its keywords, or a path to JSON of either
    zeroshard's or DeepSpeed's form (default: stage 3). Precision comes from it, or from
    ``args.bf16`` and ``args.fp16``; batch sizes and clipping that it names must equal `args`.
    Raises ConfigError where the two contradict each other, and for arguments that cannot act on a
    sharded model.
    """

    def __init__(
        self, *args: Any, zero: zs.Config | dict[str, Any] | str | Path | None = None, **kwargs: Any
    ) -> None:
        self.engine: zs.Engine | None = None
        self._wrapped: _Wrapped | None = None
        self._asked = zero
        _close_engines_of(kwargs.get("model", args[0] if args else None))
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator without precision: no autocast and no GradScaler beside ours."""
        config = _read(self._asked, self.args)
        self._leaves = _leaves_of(config, self.args)
        self._zero = _completed(config, self.args)
        precision = getattr(self.args, "mixed_precision", None)
        self.args.mixed_precision = "no"
        self.args._n_gpu = min(self.args.n_gpu, 1)  # one process drives one device
        with mock.patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "no"}):
            super().create_accelerator_and_postprocess()
        self.args.mixed_precision = precision
        self.accelerator.unwrap_model = partial(_unwrap, self.accelerator.unwrap_model)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        engine = self.engine
        if engine is not None and (engine.module is not self.model or engine not in _ENGINES):
            engine.close()  # model_init has made another model, or another trainer has this one
            self.engine = None
        if not training:
            return model if self._wrapped is None or self.engine is None else self._wrapped
        if self.engine is None:
            optimizer = self.optimizer  # which the Trainer makes before it wraps the model
            if isinstance(optimizer, AcceleratedOptimizer):  # of an engine that is closed
                optimizer = optimizer.optimizer
            assert isinstance(self.model, nn.Module)
            _close_engines_of(self.model)
            self.engine = zs.shard(self.model, optimizer, config=self._zero, sync_from=0)
            _ENGINES.add(self.engine)
            self._wrapped = _Wrapped(self.model, self.engine)
            if self._leaves is not None:
                self.accelerator.backward = self._leaf_backward
            elif self._zero.resolved_precision().needs_loss_scaling:
                self.accelerator.backward = self._scaled_backward
        if self._leaves is not None and self._leaves.sampler is not None:
            self._leaves.sampler.engine = self.engine
        self.accelerator._optimizers.append(_Steps(self.engine))  # every train() empties the list
        assert self._wrapped is not None
        return self._wrapped

    def _scaled_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        assert self.engine is not None
        self.engine.backward(loss / self.accelerator.gradient_accumulation_steps)

    # ------------------------------------------------------------------ leaves

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run a micro-step; with leaves, one of this rank's, and what it returns is logged as the
        step's mean loss.
        """
        if (leaves := self._leaves) is None:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        assert self.engine is not None
        # the loss of a leaf is its part of the step's mean, whoever computes the other leaves
        self.current_gradient_accumulation_steps = leaves.number
        step, is_last = self.state.global_step, self.accelerator.sync_gradients
        with (
            leaves.micro_step(self.engine, step, is_last=is_last),
            mock.patch.object(self.args, "average_tokens_across_devices", False),
        ):
            loss = super().training_step(model, inputs, num_items_in_batch)
        loss = loss * self.args.world_size  # the Trainer logs its mean over ranks
        return loss

    def _leaf_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        assert self.engine is not None and self._leaves is not None
        self.engine.backward(loss * self._leaves.number)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the DataLoader of the training; with leaves, of this rank's."""
        with ExitStack() as stack:
            if self._leaves is not None:
                self._check_samples()
                dealt = mock.patch.object(self.accelerator, "prepare", self._leaves.dealt)
                stack.enter_context(dealt)
            loader: DataLoader[Any] = super().get_train_dataloader()
        return loader

    def _check_samples(self) -> None:
        """Raise ConfigError where the samples of a leaf do not follow from its number."""
        leaves = f"leaves={self._zero.leaves} takes the samples of a leaf by its number"
        if not hasattr(self.train_dataset, "__len__"):
            raise zs.ConfigError(
                f"{leaves}, and train_dataset has no length: give a dataset with __len__() and"
                " __getitem__()"
            )
        samplers = (super().get_train_dataloader, self._get_train_sampler)
        for method in samplers:
            if getattr(Trainer, method.__name__) is not method.__func__:
                raise zs.ConfigError(
                    f"{leaves}, and {type(self).__name__} chooses samples itself in"
                    f" {method.__name__}(): leave leaves out"
                )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return how many samples a step takes."""
        if self._leaves is None:
            return int(super().get_total_train_batch_size(args))
        return self._samples()

    # ------------------------------------------------------------------ clipping

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        assert self.engine is not None
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self.engine is not None
        return self.engine.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # ------------------------------------------------------------------ saving and loading

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole weights as ``save_pretrained`` does, of a peft model the adapter alone;
        every rank must call it.
        """
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state = self.engine.full_state_dict(trained=self._adapter() is not None)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _adapter(self) -> dict[str, nn.Parameter] | None:
        """Return the trained parameters of a peft model by name; None of any other model."""
        if find_spec("peft") is None:
            return None
        from peft import PeftModel

        if not isinstance(self.model, PeftModel):
            return None
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        directory, step = Path(output_dir) / _OURS, self.state.global_step
        zs.save(directory, self.engine, step=step, extra=self._samples(), **self._parts())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        directory = Path(checkpoint) / _OURS
        if not directory.is_dir():
            if (Path(checkpoint) / "optimizer.pt").is_file():
                raise zs.CheckpointError(
                    f"{checkpoint} was saved by a Trainer that does not shard, and its optimizer.pt"
                    " cannot be read by shares: begin with its weights (from_pretrained)"
                )
            _log.warning("%s holds weights alone: optimizer and schedule begin anew", checkpoint)
            return
        # the Trainer restores the generators from files of its own, once it has drawn the order of
        # the epoch's samples from them
        restored = zs.load(directory, self.engine, generators=False, **self._parts())
        if restored.extra != self._samples() and self.is_world_process_zero():
            _log.warning(
                "a step took %s samples in %s and takes %s now: the data goes on after as many"
                " steps, not samples",
                restored.extra,
                checkpoint,
                self._samples(),
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not (Path(resume_from_checkpoint) / _OURS).is_dir():  # else all of it is loaded later
            self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, checkpoint: str) -> None:
        assert self.engine is not None
        if (trained := self._adapter()) is None:
            zs.load_pretrained(self.engine, checkpoint)
            return
        with self.engine.gathered(trained.values(), writeback=True):
            self.model.load_adapter(checkpoint, self.model.active_adapters[0], is_trainable=True)

    def _parts(self) -> dict[str, Any]:
        """Return which states a checkpoint holds beside the engine's, and whether frozen weights
        are in it: a peft model takes them from elsewhere.
        """
        states = {} if self.lr_scheduler is None else {"scheduler": self.lr_scheduler}
        return {"states": states, "frozen": self._adapter() is None}

    def _samples(self) -> int:
        """Return how many samples a step takes."""
        args, leaves = self.args, self._leaves
        steps = args.gradient_accumulation_steps * args.world_size
        return int(self._train_batch_size * (steps if leaves is None else leaves.number))


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """A Trainer that trains sharded, as `ZeroTrainerMixin` says."""


def _leaves_of(config: zs.Config, args: Any) -> _LeafSteps | None:
    """Return the leaves of `config`, if any, and let a step of `args` be this rank's. Raises
    ConfigError for arguments under which ranks would do different things.
    """
    counts = config.leaves_of(args.world_size)
    if counts is None:
        return None
    option, given = f"leaves={config.leaves}", args.gradient_accumulation_steps
    if given not in (1, min(counts), max(counts)):
        raise zs.ConfigError(
            f"args.gradient_accumulation_steps={given} contradicts {option} on"
            f" {args.world_size} ranks, which compute {counts} of them: leave it out"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise zs.ConfigError(
            f"args.average_tokens_across_devices=False averages over the tokens of one rank, and"
            f" {option} over the tokens of the step: leave one of them out"
        )
    if (strategy := _strategy(args)) not in ("random", "sequential"):
        raise zs.ConfigError(
            f"{option} takes the samples of a leaf by its number, which the sampling strategy"
            f" {strategy!r} does not: leave one of them out"
        )
    counted = getattr(args, "include_num_input_tokens_seen", "no")
    if counted not in (False, "no") and min(counts) < max(counts):
        raise zs.ConfigError(
            f"args.include_num_input_tokens_seen meets all ranks in every micro-step, and {option}"
            f" gives {args.world_size} ranks {counts} of them: leave it out, or take a number of"
            " ranks that divides the leaves"
        )
    leaves = _LeafSteps(counts, args)
    args.gradient_accumulation_steps = leaves.own
    return leaves


def _completed(config: zs.Config, args: Any) -> zs.Config:
    """Return `config` completed from TrainingArguments. Raises ConfigError if they contradict."""
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise zs.ConfigError(f"args.{name} has no effect under ZeroTrainer, {reason}")
    if config.batch_shares is not None and config.leaves is None:
        raise zs.ConfigError(
            "batch_shares has no place in ZeroTrainer: the Trainer gives every rank as many samples"
            " and weighs their losses itself; leave it out"
        )
    changes: dict[str, Any] = {"gradient_clipping": None}  # the Trainer clips
    given = config.model_fields_set
    for precision in ("bf16", "fp16"):
        if not getattr(args, precision):
            continue
        if "precision" in given and config.precision != precision:
            raise zs.ConfigError(
                f"args.{precision} is on, but the configuration says"
                f" precision={config.precision!r}: make them agree, or leave one out"
            )
        changes["precision"] = precision
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    every = sum(config.leaves_of(args.world_size) or [steps * args.world_size])
    pairs = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * every,
        "gradient_clipping": args.max_grad_norm,
    }
    for name, value in pairs.items():
        mine = getattr(config, name)
        if mine is not None and mine != value:
            raise zs.ConfigError(
                f"{name}={mine} in the configuration contradicts the training arguments, which say"
                f" {value}: make them agree, or use 'auto'"
            )
    return config.model_copy(update=changes)


def _read(zero: zs.Config | dict[str, Any] | str | Path | None, args: Any) -> zs.Config:
    """Read the configuration, and compare what a DeepSpeed file says of the optimizer with `args`.

    A clipping that the file leaves out, which is 1.0 in DeepSpeed, comes from `args`.
    """
    config = zs.Config.read(zero)
    if zero is None or isinstance(zero, zs.Config):
        return config
    file = zs.read_deepspeed(zero)
    _compare_optimizers(file, args)
    sources = {finding.key: finding.source for finding in file.findings}
    if sources["gradient_clipping"] == "default":
        config = config.model_copy(update={"gradient_clipping": None})
    return config


_SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}


def _compare_optimizers(file: zs.DeepSpeedFile, args: Any) -> None:
    """Compare the file's optimizer and scheduler with those that the Trainer makes from `args`.

    Raises ConfigError for a value that contradicts them, as Transformers does; another kind of
    schedule is a warning, since the files of its documentation have one that is not its default.
    """
    given = {
        f"optimizer.params.{name}": value for name, value in (file.optimizer or ("", {}))[1].items()
    }
    kind, settings = file.scheduler or ("", {})
    given |= {f"scheduler.params.{name}": value for name, value in settings.items()}
    if file.optimizer is not None:
        given["optimizer.type"] = file.optimizer[0].lower().removesuffix("w")
    pairs: dict[str, Any] = {
        "optimizer.type": str(getattr(args.optim, "value", args.optim))
        .partition("_")[0]
        .removesuffix("w"),
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "optimizer.params.adam_w_mode": True,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
    }
    if args.warmup_steps == 0 or args.warmup_steps >= 1:  # not a share of steps not yet known
        pairs["scheduler.params.warmup_num_steps"] = max(1, int(args.warmup_steps))
    if args.max_steps > 0:
        pairs["scheduler.params.total_num_steps"] = args.max_steps
    for name, mine in pairs.items():
        theirs = given.get(name, "auto")
        theirs = list(theirs) if isinstance(theirs, tuple) else theirs
        if theirs not in ("auto", mine):
            raise zs.ConfigError(
                f"{name}={theirs!r} in the configuration contradicts the training arguments, which"
                f" say {mine!r}: make them agree, or use 'auto'"
            )
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind and _SCHEDULES.get(kind) != schedule:
        _log.warning(
            "scheduler.type=%r of the configuration is not used: the training arguments say"
            " lr_scheduler_type=%r",
            kind,
            schedule,
        )
