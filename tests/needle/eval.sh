#!/bin/bash
# eval.sh [grid] [control] [SETTING...]: asks models/needle for facts in long texts. Without any: grid and control.
#
#   grid     needle_eval: texts of 1k, 8k and 32k tokens, DCP 1, 4 and 8 at TP 8, and of 128k tokens, DCP 8 at TP 8, and
#            DCP 1 and 4 at that TP at three depths. Each text holds eleven facts, at depths 0 to 100 %; the one at 100 %
#            ends right before the question. Answers, accepted drafts and digests must not depend on DCP.
#   control  the same at 1k and 8k with every selection replaced by the last positions, 900 bytes of text behind the
#            last fact: every answer must be wrong.
#   SETTING  LENGTH:DEPTHS:OPTIONS, for example '8192:0,50,100:--dcp 4 --mtp 3': kvspan run, a text of its own for each
#            depth. EXPECT=none turns the demand round: every answer must be wrong (for --selection-last).
#
# An answer is exact when it begins with the fact's six digits. Prints a line an answer and a summary a setting;
# the last line is `N passed, N failed, N skipped`, of questions. The environment may say where things are: KVSPAN,
# NEEDLE_PROMPT, NEEDLE_EVAL (programs), MODEL (folder); CORES (default: all) limits what the grid runs at once, JOBS
# (default 1) the SETTINGs' questions; SEED (default 1); LENGTHS of the grid; MTP (default 3) drafts of the grid; LOG:
# a file that the output is appended to.
set -uo pipefail
export LC_ALL=C
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/release
kvspan=${KVSPAN:-$build/kvspan}
prompt=${NEEDLE_PROMPT:-$build/tests/needle/needle_prompt}
program=${NEEDLE_EVAL:-$build/tests/needle/needle_eval}
model=${MODEL:-$root/models/needle}
jobs=${JOBS:-1} seed=${SEED:-1} expect=${EXPECT:-exact} cores=${CORES:-$(nproc)} mtp=${MTP:-3}
lengths=${LENGTHS:-131072 32768 8192 1024}
passed=0 failed=0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
[ -z "${LOG:-}" ] || exec > >(tee -a "$LOG")

finish() { # waits for all that runs, not for what LOG starts
    local p
    for p in $(jobs -rp); do wait "$p"; done
}

need() { # PROGRAM
    [ -x "$1" ] || { echo "eval: no program $1: build first"; exit 2; }
}

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

