#!/bin/bash
# needle_eval.sh PROGRAM ROOT: one text, eleven questions: all right, most of the text read once, the same for every DCP size.
set -euo pipefail
export LC_ALL=C
program=$1 root=$2
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
fail() {
    echo "needle_eval: $*"
    exit 1
}
export NEEDLE_EVAL=$program MODEL=$root/models/needle LENGTHS=1024 CORES=8
"$root/tests/needle/eval.sh" grid >"$tmp/grid" || fail "$(cat "$tmp/grid")"
grep -q 'exact: 33 of 33' "$tmp/grid" || fail "$(cat "$tmp/grid")"
grep -q '22 answers compared with another DCP size: 0 differ' "$tmp/grid" || fail "$(cat "$tmp/grid")"
grep -q '"asked": 11, .*"n_reused": 10240,' "$tmp/grid" || fail "the text was not read once: $(cat "$tmp/grid")"
"$program" --model "$MODEL" --tokens 1024 --distractors 12 --depths 0,70 --selection-last 1 --tail 900 >"$tmp/control"
[ "$(grep -c '"ok": false' "$tmp/control")" = 2 ] || fail "without selection: $(cat "$tmp/control")"
for wrong in "--depths 5" "--depths 0,,10" "--depths 101" "--tokens" "--tokens x" "--nonsense 1"; do
    status=0
    # shellcheck disable=SC2086
    "$program" --model "$MODEL" $wrong >"$tmp/out" 2>"$tmp/err" || status=$?
    [ $status = 2 ] && [ -s "$tmp/err" ] && [ ! -s "$tmp/out" ] || fail "$wrong: status $status"
done
status=0
"$program" --model "$tmp" >"$tmp/out" 2>"$tmp/err" || status=$?
[ $status = 2 ] && [ -s "$tmp/err" ] || fail "a folder without a model: status $status"
grep -h 'exact\|compared' "$tmp/grid"
