"""Install torch into this interpreter's environment, with pip's own progress in sight.

    .venv/bin/python scripts/install_torch.py 2.13.0               # the build for this machine
    .venv/bin/python scripts/install_torch.py 2.13.0 --build cuda  # whatever the machine has

On Linux the plain package brings gigabytes of CUDA libraries, and package metadata cannot ask for
the CPU build. On a machine without an NVIDIA GPU the configured package index is asked for the CPU
build by its local version (``+cpu``). Where the index has none by that name, the plain package is
taken only if it depends on no CUDA library there; else this fails, and says what to do (``--build
any`` takes it). Any other failure of pip is pip's: it is shown, and nothing else is tried.

Exit codes: 0 installed, 1 pip has failed, 2 there is no CPU build.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NO_CPU_BUILD = """\
No CPU build of torch {version} is in the package index that pip is set up with, and the plain
package brings CUDA libraries, some gigabytes ({names}, ...). Either
    set PIP_INDEX_URL to PyTorch's index of CPU wheels for this command, or
    take the CUDA build, which runs without a GPU, too: make {target} TORCH_BUILD=cuda"""


def installed() -> str:
    """Return the version of torch that is installed, without what follows a +; "" for none."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here."""
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program], capture_output=True).returncode == 0


def cuda_libraries(version: str) -> list[str] | None:
    """Return the CUDA libraries that the plain package of `version` depends on, as the index
    describes it; None where the index has no such package.
    """
    asked = subprocess.run(
        [*PIP, "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report",
         "-", f"torch=={version}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if asked.returncode:
        return None
    wanted = json.loads(asked.stdout)["install"][0]["metadata"].get("requires_dist", [])
    return [one.partition("[")[0].split("=")[0] for one in wanted if one[:4] in ("nvid", "cuda")]


def install(requirement: str) -> int:
    """Let pip install it, in sight; return pip's exit code."""
    return subprocess.run([*PIP, "install", requirement]).returncode


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Install torch.")
    parser.add_argument("version")
    parser.add_argument("--build", choices=("auto", "any", "cpu", "cuda"), default="auto")
    parser.add_argument("--target", default="train", help="the target of make, for what is said")
    given = parser.parse_args(arguments)
    version = given.version
    if installed() == version:
        print(f"torch {version} is installed")
        return 0
    plain = given.build == "cuda" or platform.system() != "Linux"
    if plain or (given.build in ("auto", "any") and has_gpu()):
        print(f"torch {version}, the build for GPUs: some gigabytes", flush=True)
        return int(install(f"torch=={version}") != 0)
    print(f"torch {version}, CPU build: about 200 MB to download, 750 MB on disk", flush=True)
    if install(f"torch=={version}+cpu") == 0:
        return 0
    libraries = cuda_libraries(version)
    if libraries is None:  # pip has said why, twice
        return 1
    if libraries and given.build != "any":
        names = ", ".join(libraries[:2])
        said = NO_CPU_BUILD.format(version=version, names=names, target=given.target)
        print(f"\n{said}", file=sys.stderr)
        return 2
    print(f"the index has no +cpu: taking plain torch {version}", flush=True)
    return int(install(f"torch=={version}") != 0)


if __name__ == "__main__":
    sys.exit(main())
