#!/usr/bin/env bash
# Everything that needs a GPU, in one go and in less than ten minutes: the GPU tests, then the benchmarks of steps, of states on host and disk,
# and of the largest model. Usage: scripts/gpu.sh OUT_DIRECTORY [tests|step|codec|offload|largest ...]      (default: all)
# Needs torch with CUDA, and pytest, pytest-timeout, hypothesis, pydantic, rich, safetensors and xxhash in the interpreter $PYTHON.
# $DISK is a directory on a local disk for what rests there (default: the temporary folder).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?"usage: scripts/gpu.sh OUT_DIRECTORY [tests|step|codec|offload|largest ...]"}
shift
parts=" ${*:-tests step codec offload largest} "
python=${PYTHON:-python3}
disk=${DISK:-${TMPDIR:-/tmp}}
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$out/machine.txt"

bench() { # SECONDS NAME ARGUMENTS...
    timeout "$1" "$python" -m zeroshard bench "${@:3}" --device cuda --nproc 1 --out "$out/$2.json" 2>&1 | tee "$out/bench-$2.txt"
}

if [[ $parts == *" tests "* ]]; then
    timeout 210 "$python" -m pytest -q -s tests/gpu tests/unit/runtime/test_streams.py tests/unit/comm/test_codec_kernels.py tests/unit/comm/test_sum_kernel.py -p no:cacheprovider 2>&1 | tee "$out/tests.txt"
fi
if [[ $parts == *" step "* ]]; then
    for precision in fp32 bf16; do
        bench 75 "medium-$precision-cuda" step --sizes medium --precision "$precision" --contenders zero2,zero3,torch-ddp,fsdp2,plain --alive 5
    done
fi
if [[ $parts == *" codec "* ]]; then
    timeout 40 "$python" -m zeroshard bench codec --device cuda --elements 67108864 --out "$out/codec-cuda.json" 2>&1 | tee "$out/bench-codec.txt"
fi
if [[ $parts == *" offload "* ]]; then
    contenders=zero2,zero2+host,zero2+part,zero2+late,zero2+disk,zero3,zero3+host,fsdp2+host
    bench 130 offload-cuda offload --parts steps,host-step --sizes medium --steps 5 --alive 8 --contenders "$contenders" --disk-path "$disk"
fi
if [[ $parts == *" largest "* ]]; then # on a card of 8 GiB, so that host and disk hold what it does not
    bench 95 largest-cuda offload --parts largest --precision bf16 --card-gib 8 --largest-s 28 --disk-path "$disk"
fi
