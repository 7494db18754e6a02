#!/bin/sh
# symbols.sh NM LIB.so LIB.a: both libraries define kvs_* only for the outside, and the same set.
set -eu
nm=$1 so=$2 archive=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

"$nm" -D --defined-only "$so" | awk '{ print $NF }' | sort -u >"$tmp/so"
"$nm" -g --defined-only "$archive" | awk 'NF == 3 { print $NF }' | sort -u >"$tmp/a"

bad=0
for list in so a; do
    if grep -v '^kvs_' "$tmp/$list"; then
        echo "^ shown by the $list library, but only kvs_* may be"
        bad=1
    fi
done
if ! diff "$tmp/so" "$tmp/a"; then
    echo "^ the shared library (<) and the archive (>) show different symbols"
    bad=1
fi
[ -s "$tmp/so" ] || { echo "no symbols at all"; bad=1; }
exit $bad
