#!/bin/bash
# mutate.sh [--check | --sample | PATTERN]: breaks the code on purpose, one way at a time, and demands
# that a test notices. PATTERN is a regular expression over "LIST: NAME (FILE)"; all entries without it.
# --check only reads the lists and sees that every edit still applies; --sample takes the entries that
# say `sample`. The last line is `N passed, N failed, N skipped`, of entries; the status is 0 when none
# failed.
#
# An entry of tests/mutations/*.txt is a name on a line of its own, the fault in the words of the field,
# and indented fields under it:
#     file PATH        what is edited
#     - TEXT           what stands there, exactly once; several lines are one text with line ends
#     + TEXT           what takes its place; none: nothing
#     fails TEST...    the ctests of which each must fail, or run far longer than it did before
#     breaks TARGET    instead of fails: the target must not compile
#     env NAME=VALUE   the tests run with it
#     sanitize         the tests are built with the address sanitizer
#     needs MACHINE    skipped where uname -m says otherwise
#     sample           one of the few that are replayed with the other tests
# Lines that begin with # and empty lines are skipped.
#
# The work is done in a copy of the tree, in build/mutate; nothing of the tree itself changes. Every test
# is run once without a mutation first. MUTATE_LISTS replaces the lists, MUTATE_DIR the folder, JOBS=2 is
# how many compilers run at a time.
set -uo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 2
root=$PWD
work=${MUTATE_DIR:-$root/build/mutate}
tree=$work/tree
log=$work/last.log
jobs=${JOBS:-2}
mode=${1:-}
lists=${MUTATE_LISTS:-$(ls tests/mutations/*.txt | grep -v CMakeLists)}

name=() list=() file=() old=() new=() n_old=() fails=() breaks=() needs=() env=() sanitize=()
sample=()
n=0 passed=0 failed=0 skipped=0
in_place='' # the file of the copy that is mutated now

die() { # MESSAGE
    echo "mutate: $1" >&2
    exit 2
}

read_list() { # FILE
    local line at=0 i=-1 n_new=0
    while IFS= read -r line || [ -n "$line" ]; do
        at=$((at + 1))
        if [ "$i" -lt 0 ] && [ "${line:0:2}" = '  ' ]; then
            die "$1:$at: a field before the first name"
        fi
        case $line in
        '' | '#'*) ;;
        '  file '*) file[i]=${line#  file } ;;
        '  -' | '  - '*)
            if [ "${n_old[i]}" -gt 0 ]; then old[i]+=$'\n'; fi
            old[i]+=${line:4}
            n_old[i]=$((n_old[i] + 1))
            ;;
        '  +' | '  + '*)
            if [ "$n_new" -gt 0 ]; then new[i]+=$'\n'; fi
            new[i]+=${line:4}
            n_new=$((n_new + 1))
            ;;
        '  fails '*) fails[i]=${line#  fails } ;;
        '  breaks '*) breaks[i]=${line#  breaks } ;;
        '  env '*) env[i]=${line#  env } ;;
        '  needs '*) needs[i]=${line#  needs } ;;
        '  sanitize') sanitize[i]=1 ;;
        '  sample') sample[i]=1 ;;
        ' '*) die "$1:$at: \"$line\" is no field" ;;
        *)
            i=$n n=$((n + 1)) n_new=0
            name[i]=$line list[i]=$(basename "$1" .txt) file[i]='' old[i]='' new[i]='' n_old[i]=0
            fails[i]='' breaks[i]='' needs[i]='' env[i]='' sanitize[i]='' sample[i]=''
            ;;
        esac
    done <"$1"
}

# Sets $original and $mutated to the file's text without and with the edit of entry I, or $why where
# that cannot be.
edit() { # I FOLDER
    local rest times
    why='' original='' mutated=''
    if [ -z "${file[$1]}" ] || [ -z "${old[$1]}" ] || [ "${old[$1]}" = "${new[$1]}" ]; then
        why='needs a file, a text and another text in its place'
    elif [ -z "${fails[$1]}${breaks[$1]}" ]; then
        why='says neither what fails nor what does not compile'
    elif [ ! -f "$2/${file[$1]}" ]; then
        why="${file[$1]} does not exist"
    else
        original=$(cat "$2/${file[$1]}" && printf x)
        original=${original%x}
        rest=${original//"${old[$1]}"/}
        times=$(((${#original} - ${#rest}) / ${#old[$1]}))
        if [ "$times" != 1 ]; then
            why="the text stands $times times in ${file[$1]}"
        else
            mutated=${original/"${old[$1]}"/"${new[$1]}"}
        fi
    fi
    [ -z "$why" ]
}

say() { # VERDICT I [MORE]
    printf '%-9s %s: %s (%s)%s\n' "$1" "${list[$2]}" "${name[$2]}" "${file[$2]}" "${3:+: $3}"
}

# ---- reading the lists alone -----------------------------------------------------------------------

check_lists() {
    local i t known
    known=" $(grep -rhoE '(kvs_test\(|add_test\(NAME )[a-z0-9_]+' tests --include=CMakeLists.txt |
        sed -E 's/.*[( ]//' | tr '\n' ' ')"
    for ((i = 0; i < n; i++)); do
        if ! edit "$i" "$root"; then
            say FAILED "$i" "$why"
            failed=$((failed + 1))
            continue
        fi
        for t in ${fails[$i]}; do
            case $known in
            *" $t "*) ;;
            *) why="there is no test $t" ;;
            esac
        done
        if [ -n "$why" ]; then
            say FAILED "$i" "$why"
            failed=$((failed + 1))
        else
            passed=$((passed + 1))
        fi
    done
}

# ---- replaying -------------------------------------------------------------------------------------

# Makes the copy what the tree is now. A file whose content is right keeps its time, which may be later
# than that of what was built of it when it was mutated.
copy_tree() {
    local f
    mkdir -p "$tree"
    git ls-files -z --cached --others --exclude-standard >"$work/files" || die 'this is no git tree'
    while IFS= read -r -d '' f; do
        if [ -f "$f" ] && ! cmp -s "$f" "$tree/$f"; then
            mkdir -p "$tree/$(dirname "$f")"
            cp "$f" "$tree/$f" || die "$f cannot be copied"
        fi
    done <"$work/files"
    (cd "$tree" && find . -type f -printf '%P\0') | while IFS= read -r -d '' f; do
        [ -f "$root/$f" ] || rm "$tree/$f"
    done
}

restore() {
    if [ -n "$in_place" ]; then
        printf '%s' "$original" >"$tree/$in_place"
        in_place=''
    fi
}

declare -A command environment inverse seconds built
configure() { # OUT SANITIZER: once
    local out=$work/$1
    if [ -n "${built[$1]:-}" ]; then
        return 0
    fi
    cmake -S "$tree" -B "$out" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DKVS_SANITIZE="$2" >"$log" 2>&1 ||
        { tail -n 20 "$log"; die 'cmake failed'; }
    built[$1]=1
}

build() { # OUT TARGET...
    local out=$1
    shift
    ninja -C "$work/$out" -j "$jobs" "$@" >"$log" 2>&1
}

targets_of() { # OUT TEST: the programs that the test runs
    local word
    for word in ${command[$1/$2]}; do
        case $word in
        "$work/$1/kvspan") echo kvspan_program ;;
        "$work/$1"/*) basename "$word" ;;
        esac
    done
}

# Whether a test passes. What is expected to fail, passes when it does.
run_test() { # OUT TEST ENV LIMIT
    (cd "$work" && timeout -k 5 "$4" env ${environment[$1/$2]} $3 ${command[$1/$2]} >"$log" 2>&1) 2>/dev/null
    if [ $? = 0 ]; then
        [ -z "${inverse[$1/$2]}" ]
    else
        [ -n "${inverse[$1/$2]}" ]
    fi
}

# Finds the command of a test, builds it and sees that it passes; sets $why where it does not.
baseline() { # OUT TEST ENV: once
    local line start
    why=''
    if [ -n "${seconds[$1/$2/$3]:-}" ]; then
        return 0
    fi
    inverse[$1/$2]=$(grep -rhF "set_tests_properties([=[$2]=] " "$work/$1" \
        --include=CTestTestfile.cmake | grep -o 'WILL_FAIL "TRUE"')
    environment[$1/$2]=$(grep -rhF "set_tests_properties([=[$2]=] " "$work/$1" \
        --include=CTestTestfile.cmake | sed -n 's/.* ENVIRONMENT "\([^"]*\)".*/\1/p' | tr ';' ' ')
    line=$(grep -rhF "add_test([=[$2]=] " "$work/$1" --include=CTestTestfile.cmake | head -n 1)
    line=${line#*]=] }
    line=${line%)}
    command[$1/$2]=${line//\"/}
    if [ -z "$line" ]; then
        why="there is no test $2"
    elif ! build "$1" $(targets_of "$1" "$2"); then
        why="$2 does not build without the mutation"
    else
        start=$SECONDS
        if run_test "$1" "$2" "$3" 900; then
            seconds[$1/$2/$3]=$((SECONDS - start))
        else
            why="$2 fails without the mutation"
        fi
    fi
    [ -z "$why" ]
}

# Whether every test of entry I fails with the mutation in the copy; sets $why where one does not.
notices() { # I OUT
    local t
    why=''
    if [ -n "${breaks[$1]}" ]; then
        if build "$2" "${breaks[$1]}"; then why="${breaks[$1]} compiles"; fi
        return
    fi
    for t in ${fails[$1]}; do
        if ! build "$2" $(targets_of "$2" "$t"); then
            why="$t does not build"
        elif run_test "$2" "$t" "${env[$1]}" $((4 * ${seconds[$2/$t/${env[$1]}]} + 20)); then
            why="$t passes"
        fi
        if [ -n "$why" ]; then return; fi
    done
}

replay() { # I
    local i=$1 out=plain t
    if [ -n "${needs[$i]}" ] && [ "${needs[$i]}" != "$(uname -m)" ]; then
        say skipped "$i" "for ${needs[$i]}"
        skipped=$((skipped + 1))
        return
    fi
    if [ -n "${sanitize[$i]}" ]; then
        out=asan
        configure asan address
    else
        configure plain ''
    fi
    if edit "$i" "$tree"; then
        if [ -n "${breaks[$i]}" ]; then
            build "$out" "${breaks[$i]}" || why="${breaks[$i]} does not compile without the mutation"
        fi
        for t in ${fails[$i]}; do
            baseline "$out" "$t" "${env[$i]}" || break
        done
    fi
    if [ -z "$why" ]; then
        in_place=${file[$i]}
        printf '%s' "$mutated" >"$tree/$in_place"
        notices "$i" "$out"
        restore
    fi
    if [ -n "$why" ]; then
        say FAILED "$i" "$why"
        failed=$((failed + 1))
    else
        say noticed "$i"
        passed=$((passed + 1))
    fi
}

for l in $lists; do
    [ -f "$l" ] || die "no list $l"
    read_list "$l"
done
if [ "$mode" = --check ]; then
    check_lists
else
    copy_tree
    trap restore EXIT
    trap 'exit 130' INT TERM
    for ((k = 0; k < n; k++)); do
        if [ "$mode" = --sample ]; then
            [ -n "${sample[$k]}" ] || continue
        elif [ -n "$mode" ]; then
            [[ "${list[$k]}: ${name[$k]} (${file[$k]})" =~ $mode ]] || continue
        fi
        replay "$k"
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ $((passed + skipped)) -gt 0 ]
