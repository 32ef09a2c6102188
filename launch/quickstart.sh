#!/usr/bin/env bash
# From a fresh clone to checked results: installs what is missing, builds, runs the MoE layers of small ModelOpt
# checkpoints over four ranks, and compares them with values computed elsewhere.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$root"

if [ "${1:-}" = --help ] || [ $# -gt 0 ]; then
    cat <<'EOF'
Usage: launch/quickstart.sh

Takes no options. On Debian and Ubuntu, as root or with sudo, it installs the packages that are missing (a C compiler,
libclang, Open MPI). Needs Rust; an old or missing one is replaced by rustup's stable toolchain where rustup is there.
EOF
    [ "${1:-}" = --help ] && exit 0
    fail 2 "quickstart.sh takes no options, found $1; launch/mpirun.sh --help lists those of a run"
fi

install_build_packages
find_cargo
say "building (the first time takes minutes)"
"${cargo[@]}" build --release --locked
# The tables say what matters here; a filter of one's own still holds.
export LOCKSTEP_LOG=${LOCKSTEP_LOG:-warn}

fixtures=tests/fixtures
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# A run that is ended tidies up and ends with a code; without these the next would begin.
trap 'exit 130' INT
trap 'exit 143' TERM
green='' red='' plain=''
if [ -t 1 ]; then
    green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
fi
num_failed=0
rows=()

# input CHECKPOINT LAYER: the reference to a layer's input, and before `:` the file of its expected values.
input() {
    case $1 in
    k3-tiny) echo "$fixtures/expected/$1.safetensors:$2.x" ;;
    *) echo "$fixtures/expected/$1.layer$2.safetensors:x" ;;
    esac
}

# field NAME: a number or word of the JSON on standard input.
field() { sed -n "s/^ *\"$1\": *\([^,]*\),*$/\1/p" | head -n 1; }

# check CHECKPOINT LAYER PART ACTIVATIONS ACTIVATION TENSOR: one comparison, as a row of the table.
check() {
    local checkpoint=$1 layer=$2 part=$3 activations=$4 activation=$5 tensor=$6 source verdict mark
    source=$(input "$checkpoint" "$layer")
    launch/mpirun.sh verify --checkpoint "$fixtures/$checkpoint" --layer "$layer" --input "$source" --part "$part" \
        --expected "${source%:*}:$tensor" --activations "$activations" --activation "$activation" --json \
        >"$scratch/verdict.json" || true
    verdict=$(field pass <"$scratch/verdict.json")
    if [ "$verdict" = true ]; then
        mark="${green}ok$plain"
    else
        mark="${red}WRONG$plain"
        num_failed=$((num_failed + 1))
    fi
    rows+=("$(printf '%-20s %5s %-7s %-10s %-10s %10.3g %10.3g  %s' "$checkpoint" "$layer" "$part" "$activations" \
        "$activation" "$(field rel_l2 <"$scratch/verdict.json")" "$(field bound <"$scratch/verdict.json")" "$mark")")
}

for checkpoint in modelopt-dsv3-tiny modelopt-dsv3-mixed modelopt-qwen3-tiny k3-tiny; do
    layer=1
    launch/mpirun.sh --deployment topology/laptop.yaml run --checkpoint "$fixtures/$checkpoint" --layers all \
        --input "$(input "$checkpoint" $layer)" --output "$scratch/$checkpoint.safetensors"
done

say "comparing with the expected values: 22 runs of four ranks"
for layer in 1 2; do
    for checkpoint in modelopt-dsv3-tiny modelopt-dsv3-mixed; do
        check $checkpoint $layer routed bf16 swiglu routed.w4a16.swiglu
        check $checkpoint $layer routed quantised swiglu routed.w4a4.swiglu
        check $checkpoint $layer shared quantised swiglu shared.w4a4.swiglu
    done
    check k3-tiny $layer routed bf16 situ:4,25 $layer.routed_latent_sum.w4a16
    check k3-tiny $layer block bf16 situ:4,25 $layer.block.w4a16
    check k3-tiny $layer block quantised situ:4,25 $layer.block.w4a4
done
for layer in 0 1; do
    check modelopt-qwen3-tiny $layer routed bf16 swiglu routed.w4a16.swiglu
    check modelopt-qwen3-tiny $layer routed quantised situ:4,25 routed.w4a4.situ
done

printf '\n%-20s %5s %-7s %-10s %-10s %10s %10s\n' checkpoint layer part inputs activation 'rel L2' 'held to'
printf '%s\n' "${rows[@]}"
if [ $num_failed -gt 0 ]; then
    printf '\n%s%d of %d comparisons are wrong%s\n' "$red" "$num_failed" "${#rows[@]}" "$plain"
    exit 1
fi
printf '\n%sall %d comparisons hold, on 4 ranks%s\n' "$green" "${#rows[@]}" "$plain"
