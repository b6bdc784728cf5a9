"""What got installed: a machine without a GPU has no use for gigabytes of CUDA libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import shutil
import subprocess


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
