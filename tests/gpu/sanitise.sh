#!/usr/bin/env bash
# compute-sanitizer's four tools over a small fixture, on both backends and in both activation modes.
set -uo pipefail

if [ "${1:-}" = --help ]; then
    cat <<'EOF2'
Usage: sanitise.sh [TOOL...]

Runs the first layer of a fixture as one rank under compute-sanitizer: memcheck, racecheck, initcheck and synccheck, or the
tools that are named. Prints one line a run, and what was found where something was; exit code 1 if anything was.
EOF2
    exit 0
fi

cd "$(dirname "$0")" || exit 3
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fixture=modelopt-dsv3-mixed
layer=1
# Kernels are compiled once, outside: what is looked at is what they do.
export LOCKSTEP_CACHE_DIR=$work/cache LOCKSTEP_CACHE_LAYOUT=flat OMPI_MCA_btl_vader_single_copy_mechanism=none

check() {
    local tool=$1 backend=$2 activations=$3
    local name=$tool.$backend.$activations
    local lockstep=(./lockstep verify --checkpoint "tests/fixtures/$fixture" --layer "$layer"
        --input "tests/fixtures/expected/$fixture.layer$layer.safetensors:x" --part block
        --set cluster.device=gpu --set timeouts.step_s=600 --backend "$backend" --activations "$activations")
    if [ "$tool" = none ]; then
        "${lockstep[@]}" >"$work/$name" 2>&1
        return
    fi
    local start=$SECONDS
    # NOTE: a kernel under a tool is slow; a tool that finds nothing ends with the program's own exit code.
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 99 --print-limit 5 "${lockstep[@]}" \
        >"$work/$name" 2>&1
    local code=$? summary
    summary=$(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$work/$name" | tail -1)
    echo "$name: exit code $code, ${summary#========= }, $((SECONDS - start)) s"
    [ "$code" -eq 0 ] || { head -60 "$work/$name"; return 1; }
}

bad=0
for backend in mma_sync wgmma; do
    for activations in bf16 quantised; do
        check none "$backend" "$activations" || { cat "$work/none.$backend.$activations"; exit 1; }
    done
done
for tool in "${tools[@]}"; do
    pids=()
    for backend in mma_sync wgmma; do
        for activations in bf16 quantised; do
            check "$tool" "$backend" "$activations" &
            pids+=($!)
        done
    done
    for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
done
exit "$bad"
