"""The model families that are proven to train to torch DDP's bits, as a catalogue: one small
builder each, the list at the end.

Every model comes from a random configuration, so nothing is downloaded: dropout off, eager
attention. Builders take a :class:`Size`; the tests run ``TINY``, ``scripts/models_table.py`` runs
``SMALL``. Imports of transformers and peft stand inside the builders, so that reading the list
costs nothing.

A family is what it trains, on which data, with which loss. Some train beside a second model: a
frozen one (distillation, DPO), or one with an optimizer and a loss of its own (GAN); the losses of
both then get the other model as their third argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

Batch = dict[str, torch.Tensor]
NUM_CLASSES = 5


@dataclass(frozen=True)
class Size:
    """How large the models are; `batch` samples of `length` tokens per rank and step, images of
    `side` pixels.
    """

    width: int
    layers: int
    batch: int
    length: int
    vocabulary: int
    side: int

    @property
    def head_width(self) -> int:
        return self.width // 4


TINY = Size(width=32, layers=2, batch=2, length=16, vocabulary=97, side=16)
SMALL = Size(width=256, layers=4, batch=4, length=64, vocabulary=1021, side=32)


@dataclass(frozen=True)
class Family:
    """A model, its data, its loss, and what DDP has to be told about it."""

    build: Callable[[Size], nn.Module]
    batch: Callable[[Size, torch.Generator], Batch]
    loss: Callable[..., torch.Tensor]  # (model, batch), or (model, batch, the model beside)
    beside: Callable[[Size], nn.Module] | None = None
    # (the model beside, batch, model); None: it is frozen
    beside_loss: Callable[..., torch.Tensor] | None = None
    # some parameters get no gradient, on some ranks or on all: DDP has to look for them
    unused: bool = False
    # every forward starts from rank 0's buffers: broadcast_buffers=True, here and there
    buffers: bool = False
    precision: str = "fp32"
    slow: bool = False

    def model(self, size: Size) -> nn.Module:
        """Return the model, with the same numbers on every rank and at every call."""
        torch.manual_seed(0)
        return self.build(size).train()

    def partner(self, size: Size) -> nn.Module | None:
        """Return the model beside it, if the family has one."""
        if self.beside is None:
            return None
        torch.manual_seed(1)
        model = self.beside(size).train()
        return model if self.beside_loss else model.requires_grad_(False).eval()

    def data(self, size: Size, rank: int, step: int) -> Batch:
        """Return the batch of `rank` at `step`, different for every pair."""
        return self.batch(size, torch.Generator().manual_seed(1000 * step + rank))


# --------------------------------------------------------------------------------------------- data


def _ids(size: Size, generator: torch.Generator, length: int | None = None) -> torch.Tensor:
    """Tokens [batch, length]; the lowest five are left to be special ones."""
    return torch.randint(
        5, size.vocabulary, (size.batch, length or size.length), generator=generator
    )


def _labels(size: Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, NUM_CLASSES, (size.batch,), generator=generator)


def _pixels(size: Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size.batch, 3, size.side, size.side, generator=generator)


def _mask(size: Size, generator: torch.Generator) -> torch.Tensor:
    """Sequences of different lengths, padded on the right [batch, length]."""
    lengths = torch.randint(size.length // 2, size.length + 1, (size.batch, 1), generator=generator)
    return (torch.arange(size.length) < lengths).long()


def text(size: Size, generator: torch.Generator) -> Batch:
    ids = _ids(size, generator)
    return {"input_ids": ids, "labels": ids}


def classified_text(size: Size, generator: torch.Generator) -> Batch:
    return {
        "input_ids": _ids(size, generator),
        "attention_mask": _mask(size, generator),
        "labels": _labels(size, generator),
    }


def translated_text(size: Size, generator: torch.Generator) -> Batch:
    source, mask = _ids(size, generator), _mask(size, generator)
    return {
        "input_ids": source,
        "attention_mask": mask,
        "labels": _ids(size, generator, size.length // 2),
    }


def preferred_text(size: Size, generator: torch.Generator) -> Batch:
    """Rows come in pairs: the first half is preferred to the second."""
    return {"input_ids": _ids(size, generator)}


def images(size: Size, generator: torch.Generator) -> Batch:
    return {"pixel_values": _pixels(size, generator), "labels": _labels(size, generator)}


def captioned_images(size: Size, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": _pixels(size, generator),
        "input_ids": _ids(size, generator),
        "attention_mask": _mask(size, generator),
    }


def images_in_text(size: Size, generator: torch.Generator) -> Batch:
    """Each row starts with the 16 places of its image (token 1)."""
    ids = torch.cat(
        [torch.ones(size.batch, NUM_PATCHES, dtype=torch.long), _ids(size, generator)], dim=1
    )
    return {
        "pixel_values": _pixels(size, generator),
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 1, -100),
    }


def speech(size: Size, generator: torch.Generator) -> Batch:
    features = torch.randn(size.batch, NUM_MELS, 2 * size.length, generator=generator)
    return {"input_features": features, "labels": _ids(size, generator, size.length // 2)}


def waves(size: Size, generator: torch.Generator) -> Batch:
    """Sound of 16 samples per token."""
    return {
        "input_values": torch.randn(size.batch, 16 * size.length, generator=generator),
        "labels": _ids(size, generator, size.length // 4),
    }


def noise_and_images(size: Size, generator: torch.Generator) -> Batch:
    return {
        "noise": torch.randn(size.batch, size.width, generator=generator),
        "real": _pixels(size, generator),
    }


# ------------------------------------------------------------------------------------------- losses


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that Transformers' models compute themselves."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def contrastive_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = batch["pixel_values"] if "pixel_values" in batch else batch["input_ids"]
    return F.cross_entropy(model(inputs), batch["labels"])


def distillation_loss(model: nn.Module, batch: Batch, teacher: nn.Module) -> torch.Tensor:
    """Hinton et al., 2015: the hard labels, and the teacher's soft ones at temperature 2."""
    with torch.no_grad():
        soft = teacher(input_ids=batch["input_ids"]).logits
    output = model(**batch)
    loss: torch.Tensor = output.loss + 4 * F.kl_div(
        (output.logits / 2).log_softmax(-1), (soft / 2).softmax(-1), reduction="batchmean"
    )
    return loss


