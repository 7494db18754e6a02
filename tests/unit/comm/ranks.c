#include "ranks.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

void rank_note(rank_job *job, const char *file, int line, const char *fmt, ...)
{
    if (job->note[0] != '\0') {
        return;
    }
    const int n = snprintf(job->note, sizeof job->note, "rank %d of %d, %s:%d: ", job->rank, job->n,
                           file, line);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(job->note + n, sizeof job->note - (size_t)n, fmt, ap);
    va_end(ap);
}

bool rank_says(const rank_job *job, const char *text)
{
    return strstr(job->err.text, text) != NULL;
}

void sleep_ms(int ms)
{
    const struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

typedef struct start {
    rank_job job;
    rank_fn fn;
} start;

static void *thread_main(void *arg)
{
    start *s = arg;
    s->fn(&s->job);
    comm_close(s->job.c);
    s->job.c = NULL;
    return NULL;
}

void ranks_collect(comm **ends, int32_t n, rank_fn fn, void *ctx, char *note)
{
    start starts[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    note[0] = '\0';
    for (int32_t r = 0; r < n; r++) {
        starts[r] = (start){.job = {.c = ends[r], .rank = r, .n = n, .ctx = ctx}, .fn = fn};
        if (pthread_create(&threads[r], NULL, thread_main, &starts[r]) != 0) {
            abort(); /* the threads so far wait for ever */
        }
    }
    for (int32_t r = 0; r < n; r++) {
        pthread_join(threads[r], NULL);
    }
    for (int32_t r = 0; r < n; r++) {
        comm_close(starts[r].job.c); /* of a thread that ended inside a call */
        if (note[0] == '\0') {
            memcpy(note, starts[r].job.note, NOTE);
        }
    }
}

void ranks_run_on(comm **ends, int32_t n, rank_fn fn, void *ctx)
{
    char note[NOTE];
    assert_in_range(n, 1, RANKS_MAX);
    ranks_collect(ends, n, fn, ctx, note);
    if (note[0] != '\0') {
        fail_msg("%s", note);
    }
}

void ranks_run(int32_t n, const comm_config *cfg, rank_fn fn, void *ctx)
{
    comm *ends[RANKS_MAX] = {NULL};
    kvs_error err = {0};
    assert_in_range(n, 1, RANKS_MAX);
    if (comm_thread_open(ends, n, cfg, &err) != KVS_OK) {
        fail_msg("%s", err.text);
    }
    ranks_run_on(ends, n, fn, ctx);
}
