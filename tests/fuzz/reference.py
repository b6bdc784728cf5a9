"""Data parallel training by hand: plain replicas, and sums over ranks in the canonical order.

Each backward leaves one gradient per parameter and rank, in the parameter's dtype (a sum in that
dtype, where nested backwards add to it one after another). All are summed in fp32, the ranks of a
node and then the nodes, each by a balanced tree; the sum is added to the total, and the total is
divided by the number of ranks (and the loss scale) once, at the step.
Inside ``no_sync`` the rows differ in what is added first (DESIGN.md, section 1, Exactness):

    ddp, zero1      this rank's micro-batches, in fp32; then rounded to the wire dtype and summed
                    over ranks
    mics, hfsdp     the ranks of a node; then micro-batches; then nodes, unrounded (one node: as
                    zero3)
    the others      the ranks; then micro-batches

Parameters of experts are summed over the ranks that hold the same ones, and divided as the others
are. Losses with weights are multiplied by them, and the total is divided by the sum of the weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tests.fuzz.optimizers import free_of, in_parts, make_optimizer
from tests.fuzz.program import Program, experts_apart, num_leaves
from tests.support.sums import sum_in_order, sum_in_tree

DECAY = 0.75  # of the moving average
T = TypeVar("T")
Grads = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], None]  # writes to a weight
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _adds_first(program: Program, row: str) -> str:
    """Return what `row` adds first inside ``no_sync``: "micro-batches", a "node"'s ranks, or all
    "ranks".
    """
    if row in ("mics", "hfsdp") and program.node_size not in (None, program.world):
        return "node"
    return "micro-batches" if row in ("ddp", "zero1") else "ranks"


def _to_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, those of batch norms and all buffers excepted."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def _is_expert(name: str) -> bool:
    return ".experts." in name


class Saves:
    """Which steps a directory holds, in the order of their saves, and at which one the run is."""

    def __init__(self, keep_last: int | None) -> None:
        self.at = self.count = 0
        self.there: list[int] = []
        self._keep = keep_last or 0

    def save(self) -> int:
        """Count one more save; return its number."""
        self.at, self.count = self.at + 1, self.count + 1
        self.there = [*(step for step in self.there if step != self.at), self.at][-self._keep :]
        return self.at

    def load(self, *, back: bool) -> int:
        """Go to the newest save, or `back` to an earlier one; return its number."""
        earlier = self.there[0] if self.count % 2 else self.there[-2:][0]
        self.at = earlier if back else self.there[-1]
        return self.at


class ByHand:
    """Trains a plain model; the same methods as ``Sharded``."""

    def __init__(self, model: nn.Module, program: Program, rank: int) -> None:
        self.model, self.program, self.rank = model, program, rank
        self.parameters = dict(model.named_parameters())
        self.masters = {
            name: nn.Parameter(p.detach().float().clone(), p.requires_grad)
            for name, p in self.parameters.items()
        }
        self.stepped = in_parts(program, self.masters)  # by name and first row
        self.optimizer = make_optimizer(program, self.stepped.values())
        _to_compute_dtype(model, DTYPES[program.precision])
        self.scale = 2.0**16 if program.precision == "fp16" else 1.0
        self.sync = True
        self.first = _adds_first(program, program.row)
        self.weight = 0.0  # of all losses since zero_grad(), where they have weights
        self.weights: list[float] = []  # of the leaves of a step
        self.of_leaves: list[Grads] = []
        self.averages = {
            name: master.detach().clone()
            for name, master in self.masters.items()
            if master.requires_grad
        }
        self.saves = Saves(program.keep_last)
        self.saved: dict[int, dict[str, Any]] = {}
        self.taken = 0  # steps, those that overflowed among them
        self.started = 0  # without them
        self.lags = False  # the weights are a step behind the masters
        self.assigned: dict[str, torch.Tensor] = {}  # gradients, by hand, for this step
        self.partial: dict[str, torch.Tensor] = {}  # of this rank
        self.node_partials: dict[str, list[torch.Tensor]] = {}  # of every node
        self.totals: dict[str, torch.Tensor] = {}
        self.divided = False
        # what this backward has added to each parameter's gradient, one after another
        self.brought: dict[str, list[torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._take, name))

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        """Take a gradient away from autograd: a reentrant checkpoint adds each use of a weight
        in a backward of its own.
        """
        assert parameter.grad is not None
        self.brought.setdefault(name, []).append(parameter.grad.detach())
        parameter.grad = None

    def looking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, weights: Sequence[float] = ()
    ) -> None:
        self._reopen()
        if weights:
            loss = loss * weights[self.rank]
            self.weight += sum(weights)
        loss = loss.float() * self.scale if self.scale != 1.0 else loss
        loss.backward(retain_graph=retain_graph)
        self._reduce_brought()

    def shadow(self, *, sync: bool, weights: Sequence[float]) -> None:
        """Take part in a backward of the others, without a loss."""
        self._reopen()
        self.weight += sum(weights)
        with contextlib.nullcontext() if sync else self.no_sync():
            self._reduce_brought()

    def _reduce_brought(self) -> None:
        brought, self.brought = self.brought, {}
        if self.first == "micro-batches" and (self.partial or not self.sync):
            for name, each in brought.items():
                for grad in each:
                    self.partial[name] = (
                        self.partial[name] + grad.float() if name in self.partial else grad.float()
                    )
            if self.sync:
                self._reduce_partial()
            return
        grads = {name: sum_in_order(each) for name, each in brought.items()}
        if self.first == "node":
            self._reduce_between(grads)
        else:
            self._add(self._over_nodes(self._over_ranks(grads)))

    def _reduce_partial(self) -> None:
        """Round what this rank has added up to the wire dtype, and add the sum over ranks."""
        grads = {name: part.to(self.parameters[name].dtype) for name, part in self.partial.items()}
        self.partial = {}
        self._add(self._over_nodes(self._over_ranks(grads)))

    def _reduce_between(self, grads: dict[str, torch.Tensor]) -> None:
        for name, sums in self._over_ranks(grads).items():
            held = self.node_partials.get(name)
            self.node_partials[name] = (
                sums if held is None else [h + s for h, s in zip(held, sums, strict=True)]
            )
        if self.sync:
            self._reduce_nodes()

    def _reduce_nodes(self) -> None:
        sums, self.node_partials = self.node_partials, {}
        self._add(self._over_nodes(sums))

    def _over_ranks(self, grads: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Return the fp32 sum of each node's ranks, of every parameter that has a gradient on
        any rank.
        """
        answers: list[Grads] = [{} for _ in range(self.program.world)]
        if self.program.world == 1:
            answers = [grads]
        else:
            dist.all_gather_object(answers, grads)
        out = {}
        for name, parameter in self.parameters.items():
            holders = self._holders(name, answers)
            if any(name in answer for answer in holders):
                zeros = torch.zeros(parameter.shape)
                each = [answer[name].float() if name in answer else zeros for answer in holders]
                size = self.program.node_size or self.program.world
                out[name] = [
                    sum_in_tree(each[start : start + size]) for start in range(0, len(each), size)
                ]
        return out

    def _holders(self, name: str, answers: list[Grads]) -> list[Grads]:
        """Return the answers of the ranks that hold the same parameter under `name`."""
        if not _is_expert(name):
            return answers
        apart = experts_apart(self.program.world)
        return answers[self.rank % apart :: apart]

    @staticmethod
    def _over_nodes(sums: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: sum_in_tree(nodes) for name, nodes in sums.items()}

    def _add(self, sums: dict[str, torch.Tensor]) -> None:
        for name, total in sums.items():
            self.totals[name] = self.totals[name] + total if name in self.totals else total.clone()

    def _divide(self) -> None:
        if self._any(self.partial):  # every backward was inside no_sync
            self._reduce_partial()
        if self.node_partials:
            self._reduce_nodes()
        if not self.divided:
            for total in self.totals.values():
                total.div_(self._divisor())
        self.divided = True

    def _divisor(self) -> float:
        if not self.weight:
            return self.program.world * self.scale
        return (self.weight if self.program.weights == "losses" else 1.0) * self.scale

    def _any(self, held: object) -> bool:
        if self.first != "micro-batches" or self.program.world == 1:
            return bool(held)
        answers: list[bool] = [False] * self.program.world
        dist.all_gather_object(answers, bool(held))
        return any(answers)

    def _reopen(self) -> None:
        """More is added to an average: make it the sum again."""
        if self.divided:
            for total in self.totals.values():
                total.mul_(self._divisor())
        self.divided = False

    def clip(self, max_norm: float) -> float:
        self._divide()
        squares = {name: _squares(total) for name, total in self.totals.items()}
        every = [
            one for name, squared in squares.items() if not _is_expert(name) for one in squared
        ]
        for experts in self._of_each_expert(
            [one for name, squared in squares.items() if _is_expert(name) for one in squared]
        ):
            every += experts
        norm = torch.tensor(math.fsum(every), dtype=torch.float64).sqrt().float()
        coefficient = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        if coefficient < 1.0:
            for name, total in self.totals.items():
                total.mul_(coefficient)
                if name in self.assigned:  # it is the user's tensor that is scaled, in its dtype
                    total.copy_(self.assigned[name].mul_(coefficient))
        return float(norm)

    def _of_each_expert(self, mine: T) -> list[T]:
        """Return `mine` of one rank that holds each expert."""
        if not self.program.has_experts:
            return [mine]
        answers: list[Any] = [None] * self.program.world
        dist.all_gather_object(answers, mine)
        return answers[: experts_apart(self.program.world)]

    def step(self) -> None:
        self._divide()
        here = all(bool(torch.isfinite(total).all()) for total in self.totals.values())
        finite = all(self._of_each_expert(here))
        self.taken += 1
        self.publish()
        if finite:
            for (name, start), one in self.stepped.items():
                total = self.totals.get(name)
                if total is not None and one is not self.masters[name]:
                    total = total[start : start + len(one)]
                one.grad = total
            self.optimizer.step()
            late = self.program.delayed
            self.lags = late is not None and self.started >= late
            self.started += 1
            if not self.lags:
                self._publish_masters()
        elif self.program.precision == "fp16":
            self.scale = max(self.scale / 2, 1.0)

    def zero_grad(self, kind: str) -> None:
        if kind == "zeros":
            for total in self.totals.values():
                total.zero_()
            self.weight = 0.0
        elif kind != "keep":
            self.totals = {}
            self.divided = False
            self.weight = 0.0
        self.assigned = {}

    def zero_part(self, names: list[str]) -> None:
        for name in names:
            self.totals.pop(name, None)
            self.partial.pop(name, None)
            self.node_partials.pop(name, None)

    # ---------------------------------------------------------------------------- between steps

    def publish(self) -> None:
        """Bring a step that was taken late into the weights."""
        if self.lags:
            self._publish_masters()
        self.lags = False

    def read(self, how: str, *, within: bool = False) -> float:
        """Return a sum over whole weights, with the last step unless `within` the next one."""
        if not within:
            self.publish()
        return sum_of(self.parameters.values())

    def modes(self) -> float:
        """Evaluate as the optimizer with modes says, and train on."""
        free = free_of(self.optimizer)
        free.eval()
        self._publish_masters()
        out = self.read("read")
        free.train()
        self._publish_masters()
        return out

    def cut_off(self, attempt: Callable[[], None], *, loads: bool) -> None:
        """A step that is given up changes nothing, and leaves no gradient."""
        self.reset()

    def joined(self, here: bool) -> contextlib.AbstractContextManager[bool]:
        """Ranks without data take part all the same."""
        return contextlib.nullcontext(True)

    def average(self) -> None:
        """Update the moving average."""
        masters = [self.masters[name].detach() for name in self.averages]
        torch._foreach_lerp_(list(self.averages.values()), masters, 1.0 - DECAY)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        self._publish(self.averages)
        yield
        self._publish_masters()

    def _publish_masters(self) -> None:
        self._publish({name: self.masters[name] for name in self.averages})

    @torch.no_grad()
    def _publish(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].copy_(value)

    @torch.no_grad()
    def _follow(self) -> None:
        """Let masters follow the weights, element by element, where these have changed."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.requires_grad:
                same = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(same, master, parameter.float()))

    @torch.no_grad()
    def edit(self, change: Change) -> None:
        """Change every trained weight that `change` gives another for."""
        self.publish()
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                change(parameter)
        self._follow()

    def climb(self, change: Change) -> None:
        """What is put back has changed nothing."""
        self.publish()

    write = edit

    def offload(self) -> None:
        """What is away and back again has changed nothing."""

    def repartition(self, row: str) -> None:
        self.first = _adds_first(self.program, row)
        self.zero_grad("none")
        self.publish()

    def save(self) -> None:
        self.publish()
        self.saved[self.saves.save()] = copy.deepcopy(
            {
                "masters": {name: master.detach() for name, master in self.masters.items()},
                "buffers": dict(self.model.named_buffers()),
                "averages": self.averages,
                "optimizer": self.optimizer.state_dict(),
                "scale": self.scale,
                "counts": (self.taken, self.started),
            }
        )

    @torch.no_grad()
    def load(self, *, back: bool = False) -> None:
        saved = copy.deepcopy(self.saved[self.saves.load(back=back)])
        for name, value in saved["masters"].items():
            self.masters[name].copy_(value)
            if self.masters[name].requires_grad:
                self.parameters[name].copy_(value)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.averages, self.scale = saved["averages"], saved["scale"]
        self.taken, self.started = saved["counts"]
        self.lags = False

    def back(self) -> None:
        self.load(back=True)

    def reset(self) -> None:
        """What an exception has cut off leaves no gradient."""
        self.publish()
        self.zero_grad("none")
        self.partial, self.node_partials, self.brought = {}, {}, {}

    def assign(self, grads: Mapping[str, torch.Tensor]) -> None:
        """What is assigned before a step is the average."""
        self._divide()
        self.totals |= {name: grad.float().clone() for name, grad in grads.items()}
        self.assigned = {name: grad.clone() for name, grad in grads.items()}

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the state: masters where there are any, else the model's own numbers."""
        self.publish()
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


