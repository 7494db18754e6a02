#!/bin/bash
# sample.sh FOLDER: replays the sample of the mutations, then lists that must not pass.
set -euo pipefail
cd "$(dirname "$0")/../.."
export MUTATE_DIR=$1
list=$1/planted.txt
mkdir -p "$1"

# Runs over the list on standard input and demands the result and a part of what is said.
must_say() { # STATUS WORDS ARGUMENT...
    local want=$1 words=$2 status=0 said
    shift 2
    cat >"$list"
    said=$(MUTATE_LISTS=$list tools/mutate.sh "$@" 2>&1) || status=$?
    if [ "$status" != "$want" ] || [[ $said != *"$words"* ]]; then
        echo "sample: status $status, not $want with \"$words\": $said"
        exit 1
    fi
}

tools/mutate.sh --sample

must_say 1 '0 passed, 1 failed, 0 skipped' <<'LIST'
a comment says the same in other words
  file src/shard/shard.h
  - /* The rank that stores position p. */
  + /* The rank at which position p is stored. */
  fails shard
LIST
must_say 1 'kvs_shard compiles' <<'LIST'
what compiles is said not to
  file src/shard/shard.h
  - /* The rank that stores position p. */
  + /* The rank at which position p is stored. */
  breaks kvs_shard
LIST
must_say 1 'the text stands 0 times' --check <<'LIST'
an edit of a text that has gone
  file src/shard/shard.h
  - no such text
  + any
  fails shard
LIST
must_say 1 'the text stands 3 times' --check <<'LIST'
an edit of a text that is there three times
  file src/shard/shard.h
  - typedef struct kvs_
  + typedef union kvs_
  fails shard
LIST
must_say 1 'there is no test no_such_test' --check <<'LIST'
a test that has gone
  file src/shard/shard.h
  - /* The rank that stores position p. */
  + /* any */
  fails no_such_test
LIST
must_say 2 'is no field' --check <<'LIST'
a field that is none
  files src/shard/shard.h
LIST
echo 'sample: ok'
