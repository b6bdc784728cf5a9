"""Started by ``zeroshard run`` on 2 ranks: build 700M parameters deferred, shard them, load a
checkpoint; report each rank's peak memory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import zeroshard as zs

WIDTH, LAYERS, VOCABULARY = 1536, 24, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


class Large(nn.Module):
    """The parameters of a language model; it is only built, sharded and loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Peak(threading.Thread):
    """Samples this process's own memory (anonymous and shared; pages of files are the kernel's)
    every 5 ms.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.now()
        self.peak = 0
        self.ended = threading.Event()
        self.start()

    @staticmethod
    def now() -> int:
        with open("/proc/self/status") as lines:
            return sum(
                int(line.split()[1]) * 1024
                for line in lines
                if line.startswith(("RssAnon:", "RssShmem:"))
            )

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self.now() - self.base)

    def stop(self) -> int:
        self.ended.set()
        self.join()
        return self.peak


def main() -> None:
    checkpoint, results = Path(sys.argv[1]), Path(sys.argv[2])
    zs.init_distributed()
    zs.shard(nn.Linear(8, 8), stage=3, sync_from=0).close()  # what is imported at first use
    sampler = Peak()
    torch.manual_seed(0)
    with zs.deferred_init():
        model = Large()
    deferred = sampler.stop()
    base, sampler = sampler.base, Peak()
    sampler.base = base
    engine = zs.shard(model, stage=3)
    sharded = sampler.stop()
    sampler = Peak()
    sampler.base = base
    report = zs.load_pretrained(engine, checkpoint)
    loaded = sampler.stop()
    out = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rest": engine.memory().total,
        "unit": 4 * max(engine.units.values()),
        "deferred": deferred,
        "sharded": sharded,
        "loaded": loaded,
        "bytes_read": report.bytes_read,
    }
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
