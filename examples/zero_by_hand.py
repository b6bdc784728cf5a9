"""ZeRO 1, 2 and 3 by hand, on plain torch.distributed, to be read beside the paper's figures.

    torchrun --nproc-per-node 2 examples/zero_by_hand.py --stage 3
    torchrun --nproc-per-node 4 examples/zero_by_hand.py --compare

ZeRO (Rajbhandari et al., arXiv 1910.02054) keeps each state of training once among N ranks instead
of N times. Figure 1 and section 5, here for fp32 and Adam with two moments; P is the number of
parameters, and the last column is what a rank sends per step (section 7, each x (N - 1) / N):

    stage            weights   gradients   moments    sent per step
    0                4 P       4 P         8 P        8 P    all-reduce of the gradients
    1 (P_os)         4 P       4 P         8 P / N    8 P    reduce-scatter, all-gather of weights
    2 (P_os+g)       4 P       4 P / N     8 P / N    8 P    the same, unit by unit in the backward
    3 (P_os+g+p)     4 P / N   4 P / N     8 P / N    12 P   a second all-gather, for the backward

All four end with the same weights, to the bit. Nothing here overlaps, and nothing is checked: this
file shows what happens, in the order in which it happens.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 3, 32, 4
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


# ------------------------------------------------------------------------------------ a small GPT


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position(torch.arange(x.shape[1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    return nn.Sequential(Embedding(), *(Block() for _ in range(LAYERS)), head)


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each int64 [BATCH, CONTEXT], of this rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,), generator=generator)
    windows = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


# ------------------------------------------------------------------------- the two collectives

sent_bytes = 0


def reduce_scatter(whole: Tensor) -> Tensor:
    """Return the sum over all ranks of this rank's slice of `whole`, by a tree over the ranks."""
    global sent_bytes
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    slices = received.chunk(dist.get_world_size())
    sent_bytes += 4 * (whole.numel() - slices[0].numel())
    return tree_sum(slices).clone()


def tree_sum(slices: tuple[Tensor, ...]) -> Tensor:
    """Return ((0 + 1) + (2 + 3)) + ..., cut at the largest power of two below their number."""
    half = 1 << (len(slices) - 1).bit_length() - 1 if len(slices) > 1 else 0
    return tree_sum(slices[:half]) + tree_sum(slices[half:]) if half else slices[0]


def all_gather(whole: Tensor, mine: Tensor) -> None:
    """Fill `whole` with every rank's slice, in rank order."""
    global sent_bytes
    dist.all_gather(list(whole.chunk(dist.get_world_size())), mine)
    sent_bytes += 4 * (whole.numel() - mine.numel())


# ----------------------------------------------------------------------------------------- ZeRO


