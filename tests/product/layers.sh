#!/bin/sh
# layers.sh: the tree keeps its layers, and tools/layers.awk sees a breach of each kind.
set -eu
root=$(pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
find src include cli serve examples -name '*.[ch]' -o -name '*.h.in' -o -name '*.cu' -o \
    -name '*.cuh' 2>/dev/null | xargs awk -f tools/layers.awk

cd "$tmp"
mkdir -p src/kv src/kern/x86 src/comm src/base cli include/kvspan
bad=0
expect() { # STATUS FILE TEXT
    printf '%s\n' "$3" >"$2"
    status=0
    awk -f "$root/tools/layers.awk" "$2" >out || status=$?
    if [ "$status" != "$1" ] || { [ "$1" = 1 ] && ! grep -qF "$3" out; }; then
        echo "$2 with $3: status $status, expected $1"
        bad=1
    fi
}
expect 0 src/kv/a.c '#include "kern/kern.h"'
expect 0 src/kv/a.c '#include "kv/page.h"'
expect 0 src/kv/a.c '#include "page.h"'
expect 0 src/kv/a.c '#include <stdio.h>'
expect 0 src/kv/a.c '#include "kvspan/status.h"'
expect 0 src/kern/x86/a.c '#include "kern/x86/simd.h"'
expect 0 cli/a.c '#include "kvspan/dcp.h"'
expect 0 cli/a.c '#include "cli/opt.h"'
expect 0 src/base/a.c '/* #include "kv/page.h" in a comment */'
expect 1 src/base/a.c '#include "kv/page.h"'
expect 1 src/kern/x86/a.c '#include "comm/comm.h"'
expect 1 src/comm/a.c '  #  include "kern/kern.h"'
expect 1 src/kv/a.c '#include "../kern/kern.h"'
expect 1 src/kv/a.c '#include "kern/../api/x.h"'
expect 1 src/kv/a.c '#include "nowhere/x.h"'
expect 1 src/kv/a.c '#include "cli/opt.h"'
expect 1 cli/a.c '#include "base/mem.h"'
expect 1 include/kvspan/a.h '#include "base/mem.h"'
mkdir -p src/odd
printf 'int x;\n' >src/odd/a.c
if awk -f "$root/tools/layers.awk" src/odd/a.c >out; then
    echo "a folder without a rank passed"
    bad=1
fi
exit $bad
