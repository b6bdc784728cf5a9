"""The models that every contender trains, and their data: a decoder-only GPT, pre-norm, no
biases in its matrices, SDPA attention; and a Llama of Transformers.

Numbers depend on the seed alone: every contender starts from the same weights and sees the same
batches, so that the losses of the exact ones are equal and those of the others comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plan import Size

__all__ = ["GPT", "Batches", "Block", "Llama", "build"]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = x + self.down(F.gelu(self.up(self.norm2(x))))
        assert isinstance(hidden, Tensor)
        return hidden


class GPT(nn.Module):
    """Tokens and targets in, mean cross entropy out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats over [batch, time]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Llama(nn.Module):
    """Transformers' own Llama with random weights: tokens and targets in, mean cross entropy out.

    Key and value heads are a quarter of the heads, the MLP is 3.5 times as wide, as in Llama 3.
    """

    def __init__(self, size: Size) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocabulary,
                hidden_size=size.width,
                intermediate_size=size.width * 7 // 2,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                num_key_value_heads=max(1, size.heads // 4),
                max_position_embeddings=size.context,
                use_cache=False,
            )
        )

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.llama.model.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats over [batch, time]."""
        logits: Tensor = self.llama(tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(size: Size) -> GPT | Llama:
    """Return the model of `size` with new weights."""
    return Llama(size) if size.family == "llama" else GPT(size)


class Batches:
    """Inputs and targets by step number, the same for every contender: random tokens, or windows
    of the bytes of `files`.
    """

    def __init__(
        self,
        size: Size,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device,
        files: Sequence[str] = (),
    ) -> None:
        self.size, self.rank, self.num_ranks, self.device = size, rank, num_ranks, device
        self.text: Tensor | None = None
        if files:
            if size.vocabulary < 256:
                raise ValueError(
                    f"size {size.name} has a vocabulary of {size.vocabulary}, too small for bytes"
                )
            self.text = torch.frombuffer(
                bytearray(b"\n".join(Path(file).read_bytes() for file in files)), dtype=torch.uint8
            )
            if len(self.text) <= size.context + 1:
                raise ValueError(
                    f"{len(self.text)} bytes of text are too few for a context of {size.context}"
                )

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets [batch, context] of this rank in step `step`."""
        size = self.size
        generator = torch.Generator().manual_seed(step * self.num_ranks + self.rank)
        if self.text is None:
            both = torch.randint(
                size.vocabulary, (size.batch, size.context + 1), generator=generator
            )
        else:
            starts = torch.randint(
                len(self.text) - size.context, (size.batch, 1), generator=generator
            )
            both = self.text[starts + torch.arange(size.context + 1)].long()
        both = both.to(self.device)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
