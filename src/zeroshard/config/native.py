"""The keywords of ``zeroshard.shard`` as one validated pydantic model, with JSON in and out.

Invariant: ``Config.from_json(config.to_json()) == config``. Lower layers never see a config object:
sharding/api.py lowers it to Policy, Precision and plain numbers. An unsupported field is refused,
never dropped.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError, field_validator, model_validator

from zeroshard.config.option_sections import Comm, LossScale, Offload, State, Strict, one_line
from zeroshard.config.strict_json import nearest, parse_json, read_json
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import STAGES, Policy, row
from zeroshard.core.precision import PRECISIONS, Precision, dtype_name
from zeroshard.core.shares import (
    Ownership,
    check_batch_shares,
    check_shares,
    split_batch,
    unequal,
)
from zeroshard.core.sizes import any_of, budget_bytes
from zeroshard.core.tree import Tree, deal
from zeroshard.core.wire import CODEC_BITS
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from zeroshard.deepspeed.keys.findings import FileFindings

_log = logging.getLogger("zeroshard")

AUTO = "auto"  # the policy that shard() plans


class Config(Strict):
    """Everything that ``shard()`` takes besides the model, the optimizer and the mesh."""

    stage: int | None = Field(
        default=None,
        description="The ZeRO stage: 0 (plain data parallel), 1 shards the optimizer's state, 2"
        " gradients as well, 3 (the default) weights as well.",
    )
    policy: str | Policy | None = Field(
        default=None,
        description="In place of `stage`, a row of the table of policies by name, a Policy, or"
        " auto: the fastest row that fits here.",
    )
    precision: str | Precision = Field(
        default="fp32",
        description="The dtypes: fp32, bf16 or fp16 (the last two beside fp32 masters), or a"
        " Precision.",
    )
    offload: Offload = Field(
        default=Offload(), description="On which tier (device, host, disk) each state rests."
    )
    shares: Sequence[float] | Literal["memory", "auto"] | None = Field(
        default=None,
        description="The share of what is sharded that each data parallel rank keeps, numbers that"
        " sum to 1; memory follows their free memory, auto measures them (default: equal).",
    )
    ownership: Ownership | None = Field(
        default=None,
        description="whole: each rank owns whole parameters of what is sharded, as steps need that"
        " go by their norms or matrices (default: parts of equal size); whole_by_cost: and ranks"
        " take as long for Muon's products, with as much memory as that takes.",
    )
    matrix_parts: dict[str, int | tuple[int, ...]] | None = Field(
        default=None,
        description="Parameters that an optimizer of matrices steps as several, by pattern of their"
        " names: how many, along the first dimension, or how many rows each has (q, k, v of one"
        " matrix; heads; experts). Beside ownership.",
    )
    comm: Comm = Field(default=Comm(), description="How bytes travel.")
    loss_scale: LossScale | None = Field(
        default=None, description="How losses are scaled in fp16 (default: as GradScaler does)."
    )
    units: Any = Field(
        default=None,
        description="The modules that are gathered together, as classes, qualified names or a"
        " callable(name, module) -> bool (default: found automatically).",
    )
    prefetch_bytes: int | None = Field(
        default=None,
        ge=0,
        description="The most bytes of weights gathered ahead of their use (default: chosen).",
    )
    stall_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="After how many seconds a wait for a rank is a StallError (default: 900 until"
        " the first step is over, then 300).",
    )
    strict: bool = Field(
        default=False,
        description="Whether writes to released parameters are found by value, and forwards without"
        " gradients that ranks run differently at their end, where gathers meet by order (NCCL).",
    )
    verify_every: int | None = Field(
        default=None,
        ge=1,
        description="The number of steps between comparisons of replicated state over the ranks.",
    )
    broadcast_buffers: bool = Field(
        default=False, description="Whether every forward takes rank 0's buffers, as DDP does."
    )
    gradient_clipping: float | None = Field(
        default=None,
        gt=0,
        description="The norm that a step clips to where clip_grad_norm_() was not called.",
    )
    accumulation_budget: int | str | None = Field(
        default=None,
        description="The most bytes (or 2GiB) of gradients at rest on a rank inside no_sync():"
        " units keep whole gradients that fit, others are reduced at each micro-batch"
        " (default: as the row does).",
    )
    train_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="The samples of a step, compared with the product of the next two and the"
        " ranks.",
    )
    train_micro_batch_size_per_gpu: int | None = Field(
        default=None, ge=1, description="The samples of one forward of one rank."
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, description="The forwards of a step."
    )
    batch_shares: Sequence[float] | None = Field(
        default=None,
        description="What the mean loss of each data parallel rank counts, in rank order, with the"
        " sum 1: the part of a global batch that it computes (default: all the same).",
    )
    gradient_reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="Whether a step takes the mean of the ranks' gradients, or their sum.",
    )
    leaves: int | str | None = Field(
        default=None,
        description="The micro-batches of a step (or the levels of their tree, 3x2x2); their sum is"
        " the same on any number of ranks: docs/one-curve.md (default: sums are over ranks).",
    )

    @field_validator("leaves")
    @classmethod
    def _tree(cls, leaves: int | str | None) -> int | str | None:
        try:
            if leaves is not None:
                Tree.parse(leaves)
        except ValueError as error:
            raise ValueError(f"leaves={leaves!r}: {error}") from None
        return leaves

    @field_validator("stage")
    @classmethod
    def _known_stage(cls, stage: int | None) -> int | None:
        if stage is not None and stage not in STAGES:
            raise ValueError(f"stage={stage} does not exist: 0 (plain data parallel), 1, 2 or 3")
        return stage

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str | Policy | None) -> str | Policy | None:
        if isinstance(policy, str) and policy != AUTO:
            row(policy)
        return policy

    @field_validator("shares", mode="before")
    @classmethod
    def _known_shares(cls, shares: Any) -> Any:
        return check_shares(shares)

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, precision: str | Precision) -> str | Precision:
        if isinstance(precision, str) and precision not in PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not one of {', '.join(PRECISIONS)}, nor a"
                " zeroshard.Precision"
            )
        return precision

    @field_validator("batch_shares")
    @classmethod
    def _shares_of_one(cls, shares: Sequence[float] | None) -> tuple[float, ...] | None:
        if shares is None:
            return None
        try:
            check_batch_shares(shares)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return tuple(shares)

    @field_validator("accumulation_budget")
    @classmethod
    def _bytes_of_gradients(cls, budget: int | str | None) -> int | None:
        return budget_bytes(budget)

    @model_validator(mode="after")
    def _one_policy(self) -> Config:
        if self.stage is not None and self.policy is not None:
            name = self.policy if isinstance(self.policy, str) else self.policy.name
            raise ValueError(
                f"stage={self.stage} and policy={name!r} were both given: one of them decides"
            )
        uneven = self.shares is not None or self.ownership is not None
        if self.policy == AUTO and (uneven or self.offload.by_rank):
            raise ValueError(
                "policy='auto' plans ranks that are alike, without shares, ownership or tiers per"
                " rank: name a row"
            )
        if self.matrix_parts is not None and self.ownership is None:
            raise ValueError(
                "matrix_parts are stepped by the rank that owns them: give ownership='whole'"
            )
        if self.shares is not None and self.ownership is not None:
            raise ValueError(
                "shares and ownership both say what each rank owns: leave one of them out"
            )
        return self

    def resolved_policy(self) -> Policy:
        """Return the row in force (default: stage 3), on the tiers of `offload`. Raises ConfigError
        for "auto", which `shard` decides.
        """
        if self.policy == AUTO:
            raise ConfigError("policy='auto' names no row: zs.shard() chooses one")
        policy = self.policy or STAGES[3 if self.stage is None else self.stage]
        if isinstance(policy, str):
            policy = row(policy)
        if not self.offload.away:
            return policy
        try:
            weight, grad, optimizer = (self.offload.tier(state) for state in get_args(State))
            return policy.tiered(weight, grad, optimizer)
        except ValueError as error:
            raise ConfigError(f"policy={policy.name!r} with this offload: {error}") from None

    def at(self, rank: int) -> Config:
        """Return what data parallel rank number `rank` does: its own tiers, where ranks differ."""
        offload = self.offload.at(rank)
        return self if offload is self.offload else self.model_copy(update={"offload": offload})

    def resolved_precision(self) -> Precision:
        """Return the dtypes in force."""
        return PRECISIONS[self.precision] if isinstance(self.precision, str) else self.precision

    def loss_scaler(self) -> LossScaler | None:
        """Return the scaler of losses in fp16, and None in other precisions."""
        if not self.resolved_precision().needs_loss_scaling:
            return None
        return LossScaler() if self.loss_scale is None else self.loss_scale.scaler()

    def batch_sizes(self, num_ranks: int) -> tuple[int | None, int | None, int | None]:
        """Return the samples of a step, the samples of a forward, and the forwards of a step: two
        of the three give the third, with leaves one the others; forwards are the most of any rank.
        Raises ConfigError where they do not multiply up over `num_ranks`.
        """
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if (counts := self.leaves_of(num_ranks)) is not None:
            return self._batch_of_leaves(counts)
        if total is None and micro is not None and steps is not None:
            total = micro * steps * num_ranks
        elif total is not None and micro is not None and steps is None:
            steps = max(1, total // (micro * num_ranks))
        elif total is not None and micro is None and steps is not None:
            micro = max(1, total // (steps * num_ranks))
        if total is None or micro is None or steps is None:
            return total, micro, steps
        if total != micro * steps * num_ranks:
            raise ConfigError(
                f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x"
                f" gradient_accumulation_steps={steps} x {num_ranks} ranks"
            )
        return total, micro, steps

    def _batch_of_leaves(self, counts: list[int]) -> tuple[int | None, int | None, int | None]:
        """Return `batch_sizes` where ranks compute `counts` leaves."""
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps, leaves = self.gradient_accumulation_steps, sum(counts)
        if steps not in (None, min(counts), max(counts)):
            raise ConfigError(
                f"gradient_accumulation_steps={steps} contradicts leaves={self.leaves} on"
                f" {len(counts)} ranks, which compute {counts} of them: leave it out"
            )
        if micro is None and total is not None:
            micro = max(1, total // leaves)
        if total is None and micro is not None:
            total = micro * leaves
        if total is not None and micro is not None and total != micro * leaves:
            raise ConfigError(
                f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x"
                f" leaves={self.leaves}"
            )
        return total, micro, max(counts)

    def unequal_shares(self, num_ranks: int) -> tuple[float, ...]:
        """Return what the loss of each rank counts, empty where all count the same. Raises
        ConfigError where `num_ranks` have other shares than there are.
        """
        shares = self.batch_shares or ()
        if shares and len(shares) != num_ranks:
            raise ConfigError(
                f"batch_shares has {len(shares)} numbers for {num_ranks} data parallel ranks: give"
                " one per rank, in rank order"
            )
        return unequal(shares)

    def leaves_of(self, num_ranks: int) -> list[int] | None:
        """Return how many leaves of a step each rank computes, by `batch_shares` where they are
        given; None without leaves. Raises ConfigError where a rank would have none.
        """
        if self.leaves is None:
            return None
        total, shares = Tree.parse(self.leaves).leaves, self.unequal_shares(num_ranks)
        counts = split_batch(total, shares) if shares else deal(total, num_ranks)
        if min(counts) < 1:
            raise ConfigError(
                f"leaves={self.leaves} gives {total} micro-batches to {num_ranks} data parallel"
                f" ranks, as {counts}: every rank needs one at least"
            )
        return counts

    def refuse_unsupported(self) -> None:
        """Raise ConfigError for options that this version does not support."""
        self.offload.check()
        self._check_leaves()
        self._check_codecs()
        self._check_accumulation()
        precision = self.resolved_precision()
        if precision.decodes and self.offload.leaving:
            option = "master='remainder'" if precision.has_remainders else "moments='bf16'"
            raise ConfigError(
                f"precision.{option} is for states that rest on the device, and offload"
                f" rests {', '.join(self.offload.leaving)} elsewhere: leave one of them out"
            )
        for option in ("batch_shares", "leaves") if self.gradient_reduction == "sum" else ():
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"gradient_reduction='sum' adds what ranks have, and {option} says how many"
                    " losses a mean is over: leave one of them out"
                )
        if self.loss_scale is not None and not self.resolved_precision().needs_loss_scaling:
            raise ConfigError("loss_scale has no effect without precision='fp16': leave it out")
        self.loss_scaler()

    def _check_codecs(self) -> None:
        comm, policy = self.comm, self.at(0).resolved_policy()
        codecs = comm.codecs()
        shards_all = all(cells.weight.scope is Scope.SHARD for cells in policy.all_cells)
        for setting in ("weight_codec", "frozen_codec"):
            name = getattr(comm, setting)
            if name is not None and not shards_all:
                raise ConfigError(
                    f"comm.{setting}={name!r} encodes gathers of weights that rest sharded over all"
                    f" ranks (zero3, hpz); policy={policy.name!r} keeps them otherwise"
                )
            if name == "bf16":
                raise ConfigError(
                    f"comm.{setting}='bf16' is no codec: weights travel in the compute dtype; use"
                    " precision='bf16'"
                )
        if comm.error_feedback and codecs.grad is None:
            raise ConfigError(
                f"comm.error_feedback has no effect without an {any_of(CODEC_BITS)} comm.grad_codec"
            )

    def _check_leaves(self) -> None:
        if self.leaves is None:
            return
        option, comm = f"leaves={self.leaves}", self.comm
        if comm.grad_codec is not None:
            raise ConfigError(
                f"{option} fixes the bits of every sum, and comm.grad_codec={comm.grad_codec!r}"
                " rounds sums on their way: leave one of them out"
            )
        if comm.ordered is False:
            raise ConfigError(
                f"{option} fixes the bits of every sum, and comm.ordered=False leaves their order"
                " to the backend: leave one of them out"
            )
        if self.resolved_precision().accumulate is not torch.float32:
            raise ConfigError(
                f"{option} adds gradients in fp32, and accumulate="
                f"{dtype_name(self.resolved_precision().accumulate)!r} would round what rests"
                " between leaves: take accumulate='fp32'"
            )

    def _check_accumulation(self) -> None:
        if self.accumulation_budget is None:
            return
        option, policy = f"accumulation_budget={self.accumulation_budget}", self.resolved_policy()
        if not any(cells.grad.is_sharded for cells in policy.all_cells):
            raise ConfigError(
                f"{option} has no effect: policy={policy.name!r} keeps whole gradients inside"
                " no_sync() anyway; leave it out"
            )
        if any(cells.grad.tier is Tier.DISK for cells in policy.all_cells):
            raise ConfigError(
                f"{option} would let whole gradients rest on disk, and they change at every"
                " micro-batch: take offload.grad='host', or leave the budget out"
            )

    def to_json(self) -> str:
        """Return JSON text. Raises ConfigError for a Policy object or a callable `units`."""
        data = self.model_dump(exclude={"policy", "precision", "units"})
        if isinstance(self.policy, Policy):
            raise ConfigError("a zeroshard.Policy object has no JSON form: name a row of the table")
        data["policy"] = self.policy
        data["precision"] = self.precision
        if isinstance(self.precision, Precision):
            data["precision"] = self.precision.names()
        units = () if self.units is None else self.units
        if not isinstance(units, (list, tuple)) or not all(isinstance(one, str) for one in units):
            raise ConfigError(
                "units given as classes or a callable have no JSON form: give qualified names"
            )
        data["units"] = None if self.units is None else list(units)
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read what `to_json` wrote. Raises ConfigError naming a wrong key and the nearest."""
        return build_config(parse_json(text, "the configuration"))

    @classmethod
    def read(cls, source: Config | dict[str, Any] | str | Path | None) -> Config:
        """Return the configuration in `source`, in our format or in DeepSpeed's."""
        return build_config(source)

    @classmethod
    def from_deepspeed(cls, source: str | Path | dict[str, Any]) -> Config:
        """Read a DeepSpeed configuration: a path to its JSON, or the dict.

        Raises ConfigError with every key that cannot be honoured (``read_deepspeed`` lists all
        keys and what they do here); "auto" leaves a key to whoever fills it in
        (``zeroshard.integrations.transformers``), and to our default otherwise.
        """
        file = _read_deepspeed(source)
        config = build_config(file.checked_fields())
        _tell([], file.unknown())
        return config


