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
  --hosts LIST         hosts with their ranks, as in node1:4,node2:4 (default: this host, with any number of ranks)
  --hostfile FILE      hosts, in mpirun's own form
  --binary FILE        the program (default: the release build of this clone, else lockstep in PATH)
  --mpi-arg ARG        one more argument for mpirun; may be repeated
  --dry-run            prints the command instead of running it
  --help               prints this

Every LOCKSTEP_* variable reaches all ranks, on all hosts. As root (in a container) mpirun is told that this is meant;
with more ranks than cores, waiting ranks yield theirs. The exit code is mpirun's, which is the first failing rank's:
0 fine, 1 wrong result, 2 bad input, 3 environment, 4 ranks disagree, 5 a peer failed or a limit passed, 101 a bug.
Ctrl-C and SIGTERM end all ranks, and this with 130 and 143 (mpirun alone would end with 1).
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

# num_slots: the ranks that --hosts or --hostfile has room for; nothing where that is for mpirun to find out.
num_slots() {
    local entry line slots sum=0
    local entries=()
    if [ -n "$hosts" ]; then
        IFS=, read -r -a entries <<<"$hosts"
        for entry in "${entries[@]}"; do
            slots=1
            [[ $entry != *:* ]] || slots=${entry##*:}
            # `host:*` and `host:auto` count the host's cores.
            [[ $slots =~ ^[0-9]+$ ]] || return 0
            sum=$((sum + 10#$slots))
        done
    else
        while read -r line || [ -n "$line" ]; do
            line=${line%%#*}
            [[ $line =~ [^[:space:]] ]] || continue
            [[ $line =~ (^|[[:space:]])slots[[:space:]]*=[[:space:]]*([0-9]+) ]] || return 0
            sum=$((sum + 10#${BASH_REMATCH[2]}))
        done <"$hostfile"
    fi
    echo "$sum"
}

if [ -n "$hosts$hostfile" ] && [[ ${mpi_args[*]-} != *oversubscribe* ]]; then
    room=$(num_slots)
    [ -z "$room" ] || [ "$ranks" -le "$room" ] || fail 2 "--ranks $ranks, but ${hosts:-$hostfile} has room for $room:" \
        "name more hosts or ranks of a host (node1:4 with --hosts, slots=4 with --hostfile), start fewer ranks," \
        "or put more ranks than that on the hosts with --mpi-arg=--oversubscribe"
fi
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
# Told to end, this script says so for all ranks.
$dry_run || export LOCKSTEP_LAUNCHER=mpirun.sh
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

# mpirun ends its ranks when it is told to, but itself with 1; told twice, it leaves without waiting for them. So it gets
# one signal, whoever sends more, and a process group of its own, which a terminal's Ctrl-C does not reach.
pid='' told='' told_at=0
# shellcheck disable=SC2317 # the traps call it
forward() {
    [ -n "$told" ] || told_at=$SECONDS
    if [ -n "$pid" ] && { [ -z "$told" ] || [ $((SECONDS - told_at)) -ge 10 ]; }; then
        kill -TERM "$pid" 2>/dev/null || true
    fi
    told=${told:-$1}
}
trap 'forward HUP' HUP
trap 'forward INT' INT
trap 'forward TERM' TERM

# Where this script is killed outright, mpirun goes with it.
guard=()
if setpriv --help 2>/dev/null | grep -q -e --pdeathsig; then
    guard=(setpriv --pdeathsig TERM)
fi
set -m
env ${assignments[@]+"${assignments[@]}"} ${guard[@]+"${guard[@]}"} "${command[@]}" </dev/null &
pid=$!
set +m
# Told before there was anything to pass it on to.
[ -z "$told" ] || kill -TERM "$pid" 2>/dev/null || true
# A signal interrupts the wait.
while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" || true
done
code=0
wait "$pid" || code=$?
# Told when all was done, there was nothing to end.
if [ -n "$told" ] && [ "$code" -ne 0 ]; then
    case $told in
    HUP) code=129 name='a hang-up (SIGHUP)' ;;
    INT) code=130 name='Ctrl-C (SIGINT)' ;;
    *) code=143 name=SIGTERM ;;
    esac
    say "$(basename "$0"): ended on $name; no rank is left, and nothing half-written"
fi
exit "$code"
