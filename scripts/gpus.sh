#!/usr/bin/env bash
# Everything that needs two GPUs, in six minutes: the set "two" of scripts/gpu.sh.
#
#   scripts/gpus.sh [--wheels DIR] [--device cpu] OUT
exec "$(dirname "${BASH_SOURCE[0]}")/gpu.sh" "$@" two
