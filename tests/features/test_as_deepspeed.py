"""``zeroshard run --as-deepspeed``: an unmodified Trainer script with a DeepSpeed configuration
trains as on one process without; and what the stand-in says about names that it does not have.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.harness import ROOT, spawn_ranks
from zeroshard.deepspeed import shim

SCRIPT = str(ROOT / "tests" / "support" / "deepspeed_runs.py")
FAMILIES, STAGES, DEVICES = ("llama", "t5"), ("1", "2", "3"), ("none", "cpu")


def _run(folder: Path, sharded: list[str], plain: list[str]) -> dict[str, Any]:
    """Run `plain` on one process and `sharded` on two, side by side; return what each wrote."""
    launcher = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", "--as-deepspeed"]
    line = [*launcher, SCRIPT, str(folder), *sharded]
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    spawned = spawn_ranks(1, _plainly, str(folder), plain, timeout=600, init_group=False)
    output = job.communicate(timeout=600)[0].decode()
    assert job.returncode == 0, output[-6000:]
    assert spawned[0].exitcode == 0, spawned[0].stderr[-6000:]
    found = {run: json.loads((folder / f"{run}.json").read_text()) for run in (*plain, *sharded)}
    return found | {"said": output, "folder": folder}


def _plainly(rank: int, world: int, folder: str, runs: list[str]) -> None:
    """Run the script as one process that no launcher has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    sys.argv = [SCRIPT, folder, *runs]
    runpy.run_path(SCRIPT, run_name="__main__")


def _check(results: dict[str, Any], run: str) -> None:
    """The same losses, norms, rates and weights as on one process."""
    family, stage, _, precision = run.split(":")
    plain = f"{'llama' if family == 'loaded' else family}:plain:none:{precision}"
    ours, expected = results[run], results[plain]
    assert ours["engine"].startswith("zeroshard.") and len(ours["losses"]) == 6
    tolerance = {"rel": 1e-6} if precision == "fp32" else {"rel": 5e-3}
    assert ours["losses"] == pytest.approx(expected["losses"], **tolerance), run
    loose = {"rel": 1e-4} if precision == "fp32" else {"rel": 0.1}
    assert ours["norms"] == pytest.approx(expected["norms"], **loose), run
    if stage == "2":  # the engine steps the schedule, before the Trainer logs its rate
        assert ours["rates"][:-1] == pytest.approx(expected["rates"][1:]), run
    else:
        assert ours["rates"] == pytest.approx(expected["rates"]), run
    saved, there = (
        load_file(results["folder"] / f"{one}.model" / "model.safetensors") for one in (run, plain)
    )
    assert saved.keys() == there.keys()
    for name, value in saved.items():
        assert value.shape == there[name].shape, name
        apart = (value.float() - there[name].float()).abs().max().item()
        assert apart < (1e-5 if precision == "fp32" else 2e-2), (run, name, apart)


def test_an_unmodified_trainer_script_trains_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sharded = ["llama:1:none:fp32", "loaded:3:cpu:fp32", "resized:3:none:fp32"]
    plain = ["llama:plain:none:fp32", "resized:plain:none:fp32"]
    results = _run(tmp_path, sharded, plain)
    for run in sharded:
        _check(results, run)
    assert (
        "zeroshard: in DeepSpeed's place: Engine(LlamaForCausalLM, policy=zero1"
        in (results["said"])
    )
    assert "nothing was sharded" not in results["said"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_tier_and_precision_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    precisions = ("fp32", "bf16")
    sharded = [":".join(run) for run in itertools.product(FAMILIES, STAGES, DEVICES, precisions)]
    plain = [":".join(run) for run in itertools.product(FAMILIES, ["plain"], ["none"], precisions)]
    loaded = ["loaded:3:none:fp32"]
    resumed = [f"llama:{stage}:{device}:fp32+resumed" for stage in STAGES for device in DEVICES]
    scheduled = ["llama:3:schedule:fp32"]
    lora = ["lora:3:none:fp32", "lora:2:cpu:fp32"]
    loops = [f"accelerate:{stage}:{device}:fp32" for stage in STAGES for device in DEVICES]
    every = [*sharded, *loaded, *resumed, *scheduled, *lora, *loops]
    results = _run(tmp_path, every, [*plain, "lora:plain:none:fp32"])
    for run in (*sharded, *loaded):
        _check(results, run)
    for run in lora:
        ours, expected = results[run], results["lora:plain:none:fp32"]
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-6), run
        adapters = [tmp_path / f"{one}.model" / "adapter_model.safetensors" for one in
                    (run, "lora:plain:none:fp32")]  # fmt: skip
        saved, there = map(load_file, adapters)
        assert saved.keys() == there.keys() and saved
        for name, value in saved.items():
            assert (value - there[name]).abs().max() < 1e-5, (run, name)
    first = results[loops[0]]["losses"]
    for run in loops:
        loop = results[run]
        assert loop["kind"].endswith("DEEPSPEED") and "lm_head.weight" in loop["names"]
        assert loop["losses"] == pytest.approx(first, rel=1e-6), run
        assert loop["losses"][12:] == loop["losses"][6:12], "loaded where it was saved"
    for run in resumed:
        whole = results[run.partition("+")[0]]
        assert results[run]["losses"][-3:] == whole["losses"][-3:], run
        assert results[run]["rates"] == whole["rates"], run
    for family, device in itertools.product(FAMILIES, DEVICES):
        stages = [results[f"{family}:{stage}:{device}:bf16"]["losses"] for stage in STAGES]
        for one in stages:
            # T5's losses are bf16 numbers: one of them may be the next
            assert one == pytest.approx(stages[0], rel=2**-8), (family, device)
    # WarmupLR's first step has no rate, and its second the first rate again
    rates = results["llama:3:schedule:fp32"]["rates"]
    assert rates == pytest.approx([0, 7.5e-4, 1.5e-3, 2.25e-3, 3e-3, 3e-3])


