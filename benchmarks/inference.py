"""``zeroshard bench inference``: generation with weights on the host and on disk, beside Accelerate
and DeepSpeed's ZeRO-Inference. One process, greedy decoding of a random Llama in fp32.

Contenders take turns (A B C, B C A, ...) and the first round warms up. A turn generates `tokens`
tokens for `batch` prompts of four, with Transformers' unmodified ``generate()``:

    zeroshard+disk          zs.shard(model, None, offload=zs.Offload(weight="disk")): past the page
                            cache
    zeroshard+disk int8     the same, encoded at rest
    accelerate+disk         accelerate.disk_offload: mapped files. Before each forward their pages
                            are dropped from the page cache, outside the time taken: a model larger
                            than memory finds none of its pages there, since the layers after them
                            have taken their place
    accelerate+disk cached  the same with the pages left there: no disk is read
    deepspeed+disk          ZeRO-Inference: stage 3, offload_param on "nvme"
    zeroshard+host, accelerate+host (cpu_offload), deepspeed+host
                            on a CPU, Accelerate's host and device are one memory, and its
                            offloading does nothing; ours copies
    plain                   the model in memory

    raw                     plain threads read the bytes of the weights past the page cache; a
                            forward of zeroshard+disk reads as many, and its share of that speed is
                            told

Tokens are compared: all contenders but the encoded one must give those of the plain model.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks.raw_disk import Options as RawOptions
from benchmarks.raw_disk import Raw
from benchmarks.results import machine_facts
from benchmarks.tables import grid, publish
from zeroshard.errors import ConfigError
from zeroshard.terminal import Table, progress
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import SwapDirectory

__all__ = ["CONTENDERS", "DEFAULT", "Options", "Row", "run"]

CONTENDERS = (
    "zeroshard+disk", "zeroshard+disk int8", "accelerate+disk", "accelerate+disk cached",
    "deepspeed+disk", "zeroshard+host", "accelerate+host", "deepspeed+host", "plain",
)  # fmt: skip
DEFAULT = CONTENDERS[:5]
TARGET, DISK_TARGET = 1.5, 0.85
_LIBRARIES = {"accelerate": "accelerate", "deepspeed": "deepspeed"}
_PROMPT_TOKENS = 4

Generate = Callable[[torch.Tensor, int], tuple[torch.Tensor, float]]  # -> tokens, seconds


@dataclass(frozen=True)
class Options:
    """What is measured."""

    path: Path | None
    contenders: Sequence[str] | None  # None: DEFAULT
    batches: Sequence[int]
    layers: int
    width: int
    tokens: int
    rounds: int


@dataclass
class Row:
    """One contender and batch size, round by round."""

    contender: str
    batch: int
    tokens_per_s: list[float] = field(default_factory=list)
    # of the raw reader's speed in the same round; of what reads the weights as they are from disk
    disk_share: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.tokens_per_s)


# ------------------------------------------------------------------------------------- contenders


def _config(options: Options) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4096,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64),
        num_key_value_heads=max(1, options.width // 64),
        max_position_embeddings=2048,
    )


def _model(options: Options, *, deferred: bool = False) -> Any:
    """Return the same random model each time, in fp32."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with ExitStack() as stack:
        if deferred:
            stack.enter_context(zs.deferred_init())
        model: Any = LlamaForCausalLM(_config(options))
    return model.eval().requires_grad_(False)


class _Clock:
    """A streamer of Transformers' that drops `files` from the page cache before each forward, and
    leaves the time of that out.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.left_out_s = 0.0

    def put(self, value: object) -> None:
        begin = time.perf_counter()
        for file in self._files:
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        self.left_out_s += time.perf_counter() - begin

    def end(self) -> None: ...


def _generating(model: Any, files: Sequence[Path] = ()) -> Generate:
    def generate(prompts: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
        clock, begin = _Clock(files), time.perf_counter()
        tokens: torch.Tensor = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, pad_token_id=0, streamer=clock,
        )  # fmt: skip
        return tokens, time.perf_counter() - begin - clock.left_out_s

    return generate


def _ours(options: Options, path: Path, tier: str, codec: str, stack: ExitStack) -> Generate:
    model = _model(options, deferred=True)
    disk = {"disk_path": str(path)} if tier == "disk" else {}
    offload = zs.Offload.model_validate({"weight": tier, **disk})
    comm = zs.Comm(frozen_codec=codec or None)
    engine = zs.shard(model, None, policy="zero3", offload=offload, comm=comm)
    stack.callback(engine.close)
    return _generating(model)


def _accelerate(options: Options, path: Path, tier: str, kind: str) -> Generate:
    from accelerate import cpu_offload, disk_offload

    model = _model(options)
    if tier == "host":
        cpu_offload(model, execution_device=torch.device("cpu"))
        return _generating(model)
    folder = path / f"accelerate {kind}"
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    os.sync()  # dirty pages cannot be dropped
    return _generating(model, () if kind == "cached" else sorted(folder.glob("*.dat")))


def _deepspeed(options: Options, path: Path, tier: str, stack: ExitStack) -> Generate:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    if not dist.is_initialized():  # else it looks for MPI
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
    place: dict[str, Any] = {"device": "cpu"}
    if tier == "disk":
        place = {"device": "nvme", "nvme_path": str(path), "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # by default it keeps up to 1e9 parameters after their first use
        "zero_optimization": {"stage": 3, "offload_param": place, "stage3_max_reuse_distance": 0},
    }
    model = _model(options)
    # where initialize() does it, a disk on a CPU holds bf16 whatever the model is
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.module.eval()
    return _generating(engine.module)


def _build(name: str, options: Options, path: Path, stack: ExitStack) -> Generate:
    """Return how contender `name` generates."""
    library, _, place = name.partition("+")
    tier, _, kind = place.partition(" ")
    if library == "zeroshard":
        return _ours(options, path, tier, kind, stack)
    if library == "accelerate":
        return _accelerate(options, path, tier, kind)
    if library == "deepspeed":
        return _deepspeed(options, path, tier, stack)
    return _generating(_model(options))


def _installed(names: Sequence[str]) -> list[str]:
    """Return those of `names` whose library is here; say which are not."""
    out = []
    for name in names:
        library = _LIBRARIES.get(name.partition("+")[0])
        if library is None or find_spec(library) is not None:
            out.append(name)
        else:
            sys.stderr.write(f"bench: skipped {name}: {library} is not installed\n")
    return out


# -------------------------------------------------------------------------------------- measuring


class _RawReader:
    """Plain threads that read as many bytes as the weights have."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._store = DiskStore(SwapDirectory(path, rank=0, run="raw"), torch.device("cpu"))
        self._options = RawOptions(
            path=None, num_bytes=num_bytes, rounds=0, queue_depth=8, verify=False
        )
        self._raw = Raw(self._store, self._options)
        self._raw.turn("write")  # what was never written is not read from the disk either

    def speed(self) -> float:
        """Return bytes per second."""
        begin = time.perf_counter()
        self._raw.turn("read")
        return 3 * self._options.state_bytes / (time.perf_counter() - begin)

    def close(self) -> None:
        self._raw.close()
        self._store.close()