single() { # SETTING
    local length depths options depth f right=0 i=0 files=()
    IFS=: read -r length depths options <<<"$1"
    echo "== about $length tokens, $options"
    for depth in ${depths//,/ }; do
        i=$((i + 1))
        files+=("$tmp/q$i")
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
        ask "$length" "$depth" "$options" "$tmp/q$i" &
    done
    finish
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
}

# Texts at once: each takes as many cores as it has threads from a pipe that holds one byte a core, and gives them back.
pool() {
    rm -f "$tmp/pool"
    mkfifo "$tmp/pool"
    exec 9<>"$tmp/pool"
    head -c "$cores" /dev/zero | tr '\0' x >&9
}

haystack() { # NAME LENGTH TP DCP THREADS OPTIONS...: JSON lines go to $tmp/NAME.jsonl
    local name=$1 length=$2 tp=$3 dcp=$4 threads=$5 facts=60 n
    shift 5
    [ "$length" -ge 4096 ] || facts=12
    n=$((tp * threads < cores ? tp * threads : cores))
    head -c $n <&9 >/dev/null
    {
        "$program" --model "$model" --tokens "$length" --seed "$seed" --distractors $facts --tp "$tp" --dcp "$dcp" \
            --threads "$threads" --mtp "$mtp" "$@" >"$tmp/$name.jsonl" 2>"$tmp/$name.err"
        echo $? >"$tmp/$name.rc"
        head -c $n /dev/zero | tr '\0' x >&9
        cat "$tmp/$name.jsonl" "$tmp/$name.err"
    } &
}

# Counts the answers of the files against what is expected: all of N, or none of N.
count() { # all|none N FILE...
    local demand=$1 n=$2 right asked
    shift 2
    asked=$(cat "$@" | grep -c '"depth"')
    right=$(cat "$@" | grep -c '"ok": true')
    if [ "$demand" = all ]; then
        passed=$((passed + right)) failed=$((failed + n - right))
    else
        passed=$((passed + asked - right)) failed=$((failed + n - asked + right))
    fi
}

# Lines of one text, TP and depth must agree in all but the DCP size; other TP sizes are compared in what they say.
same() { # FILE...
    cat "$@" | grep '"depth"' | awk '
        function value(key) { return match($0, "\"" key "\": [^,}]*") ? substr($0, RSTART, RLENGTH) : "" }
        function list(key) { return match($0, "\"" key "\": \\[[^]]*\\]") ? substr($0, RSTART, RLENGTH) : "" }
        {
            text = value("length") " " value("seed") " " value("depth")
            said = value("got") " " list("drafts") " " list("accepted")
            exact = said " " value("logits_digest")
            key = text " " value("tp")
            if (key in kept && kept[key] != exact) { print "   differs between DCP sizes: " $0; bad++ }
            if (text in talk && talk[text] != said) { print "   differs between TP sizes: " $0; other++ }
            if (key in kept) compared++
            kept[key] = exact; talk[text] = said
        }
        END {
            print "   " compared + 0 " answers compared with another DCP size: " bad + 0 " differ in text, drafts or digest"
            if (other) print "   " other " differ in text or drafts from another TP size"
            exit bad > 0
        }'
}

accepted() { # FILE...: drafts and accepted ones by position, all answers of a DCP size together
    cat "$@" | grep '"summary"' | awk -F'[][]' '
        { match($0, "\"dcp\": [0-9]+"); d = substr($0, RSTART + 7, RLENGTH - 7)
          n = split($2, a, ", "); split($4, b, ", ")
          for (i = 1; i <= n; i++) { drafted[d, i] += a[i]; taken[d, i] += b[i] }
          seen[d] = n }
        END { for (d in seen) { line = "   dcp " d ": drafts accepted by position"
              for (i = 1; i <= seen[d]; i++) line = line sprintf(" %d/%d", taken[d, i], drafted[d, i])
              print line } }' | sort
}

grid() {
    local length dcp files=() n=0
    need "$program"
    echo "== grid: $lengths tokens, $cores cores, seed $seed, $mtp drafts"
    pool
    for length in $lengths; do
        for dcp in 8 1 4; do
            if [ "$length" -gt 65536 ] && [ $dcp != 8 ]; then
                haystack "g$length.$dcp" "$length" $dcp $dcp $((4 / dcp)) --depths 0,50,100
                n=$((n + 3))
            else
                haystack "g$length.$dcp" "$length" 8 $dcp 1
                n=$((n + 11))
            fi
            files+=("$tmp/g$length.$dcp.jsonl")
        done
    done
    finish
    count all $n "${files[@]}"
    echo "   exact: $(cat "${files[@]}" | grep -c '"ok": true') of $n"
    same "${files[@]}" || failed=$((failed + 1))
    accepted "${files[@]}"
}

control() {
    local length files=()
    need "$program"
    echo "== control: every selection is the last positions"
    pool
    for length in 1024 8192; do
        haystack "c$length" "$length" 1 1 4 --selection-last 1 --tail 900
        files+=("$tmp/c$length.jsonl")
    done
    finish
    count none 22 "${files[@]}"
    echo "   exact: $(cat "${files[@]}" | grep -c '"ok": true') of 22"
}

[ $# != 0 ] || set -- grid control
for what; do
    case $what in
    grid) grid ;;
    control) control ;;
    *)
        need "$kvspan"
        need "$prompt"
        single "$what"
        ;;
    esac
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
