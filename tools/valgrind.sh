#!/bin/bash
# valgrind.sh BUILD: runs the unit tests listed in BUILD/valgrind.txt under valgrind, two at a time.
# KVS_CPU=avx2, since valgrind does not know AVX-512. The last line counts the programs.
set -uo pipefail
export build=$1 KVS_CPU=${KVS_CPU:-avx2} KVS_VALGRIND=1
mkdir -p "$build/valgrind"
one() {
    local name log
    name=$(basename "$1")
    log=$build/valgrind/$name.log
    if timeout 300 valgrind -q --error-exitcode=99 --leak-check=full \
        --errors-for-leak-kinds=definite,possible --child-silent-after-fork=yes \
        --max-stackframe=8000000 "$1" >"$log" 2>&1; then
        echo "$name: ok"
    else
        tail -n 60 "$log"
        echo "$name: FAILED"
    fi
}
export -f one
result=$(xargs -P "$(nproc)" -I '{}' bash -c 'one "{}"' <"$build/valgrind.txt")
echo "$result"
passed=$(grep -c ': ok$' <<<"$result")
failed=$(grep -c ': FAILED$' <<<"$result")
echo "valgrind: $passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