def _log_probability(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of each row [batch]."""
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def dpo_loss(model: nn.Module, batch: Batch, reference: nn.Module) -> torch.Tensor:
    """Rafailov et al., 2023, equation 7, with beta = 0.5."""
    with torch.no_grad():
        base = _log_probability(reference, batch["input_ids"])
    preferred, other = (_log_probability(model, batch["input_ids"]) - base).chunk(2)
    return -F.logsigmoid(0.5 * (preferred - other)).mean()


def dpo_on_adapters_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The reference is the model itself without its adapters, which PEFT freezes meanwhile."""
    # under DDP's wrapper, or the model
    adapted: Any = next(module for module in model.modules() if hasattr(module, "disable_adapter"))
    with torch.no_grad(), adapted.disable_adapter():
        base = _log_probability(model, batch["input_ids"])
    preferred, other = (_log_probability(model, batch["input_ids"]) - base).chunk(2)
    return -F.logsigmoid(0.5 * (preferred - other)).mean()


def generator_loss(generator: nn.Module, batch: Batch, critic: nn.Module) -> torch.Tensor:
    return F.softplus(-critic(generator(batch["noise"]))).mean()


def critic_loss(critic: nn.Module, batch: Batch, generator: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        made = generator(batch["noise"])
    real, fake = critic(torch.cat([batch["real"], made])).chunk(2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


# ------------------------------------------------------------------------------- Transformers: text


def _transformer(name: str, **options: Any) -> Any:
    import transformers

    model = getattr(transformers, name)
    return model(model.config_class(**{"attn_implementation": "eager", **options}))


def _layers(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
    }


def _decoder(size: Size) -> dict[str, Any]:
    """What the configurations of Llama and its relatives have in common."""
    return {
        **_layers(size),
        "vocab_size": size.vocabulary,
        "num_key_value_heads": 2,
        "head_dim": size.head_width,
        "max_position_embeddings": 4 * size.length,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }


def llama(size: Size) -> nn.Module:
    return _transformer("LlamaForCausalLM", **_decoder(size))


def deep_llama(size: Size) -> nn.Module:
    return llama(replace(size, layers=2 * size.layers))


def qwen2(size: Size) -> nn.Module:
    return _transformer("Qwen2ForCausalLM", **_decoder(size), tie_word_embeddings=True)


def qwen3(size: Size) -> nn.Module:
    return _transformer("Qwen3ForCausalLM", **_decoder(size), tie_word_embeddings=True)


def gpt2(size: Size) -> nn.Module:
    return _transformer(
        "GPT2LMHeadModel",
        vocab_size=size.vocabulary,
        n_positions=4 * size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=2,
    )


def bert(size: Size) -> nn.Module:
    return _transformer(
        "BertForSequenceClassification",
        **_layers(size),
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=NUM_CLASSES,
    )


def t5(size: Size) -> nn.Module:
    return _transformer(
        "T5ForConditionalGeneration",
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.head_width,
        d_ff=2 * size.width,
        num_layers=size.layers,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )


def mixtral(size: Size) -> nn.Module:
    """Experts that no token of a rank went to get zeros there, as rows of one parameter; before
    Transformers 5 they got no gradient.
    """
    experts = {
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "intermediate_size": size.width // 2,
        "output_router_logits": True,
        "experts_implementation": "eager",
    }
    return _transformer("MixtralForCausalLM", **(_decoder(size) | experts))


def mamba(size: Size) -> nn.Module:
    return _transformer(
        "MambaForCausalLM",
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        state_size=4,
        num_hidden_layers=size.layers,
        pad_token_id=0,
        eos_token_id=2,
    )


# --------------------------------------------------------------------- Transformers: images, speech


NUM_PATCHES = 16
NUM_MELS = 8


def _vision(size: Size) -> dict[str, Any]:
    return {**_layers(size), "image_size": size.side, "patch_size": size.side // 4}


def vit(size: Size) -> nn.Module:
    return _transformer("ViTForImageClassification", **_vision(size), num_labels=NUM_CLASSES)


def clip(size: Size) -> nn.Module:
    """Two towers, and a temperature that is a parameter without dimensions."""
    text_config = {
        "vocab_size": size.vocabulary,
        **_layers(size),
        "max_position_embeddings": size.length,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return _transformer(
        "CLIPModel",
        text_config=text_config,
        vision_config=_vision(size),
        projection_dim=size.width // 2,
    )


def llava(size: Size) -> nn.Module:
    """Reads the last layer but one of its vision tower, so the last one gets no gradient."""
    from transformers import CLIPVisionConfig, LlamaConfig

    return _transformer(
        "LlavaForConditionalGeneration",
        vision_config=CLIPVisionConfig(**_vision(size)),
        text_config=LlamaConfig(**_decoder(size)),
        image_token_id=1,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=NUM_PATCHES,
    )


def whisper(size: Size) -> nn.Module:
    return _transformer(
        "WhisperForConditionalGeneration",
        vocab_size=size.vocabulary,
        num_mel_bins=NUM_MELS,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * size.width,
        decoder_ffn_dim=2 * size.width,
        max_source_positions=size.length,
        max_target_positions=size.length,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def wav2vec2(size: Size) -> nn.Module:
    """Convolutions on raw sound, and positions by a convolution under weight norm."""
    return _transformer(
        "Wav2Vec2ForCTC",
        **_layers(size),
        vocab_size=size.vocabulary,
        conv_dim=(size.width // 2, size.width // 2),
        conv_kernel=(8, 4),
        conv_stride=(4, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        pad_token_id=0,
    )


# --------------------------------------------------------------------------------------------- PEFT


def _with_adapters(base: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        base,
        LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]
        ),
    )


def lora(size: Size) -> nn.Module:
    return _with_adapters(llama(size))


def lora_on_bf16(size: Size) -> nn.Module:
    return _with_adapters(llama(size).bfloat16())


class Int8Linear(nn.Linear):
    """A frozen linear layer whose weights rest as int8 with one scale per row, and are
    multiplied in fp32.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (plain.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.scale)


def lora_on_int8(size: Size) -> nn.Module:
    base = llama(size)
    for block in base.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8Linear(child))
    return _with_adapters(base)


# ------------------------------------------------------------------------------------ plain PyTorch


class ResidualBlock(nn.Module):
    """He et al., 2015, figure 2, with batch normalization."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.shortcut = (
            nn.Conv2d(num_in, num_out, 1, stride, bias=False) if stride > 1 else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet(size: Size) -> nn.Module:
    half = size.width // 2
    stem = nn.Sequential(
        nn.Conv2d(3, half, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(half), nn.ReLU()
    )
    shapes = [(half, half, 1), (half, half, 1), (half, size.width, 2), (size.width, size.width, 1)]
    blocks = [ResidualBlock(*shape) for shape in shapes]
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size.width, NUM_CLASSES)
    )


class LSTM(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, num_layers=size.layers, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class Encoder(nn.Module):
    """nn.TransformerEncoder over embeddings and learned positions, which are a parameter of the
    model itself.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) / 10)
        layer = nn.TransformerEncoderLayer(
            size.width, 4, 2 * size.width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(
            self.encoder(self.embed(ids) + self.positions, mask=causal, is_causal=True)
        )


class Pooled(nn.Module):
    """One nn.MultiheadAttention, which reads its output projection's weight itself, without
    calling that module.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, size.side // 4, stride=size.side // 4)
        self.query = nn.Parameter(torch.randn(1, 1, size.width))
        self.attention = nn.MultiheadAttention(size.width, 4, batch_first=True)
        self.head = nn.Linear(size.width, NUM_CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).mT
        pooled, _ = self.attention(self.query.expand(len(x), -1, -1), x, x)
        return self.head(pooled[:, 0])


class Experts(nn.Module):
    """One expert per sequence: a rank uses some of the experts' modules, another rank others."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size.width, 2 * size.width),
                nn.GELU(),
                nn.Linear(2 * size.width, size.width),
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x.mean(1)).softmax(-1).max(-1)
        rows = [
            row + w * self.experts[int(i)](row) for row, w, i in zip(x, weight, chosen, strict=True)
        ]
        return torch.stack(rows)


class Mixture(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*[Experts(size) for _ in range(size.layers)])
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Generator(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(size.width, size.width * (size.side // 4) ** 2)
        self.norm = nn.BatchNorm2d(size.width)
        self.second = nn.ConvTranspose2d(size.width, size.width // 2, 4, stride=2, padding=1)
        self.third = nn.ConvTranspose2d(size.width // 2, 3, 4, stride=2, padding=1)
        self.side = size.side // 4

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x = self.first(noise).view(len(noise), -1, self.side, self.side)
        return torch.tanh(self.third(F.relu(self.second(F.relu(self.norm(x))))))


def critic(size: Size) -> nn.Module:
    """Convolutions under weight norm, whose weights are computed from two parameters at every
    use.
    """
    half = size.width // 2
    return nn.Sequential(
        weight_norm(nn.Conv2d(3, half, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2),
        weight_norm(nn.Conv2d(half, size.width, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        weight_norm(nn.Linear(size.width, 1)),
    )


# ------------------------------------------------------------------------------------ the catalogue


FAMILIES = {
    "Llama": Family(llama, text, own_loss),
    "GPT-2 (tied head)": Family(gpt2, text, own_loss),
    "Qwen2 (tied head)": Family(qwen2, text, own_loss),
    "Qwen3 (tied head)": Family(qwen3, text, own_loss),
    "BERT, classification": Family(bert, classified_text, own_loss),
    "T5 (shared embedding)": Family(t5, translated_text, own_loss),
    "Mixtral (experts)": Family(mixtral, text, own_loss, unused=True),
    "Mamba": Family(mamba, text, own_loss),
    "ViT": Family(vit, images, own_loss),
    "CLIP": Family(clip, captioned_images, contrastive_loss),
    "LLaVA": Family(llava, images_in_text, own_loss, unused=True),
    "Whisper": Family(whisper, speech, own_loss),
    "Wav2Vec2": Family(wav2vec2, waves, own_loss),
    "LoRA on fp32": Family(lora, text, own_loss),
    "LoRA on bf16": Family(lora_on_bf16, text, own_loss, precision="bf16"),
    "LoRA on int8": Family(lora_on_int8, text, own_loss),
    "distillation": Family(llama, text, distillation_loss, beside=deep_llama),
    "DPO": Family(llama, preferred_text, dpo_loss, beside=llama),
    "DPO on LoRA": Family(lora, preferred_text, dpo_on_adapters_loss),
    "ResNet (batch norm)": Family(resnet, images, class_loss, buffers=True),
    "LSTM": Family(LSTM, text, next_token_loss),
    "nn.TransformerEncoder": Family(Encoder, text, next_token_loss),
    "nn.MultiheadAttention": Family(Pooled, images, class_loss),
    "mixture of expert modules": Family(Mixture, text, next_token_loss, unused=True),
    "GAN": Family(
        Generator, noise_and_images, generator_loss, beside=critic, beside_loss=critic_loss
    ),
}
