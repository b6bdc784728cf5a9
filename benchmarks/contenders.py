"""Every contender as the same three calls: forward, backward, update. One small builder each,
and nothing shared but the model.

Each builder gets the same freshly initialised fp32 model and gives back a :class:`Trainee`. All use
torch's fused AdamW (or its Muon for the matrices of the blocks, and that AdamW for the rest) with
the same learning rate, clip gradients to the same norm, as training does, and in bf16 have weights
in bf16 with an fp32 master, except where a builder's docstring says what its library does instead.
Nothing is tuned for this library's sake: where a peer has a faster or leaner setting that keeps the
numbers, it is used and named.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks.model import GPT, Llama
from benchmarks.plan import CONTENDERS, OFFLOAD_CONTENDERS, OFFLOADS, Size, fake_ranks

__all__ = ["LEARNING_RATE", "Builder", "Missing", "Setup", "Trainee", "adamw", "builder_for"]

LEARNING_RATE = 3e-4
# elements; its defaults (5e8) would put this whole model into one bucket
DEEPSPEED_BUCKET = 6_500_000


class Missing(Exception):
    """The library that a contender needs is not installed here."""


@dataclass(frozen=True)
class Setup:
    """What a builder needs to know."""

    size: Size
    precision: str  # "fp32" or "bf16"
    device: torch.device
    disk_path: str | None = None  # a directory for what rests on disk
    max_norm: float = 1.0  # to which gradients are clipped
    optimizer: str = "adamw"  # or "muon"

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"


@dataclass
class Trainee:
    """A model being trained by one contender."""

    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], object]
    update: Callable[[], object]  # optimizer step and zero_grad
    facts: dict[str, Any] = field(default_factory=dict)
    engine: Any = None  # zeroshard's, where it is one of ours
    contexts: ExitStack = field(default_factory=ExitStack)  # entered for as long as it trains


Builder = Callable[[nn.Module, Setup], Trainee]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """The optimizer of every contender, unless it is Muon's turn."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _optimizers(
    model: nn.Module,
    setup: Setup,
    muon: type[torch.optim.Muon] = torch.optim.Muon,
    stepped: Sequence[nn.Parameter] = (),
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model, of the class `muon` for matrices, over its parameters, or
    over what is `stepped` in their place.
    """
    parameters = list(model.parameters())
    stepped = stepped or parameters
    if setup.optimizer == "adamw":
        return [adamw(stepped)]
    assert isinstance(model, (GPT, Llama))
    inside = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    pairs = list(zip(parameters, stepped, strict=True))
    matrices = [used for p, used in pairs if id(p) in inside]
    others = [used for p, used in pairs if id(p) not in inside]
    return [muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"), adamw(others)]


def _updating(
    optimizers: Sequence[torch.optim.Optimizer], clip: Callable[[float], object], setup: Setup
) -> Callable[[], None]:
    """Return the end of a step: clip, step, drop the gradients."""

    def update() -> None:
        clip(setup.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return update


def _clipping(
    model: nn.Module, setup: Setup, muon: type[torch.optim.Muon] = torch.optim.Muon
) -> Callable[[], None]:
    """Return the end of a step with torch's optimizers and clip, over the parameters of `model`."""
    clip = partial(clip_grad_norm_, list(model.parameters()))
    return _updating(_optimizers(model, setup, muon), clip, setup)


def builder_for(name: str, optimizer: str = "adamw") -> Builder:
    """Return the builder of contender `name`; raises Missing when its library cannot be imported
    here, or has no such optimizer. Imports that library.
    """
    assert name in CONTENDERS or name in OFFLOAD_CONTENDERS, (
        f"contender {name!r} is not in the plan"
    )
    if name == "dmuon" and optimizer == "adamw":
        raise Missing("it steps by Muon alone: --optimizer muon")
    if name.startswith(("deepspeed", "torch-zero1", "compute")) and optimizer == "muon":
        raise Missing("it steps by AdamW alone")
    if fake_ranks(name):
        return _faking(name.partition("@")[0])
    if name.startswith("deepspeed"):
        return _deepspeed(
            int(name[9]), reshard=name.endswith("-reshard"), offload=name.partition("+")[2]
        )
    if name.startswith(("fsdp2", "dmuon")):
        muon = _OwnedMuon if name == "dmuon" else _GatheredMuon
        return _fsdp2(reshard=not name.endswith("-keep"), host=name.endswith("+host"), muon=muon)
    if name.startswith("torch-ddp"):
        return _torch_ddp(views=name == "torch-ddp")
    if name == "torch-zero1":
        return _torch_zero1()
    if name in ("compute", "plain"):
        return _compute if name == "compute" else _plain
    if name.endswith("+trace"):
        return _traced(name.removesuffix("+trace"))
    row, _, transport = name.partition("@")
    whole = row.endswith("+whole")
    row = row.partition("+")[0]
    return _zeroshard(row, transport or "auto", OFFLOADS.get(name, {}), whole=whole)


