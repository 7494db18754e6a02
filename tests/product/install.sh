#!/bin/sh
# install.sh CMAKE BUILD APP CC: installs into an empty folder and builds an application against it
# through the CMake package (shared and static) and through pkg-config, from the installed files only.
set -eu
cmake=$1 build=$2 app=$3 cc=$4
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$cmake" --install "$build" --prefix "$tmp/root" >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }

"$cmake" -S "$app" -B "$tmp/app" -DCMAKE_PREFIX_PATH="$tmp/root" -DCMAKE_C_COMPILER="$cc" \
    >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
"$cmake" --build "$tmp/app" >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
want=$("$tmp/app/shared")
[ -n "$want" ]
[ "$("$tmp/app/static")" = "$want" ]

export PKG_CONFIG_PATH="$tmp/root/lib/pkgconfig"
# shellcheck disable=SC2046
"$cc" "$app/app.c" -o "$tmp/pc" $(pkg-config --cflags --libs kvspan) "-Wl,-rpath,$tmp/root/lib"
[ "$("$tmp/pc")" = "$want" ]
[ "$(pkg-config --modversion kvspan)" = "${want%% *}" ]
# The static libraries that pkg-config names are the ones the archive needs.
libs=$(pkg-config --static --libs kvspan | sed "s|-lkvspan|$tmp/root/lib/libkvspan.a|")
# shellcheck disable=SC2046,SC2086
"$cc" "$app/app.c" -o "$tmp/pcs" $(pkg-config --cflags kvspan) $libs
[ "$("$tmp/pcs")" = "$want" ]
