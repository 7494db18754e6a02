#!/bin/bash
# mutate.sh [LIST...]: breaks the code on purpose, one way at a time, and demands that a test sees it.
# Lists are tests/mutations/*.txt, all of them by default; each line is
#     FILE :: SED EXPRESSION :: TEST [:: ENV=VALUE ...]
# and means: after that edit of FILE the program test_TEST, built with the address sanitizer, must
# fail (or run longer than 120 s). A mutation that changes nothing, does not compile or survives is reported, and the script ends with
# 1. Works on a copy of the tree in build/mutate; takes seconds per line. An expression must not
# contain " :: ".
set -uo pipefail
cd "$(dirname "$0")/.."
root=$(pwd)
copy=$root/build/mutate/tree out=$root/build/mutate/out
[ $# -gt 0 ] || set -- tests/mutations/*.txt
mkdir -p "$copy"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -u -p -t "$copy"
cmake -S "$copy" -B "$out" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DKVS_SANITIZE=address \
    >"$root/build/mutate/cmake.log" ||
    exit 1

trim() {
    local s=$1
    s=${s#"${s%%[![:space:]]*}"}
    printf '%s' "${s%"${s##*[![:space:]]}"}"
}

killed=0 bad=0
report() { # LINE WHAT
    echo "$2: $1"
    bad=$((bad + 1))
}

one() { # LINE
    local line=$1 file sed test env program
    local bar=$'\x1f'
    IFS=$bar read -r file sed test env <<<"${line// :: /$bar}"
    file=$(trim "$file") sed=$(trim "$sed") test=$(trim "$test") env=$(trim "${env:-}")
    sed -E "$sed" "$root/$file" >"$copy/$file.new" || { report "$line" "BAD EXPRESSION"; return; }
    if cmp -s "$root/$file" "$copy/$file.new"; then
        rm "$copy/$file.new"
        report "$line" "CHANGES NOTHING"
        return
    fi
    mv "$copy/$file.new" "$copy/$file"
    if ! ninja -C "$out" "test_$test" >"$root/build/mutate/ninja.log" 2>&1; then
        report "$line" "DOES NOT BUILD"
    else
        program=$(find "$out/tests" -type f -name "test_$test" | head -n 1)
        # shellcheck disable=SC2086
        if env $env timeout 120 "$program" >"$root/build/mutate/run.log" 2>&1 9>&-; then
            report "$line" "SURVIVED"
        else
            killed=$((killed + 1))
        fi
    fi
    cp "$root/$file" "$copy/$file"
}

for list in "$@"; do
    while IFS= read -r line; do
        case $line in '' | '#'*) continue ;; esac
        one "$line"
    done <"$list"
done
echo "mutations: $killed seen, $bad not"
[ "$bad" = 0 ] && [ "$killed" -gt 0 ]
