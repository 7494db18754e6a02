#!/bin/bash
# needle_answers.sh KVSPAN NEEDLE_PROMPT ROOT: the small model finds facts in texts it has not seen, with the
# same logits and the same accepted drafts for every DCP size, and finds none when the selection is
# replaced by the last positions.
set -euo pipefail
export LC_ALL=C KVSPAN=$1 NEEDLE_PROMPT=$2 MODEL=$3/models/needle
eval_sh=$3/tests/needle/eval.sh
fail() {
    echo "needle_answers: $*"
    exit 1
}
# What must not depend on the DCP size: depth, answer, drafts, digest.
kept() { sed -nE 's/^ *[0-9]+ +([0-9]+)%  (yes|no) .*(got [0-9]*).*(drafts .*)$/\1 \2 \3 \4/p'; }

one=$("$eval_sh" '1024:0,100:--tp 4 --dcp 1 --mtp 3') || fail "$one"
four=$("$eval_sh" '1024:0,100:--tp 4 --dcp 4 --mtp 3') || fail "$four"
[ "$(kept <<<"$one" | wc -l)" = 2 ] || fail "no two answers in: $one"
[ "$(kept <<<"$one")" = "$(kept <<<"$four")" ] || fail "DCP 1 and 4 differ: $one
$four"
long=$("$eval_sh" '8192:50:--mtp 3') || fail "$long"
control=$(EXPECT=none "$eval_sh" '1024:0,100:--selection-last') || fail "without selection: $control"
echo "$one
$four
$long
$control" | grep -E '%|exact'
