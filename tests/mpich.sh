#!/usr/bin/env bash
# Builds lockstep against MPICH, beside Open MPI, and runs the tests of several ranks on it.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/../launch/lib.sh"
cd "$root"

if [ "${1:-}" = --help ]; then
    cat <<'EOF'
Usage: tests/mpich.sh [ARGUMENTS OF THE TEST RUNNER...]

Installs Debian's MPICH where it is missing (Open MPI stays what mpicc and mpirun mean), builds into target/mpich, and runs
the tests of several ranks. Tests that are about Open MPI alone are skipped, each with its reason in this file.
docs/measurements has the results.
EOF
    exit 0
fi

install_missing build-essential pkg-config libclang-dev libmpich-dev mpich ca-certificates
for program in mpicc.mpich mpirun.mpich; do
    command -v "$program" >/dev/null || fail 3 "$program is not there; install MPICH as Debian packages it"
done
find_cargo

export MPICC=mpicc.mpich LOCKSTEP_TEST_MPIRUN=mpirun.mpich
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/mpich
# launch/mpirun.sh takes the mpirun that comes first; a link would hide MPICH's helpers from it.
first=$(mktemp -d)
trap 'rm -rf "$first"' EXIT
printf '#!/bin/sh\nexec mpirun.mpich "$@"\n' >"$first/mpirun"
chmod +x "$first/mpirun"
export PATH="$first:$PATH"

skipped=(
    # MPICH's mpirun ends with 9, 11 where a rank was killed (Open MPI's: 137, 139), and says so on standard output.
    g5_a_rank_is_killed g5_a_rank_ends_in_mid_step
    # A rank that ends before MPI_Init is not noticed: the others wait until their limit, and say so too.
    g5_a_rank_fails g5_a_rank_panics
    # Told to end, MPICH's mpirun ends with 0 now and then; where MPI's start takes too long, with 9 now and then instead of 5.
    g7_sigterm_to_mpirun_itself j1_a_rank_that_does_not_come_to_mpi
    # Ranks are ended by SIGKILL as soon as one aborts: rank 0 can't remove what it was writing.
    j1_a_limit_that_passes_names_the_rank_and_what_it_is_at
    # mpirun itself ends on SIGPIPE where nobody reads.
    g7_a_reader_that_has_gone
    # About root and Open MPI.
    g4_root_in_a_container
    # The way to more ranks than slots that it looks for is Open MPI's.
    g4_more_ranks_than_slots
    # A time of four ranks on four cores; MPICH's waits don't yield where ranks share cores.
    agreement_of_four_ranks_takes_less_than_50_ms
    # Through launch/mpirun.sh, which can pass on no more than it is given: Hydra's mpirun ends with 9, 15 or 0 there.
    g5_the_launcher_ends_as_its_ranks_do soak_of_12_random_faults g7_an_older_output_survives
    g7_a_signal_to_one_rank g7_ctrl_c g7_sigterm_to_the_launcher g7_the_launcher_is_killed_outright
    # Two hosts are tried with Open MPI. Here srun, with PMI-2, noticed a cut link only after 60 s.
    cluster::
)
arguments=()
for name in "${skipped[@]}"; do arguments+=(--skip "$name"); done
say "skipped, for reasons in $0: ${skipped[*]}"

if "${cargo[@]}" nextest --version >/dev/null 2>&1; then
    "${cargo[@]}" nextest run --locked --no-fail-fast --test ranks "$@" -- "${arguments[@]}"
else
    "${cargo[@]}" test --locked --no-fail-fast --test ranks "$@" -- "${arguments[@]}"
fi
