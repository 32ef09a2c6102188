#!/usr/bin/env bash
# Everything that needs GPUs, on as many as this machine has: a process a test, a line a test, then how many failed.
set -uo pipefail

if [ "${1:-}" = --help ]; then
    cat <<'EOF2'
Usage: run.sh [FILTER...]

Runs the tests that tests/gpu/pack.sh has put beside this script, with 1 GPU those named one_gpu_* and the kernels' own
(gpu_*), with 2 those named two_gpus_*; a FILTER, or several, run the tests whose names hold one of them. Needs Open MPI, cc, the NVIDIA
driver, NVRTC 13 (LOCKSTEP_NVRTC names it where the loader does not find it) and for two GPUs NCCL (LOCKSTEP_NCCL).
Tests share a cache of kernels, ./tmp/gpu-cache, which a second run finds filled.

LOCKSTEP_TEST_JOBS      tests at once; default 8
LOCKSTEP_TEST_LIMIT_S   seconds that a test may take; default 300
LOCKSTEP_TEST_REPEATS   repeats of the search for races; default 2000
LOCKSTEP_TEST_TRANSPORT what carries tokens in tests that do not name it
LOCKSTEP_TEST_STEPS     random steps of a transport, and LOCKSTEP_TEST_SEED what they are drawn from
LOCKSTEP_TEST_SKIP      tests whose names hold this are left out
EOF2
    exit 0
fi

# One test, for `run_all` below.
if [ "${1:-}" = --one ]; then
    program=$2 name=$3 start=$SECONDS
    timeout -k 5 "$LOCKSTEP_TEST_LIMIT_S" "./$program" --ignored --exact "$name" >"$results/$name" 2>&1
    code=$?
    # A name that is no test runs none and passes: it has to have run.
    if [ "$code" -eq 0 ] && grep -q "^test result: ok. 1 passed" "$results/$name"; then
        echo "ok      $name ($((SECONDS - start)) s)"
    elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        echo "TIMEOUT $name ($LOCKSTEP_TEST_LIMIT_S s)"
    else
        echo "FAILED  $name ($((SECONDS - start)) s)"
        sed 's/^/    /' "$results/$name"
    fi
    exit 0
fi

cd "$(dirname "$0")" || exit 3
LOCKSTEP_TEST_HOME=$PWD
export LOCKSTEP_TEST_HOME LOCKSTEP_TEST_NVRTC=required
[ -d shipped ] && export LOCKSTEP_TEST_SHIPPED=$PWD/shipped
# NOTE: every mpirun would bind its ranks to the first cores, and those of all tests would share them.
export OMPI_MCA_hwloc_base_binding_policy=none
mkdir -p tmp
results=$(mktemp -d tmp/results.XXXXXX)
export results LOCKSTEP_TEST_LIMIT_S=${LOCKSTEP_TEST_LIMIT_S:-300}

if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    num_gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
    num_gpus=$(nvidia-smi --list-gpus | grep -c UUID)
fi
if [ $# -gt 0 ]; then
    filters=("$@")
elif [ "$num_gpus" -gt 1 ]; then
    filters=(two_gpus_)
else
    filters=(one_gpu_ gpu_)
fi

# PROGRAM TEST of each wanted one.
list() {
    local program
    for program in unit ranks; do
        "./$program" --ignored --list "${filters[@]}" | sed -n "s/^\(.*\): test\$/$program \1/p"
    done | { if [ -n "${LOCKSTEP_TEST_SKIP:-}" ]; then grep -v -e "$LOCKSTEP_TEST_SKIP"; else cat; fi }
}

run_all() {
    xargs -r -P "$1" -L 1 bash run.sh --one | tee -a "$results/summary"
}

echo "== $num_gpus GPUs, $(nproc) cores, tests of ${filters[*]}"
list | grep -v _alone_ | run_all "${LOCKSTEP_TEST_JOBS:-8}"
# Those that want the GPUs to themselves, one after the other.
list | grep _alone_ | run_all 1
passed=$(grep -c '^ok' "$results/summary") failed=$(grep -c -e '^FAILED' -e '^TIMEOUT' "$results/summary")
echo "== $passed passed, $failed failed"
[ "$((passed + failed))" -gt 0 ] || exit 3
exit "$((failed > 0))"
