"""``zeroshard generate``: text from a model in Transformers' format, with weights that rest on the
host or on disk (ZeRO-Inference).

    zeroshard generate MODEL_DIR --prompt TEXT                       weights on the host
    zeroshard generate MODEL_DIR --prompt TEXT --offload disk --codec int8
    zeroshard run --nproc 2 -m zeroshard generate MODEL_DIR --prompt A --prompt B

MODEL_DIR holds config.json, safetensors files and, for prompts that are text, a tokenizer. The
model is built without memory and read a parameter at a time, so no rank holds all of it. Tokens
equal Transformers' ``model.generate()`` with the directory's generation_config.json; options
outrank it. Of several ranks each reads its slice of the weights, and generates for its share of the
prompts; rank 0 prints. No Python of the directory is run.

The JSON has "completions" (in the order of the prompts: "prompt", "tokens", and "text" or null),
"new_tokens", "seconds", "tokens_per_s", "ranks", "offload", "codec", and of rank 0 "weight_bytes"
(at rest) and "peak_bytes" (the most that was gathered).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.core.placement import Tier
from zeroshard.core.sizes import parse_bytes
from zeroshard.core.wire import CODEC_BITS
from zeroshard.errors import ZeroshardError
from zeroshard.system.safe_files import NotReadable, has_transformers, read_json
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    UsageError,
    as_usage,
    count,
    print_json,
    progress,
    say,
)

if TYPE_CHECKING:
    import torch

    import zeroshard as zs


# ---------------------------------------------------------------------------------- model directory
# A model's directory in Transformers' format, for ``zeroshard generate``: its configuration, its
# tokenizer, and how it generates.
#
# The directory may come from somebody else. None of its Python is run (``auto_map``, generate.py),
# nor kernels or decoding loops that its files name on a hub: they are refused. A file that is no
# regular one, JSON that is too deep, and whatever else Transformers cannot read is a UsageError.


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_JSON_BYTES = 256 << 20  # of one file; the largest tokenizers and indices have a tenth
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_GENERATION = "generation_config.json"
_OWN_CODE = (
    "it has Python code of its own (auto_map), which zeroshard generate never runs: read it, load"
    " the model in a script with trust_remote_code=True, and give it to zs.shard()"
)
_NEW_TOKENS = 32  # where neither an option nor the directory says a length
# they compare or count the tokens of a prompt, the padding before a shorter one among them
_BY_LENGTH = (
    "bad_words_ids", "encoder_no_repeat_ngram_size", "forced_bos_token_id", "guidance_scale",
    "min_length", "no_repeat_ngram_size", "sequence_bias", "stop_strings", "token_healing",
    "watermarking_config",
)  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Token numbers of every prompt, and the tokenizer, if there is one."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Any

    def text(self, tokens: list[int]) -> str | None:
        """Return tokens as text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class ModelDirectory:
    """A model's directory, but for its weights."""

    config: Any  # Transformers' configuration

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a directory where something cannot be read."""
        from transformers import AutoConfig

        self.path = path
        # Transformers would wait for these, or pass over them without a word.
        for file in sorted(self.path.iterdir()):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise UsageError(f"{file} is not a regular file: take it out of the directory")
            if file.suffix != ".json" or not file.is_file():
                continue
            try:
                read = read_json(file, _JSON_BYTES)
            except NotReadable as error:
                raise UsageError(f"{file} cannot be read: {error}") from None
            if file.name in ("config.json", _GENERATION) and not isinstance(read, dict):
                raise UsageError(f"{file} cannot be read: it is not a JSON object")
        with refusals(f"{path / 'config.json'} describes no model that this Transformers knows"):
            self.config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        parts = [getattr(self.config, name, None) for name in self.config.sub_configs]
        for one in (self.config, *parts):
            kernel = getattr(one, "_attn_implementation", None)
            if "/" in str(kernel or ""):
                raise UsageError(
                    f"{path / 'config.json'} asks for attention from a hub ({kernel!r}): its code"
                    " is not run here: take attn_implementation out"
                )

    def prompts(self, texts: list[str]) -> Prompts:
        """Return the tokens of `texts`. Raises UsageError."""
        from transformers import AutoTokenizer

        tokenizer = None
        if any((self.path / name).is_file() for name in _TOKENIZERS):
            with refusals(f"{self.path} holds no tokenizer that this Transformers knows"):
                tokenizer = AutoTokenizer.from_pretrained(
                    self.path, local_files_only=True, trust_remote_code=False
                )
        with refusals(f"{self.path}: its tokenizer cannot read a prompt"):
            ids = [_tokens(text, tokenizer, self.config.vocab_size) for text in texts]
        return Prompts(texts, ids, tokenizer)

    def generation(self, max_new_tokens: int | None, sample: bool | None, num_ranks: int) -> Any:
        """Return how to generate, as ``from_pretrained`` reads it: generation_config.json, else
        the older fields of config.json, with the options that are given.

        Raises UsageError for what cannot be done here.
        """
        from transformers import GenerationConfig

        name: str = _GENERATION
        more: dict[str, Any] = {}
        if not (self.path / name).is_file():
            name, more = "config.json", {"_from_model_config": True}
        where = self.path / name
        with refusals(f"{where} does not say how to generate"):
            read: Any = GenerationConfig.from_pretrained(
                self.path, config_file_name=name, local_files_only=True, **more
            )
            if max_new_tokens is not None:
                read.max_new_tokens = max_new_tokens
            elif not {"max_new_tokens", "max_length"} & set(read.to_diff_dict()):
                read.max_new_tokens = _NEW_TOKENS
            if sample is not None:
                read.do_sample = sample
            mode = str(read.get_generation_mode().value)
            if read.pad_token_id is None:
                read.pad_token_id = next(iter(end_tokens(read)), 0)
        several = (read.num_return_sequences or 1) > 1
        guided = num_ranks > 1 and read.guidance_scale not in (None, 1, 1.0)
        for is_so, what in (
            (mode not in _MODES, mode.replace("_", " ")),
            (several, f"num_return_sequences={read.num_return_sequences}"),
            (guided, "guidance_scale on several ranks"),
            (read.cache_implementation == "paged", "a paged cache"),
        ):  # fmt: skip
            if is_so:
                raise UsageError(
                    f"{where} asks for {what}, which zeroshard generate does not do: take it out,"
                    " or call model.generate() in a script"
                )
        # ranks with prompts of other lengths run as many forwards
        read.prefill_chunk_size = None
        read.return_dict_in_generate = False
        return read


@contextmanager
def refusals(fact: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise UsageError, `fact` and a reason in one line, for errors of Transformers' of these
    `kinds`: by default of all, as files that it does not expect can make it raise anything.
    """
    try:
        yield
    except (UsageError, ZeroshardError):
        raise
    except kinds as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = _OWN_CODE
        raise UsageError(f"{fact}: {reason}") from error


