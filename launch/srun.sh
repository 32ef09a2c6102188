#!/usr/bin/env bash
# Starts lockstep on the ranks of one host, or of several, with Slurm's srun, over PMIx or PMI-2.
set -euo pipefail
# shellcheck source=launch/launcher.sh
. "$(dirname "$0")/launcher.sh"

usage() {
    printf 'Usage: launch/srun.sh [OPTIONS] COMMAND [ARGUMENTS...]\n\n'
    options_usage "those that Slurm gives" srun
    codes_usage srun "the largest of the ranks'"
    cat <<'EOF'

In an allocation (salloc, sbatch) the ranks are a step of it, else srun asks for one; partition, time and the like come from
--mpi-arg or from Slurm's variables (SLURM_PARTITION). The plug-in is chosen for the MPI that the program was built with:
PMIx for Open MPI, PMI-2 or PMIx for MPICH; --mpi-arg=--mpi=NAME has the last word. launch/lockstep.sbatch is the same as
a batch job.
EOF
}

# choose_plugin: sets `plugin` to what lets the ranks find each other.
choose_plugin() {
    local plugins word
    plugins=" $( (srun --mpi=list 2>&1 || true) | tr -s '[:space:]' ' ') "
    plugin=''
    case $library in
    mpich) set -- pmi2 pmix ;;
    *) set -- pmix ;;
    esac
    for word in "$@"; do
        [[ $plugins != *" $word "* ]] || plugin=${plugin:-$word}
    done
    # Open MPI that was built with Slurm's PMI library says so.
    if [ -z "$plugin" ] && [[ $plugins == *' pmi2 '* ]] && [ "$library" != mpich ] &&
        ompi_info 2>/dev/null | grep 'MCA pmix: s[12] ' >/dev/null; then
        plugin=pmi2
    fi
    [ -n "$plugin" ] || fail 3 "this Slurm has no plug-in that ${library:-the MPI} of $binary can be started with" \
        "(srun --mpi=list: $(tr -s '[:space:]' ' ' <<<"${plugins#*are...}" | sed 's/^ //; s/ $//'); wanted: $(tr ' ' , <<<"$*"))." \
        "Start it inside the allocation with mpirun: salloc -n $ranks launch/mpirun.sh ..."
}

parse_options "$@"
find_binary
$dry_run || command -v srun >/dev/null || fail 3 "srun is not there: this is no host of a Slurm cluster. On hosts without Slurm use launch/mpirun.sh"
library=$(library_of_binary)
if [[ ${mpi_args[*]-} == *--mpi=* ]]; then
    plugin=''
elif $dry_run && ! srun --mpi=list >/dev/null 2>&1; then
    # No cluster here to ask.
    plugin=pmix
else
    choose_plugin
fi

command=(srun "--ntasks=$ranks")
[ -z "$plugin" ] || command+=("--mpi=$plugin")
if [ -n "$hosts$hostfile" ]; then
    expect_room "or give a host more"
    # Slurm puts as many ranks on each host; which host gets how many is not for srun to be told.
    each=$(list_hosts | while read -r _ slots; do echo "$slots"; done | sort -u)
    [[ $each =~ ^[0-9]+$ ]] || fail 2 "srun puts as many ranks on every host, and ${hosts:-$hostfile} asks for different numbers;" \
        "give each host the same, or use launch/mpirun.sh"
    ranks_per_node=${ranks_per_node:-$each}
    command+=("--nodes=$(list_hosts | wc -l)" "--nodelist=$(list_hosts | cut -d ' ' -f 1 | paste -s -d ,)")
elif [ -n "$ranks_per_node" ]; then
    command+=("--nodes=$((ranks / ranks_per_node))")
fi
[ -z "$ranks_per_node" ] || command+=("--ntasks-per-node=$ranks_per_node")
# A rank runs threads of its own: bound to one core, all of them would share it. One that fails takes the others along. What
# was exported reaches all hosts, also where the site or sbatch says otherwise.
command+=(--cpu-bind=none --kill-on-bad-exit=1 --export=ALL)
if [ "$library" != mpich ] && is_in_container; then
    settings+=(OMPI_MCA_btl_vader_single_copy_mechanism=none)
fi
# srun's own failures are to be no rank's, nor is what --immediate did not get.
settings+=(SLURM_EXIT_ERROR=253 SLURM_EXIT_IMMEDIATE=253)
# shellcheck disable=SC2034 # run_to_end reads them
own_code=253 own_exit=3 own_message="srun did not start the ranks, for the reason above; sinfo --format='%D hosts of %c cores' says what \
there is, --ranks and --ranks-per-node what is asked for"
choose_cache
job_name=lockstep-$$
# Told to end, this script says so for all ranks, and finds them by name.
$dry_run || export LOCKSTEP_LAUNCHER=srun.sh
command+=("--job-name=$job_name")
rank_command
command+=(${mpi_args[@]+"${mpi_args[@]}"} "${rank_words[@]}")
if $dry_run; then
    show_command "${command[@]}"
    exit 0
fi

# srun kills its tasks outright when it is told to end, and so does Slurm when it is told to cancel a step: they are to have
# a signal that lets them clean up.
# shellcheck disable=SC2317 # run_to_end calls it
end_ranks() {
    local steps
    steps=$(squeue --steps --noheader --user="$(id -u)" --format='%i %j' 2>/dev/null | sed -n "s/ $job_name\$//p")
    if [ -n "$steps" ]; then
        # shellcheck disable=SC2086 # a word each
        scancel --signal=TERM $steps && return 0
    fi
    # Not there yet: srun waits for its allocation.
    kill -TERM "$1" 2>/dev/null || true
}
run_to_end end_ranks "${command[@]}"
