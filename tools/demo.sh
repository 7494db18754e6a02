#!/bin/bash
# demo.sh BUILD [TOKENS [DCP]]: hides a fact in the middle of a long text, asks models/needle for it over DCP
# ranks with speculation, and says what the selection attended. The status is 0 when the answer is right.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
build=$1 tokens=${2:-32768} dcp=${3:-4}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

"$build"/tests/needle/needle_prompt --text models/needle/text.txt --tokens "$tokens" --depth 50 --seed 7 \
    --distractors 60 >"$tmp/prompt" 2>"$tmp/fact" || {
    cat "$tmp/fact" >&2
    echo "make run TOKENS=$tokens: a text of that length cannot be made; use 2048 or more, 8192 for a short one" >&2
    exit 1
}
read -r _ code _ name _ at _ bytes _ _ _ facts <"$tmp/fact"
cat <<END

A text of about $tokens tokens holds $facts passcodes. One of them, $((100 * at / bytes)) % into it, is
    The passcode for $name is $code.
and the text ends with
    What is the passcode for $name? Answer:

kvspan run -m models/needle -f PROMPT -n 12 --dcp $dcp --mtp 3 --chunk 1024 --stats
END
"$build"/kvspan run -m models/needle -f "$tmp/prompt" -n 12 --stop $'\n' --dcp "$dcp" --mtp 3 --chunk 1024 \
    --stats --locate "The passcode for $name is $code" --json "$tmp/answer" # not piped: notes come behind the text
if ! grep -q "^  \"text\": .*$code" "$tmp/answer"; then
    echo "The answer is wrong: it should be $code." >&2
    exit 1
fi
echo
echo "That is right."
