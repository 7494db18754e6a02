#!/bin/sh
# needle_prompt.sh PROGRAM ROOT: what the prompts hold is what the answer line says, names are held out.
set -eu
export LC_ALL=C
program=$1 root=$2
text=$root/models/needle/text.txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
fail() {
    echo "needle_prompt: $*"
    exit 1
}
make() { # FILE ARGUMENTS: the prompt in FILE, the answer line in FILE.answer
    out=$1
    shift
    "$program" --text "$text" "$@" >"$out" 2>"$out.answer" || fail "$* exits $?"
}
facts() { grep -oE 'The passcode for [A-Z][a-z]+ is [0-9]{6}\.' "$1"; }

before=-1
for depth in 0 10 50 90 100; do
    make "$tmp/p" --tokens 4096 --depth $depth --seed 7 --distractors 50
    read -r _ code _ name _ at _ bytes _ said _ count <"$tmp/p.answer"
    [ "$said" = $depth ] && [ "$count" = 51 ] || fail "answer line: $(cat "$tmp/p.answer")"
    [ "$(wc -c <"$tmp/p")" = "$bytes" ] || fail "the size is not $bytes"
    [ "$(tail -c +$((at + 1)) "$tmp/p" | head -c 6)" = "$code" ] || fail "no $code at byte $at"
    [ "$(facts "$tmp/p" | wc -l)" = 51 ] || fail "$(facts "$tmp/p" | wc -l) facts, not 51"
    [ "$(facts "$tmp/p" | awk '{print $4}' | sort -u | wc -l)" = 51 ] || fail "a name appears twice"
    [ "$(facts "$tmp/p" | grep -c "for $name is $code\.")" = 1 ] || fail "no fact of $name"
    [ "$(tail -n 1 "$tmp/p")" = "What is the passcode for $name? Answer:" ] || fail "no question for $name"
    [ $at -gt $before ] || fail "depth $depth is not behind the depth before"
    [ $((bytes - at)) -gt 900 ] || fail "depth $depth leaves no text before the question"
    [ $depth != 0 ] || [ $at -lt 2000 ] || fail "depth 0 is at byte $at"
    [ $depth != 50 ] || { [ $at -gt $((bytes * 4 / 10)) ] && [ $at -lt $((bytes * 6 / 10)) ]; } ||
        fail "depth 50 is at byte $at of $bytes"
    before=$at
done

make "$tmp/a" --tokens 32768 --seed 3 --distractors 200
make "$tmp/b" --tokens 32768 --seed 3 --distractors 200
make "$tmp/c" --tokens 32768 --seed 4 --distractors 200
cmp -s "$tmp/a" "$tmp/b" || fail "the same arguments give another text"
cmp -s "$tmp/a" "$tmp/c" && fail "another seed gives the same text"
size=$(wc -c <"$tmp/a")
[ "$size" -gt $((32768 * 3)) ] && [ "$size" -lt $((32768 * 9 / 2)) ] || fail "32768 tokens in $size bytes"

# The list in names.py spells every name in one way, and training left that one out.
{
    sed -n '/^SYLLABLES/,/split()/p' "$root/tools/needle/names.py" | grep -oE '\b[a-z]{2,3}\b'
    echo .
    facts "$tmp/a" | awk '{print tolower($4)}'
    facts "$tmp/c" | awk '{print tolower($4)}'
} >"$tmp/names"
awk '
    $1 == "." { listed = 1; next }
    !listed   { index_of[$1] = n++; next }
    {
        found = 0
        for (i = 2; i <= 3; i++)
            for (j = 2; j <= 3; j++) {
                a = substr($1, 1, i); b = substr($1, i + 1, j); c = substr($1, i + j + 1)
                if (a in index_of && b in index_of && c in index_of) {
                    found++
                    if ((7 * index_of[a] + 3 * index_of[b] + 5 * index_of[c]) % 8) bad = $1
                }
            }
        if (found != 1) bad = $1
        names++
    }
    END {
        if (n != 48 || names != 402 || bad) { print n " syllables, " names " names, bad: " bad; exit 1 }
    }' "$tmp/names" || fail "names"

for wrong in "--depth 101" "--depth x" "--tokens" "--distractors -1" "--nonsense 1" "--tokens 600 --distractors 60"; do
    status=0
    # shellcheck disable=SC2086
    "$program" --text "$text" $wrong >"$tmp/out" 2>"$tmp/err" || status=$?
    [ $status = 2 ] && [ -s "$tmp/err" ] && [ ! -s "$tmp/out" ] || fail "$wrong: status $status"
done
status=0
"$program" --text "$tmp/none" >"$tmp/out" 2>"$tmp/err" || status=$?
[ $status = 2 ] && grep -q "$tmp/none" "$tmp/err" || fail "a missing file: status $status"
echo "1 passed, 0 failed"