class Unit:
    """A module whose parameters are views of one flat tensor, which is cut into N equal slices.

    What belongs to a rank is its slice, `owned`; the optimizer steps that alone (stage 0: all).
    """

    def __init__(self, module: nn.Module, stage: int) -> None:
        self.stage = stage
        self.parameters = list(module.parameters())
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self.slice_numel = math.ceil(self.numel / dist.get_world_size())
        self.flat = torch.zeros(self.slice_numel * dist.get_world_size())  # zeros pad the end
        self.num_bytes = 4 * self.flat.numel()
        start = 0
        for parameter in self.parameters:
            view = self.flat[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            start += parameter.numel()
        # Stage 1: each rank owns a slice, so that only 1/N of Adam's moments ever exist on it.
        mine = self.flat[dist.get_rank() * self.slice_numel :][: self.slice_numel]
        self.owned = nn.Parameter(mine.clone() if stage >= 1 else self.flat)
        self.num_missing = 0
        if stage >= 2:  # reduced as soon as its gradients are there, inside the backward
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self.take_gradient)
        if stage >= 3:  # here for its forward and its backward only
            module.register_forward_pre_hook(lambda module, inputs: self.gather())
            module.register_forward_hook(self.after_forward)
            self.free()

    def gather(self) -> None:
        """Get the weights of all ranks; the parameters are views and have their values again."""
        self.flat.untyped_storage().resize_(self.num_bytes)
        all_gather(self.flat, self.owned.detach())

    def free(self) -> None:
        """Give the memory of the whole weights back; autograd's references to it stay valid."""
        self.flat.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        """Stage 3: free, and gather again when the backward comes to this unit's output."""
        self.free()
        if output.requires_grad:
            output.register_hook(lambda grad: self.gather())

    def take_gradient(self, parameter: Tensor) -> None:
        """Stages 2 and 3: once the last gradient of the unit is there, reduce and free."""
        self.num_missing = (self.num_missing or len(self.parameters)) - 1
        if self.num_missing == 0:
            self.reduce()
            if self.stage >= 3:
                self.free()

    def reduce(self) -> None:
        """Average the gradients over the ranks: of our slice (stage 0: of everything)."""
        whole = torch.zeros(self.slice_numel * dist.get_world_size())
        grads = [parameter.grad.flatten() for parameter in self.parameters]  # type: ignore[union-attr]
        torch.cat(grads, out=whole[: self.numel])
        for parameter in self.parameters:
            parameter.grad = None
        mine = reduce_scatter(whole) / dist.get_world_size()
        if self.stage == 0:  # an all-reduce is a reduce-scatter and an all-gather
            all_gather(whole, mine)
        self.owned.grad = whole if self.stage == 0 else mine

    def whole_weights(self) -> Tensor:
        """Return all weights of the unit, float32 [numel], whatever the stage."""
        if self.stage >= 3:
            self.gather()
        weights = self.flat[: self.numel].clone()
        if self.stage >= 3:
            self.free()
        return weights


@dataclass
class Result:
    losses: list[float]  # this rank's
    weights: Tensor  # float32 [P], in the order of model.parameters()
    held: dict[str, int]  # bytes on this rank at the end of a backward
    sent: int  # bytes per step


def train(stage: int, steps: int) -> Result:
    """Train the model for `steps` steps with ZeRO's `stage` on all ranks of the default group."""
    global sent_bytes
    model, losses, held = make_model(), [], {}
    units = [Unit(module, stage) for module in model]
    optimizer = torch.optim.AdamW([unit.owned for unit in units], lr=1e-2)
    for step in range(steps):
        sent_bytes = 0
        inputs, targets = make_batch(dist.get_rank(), step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # stages 2 and 3 reduce in here
        held = measure(units, optimizer)
        if stage <= 1:
            for unit in units:
                unit.reduce()
        optimizer.step()
        optimizer.zero_grad()
        if stage in (1, 2):  # every rank has stepped its slice: publish it (stage 3: no need to)
            for unit in units:
                all_gather(unit.flat, unit.owned.detach())
        losses.append(loss.item())
    sent = sent_bytes  # reading all weights at the end does not count
    return Result(losses, torch.cat([unit.whole_weights() for unit in units]), held, sent)


def measure(units: list[Unit], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of weights, gradients and moments that this rank holds now."""
    weights = [unit.flat for unit in units if unit.stage < 3]
    weights += [unit.owned for unit in units if unit.stage == 3]
    tensors = [tensor for unit in units for tensor in (*unit.parameters, unit.owned)]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    states = optimizer.state.values()
    moments = [value for state in states for value in state.values() if value.dim() > 0]
    named = {"weights": weights, "gradients": gradients, "moments": moments}
    return {name: sum(4 * tensor.numel() for tensor in of) for name, of in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with ZeRO, by hand.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--compare", action="store_true", help="train all four and compare weights")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    reference = None
    for stage in range(4) if args.compare else [args.stage]:
        result = train(stage, args.steps)
        reference = result.weights if reference is None else reference
        if dist.get_rank() == 0:
            held = ", ".join(f"{of / 1e6:.2f} MB of {name}" for name, of in result.held.items())
            print(f"stage {stage}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; {held};")
            same = "same bits as the first" if torch.equal(result.weights, reference) else "DIFFERS"
            print(f"         {result.sent / 1e6:.2f} MB sent per step; weights: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