class ByLeaves(ByHand):
    """The same for a program with leaves. Every rank trains all of them, so that nothing depends on
    the ranks, and adds them by the tree.
    """

    def leaves(self, step: int) -> Iterator[int]:
        """Yield the leaves of `step`, or of the next by its own count, each with its random
        numbers.
        """
        step = self.taken if self.program.counted else step
        before, self.of_leaves = torch.get_rng_state(), list[Grads]()
        self.weights.clear()
        for leaf in range(num_leaves(self.program)):
            text = f"zeroshard {self.program.seed} {step} {leaf}".encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            yield leaf
        torch.set_rng_state(before)
        for name in {name for grads in self.of_leaves for name in grads}:
            zeros = torch.zeros(self.parameters[name].shape)
            each = [grads[name].float() if name in grads else zeros for grads in self.of_leaves]
            self.totals[name] = self.sum_of_leaves(each).clone()
        self.weight = math.fsum(self.weights)
        self.weights.clear()

    def sum_of_leaves(self, each: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum by the levels that are declared, else by powers of two."""
        levels = [int(size) for size in (self.program.leaves or "").split("x")]
        if len(levels) > 1:
            for size in reversed(levels):  # from the leaves up: a chain of each node's children
                each = [sum_in_order(each[at : at + size]) for at in range(0, len(each), size)]
            return each[0]
        return sum_in_tree(each)

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, weights: Sequence[float] = ()
    ) -> None:
        for weight in weights:
            loss = loss * weight
            self.weights.append(weight)
        (loss.float() * self.scale if self.scale != 1.0 else loss).backward()
        brought, self.brought = self.brought, {}
        self.of_leaves.append({name: sum_in_order(each) for name, each in brought.items()})

    def _divide(self) -> None:
        for total in () if self.divided else self.totals.values():
            total.div_((self.weight or num_leaves(self.program)) * self.scale)
        self.divided = True


@torch.no_grad()
def sum_of(weights: Iterable[torch.Tensor]) -> float:
    """Return a sum of all elements, and twice those of every other tensor."""
    return math.fsum((1 + at % 2) * float(w.double().sum()) for at, w in enumerate(weights))


def _squares(total: torch.Tensor) -> list[float]:
    """Return the sums of the squares of each 64 elements, halves added to halves, in fp64."""
    squares = total.double().reshape(-1).square()
    blocks = torch.nn.functional.pad(squares, (0, -len(squares) % 64)).view(-1, 64)
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    return [float(one) for one in blocks[:, 0]]