def end_tokens(generation: Any) -> list[int]:
    """Return the tokens that end a text. Raises TypeError."""
    ends = generation.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
    if not all(type(one) is int for one in ends):
        raise TypeError(f"eos_token_id={ends!r:.60} is no list of token numbers")
    return ends


def _tokens(text: str, tokenizer: Any, vocabulary: int) -> list[int]:
    if tokenizer is not None:
        ids: list[int] = list(tokenizer(text)["input_ids"])
    else:
        words = text.split()
        if not all(word.isdecimal() for word in words):
            raise UsageError(
                f"--prompt {text!r}: the model's directory holds no tokenizer: give token numbers,"
                " as in --prompt '1 2 3'"
            )
        ids = [int(word) for word in words]
    if not ids:
        raise UsageError(f"--prompt {text!r} has no tokens: give some text")
    if max(ids) >= vocabulary:
        raise UsageError(
            f"--prompt {text!r} has token {max(ids)}, and the model knows {vocabulary} tokens"
        )
    return ids


# ----------------------------------------------------------------------------------------- generate

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _size(text: str | None, option: str) -> int | None:
    """Return the bytes that an option says. Raises UsageError."""
    if text is None or text == "0":
        return None if text is None else 0
    with as_usage():
        return parse_bytes(text, option)


