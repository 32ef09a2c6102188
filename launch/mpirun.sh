#!/usr/bin/env bash
# Starts lockstep on the ranks of one host, or of several, with mpirun: Open MPI's 4 or 5, or MPICH's.
set -euo pipefail
# shellcheck source=launch/launcher.sh
. "$(dirname "$0")/launcher.sh"

usage() {
    printf 'Usage: launch/mpirun.sh [OPTIONS] COMMAND [ARGUMENTS...]\n\n'
    options_usage "Slurm's allocation, else this host" mpirun
    codes_usage mpirun "the first failing rank's"
    cat <<'EOF'

mpirun reaches other hosts by ssh, which must not ask for anything, or in an allocation through Slurm. As root (in a
container) Open MPI is told that this is meant; with more ranks than cores, waiting ranks yield theirs.
EOF
}

# Which mpirun there is: openmpi4, openmpi5, hydra (MPICH and its kin), unknown, or none.
kind_of_mpirun() {
    local version
    command -v mpirun >/dev/null || {
        echo none
        return 0
    }
    version=$(mpirun --version 2>&1) || true
    case $version in
    *'(Open MPI) '[1-4].*) echo openmpi4 ;;
    *'(Open MPI) '* | *PRRTE* | *prte*) echo openmpi5 ;;
    *HYDRA* | *Intel*MPI*) echo hydra ;;
    *) echo unknown ;;
    esac
}

parse_options "$@"
find_binary
kind=$(kind_of_mpirun)
library=$(library_of_binary)
case $kind:$library in
# A dry run shows Open MPI 4's command then.
none:*) $dry_run || fail 3 "mpirun is not there; install Open MPI, as in: apt-get install openmpi-bin" ;;
unknown:*) fail 3 "mpirun is neither Open MPI's nor MPICH's; put one of them first in PATH" ;;
hydra:openmpi) fail 3 "$binary was built with Open MPI, but mpirun is MPICH's, so that every rank would be alone; put Open MPI's first in PATH" ;;
openmpi?:mpich) fail 3 "$binary was built with MPICH, but mpirun is Open MPI's, so that every rank would be alone; put MPICH's first in PATH" ;;
esac

# Where neither the user nor Slurm has named hosts, ranks are on this one.
is_here=true
[ -z "$hosts$hostfile${SLURM_JOB_ID:-}" ] || is_here=false
command=(mpirun -n "$ranks")
if [ "$kind" = hydra ]; then
    expect_room "or give a host more"
    # One form for both, as files are written differently for it.
    [ -z "$hosts$hostfile" ] || command+=(-hosts "$(list_hosts | sed 's/ \*$//; s/ /:/' | paste -s -d ,)")
    [ -z "$ranks_per_node" ] || command+=(-ppn "$ranks_per_node")
    # A rank runs threads of its own: bound to one core, all of them would share it.
    command+=(-bind-to none)
else
    # Open MPI 5 takes it as a word of the mapping.
    oversubscribe=--oversubscribe mapping=()
    [ "$kind" != openmpi5 ] || oversubscribe=--map-by=:OVERSUBSCRIBE
    [[ ${mpi_args[*]-} =~ [oO][vV][eE][rR][sS][uU][bB] ]] ||
        expect_room "or put more ranks than that on the hosts with --mpi-arg=$oversubscribe"
    [ -z "$hosts" ] || command+=(--host "$hosts")
    [ -z "$hostfile" ] || command+=(--hostfile "$hostfile")
    # mpirun counts physical cores as slots and would refuse more ranks; on one host that is the user's to say.
    ! $is_here || mapping=("$oversubscribe")
    if [ -n "$ranks_per_node" ]; then
        if [ "$kind" != openmpi5 ]; then
            mapping+=(--map-by "ppr:$ranks_per_node:node")
        elif $is_here; then
            mapping=("--map-by=ppr:$ranks_per_node:node:OVERSUBSCRIBE")
        else
            mapping=("--map-by=ppr:$ranks_per_node:node")
        fi
    fi
    command+=(${mapping[@]+"${mapping[@]}"} --bind-to none)
    if $is_here && [ "$ranks" -gt "$(nproc)" ]; then
        # Waiting ranks spin otherwise, on the cores that the others need.
        settings+=(OMPI_MCA_mpi_yield_when_idle=1)
    fi
    if [ "$(id -u)" -eq 0 ]; then
        settings+=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
        [ "$kind" != openmpi5 ] || settings+=(PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1)
    fi
    # Containers filter the system call by which ranks read each other's memory; Open MPI 4 warns for every message then.
    if [ "$kind" != openmpi5 ] && is_in_container; then
        settings+=(OMPI_MCA_btl_vader_single_copy_mechanism=none)
    fi
    # ORTE_ERR_COMM_FAILURE
    # shellcheck disable=SC2034 # run_to_end reads them
    own_code=205 own_exit=5 own_message='a host could not be reached any more, and the ranks were ended; see what became of it'
    # Ranks notice a host that is cut off by themselves, and say which. Where they can't, because it is mpirun's own host, this
    # does; Open MPI 4 would wait 8 minutes.
    if [ "$kind" != openmpi5 ] && ! $is_here; then
        settings+=(OMPI_MCA_oob_tcp_keepalive_time=10 OMPI_MCA_oob_tcp_keepalive_intvl=5 OMPI_MCA_oob_tcp_keepalive_probes=6)
    fi
fi
choose_cache
# Told to end, this script says so for all ranks.
$dry_run || export LOCKSTEP_LAUNCHER=mpirun.sh
if [ "$kind" = hydra ]; then
    names=$(names_of_variables | paste -s -d ,)
    [ -z "$names" ] || command+=(-genvlist "$names")
else
    while read -r name; do
        command+=(-x "$name")
    done < <(names_of_variables)
fi
rank_command
command+=(${mpi_args[@]+"${mpi_args[@]}"} "${rank_words[@]}")
if $dry_run; then
    show_command "${command[@]}"
    exit 0
fi

# shellcheck disable=SC2034 # run_to_end reads it
$is_here || is_watched=true
# mpirun ends its ranks when it is told to, but itself with 1; told twice, it leaves without waiting for them.
# shellcheck disable=SC2317 # run_to_end calls it
end_ranks() { kill -TERM "$1" 2>/dev/null || true; }
run_to_end end_ranks "${command[@]}"
