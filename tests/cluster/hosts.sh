#!/usr/bin/env bash
# Hosts on one Linux machine: two nodes and a login host, each with its own name, network, processes, /tmp and /dev/shm,
# joined by a bridge and managed by a real Slurm. What the hosts have in common is the machine's other directories, as
# on a cluster with a shared file system.
#
# A host is a process that holds its namespaces. When that is killed, the kernel ends all that ran on the host, and with
# the last one its network and mounts are gone: nothing of the machine itself is changed.
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "$0")/../../launch/lib.sh"

nodes=(node1 node2)
# Where users are: Slurm's controller, and the bridge that the nodes hang on.
login=login
# Short, because sockets are below it. One cluster at a time on a machine.
state=/run/lockstep-cluster
network=10.77.0

usage() {
    cat <<'EOF2'
Usage: tests/cluster/hosts.sh check | up [BINARY] | hold [BINARY] | run HOST COMMAND... | processes HOST | down

check      whether this machine can have the hosts; says what is missing, and ends with 3 then
up         brings the hosts up: login, node1 and node2. BINARY stands in for target/release/lockstep on them
hold       the same, and takes them down once its standard input ends
run        runs a command on a host, in this directory
processes  lists processes of a host, but for its daemons
down       ends all that runs on the hosts, and them

As root, on Linux. With the hosts up, `hosts.sh run login srun -N2 -n4 --mpi=pmix COMMAND` is a job on both nodes; nodes
also reach each other by ssh. `hosts.sh run node2 ip link set eth0 down` cuts a host off. Packages of Debian and Ubuntu:
slurmctld slurmd slurm-client munge iproute2 openssh-client openssh-server.
EOF2
}

# The address of a host.
address() {
    case $1 in
    "$login") echo "$network.254" ;;
    *) echo "$network.${1#node}" ;;
    esac
}

check() {
    local tool
    [ "$(uname -s)" = Linux ] || fail 3 "hosts are Linux namespaces; this is $(uname -s)"
    [ "$(id -u)" -eq 0 ] || fail 3 "hosts need root"
    for tool in slurmctld slurmd srun munged munge ip sshd ssh ssh-keygen nsenter unshare setsid mpirun; do
        command -v "$tool" >/dev/null ||
            fail 3 "$tool is not there; install: slurmctld slurmd slurm-client munge iproute2 openssh-client openssh-server"
    done
    unshare --net --mount --uts --pid --fork --mount-proc true 2>/dev/null ||
        fail 3 "this machine allows no namespaces (in a container: --privileged)"
    unshare --net ip link add br0 type bridge 2>/dev/null || fail 3 "this machine has no bridges between namespaces"
}

# The process that holds a host's namespaces.
holder() { cat "$state/$1.pid" 2>/dev/null; }

inside() {
    local host=$1 pid
    shift
    pid=$(holder "$host") || fail 2 "there is no host $host; bring it up with: $0 up"
    # A tool that runs as another user's child keeps this directory and this search path.
    exec nsenter --target "$pid" --net --mount --uts --pid env --chdir="$PWD" SLURM_CONF="$state/slurm.conf" "$@"
}
on() { (inside "$@"); }

# The first process of a host: sets it up, then takes care of what is orphaned there.
host() {
    local name=$1 binary=$2 dir kept=()
    hostname "$name"
    ip link set lo up
    mount --bind "$state/hosts" /etc/hosts
    mount --bind "$state/ssh_config" /etc/ssh/ssh_config
    # Where the project is built below /tmp it stays visible there.
    for dir in "$root" "${CARGO_TARGET_DIR:-$root/target}"; do
        case $dir in /tmp/*) kept+=("$dir") ;; esac
    done
    mkdir "$state/$name" "$state/$name/tmp" "$state/$name/var-tmp" "$state/$name/spool"
    chmod 1777 "$state/$name/tmp" "$state/$name/var-tmp"
    for dir in ${kept[@]+"${kept[@]}"}; do
        mkdir -p "$state/$name$dir"
        mount --bind "$dir" "$state/$name$dir"
    done
    mount --rbind "$state/$name/tmp" /tmp
    mount --bind "$state/$name/var-tmp" /var/tmp
    mount -t tmpfs -o mode=1777 none /dev/shm
    if [ -n "$binary" ]; then
        dir=${CARGO_TARGET_DIR:-$root/target}/release
        mkdir -p "$dir"
        # A link would show in the name by which the program is known.
        mkdir "$state/$name/release"
        : >"$state/$name/release/lockstep"
        mount --bind "$binary" "$state/$name/release/lockstep"
        mount --rbind "$state/$name/release" "$dir"
    fi
    : >"$state/$name.ready"
    while :; do
        sleep 3600 &
        wait $! || true
    done
}

# Waits up to 20 s for a command to succeed.
await() {
    local what=$1 _
    shift
    for _ in $(seq 200); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    say "logs of the hosts:"
    tail -n 5 "$state"/*.log >&2 || true
    fail 3 "$what"
}

# The child of a process. Others come and go meanwhile, of which grep complains.
child_of() { { grep -ls "^PPid:[[:space:]]*$1\$" /proc/[0-9]*/status || true; } | sed 's|/proc/\(.*\)/status|\1|' | grep .; }

