#!/usr/bin/env python3
"""Run DeepSpeed's own unit tests through the stand-in, and count what passes.

    python tests/support/deepspeed_unit/run.py FOLDER               # a Markdown row for each file
    python tests/support/deepspeed_unit/run.py FOLDER --only data   # files with this in their name
    python tests/support/deepspeed_unit/run.py FOLDER -k Scale      # pytest's -k, for long files
    python tests/support/deepspeed_unit/run.py FOLDER --why         # and the reason of each failure

FOLDER is a checkout of DeepSpeed's repository, the caller's. Nothing of it is part of this one: the
files named here need no GPU and test DeepSpeed's interface, not its inside.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
_FILES = """
checkpoint/test_latest_checkpoint checkpoint/test_lr_scheduler checkpoint/test_other_optimizer
checkpoint/test_shared_weights checkpoint/test_tag_validation checkpoint/test_zero_optimizer
comm/test_dist monitor/test_monitor
runtime/half_precision/test_dynamic_loss_scale
runtime/test_data runtime/test_ds_config_dict runtime/test_ds_initialize runtime/test_lr_schedulers
runtime/test_multi_output_model runtime/test_multiple_models runtime/test_no_sync_ctxt
runtime/zero/test_ignore_unused_parameters runtime/zero/test_unwrap_model
runtime/zero/test_zero_context runtime/zero/test_zero_context_ancestry
runtime/zero/test_zero_context_return runtime/zero/test_zero_dynamic_class
runtime/zero/test_zero_grad_clip runtime/zero/test_zero_leaf_module
runtime/zero/test_zero_nesting_init runtime/zero/test_zero_tensor_fragment
runtime/zero/test_zero_tiled utils/test_init_on_device utils/test_nvtx
v1/half_precision/test_bf16 v1/half_precision/test_gradient_clipping_default
v1/zero/test_zero v1/zero/test_zero_coalesce_grad_reduction
v1/zero/test_zero_user_backward
"""
FILES = _FILES.split()
_RUNNING = re.compile(r"^unit/.* (PASSED|FAILED|SKIPPED|ERROR) ", re.MULTILINE)
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED)( unit/.*| \[\d+\] .*)$", re.MULTILINE)


def run_file(
    folder: Path, name: str, timeout_s: float, tests_named: str = ""
) -> tuple[Counter[str], list[str]]:
    """Run one file, or of it `tests_named`; return its outcomes and a line for each failure."""
    tests = folder / "tests"
    paths = [HERE, ROOT / "src", tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "ZEROSHARD_DEEPSPEED_UNIT": "1",
        "LOCAL_SIZE": "4",  # ranks that this machine is said to have room for
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider",
            "-p", "no:randomly", "-k", tests_named, f"unit/{name}.py"]  # fmt: skip
    ended = ""
    try:
        done = subprocess.run(line, cwd=tests, env=environment, capture_output=True, text=True,
                              timeout=timeout_s, check=False)  # fmt: skip
        output = done.stdout
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()
        ended = f"ERROR {name} did not end in {timeout_s:.0f} s: what it had run by then is counted"
    output = re.sub(r"\x1b\[[0-9;]*m", "", output)
    if ended:
        return Counter(_RUNNING.findall(output)), [ended]
    found = _OUTCOME.findall(output)
    counts: Counter[str] = Counter()
    for kind, rest in found:
        number = re.match(r" \[(\d+)\]", rest)
        counts[kind] += int(number[1]) if number and kind == "SKIPPED" else 1
    reasons = [f"{kind}{rest}" for kind, rest in found if kind in ("FAILED", "ERROR")]
    return counts, reasons or ([] if found else [output[-2000:]])


def main() -> None:
    """Run the files and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("-k", default="", metavar="EXPRESSION")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    print("| file of tests/unit | passed | failed | skipped |\n|---|---|---|---|", flush=True)
    only = arguments.only
    for name in [only] if only in FILES else [name for name in FILES if only in name]:
        folder = arguments.folder.resolve()
        counts, reasons = run_file(folder, name, arguments.timeout, arguments.k)
        total += counts
        failed = counts["FAILED"] + counts["ERROR"]
        print(f"| {name} | {counts['PASSED']} | {failed} | {counts['SKIPPED']} |", flush=True)
        for reason in reasons if arguments.why else ():
            print(f"    {reason[:400]}", flush=True)
    failed = total["FAILED"] + total["ERROR"]
    print(f"| all | {total['PASSED']} | {failed} | {total['SKIPPED']} |")


if __name__ == "__main__":
    main()
