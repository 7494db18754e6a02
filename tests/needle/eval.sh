#!/bin/bash
# eval.sh [SETTING...]: asks models/needle for facts in long texts, through kvspan run.
#
# A SETTING is LENGTH:DEPTHS:OPTIONS, for example '8192:0,50,100:--dcp 4 --mtp 3'; without any, the
# grid of 1k, 8k and 32k tokens at depths 0 to 100 with DCP 1, 4 and 8 at the same TP. An answer is
# exact when its first six digits are the fact's. Prints a line a question and a summary a setting.
#
# The environment may say where things are: KVSPAN, NEEDLE_PROMPT (programs), MODEL (folder); JOBS runs
# that many questions at once (default 1), SEED (default 1), EXPECT=none turns the demand round: every
# answer must be wrong (for --selection-last). The last line is `N passed, N failed, N skipped`, of questions.
set -uo pipefail
export LC_ALL=C
root=$(cd "$(dirname "$0")/../.." && pwd)
kvspan=${KVSPAN:-$root/build/release/kvspan}
prompt=${NEEDLE_PROMPT:-$root/build/release/tests/needle/needle_prompt}
model=${MODEL:-$root/models/needle}
jobs=${JOBS:-1} seed=${SEED:-1} expect=${EXPECT:-exact}
for program in "$kvspan" "$prompt"; do
    [ -x "$program" ] || { echo "eval: no program $program: build first"; exit 2; }
done
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# A number or a list of the JSON result.
field() { # FILE NAME
    sed -n "s/^ *\"$2\": \(.*[^,]\),\{0,1\}\$/\1/p" "$1" | head -n 1
}

ask() { # LENGTH DEPTH OPTIONS FILE: one question; its line goes to FILE.line, yes or no to FILE.exact
    local length=$1 depth=$2 options=$3 f=$4 facts=60 want got exact=no
    [ "$length" -ge 4096 ] || facts=12
    "$prompt" --text "$model/text.txt" --tokens "$length" --depth "$depth" --seed $((seed + depth)) \
        --distractors $facts >"$f" 2>"$f.answer" || { cat "$f.answer"; return 1; }
    want=$(awk '{print $2}' "$f.answer")
    # shellcheck disable=SC2086
    "$kvspan" run -m "$model" -f "$f" -n 8 $options --json "$f.json" >"$f.out" 2>"$f.err" || {
        echo "eval: $length tokens, depth $depth, $options: $(tail -n 1 "$f.err")"
        return 1
    }
    got=$(grep -oE '[0-9]' "$f.out" | head -n 6 | tr -d '\n')
    [ "$got" = "$want" ] && exact=yes
    echo "$exact" >"$f.exact"
    printf '%7d %4d%%  %-3s  want %s got %-6s  prefill %8.2f s %8.1f tok/s  drafts %-22s digest %s\n' \
        "$(field "$f.json" prompt_tokens)" "$depth" "$exact" "$want" "$got" \
        "$(field "$f.json" prefill_s)" "$(field "$f.json" prefill_tok_per_s)" \
        "$(field "$f.json" accept_by_position | tr -d ' ')" \
        "$(field "$f.json" logits_digest | tr -d '"')" >"$f.line"
}

if [ $# = 0 ]; then
    for length in 1024 8192 32768; do
        for dcp in 1 4 8; do
            set -- "$@" "$length:0,10,20,30,40,50,60,70,80,90,100:--tp 8 --dcp $dcp --mtp 3"
        done
    done
fi
passed=0 failed=0 i=0
for setting; do
    IFS=: read -r length depths options <<<"$setting"
    echo "== about $length tokens, $options"
    files=()
    for depth in ${depths//,/ }; do
        i=$((i + 1))
        files+=("$tmp/q$i")
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
        ask "$length" "$depth" "$options" "$tmp/q$i" &
    done
    wait
    right=0
    for f in "${files[@]}"; do
        cat "$f.line" 2>/dev/null
        exact=$(cat "$f.exact" 2>/dev/null || echo broken)
        [ "$exact" = yes ] && right=$((right + 1))
        if { [ "$expect" = exact ] && [ "$exact" = yes ]; } || { [ "$expect" = none ] && [ "$exact" = no ]; }; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
        fi
        rm -f "$f" "$f".*
    done
    echo "   exact: $right of ${#files[@]}"
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