def _measure(
    contenders: dict[str, Generate], raw: _RawReader | None, options: Options, weight_bytes: int
) -> Iterator[tuple[str, int, float, float | None]]:
    """Yield (contender, batch, tokens per second, share of the raw reader's speed), round by
    round; the first round warms up and is not yielded.
    """
    names, expected = list(contenders), dict[int, torch.Tensor]()
    for number in range(options.rounds + 1):
        first = number % len(names)
        for batch in options.batches:
            prompts = torch.arange(batch * _PROMPT_TOKENS).reshape(batch, -1) % 4096
            raw_speed = 0.0 if raw is None else raw.speed()
            for name in names[first:] + names[:first]:
                tokens, seconds = contenders[name](prompts, options.tokens)
                if "int8" not in name:
                    same = expected.setdefault(batch, tokens)
                    assert torch.equal(tokens, same), f"{name} generates other tokens"
                share = None
                if name == "zeroshard+disk" and raw is not None:
                    share = weight_bytes * options.tokens / seconds / raw_speed
                if number:
                    yield name, batch, batch * options.tokens / seconds, share


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Measure, and print a table (or JSON). Raises StorageError when the directory cannot be used
    or is full, ConfigError for a contender that does not exist.
    """
    asked = options.contenders or DEFAULT
    if unknown := [name for name in asked if name not in CONTENDERS]:
        raise ConfigError(f"contender {unknown[0]!r} is not one of {', '.join(CONTENDERS)}")
    names = _installed(asked)
    path = Path(tempfile.mkdtemp(prefix="inference-", dir=options.path))
    rows = [Row(name, batch) for name in names for batch in options.batches]
    numel = sum(parameter.numel() for parameter in _model(options, deferred=True).parameters())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        contenders = {name: _build(name, options, path, stack) for name in names}
        raw = None
        if "zeroshard+disk" in names:
            raw = _RawReader(path, 4 * numel)
            stack.callback(raw.close)
        with progress(f"{4 * numel / 1e9:.2f} GB", options.rounds * len(rows)) as bar:
            for name, batch, speed, share in _measure(contenders, raw, options, 4 * numel):
                row = next(one for one in rows if (one.contender, one.batch) == (name, batch))
                row.tokens_per_s.append(speed)
                row.disk_share += [] if share is None else [share]
                bar.advance()
    ratios = _ratios(rows)
    notes = [
        f"{what}: {ratio:.2f} x the better peer (aim: {TARGET})" for what, ratio in ratios.items()
    ]
    report = {
        "machine": machine_facts(),
        "weight_bytes": 4 * numel,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "rows": [asdict(row) | {"median": row.median} for row in rows],
        "beside_the_better_peer": ratios,
        "targets": {"beside_the_better_peer": TARGET, "disk_share": DISK_TARGET},
    }
    return publish(report, [_table(rows, options, 4 * numel)], notes, out=out, as_json=as_json)


# --------------------------------------------------------------------------------------- printing


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return, per tier and batch, our median beside the better peer's; pages left in the cache are
    no disk.
    """
    out = {}
    for ours in rows:
        if ours.contender not in ("zeroshard+disk", "zeroshard+host"):
            continue
        tier = ours.contender.partition("+")[2]
        peers = [
            row.median
            for row in rows
            if row.batch == ours.batch
            and row.contender in (f"accelerate+{tier}", f"deepspeed+{tier}")
        ]
        if peers:
            out[f"{tier}, batch {ours.batch}"] = ours.median / max(peers)
    return out


def _table(rows: Sequence[Row], options: Options, weight_bytes: int) -> Table:
    cells = []
    for row in rows:
        speeds, share = row.tokens_per_s, row.disk_share
        spread = f"{min(speeds):.2f}, {max(speeds):.2f}"
        told = f"{statistics.median(share):.2f}" if share else ""
        cells.append((row.contender, row.batch, f"{row.median:.2f}", spread, told))
    return grid(
        f"{weight_bytes / 1e9:.2f} GB of weights, {options.tokens} tokens per prompt,"
        f" {options.rounds} rounds",
        ("contender", "batch", "tokens/s", "least, most", "of the raw disk"),
        cells,
    )
