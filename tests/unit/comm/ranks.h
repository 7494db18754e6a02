/* ranks.h: runs a function on every rank of a thread group and collects what went wrong.
 *
 * cmocka's assertions may only run in the main thread, so a rank notes its first failure and
 * ranks_run's caller asserts that there is none. */
#ifndef TESTS_RANKS_H
#define TESTS_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "comm/comm.h"

enum { RANKS_MAX = 16, NOTE = 400 };

typedef struct rank_job {
    comm *c; /* closed by ranks_run unless the rank sets it to NULL */
    int32_t rank;
    int32_t n;
    void *ctx;
    kvs_error err;
    char note[NOTE]; /* the first failure; empty: fine */
} rank_job;

typedef void (*rank_fn)(rank_job *job);

/* Fails the test when a rank noted a failure. */
void ranks_run(int32_t n, const comm_config *cfg, rank_fn fn, void *ctx);

/* The same on ends that are open already; they are closed. */
void ranks_run_on(comm **ends, int32_t n, rank_fn fn, void *ctx);

/* The same from any thread: fills note [NOTE] instead of failing the test. */
void ranks_collect(comm **ends, int32_t n, rank_fn fn, void *ctx, char *note);

void rank_note(rank_job *job, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#define EXPECT(job, cond)                                                                          \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            rank_note((job), __FILE__, __LINE__, "%s", #cond);                                     \
        }                                                                                          \
    } while (0)

/* The call succeeds; else the note has the library's message. */
#define EXPECT_OK(job, call)                                                                       \
    do {                                                                                           \
        const kvs_status expect_st = (call);                                                       \
        if (expect_st != KVS_OK) {                                                                 \
            rank_note((job), __FILE__, __LINE__, "%s: %s", #call, (job)->err.text);                \
        }                                                                                          \
    } while (0)

/* The call returns `want` and its message holds `words`. */
#define EXPECT_FAIL(job, call, want, words)                                                        \
    do {                                                                                           \
        const kvs_status expect_st = (call);                                                       \
        if (expect_st != (want) || !rank_says((job), (words))) {                                   \
            rank_note((job), __FILE__, __LINE__, "%s gives %s \"%s\", not %s \"%s\"", #call,       \
                      kvs_status_name(expect_st), (job)->err.text, #want, (words));                \
        }                                                                                          \
    } while (0)

bool rank_says(const rank_job *job, const char *text);
void sleep_ms(int ms);

static inline comm_config test_config(int32_t timeout_ms)
{
    const comm_config cfg = {.timeout_ms = timeout_ms, .no_check = false};
    return cfg;
}

/* A time-out that no healthy run reaches, however slow the machine. */
enum { LONG_MS = 60000 };

#endif
