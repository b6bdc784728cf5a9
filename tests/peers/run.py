#!/usr/bin/env python3
"""Run other people's tests of DeepSpeed's interface through the stand-in, and count what passes.

    python tests/peers/run.py deepspeed FOLDER               # a Markdown row for each file
    python tests/peers/run.py transformers FOLDER --why      # and the reason of each failure
    python tests/peers/run.py accelerate FOLDER --only accumulation   # files of this name
    python tests/peers/run.py deepspeed FOLDER -k Scale      # pytest's -k, for long files

FOLDER is a checkout of the suite's repository, the caller's, and nothing of it is part of this one.
The files named here need no GPU and test DeepSpeed's interface, not its inside; those that FOLDER
lacks are left out. Transformers' and Accelerate's need the packages datasets and parameterized;
their hub is a folder of random models (plugin/peers_plugin.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
_DEEPSPEED = """
checkpoint/test_latest_checkpoint checkpoint/test_lr_scheduler checkpoint/test_other_optimizer
checkpoint/test_shared_weights checkpoint/test_tag_validation checkpoint/test_zero_optimizer
comm/test_dist monitor/test_monitor
ops/muon/test_muon ops/muon/test_muon_partial_training
runtime/half_precision/test_dynamic_loss_scale runtime/half_precision/test_fp16
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
_TRANSFORMERS = """
tests/deepspeed/test_deepspeed tests/deepspeed/test_model_zoo tests/deepspeed/test_alst_ulysses_sp
tests/trainer/distributed/test_trainer_distributed_deepspeed
"""
_ACCELERATE = """
tests/deepspeed/test_deepspeed tests/deepspeed/test_deepspeed_gradient_accumulation
tests/deepspeed/test_deepspeed_multiple_model tests/deepspeed/test_alst_ulysses_sp
"""


@dataclass(frozen=True)
class Suite:
    """Test files, where they are in their repository, and the processes that they want."""

    files: list[str]
    folder: str = "."  # pytest runs here
    under: str = ""  # the files' own part of their paths
    path: tuple[Path, ...] = ()
    library: str = ""  # its demands for GPUs are lifted, its hub made
    launcher: tuple[str, ...] = ("-m", "zeroshard", "as-deepspeed", sys.executable)
    environment: dict[str, str] = field(default_factory=dict)


SUITES = {
    "deepspeed": Suite(
        _DEEPSPEED.split(),
        folder="tests",
        under="unit/",
        path=(HERE / "deepspeed",),
        launcher=(),
        environment={
            "ZEROSHARD_DEEPSPEED_UNIT": "1",
            "LOCAL_SIZE": "4",  # ranks that this machine is said to have room for
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        },
    ),
    "transformers": Suite(_TRANSFORMERS.split(), library="transformers"),
    "accelerate": Suite(_ACCELERATE.split(), library="accelerate"),
}
COLUMNS = ("passed", "failed", "did not end", "hub", "GPU", "skipped")
_HUB = re.compile(r"huggingface\.co|Hugging Face Hub|LocalEntryNotFound|[Oo]ffline")
_GPU = re.compile(
    r"requires? .*(accelerator|GPU|CUDA)|[Nn]ot compiled with CUDA|No CUDA|support bf16/gpu"
)

_ERROR = re.compile(
    r"^(?:E +)?(?:\[rank\d\]: )?([\w.]*(?:Error|Exception|Exit|Failed|OfflineMode)\w*: .*)",
    re.MULTILINE,
)


def run_file(
    suite: Suite, checkout: Path, name: str, limits: tuple[float, float], tests_named: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Run a file, or of it `tests_named`, and yield (column, test, reason) for each test.

    `limits` are the seconds of the file and of a test.
    """
    folder = checkout / suite.folder
    paths = [*map(str, [*suite.path, HERE / "plugin", SOURCE, folder])]
    programs = str(Path(sys.executable).parent)  # torchrun, accelerate
    line = [sys.executable, *suite.launcher, "-m", "pytest", "-q", "--tb=short",
            "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "peers_plugin",
            f"--timeout={limits[1]:g}", "-k", tests_named, f"{suite.under}{name}.py"]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report")
        report.touch()
        environment = {
            **os.environ,
            **suite.environment,
            "PYTHONPATH": os.pathsep.join([*paths, *_have("PYTHONPATH")]),
            "PATH": os.pathsep.join([programs, *_have("PATH")]),
            "OMP_NUM_THREADS": "1",
            "PEERS_REPORT": str(report),
            "PEERS_LIBRARY": suite.library,
            "HF_HUB_CACHE": f"{scratch}/hub",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        output = end_in_time(line, folder, environment, limits[0])
        lines = [json.loads(written) for written in report.read_text().splitlines()]
    yield from count(lines) if lines else [("failed", name, output[-2000:])]


def _have(name: str) -> list[str]:
    return [os.environ[name]] if os.environ.get(name) else []


def end_in_time(line: list[str], folder: Path, environment: dict[str, str], limit_s: float) -> str:
    """Run a command, and end it and its children where the limit is over."""
    process = subprocess.Popen(line, cwd=folder, env=environment, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        # launchers of ranks end theirs at the first signal
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=20)[0]
        return ""


def count(lines: list[dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the column, name and reason of each test that the plugin's lines tell of."""
    came_to = {line["test"]: line for line in lines}  # a test's last line counts
    for test, line in came_to.items():
        yield _column(line["outcome"], line["why"]), test, line["why"]


def _column(outcome: str, why: str) -> str:
    if outcome == "started" or "Timeout (>" in why:
        return "did not end"
    if outcome == "passed":
        return outcome
    said = _short(why)
    if _HUB.search(said):
        return "hub"
    return "GPU" if _GPU.search(said) else outcome


def _short(reason: str) -> str:
    """The line of a traceback that says what went wrong: its last exception, or that of a process
    which the test has started.
    """
    errors = [found[1] for found in _ERROR.finditer(reason)]
    said = re.findall(r"^E +(.*)", reason, re.MULTILINE)
    return (errors[-1:] or said[:1] or [reason.strip().partition("\n")[0]])[0][:400]


def main() -> None:
    """Run the files and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("-k", default="", metavar="EXPRESSION")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--slow", action="store_true", help="what the suite calls slow, too")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a file")
    parser.add_argument("--test-timeout", type=float, default=300.0, help="seconds of a test")
    arguments = parser.parse_args()
    os.environ["RUN_SLOW"] = str(int(arguments.slow))
    suite, only = SUITES[arguments.suite], arguments.only
    folder = arguments.folder.resolve()
    there = [f for f in suite.files if (folder / suite.folder / f"{suite.under}{f}.py").exists()]
    total: Counter[str] = Counter()
    print(f"| file | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    for name in [only] if only in there else [name for name in there if only in name]:
        limits = (arguments.timeout, arguments.test_timeout)
        tests = list(run_file(suite, folder, name, limits, arguments.k))
        counts = Counter(column for column, _, _ in tests)
        total += counts
        _print_row(name, counts)
        for column, test, why in tests if arguments.why else ():
            if column not in ("passed", "skipped"):
                print(f"    {column}: {test.partition('::')[2] or test}: {_short(why)}", flush=True)
    _print_row("all", total)


def _print_row(name: str, counts: Counter[str]) -> None:
    print(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