class ShardOptions(TypedDict, total=False):
    """The keywords of ``shard()`` that are `Config`'s, for editors and type checkers. None
    stands for the default, a dict for a section.
    """

    precision: str | Precision | None
    offload: Offload | dict[str, Any] | None
    shares: Sequence[float] | Literal["memory", "auto"] | None
    ownership: Ownership | None
    matrix_parts: dict[str, int | tuple[int, ...]] | None
    comm: Comm | dict[str, Any] | None
    loss_scale: LossScale | dict[str, Any] | None
    prefetch_bytes: int | None
    stall_timeout_s: float | None
    strict: bool | None
    verify_every: int | None
    broadcast_buffers: bool | None
    gradient_clipping: float | None
    accumulation_budget: int | str | None
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None
    batch_shares: Sequence[float] | None
    gradient_reduction: Literal["mean", "sum"] | None
    leaves: int | str | None


def build_config(source: Config | dict[str, Any] | str | Path | None, **overrides: Any) -> Config:
    """Return the configuration in `source` (Config, dict, JSON path) with `overrides`.

    Raises ConfigError, one line, naming a wrong key with the nearest right one, or a wrong value.
    """
    data: Any = {} if source is None else source
    if isinstance(source, (str, Path)):
        data = read_json(source, _is_deepspeed)
    elif isinstance(source, Config):
        data = {name: getattr(source, name) for name in source.model_fields_set}
    if not isinstance(data, dict):
        raise ConfigError(
            "config must be a zeroshard.Config, a dict or a path to a JSON object, not"
            f" {type(data).__name__}"
        )
    if _is_deepspeed(data):
        file = _read_deepspeed(data)
        data = dict(file.checked_fields())
        if overrides.get("precision") is not None:
            data.pop("loss_scale", None)  # it belongs to the file's own precision
        _tell(file.without_effect(), file.unknown())
    data = dict(data)
    given = {key: value for key, value in overrides.items() if value is not None}
    for name, other in (("stage", "policy"), ("policy", "stage")):
        if name in given:
            data.pop(other, None)
    return _config_of(data | given)


