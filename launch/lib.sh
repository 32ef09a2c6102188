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
