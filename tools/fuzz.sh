#!/bin/bash
# fuzz.sh BUILD SECONDS: runs every libFuzzer program of a fuzz build for that long, from its corpus.
# What it finds stays in BUILD/fuzz-out/NAME. The last line counts the programs.
set -uo pipefail
build=$1 seconds=$2
root=$(cd "$(dirname "$0")/.." && pwd)
passed=0 failed=0
shopt -s nullglob
for program in "$build"/tests/fuzz/*/fuzz_*; do
    [ -x "$program" ] && [ -f "$program" ] || continue
    name=$(basename "$program")
    folder=$(basename "$(dirname "$program")")
    out=$build/fuzz-out/$name
    mkdir -p "$out/corpus"
    if "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$out/" "$out/corpus" "$root/tests/fuzz/$folder/corpus" >"$out/log" 2>&1
    then
        runs=$(awk '/stat::number_of_executed_units/ { print $2 }' "$out/log")
        echo "$name: ok, $runs inputs in $seconds s"
        passed=$((passed + 1))
    else
        tail -n 40 "$out/log"
        echo "$name: FAILED, see $out"
        failed=$((failed + 1))
    fi
done
echo "fuzz: $passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