start_host() {
    local name=$1 unshared
    # Not this script's output: whoever reads that would wait for the host's end.
    setsid unshare --net --mount --uts --pid --fork --mount-proc "$0" host "$name" "$2" </dev/null >"$state/$name.log" 2>&1 &
    unshared=$!
    await "host $name does not start" test -e "$state/$name.ready"
    child_of "$unshared" >"$state/$name.pid"
}

up() {
    local binary=${1:-} host
    check
    down
    [ -z "$binary" ] || binary=$(realpath "$binary")
    mkdir -p "$state" /run/sshd
    chmod 755 "$state"
    {
        echo "127.0.0.1 localhost"
        for host in "$login" "${nodes[@]}"; do echo "$(address "$host") $host"; done
    } >"$state/hosts"
    ssh-keygen -q -t ed25519 -N '' -f "$state/key"
    cat >"$state/ssh_config" <<CONF
Host *
  IdentityFile $state/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONF
    for host in "$login" "${nodes[@]}"; do start_host "$host" "$binary"; done

    on "$login" ip link add bridge type bridge
    on "$login" ip addr add "$(address "$login")/24" dev bridge
    on "$login" ip link set bridge up
    for host in "${nodes[@]}"; do
        nsenter --target "$(holder "$login")" --net ip link add "$host" type veth peer name eth0 netns "$(holder "$host")"
        on "$login" ip link set "$host" master bridge up
        on "$host" ip addr add "$(address "$host")/24" dev eth0
        on "$host" ip link set eth0 up
        # No PAM, which would want what a bare container lacks. A client that is cut off is noticed.
        on "$host" "$(command -v sshd)" -f /dev/null -h "$state/key" -o AuthorizedKeysFile="$state/key.pub" -o StrictModes=no \
            -o UsePAM=no -o PidFile=none -o PermitRootLogin=prohibit-password \
            -o ClientAliveInterval=4 -o ClientAliveCountMax=3 -E "$state/sshd-$host.log"
    done
    write_slurm_conf >"$state/slurm.conf"
    head -c 1024 /dev/urandom >"$state/munge.key"
    chmod 600 "$state/munge.key"
    on "$login" munged --force --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
        --log-file="$state/munged.log" --seed-file="$state/munge.seed"
    await "munge does not answer" munge --no-input --socket="$state/munge.socket"
    on "$login" slurmctld
    for host in "${nodes[@]}"; do on "$host" slurmd -N "$host"; done
    await "Slurm's nodes do not come up" all_idle
    on "$login" srun --mpi=list 2>&1 | grep -w pmix >/dev/null || fail 3 "this Slurm has no PMIx plug-in"
}

all_idle() { [ "$(on "$login" sinfo --noheader --states=idle --format=%D)" = ${#nodes[@]} ]; }

write_slurm_conf() {
    local host
    # MpiDefault as where nobody has thought of it: what needs PMIx has to ask for it. A host of two cores: the
    # machine has.
    cat <<CONF
ClusterName=lockstep
SlurmctldHost=$login($(address "$login"))
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$state/slurmctld
SlurmdSpoolDir=$state/%n/spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/%n/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/%n.slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
MpiDefault=none
ReturnToService=2
CONF
    for host in "${nodes[@]}"; do echo "NodeName=$host NodeAddr=$(address "$host") CPUs=2 State=UNKNOWN"; done
    echo "PartitionName=all Nodes=$(IFS=,; echo "${nodes[*]}") Default=YES State=UP"
}

# Processes of a host, one a line: number on the machine, command.
processes() {
    local pid namespace process name
    pid=$(holder "$1") || return 0
    namespace=$(readlink "/proc/$pid/ns/pid") || return 0
    for process in /proc/[0-9]*; do
        [ "$(readlink "$process/ns/pid" 2>/dev/null)" = "$namespace" ] || continue
        name=$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) || continue
        case $name in
        # The holder and its clock, the daemons; nothing where a process has ended and is not collected yet.
        '' | *"hosts.sh host "* | 'sleep 3600 ' | *slurmd' -N '* | *slurmctld' '* | ': slurmscriptd '* | *munged' '* | *sshd*'[listener]'*) ;;
        *) echo "${process#/proc/} $name" ;;
        esac
    done
}

# Whether a process has ended, collected or not.
is_gone() { ! [ -e "/proc/$1" ] || grep -q '^State:[[:space:]]*Z' "/proc/$1/status"; }

down() {
    local pid
    for pid in "$state"/*.pid; do
        case $pid in
        */"$login".pid | */node*.pid) ;;
        *) continue ;;
        esac
        pid=$(cat "$pid")
        # A number may have been given to another process since.
        grep -q 'hosts.sh' "/proc/$pid/cmdline" 2>/dev/null || continue
        kill -9 "$pid"
        await "the process $pid of a host does not end" is_gone "$pid"
    done
    rm -rf "$state"
}

case ${1:-} in
check) check ;;
up) up "${2:-}" ;;
hold)
    trap down EXIT
    up "${2:-}"
    echo up
    cat >/dev/null
    ;;
run)
    [ $# -gt 2 ] || fail 2 "run takes a host and a command; see --help"
    shift
    inside "$@"
    ;;
processes) processes "${2:-}" ;;
host) host "$2" "$3" ;;
down) down ;;
--help | -h) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
