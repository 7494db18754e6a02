#!/bin/bash
# fuzz.sh BUILD SECONDS: runs every libFuzzer program of a fuzz build for that long, from its corpus, one on
# each core at a time. What it finds stays in BUILD/fuzz-out/NAME. The last line counts the programs.
set -uo pipefail
export build=$1 seconds=$2
root=$(cd "$(dirname "$0")/.." && pwd)
export root
one() { # PROGRAM
    local program=$1 name folder out runs
    name=$(basename "$program")
    folder=$(basename "$(dirname "$program")")
    out=$build/fuzz-out/$name
    mkdir -p "$out/corpus"
    if "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$out/" "$out/corpus" "$root/tests/fuzz/$folder/corpus" >"$out/log" 2>&1
    then
        runs=$(awk '/stat::number_of_executed_units/ { print $2 }' "$out/log")
        echo "$name: ok, $runs inputs in $seconds s"
    else
        echo "$(tail -n 40 "$out/log")
$name: FAILED, see $out"
    fi
}
export -f one
result=$(find "$build"/tests/fuzz -mindepth 2 -maxdepth 2 -type f -name 'fuzz_*' -perm -u+x -print0 | sort -z |
    xargs -0 -P "$(nproc)" -I '{}' bash -c 'one "$1"' _ '{}')
echo "$result"
passed=$(grep -c ': ok, [0-9]* inputs in ' <<<"$result")
failed=$(grep -c ': FAILED, see ' <<<"$result")
echo "fuzz: $passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
