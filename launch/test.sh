#!/usr/bin/env bash
# Everything that CI runs: form, lints, documentation, shell scripts, tests. Arguments go to the test runner.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$root"

if [ "${1:-}" = --help ]; then
    cat <<'EOF'
Usage: launch/test.sh [ARGUMENTS OF THE TEST RUNNER...]

Checks formatting, lints (warnings are errors), documentation, and shell scripts, then runs all tests: with cargo nextest
where it is there, else with cargo test. Ends in the runner's own summary. Needs Open MPI, and shellcheck, which it
installs where it is missing. Kernels are compiled with the NVRTC that LOCKSTEP_NVRTC names, else with one fetched from
PyPI into target/nvrtc; where neither is to be had, the tests that compile say so and pass. So it is with tests of two
hosts, which need root, Slurm and ssh; `tests/cluster/hosts.sh check` says what is missing.
EOF
    exit 0
fi

find_cargo
step() { say "== $*"; }

step formatting
"${cargo[@]}" fmt --all --check
step lints
"${cargo[@]}" clippy --locked --all-targets -- -D warnings
step documentation
RUSTDOCFLAGS="-D warnings" "${cargo[@]}" doc --locked --no-deps --document-private-items
step shell scripts
command -v shellcheck >/dev/null || install_missing shellcheck
command -v shellcheck >/dev/null || fail 3 "shellcheck is not there; install it and run this again"
shellcheck --external-sources launch/*.sh launch/lockstep.sbatch tests/*.sh tests/cluster/hosts.sh .ci/run

step tables of benches
if command -v python3 >/dev/null; then
    python3 -B -m unittest discover --start-directory benches/peers
else
    say "no python3: the tables of benches/peers are not tested"
fi

step NVRTC
if find_nvrtc; then
    # What is there has to work: tests that compile kernels fail instead of passing without having compiled.
    export LOCKSTEP_TEST_NVRTC=required
else
    say "tests that compile kernels are skipped; put libnvrtc.so.13 on LD_LIBRARY_PATH, or name its directory in LOCKSTEP_NVRTC"
fi

step two hosts
if tests/cluster/hosts.sh check; then
    export LOCKSTEP_TEST_CLUSTER=required
else
    say "tests of two hosts are skipped"
fi

# More ranks than cores: waiting ranks have to yield.
export OMPI_MCA_mpi_yield_when_idle=1
if [ "$(id -u)" -eq 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
if "${cargo[@]}" nextest --version >/dev/null 2>&1; then
    step examples in the documentation
    "${cargo[@]}" test --locked --doc --quiet
    step tests
    exec "${cargo[@]}" nextest run --locked --no-fail-fast "$@"
fi
step tests
exec "${cargo[@]}" test --locked --no-fail-fast "$@"
