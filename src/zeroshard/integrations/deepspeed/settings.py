"""What the engine answers about its configuration and its training."""

from __future__ import annotations

from typing import Any

import torch

import zeroshard as zs
from zeroshard.integrations.deepspeed.batches import Batch, Progress

__all__ = ["Settings"]


class Settings:
    """The getters and setters of an engine."""

    engine: zs.Engine
    config: dict[str, Any]
    batch: Batch
    clipping: float
    progress: Progress
    optimizer: Any

    def train_batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a rank's forward."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the forwards of a step."""
        return self.batch.steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether ``step()`` steps at a boundary only, which the micro-batches are counted for."""
        return self.config.get("managed_gradient_accumulation") is not False

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch by the accumulation steps. Raises ConfigError where it cannot be."""
        self.batch.set_train(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a forward, and with them the batch."""
        self.batch.set_micro(micro_batch_size)

    def gradient_clipping(self) -> float:
        """Return the norm that a step clips to, 0 for none."""
        return self.clipping

    def zero_optimization_stage(self) -> int:
        """Return the stage; hpZ and MiCS are stage 3."""
        stage = self._zero().get("stage")
        return 3 if stage == "auto" else int(stage or 0)  # our default, where nobody filled it in

    def zero_optimization(self) -> bool:
        """Whether any state is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether stage 3 gives whole weights to who saves the model."""
        return bool(self._zero().get("stage3_gather_16bit_weights_on_model_save", False))

    def fp16_enabled(self) -> bool:
        """Whether it computes in fp16."""
        return self.engine.precision.compute is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether it computes in bf16."""
        return self.engine.precision.compute is torch.bfloat16

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the norm of the last step's gradient before clipping, None before a step."""
        return self.progress.norm

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` moved the weights."""
        return self.progress.applied

    def get_lr(self) -> list[Any]:
        """Return the learning rate of every param group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of every param group."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale, 1.0 in other precisions."""
        return self.engine.loss_scale

    @property
    def global_steps(self) -> int:
        """The steps so far, skipped ones too."""
        return self.progress.global_steps

    @property
    def global_samples(self) -> int:
        """The samples so far."""
        return self.progress.global_samples

    @property
    def micro_steps(self) -> int:
        """The calls of ``step()`` so far."""
        return self.progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """The steps that moved nothing."""
        return self.progress.skipped_steps

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.rank

    @property
    def dp_world_size(self) -> int:
        """The number of ranks."""
        return self.engine.world

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return next(self.engine.module.parameters()).device

    def _zero(self) -> dict[str, Any]:
        section = self.config.get("zero_optimization")
        return section if isinstance(section, dict) else {"stage": int(bool(section))}
