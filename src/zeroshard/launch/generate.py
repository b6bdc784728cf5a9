"""``zeroshard generate``: text from a model in Transformers' format whose weights rest on the host
or on disk (ZeRO-Inference).

    zeroshard generate MODEL_DIR --prompt TEXT                       weights on the host
    zeroshard generate MODEL_DIR --prompt TEXT --offload disk --codec int8
    zeroshard run --nproc 2 -m zeroshard generate MODEL_DIR --prompt A --prompt B

MODEL_DIR holds config.json, safetensors files and, for prompts that are text, a tokenizer. The
model is built without memory and read a parameter at a time, so no rank holds all of it. Decoding
is greedy. Of several ranks each reads its slice of the weights, and generates for its share of the
prompts; rank 0 prints.

The JSON has "completions" (in the order of the prompts: "prompt", "tokens", and "text" or null),
"new_tokens", "seconds", "tokens_per_s", "ranks", "offload", "codec", and of rank 0 "weight_bytes"
(at rest) and "peak_bytes" (the most that was gathered).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.launch.options import UsageError

if TYPE_CHECKING:
    import torch

    import zeroshard as zs

__all__ = ["add_parser"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_parser(commands: Any) -> None:
    """Add ``zeroshard generate`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="generate text with weights on the host or on disk",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "example:\n  zeroshard generate MODEL_DIR --prompt 'Once upon a time' --offload disk"
            " --codec int8\n  zeroshard run --nproc 2 -m zeroshard generate MODEL_DIR --prompt A"
            " --prompt B"
        ),
    )
    add = parser.add_argument
    text = "a directory with config.json, safetensors files and a tokenizer"
    add("model", type=Path, metavar="MODEL_DIR", help=text)
    text = "text to go on from; again for more (without a tokenizer: token numbers, '1 2 3')"
    add("--prompt", action="append", required=True, metavar="TEXT", help=text)
    add("--max-new-tokens", type=_count, default=32, metavar="N", help="per prompt (default: 32)")
    text = "where the weights rest (default: host)"
    add("--offload", choices=("device", "host", "disk"), default="host", help=text)
    text = "the directory of what rests on disk (default: the temporary one)"
    add("--disk-path", type=Path, metavar="DIR", help=text)
    text = "rest encoded: a quarter (int8, fp8) or an eighth (int4) of the bytes, and rounded"
    add("--codec", choices=("int8", "int4", "fp8"), help=text)
    text = "the dtype of the computation (default: that of config.json)"
    add("--dtype", choices=tuple(_DTYPES), help=text)
    text = "prompts that a rank takes at a time (default: all of its own)"
    add("--batch", type=_count, metavar="N", help=text)
    text = "keys and values beyond this size, 2GiB, rest on the host; 0: all (default: none)"
    add("--kv-device-bytes", metavar="SIZE", help=text)
    text = "weights gathered ahead of their use, 1GiB (default: twice the largest unit)"
    add("--prefetch-bytes", metavar="SIZE", help=text)
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_generate)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _size(text: str | None, option: str) -> int | None:
    """Return the bytes that an option says. Raises UsageError."""
    from zeroshard.core.sizes import parse_bytes
    from zeroshard.errors import ConfigError

    if text is None or text == "0":
        return None if text is None else 0
    try:
        return parse_bytes(text, option)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _generate(arguments: argparse.Namespace) -> int:
    kv_bytes = _size(arguments.kv_device_bytes, "--kv-device-bytes")
    prefetch_bytes = _size(arguments.prefetch_bytes, "--prefetch-bytes")
    _check(arguments)
    import zeroshard as zs

    zs.init_distributed()
    with _silent_transformers():
        config, prompts = _read_model(arguments)
        with _progress() as bar:
            bar.show("weights", None)
            engine = _load(config, arguments, prefetch_bytes)
            run = _Run(engine, config, arguments.max_new_tokens, kv_bytes, bar.advance)
            mine = _shares(len(prompts.ids), engine.rank, engine.world, arguments.batch)
            bar.show("tokens", len(mine) * (arguments.max_new_tokens + 1))
            told, seconds = run.all(prompts, mine)
    if engine.rank == 0:
        _print(_report(engine, arguments, prompts, told, seconds), as_json=arguments.json)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what cannot be done, before torch is imported."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        raise UsageError("generate needs Transformers: pip install 'zeroshard[transformers]'")
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


@dataclass(frozen=True)
class _Prompts:
    """Token numbers of every prompt, and the tokenizer, if there is one."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Any

    def text(self, tokens: list[int]) -> str | None:
        """Return tokens as text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _read_model(arguments: argparse.Namespace) -> tuple[Any, _Prompts]:
    """Return the model's configuration and the prompts. Raises UsageError."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(arguments.model, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(
            f"{arguments.model / 'config.json'} describes no model that this Transformers knows:"
            f" {str(error).splitlines()[0]}"
        ) from None
    tokenizer = None
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if any((arguments.model / name).is_file() for name in names):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    ids = [_tokens(text, tokenizer, config.vocab_size) for text in arguments.prompt]
    return config, _Prompts(arguments.prompt, ids, tokenizer)


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
    try:
        # the files will give the weights their values; until then they are alike on every rank
        with zs.deferred_init(), initialization.no_init_weights(), torch.no_grad():
            model = build.from_config(config, dtype=getattr(torch, dtype))
            model.tie_weights()
            for parameter in model.parameters():
                parameter.zero_()
    except ValueError as error:
        raise UsageError(f"{arguments.model}: {str(error).splitlines()[0]}") from None
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
class _Run:
    """Greedy decoding of some prompts on this rank."""

    engine: zs.Engine
    config: Any
    max_new_tokens: int
    kv_bytes: int | None
    advance: Callable[[], None]

    def all(
        self, prompts: _Prompts, batches: list[list[int]]
    ) -> tuple[dict[int, list[int]], float]:
        """Return the new tokens of every prompt of all ranks, and the seconds. Collective."""
        mine: dict[int, list[int]] = {}
        self.engine.exchange(b"", "zeroshard generate")  # begin together
        begin = time.perf_counter()
        for numbers in batches:
            mine |= zip(numbers, self._batch([prompts.ids[one] for one in numbers]), strict=True)
        payload = json.dumps(list(mine.items())).encode()
        told = self.engine.exchange(payload, "zeroshard generate")
        seconds = time.perf_counter() - begin
        return dict(pair for one in told for pair in json.loads(one)), seconds

    def _batch(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the new tokens of each of some prompts, which are padded on the left."""
        import torch

        model: Any = self.engine.module
        device = next(model.parameters()).device
        width = max(map(len, ids))
        padded = [[0] * (width - len(one)) + one for one in ids]
        mask = [[0] * (width - len(one)) + [1] * len(one) for one in ids]
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        out: torch.Tensor = model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=ends[0] if ends else 0,
            past_key_values=self._cache(),
            synced_gpus=self.engine.world > 1,
            streamer=_Advance(self.advance),
        )
        return [_until(row[width:].tolist(), ends) for row in out]

    def _cache(self) -> Any:
        if self.kv_bytes is None:
            return None
        from zeroshard.integrations.kv_cache import KVCache

        return KVCache(self.config, device_bytes=self.kv_bytes)


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


class _Bar:
    """A progress bar on a terminal's stderr, of rank 0."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None

    def show(self, what: str, total: int | None) -> None:
        """Begin anew, with `total` steps, where it is known."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def advance(self) -> None:
        """Go on by one step."""
        self._progress.advance(self._task)


@contextmanager
def _progress() -> Iterator[_Bar]:
    import os

    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
    with Progress(console=console, transient=True, disable=not is_shown) as progress:
        yield _Bar(progress)


def _report(
    engine: zs.Engine,
    arguments: argparse.Namespace,
    prompts: _Prompts,
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
        print(json.dumps(report, indent=1))
        return
    for one in report["completions"]:
        text = one["text"]
        print(f"{one['prompt']}{' ' + ' '.join(map(str, one['tokens'])) if text is None else text}")
    from rich.filesize import decimal

    codec = f" in {report['codec']}" if report["codec"] else ""
    print(
        f"{report['tokens_per_s']:.2f} tokens/s: {report['new_tokens']} in"
        f" {report['seconds']:.1f} s on {report['ranks']} rank(s); of rank 0"
        f" {decimal(report['weight_bytes'])} of weights on the {report['offload']}{codec}, at most"
        f" {decimal(report['peak_bytes'])} gathered"
    )
