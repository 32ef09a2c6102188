# shellcheck shell=bash
# What the launchers share: messages, packages of the distribution, a cargo that is new enough.
# Sourced, never run. Exit codes are the program's: 2 bad input, 3 the environment lacks something.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }

# fail CODE MESSAGE...
fail() {
    local code=$1
    shift
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit "$code"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail 3 "this needs root: $*; run it as root, or install sudo"
    fi
}

is_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# install_missing PACKAGE...: installs those of the packages that are not there; asks for nothing where all are.
install_missing() {
    local missing=() package
    command -v dpkg-query >/dev/null || {
        say "not Debian or Ubuntu: provide by your own means what these packages hold: $*"
        return 0
    }
    for package in "$@"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing: ${missing[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# What a bare Debian or Ubuntu lacks for building against Open MPI.
install_build_packages() {
    install_missing build-essential pkg-config libclang-dev libopenmpi-dev openmpi-bin ca-certificates
}

# What the tests of two hosts need besides (tests/cluster/hosts.sh).
install_cluster_packages() {
    install_missing slurmctld slurmd slurm-client munge iproute2 openssh-client openssh-server
}

# The oldest Rust that builds the project.
wanted_rust() { sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$root/Cargo.toml"; }

# is_new_enough CARGO...: whether this command is a cargo of at least wanted_rust.
is_new_enough() {
    local found
    found=$("$@" --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p')
    [ -n "$found" ] && [ "$(printf '%s\n' "$(wanted_rust)" "$found" | sort -V | head -n 1)" = "$(wanted_rust)" ]
}

# Sets the array `cargo` to a command that is new enough: the one there is, else a toolchain of rustup's.
find_cargo() {
    [ -d "${CARGO_HOME:-${HOME:-/}/.cargo}/bin" ] && PATH="${CARGO_HOME:-${HOME:-/}/.cargo}/bin:$PATH"
    cargo=(cargo)
    is_new_enough "${cargo[@]}" && return 0
    # Newer distributions have rustup as a package.
    if ! command -v rustup >/dev/null && apt-cache policy rustup 2>/dev/null | grep -q 'Candidate: [0-9]'; then
        install_missing rustup
    fi
    command -v rustup >/dev/null ||
        fail 3 "Rust $(wanted_rust) or newer is needed and rustup is not there; install it from https://rustup.rs and run this again"
    say "installing the stable Rust toolchain with rustup"
    rustup toolchain install stable --profile minimal --component clippy --component rustfmt >&2
    cargo=(rustup run stable cargo)
    is_new_enough "${cargo[@]}" || fail 3 "rustup's stable toolchain is older than Rust $(wanted_rust); run: rustup update stable"
}

# NVRTC as NVIDIA publishes it on PyPI, for those who compile kernels where there is no CUDA: one version, checked by its hash.
nvrtc_version=13.0.88
nvrtc_sha256=ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575

# find_nvrtc: sets LOCKSTEP_NVRTC to a directory with NVRTC unless it is set already: one fetched earlier, or fetched now.
# Says why and fails where it can't be had.
find_nvrtc() {
    [ -z "${LOCKSTEP_NVRTC:-}" ] || return 0
    local dir fetched python=python3
    dir=${CARGO_TARGET_DIR:-$root/target}/nvrtc/$nvrtc_version
    if ! [ -e "$dir/nvidia/cu13/lib/libnvrtc.so.13" ]; then
        [ "$(uname -m)" = x86_64 ] || { say "no NVRTC: the pinned package is for x86_64"; return 1; }
        "$python" -m pip --version >/dev/null 2>&1 || { say "no NVRTC: python3 has no pip to fetch it with"; return 1; }
        fetched=$(mktemp -d)
        say "fetching NVRTC $nvrtc_version from PyPI (90 MB)"
        printf 'nvidia-cuda-nvrtc==%s --hash=sha256:%s\n' "$nvrtc_version" "$nvrtc_sha256" >"$fetched/requirements.txt"
        if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
            --dest "$fetched" --requirement "$fetched/requirements.txt" >&2 ||
            ! "$python" -m zipfile -e "$fetched"/*.whl "$fetched/unpacked"; then
            rm -rf "$fetched"
            say "no NVRTC: it could not be fetched from PyPI"
            return 1
        fi
        mkdir -p "$(dirname "$dir")"
        rm -rf "$dir"
        mv "$fetched/unpacked" "$dir"
        rm -rf "$fetched"
    fi
    export LOCKSTEP_NVRTC=$dir/nvidia/cu13/lib
}