def _generate(arguments: argparse.Namespace) -> int:
    kv_bytes = _size(arguments.kv_device_bytes, "--kv-device-bytes")
    prefetch_bytes = _size(arguments.prefetch_bytes, "--prefetch-bytes")
    _check(arguments)
    import torch.distributed as dist

    import zeroshard as zs

    zs.init_distributed()
    with _silent_transformers():
        model = ModelDirectory(arguments.model)
        prompts = model.prompts(arguments.prompt)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        generation = model.generation(arguments.max_new_tokens, arguments.sample, num_ranks)
        if kv_bytes is not None:
            generation.cache_implementation, generation.use_cache = None, True
        with progress("weights", is_quiet=os.environ.get("RANK", "0") != "0") as bar:
            engine = _load(model.config, arguments, prefetch_bytes)
            run = _GenerateRun(engine, model, generation, prompts, kv_bytes, bar.advance)
            mine = _shares(len(prompts.ids), engine.rank, engine.world, run.batch(arguments.batch))
            num_tokens = generation.max_new_tokens
            bar.begin("tokens", num_tokens and len(mine) * (num_tokens + 1))
            told, seconds = run.all(mine)
    if engine.rank == 0:
        _print(_report(engine, arguments, prompts, told, seconds), as_json=arguments.json)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what cannot be done, before torch is imported."""
    if not has_transformers():
        raise UsageError(
            "generate needs Transformers 5.3 or newer (older ones run code that a config.json"
            " names): pip install '.[transformers]' in a checkout of zeroshard"
        )
    if not (arguments.model / "config.json").is_file():
        raise UsageError(f"{arguments.model} holds no config.json: name a model's directory")
    if arguments.disk_path is not None and arguments.offload != "disk":
        raise UsageError("--disk-path has no effect without --offload disk: leave it out")
    if arguments.disk_path is not None and not arguments.disk_path.is_dir():
        raise UsageError(f"--disk-path {arguments.disk_path} is not a directory")


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keep Transformers' own bars and advice off the terminal."""
    from transformers.utils import logging as of_transformers

    logging: Any = of_transformers
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# ------------------------------------------------------------------------------- model and prompts


def _load(config: Any, arguments: argparse.Namespace, prefetch_bytes: int | None) -> zs.Engine:
    """Build the model without memory, shard it, and read its weights to where they rest."""
    import torch
    from transformers import AutoModelForCausalLM, initialization

    import zeroshard as zs

    build: Any = AutoModelForCausalLM
    given = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = _DTYPES.get(arguments.dtype, given)
    precision = {long: short for short, long in _DTYPES.items()}.get(dtype)
    if precision is None:
        raise UsageError(f"config.json says dtype {dtype!r}: name another one with --dtype")
    # the files will give the weights their values; until then they are alike on every rank
    with (
        refusals(f"{arguments.model / 'config.json'} describes no model that generates text"),
        zs.deferred_init(),
        initialization.no_init_weights(),
        torch.no_grad(),
    ):
        model = build.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        model.tie_weights()
        for parameter in model.parameters():
            parameter.zero_()
    model.eval().requires_grad_(False)
    offload: dict[str, Any] = {"weight": arguments.offload}
    if arguments.offload == "disk":
        offload["disk_path"] = str(arguments.disk_path or tempfile.gettempdir())
    comm = None if arguments.codec is None else zs.Comm(frozen_codec=arguments.codec)
    engine = zs.shard(
        model, None, policy="zero3", precision=precision, offload=zs.Offload(**offload), comm=comm,
        prefetch_bytes=prefetch_bytes,
    )  # fmt: skip
    zs.load_pretrained(engine, arguments.model)
    return engine


# --------------------------------------------------------------------------------------- generation


