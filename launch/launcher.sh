# shellcheck shell=bash
# What the launchers share: their options, the program, how a command is shown, and how ranks are ended.
# Sourced, never run.
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# options_usage HOSTS LAUNCHER: the options of every launcher, for its usage; HOSTS is where ranks are without --hosts.
options_usage() {
    cat <<EOF
Runs \`lockstep COMMAND ARGUMENTS...\` on several ranks. Options stand before the command, what follows it is lockstep's.
Each option that takes a value is written \`--option VALUE\` or \`--option=VALUE\`.

Options:
  --ranks N            ranks to start (default: as many as Slurm's allocation has tasks, 4 outside of one)
  --ranks-per-node N   so many of them on each host
  --moe-backend NAME   the family of kernels: auto, cpu, reference, simd, ... (handed to the command)
  --deployment FILE    the deployment file (handed to the command)
  --hosts LIST         hosts with their ranks, as in node1:4,node2:4 (default: $1)
  --hostfile FILE      hosts, one a line, as in \`node1 slots=4\`
  --cache-dir DIR      where compiled kernels are kept, each rank's in DIR/<host>/rank<local rank> (default: the
                       deployment's; on several hosts /var/tmp/lockstep-<user id>, on a disk of each host's own)
  --binary FILE        the program (default: the release build of this clone, else lockstep in PATH)
  --mpi-arg ARG        one more argument for $2; may be repeated
  --dry-run            prints the command instead of running it
  --help               prints this

EOF
}

# codes_usage LAUNCHER WHOSE: what the exit codes mean, for the usage.
codes_usage() {
    cat <<EOF
Every LOCKSTEP_* variable reaches all ranks, on all hosts. The exit code is $1's, which is $2:
0 fine, 1 wrong result, 2 bad input, 3 environment, 4 ranks disagree, 5 a peer failed or a limit passed, 101 a bug.
Ctrl-C and SIGTERM end all ranks, and this with 130 and 143.
EOF
}

# parse_options ARGUMENT...: sets what the options say, and the array `words` to the command with its arguments.
parse_options() {
    local option value
    ranks='' ranks_per_node='' hosts='' hostfile='' cache_dir='' binary='' deployment='' dry_run=false
    handed_on=() mpi_args=() settings=() words=()
    while [ $# -gt 0 ]; do
        option=$1
        shift
        # What takes a value has it after `=` or as the next word.
        case $option in
        --ranks | --ranks-per-node | --moe-backend | --deployment | --hosts | --hostfile | --cache-dir | --binary | --mpi-arg)
            [ $# -gt 0 ] || fail 2 "$option needs a value; see --help"
            case "$option:$1" in
            --mpi-arg:*) ;;
            *:-*) fail 2 "$option needs a value, found the option $1; see --help" ;;
            esac
            value=$1
            shift
            ;;
        --ranks=* | --ranks-per-node=* | --moe-backend=* | --deployment=* | --hosts=* | --hostfile=* | --cache-dir=* | \
            --binary=* | --mpi-arg=*)
            value=${option#*=}
            option=${option%%=*}
            ;;
        --dry-run=* | --help=*) fail 2 "${option%%=*} takes no value, found ${option#*=}; see --help" ;;
        *) value=- ;;
        esac
        [ -n "$value" ] || fail 2 "$option needs a value; see --help"
        case $option in
        --ranks)
            expect_count "$option" "$value"
            ranks=$value
            ;;
        --ranks-per-node)
            expect_count "$option" "$value"
            ranks_per_node=$value
            ;;
        --moe-backend) handed_on+=("$option=$value") ;;
        --deployment)
            deployment=$value
            handed_on+=("$option=$value")
            ;;
        --hosts) hosts=$value ;;
        --hostfile) hostfile=$value ;;
        --cache-dir) cache_dir=$value ;;
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
    words=("$@")
    ranks=${ranks:-${SLURM_NTASKS:-4}}
    [ ${#words[@]} -gt 0 ] || fail 2 "no command; say what to run, as in: launch/$(basename "$0") --ranks $ranks run --help"
    [ -z "$hosts" ] || [ -z "$hostfile" ] || fail 2 "give --hosts or --hostfile, not both"
    [ -z "$hostfile" ] || [ -r "$hostfile" ] || fail 2 "cannot read --hostfile $hostfile"
    [ -z "$ranks_per_node" ] || [ $((ranks % ranks_per_node)) -eq 0 ] ||
        fail 2 "--ranks $ranks are not $ranks_per_node on each host; give a multiple of --ranks-per-node"
}

# expect_count OPTION VALUE
expect_count() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail 2 "$1 takes a whole number of at least 1, found $2"; }

# list_hosts: the hosts of --hosts or --hostfile, one a line with its ranks; `*` where that is for the launcher to find out.
list_hosts() {
    local entry line slots
    local entries=()
    if [ -n "$hosts" ]; then
        IFS=, read -r -a entries <<<"$hosts"
        for entry in "${entries[@]}"; do
            slots=1
            [[ $entry != *:* ]] || slots=${entry##*:}
            # `host:*` and `host:auto` count the host's cores.
            [[ $slots =~ ^[0-9]+$ ]] || slots='*'
            echo "${entry%:*} $slots"
        done
    elif [ -n "$hostfile" ]; then
        while read -r line || [ -n "$line" ]; do
            line=${line%%#*}
            [[ $line =~ [^[:space:]] ]] || continue
            slots='*'
            # As Open MPI writes it, and as MPICH does.
            if [[ $line =~ (^|[[:space:]])slots[[:space:]]*=[[:space:]]*([0-9]+) ]]; then
                slots=${BASH_REMATCH[2]}
            elif [[ $line =~ ^[[:space:]]*[^[:space:]:]+:([0-9]+) ]]; then
                slots=${BASH_REMATCH[1]}
            fi
            read -r entry _ <<<"$line"
            echo "${entry%:*} $slots"
        done <"$hostfile"
    fi
}

# num_slots: the ranks that --hosts or --hostfile has room for; nothing where that is for the launcher to find out.
num_slots() {
    local slots sum=0
    while read -r _ slots; do
        [ "$slots" != '*' ] || return 0
        sum=$((sum + 10#$slots))
    done < <(list_hosts)
    echo "$sum"
}

# expect_room HOW: refuses more ranks than the hosts that were named have room for; HOW says how to put them there anyway.
expect_room() {
    local room
    [ -n "$hosts$hostfile" ] || return 0
    room=$(num_slots)
    [ -z "$room" ] || [ "$ranks" -le "$room" ] || fail 2 "--ranks $ranks, but ${hosts:-$hostfile} has room for $room:" \
        "name more hosts or ranks of a host (node1:4 with --hosts, slots=4 with --hostfile), start fewer ranks, $1"
}

# find_binary: sets `binary` unless it is set.
find_binary() {
    if [ -z "$binary" ]; then
        binary=${CARGO_TARGET_DIR:-$root/target}/release/lockstep
        [ -x "$binary" ] || binary=$(command -v lockstep || echo "$binary")
    fi
    $dry_run || [ -x "$binary" ] || fail 3 "$binary is not there; build it with: cargo build --release"
}

# library_of_binary: the MPI that the program was linked with, openmpi or mpich; nothing where that can't be seen.
library_of_binary() {
    local libraries
    libraries=$(ldd "$binary" 2>/dev/null) || return 0
    case $libraries in
    *libmpi.so.40*) echo openmpi ;;
    # The name that MPICH and what is built like it share.
    *libmpich.so* | *libmpi.so.12*) echo mpich ;;
    esac
}

# Whether the system calls of this process are filtered, as containers do.
is_in_container() {
    [ -e /.dockerenv ] || [ -e /run/.containerenv ] || grep -q '^Seccomp:[[:space:]]*2' /proc/self/status 2>/dev/null
}

# is_on_several_hosts: whether ranks may be on more hosts than one.
is_on_several_hosts() {
    [ "$(list_hosts | wc -l)" -gt 1 ] || [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] ||
        { [ -n "$ranks_per_node" ] && [ "$ranks_per_node" -lt "$ranks" ]; }
}

# choose_cache: sets LOCKSTEP_CACHE_DIR where it was asked for, or where several hosts would share a home, which is slow.
choose_cache() {
    if [ -z "$cache_dir" ]; then
        if [ -n "${LOCKSTEP_CACHE_DIR:-}" ] || grep -qs '^[^#]*cache_dir: *[^ n#]' "$deployment" || ! is_on_several_hosts; then
            return 0
        fi
        cache_dir=/var/tmp/lockstep-$(id -u)
    fi
    settings+=("LOCKSTEP_CACHE_DIR=$cache_dir")
    export LOCKSTEP_CACHE_DIR=$cache_dir
}

# names_of_variables: every LOCKSTEP_* variable, one a line.
names_of_variables() { compgen -e -- LOCKSTEP_ | sort; }

# rank_command: sets `rank_words` to what each rank runs.
rank_command() {
    # Behind a launcher no rank has a terminal, so that progress has to be asked for.
    if [ -t 2 ] && [[ ${words[0]} =~ ^(run|verify)$ ]] &&
        [[ " ${words[*]} " != *" --json "* && " ${words[*]} " != *" --progress"* ]]; then
        handed_on+=(--progress=always)
    fi
    # shellcheck disable=SC2034 # what sources this runs it
    rank_words=("$binary" "${words[0]}" ${handed_on[@]+"${handed_on[@]}"} "${words[@]:1}")
}

# show_command WORD...: the command with the variables that are set for it, as a shell reads it.
show_command() {
    printf '%q ' ${settings[@]+"${settings[@]}"} "$@" | sed 's/ $//'
    printf '\n'
}

# The code by which the launcher itself says that something went wrong, what that is to be, and what it means.
own_code=none own_exit='' own_message=''

# children_of PID: its children, one a line. Others come and go meanwhile, of which grep complains.
children_of() { { grep -ls "^PPid:[[:space:]]*$1\$" /proc/[0-9]*/status || true; } | sed 's|/proc/\(.*\)/status|\1|'; }

# silent_peer PID: the address that a process has data under way to and that has not answered for some 20 s, with the kernel
# having asked 7 times, at intervals that double from 0.2 s, or are 5 s where nothing was under way at first. Nothing where
# all answer: a host that is merely busy does, because its kernel does.
silent_peer() {
    local inodes remote again probes
    inodes=$(find "/proc/$1/fd" -lname 'socket:*' -printf '%l ' 2>/dev/null || true)
    while read -r remote again probes; do
        [ $((16#$again + probes)) -ge 7 ] || continue
        # IPv4 has its bytes turned around, also inside of IPv6.
        case $remote in
        ???????? | 0000000000000000FFFF0000????????)
            remote=${remote: -8}
            remote=$((16#${remote:6:2})).$((16#${remote:4:2})).$((16#${remote:2:2})).$((16#${remote:0:2}))
            ;;
        esac
        echo "$remote"
        break
    done < <(awk -v inodes="$inodes" 'index(inodes, "[" $10 "]") && $5 !~ /^00000000:/ { sub(":.*", "", $3); print $3, $7, $9 }' \
        "/proc/$1/net/tcp" "/proc/$1/net/tcp6" 2>/dev/null)
}

# remove_session PID: removes the files that Open MPI 4's mpirun keeps while it runs, and leaves where it ends in the middle.
remove_session() {
    local sessions
    sessions=${TMPDIR:-/tmp}/ompi.$(uname -n).$(id -u)
    rm -rf "$sessions/pid.$1"
    rmdir "$sessions" 2>/dev/null || true
}

# end_if_cut_off PID: waits for the end of a launcher of ranks on several hosts, and ends it, with 9, once a host does not answer
# it. Open MPI's mpirun would wait for that host's daemon, until the kernel gives up after a quarter of an hour.
end_if_cut_off() {
    local peer='' child idle ranks_left=false
    # What is waited on for a while: a `sleep` would be left behind when this is ended.
    exec {idle}<> <(:)
    while [ -z "$peer" ]; do
        read -r -t 3 -u "$idle" || true
        kill -0 "$1" 2>/dev/null || return 0
        peer=$(silent_peer "$1")
    done
    trap '' TERM
    say "$(basename "$0"): host $({ getent hosts "$peer" || echo "- $peer"; } | { read -r _ name _; echo "$name"; }) does not" \
        "answer mpirun any more, which was ended; ranks on that host end by themselves"
    # Ranks have the time to clean up that mpirun gives them. Where it has ended them before, telling it makes it crash.
    for child in $(children_of "$1"); do
        [ ! "/proc/$child/exe" -ef "$binary" ] || ranks_left=true
    done
    if $ranks_left; then
        kill -TERM "$1" 2>/dev/null || true
        read -r -t 3 -u "$idle" || true
    fi
    # shellcheck disable=SC2046 # a word each
    kill -KILL $(children_of "$1") "$1" 2>/dev/null || true
    remove_session "$1"
    return 9
}

# run_to_end END WORD...: runs the command and ends with its code. Told to end by a signal, it calls `END PID` (and once
# more for who asks after 10 s), waits until all is over, says so, and ends with 128 and the signal's number.
run_to_end() {
    local guard=() code=0 name watch=''
    end=$1 pid='' told='' told_at=0
    shift
    # shellcheck disable=SC2317 # the traps call it
    forward() {
        [ -n "$told" ] || told_at=$SECONDS
        if [ -n "$pid" ] && { [ -z "$told" ] || [ $((SECONDS - told_at)) -ge 10 ]; }; then
            told=${told:-$1}
            "$end" "$pid"
        fi
        told=${told:-$1}
    }
    trap 'forward HUP' HUP
    trap 'forward INT' INT
    trap 'forward TERM' TERM
    # Where this script is killed outright, the launcher goes with it.
    if setpriv --help 2>/dev/null | grep -q -e --pdeathsig; then
        guard=(setpriv --pdeathsig TERM)
    fi
    # A process group of its own, which a terminal's Ctrl-C does not reach: the launcher gets one signal, whoever sends more.
    set -m
    env ${settings[@]+"${settings[@]}"} ${guard[@]+"${guard[@]}"} "$@" </dev/null &
    pid=$!
    set +m
    if ${is_watched:-false}; then
        end_if_cut_off "$pid" &
        watch=$!
    fi
    # Told before there was anything to end.
    [ -z "$told" ] || "$end" "$pid"
    # A signal interrupts the wait.
    while kill -0 "$pid" 2>/dev/null; do
        # Where the launcher is killed, bash says so.
        wait "$pid" 2>/dev/null || true
    done
    wait "$pid" 2>/dev/null || code=$?
    if [ -n "$watch" ]; then
        # Not while it ends the launcher.
        kill -TERM "$watch" 2>/dev/null || true
        if wait "$watch" 2>/dev/null; then :; elif [ $? = 9 ]; then code=5; fi
    fi
    if [ "$code" = "$own_code" ]; then
        say "$(basename "$0"): error: $own_message"
        code=$own_exit
    fi
    # Told when all was done, there was nothing to end.
    if [ -n "$told" ] && [ "$code" -ne 0 ]; then
        remove_session "$pid"
        case $told in
        HUP) code=129 name='a hang-up (SIGHUP)' ;;
        INT) code=130 name='Ctrl-C (SIGINT)' ;;
        *) code=143 name=SIGTERM ;;
        esac
        say "$(basename "$0"): ended on $name; no rank is left, and nothing half-written"
    fi
    exit "$code"
}
