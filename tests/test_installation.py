"""The installation: no gigabytes of CUDA libraries without a GPU, and nothing that only a checkout
needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import shutil
import subprocess
import tomllib

from tests.support.harness import ROOT


def _has_gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    )


def test_a_machine_without_a_gpu_gets_no_nvidia_packages() -> None:
    names = {
        distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()
    }
    assert _has_gpu() or [name for name in sorted(names) if name.startswith("nvidia-")] == []


def test_the_package_says_that_it_is_typed_and_which_version_it_is() -> None:
    import zeroshard._version

    assert importlib.metadata.version("zeroshard") == zeroshard._version.__version__
    assert (importlib.resources.files("zeroshard") / "py.typed").is_file()


def test_a_wheel_holds_the_package_alone_and_a_source_archive_what_its_tests_import() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert hatch["targets"]["wheel"] == {"packages": ["src/zeroshard"]}
    assert not (ROOT / "src" / "zeroshard" / "benchmarks").exists()
    assert {"src", "benchmarks", "tests"} <= set(hatch["targets"]["sdist"]["include"])
