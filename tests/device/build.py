"""Builds the pretended device once, with plain g++ against torch's wheel.

The library lies in ``<sys.prefix>/zsim/<hash>`` (or below the user's cache folder, where the
interpreter's is read-only). The hash covers the sources, the flags, the compiler, torch and Python.
Processes that start together build once: the others wait on a file lock. A library is renamed into
place when it is whole, so an interrupted build leaves nothing that loads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("csrc")
TORCH = Path(torch.__file__).resolve().parent  # one build for links to one environment
KEPT = 6  # builds: checkouts that share an interpreter keep theirs

FLAGS = [
    "-std=c++20",
    "-O1",  # at -O0 an operator takes twice as long; the kernels that run are torch's own
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-stringop-overflow",  # false, in PyTorch's inlined reference counts
    "-DTORCH_EXTENSION_NAME=_zsim",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
    # as system headers: warnings are for our own files
    *("-isystem", str(TORCH / "include")),
    *("-isystem", str(TORCH / "include" / "torch" / "csrc" / "api" / "include")),
    *("-isystem", sysconfig.get_paths()["include"]),
]
LIBRARIES = ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]


def compiler_missing() -> str | None:
    """Return None where a build can run, else what is missing and the line that installs it."""
    if shutil.which("g++") is None:
        return "no g++ in PATH. Debian, Ubuntu: apt-get install g++. Fedora: dnf install gcc-c++"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h for this interpreter. Debian, Ubuntu: apt-get install python3-dev"
    return None


def build() -> Path:
    """Return the path of the library, built first if these sources have not been built yet."""
    folder = _cache()
    target = folder / _digest() / "_zsim.so"
    if not target.exists():
        if (missing := compiler_missing()) is not None:
            raise RuntimeError(f"the pretended device cannot be built: {missing}")
        with _locked(folder / "lock"):
            if not target.exists():
                _compile(target)
                _remove_old(folder)
    os.utime(target.parent)  # in use: not the one that the next build removes
    return target


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    for parent in (Path(sys.prefix), home, Path(tempfile.gettempdir())):
        folder = parent / "zsim"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise RuntimeError("no folder for the pretended device's library is writable")


def _digest() -> str:
    compiler = shutil.which("g++")
    version = "" if compiler is None else _run([compiler, "--version"])
    digest = hashlib.sha256()
    for text in (*FLAGS, *LIBRARIES, version, torch.__version__, sys.version):
        digest.update(text.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # PyTorch's headers take most of the time: read once. g++ takes `headers`.gch for `headers`.
        headers = shutil.copy(SOURCES / "torch_headers.h", scratch)
        _run(["g++", *FLAGS, "-x", "c++-header", headers, "-o", f"{headers}.gch"])

        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        commands = [
            ["g++", *FLAGS, "-include", headers, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_run, commands))

        library, place = str(target.with_suffix(".part")), TORCH / "lib"
        path = [f"-L{place}", f"-Wl,-rpath,{place}", "-Wl,--no-as-needed"]
        _run(["g++", "-shared", *objects, *path, *LIBRARIES, "-o", library])
        os.rename(library, target)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")
    return done.stdout


def _remove_old(folder: Path) -> None:
    builds = [path for path in folder.iterdir() if path.is_dir()]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in builds[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
