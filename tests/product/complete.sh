#!/bin/sh
# complete.sh NM LIB.so HEADERS: the shared library defines every function that a public header
# declares, and shows none that no header declares.
set -eu
nm=$1 so=$2 headers=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

"$nm" -D --defined-only "$so" | awk '{ print $NF }' | sort -u >"$tmp/so"
# Declarations begin in the first column; inline functions and macros are not exported.
cat "$headers"/*.h | awk '
    /^static inline|^typedef|^#|^ |^\/\*|^}/ { next }
    match($0, /kvs_[a-z0-9_]+\(/) { print substr($0, RSTART, RLENGTH - 1) }' | sort -u >"$tmp/h"

bad=0
if comm -23 "$tmp/h" "$tmp/so" | grep .; then
    echo "^ declared in a public header, but not in the library"
    bad=1
fi
if comm -13 "$tmp/h" "$tmp/so" | grep .; then
    echo "^ in the library, but declared in no public header"
    bad=1
fi
exit $bad
