/* cases_process.c: what ranks that are processes do, whatever connects them. */
#include <pthread.h>
#include <stdlib.h>
#include "cases.h"

/* Several rounds of the data exchange, the last one odd. */
enum { LARGE = 9 * 1024 * 1024 + 5 };

static unsigned char large_byte(int32_t from, int32_t to, size_t i)
{
    return (unsigned char)(i * 7 + i / 4096 + (size_t)from * 31 + (size_t)to * 101);
}

static bool large_holds(const unsigned char *p, int32_t from, int32_t to)
{
    for (size_t i = 0; i < LARGE; i++) {
        if (p[i] != large_byte(from, to, i)) {
            return false;
        }
    }
    return true;
}

void case_large(rank_job *job)
{
    const size_t n = (size_t)job->n;
    unsigned char *a = malloc(LARGE * n);
    unsigned char *b = malloc(LARGE * n);
    for (int32_t to = 0; to < job->n; to++) {
        for (size_t i = 0; i < LARGE; i++) {
            a[(size_t)to * LARGE + i] = large_byte(job->rank, to, i);
        }
    }
    EXPECT_OK(job, comm_all_to_all(job->c, a, b, LARGE, &job->err));
    for (int32_t from = 0; from < job->n; from++) {
        EXPECT(job, large_holds(b + (size_t)from * LARGE, from, job->rank));
    }
    EXPECT_OK(job, comm_all_gather(job->c, a, b, LARGE, &job->err));
    for (int32_t from = 0; from < job->n; from++) {
        EXPECT(job, large_holds(b + (size_t)from * LARGE, from, 0));
    }
    EXPECT_OK(job, comm_broadcast(job->c, a, LARGE, job->n - 1, &job->err));
    EXPECT(job, large_holds(a, job->n - 1, 0));
    float *f = (float *)(void *)a;
    const size_t m = (LARGE - 5) / 4 - 1;
    for (size_t i = 0; i < m; i++) {
        f[i] = (float)((i & 1023) << job->rank);
    }
    EXPECT_OK(job, comm_all_reduce(job->c, f, m, &job->err));
    bool exact = true;
    for (size_t i = 0; i < m; i++) {
        exact = exact && f[i] == (float)((i & 1023) * ((1U << job->n) - 1));
    }
    EXPECT(job, exact);
    free(a);
    free(b);
}

void case_slow(rank_job *job)
{
    const comm_fault f = {.kind = COMM_FAULT_DELAY, .call = 1, .ms = 20 * (job->n - job->rank)};
    EXPECT(job, comm_fault_wrap(job->c, &f, &job->err) != NULL);
    for (int32_t op = 0; op < COMM_N_OP; op++) {
        EXPECT_OK(job, case_call(job->c, op, &job->err));
    }
}

void case_unchecked(rank_job *job)
{
    unsigned char a[64 * RANKS_MAX] = {0};
    unsigned char b[64 * RANKS_MAX];
    EXPECT(job, (job->rank == 1 ? comm_all_to_all(job->c, a, b, 64, &job->err)
                                : comm_all_gather(job->c, a, b, 64, &job->err)) == KVS_OK);
    EXPECT_FAIL(job, comm_all_gather(job->c, a, b, job->rank == 1 ? 32 : 64, &job->err), KVS_PEER,
                "in all_gather");
    EXPECT(job, rank_says(job, "rank 1"));
}

void case_leaving(rank_job *job)
{
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
    if (job->rank == 1) {
        return;
    }
    EXPECT_FAIL(job, comm_all_reduce(job->c, NULL, 0, &job->err), KVS_PEER,
                "rank 1 has closed its end");
    case_ended(job, "rank 1 has closed its end");
}

static void *abort_main(void *arg)
{
    sleep_ms(30);
    comm_abort(arg, "client gone");
    return NULL;
}

/* All wait for rank 0, which does not come; another thread of rank 1 ends the group. */
void case_aborted(rank_job *job)
{
    comm *pair = NULL;
    EXPECT_OK(job, comm_split(job->c, job->rank / 2, 0, &pair, &job->err));
    pthread_t t;
    if (job->rank == 1) {
        EXPECT(job, pthread_create(&t, NULL, abort_main, pair) == 0);
    }
    const comm_fault f = {.kind = COMM_FAULT_STALL, .call = 2, .ms = LONG_MS};
    if (job->rank == 0) {
        EXPECT(job, comm_fault_wrap(job->c, &f, &job->err) != NULL);
    }
    EXPECT_FAIL(job, comm_barrier(job->c, &job->err), KVS_PEER, "ended the group: client gone");
    if (job->rank == 1) {
        pthread_join(t, NULL);
    }
    EXPECT_FAIL(job, comm_barrier(pair, &job->err), KVS_PEER, "ended the group: client gone");
    case_ended(job, "client gone");
    comm_close(pair);
}

void case_handshake(rank_job *job)
{
    comm_field f[2] = {{"page", "64"}, {"model", "7f"}};
    EXPECT_OK(job, comm_handshake(job->c, f, 2, &job->err));
    if (job->rank == 1) {
        f[1].value = "80";
    }
    EXPECT_FAIL(job, comm_handshake(job->c, f, 2, &job->err), KVS_INVALID,
                "handshake: model is \"7f\" on rank 0 and \"80\" on rank 1");
    EXPECT_FAIL(job, comm_agree(job->c, job->rank == 1 ? KVS_NOMEM : KVS_OK, NULL), KVS_NOMEM, "");
    EXPECT_OK(job, comm_barrier(job->c, &job->err));
}
