#!/usr/bin/env bash
# Starts lockstep on the ranks of one host, or of several, with mpirun.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/lib.sh"

usage() {
    cat <<'EOF'
Usage: launch/mpirun.sh [OPTIONS] COMMAND [ARGUMENTS...]

Runs `lockstep COMMAND ARGUMENTS...` on several ranks. Options stand before the command, what follows it is lockstep's.
Each option that takes a value is written `--option VALUE` or `--option=VALUE`.

Options:
  --ranks N            ranks to start (default: 4)
  --moe-backend NAME   the family of kernels: auto, cpu, reference, simd, ... (handed to the command)
  --deployment FILE    the deployment file (handed to the command)
  --hosts LIST         hosts with their ranks, as in node1:4,node2:4 (default: this host)
  --hostfile FILE      hosts, in mpirun's own form
  --binary FILE        the program (default: the release build of this clone, else lockstep in PATH)
  --mpi-arg ARG        one more argument for mpirun; may be repeated
  --dry-run            prints the command instead of running it
  --help               prints this

Every LOCKSTEP_* variable reaches all ranks, on all hosts. As root (in a container) mpirun is told that this is meant;
with more ranks than cores, waiting ranks yield theirs. The exit code is mpirun's, which is the first failing rank's:
0 fine, 1 wrong result, 2 bad input, 3 environment, 4 ranks disagree, 5 a peer failed or a limit passed.
EOF
}

ranks=4 hosts='' hostfile='' binary='' dry_run=false
handed_on=() mpi_args=() assignments=()

while [ $# -gt 0 ]; do
    option=$1
    shift
    # What takes a value has it after `=` or as the next word.
    case $option in
    --ranks | --moe-backend | --deployment | --hosts | --hostfile | --binary | --mpi-arg)
        [ $# -gt 0 ] || fail 2 "$option needs a value; see --help"
        case "$option:$1" in
        --mpi-arg:*) ;;
        *:-*) fail 2 "$option needs a value, found the option $1; see --help" ;;
        esac
        value=$1
        shift
        ;;
    --ranks=* | --moe-backend=* | --deployment=* | --hosts=* | --hostfile=* | --binary=* | --mpi-arg=*)
        value=${option#*=}
        option=${option%%=*}
        ;;
    *) value=- ;;
    esac
    [ -n "$value" ] || fail 2 "$option needs a value; see --help"
    case $option in
    --ranks)
        [[ $value =~ ^[1-9][0-9]*$ ]] || fail 2 "--ranks takes a whole number of at least 1, found $value"
        ranks=$value
        ;;
    --moe-backend | --deployment) handed_on+=("$option=$value") ;;
    --hosts) hosts=$value ;;
    --hostfile) hostfile=$value ;;
    --binary) binary=$value ;;
    --mpi-arg) mpi_args+=("$value") ;;
    --dry-run) dry_run=true ;;
    --help | -h)
        usage
        exit 0
        ;;
    --) break ;;
    -*) fail 2 "unknown option $option; see --help (options of lockstep stand after its command)" ;;
    *)
        set -- "$option" "$@"
        break
        ;;
    esac
done
[ $# -gt 0 ] || fail 2 "no command; say what to run, as in: launch/mpirun.sh --ranks $ranks run --help"
[ -z "$hosts" ] || [ -z "$hostfile" ] || fail 2 "give --hosts or --hostfile, not both"
[ -z "$hostfile" ] || [ -r "$hostfile" ] || fail 2 "cannot read --hostfile $hostfile"

if [ -z "$binary" ]; then
    binary=${CARGO_TARGET_DIR:-$root/target}/release/lockstep
    [ -x "$binary" ] || binary=$(command -v lockstep || echo "$binary")
fi
$dry_run || [ -x "$binary" ] || fail 3 "$binary is not there; build it with: cargo build --release"
$dry_run || command -v mpirun >/dev/null || fail 3 "mpirun is not there; install Open MPI, as in: apt-get install openmpi-bin"

command=(mpirun -n "$ranks")
if [ -n "$hosts" ]; then
    command+=(--host "$hosts")
elif [ -n "$hostfile" ]; then
    command+=(--hostfile "$hostfile")
else
    # mpirun counts physical cores as slots and would refuse more ranks; on one host that is the user's to say.
    command+=(--oversubscribe)
    if [ "$ranks" -gt "$(nproc)" ]; then
        # Waiting ranks spin otherwise, on the cores that the others need.
        assignments+=(OMPI_MCA_mpi_yield_when_idle=1)
    fi
fi
# A rank runs threads of its own: bound to one core, all of them would share it.
command+=(--bind-to none)
if [ "$(id -u)" -eq 0 ]; then
    assignments+=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
fi
# Containers filter the system call by which ranks read each other's memory; Open MPI then warns for every message.
if [ -e /.dockerenv ] || [ -e /run/.containerenv ] || grep -q '^Seccomp:[[:space:]]*2' /proc/self/status 2>/dev/null; then
    assignments+=(OMPI_MCA_btl_vader_single_copy_mechanism=none)
fi
while read -r name; do
    command+=(-x "$name")
done < <(compgen -e -- LOCKSTEP_ | sort)
# Behind mpirun no rank has a terminal, so that progress has to be asked for.
verb=$1
shift
if [ -t 2 ] && [[ $verb =~ ^(run|verify)$ ]] && [[ " $* " != *" --json "* && " $* " != *" --progress"* ]]; then
    handed_on+=(--progress=always)
fi
command+=(${mpi_args[@]+"${mpi_args[@]}"} "$binary" "$verb" ${handed_on[@]+"${handed_on[@]}"} "$@")

if $dry_run; then
    printf '%q ' ${assignments[@]+"${assignments[@]}"} "${command[@]}" | sed 's/ $//'
    printf '\n'
    exit 0
fi
exec env ${assignments[@]+"${assignments[@]}"} "${command[@]}"
