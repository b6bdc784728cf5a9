"""Draw the numbers that ``train_gpt.py --log`` has written, a line per run (needs matplotlib).

python examples/plot_log.py log.jsonl loss.png
python examples/plot_log.py log.jsonl norms.png grad_norm
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(log: str, picture: str, *keys: str) -> None:
    lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    for run in dict.fromkeys(line["run"] for line in lines):
        mine = [line for line in lines if line["run"] == run]
        for key in keys or ["loss"]:
            plt.plot([line["step"] for line in mine], [line[key] for line in mine], label=run)
    plt.xlabel("step")
    plt.ylabel(", ".join(keys or ["loss"]))
    plt.legend()
    plt.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
