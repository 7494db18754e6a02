#!/bin/sh
# clash.sh CC BUILD SOURCE FLAGS: an application that defines names which the library uses
# inside links against both libraries and each side calls its own.
set -eu
cc=$1 build=$2 source=$3 flags=${4:-}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cat >"$tmp/app.c" <<'C'
#include <stdio.h>
#include <string.h>
#include "kvspan/option.h"

int n_call;
void *mem_alloc(size_t n, size_t align);
void *mem_alloc(size_t n, size_t align)
{
    (void)n;
    (void)align;
    n_call++;
    return NULL;
}
int err_set_at, pool_run, log_write;

int main(void)
{
    char *argv[] = {"check", "--quick", "word", NULL};
    kvs_options *o = NULL;
    kvs_error err;
    if (kvs_options_parse(&o, "check", 3, argv, &err) != KVS_OK) {
        printf("refused: %s\n", err.text);
        return 1;
    }
    const int quick = kvs_options_flag(o, "quick");
    kvs_options_free(o);
    if (quick != 1 || n_call != 0) {
        printf("quick %d, calls of the application's mem_alloc %d\n", quick, n_call);
        return 1;
    }
    return 0;
}
C
set -- -I"$source/include" -I"$build/gen/include" "$tmp/app.c"
# shellcheck disable=SC2086
"$cc" "$@" -o "$tmp/static" "$build/libkvspan.a" $flags
# shellcheck disable=SC2086
"$cc" "$@" -o "$tmp/shared" -L"$build" -lkvspan "-Wl,-rpath,$build" $flags
"$tmp/static"
"$tmp/shared"