def _faking(name: str) -> Builder:
    """Build contender `name` over the native collectives of a fake process group."""
    build = builder_for(name) if name.startswith("fsdp2") else _zeroshard(name, "nccl", {})

    def build_fake(model: nn.Module, setup: Setup) -> Trainee:
        trainee = build(model, setup)
        trainee.facts["trains"] = False
        return trainee

    return build_fake


def _zeroshard(row: str, transport: str, tiers: dict[str, Any], *, whole: bool = False) -> Builder:
    import zeroshard as zs

    def build(model: nn.Module, setup: Setup) -> Trainee:
        optimizers = _optimizers(model, setup)
        path = setup.disk_path if "disk" in tiers.values() else None
        engine = zs.shard(
            model,
            optimizers,
            policy=row,
            precision=setup.precision,
            comm=zs.Comm.model_validate(
                {
                    "transport": transport.removesuffix("-apart"),
                    "separate_reduce_group": transport.endswith("-apart"),
                }
            ),
            offload=zs.Offload(disk_path=path, **tiers),
            ownership="whole" if whole or len(optimizers) > 1 else None,
        )
        update = _updating(optimizers, engine.clip_grad_norm_, setup)
        return Trainee(model, Tensor.backward, update, engine=engine)

    return build


def _traced(row: str) -> Builder:
    """`row` inside ``engine.trace()``, until its contexts are closed: what recording costs. The
    file is written once per trace, and not timed.
    """
    build = _zeroshard(row, "auto", {})

    def build_traced(model: nn.Module, setup: Setup) -> Trainee:
        trainee = build(model, setup)
        enter = trainee.contexts.enter_context
        enter(trainee.engine.trace(enter(TemporaryDirectory(prefix="zeroshard-trace-"))))
        return trainee

    return build_traced


