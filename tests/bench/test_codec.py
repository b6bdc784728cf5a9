"""``zeroshard bench codec``: its rows, its arithmetic, its table and its JSON, on tensors too
small to mean anything.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.codec import Options, crossover, measure, run
from zeroshard.errors import ConfigError

TINY = Options(numel=10_000, rounds=2)


def test_there_is_a_row_for_every_codec_and_dtype() -> None:
    rounds: list[None] = []
    threads = torch.get_num_threads()
    rows = measure(TINY, lambda: rounds.append(None))
    assert [(row["dtype"], row["codec"]) for row in rows] == [
        (d, c) for d in ("fp32", "bf16") for c in ("int8", "int4", "fp8")
    ]
    assert len(rounds) == 2 * 3 and torch.get_num_threads() == threads
    for row in rows:
        assert (
            min(row["encode_gb_s"], row["decode_gb_s"]) > row["both_gb_s"] > 0
            and row["memcpy_gb_s"] > 0
        )
        assert row["of_memcpy"] == pytest.approx(row["both_gb_s"] / row["memcpy_gb_s"])
        # 10,000 elements are 40 blocks of 256
        assert row["encoded_bytes"] == 40 * (132 if row["codec"] == "int4" else 260)
        assert row["bytes_of_bf16"] == row["encoded_bytes"] / 20_000


def test_at_the_crossover_both_ways_take_as_long() -> None:
    numel, encoded_bytes, codec_s = 1_000_000, 515_625, 0.0007
    bandwidth = crossover(numel, encoded_bytes, codec_s)
    assert 2 * numel / bandwidth == pytest.approx(encoded_bytes / bandwidth + codec_s)
    # a slower wire gains
    assert 2 * numel / (0.9 * bandwidth) > encoded_bytes / (0.9 * bandwidth) + codec_s
    (row,) = measure(Options(codecs=["int8"], dtypes=["fp32"], numel=4096, rounds=1))
    codec_s = 4 * 4096 / row["both_gb_s"] / 1e9
    assert row["crossover_gb_s"] == pytest.approx(crossover(4096, 16 * 260, codec_s) / 1e9)


def test_json_holds_what_the_table_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "codec.json"
    assert run(TINY, out=saved, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(saved.read_text())
    assert (
        report["threads"] == 1
        and report["rounds"] == 2
        and len(report["rows"]) == 6
        and report["machine"]["cores"] >= 1
    )
    assert run(TINY, out=None, as_json=False) == 0
    table = capsys.readouterr().out
    assert all(
        word in table for word in ("int8", "int4", "fp8", "bf16", "crossover", "blocks of 256")
    )


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        run(Options(codecs=["int9"]), out=None, as_json=False)
    with pytest.raises(ConfigError, match="block=100"):
        run(Options(block=100), out=None, as_json=False)