_PROBES = """
import importlib.metadata, importlib.util
import zeroshard.deepspeed.shim as shim
shim.install(); shim.install()
import deepspeed
assert importlib.metadata.version("deepspeed").startswith("0.19") and deepspeed.__version__
assert importlib.util.find_spec("deepspeed") and importlib.util.find_spec("deepspeed.comm")
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed import comm as dist, zero, DeepSpeedEngine
assert deepspeed.zero.GatheredParameters is zero.GatheredParameters
assert dist.ReduceOp.SUM is not None and dist.get_rank() == 0 and not dist.is_initialized()
assert not hasattr(deepspeed, "init_inference") and hasattr(deepspeed, "initialize")
assert "zero" in dir(deepspeed) and not hasattr(deepspeed.comm, "nothing")
for line in LINES:
    try:
        exec(line)
    except (AttributeError, ImportError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError(line)
"""


def test_what_the_stand_in_lacks_is_named_with_what_to_use() -> None:
    lines = [
        "deepspeed.init_inference",
        "from deepspeed import PipelineModule",
        "from deepspeed.pipe import PipelineModule",
        "import deepspeed.runtime.sequence_parallel.ulysses_sp",
        "deepspeed.tp_model_init",
        "import deepspeed.nothing",
        "deepspeed.comm.nothing",
    ]
    done = subprocess.run(
        [sys.executable, "-c", f"LINES = {lines!r}\n{_PROBES}"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    kinds = [line.partition(":")[0] for line in said]
    assert kinds == [
        "AttributeError", *["ModuleNotFoundError"] * 3, "AttributeError", "ModuleNotFoundError",
        "AttributeError",
    ]  # fmt: skip
    assert "deepspeed.init_inference is not part of zeroshard's stand-in" in said[0]
    for line, use in zip(said, ("generate()", "pipelining", "pipelining", "context", "'tp'"),
                         strict=False):  # fmt: skip
        assert use in line
    assert "nothing was sharded" in done.stderr  # the script never called initialize()


def test_every_name_of_the_table_is_there() -> None:
    """Each is imported from its home, without the stand-in in place."""
    for module, held in shim.MODULES.items():
        parent = module.rpartition(".")[0]
        assert parent in shim.MODULES, f"{module} has no parent"
        for name, home in held.items():
            place, _, attribute = home.partition(":")
            source = place if place == "torch" else f"zeroshard.deepspeed.{place}"
            assert hasattr(importlib.import_module(source), attribute), (module, name)
    assert not any(isinstance(finder, shim._Finder) for finder in sys.meta_path)
    assert importlib.util.find_spec("zeroshard.integrations.deepspeed") is not None


def test_another_launcher_runs_a_script_through_the_module(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, deepspeed\nprint(__name__, sys.argv[1:], deepspeed.__version__)\n"
    )
    line = [sys.executable, "-m", "zeroshard.integrations.deepspeed", str(script), "--deepspeed"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == f"__main__ ['--deepspeed'] {shim.VERSION}\n", done.stderr


_CHILDREN = """
import importlib.metadata, importlib.util, multiprocessing, subprocess, sys

def name():
    import deepspeed
    return deepspeed.__name__

if __name__ == "__main__":
    # before anything has imported it, as Transformers and Accelerate look
    assert "deepspeed" not in sys.modules and importlib.util.find_spec("deepspeed") is not None
    print(importlib.metadata.version("deepspeed"), flush=True)
    if importlib.util.find_spec("transformers") is not None:
        from accelerate.utils import is_deepspeed_available as of_accelerate
        from transformers.integrations import is_deepspeed_available as of_transformers
        assert of_accelerate() and of_transformers()
    line = "import deepspeed.comm as c, deepspeed; print(c.__name__, deepspeed.zero.Init.__name__)"
    subprocess.run([sys.executable, "-c", line], env={**ENV}, check=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(name), flush=True)
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
    print(DEEPSPEED_ENVIRONMENT_NAME)
"""


@pytest.mark.parametrize("how", ["as-deepspeed", "run"])
def test_every_python_process_of_a_command_finds_the_stand_in(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nENV = os.environ | {'RANK': '1'}\n" + _CHILDREN)
    if how == "run":  # the rank has it already
        script.write_text(script.read_text().replace('"deepspeed" not in', '"no" not in'))
    line = {"as-deepspeed": ["as-deepspeed", sys.executable], "run": ["run", "--as-deepspeed"]}[how]
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", *line, str(script)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [shim.VERSION, "deepspeed.comm Init", "deepspeed", ".deepspeed_env"]
    assert done.stdout.splitlines() == said
    assert "nothing was sharded" not in done.stderr