class _Master:
    """The optimizers on fp32 copies of a model's parameters, or of flat slices of them; where the
    model is fp32, a master shares the memory of the working slice.
    """

    def __init__(self, model: nn.Module, setup: Setup, rank: int = 0, num_shards: int = 1) -> None:
        self.max_norm = setup.max_norm
        self.slices: list[tuple[nn.Parameter, int, int]] = []
        self.working: list[Tensor] = []
        self.masters: list[nn.Parameter] = []
        for parameter in model.parameters():
            begin, end = (parameter.numel() * r // num_shards for r in (rank, rank + 1))
            working = parameter.data.view(-1)[begin:end]
            working = working.view_as(parameter) if num_shards == 1 else working
            self.slices.append((parameter, begin, end))
            self.working.append(working)
            self.masters.append(
                nn.Parameter(working.float() if working.dtype != torch.float32 else working)
            )
        self.optimizers = _optimizers(model, setup, stepped=self.masters)

    def update(self) -> None:
        """Step with the gradients that the parameters hold, write the weights back, and drop the
        gradients.
        """
        for (parameter, begin, end), master in zip(self.slices, self.masters, strict=True):
            assert parameter.grad is not None, (
                "every parameter of this model takes part in every step"
            )
            master.grad = parameter.grad.view(-1)[begin:end].float().view_as(master)
        clip_grad_norm_(self.masters, self.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for working, master in zip(self.working, self.masters, strict=True):
                if working.data_ptr() != master.data_ptr():
                    working.copy_(master)
        for (parameter, _, _), master in zip(self.slices, self.masters, strict=True):
            parameter.grad = master.grad = None


def _plain(model: nn.Module, setup: Setup) -> Trainee:
    """Plain PyTorch on every rank by itself."""
    model = model.bfloat16() if setup.bf16 else model
    if setup.bf16:
        return Trainee(model, Tensor.backward, _Master(model, setup).update)
    return Trainee(model, Tensor.backward, _clipping(model, setup))


def _compute(model: nn.Module, setup: Setup) -> Trainee:
    """Forward and backward as in `plain`, and the step on one shard of the parameters: a sharded
    trainer whose wire takes no time.

    The ranks drift apart, so its losses mean nothing.
    """
    model = model.bfloat16() if setup.bf16 else model
    master = _Master(model, setup, dist.get_rank(), dist.get_world_size())
    return Trainee(model, Tensor.backward, master.update, facts={"trains": False})


def _torch_ddp(*, views: bool) -> Builder:
    """torch DDP. In bf16 a bf16 model with an fp32 master by hand, which DDP itself does not
    offer: half the wire of autocast.
    """

    from torch.nn.parallel import DistributedDataParallel

    def build(model: nn.Module, setup: Setup) -> Trainee:
        model = model.bfloat16() if setup.bf16 else model
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        if setup.bf16:
            return Trainee(wrapped, Tensor.backward, _Master(model, setup).update)
        return Trainee(wrapped, Tensor.backward, _clipping(model, setup))

    return build


def _torch_zero1() -> Builder:
    """torch DDP with ZeroRedundancyOptimizer, which keeps no master: bf16 is autocast over fp32
    weights.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def build(model: nn.Module, setup: Setup) -> Trainee:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True
        )

        def forward(tokens: Tensor, targets: Tensor) -> Tensor:
            context: AbstractContextManager[object] = (
                torch.autocast(setup.device.type, torch.bfloat16) if setup.bf16 else nullcontext()
            )
            with context:
                loss = wrapped(tokens, targets)
                assert isinstance(loss, Tensor)
                return loss

        update = _updating([optimizer], partial(clip_grad_norm_, list(model.parameters())), setup)
        return Trainee(forward, Tensor.backward, update)

    return build


class _GatheredMuon(torch.optim.Muon):
    """Muon of matrices that FSDP2 shards: it gathers the update of each, in the bf16 with which
    Newton-Schulz begins. Every rank orthogonalizes all of it and takes its rows.
    """

    def direction(self, p: Tensor, grad: Tensor) -> Tensor:
        """Return the update of `grad`, some rows of p or all, with Nesterov's momentum."""
        buffer = self.state[p].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[p]["momentum_buffer"] = torch.zeros_like(grad)
        buffer.lerp_(grad, 1 - self.defaults["momentum"])
        return grad.lerp(buffer, self.defaults["momentum"])

    def orthogonal(self, update: Tensor) -> Tensor:
        """Return [rows, columns], bf16, of the update of a whole matrix."""
        options = (self.defaults[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        return _zeropower_via_newtonschulz(update, *options)

    def move(self, p: DTensor, update: Tensor) -> None:
        """Step this rank's rows of p."""
        lr, rule, decay = (self.defaults[n] for n in ("lr", "adjust_lr_fn", "weight_decay"))
        p.to_local().mul_(1 - lr * decay).add_(update, alpha=-_adjust_lr(lr, rule, p.shape))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every matrix."""
        for p in self.param_groups[0]["params"]:
            direction: Any = self.direction(p, p.grad).bfloat16()
            update = self.orthogonal(direction.full_tensor())
            rows = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
            self.move(p, rows.to_local())


class _OwnedMuon(_GatheredMuon):
    """Muon by DMuon's rule (arXiv 2606.27153): each matrix has an owner, dealt by the longest
    processing time first, that gets the whole averaged gradient, keeps the whole state, and gives
    every rank its rows of the update. Two exchanges serve all matrices.
    """

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, **options)
        self.owned: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
        loads = [0] * len(self.owned)
        costs = {p: min(p.shape) * p.numel() for p in self.param_groups[0]["params"]}
        for p in sorted(costs, key=costs.__getitem__, reverse=True):
            owner = loads.index(min(loads))
            self.owned[owner].append(p)
            loads[owner] += costs[p]

    def num_rows(self, p: Tensor) -> list[int]:
        """Return how many rows of p each rank has: as torch.chunk() cuts them."""
        ranks, (rows, _) = range(len(self.owned)), p.shape
        each = -(-rows // len(ranks))
        return [max(0, min(each, rows - rank * each)) for rank in ranks]

    def exchange(self, parts: list[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Send every rank its numbers of `parts`; return what all have sent to this one."""
        flat = torch.cat([part.flatten() for part in parts])
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat, received, sent)
        return out

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the matrices that this rank owns, and its rows of all."""
        mine, every = self.owned[dist.get_rank()], [p for part in self.owned for p in part]
        of_owners = [sum(p.to_local().numel() for p in part) for part in self.owned]
        ranks = range(len(self.owned))
        shares = [[self.num_rows(p)[rank] * p.shape[1] for p in mine] for rank in ranks]
        of_ranks = [sum(share) for share in shares]
        grads = self.exchange([p.grad.to_local() for p in every], of_owners, of_ranks)
        pieces = torch.split(grads, [numel for share in shares for numel in share])
        updates = []
        for index, p in enumerate(mine):
            grad = torch.cat(pieces[index :: len(mine)]).view(p.shape)
            update = self.orthogonal(self.direction(p, grad))
            updates.append(torch.split(update, self.num_rows(p)))
        by_rank = [part for rank in zip(*updates, strict=True) for part in rank]
        moved = self.exchange(by_rank, of_ranks, of_owners)
        rows = torch.split(moved, [p.to_local().numel() for p in every])
        for p, update in zip(every, rows, strict=True):
            self.move(p, update.view_as(p.to_local()))


def _fsdp2(*, reshard: bool, host: bool, muon: type[torch.optim.Muon]) -> Builder:
    """torch fully_shard, a group per block and one for the rest. In bf16 its gradients are
    reduced in bf16, its default and the faster.

    On a CPU its CPUOffloadPolicy runs without pinned memory, which wants an accelerator; every copy
    to the host is then one within memory.
    """

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    def build(model: nn.Module, setup: Setup) -> Trainee:
        assert isinstance(model, (GPT, Llama))
        mesh = init_device_mesh(setup.device.type, (dist.get_world_size(),))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            if setup.bf16
            else MixedPrecisionPolicy()
        )
        offload = (
            CPUOffloadPolicy(pin_memory=setup.device.type != "cpu") if host else OffloadPolicy()
        )
        for part in (*model.blocks, model):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                offload_policy=offload,
            )
        facts = {"units": len(model.blocks) + 1}
        return Trainee(model, Tensor.backward, _clipping(model, setup, muon), facts=facts)

    return build


def _deepspeed(stage: int, *, reshard: bool, offload: str) -> Builder:
    """DeepSpeed with torch's fused AdamW as client optimizer and buckets fit for this size; it
    clips in its step.

    With `offload` ("host", "weights" or "disk") its host step is that same AdamW, which on a CPU is
    as fast as its own compiled one.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise Missing(
            f"DeepSpeed cannot be imported: {error}; pip install 'zeroshard[bench]', or name an"
            " interpreter that has it"
        ) from error
    if (
        offload == "disk"
        and not deepspeed.accelerator.get_accelerator()
        .create_op_builder("AsyncIOBuilder")
        .is_compatible()
    ):
        raise Missing(
            "DeepSpeed's async_io operator cannot be built here: it needs libaio with its headers"
            " (libaio-dev)"
        )

    def build(model: nn.Module, setup: Setup) -> Trainee:
        zero: dict[str, Any] = {
            "stage": stage,
            "reduce_bucket_size": DEEPSPEED_BUCKET,
            "allgather_bucket_size": DEEPSPEED_BUCKET,
        }
        if stage == 3:
            zero["stage3_prefetch_bucket_size"] = DEEPSPEED_BUCKET
        if offload == "disk":
            nvme = {
                "device": "nvme",
                "nvme_path": setup.disk_path,
                "pipeline_read": True,
                "pipeline_write": True,
            }
            zero["offload_optimizer"] = nvme
        elif offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload == "weights":
            zero["offload_param"] = {"device": "cpu"}
        if reshard:
            zero["stage3_max_reuse_distance"] = zero["stage3_max_live_parameters"] = 0
        config = {
            "train_micro_batch_size_per_gpu": setup.size.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": setup.max_norm if math.isfinite(setup.max_norm) else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            "bf16": {"enabled": setup.bf16},
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config
        )
        return Trainee(engine, engine.backward, engine.step)

    return build
