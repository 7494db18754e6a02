#!/bin/bash
# setup.sh GROUP...: installs the Debian packages that a group of make targets needs, those that are
# missing only. Groups: base, mpi, fuzz, valgrind, format. As root directly, otherwise with sudo.
set -euo pipefail

declare -A group=(
    [base]="build-essential cmake ninja-build pkg-config libxxhash-dev libcmocka-dev libjansson-dev
          libpcre2-dev libedit-dev"
    [mpi]="mpi-default-dev mpi-default-bin"
    [fuzz]="clang libclang-rt-14-dev"
    [valgrind]="valgrind"
    [format]="clang-format"
)

missing=()
for name in "$@"; do
    [ -n "${group[$name]:-}" ] || { echo "setup.sh: no group '$name'" >&2; exit 2; }
    for package in ${group[$name]}; do
        if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
            missing+=("$package")
        fi
    done
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "kvspan is set up with apt-get, which this system lacks. Install what is called here" >&2
    echo "    ${missing[*]}" >&2
    echo "in your system's way, then use CMake: cmake --preset release" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        echo "These packages are missing, and this is neither root nor a user with sudo:" >&2
        echo "    ${missing[*]}" >&2
        echo "Ask for:  apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

echo "Installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "apt-get could not install ${missing[*]}" >&2
    exit 1
fi