def _is_deepspeed(data: Mapping[str, Any]) -> bool:
    """Whether `data` has the form of DeepSpeed's: not where all of its keys are ours."""
    if all(key.partition(".")[0] in Config.model_fields for key in data):
        return False
    from zeroshard.deepspeed.keys.findings import is_deepspeed  # with the first key not ours

    return is_deepspeed(data, Config.model_fields)


def _read_deepspeed(source: str | Path | dict[str, Any]) -> FileFindings:
    from zeroshard.deepspeed.keys.findings import read

    return read(source)


def _tell(keys: list[str], unknown: list[str]) -> None:
    """Log once, on rank 0, which keys of DeepSpeed's make no difference, and which are none."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if rank != 0:
        return
    for line in unknown:
        _log.warning("%s", line)
    if keys:
        _log.info(
            "of the DeepSpeed configuration %s make no difference here; zeroshard config explain"
            " FILE says why",
            ", ".join(keys),
        )


def _config_of(data: dict[str, Any]) -> Config:
    for key in data:
        if key not in Config.model_fields:
            if _is_deepspeed({key: None}):
                raise ConfigError(
                    f"{key!r} is a key of DeepSpeed's among keywords of shard(): use one form"
                )
            hint = nearest(key, list(Config.model_fields))
            raise ConfigError(f"{key!r} is not a keyword of shard(){hint}")
    if isinstance(data.get("precision"), dict):
        try:
            data["precision"] = Precision(**data["precision"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"precision: {error}") from None
    given = data.get("precision")
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if isinstance(dtype, torch.dtype):  # "bfloat16" or torch.bfloat16
        data["precision"] = dtype_name(dtype)
    try:
        return Config(**data)
    except ValidationError as error:
        raise ConfigError(one_line(error, Config)) from None
