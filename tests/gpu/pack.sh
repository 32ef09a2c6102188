#!/usr/bin/env bash
# Puts all that tests on GPUs need into one directory, for a machine that has neither cargo nor the sources.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/../../launch/lib.sh"
cd "$root"

if [ $# -ne 1 ] || [ "${1:-}" = --help ]; then
    cat <<'EOF2'
Usage: tests/gpu/pack.sh DIR

Builds the binary and the tests (profile dev), and copies them with fixtures, deployments and launchers to DIR, which must
not be there yet. Where NVRTC is to be had, also fills DIR/shipped with the kernels of a fixture for sm_90a: no GPU is needed
for that, and the tests start a run with it. Copy DIR to a machine with GPUs and run DIR/run.sh there.
EOF2
    [ "${1:-}" = --help ] && exit 0
    exit 2
fi

out=$1
[ ! -e "$out" ] || fail 2 "$out is there already; name a directory that is not"
find_cargo
mkdir -p "$out/tests" "$out/src/cuda" "$out/tmp"

# The newest of each name: cargo says which files it has made.
built() {
    "${cargo[@]}" test --locked --no-run --message-format=json "$@" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1
}
cp "$(built --test ranks)" "$out/ranks"
cp "$(built --lib)" "$out/unit"
cp target/debug/lockstep "$out/lockstep"
strip "$out/ranks" "$out/unit" "$out/lockstep"

cp -r tests/fixtures "$out/tests/"
cp -r topology launch README.md "$out/"
# The stand-in for a driver has the functions of the door's own list.
cp src/cuda/library.rs "$out/src/cuda/"
cp tests/gpu/run.sh tests/gpu/sanitise.sh "$out/"

if find_nvrtc; then
    say "filling $out/shipped by a compiler alone"
    "$out/lockstep" warmup --model tests/fixtures/k3-tiny --arch sm_90a --cache-dir "$out/shipped" >&2
fi
say "packed $(du -sh "$out" | cut -f1) into $out"
