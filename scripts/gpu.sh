#!/usr/bin/env bash
# Everything that needs a GPU, in parts whose results are saved one by one.
#
#   scripts/gpu.sh [--wheels DIR] [--device cpu] OUT [PART or SET ...]      (default: first to sixth)
#   scripts/gpu.sh --list                                                   (parts, their seconds, their sets)
#
# A set takes at most nine minutes ("two", for two GPUs, six: scripts/gpus.sh OUT), also where every part runs into its time limit. OUT/PART.txt holds what a part printed, OUT/parts.txt
# its exit code and seconds, OUT/*.json what was measured, contender by contender. Where the smoke part fails, nothing else is run.
# --wheels DIR: packages that the interpreter $PYTHON lacks are installed from DIR, for this run alone. $DISK: a folder on a local disk.
# --device cpu: without a GPU, at tiny size, to try this script: the benchmarks run, the tests of tests/gpu are only collected, but for
# those of two GPUs, which run on two pretended devices.
set -uo pipefail

parts() {
    cat <<'END'
smoke     60  first   imports, and two steps of stage 3 in one process and over NCCL
census    80  first   where the host waits for the device
bits     145  first   plain PyTorch against every row and option in three precisions
lanes    145  first   late lanes and poisoned memory change no bit
sanitizer 100 first   CUDA's sanitizer of streams
pairs     90  second  two ranks over gloo on one GPU
memory    80  second  allocated, reserved and peak, and a snapshot
codec     70  second  codec kernels: bits against torch, and GB/s
plain     95  second  speed, 1.3B in bf16: stage 3 in one process beside plain PyTorch, with traces
fsdp2     95  second  speed: stage 3 over NCCL beside FSDP2, with traces
fake      95  second  speed: the same as one rank of eight that do not exist, with traces
small     70  third   speed at 50M, where Python is all that is measured
copies    40  third   copies between host and device, and the step on the host, GB/s
offload  170  third   1.3B in bf16 with states on the host beside FSDP2's
largest   90  third   the largest model on a card of 8 GiB
tiers    150  third   tests of host and disk tiers; overlap, printed
matrix   350  fourth  every program of the pretended device: late lanes, late compute, poison
wide      95  fourth  speed, 1.5B in few wide layers, which keep the device busy: beside plain PyTorch
wide2     95  fourth  the same over NCCL beside FSDP2
norm         35  fifth   the kernel of the norm: its integers are the CPU's
wide-plain   60  fifth   speed with a clip, 12 pairs: 1.5B in few wide layers beside plain PyTorch
wide-fsdp2   60  fifth   the same over NCCL beside FSDP2
deep-plain   70  fifth   1.3B in 24 layers beside plain PyTorch
deep-fsdp2   85  fifth   the same over NCCL beside FSDP2
llama-plain  75  fifth   five layers of Llama-3-8B from Transformers beside plain PyTorch
llama-fsdp2  80  fifth   the same over NCCL beside FSDP2
kernels      20  fifth   kernels by name, and gaps, of the traces of all of these
hosted      210  sixth   1.3B with states on the host beside FSDP2's
rest        170  sixth   programs of the pretended device that no run has reached
coded        60  sixth   codec kernels, GB/s
most        100  sixth   the largest model on a card of 8 GiB
set-up       40  two     two GPUs over NCCL: who takes which device, and bytes of communicators
data         90  two     every row in three precisions beside plain PyTorch
options      70  two     ordered, codecs, shares, averages, save and load, nodes of one, a group without CPU tensors
order        55  two     each rank's log of collectives by lane; late lanes, and memory overwritten as it is freed
ends         55  two     ranks that differ, fail, run out of memory or are killed: what is told, in how many seconds
beside       50  two     speed with a clip beside FSDP2, with and without a communicator for reduces
END
}

usage() { sed -n 's/^# \{0,1\}//; 2,10p' "$0" >&2; exit 2; }

