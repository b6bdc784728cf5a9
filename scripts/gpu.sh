#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the GPU tests, then the step benchmark on it. Usage: scripts/gpu.sh OUT_DIRECTORY
# Needs torch with CUDA, and pytest, pytest-timeout, hypothesis, pydantic, rich, safetensors and xxhash in the interpreter $PYTHON.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?"usage: scripts/gpu.sh OUT_DIRECTORY"}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$out/machine.txt"
timeout 240 "$python" -m pytest -q tests/gpu tests/runtime/test_streams.py -p no:cacheprovider 2>&1 | tee "$out/tests.txt"
for precision in fp32 bf16; do
    timeout 140 "$python" -m zeroshard bench step --device cuda --sizes medium --precision "$precision" --pairs 12 \
        --out "$out/medium-$precision-cuda.json" 2>&1 | tee "$out/bench-$precision.txt"
done
