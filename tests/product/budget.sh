#!/bin/sh
# budget.sh: files and functions keep their size, and tools/budget.awk measures it.
set -eu
root=$(pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
find src include cli serve examples bench tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \
    2>/dev/null | xargs awk -f tools/budget.awk

cd "$tmp"
bad=0
body() { # LINES FIRST: a function whose body is LINES lines with both braces
    printf 'int before;\n\nstatic int f(int a,\n             int b)\n{\n%s\n' "$2"
    awk -v n="$1" 'BEGIN { for (i = 0; i < n - 3; i++) print "    a++;" }'
    printf '}\n'
}
expect() { # STATUS NAME
    status=0
    awk -f "$root/tools/budget.awk" a.c >out || status=$?
    if [ "$status" != "$1" ]; then
        echo "$2: status $status, expected $1"
        cat out
        bad=1
    fi
}
body 120 '    int c;' >a.c
expect 0 "120 lines"
body 121 '    int c;' >a.c
expect 1 "121 lines"
grep -qF 'a.c: f(): 121 lines, the limit is 120' out || { cat out; bad=1; }
body 160 '    /* A table of cases; cutting it would hide the pattern. */' >a.c
expect 0 "160 lines with a reason"
body 161 '    /* A table of cases; cutting it would hide the pattern. */' >a.c
expect 1 "161 lines with a reason"
awk 'BEGIN { for (i = 0; i < 1000; i++) print "int x;" }' >a.c
expect 0 "1000 lines of file"
echo 'int y;' >>a.c
expect 1 "1001 lines of file"
echo 'int z;' >b.c
status=0
awk -f "$root/tools/budget.awk" a.c b.c >out || status=$?
[ "$status" = 1 ] && grep -q '^a.c: the file: 1001' out || { cat out; bad=1; }
exit $bad
