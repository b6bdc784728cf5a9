"""The installation: no gigabytes of CUDA libraries without a GPU, and nothing that only a checkout
needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
    assert not [*(ROOT / "src" / "zeroshard").rglob("*-info")], "a distribution beside its own"
    assert {"src", "benchmarks", "tests"} <= set(hatch["targets"]["sdist"]["include"])


def test_what_the_index_and_the_site_show_names_one_repository_and_links_nowhere_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    place = project["project"]["urls"]["Repository"]
    text = (ROOT / "README.md").read_text()
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        assert one["replacement"].count(f"({place}/") == 1
        text = re.sub(one["pattern"], one["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert [one for one in targets if not re.match("https?:|#", one)] == []
    files = [one.partition("/main/")[2].partition("#")[0] for one in targets if place in one]
    assert [one for one in files if not (ROOT / one).exists()] == []
    for name in ("CITATION.cff", "mkdocs.yml", ".github/ISSUE_TEMPLATE/config.yml"):
        assert place in (ROOT / name).read_text()
    version = re.search("^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version is not None and version[1] == importlib.metadata.version("zeroshard")


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "scripts" / "install_torch.py"
    spec = importlib.util.spec_from_file_location("zeroshard_install_torch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "installed", lambda: "")
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    return module


def _index(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cpu: int = 0,
    needs: list[str] | None = None,
) -> list[str]:
    """Let pip be one with this index: the exit code of +cpu, what plain torch depends on (None:
    there is none). Return the list of what is installed.
    """
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert "--quiet" not in command or "--dry-run" in command, "its progress is seen"
        if "--dry-run" in command:
            report = {"install": [{"metadata": {"requires_dist": needs}}]}
            return SimpleNamespace(returncode=int(needs is None), stdout=json.dumps(report))
        asked.append(command[-1])
        return SimpleNamespace(returncode=cpu if "+cpu" in command[-1] else 0)

    monkeypatch.setattr(installer.subprocess, "run", run)
    return asked


CUDA = ["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"', "cuda-toolkit[x]==13"]


def test_a_cpu_build_that_fails_to_install_is_not_answered_with_gigabytes_of_cuda(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _index(installer, monkeypatch, cpu=1, needs=CUDA)
    assert installer.main(["9.9", "--target", "docs"]) == 2
    assert asked == ["torch==9.9+cpu"]
    said = capsys.readouterr().err
    assert "No CPU build of torch 9.9" in said and "(nvidia-nccl-cu13, cuda-toolkit, ...)" in said
    assert "make docs TORCH_BUILD=cuda" in said
    assert installer.main(["9.9", "--build", "any"]) == 0 and asked[-1] == "torch==9.9"
    assert installer.main(["9.9", "--build", "cuda"]) == 0 and len(asked) == 4


def test_the_build_for_this_machine_is_installed_in_sight(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _index(installer, monkeypatch)
    assert installer.main(["9.9"]) == 0 and asked == ["torch==9.9+cpu"]
    assert "CPU build: about 200 MB" in capsys.readouterr().out
    asked = _index(installer, monkeypatch, cpu=1, needs=["filelock"])
    assert installer.main(["9.9"]) == 0, "an index whose plain torch is the CPU build"
    assert asked == ["torch==9.9+cpu", "torch==9.9"]
    asked = _index(installer, monkeypatch, cpu=1)
    assert installer.main(["9.9"]) == 1 and asked == ["torch==9.9+cpu"], "no index, no disk, ..."
    monkeypatch.setattr(installer, "has_gpu", lambda: True)
    asked = _index(installer, monkeypatch)
    assert installer.main(["9.9"]) == 0 and asked == ["torch==9.9"]
    monkeypatch.setattr(installer, "installed", lambda: "9.9")
    assert installer.main(["9.9"]) == 0 and len(asked) == 1


def test_make_train_says_its_three_steps() -> None:
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "train", "VENV=/nowhere/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    steps = [line for line in told.splitlines() if "== step" in line]
    assert [line.partition("== ")[2][:11] for line in steps] == [
        f"step {n} of 3" for n in (1, 2, 3)
    ]
    assert "--quiet" not in told
    assert ". /nowhere/venv/bin/activate" in told.splitlines()[-1]  # zeroshard is in no PATH yet


def test_every_line_of_pip_is_one_of_a_checkout_as_long_as_there_is_no_release() -> None:
    paths = [ROOT / "README.md"]
    for folder, kind in (("docs", "*.md"), ("src", "*.py"), ("examples", "*")):
        paths += [path for path in (ROOT / folder).rglob(kind) if path.is_file()]
    wrong = [path for path in paths if b"zeroshard[" in path.read_bytes()]
    assert wrong == []
