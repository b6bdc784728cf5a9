"""Print what has run on the pretended device, as Markdown.

python -m tests.device.table            # each case: runs, CPU seconds, what differs
python -m tests.device.table --waits    # each wait left out: the schedules that find it
"""

from __future__ import annotations

import argparse

from tests.device.programs import ALL, CASES, compare
from tests.device.test_waits import WAITS, finds
from tests.support.harness import close_pools, run_ranks

_DEVICE = "tests.device.zsim"


def print_cases() -> None:
    """Run every case under every schedule."""
    print("| case | ranks | runs | CPU seconds of a run | bits |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        for world in case.worlds:
            one, *_ = run_ranks(world, compare, name, ALL, device=_DEVICE, timeout=120)
            bits = one.found[0] if one.found else "plain PyTorch's" if case.is_plain else "equal"
            each = one.cpu_s / one.num_runs
            print(f"| {name} | {world} | {one.num_runs} | {each:.2f} | {bits} |", flush=True)


def print_waits() -> None:
    """Leave out every wait in the case that needs it."""
    print("| wait | case | found by |\n|---|---|---|")
    for wait, (case, _) in WAITS.items():
        (found,) = run_ranks(1, finds, wait, case, ALL, device=_DEVICE, timeout=120)
        schedules = ", ".join(name if name != "random" else f"random {n}" for name, n in found)
        print(f"| `{wait}` | {case} | {schedules} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waits", action="store_true")
    print_waits() if parser.parse_args().waits else print_cases()
    close_pools()
