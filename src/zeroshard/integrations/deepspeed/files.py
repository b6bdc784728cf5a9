"""Checkpoints and whole weights under DeepSpeed's calls.

    save_dir/latest                                the newest tag
    save_dir/global_step8/step-0000000008/...      zeroshard's checkpoint (zs.save), which loads on
                                                   any number of ranks and any stage

Invariant: ``latest`` names a tag only once its checkpoint is complete. Frozen parameters are always
in it.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from zeroshard.integrations.deepspeed.batches import Batch, Progress

__all__ = ["Files"]

_log = logging.getLogger("DeepSpeed")
_LATEST = "latest"


class Files:
    """Saving and loading of an engine."""

    engine: zs.Engine
    optimizer: Any
    lr_scheduler: Any
    progress: Progress
    batch: Batch

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything under ``save_dir/tag`` (default: ``global_stepN``). Collective.

        `client_state` is numbers, text, lists, dictionaries and tensors. Frozen parameters are
        saved also with `exclude_frozen_parameters`: a checkpoint here is always whole.
        """
        tag = f"global_step{self.progress.global_steps}" if tag is None else str(tag)
        self._same_tag(tag)
        directory = Path(save_dir) / tag
        extra = {"client_state": dict(client_state or {}), "progress": self.progress.counts()}
        step = self.progress.global_steps
        path = zs.save(directory, self.engine, step=step, states=self._states(), extra=extra)
        if self.engine.rank == 0:
            # a tag has one checkpoint: those of a run before would count as newer
            for other in directory.glob("step-*"):
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
            if save_latest:
                part = Path(save_dir) / f".{_LATEST}.part"
                part.write_text(tag, encoding="utf-8")
                part.replace(Path(save_dir) / _LATEST)
        self.engine.exchange(b"", "save_checkpoint()")  # `latest` is there for every rank
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what `save_checkpoint` wrote; return its path and the client state, or (None, {})
        where `load_dir` has no ``latest``. Collective.

        Raises CheckpointError, and ConfigError for `custom_load_fn`.
        """
        if custom_load_fn is not None:
            raise zs.ConfigError("custom_load_fn: weights are read in shards; load them before")
        tag = _latest(Path(load_dir)) if tag is None else str(tag)
        self._same_tag(tag or "")
        if tag is None:
            _log.warning("%s has no file %r: nothing is loaded", load_dir, _LATEST)
            return None, {}
        directory = Path(load_dir) / tag
        _refuse_foreign(directory)
        with_optimizer = load_optimizer_states and not load_module_only
        with_schedule = load_lr_scheduler_states and not load_module_only
        states = self._states() if with_schedule else {}
        keeps = self.optimizer is not None and not with_optimizer
        before = self.optimizer.state_dict() if keeps else None
        strict = load_module_strict and not keeps
        restored = zs.load(directory, self.engine, states=states, strict=strict)
        if before is not None:
            self.optimizer.load_state_dict(before)
        _check_module(restored.skipped, strict=load_module_strict)
        extra = restored.extra or {}
        if not load_module_only:
            vars(self.progress).update(extra.get("progress", {}))
            # a checkpoint holds no gradient, so a step begins, of as many micro-batches as now
            self.progress.micro_steps = self.progress.global_steps * self.batch.steps
        return str(directory), extra.get("client_state", {})

    def _states(self) -> dict[str, Any]:
        return {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}

    def _same_tag(self, tag: str) -> None:
        tags = {one.decode() for one in self.engine.exchange(tag.encode(), "a checkpoint's tag")}
        if len(tags) > 1:
            raise zs.PlanMismatch(f"the ranks name different tags: {', '.join(sorted(tags))}")

    # ------------------------------------------------------------------ whole weights

    def module_state_dict(self, **_: Any) -> dict[str, torch.Tensor]:
        """Return the whole state_dict on every rank, on CPU. Collective."""
        return self.engine.full_state_dict(rank0_only=False)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole state_dict on rank 0, None on the others. Collective."""
        state = self.engine.full_state_dict()
        if exclude_frozen_parameters:
            module = self.engine.module
            frozen = {name for name, one in module.named_parameters() if not one.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state if self.engine.rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights in the dtype that computes, with torch.save. Collective."""
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        self.engine.exchange(b"", "save_16bit_model()")
        return True

    save_fp16_model = save_16bit_model


def _latest(directory: Path) -> str | None:
    try:
        return (directory / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def _refuse_foreign(directory: Path) -> None:
    if any(directory.glob("*_model_states.pt")):
        raise zs.CheckpointError(
            f"{directory} is a checkpoint that DeepSpeed wrote: make it one of zeroshard's with"
            f" `zeroshard checkpoint import {directory.parent} OUT_DIR`, and load that with"
            " zeroshard.load()"
        )


def _check_module(skipped: list[str], *, strict: bool) -> None:
    """Raise CheckpointError where strict and a parameter did not fit."""
    misfits = [line for line in skipped if line.startswith("parameter ")]
    if strict and misfits:
        raise zs.CheckpointError("; ".join(misfits))
