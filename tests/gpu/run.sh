#!/usr/bin/env bash
# Everything that needs GPUs, on as many as this machine has: one test a line, then how many failed.
set -uo pipefail

if [ "${1:-}" = --help ]; then
    cat <<'EOF2'
Usage: run.sh [FILTER...]

Runs the tests that tests/gpu/pack.sh has put beside this script, with 1 GPU those named one_gpu_* and the kernels' own
(gpu_*), with 2 those named two_gpus_*; a FILTER, or several, run the tests whose names hold one of them. Needs Open MPI, cc, the NVIDIA
driver, NVRTC 13 (LOCKSTEP_NVRTC names it where the loader does not find it) and for two GPUs NCCL (LOCKSTEP_NCCL).

LOCKSTEP_TEST_JOBS      tests at once; default 8
LOCKSTEP_TEST_REPEATS   repeats of the search for races; default 2000
LOCKSTEP_TEST_SKIP      tests whose names hold this are left out
EOF2
    exit 0
fi

cd "$(dirname "$0")" || exit 3
LOCKSTEP_TEST_HOME=$PWD
export LOCKSTEP_TEST_HOME LOCKSTEP_TEST_NVRTC=required
[ -d shipped ] && export LOCKSTEP_TEST_SHIPPED=$PWD/shipped
mkdir -p tmp

num_gpus=$(nvidia-smi --list-gpus | grep -c UUID)
if [ $# -gt 0 ]; then
    filters=("$@")
elif [ "$num_gpus" -gt 1 ]; then
    filters=(two_gpus_)
else
    filters=(one_gpu_ gpu_)
fi

jobs=${LOCKSTEP_TEST_JOBS:-8}
skip=()
[ -n "${LOCKSTEP_TEST_SKIP:-}" ] && skip=(--skip "$LOCKSTEP_TEST_SKIP")
failed=0
run() {
    "$@" || failed=$((failed + 1))
}
echo "== $num_gpus GPUs, $(nproc) cores, tests of ${filters[*]}"
for program in unit ranks; do
    run "./$program" --ignored --test-threads "$jobs" --skip alone_ "${skip[@]}" "${filters[@]}"
done
# Those that want the GPUs to themselves, one after the other.
if [ $# -eq 0 ]; then
    alone=one_gpu_alone_
    [ "$num_gpus" -gt 1 ] && alone=two_gpus_alone_
    run ./ranks --ignored --test-threads 1 "${skip[@]}" "$alone"
fi
echo "== $failed of the test programs failed"
exit "$((failed > 0))"