bench() { # NAME ARGUMENTS...: `zeroshard bench` on the device, results in OUT/NAME.json
    "$python" -m zeroshard bench "${@:2}" --device "$device" --out "$out/$1.json"
}

pairs12() { # NAME SIZE CONTENDERS: twelve pairs, A B A B, traces of three steps
    bench "$1" step --nproc 1 --sizes "$2" --precision bf16 --contenders "$3" --alive 2 --pairs 12 --steps 5 --traces "$out/traces/$1"
}

speed() { # NAME SIZE CONTENDERS [HOW MANY AT A TIME]: whole steps
    bench "$1" step --nproc 1 --sizes "$2" --precision bf16 --contenders "$3" --alive "${4:-2}" --pairs 3 --steps 5 --traces "$out/traces"
}

tests() { # FILE...: of tests/gpu, what they measure printed
    local words=(-q -s -p no:cacheprovider --basetemp "$out/$part.tmp")
    [[ $device == cuda ]] || words+=(--collect-only)
    "$python" -m pytest "${words[@]}" "$@"
}

two() { # WHICH: of the tests of two GPUs, also where two pretended devices stand for them
    "$python" -m pytest -q -s -p no:cacheprovider --basetemp "$out/$part.tmp" -m "slow or not slow" tests/gpu/test_two_gpus.py -k "$1"
}