def _shares(num_prompts: int, rank: int, world: int, batch: int | None) -> list[list[int]]:
    """Return the prompts of each batch of this rank, by number. Every rank has as many batches;
    prompts are done twice where they do not go around.
    """
    each = -(-num_prompts // world)
    mine = [min(rank + world * turn, num_prompts - 1) for turn in range(each)]
    size = batch or each
    return [mine[start : start + size] for start in range(0, each, size)]


@dataclass(frozen=True)
class _GenerateRun:
    """Generation for some prompts on this rank."""

    engine: zs.Engine
    model: ModelDirectory
    generation: Any  # Transformers' GenerationConfig
    prompts: Prompts
    kv_bytes: int | None
    advance: Callable[[], None]

    def batch(self, asked: int | None) -> int | None:
        """Return how many prompts to take at a time: one where others' padding would count."""
        lengths = {len(ids) for ids in self.prompts.ids}
        counts = self.generation.max_new_tokens is None  # max_length counts the prompt
        counts = counts or any(getattr(self.generation, name, None) for name in _BY_LENGTH)
        return 1 if len(lengths) > 1 and counts else asked

    def all(self, batches: list[list[int]]) -> tuple[dict[int, list[int]], float]:
        """Return the new tokens of every prompt of all ranks, and the seconds. Collective."""
        import torch

        if self.generation.do_sample:  # each rank draws its own
            torch.manual_seed((torch.initial_seed() + self.engine.rank) % 2**63)
        mine: dict[int, list[int]] = {}
        self.engine.exchange(b"", "zeroshard generate")  # begin together
        begin = time.perf_counter()
        for numbers in batches:
            ids = [self.prompts.ids[one] for one in numbers]
            mine |= zip(numbers, self._batch(ids), strict=True)
        payload = json.dumps(list(mine.items())).encode()
        told = self.engine.exchange(payload, "zeroshard generate")
        seconds = time.perf_counter() - begin
        return dict(pair for one in told for pair in json.loads(one)), seconds

    def _batch(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the new tokens of each of some prompts, which are padded on the left, with a
        token that the prompt has anyway: penalties count which tokens are there.
        """
        import torch

        model: Any = self.engine.module
        device = next(model.parameters()).device
        width = max(map(len, ids))
        padded = [one[:1] * (width - len(one)) + one for one in ids]
        mask = [[0] * (width - len(one)) + [1] * len(one) for one in ids]
        ends = end_tokens(self.generation)
        model.generation_config = self.generation
        cache = None
        if self.kv_bytes is not None:
            from zeroshard.integrations.kv_cache import KVCache

            cache = KVCache(self.model.config, device_bytes=self.kv_bytes)
        has_beams = (self.generation.num_beams or 1) > 1
        why = f"{self.model.path}: generate() of Transformers refuses how it says to generate"
        with refusals(why, (ValueError, TypeError, NotImplementedError)):
            out: torch.Tensor = model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                past_key_values=cache,
                synced_gpus=self.engine.world > 1,
                streamer=None if has_beams else _Advance(self.advance),
                tokenizer=self.prompts.tokenizer,
                trust_remote_code=False,
            )
        return [_until(row[width:].tolist(), ends) for row in out]


@dataclass(frozen=True)
class _Advance:
    """A streamer of Transformers': told of the prompt, then of every token."""

    advance: Callable[[], None]

    def put(self, value: object) -> None:
        self.advance()

    def end(self) -> None: ...


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """Return `tokens` up to the first of `ends`, that included."""
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


# ----------------------------------------------------------------------------------------- printing


def _report(
    engine: zs.Engine,
    arguments: argparse.Namespace,
    prompts: Prompts,
    told: dict[int, list[int]],
    seconds: float,
) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    num_tokens, memory = sum(map(len, told.values())), engine.memory()
    return {
        "completions": [
            {"prompt": text, "tokens": told[index], "text": prompts.text(told[index])}
            for index, text in enumerate(prompts.texts)
        ],
        "new_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "ranks": engine.world,
        "offload": arguments.offload,
        "codec": arguments.codec,
        "weight_bytes": memory.at_rest["weight"],
        "peak_bytes": memory.peak,
    }


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for one in report["completions"]:
        text = one["text"]
        say(f"{one['prompt']}{' ' + ' '.join(map(str, one['tokens'])) if text is None else text}")
    from rich.filesize import decimal

    codec = f" in {report['codec']}" if report["codec"] else ""
    print(
        f"{report['tokens_per_s']:.2f} tokens/s: {report['new_tokens']} in"
        f" {report['seconds']:.1f} s on {report['ranks']} rank(s); of rank 0"
        f" {decimal(report['weight_bytes'])} of weights on the {report['offload']}{codec}, at most"
        f" {decimal(report['peak_bytes'])} gathered"
    )


_OPTIONS = (
    Option("MODEL_DIR", "a directory with config.json, safetensors files and a tokenizer", Path,
           dest="model"),
    Option("--prompt TEXT", "text to go on from; again for more (without a tokenizer: token"
           " numbers, '1 2 3')", action="append", required=True),
    Option("--max-new-tokens N", "per prompt (default: what generation_config.json says, or 32)",
           count(1)),
    Option("--sample", "draw tokens, or take the likeliest (default: what generation_config.json"
           " says, or not)", action=argparse.BooleanOptionalAction),
    Option("--offload", "where the weights rest (default: host)",
           choices=[tier.value for tier in Tier], default=Tier.HOST.value),
    Option("--disk-path DIR", "the directory of what rests on disk (default: the temporary one)",
           Path),
    Option("--codec", "rest encoded: a quarter (int8, fp8) or an eighth (int4) of the bytes, and"
           " rounded", choices=tuple(CODEC_BITS)),
    Option("--dtype", "the dtype of the computation (default: as in config.json)",
           choices=tuple(_DTYPES)),
    Option("--batch N", "prompts that a rank takes at a time (default: all of its own)", count(1)),
    Option("--kv-device-bytes SIZE", "keys and values beyond this size, 2GiB, rest on the host; 0:"
           " all (default: none)"),
    Option("--prefetch-bytes SIZE", "weights gathered ahead of their use, 1GiB (default: twice the"
           " largest unit)"),
    JSON,
)  # fmt: skip
COMMAND = Subcommand(
    "generate", "generate text with weights on the host or on disk",
    "zeroshard generate MODEL_DIR --prompt 'Once upon a time' --offload disk --codec int8\n"
    "zeroshard run --nproc 2 -m zeroshard generate MODEL_DIR --prompt A --prompt B",
    _OPTIONS, _generate,
)  # fmt: skip
