"""``zeroshard bench codec``: what encoding and decoding cost beside a copy in memory, and below
which bandwidth they pay. One process.

For every dtype and codec, in turns (the order rotates from round to round; the first round warms
up), on tensors too large for caches:

    memcpy   one copy of the tensor: the most that any pass over it can do
    encode   the tensor to bytes
    decode   the bytes to a tensor of the same dtype

GB/s count the tensor's bytes, never those of the encoding; ``both`` is the tensor's bytes through
the time of encoding plus decoding. A transfer in bf16 takes 2n/B seconds for n elements at B bytes
a second, an encoded one e/B plus the time t of the codec, nothing overlapped: the encoded one is
faster below the crossover ``B = (2n - e) / t``. Casting to bf16 is counted as free.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import machine_facts
from benchmarks.tables import grid, publish
from zeroshard.comm.codec import CODECS, Codec, codec, engine_of
from zeroshard.terminal import Table, progress

__all__ = ["DTYPES", "Options", "crossover", "measure", "run"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BF16_BYTES = 2
_COLUMNS = (
    "codec", "dtype", "encode GB/s", "decode GB/s", "both GB/s", "memcpy GB/s", "both / memcpy",
    "bytes / bf16", "crossover Gbit/s",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What is measured."""

    codecs: Sequence[str] = tuple(CODECS)
    dtypes: Sequence[str] = ("fp32", "bf16")
    block: int = 256
    numel: int = 1 << 24
    rounds: int = 12
    threads: int = 1
    device: str = "cpu"


def crossover(numel: int, encoded_bytes: int, codec_s: float) -> float:
    """Return the bytes per second of a wire on which `numel` elements take as long in bf16 as
    encoded; slower wires gain.

    A million elements whose int8 blocks take 1.0 MB, in 0.5 ms: (2.0 - 1.0) MB / 0.5 ms = 2 GB/s.
    """
    return (_BF16_BYTES * numel - encoded_bytes) / codec_s


def measure(options: Options, advance: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return one row per dtype and codec: plain values, speeds in GB/s, medians over the rounds.
    Calls `advance` after each round.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return [row for dtype in options.dtypes for row in _measure_dtype(dtype, options, advance)]
    finally:
        torch.set_num_threads(before)


def _measure_dtype(
    dtype: str, options: Options, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    coders = [codec(name, block=options.block) for name in options.codecs]
    source = torch.randn(options.numel, device=options.device).to(DTYPES[dtype])
    out = torch.empty_like(source)
    encodings = [
        torch.empty(coder.encoded_bytes(options.numel), dtype=torch.uint8, device=options.device)
        for coder in coders
    ]
    turns: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(source)}
    for coder, data in zip(coders, encodings, strict=True):
        turns[f"encode {coder.name}"] = lambda coder=coder, data=data: coder.encode(source, data)  # type: ignore[misc]
        turns[f"decode {coder.name}"] = lambda coder=coder, data=data: coder.decode(data, out)  # type: ignore[misc]
    seconds = _in_turns(turns, options, advance)
    return [_row(coder, dtype, source, seconds) for coder in coders]


def _in_turns(
    turns: dict[str, Callable[[], object]], options: Options, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the seconds of every turn, by name. Round 0 is in the order written, so that what
    is decoded has been encoded.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(options.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            _settle(options.device)
            start = time.perf_counter()
            turns[name]()
            _settle(options.device)
            if number:
                seconds[name].append(time.perf_counter() - start)
        advance()
    return seconds


def _settle(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    coder: Codec, dtype: str, source: torch.Tensor, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    encode_s, decode_s, copy_s = (
        statistics.median(seconds[name])
        for name in (f"encode {coder.name}", f"decode {coder.name}", "memcpy")
    )
    numel, encoded_bytes = source.numel(), coder.encoded_bytes(source.numel())
    gigabytes = source.nbytes / 1e9
    return {
        "codec": coder.name,
        "dtype": dtype,
        "block": coder.block,
        "numel": numel,
        "encoded_bytes": encoded_bytes,
        "engine": engine_of(source),
        "memcpy_gb_s": gigabytes / copy_s,
        "encode_gb_s": gigabytes / encode_s,
        "decode_gb_s": gigabytes / decode_s,
        "both_gb_s": gigabytes / (encode_s + decode_s),
        "of_memcpy": copy_s / (encode_s + decode_s),
        "bytes_of_bf16": encoded_bytes / (_BF16_BYTES * numel) if numel else 1.0,
        "crossover_gb_s": crossover(numel, encoded_bytes, encode_s + decode_s) / 1e9,
    }


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Measure, and print a table (or JSON). Raises ConfigError for a codec or block that there
    is not.
    """
    machine = machine_facts()
    with progress("codecs", len(options.dtypes) * (options.rounds + 1)) as bar:
        rows = measure(options, bar.advance)
    facts = {
        "threads": options.threads,
        "rounds": options.rounds,
        "device": options.device,
        "torch": torch.__version__,
    }
    report = {"machine": machine, **facts, "rows": rows}
    return publish(report, [_table(options, rows)], (), out=out, as_json=as_json)


def _table(options: Options, rows: list[dict[str, Any]]) -> Table:
    title = (
        f"{options.numel / 1e6:.1f} million elements, blocks of {options.block}, {options.device},"
        f" {options.threads} thread(s), median of {options.rounds} rounds; GB/s of the tensor."
        " Encoded beats bf16 on wires slower than the last column."
    )
    cells = []
    for row in rows:
        speeds = (f"{row[f'{what}_gb_s']:.2f}" for what in ("encode", "decode", "both", "memcpy"))
        ratios = (f"{row['of_memcpy']:.3f}", f"{row['bytes_of_bf16']:.3f}")
        cells.append(
            (row["codec"], row["dtype"], *speeds, *ratios, f"{8 * row['crossover_gb_s']:.1f}")
        )
    return grid(title, _COLUMNS, cells, num_text=2)