run_part() {
    case $part in
        smoke) tests tests/gpu/test_smoke_device.py ;;
        census) tests tests/gpu/test_sync_census_device.py ;;
        bits) tests tests/gpu/test_exactness_device.py tests/gpu/test_training_device.py tests/unit/core/test_tensor_digest.py ;;
        lanes) tests tests/gpu/test_lanes_device.py tests/unit/runtime/test_streams.py ;;
        sanitizer) tests tests/gpu/test_sanitizer_cuda.py ;;
        pairs) tests tests/gpu/test_two_ranks_device.py ;;
        memory) tests tests/gpu/test_memory_device.py ;;
        codec) bench codec codec --elements "$elements" && tests tests/unit/comm/test_codec_kernels.py tests/unit/comm/test_sum_kernel.py ;;
        plain) speed plain "$large" zero3,plain ;;
        fsdp2) speed fsdp2 "$large" zero3@nccl,fsdp2 ;;
        fake) speed fake "$large" zero3@fake8,fsdp2@fake8 ;;
        small) speed small "$medium" zero3,zero3@nccl,fsdp2,plain 4 ;;
        copies) bench copies offload --parts copies,host-step --elements "$elements" --pairs 5 --disk-path "$disk" ;;
        offload) bench offload offload --parts steps --sizes "$large" --precision bf16 --contenders zero2+host,zero3+host,fsdp2+host \
            --nproc 1 --alive 3 --pairs 2 --steps 3 --disk-path "$disk" ;;
        largest) bench largest offload --parts largest --precision bf16 --card-gib 8 --largest-s 26 --disk-path "$disk" ;;
        matrix) tests $("$python" -c "import xdist; print('-n', 8)" 2>/dev/null) tests/gpu/test_matrix_cuda.py ;;
        wide) speed wide "$wide" zero3,plain ;;
        wide2) speed wide2 "$wide" zero3@nccl,fsdp2 ;;
        norm) tests tests/unit/state/test_squares_kernel.py ;;
        wide-plain) pairs12 wide-plain "$wide" zero3,plain ;;
        wide-fsdp2) pairs12 wide-fsdp2 "$wide" zero3@nccl,fsdp2 ;;
        deep-plain) pairs12 deep-plain "$large" zero3,plain ;;
        deep-fsdp2) pairs12 deep-fsdp2 "$large" zero3@nccl,fsdp2 ;;
        llama-plain) pairs12 llama-plain "$llama" zero3,plain ;;
        llama-fsdp2) pairs12 llama-fsdp2 "$llama" zero3@nccl,fsdp2 ;;
        kernels) [[ $device != cuda ]] || "$python" -m zeroshard bench kernels "$out"/traces/*/*.json.gz --out "$out/kernels.json" ;;
        hosted) bench hosted offload --parts steps --sizes "$large" --precision bf16 --contenders zero3+host,fsdp2+host \
            --nproc 1 --alive 2 --pairs 3 --steps 2 --disk-path "$disk" ;;
        rest) # the last of them: runs before were cut off, and compared some in another way
            mapfile -t programs < <("$python" -m pytest --collect-only -q tests/gpu/test_matrix_cuda.py | grep :: | tail -n 86)
            tests -n 8 "${programs[@]}" ;;
        coded) bench coded codec --elements "$elements" ;;
        most) bench most offload --parts largest --precision bf16 --card-gib 8 --largest-s 30 --disk-path "$disk" ;;
        set-up) two devices ;;
        data) two plain_pytorch ;;
        options) two "repeats or cpu_tensors" ;;
        order) two "one_order or late_lanes" ;;
        ends) two "told or reset" ;;
        beside) bench beside step --nproc 2 --sizes "$wide" --precision bf16 --contenders "$pair" --alive 3 --pairs 4 --steps 5 ;;
        tiers) tests tests/gpu/test_tiers_device.py tests/gpu/test_overlap_cuda.py ;;
    esac
}

missing() { # the packages that the interpreter lacks
    "$python" -c 'from importlib.util import find_spec
names = "torch numpy pydantic pydantic_core annotated_types typing_inspection rich safetensors xxhash hypothesis pytest pytest_timeout"
print(*(name for name in names.split() if find_spec(name) is None))'
}

wheels="" device=cuda out=""
while [[ ${1:-} == --* ]]; do
    case $1 in
        --list) parts; exit ;;
        --wheels) wheels=$(realpath -- "${2:?}"); shift 2 ;;
        --device) device=${2:?}; shift 2 ;;
        *) usage ;;
    esac
done
[[ $# -ge 1 ]] || usage
mkdir -p "$1" && out=$(realpath -- "$1") && shift
chosen=()
for word in "${@:-first second third fourth fifth sixth}"; do
    for name in $word; do
        found=$(parts | awk -v name="$name" '$1 == name || $3 == name { print $1 }')
        [[ $found ]] || { echo "no part or set is called $name: see scripts/gpu.sh --list" >&2; exit 2; }
        chosen+=($found)
    done
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} disk=${DISK:-${TMPDIR:-/tmp}}
large=1.3b medium=medium wide=wide llama=llama elements=67108864 pair=zero3@nccl,fsdp2,zero3@nccl-apart
[[ $device == cuda ]] || large=tiny medium=tiny wide=tiny llama=tiny-llama elements=65536 pair=zero3@nccl,fsdp2,zero3@nccl-apart
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1

lacking=$(missing)
if [[ $lacking && $wheels ]]; then
    installed=$(mktemp -d) && trap 'rm -rf "$installed"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --find-links "$wheels" --target "$installed" ${lacking//_/-} >"$out/wheels.txt" 2>&1
    export PYTHONPATH=$PYTHONPATH:$installed
    lacking=$(missing)
fi
[[ ! $lacking ]] || { echo "$python lacks: $lacking (--wheels DIR names a folder that has them)" >&2; exit 3; }
[[ $device != cuda ]] || nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$out/machine.txt"

failed=0
for part in "${chosen[@]}"; do
    seconds=$(parts | awk -v part="$part" '$1 == part { print $2 }') begin=$SECONDS
    echo "== $part: at most $seconds s"
    export -f run_part bench speed pairs12 tests two
    export part device out python disk large medium wide llama elements pair
    timeout --kill-after 2 "$seconds" bash -c run_part 2>&1 | tee "$out/$part.txt"
    code=${PIPESTATUS[0]}
    echo "$part: exit code $code, $((SECONDS - begin)) s" | tee -a "$out/parts.txt"
    [[ $code == 0 ]] || failed=1
    [[ $part != smoke || $code == 0 ]] || { echo "smoke failed: the rest would be worthless" >&2; exit 1; }
done
exit $failed
