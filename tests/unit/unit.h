/* unit.h: what every unit test needs before cmocka.h, and the count of a table. */
#ifndef UNIT_H
#define UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define UNIT_COUNT(table) (sizeof(table) / sizeof *(table))

/* 1 under sanitizers of memory or threads, and under the one of threads: a test that is long there takes the cases
 * that these can say something about. */
#ifdef __SANITIZE_THREAD__
enum { UNIT_TSAN = 1, UNIT_SANITIZED = 1 };
#elif defined(__SANITIZE_ADDRESS__)
enum { UNIT_TSAN = 0, UNIT_SANITIZED = 1 };
#else
enum { UNIT_TSAN = 0, UNIT_SANITIZED = 0 };
#endif

/* Whether valgrind runs the test (tools/valgrind.sh says so): some thirty times slower, on a processor of its own. */
static inline bool unit_valgrind(void)
{
    return getenv("KVS_VALGRIND") != NULL;
}

#endif
