#!/usr/bin/env bash
# Build what a release uploads, into dist/; check it; and use the wheel as a new user does, in a
# clean environment and outside of the checkout.
#
#   scripts/release.sh             # any version
#   scripts/release.sh 0.1.0       # fails unless src/zeroshard/_version.py says so, without an end
#
# PYTHON names the interpreter, TORCH_VERSION the torch that is installed first. Takes 2 minutes
# beside torch's download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH  # nothing of the checkout
step() { printf '\n== %s\n' "$*"; }

step "build"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q build twine
rm -rf dist
"$work/tools/bin/python" -m build -q --outdir dist .
ls -l dist

step "check"
"$work/tools/bin/python" -m twine check --strict dist/*
"$python" - "${1:-}" dist/*.whl <<'END'
import re, sys, zipfile
from pathlib import Path

wanted, wheel = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (facts,) = {part for name in names for part in Path(name).parts if part.endswith("-info")}
    metadata = archive.read(f"{facts}/METADATA").decode()
tops = {name.partition("/")[0] for name in names}
assert tops == {"zeroshard", facts}, tops
version = re.search(r"^Version: (.*)$", metadata, re.M)[1]
assert wanted in ("", version), f"the version is {version}, and not {wanted}"
relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", metadata)
assert not relative, relative
print(f"zeroshard {version}: {len(names)} files, one distribution, no relative link")
END

step "install in a clean environment"
"$python" -m venv "$work/clean"
"$work/clean/bin/python" scripts/install_torch.py "${TORCH_VERSION:-2.13.0}" --target release
"$work/clean/bin/python" -m pip install -q dist/*.whl

step "the first five minutes, outside of the checkout"
mkdir "$work/outside"
cd "$work/outside"
export PATH="$work/clean/bin:$PATH"
"$work/clean/bin/python" - "$checkout" <<'END'
# the files and the commands of the page that has the first program
import re, subprocess, sys
from pathlib import Path

texts = [(Path(sys.argv[1]) / name).read_text() for name in ("README.md", "docs/index.md")]
text = next(one for one in texts if "<!-- file: " in one and "```console" in one)
for name, code in re.findall(r"<!-- file: (\S+) -->\n```\w*\n(.*?)^```", text, re.S | re.M):
    Path(name).write_text(code)
for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M):
    for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.M):
        print("$", line, flush=True)
        subprocess.run(line, shell=True, check=True)
END
zeroshard plan --params 70B --gpus 64 --gpu H100 --checkpointing | tail -3
if zeroshard walk --help > /dev/null 2>&1; then  # a film of a step
    zeroshard walk --stage 3 --ranks 4 --units 4 --svg film.svg
    test -s film.svg
fi

step "--help of every command, in 0.5 s of CPU time"
"$work/clean/bin/python" - <<'END'
import resource, subprocess
from pathlib import Path

import zeroshard
from zeroshard.launch.cli import build_parsers

def seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

assert "site-packages" in zeroshard.__file__, zeroshard.__file__
subprocess.run(["zeroshard", "--help"], check=True, stdout=subprocess.DEVNULL)  # writes bytecode
slow = []
for name in ("", *build_parsers()[1]):
    before = seconds()
    done = subprocess.run(["zeroshard", *name.split(), "--help"], capture_output=True, text=True)
    took = seconds() - before
    said = (done.stdout or done.stderr).splitlines()
    print(f"{took:.2f} s  zeroshard {name:14} {said[0]}")
    # benchmarks are no part of a wheel: the line says so
    assert done.returncode == (2 if name == "bench" else 0), done.stderr
    slow += [name] if took > 0.5 else []
assert not slow, slow
END
step "ready: $(ls "$checkout/dist" | tr '\n' ' ')"
